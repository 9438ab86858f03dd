"""Cost models: time of an operator on hardware and stack, with its source of evidence."""

from meshwright.simulator.costs.beside import (
    LayerNodes,
    expert_all_to_all_times,
    layer_nodes,
    overlap_limit_ps,
    overlap_saving_ps,
)
from meshwright.simulator.costs.collectives import CollectiveCall, collective_cost, p2p_cost
from meshwright.simulator.costs.compute import (
    ALIGNED_BYTES,
    ALIGNED_ELEMENTS,
    constant_cost,
    flash_attention_cost,
    gemm_cost,
    memory_bound_cost,
    peak_flops_per_s,
)
from meshwright.simulator.costs.cost import COMMUNICATION, Category, Cost, PhaseCost
from meshwright.simulator.costs.cost_model import BlockCost, CostModel
from meshwright.simulator.costs.host import issue_ps
from meshwright.simulator.costs.links import (
    bus_factor,
    port_bytes_per_s,
    ports_per_node,
    ring_steps,
    sent_ratio,
)

__all__ = [
    "ALIGNED_BYTES",
    "ALIGNED_ELEMENTS",
    "COMMUNICATION",
    "BlockCost",
    "Category",
    "CollectiveCall",
    "Cost",
    "CostModel",
    "LayerNodes",
    "PhaseCost",
    "bus_factor",
    "collective_cost",
    "constant_cost",
    "expert_all_to_all_times",
    "flash_attention_cost",
    "gemm_cost",
    "issue_ps",
    "layer_nodes",
    "memory_bound_cost",
    "overlap_limit_ps",
    "overlap_saving_ps",
    "p2p_cost",
    "peak_flops_per_s",
    "port_bytes_per_s",
    "ports_per_node",
    "ring_steps",
    "sent_ratio",
]
