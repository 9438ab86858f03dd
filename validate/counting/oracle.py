"""What one rank computes, holds and sends, counted operator by operator."""

import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hwprofiles.kinds import CollectiveOp
from validate.counting.internals import (
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
from validate.measurement import ByteKind, CollectiveCount

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
NOT_COUNTED = ("barrier", "monitoredbarrier", "meshgetprocessgroup")


class TensorGroup(NamedTuple):
    """Storages of one kind and size, made by one operator."""

    kind: ByteKind
    size_bytes: int
    num_storages: int
    where_made: str


class _Label(NamedTuple):
    kind: ByteKind
    size_bytes: int
    where_made: str


class _Storages:
    """The live storages, and which of them lived when they took most bytes.

    The storages at the peak are the live ones less what has changed since: a peak costs nothing
    to note, and there are many before the last.
    """

    def __init__(self) -> None:
        self._labels: dict[int, _Label] = {}
        self._changed: dict[int, int] = {}  # when a storage got its present size
        self._live: Counter[_Label] = Counter()
        self._since_peak: Counter[_Label] = Counter()
        self._clock = 0
        self._peak_clock = 0
        self._lock = threading.RLock()  # backends free tensors in threads of their own
        self.live_bytes = 0
        self.peak_bytes = 0

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_identity(tensor.untyped_storage()) in self._labels

    def add(self, tensor: torch.Tensor, kind: ByteKind, where: str) -> None:
        """Count the storage of *tensor* from now on, unless it is counted."""
        storage = tensor.untyped_storage()
        key = storage_identity(storage)
        with self._lock:
            if key in self._labels:
                return
            self._set(key, _Label(kind, storage.nbytes(), f"{where} {tuple(tensor.shape)}"))
        # Its address may belong to another storage as soon as this one has died.
        weakref.finalize(storage, self._set, key, None).atexit = False

    def mark(self, tensor: torch.Tensor, kind: ByteKind) -> None:
        """Say what the storage of *tensor* is for, now and at a peak that it was part of."""
        key = storage_identity(tensor.untyped_storage())
        with self._lock:
            old = self._labels.get(key)
            if old is None:
                self.add(tensor, kind, "mark")
                return
            new = old._replace(kind=kind)
            self._labels[key] = new
            self._live.update({new: 1})
            self._live.subtract({old: 1})
            if self._changed[key] > self._peak_clock:
                self._since_peak.update({new: 1})
                self._since_peak.subtract({old: 1})

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage, if it is counted, to its new size."""
        key = storage_identity(storage)
        with self._lock:
            label = self._labels.get(key)
            if label is not None:
                self._set(key, label._replace(size_bytes=storage.nbytes()))

    def note_peak(self, *, afresh: bool = False) -> None:
        """Note whether more is live now than ever since the peak was begun afresh."""
        with self._lock:
            if afresh or self.live_bytes > self.peak_bytes:
                self.peak_bytes = self.live_bytes
                self._peak_clock = self._clock
                self._since_peak.clear()

    def at_peak(self) -> Counter[_Label]:
        """Return the storages of the peak by label; none has size 0."""
        with self._lock:
            counts = self._live.copy()
            counts.subtract(self._since_peak)
        return Counter({label: n for label, n in counts.items() if n and label.size_bytes})

    def _set(self, key: int, new: _Label | None) -> None:
        """Give a storage a label, or with None take it away."""
        with self._lock:
            self._clock += 1
            old = self._labels.pop(key, None)
            for label, sign in ((old, -1), (new, 1)):
                if label is not None:
                    self._live[label] += sign
                    self._since_peak[label] += sign
                    self.live_bytes += sign * label.size_bytes
                    if not self._live[label]:
                        del self._live[label]
            if new is None:
                self._changed.pop(key, None)
            else:
                self._labels[key] = new
                self._changed[key] = self._clock


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
    """

    def __init__(self, groups: Mapping[tuple[int, ...], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # untyped in torch
        self._axes = {tuple(sorted(ranks)): axis for ranks, axis in groups.items()}
        self._storages = _Storages()
        self._flops: Counter[str] = Counter()
        self._calls: Counter[tuple[str, str, int, int]] = Counter()
        self._fake_mode: object | None = None
        self._patches = ExitStack()

    def mark(self, tensor: torch.Tensor, kind: ByteKind) -> None:
        """Say what a tensor's storage is for; one that is not marked is an activation."""
        for local in tensors_in(tensor):
            self._storages.mark(local, kind)
        self._storages.note_peak()

    def start_step(self) -> None:
        """Forget FLOPs and communication; the peak starts at what is live now."""
        self._flops.clear()
        self._calls.clear()
        self._storages.note_peak(afresh=True)

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
        return self._storages.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were live at one time since the step started."""
        return self._storages.peak_bytes

    @property
    def bytes_at_peak(self) -> dict[ByteKind, int]:
        """Of which kind they were; the kinds sum to `peak_bytes`."""
        sizes = dict.fromkeys(ByteKind, 0)
        for label, count in self._storages.at_peak().items():
            sizes[label.kind] += label.size_bytes * count
        return sizes

    def largest_at_peak(self, n: int) -> list[TensorGroup]:
        """Return the *n* groups of storages that took most bytes at the peak, largest first."""
        groups = [
            TensorGroup(label.kind, label.size_bytes, count, label.where_made)
            for label, count in self._storages.at_peak().items()
        ]
        groups.sort(key=lambda group: (-group.size_bytes * group.num_storages, group))
        return groups[:n]

    def __enter__(self) -> Self:
        self._fake_mode = current_fake_mode()
        self._patches.enter_context(patch_resize(self._follow_resize))
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
        if any(map(is_wrapper, types)):
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
        given = () if func is FROM_VALUES else (args, kwargs)
        self._count_storages(result, given, str(func))
        return result

    def _count_storages(self, result: object, given: object, where: str) -> None:
        new = [tensor for tensor in tensors_in(result) if tensor not in self._storages]
        if new:
            old = {storage_identity(tensor.untyped_storage()) for tensor in tensors_in(given)}
            for tensor in new:
                if storage_identity(tensor.untyped_storage()) not in old:
                    self._storages.add(tensor, ByteKind.ACTIVATIONS, where)
            self._storages.note_peak()

    def _follow_resize(self, storage: torch.UntypedStorage) -> None:
        self._storages.resized(storage)
        self._storages.note_peak()

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
        axis = self._axes.get(tuple(sorted(ranks)), UNKNOWN_GROUP)
        for op, size_bytes in _operations(name, args, kwargs, result):
            num_ranks = 2 if op in MESSAGES.values() else len(ranks)
            self._calls[axis, str(op), num_ranks, size_bytes] += 1


def _operations(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: object
) -> list[tuple[str, int]]:
    """Return the operations in one call, each with the larger of its input and output bytes.

    >>> _operations("allgatherbase", (torch.ones(8), torch.ones(2)), {}, None)
    [(<CollectiveOp.ALL_GATHER: 'all_gather'>, 32)]
    >>> pair = (["isend", "irecv"], [1, 1], [0, 0], [torch.ones(2), torch.ones(3)])
    >>> _operations("batchp2pops", pair, {}, None)
    [('send', 8), ('recv', 12)]
    """
    if name == "batchp2pops":
        return [(MESSAGES[op], tensor.nbytes) for op, tensor in zip(args[0], args[3], strict=True)]
    for beginning, op in COLLECTIVES.items():
        if name.startswith(beginning):
            buffers = (*args, *kwargs.values(), result)
            sizes = [sum(tensor.nbytes for tensor in tensors_in(buffer)) for buffer in buffers]
            return [(op, max(sizes))]
    raise NotImplementedError(f"communication operator {name} is not known")
