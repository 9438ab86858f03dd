"""Joining, timing and leaving the group of all ranks; PyTorch's private names stay in here."""

import re
import socket
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from meshwright.simulator import PlanError
from meshwright.validate.launch.environment import WorkerEnvironment

_NAMED = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
PROBE_S = 0.2
CONNECT_S = 5.0
LOOPBACK = "127.0.0.1"
BACKLOG = 1024  # ranks that may ask at once


class MissingRanksError(RuntimeError):
    """Other ranks did not come in time.

    Args:
        message: One line.
        ranks: Those that are missing.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


def join(
    backend: str, worker: WorkerEnvironment, *, timeout_s: float, offloads: bool = False
) -> dist.ProcessGroup | None:
    """Join the group of all ranks; return the one to use barriers on, None for the default.

    Args:
        backend: "gloo" or "nccl".
        worker: Of this rank.
        timeout_s: Longest wait for another rank.
        offloads: Whether tensors of the host are reduced, too: the norm of gradients that are
            kept there.

    Raises:
        PlanError: If this PyTorch or this machine cannot run *backend*.
        MissingRanksError: If some ranks do not come within *timeout_s*; names them.
    """
    if backend == "nccl":
        _use_device(worker.local_rank)
    timeout = timedelta(seconds=timeout_s)
    store = _meeting_point(worker, timeout)
    _wait_for_all(store, worker, timeout)
    dist.init_process_group(
        group_backend(backend, offloads=offloads),
        store=PrefixStore("group", store),
        rank=worker.rank,
        world_size=worker.world_size,
        timeout=timeout,
    )
    # Only gloo knows a barrier that says who is missing.
    control = None if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
    barrier(control, timeout_s=timeout_s)
    return control


def group_backend(backend: str, *, offloads: bool) -> str:
    """Return the backend of a group, by kind of device where it has tensors on two.

    >>> group_backend("nccl", offloads=True)
    'cpu:gloo,cuda:nccl'
    """
    return "cpu:gloo,cuda:nccl" if backend == "nccl" and offloads else backend


def barrier(group: dist.ProcessGroup | None, *, timeout_s: float) -> None:
    """Wait for all ranks.

    Raises:
        MissingRanksError: On rank 0, if some do not come within *timeout_s*; names them.
    """
    try:
        dist.monitored_barrier(group, timedelta(seconds=timeout_s), wait_all_ranks=True)
    except RuntimeError as error:
        named = _NAMED.search(str(error))
        if named is None:
            raise
        ranks = tuple(int(rank) for rank in named[1].replace(",", " ").split())
        message = f"ranks {named[1].strip()} did not reach the barrier within {timeout_s:g} s"
        raise MissingRanksError(message, ranks) from None


def set_timeouts(timeout_s: float) -> None:
    """Give every group of this rank a new timeout, those of a device mesh included."""
    if not dist.is_initialized():
        return
    for group in list(distributed_c10d._world.pg_map):  # noqa: SLF001 - no public list of groups
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)  # noqa: SLF001


def leave() -> None:
    """Destroy all groups of this rank."""
    dist.destroy_process_group()


def _use_device(local_rank: int) -> None:
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise PlanError("backend=nccl: this PyTorch finds no CUDA device with NCCL; allowed: gloo")
    if local_rank >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise PlanError(f"backend=nccl: local rank {local_rank} has no GPU; this host has {count}")
    torch.cuda.set_device(local_rank)


def _meeting_point(worker: WorkerEnvironment, timeout: timedelta) -> Store:
    if not worker.hosts_store:
        _wait_for_listener(worker, timeout.total_seconds())
    made: list[Store | Exception] = []

    def make() -> None:
        try:
            made.append(_store(worker, timeout))
        except Exception as error:
            made.append(error)

    # A store waits for the first answer of whatever listens there without an end: in a thread of
    # its own, which is left behind.
    thread = threading.Thread(target=make, daemon=True, name="store")
    thread.start()
    thread.join(timeout.total_seconds() + CONNECT_S)
    if not made:
        where = f"{worker.address}:{worker.port}"
        raise MissingRanksError(f"what listens at {where} is no store: it does not answer", (0,))
    if isinstance(made[0], Exception):
        raise made[0]
    return PrefixStore("meshwright", made[0])


def _store(worker: WorkerEnvironment, timeout: timedelta) -> Store:
    """Return the store, which is for this machine alone where its address is."""
    return TCPStore(
        worker.address,
        worker.port,
        is_master=worker.hosts_store,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=_listener(worker) if worker.hosts_store else None,
    )


def _listener(worker: WorkerEnvironment) -> int | None:
    if worker.store_socket is not None:
        bound = socket.socket(fileno=worker.store_socket)
    elif worker.address == LOOPBACK:
        bound = socket.create_server((LOOPBACK, worker.port))
    else:
        return None
    bound.listen(BACKLOG)
    return bound.detach()


def _wait_for_listener(worker: WorkerEnvironment, timeout_s: float) -> None:
    """Wait until rank 0, or its agent, listens; a store's client waits twice as long as told."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        try:
            socket.create_connection((worker.address, worker.port), timeout=CONNECT_S).close()
        except OSError:
            time.sleep(PROBE_S)
        else:
            return
    where = f"{worker.address}:{worker.port}"
    raise MissingRanksError(f"rank 0 did not answer at {where} for {timeout_s:g} s", (0,))


def _wait_for_all(store: Store, worker: WorkerEnvironment, timeout: timedelta) -> None:
    store.set(f"here/{worker.rank}", "yes")
    # The last rank to come wakes the others.
    if store.add("count", 1) == worker.world_size:
        store.set("all", "yes")
    try:
        store.wait(["all"], timeout)
    except dist.DistStoreError:
        ranks = range(worker.world_size)
        missing = tuple(rank for rank in ranks if not store.check([f"here/{rank}"]))
        waited = f"{timeout.total_seconds():g} s"
        here = worker.world_size - len(missing)
        message = f"{here} of {worker.world_size} ranks had joined after {waited}"
        raise MissingRanksError(message, missing) from None
