"""Training strategies without a mesh of ranks: one module and one line of the registry each."""

from collections.abc import Callable

from meshwright.hwprofiles import Strategy
from meshwright.simulator.account import StepResult
from meshwright.simulator.strategies.data_parallel_module import simulate_data_parallel_module
from meshwright.simulator.strategies.graph_step import StrategyCase
from meshwright.simulator.strategies.parameter_server import simulate_parameter_server

STRATEGIES: dict[Strategy, Callable[[StrategyCase], StepResult]] = {
    Strategy.DATAPARALLEL: simulate_data_parallel_module,
    Strategy.PARAMETER_SERVER: simulate_parameter_server,
}

__all__ = ["STRATEGIES", "StrategyCase"]
