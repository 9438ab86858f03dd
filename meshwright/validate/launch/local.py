"""Run on this machine: a process for each rank, watched until all have ended."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from meshwright.simulator import PlanError
from meshwright.validate.launch.collect import RunOutcome, outcome, rank_state
from meshwright.validate.launch.diagnosis import RankOutcome
from meshwright.validate.launch.environment import STORE_SOCKET
from meshwright.validate.launch.records import SPEC_NAME, rank_path, read_heartbeat
from meshwright.validate.launch.spec import RunPhase, RunSpec, write_spec
from meshwright.validate.processes import MODULES, STARTER_VARIABLE, module_path

Progress: TypeAlias = Callable[[str, int, int], None]
POLL_S = 0.1
GRACE_S = 2.0  # for the others to say what they saw, once a rank has failed
KILL_AFTER_S = 3.0  # from the polite signal to the other one
STALL_MARGIN_S = 10.0  # beyond a phase's limit, at which ranks notice each other's silence
TAIL_BYTES = 16_384
# What belongs to a launcher around this process, not to the ranks it starts.
_FOREIGN = ("TORCHELASTIC_", "SLURM_", STORE_SOCKET)


def run_local(spec: RunSpec, num_ranks: int, *, progress: Progress | None = None) -> RunOutcome:
    """Run *spec* on *num_ranks* processes of this machine; none of them outlives the call.

    Files are left in ``spec.results``: of each rank its phase, its output, its measurements and,
    if something went wrong, why.

    Args:
        spec: Spec of the run.
        num_ranks: Processes to start.
        progress: Is told what rank 0 does, how many of its phases are done, and of how many.

    Raises:
        PlanError: If the folder of results holds those of another run.
        KeyboardInterrupt: On Ctrl-C, when all processes have been stopped.
    """
    folder = spec.results.resolve()
    spec = replace(spec, results=folder, plans=tuple(path.resolve() for path in spec.plans))
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / SPEC_NAME).exists() or any(folder.glob("rank-*")):
        raise PlanError(f"results={spec.results} holds an earlier run; name a new folder")
    write_spec(spec, folder / SPEC_NAME)
    with _Ranks(spec, num_ranks) as ranks:
        stopped_s = ranks.watch(progress or _tell_nobody)
    return outcome(spec, ranks.states(), stopped_s=stopped_s)


def _tell_nobody(_what: str, _done: int, _total: int) -> None:
    """Report nothing."""


class _Ranks:
    """The processes of a run."""

    def __init__(self, spec: RunSpec, num_ranks: int) -> None:
        self._spec = spec
        self._num_ranks = num_ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended_s: dict[int, float] = {}
        self._stopped: set[int] = set()

    def __enter__(self) -> Self:
        command = [*MODULES, "meshwright.validate.launch.worker"]
        command.append(str(self._spec.results / SPEC_NAME))
        try:
            # Bound from here on and handed to rank 0: a port only known to be free may be taken
            # by another program before rank 0 binds it. Nobody listens before rank 0 does.
            with socket.socket() as store:
                store.bind(("127.0.0.1", 0))
                for rank in range(self._num_ranks):
                    self._processes.append(self._start(command, rank, store))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._stop()

    def watch(self, progress: Progress) -> float | None:
        """Wait until all ranks have ended or one has failed; return when patience ended, if so."""
        deadline = time.monotonic() + self._spec.deadline_s
        while running := self._running():
            self._report(progress)
            if self._has_failure():
                self._wait(GRACE_S)
                return None
            if time.monotonic() > deadline or any(map(self._is_stalled, running)):
                return time.time()
            time.sleep(POLL_S)
        self._report(progress)
        return None

    def _report(self, progress: Progress) -> None:
        """Say where rank 0 is among the phases of its plan; they are counted over all plans."""
        now, phases = read_heartbeat(self._spec.results, 0), self._spec.phases
        if now is not None and now.phase in phases:
            last = len(self._spec.plans) - 1
            plan = last if now.phase == RunPhase.DONE else now.plan or 0
            done = phases.index(now.phase) + len(phases) * plan
            progress("rank 0", done, len(phases) * (last + 1))

    def states(self) -> list[RankOutcome]:
        """Return the state of each rank, once all have ended."""
        folder = self._spec.results
        return [
            replace(
                rank_state(folder, rank),
                exit_code=process.returncode,
                ended_s=self._ended_s.get(rank),
                stopped=rank in self._stopped,
                tail=_tail(rank_path(folder, rank, "err")),
            )
            for rank, process in enumerate(self._processes)
        ]

    def _start(
        self, command: list[str], rank: int, store: socket.socket
    ) -> subprocess.Popen[bytes]:
        folder = self._spec.results
        with ExitStack() as files:
            out = files.enter_context(rank_path(folder, rank, "out").open("wb"))
            err = files.enter_context(rank_path(folder, rank, "err").open("wb"))
            # A session of its own: Ctrl-C reaches the launcher alone, which stops them in order.
            return subprocess.Popen(  # noqa: S603 - our own worker
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environment(rank, store),
                pass_fds=() if rank else (store.fileno(),),
                start_new_session=True,
            )

    def _environment(self, rank: int, store: socket.socket) -> dict[str, str]:
        rank_variables = {
            **({} if rank else {STORE_SOCKET: str(store.fileno())}),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.getsockname()[1]),
            "OMP_NUM_THREADS": str(self._spec.threads_per_rank),
            "PYTHONPATH": module_path(),
            STARTER_VARIABLE: str(os.getpid()),
        }
        kept = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        return {**_loopback(), **kept, **rank_variables}

    def _running(self) -> list[int]:
        for rank, process in enumerate(self._processes):
            if rank not in self._ended_s and process.poll() is not None:
                self._ended_s[rank] = time.time()
        return [rank for rank in range(len(self._processes)) if rank not in self._ended_s]

    def _has_failure(self) -> bool:
        folder = self._spec.results
        return any(
            process.returncode or rank_path(folder, rank, "failure.json").exists()
            for rank, process in enumerate(self._processes)
        )

    def _is_stalled(self, rank: int) -> bool:
        heartbeat = read_heartbeat(self._spec.results, rank)
        if heartbeat is None:
            return False
        limit_s = self._spec.limit_s(heartbeat.phase) + STALL_MARGIN_S
        return time.time() - heartbeat.time_s > limit_s

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._running() and time.monotonic() < until:
            time.sleep(POLL_S)

    def _stop(self) -> None:
        """End running ranks: SIGTERM first, so that each can record its phase."""
        self._stopped |= set(self._running())
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in self._running():
                self._processes[rank].send_signal(number)
            self._wait(KILL_AFTER_S)


def _loopback() -> Mapping[str, str]:
    """Return the variables that keep ranks off networks which may not know this host's name."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), names[0]) if names else {}


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode("utf-8", "replace")
