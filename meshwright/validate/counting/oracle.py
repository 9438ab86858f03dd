"""FLOPs, live bytes and communication of one rank, counted operator by operator."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.hwprofiles import CollectiveOp
from meshwright.validate.counting.internals import (
    FROM_VALUES,
    WAIT,
    Communication,
    communication_of,
    current_fake_mode,
    flops_of,
    is_wrapper,
    patch_resize,
    process_group_of,
    storage_identity,
    tensors_in,
)
from meshwright.validate.counting.storages import CPU, Memories, StorageGroup
from meshwright.validate.ranks import ByteKind, CollectiveCount, RankMeasurement

UNKNOWN_GROUP = "other"
WITHOUT_WORK = {"prim", "profiler"}  # namespaces of operators that only look at tensors
MESSAGES = {"send": "send", "isend": "send", "recv": "recv", "irecv": "recv"}
# How the names of operators begin once their underscores are gone, the longer ones first.
COLLECTIVES: dict[str, str] = {
    "sharddimalltoall": CollectiveOp.ALL_TO_ALL,
    "reducescatter": CollectiveOp.REDUCE_SCATTER,
    "recvanysource": "recv",
    "allreduce": CollectiveOp.ALL_REDUCE,
    "allgather": CollectiveOp.ALL_GATHER,
    "broadcast": CollectiveOp.BROADCAST,
    "alltoall": CollectiveOp.ALL_TO_ALL,
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    **MESSAGES,
}
# Operators that copy from place to place, and which of their arguments is the source.
COPIES = {"aten._to_copy.default": 0, "aten.copy_.default": 1}
NOT_COUNTED = ("barrier", "monitoredbarrier", "meshgetprocessgroup")
# Gradient sums that autograd makes in place, but out of place under a dispatch mode.
_IN_PLACE = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.index_add.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten.scatter_add.default,
}
_NO_TASK = -1


class RankOracle(TorchDispatchMode):
    """Counts FLOPs, live bytes and communication of the code that runs inside it.

    With real tensors and with those of `fake_cluster` it counts the same. A storage counts from
    the operator that makes it until the last tensor on it dies; views are free. What is made
    elsewhere (parameters, before) counts from when it is marked; make meshes before, too. Only a
    rank's own tensors count, not the global shapes that DTensor reasons about. Not seen: memory
    inside kernels and backends, an allocator's rounding. Threads of a real backend may free a
    buffer a moment late.

    Args:
        groups: Name of each process group that has one, by the global ranks in it.
        device: Where the rank computes. What lies on a CPU beside it is the host's, and counts
            apart.

    Attributes:
        memories: Live tensors on device and host; the properties are of the device.
    """

    def __init__(self, groups: Mapping[tuple[int, ...], str], device: torch.device = CPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self._axes = {tuple(sorted(ranks)): axis for ranks, axis in groups.items()}
        self.memories = Memories(device)
        self._flops: Counter[str] = Counter()
        self._calls: Counter[tuple[str, str, int, int]] = Counter()
        self._fake_mode: object | None = None
        self._sums = GradientSums()
        self._patches = ExitStack()

    def mark(self, tensor: torch.Tensor, kind: ByteKind) -> None:
        """Set the kind of a tensor's storage; an unmarked one is an activation."""
        for local in tensors_in(tensor):
            self.memories.mark(local, kind)

    def axis_of(self, ranks: tuple[int, ...]) -> str:
        """Return the name of the group of *ranks*, which are in order."""
        return self._axes.get(ranks, UNKNOWN_GROUP)

    def start_step(self) -> None:
        """Forget FLOPs, communication and copies; the peaks start at what is live now."""
        self._flops.clear()
        self._calls.clear()
        self.memories.start_step()

    @property
    def flops(self) -> int:
        """FLOPs of matrix products, convolutions, attention and operators with a formula."""
        return self._flops.total()

    @property
    def flops_by_operator(self) -> dict[str, int]:
        """The same by operator."""
        return dict(sorted(self._flops.items()))

    @property
    def collectives(self) -> tuple[CollectiveCount, ...]:
        """Communication calls, sorted; a group of one rank communicates nothing."""
        counts = [CollectiveCount(*call, num_calls=n) for call, n in self._calls.items()]
        return tuple(sorted(counts))

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors that are live now."""
        return self.memories.device.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were live at one time since the step started."""
        return self.memories.device.peak_bytes

    @property
    def bytes_at_peak(self) -> dict[ByteKind, int]:
        """Bytes at the peak by kind; they sum to `peak_bytes`."""
        return self.memories.device.bytes_at_peak()

    def largest_at_peak(self, n: int) -> list[StorageGroup]:
        """Return the *n* groups of storages that took most bytes at the peak, largest first."""
        return self.memories.device.largest_at_peak(n)

    def __enter__(self) -> Self:
        self._fake_mode = current_fake_mode()
        # FSDP2 frees gathered parameters by resizing their storages to 0.
        self._patches.enter_context(patch_resize(self.memories.follow_resize))
        super().__enter__()  # type: ignore[no-untyped-call] # untyped in torch
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call] # untyped in torch
        self._patches.close()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run one operator and count it; what wraps tensors unwraps them first."""
        if any(map(is_wrapper, types)):  # its local tensors are counted instead
            self._sums.wrap(func)
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace in WITHOUT_WORK or current_fake_mode() is not self._fake_mode:
            # Bookkeeping, or arithmetic on ranks, or DTensor propagates shardings.
            return func(*args, **kwargs)
        if func is WAIT and self._fake_mode is not None:
            return args[0]  # the operator without data would allocate; the real one does not
        result = func(*args, **kwargs)
        flops = flops_of(func, args, kwargs, result)
        if flops:
            self._flops[str(func)] += flops
        communication = communication_of(func)
        if communication is not None:
            self._count_call(communication, args, kwargs, result)
        name = str(func)
        if name in COPIES:
            self.memories.count_copy(args[COPIES[name]], tensors_in(result)[0])
        # lift_fresh is given what torch.tensor(values) has just made: its storage is new.
        given = () if func is FROM_VALUES else (args, kwargs)
        self._count_storages(result, given, name)
        if not self._sums.is_in_place(func):
            self.memories.note_peaks()
        return result

    def _count_storages(self, result: object, given: object, where: str) -> None:
        new = [tensor for tensor in tensors_in(result) if tensor not in self.memories]
        if new:
            self.memories.choose_place(given)
            old = {storage_identity(tensor.untyped_storage()) for tensor in tensors_in(given)}
            for tensor in new:
                if storage_identity(tensor.untyped_storage()) not in old:
                    self.memories.add(tensor, where)

    def _count_call(
        self,
        communication: Communication,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: object,
    ) -> None:
        name = communication.name.replace("_", "")
        if name.startswith(NOT_COUNTED):
            return
        ranks = dist.get_process_group_ranks(process_group_of(communication, args, kwargs))
        if len(ranks) == 1:
            return
        axis = self.axis_of(tuple(sorted(ranks)))
        for op, size_bytes in _operations(name, args, kwargs, result):
            num_ranks = 2 if op in MESSAGES.values() else len(ranks)  # a message has two ends
            self._calls[axis, str(op), num_ranks, size_bytes] += 1


def measurement_of(oracle: RankOracle, rank: int, world_size: int) -> RankMeasurement:
    """Return the counts of *oracle* since the step started, as the measurement of *rank*."""
    return RankMeasurement(
        rank=rank,
        world_size=world_size,
        backend="fake",
        flops=oracle.flops,
        collectives=oracle.collectives,
        peak_bytes=oracle.peak_bytes,
        bytes_at_peak=oracle.bytes_at_peak,
        host_bytes=oracle.memories.host.peak_bytes,
        host_traffic=oracle.memories.traffic,
    )


def _operations(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: object
) -> list[tuple[str, int]]:
    """Return the operations in one call, each with the larger of its input and output bytes.

    Coalesced collectives are one of each tensor, as NCCL runs them, in one group of launches.

    >>> _operations("allgatherbase", (torch.ones(8), torch.ones(2)), {}, None)
    [(<CollectiveOp.ALL_GATHER: 'all_gather'>, 32)]
    >>> pair = (["isend", "irecv"], [1, 1], [0, 0], [torch.ones(2), torch.ones(3)])
    >>> _operations("batchp2pops", pair, {}, None)
    [('send', 8), ('recv', 12)]
    >>> two = ([torch.ones(8), torch.ones(4)], [torch.ones(2), torch.ones(1)])
    >>> [size for _, size in _operations("allgatherintotensorcoalesced", two, {}, None)]
    [32, 16]
    """
    if name.rstrip("_").endswith("coalesced"):
        listed = [tensors_in(each) for each in (*args, result) if isinstance(each, list | tuple)]
        together = zip(*filter(None, listed), strict=False)
        short = name.replace("coalesced", "")
        return [each for tensors in together for each in _operations(short, tensors, {}, None)]
    if name == "batchp2pops":
        return [(MESSAGES[op], tensor.nbytes) for op, tensor in zip(args[0], args[3], strict=True)]
    for beginning, op in COLLECTIVES.items():
        if name.startswith(beginning):
            buffers = (*args, *kwargs.values(), result)
            sizes = [sum(tensor.nbytes for tensor in tensors_in(buffer)) for buffer in buffers]
            return [(op, max(sizes))]
    raise NotImplementedError(f"communication operator {name} is not known")


class GradientSums:
    """Detector of gradient sums that autograd makes in place without a dispatch mode.

    Where the gradients of two uses of a tensor meet, the second is added to the first in place, if
    nothing else holds that one.  A dispatch mode, or a tensor that is a subclass, makes it out of
    place: a third tensor, which only counting has made (torch/csrc/autograd/input_buffer.cpp,
    `can_accumulate_inplace`, and ATen/TensorSubclassLikeUtils.h).  So it does with rows that are
    put into zeros (`index_backward` and `gather_backward` of FunctionsManual.cpp).
    """

    def __init__(self) -> None:
        self._wrapped: object = None

    def wrap(self, operator: object) -> None:
        """Note that the next *operator* is that of a wrapper, which adds out of place."""
        self._wrapped = operator

    def is_in_place(self, operator: object) -> bool:
        """Return True if *operator*, now running, would be in place without a dispatch mode.

        Its operands are live before it, and the sum takes the place of one of them after it.
        """
        is_wrapped, self._wrapped = operator is self._wrapped, None
        return operator in _IN_PLACE and not is_wrapped and _runs_backward()


def _runs_backward() -> bool:
    """Return True if this thread runs a backward pass, and no forward pass within it."""
    task: int = torch._C._current_graph_task_id()  # noqa: SLF001 - there is no public way to ask
    return task != _NO_TASK and not torch.is_grad_enabled()
