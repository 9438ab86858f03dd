"""Every private or testing-internal interface of PyTorch that counting needs, and nothing else.

Written for torch 2.9 to 2.13. What only some of these releases have is looked up when it is
needed; what must be there and is not raises an `UnsupportedTorchError` that names it.
"""
# ruff: noqa: SLF001 - private interfaces of torch are what this module is for

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import distributed as data_parallel
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from meshwright.validate.counting.finished_work import UnsupportedTorchError, finished_work
from meshwright.validate.counting.pipelines import pipeline_patches
from meshwright.validate.counting.shards import shard_patches

WAIT = torch.ops._c10d_functional.wait_tensor.default
FROM_VALUES = torch.ops.aten.lift_fresh.default  # hands out what torch.tensor(values) has made
_COMMUNICATION = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"}
_GROUP_ARGUMENTS = {"process_group", "group_name"}
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_GROUPED_PRODUCTS = {"_grouped_mm"}
# Operators of c10d that return a Work, alone or after their outputs.
_RETURN_WORK = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "broadcast_",
    "gather_",
    "recv_",
    "recv_any_source_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "send",
)
# Methods of DeviceMesh that compute on tensors of rank numbers in one release or another.
_MESH_METHODS = (
    "_compute_coordinate_on_dim",
    "_compute_coordinates_from_mesh",
    "_concatenate",
    "_create_flatten_mesh",
    "_create_sub_mesh",
    "_create_unflatten_mesh",
    "_flatten",
    "_get_all_submeshes",
    "_get_mesh_tensor_from_full_mesh",
    "_init_process_groups",
    "_unflatten",
    "from_group",
)


class Communication(NamedTuple):
    """A communication operator, and where in its arguments its group stands."""

    name: str
    group_position: int
    group_argument: str


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the plain local tensors in *value*: of a DTensor or an asynchronous result, its own.

    >>> [tuple(tensor.shape) for tensor in tensors_in((torch.ones(2), [torch.ones(3), None]))]
    [(2,), (3,)]
    """
    found: list[torch.Tensor] = []
    _collect_tensors(value, found)
    return found


def _collect_tensors(value: object, found: list[torch.Tensor]) -> None:
    # Arguments of operators are nested in lists, tuples and dicts alone: a general walk takes ten
    # times as long, for each operator that is counted.
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            for name in names:
                _collect_tensors(getattr(value, name), found)
        else:
            found.append(value)
    elif isinstance(value, list | tuple):
        for each in value:
            _collect_tensors(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect_tensors(each, found)


def is_wrapper(kind: type) -> bool:
    """Return True for types of tensors that wrap others (DTensor, asynchronous results)."""
    return hasattr(kind, "__tensor_flatten__")


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Return a number that no other storage has while this one lives."""
    return int(storage._cdata)


def current_fake_mode() -> FakeTensorMode | None:
    """Return the mode that makes tensors without data, if one is entered."""
    mode: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode


@functools.cache
def communication_of(operator: torch._ops.OpOverload) -> Communication | None:
    """Return the communication of *operator*; None if it has no process group.

    >>> communication_of(torch.ops.c10d.allreduce_.default)
    Communication(name='allreduce_', group_position=1, group_argument='process_group')
    >>> communication_of(torch.ops.aten.mm.default)
    """
    namespace, _, name = operator._schema.name.partition("::")
    if namespace not in _COMMUNICATION:
        return None
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name in _GROUP_ARGUMENTS:
            return Communication(name, position, argument.name)
    return None


