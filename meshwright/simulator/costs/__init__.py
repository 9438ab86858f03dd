"""Cost models: operator x hardware x stack to time, with the evidence behind each number."""

from meshwright.simulator.costs.cost import Cost
from meshwright.simulator.costs.cost_model import BlockCost, CostModel
from meshwright.simulator.costs.phase_cost import COMMUNICATION, Category, PhaseCost

__all__ = ["COMMUNICATION", "BlockCost", "Category", "Cost", "CostModel", "PhaseCost"]
