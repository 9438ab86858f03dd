"""Cost models: operator x hardware x stack to time, with the evidence behind each number."""

from simulator.costs.cost import Cost
from simulator.costs.cost_model import BlockCost, CostModel
from simulator.costs.phase_cost import COMMUNICATION, Category, PhaseCost

__all__ = ["COMMUNICATION", "BlockCost", "Category", "Cost", "CostModel", "PhaseCost"]