def process_group_of(
    communication: Communication, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dist.ProcessGroup:
    """Return the process group that a call of a communication operator runs on."""
    if communication.group_position < len(args):
        group = args[communication.group_position]
    else:
        group = kwargs[communication.group_argument]
    if isinstance(group, dist.ProcessGroup):
        return group
    # Functional collectives name their group.
    if isinstance(group, str):
        resolve: Callable[[str], dist.ProcessGroup] = vars(distributed_c10d)[
            "_resolve_process_group"
        ]
        return resolve(group)
    return dist.ProcessGroup.unbox(group)


def flops_of(
    operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: object
) -> int:
    """Return the FLOPs that PyTorch's own formulas give one call, 0 where there is none.

    PyTorch has none for its attention on CPU. As for the other attention kernels it counts the
    full square: two products forward, and five backward, which computes the scores again. Nor has
    it one for grouped products: each row meets one of the matrices, padding counted as a row.

    >>> a, b = torch.ones(2, 3), torch.ones(3, 5)
    >>> flops_of(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    60
    """
    formula = flop_registry.get(operator._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    name = operator._schema.name.partition("::")[2]
    if name == _CPU_ATTENTION:
        return _attention_flops(args[:3])
    if name == f"{_CPU_ATTENTION}_backward":
        return _attention_flops(args[1:4]) * 5 // 2
    if name in _GROUPED_PRODUCTS:
        return 2 * args[0].numel() * int(args[1].shape[-1])
    return 0


def _attention_flops(tensors: Sequence[torch.Tensor]) -> int:
    count: Callable[..., int] = sdpa_flop_count  # untyped in torch
    return count(*(tensor.shape for tensor in tensors))


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Run as one rank of a world whose communication does nothing."""
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_sharding_cache()


def fake_store() -> Any:  # noqa: ANN401 - untyped in torch
    """Return the store of a process group whose communication does nothing."""
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415
    except ImportError as error:
        raise UnsupportedTorchError(f"no fake process group: torch {torch.__version__}") from error
    return FakeStore()


def clear_sharding_cache() -> None:
    """Forget shardings of DTensor: they name groups of meshes that the next ones may equal."""
    from torch.distributed.tensor import debug  # noqa: PLC0415 - slow to import

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


@contextmanager
def library_on_fakes() -> Iterator[None]:
    """Let library code that computes on real integers run under the fake mode entered inside."""
    with ExitStack() as stack:
        for change in (
            *_mesh_patches(),
            *_propagation_patches(),
            *_work_patches(),
            *_data_parallel_patches(),
            *pipeline_patches(),
            *shard_patches(),
        ):
            stack.enter_context(change)
        yield


def fake_tensors() -> AbstractContextManager[object]:
    """Return a mode in which tensors have shapes and sizes, but no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def patch_resize(after: Callable[[torch.UntypedStorage], None]) -> AbstractContextManager[object]:
    """Call *after* with each storage that `UntypedStorage.resize_` has resized."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        after(storage)
        return cast("torch.UntypedStorage", result)

    return patch.object(torch.UntypedStorage, "resize_", resize_and_tell)


def _on_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any method of any class
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return wrapper


def _mesh_patches() -> Iterator[AbstractContextManager[object]]:
    """Yield patches that run DeviceMesh's index arithmetic on real integers."""
    yield patch.object(DeviceMesh, "__init__", _mesh_constructor(DeviceMesh.__init__))
    mesh_tensor = DeviceMesh.__dict__.get("mesh")  # an attribute in early releases
    if isinstance(mesh_tensor, property) and mesh_tensor.fget is not None:
        yield patch.object(DeviceMesh, "mesh", property(_on_real_tensors(mesh_tensor.fget)))
    for name in _MESH_METHODS:
        method = DeviceMesh.__dict__.get(name)
        if isinstance(method, staticmethod | classmethod):
            wrapped = _on_real_tensors(method.__func__)
            yield patch.object(DeviceMesh, name, type(method)(wrapped))
        elif callable(method):
            yield patch.object(DeviceMesh, name, _on_real_tensors(method))


def _mesh_constructor(construct: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of DeviceMesh that never stores a fake tensor of ranks.

    `init_device_mesh` makes the ranks 0, 1, 2, ... itself; made under a fake mode, their values
    are lost, and are restored here.
    """

    @functools.wraps(construct)
    def wrapper(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        frame = inspect.currentframe()
        caller = frame.f_back if frame is not None else None
        # init_device_mesh numbers ranks in order; other callers give a list.
        in_order = caller is not None and caller.f_code is init_device_mesh.__code__
        with unset_fake_temporarily():
            real = [_real_ranks(value, in_order=in_order) for value in args]
            named = {key: _real_ranks(value, in_order=in_order) for key, value in kwargs.items()}
            construct(self, *real, **named)

    return wrapper


def _real_ranks(value: object, *, in_order: bool) -> object:
    if not isinstance(value, FakeTensor):
        return value
    if not in_order:
        raise ValueError("a DeviceMesh of the fake cluster takes its ranks as a list")
    return torch.arange(value.numel(), dtype=torch.int).view(value.shape)


def _propagation_patches() -> Iterator[AbstractContextManager[object]]:
    """Yield the patch that lets DTensor propagate shapes in a fake mode of its own.

    As it does with real tensors: else that trial counts as work of the rank.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator  # noqa: PLC0415

    name = "_propagate_tensor_meta_non_cached"
    method = ShardingPropagator.__dict__.get(name)
    if method is not None:
        yield patch.object(ShardingPropagator, name, _on_real_tensors(method))


def _data_parallel_patches() -> Iterator[AbstractContextManager[object]]:
    """Yield patches for DistributedDataParallel to reduce gradients without data.

    Its C++ reducer reads and writes tensors of integers. Dispatch modes see its all-reduces on
    every backend: it runs in the thread that calls backward, and calls registered operators.
    """
    yield patch.object(
        data_parallel, "_verify_param_shape_across_processes", lambda *_args, **_kwargs: None
    )
    reducer = torch._C._distributed_c10d.Reducer
    yield patch.object(reducer, "_rebuild_buckets", _rebuild_buckets(reducer))


def _rebuild_buckets(reducer: type[Any]) -> Callable[[Any], bool]:
    rebuild = reducer._rebuild_buckets

    def wrapper(self: object) -> bool:
        with _RealIntegers():  # type: ignore[no-untyped-call] # untyped in torch
            return bool(rebuild(self))

    return wrapper


class _RealIntegers(TorchDispatchMode):
    """Gives new tensors of 32-bit integers real data, for C++ code that writes to them."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") is torch.int32:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _work_patches() -> Iterator[AbstractContextManager[object]]:
    """Yield patches that make communication without data return works as real backends do.

    They keep their buffers alive until they are dropped, and their future holds the outputs,
    which the reducer of DistributedDataParallel and its hooks look into.
    """
    operators = [getattr(torch.ops.c10d, name, None) for name in _RETURN_WORK]
    implementations = {packet.default: _completed for packet in operators if packet is not None}
    yield patch.dict(fake_impls.op_implementations_dict, implementations)


class _Outputs(list[torch.Tensor]):
    """Outputs of a future; `buffers` live as long."""

    buffers: Sequence[torch.Tensor] = ()


def _completed(
    _mode: FakeTensorMode,
    operator: torch._ops.OpOverload,
    *args: Any,  # noqa: ANN401 - those of any operator
    **kwargs: Any,  # noqa: ANN401
) -> object:
    """Return the outputs of a communication operator, with a completed work.

    The outputs are the first argument of all of them, and what they return beside the work.
    """
    outputs = _Outputs(tensors_in(args[0]))
    outputs.buffers = tensors_in((args, kwargs))
    work = finished_work(outputs).boxed()
    return work if len(operator._schema.returns) == 1 else (args[0], work)
