"""Rank, world size and store address of this process, from its environment variables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from meshwright.hwprofiles import shown
from meshwright.simulator import PlanError

# torchrun and our own starter set the first name, srun the second.
_NAMES = {
    "rank": ("RANK", "SLURM_PROCID"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
    "port": ("MASTER_PORT",),
}
STORE_SOCKET = "MESHWRIGHT_STORE_SOCKET"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnvironment:
    """One process among those of a run.

    Args:
        rank: Its number, from 0.
        world_size: Number of ranks.
        local_rank: Its number on this machine; the device it uses.
        address: Machine that holds the store where all meet.
        port: Port of the store.
        hosts_store: Whether this process holds the store; under torchrun its agent does.
        store_socket: Descriptor of a socket that the starter has bound to *port* for the store.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    hosts_store: bool
    store_socket: int | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Return the environment of this process as set by torchrun, srun or `run_local`.

        Raises:
            PlanError: If a variable is missing or no number.

        >>> slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
        >>> store = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
        >>> WorkerEnvironment.of(slurm | store).rank
        3
        """
        numbers = {field: _number(environment, names) for field, names in _NAMES.items()}
        if not 0 <= numbers["rank"] < numbers["world_size"]:
            raise PlanError(f"RANK={numbers['rank']} is not below {numbers['world_size']} ranks")
        address = environment.get("MASTER_ADDR", "")
        if not address:
            raise PlanError("MASTER_ADDR is not set; it names the machine of rank 0")
        by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        bound = _number(environment, (STORE_SOCKET,)) if STORE_SOCKET in environment else None
        hosts_store = numbers["rank"] == 0 and not by_agent
        return cls(address=address, hosts_store=hosts_store, store_socket=bound, **numbers)


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int:
    name = next((name for name in names if name in environment), None)
    if name is None:
        raise PlanError(f"{names[0]} is not set; start the worker with torchrun or srun")
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise PlanError(f"{name}={shown(text)} is not a whole number")
    return int(text)
