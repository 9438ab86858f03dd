"""Work of a whole step, rank by rank, from the costs of its parts."""

from meshwright.simulator.step.activations import (
    activation_host_bytes,
    activation_refusal,
)
from meshwright.simulator.step.build import (
    PPM,
    BuiltStep,
    build_step,
    overhead_per_million,
)
from meshwright.simulator.step.exchanges import (
    PartExchanges,
    RankExchanges,
    StageExchanges,
    rank_exchanges,
)
from meshwright.simulator.step.offload import (
    OFFLOAD_STAGES,
    HostSide,
    host_refusal,
    node_host_bytes,
    offload_refusal,
    owned_share,
    rank_host_bytes,
)
from meshwright.simulator.step.rank import (
    message_between,
    phase_costs,
    virtual_stage_cost,
)
from meshwright.simulator.step.sharing import PassSharing

__all__ = [
    "OFFLOAD_STAGES",
    "PPM",
    "BuiltStep",
    "HostSide",
    "PartExchanges",
    "PassSharing",
    "RankExchanges",
    "StageExchanges",
    "activation_host_bytes",
    "activation_refusal",
    "build_step",
    "host_refusal",
    "message_between",
    "node_host_bytes",
    "offload_refusal",
    "overhead_per_million",
    "owned_share",
    "phase_costs",
    "rank_exchanges",
    "rank_host_bytes",
    "virtual_stage_cost",
]
