"""Programs of strategies that know no mesh: DataParallel, parameter servers."""

from meshwright.validate.programs.strategies.data_parallel_module import (
    DataParallelModuleProgram,
    build_data_parallel_module,
)
from meshwright.validate.programs.strategies.parameter_server import (
    AsynchronousServers,
    build_servers,
)

__all__ = [
    "AsynchronousServers",
    "DataParallelModuleProgram",
    "build_data_parallel_module",
    "build_servers",
]
