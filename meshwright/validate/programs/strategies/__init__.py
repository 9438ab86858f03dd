"""Programs of strategies that know no mesh: DataParallel, parameter servers."""

from meshwright.validate.programs.strategies.data_parallel_module import (
    ReplicasProgram,
    build_replicas,
)
from meshwright.validate.programs.strategies.parameter_server import (
    AsynchronousServers,
    build_servers,
)

__all__ = [
    "AsynchronousServers",
    "ReplicasProgram",
    "build_replicas",
    "build_servers",
]
