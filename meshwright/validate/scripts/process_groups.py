"""Process groups of any number of ranks, made when the script asks, whatever backend it names."""
# ruff: noqa: ANN401 - arguments of any call

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from meshwright.validate.counting import clear_sharding_cache, fake_store

MOST_NAMED = 4


class GroupNames:
    """Names process groups: by the dim of a mesh, else by their ranks.

    Args:
        world_size: Ranks of the run.
        known: Names that come first, by ranks.
    """

    def __init__(self, world_size: int, known: dict[tuple[int, ...], str]) -> None:
        self._world_size = world_size
        self._known = {tuple(sorted(ranks)): name for ranks, name in known.items()}
        self._dims: dict[tuple[int, ...], dict[str, None]] = {}

    def learn(self, mesh: DeviceMesh, rank: int) -> None:
        """Take the names of a mesh's dims for the groups along them that *rank* is in."""
        ranks = mesh.mesh
        where = (ranks == rank).nonzero().tolist()
        for index, dim in enumerate(mesh.mesh_dim_names or ()):
            if where and ranks.shape[index] > 1:
                own = ranks[
                    tuple(slice(None) if i == index else at for i, at in enumerate(where[0]))
                ]
                self._dims.setdefault(tuple(sorted(own.tolist())), {})[dim] = None

    def name(self, ranks: tuple[int, ...]) -> str:
        """Return the name of the group of *ranks*, which are in order.

        >>> names = GroupNames(16, {(0, 1): "tp"})
        >>> [names.name(each) for each in [(0, 1), (2, 3), (0, 4, 8, 12), tuple(range(16))]]
        ['tp', 'ranks 2, 3', 'ranks 0 to 12 by 4', 'world']
        """
        if ranks in self._known:
            return self._known[ranks]
        return "/".join(self._dims.get(ranks, ())) or self._describe(ranks)

    def _describe(self, ranks: tuple[int, ...]) -> str:
        if len(ranks) == self._world_size:
            return "world"
        strides = {after - before for before, after in pairwise(ranks)}
        if len(ranks) < MOST_NAMED or len(strides) > 1:
            shown = ", ".join(map(str, ranks[:MOST_NAMED]))
            return f"ranks {shown}" + (", ..." if len(ranks) > MOST_NAMED else "")
        by = "" if strides == {1} else f" by {strides.pop()}"
        return f"ranks {ranks[0]} to {ranks[-1]}{by}"


@contextmanager
def groups_on_demand(rank: int, world_size: int, names: GroupNames) -> Iterator[None]:
    """Let the code inside make process groups as *rank* of *world_size*; none communicates."""
    construct = distributed_c10d._new_process_group_helper  # noqa: SLF001 - where all are made
    start, make_mesh = dist.init_process_group, DeviceMesh.__init__

    def init_process_group(*_args: object, **_kwargs: object) -> None:
        start("fake", store=fake_store(), rank=rank, world_size=world_size)

    def helper(
        size: int, own: int, ranks: list[int], _backend: object, *args: Any, **kwargs: Any
    ) -> object:
        # They are of the backend that the script has named.
        kwargs.pop("backend_options", None)
        return construct(size, own, ranks, "fake", *args, **kwargs)

    def mesh(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        make_mesh(self, *args, **kwargs)
        names.learn(self, rank)

    with ExitStack() as stack:
        stack.enter_context(patch.object(DeviceMesh, "__init__", mesh))
        stack.enter_context(patch.object(dist, "is_nccl_available", lambda: True))
        for module in (dist, distributed_c10d, device_mesh):  # a mesh makes the first group itself
            stack.enter_context(patch.object(module, "init_process_group", init_process_group))
        for module in (dist, distributed_c10d):
            for name, answer in _OBJECTS.items():
                stack.enter_context(patch.object(module, name, answer))
            for name in ("barrier", "monitored_barrier"):
                stack.enter_context(patch.object(module, name, _nothing))
        stack.enter_context(patch.object(distributed_c10d, "_new_process_group_helper", helper))
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            clear_sharding_cache()


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Stand for communication that moves no data."""


def _own_for_all(objects: list[object], own: object, *_: object, **__: object) -> None:
    objects[:] = [own] * len(objects)


def _own_for_one(
    own: object, objects: list[object] | None = None, *_: object, **__: object
) -> None:
    if objects is not None:
        objects[:] = [own] * len(objects)


def _first_given(
    output: list[object], given: list[object] | None = None, *_: object, **__: object
) -> None:
    if given:
        output[0] = given[0]


# Objects that are not there: this rank's own stand for those of the others.
_OBJECTS = {
    "all_gather_object": _own_for_all,
    "gather_object": _own_for_one,
    "broadcast_object_list": _nothing,
    "scatter_object_list": _first_given,
}
