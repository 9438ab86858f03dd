"""The work of a whole step, rank by rank, from the costs of its parts."""

from meshwright.simulator.step.build import PPM, BuiltStep, build_step, overhead_per_million
from meshwright.simulator.step.offload import node_host_bytes, offload_refusal, owned_share
from meshwright.simulator.step.rank import VirtualStageCost, message_between, virtual_stage_cost

__all__ = [
    "PPM",
    "BuiltStep",
    "VirtualStageCost",
    "build_step",
    "message_between",
    "node_host_bytes",
    "offload_refusal",
    "overhead_per_million",
    "owned_share",
    "virtual_stage_cost",
]
