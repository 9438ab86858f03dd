"""Live storages of a device and its host, and those at their peaks."""

import threading
import weakref
from collections import Counter
from typing import NamedTuple

import torch

from meshwright.simulator.account import HostTraffic
from meshwright.validate.counting.internals import storage_identity
from meshwright.validate.ranks import ByteKind

CPU = torch.device("cpu")


class StorageGroup(NamedTuple):
    """Storages of one kind and size, made by one operator."""

    kind: ByteKind
    size_bytes: int
    num_storages: int
    where_made: str


class StorageLabel(NamedTuple):
    """What a storage is for, its size, and the operator that made it."""

    kind: ByteKind
    size_bytes: int
    where_made: str


class Storages:
    """Live storages, and those at the peak.

    The storages at the peak are the live ones less what has changed since: a peak costs nothing
    to note, and there are many before the last.

    Attributes:
        live_bytes: Bytes of those that are live now.
        peak_bytes: Most that were live at one time since the peak was begun afresh.
    """

    def __init__(self) -> None:
        self._labels: dict[int, StorageLabel] = {}
        self._changed: dict[int, int] = {}  # when a storage got its present size
        self._live: Counter[StorageLabel] = Counter()
        self._since_peak: Counter[StorageLabel] = Counter()
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
            self._set(key, StorageLabel(kind, storage.nbytes(), f"{where} {tuple(tensor.shape)}"))
        # Its address may belong to another storage as soon as this one has died.
        weakref.finalize(storage, self._set, key, None).atexit = False

    def mark(self, tensor: torch.Tensor, kind: ByteKind) -> None:
        """Set the kind of the storage of *tensor*, now and at a peak that it was part of."""
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
            # Made after the peak: its new kind must not show there.
            if self._changed[key] > self._peak_clock:
                self._since_peak.update({new: 1})
                self._since_peak.subtract({old: 1})

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update a counted storage to its new size."""
        key = storage_identity(storage)
        with self._lock:
            label = self._labels.get(key)
            if label is not None:
                self._set(key, label._replace(size_bytes=storage.nbytes()))

    def note_peak(self, *, afresh: bool = False) -> None:
        """Raise the peak to the live bytes, if they are more; *afresh*: start a new peak."""
        with self._lock:
            if afresh or self.live_bytes > self.peak_bytes:
                self.peak_bytes = self.live_bytes
                self._peak_clock = self._clock
                self._since_peak.clear()

    def at_peak(self) -> Counter[StorageLabel]:
        """Return the storages of the peak by label; none has size 0."""
        with self._lock:
            counts = self._live.copy()
            # Undo all that has changed since the peak.
            counts.subtract(self._since_peak)
        return Counter({label: n for label, n in counts.items() if n and label.size_bytes})

    def bytes_at_peak(self) -> dict[ByteKind, int]:
        """Return the bytes of the peak by kind."""
        sizes = dict.fromkeys(ByteKind, 0)
        for label, count in self.at_peak().items():
            sizes[label.kind] += label.size_bytes * count
        return sizes

    def largest_at_peak(self, n: int) -> list[StorageGroup]:
        """Return the *n* groups of storages that took most bytes at the peak, largest first."""
        groups = [
            StorageGroup(label.kind, label.size_bytes, count, label.where_made)
            for label, count in self.at_peak().items()
        ]
        groups.sort(key=lambda group: (-group.size_bytes * group.num_storages, group))
        return groups[:n]

    def _set(self, key: int, new: StorageLabel | None) -> None:
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


class Memories:
    """Storages of a rank's device and of its host; what lies on a CPU counts apart.

    Args:
        device: Device of the rank; if that is a CPU, all tensors are the device's.

    Attributes:
        device: Live storages there.
        host: Live storages on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.host = Storages(), Storages()
        self._is_apart = device.type != CPU.type
        self._copied: Counter[bool] = Counter()  # bytes, by whether they went to the host

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self._holding(tensor)

    @property
    def traffic(self) -> HostTraffic:
        """Bytes that were copied to the device and to the host since the step started."""
        return HostTraffic(self._copied[False], self._copied[True])

    def start_step(self) -> None:
        """Forget copies; the peaks start at what is live now."""
        self._copied.clear()
        self.note_peaks(afresh=True)

    def choose_place(self, given: object) -> None:
        """Note the inputs of new tensors; here their own device says where they are."""

    def add(self, tensor: torch.Tensor, where: str) -> None:
        """Count the storage of *tensor*, an activation until it is marked, from now on."""
        self._holding(tensor).add(tensor, ByteKind.ACTIVATIONS, where)

    def mark(self, tensor: torch.Tensor, kind: ByteKind) -> None:
        """Set the kind of the storage of *tensor*; count it if it is not counted yet."""
        self._holding(tensor).mark(tensor, kind)
        self.note_peaks()

    def follow_resize(self, storage: torch.UntypedStorage) -> None:
        """Update a counted storage to its new size."""
        self.device.resized(storage)
        self.host.resized(storage)
        self.note_peaks()

    def note_peaks(self, *, afresh: bool = False) -> None:
        """Raise both peaks to the live bytes, if they are more; *afresh*: start new peaks."""
        self.device.note_peak(afresh=afresh)
        self.host.note_peak(afresh=afresh)

    def count_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Count bytes copied between device and host, except token ids, which every plan copies."""
        to_host = self._is_on_host(target)
        if source.is_floating_point() and self._is_on_host(source) != to_host:
            self._copied[to_host] += source.nbytes

    def _holding(self, tensor: torch.Tensor) -> Storages:
        return self.host if self._is_on_host(tensor) else self.device

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return self._is_apart and tensor.device.type == CPU.type
