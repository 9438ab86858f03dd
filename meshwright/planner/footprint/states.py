"""States of ranks in columns, and lower bounds of a model's states over all shardings."""

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import NamedTuple, Self

import numpy as np

from meshwright.hwprofiles import EightBitRecipe, Offload, StackProfile
from meshwright.planner.footprint.replicas import Kind
from meshwright.planner.space import Column
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.simulator.graph import Size
from meshwright.simulator.layout import gradient_bytes
from meshwright.simulator.memory import RankStates, Shards, StateBytes
from meshwright.simulator.model import count_trained_parameters
from meshwright.simulator.replication import EIGHT_BIT_BYTES

MOST_WEIGHT_BYTES = 4
OF_OPTIMIZER = np.array([[False], [False], [True]])


class LayoutStates(NamedTuple):
    """Sharding of states, and bytes of a parameter, all of it as columns over layouts.

    Args:
        state: Bytes of a parameter.
        shards: Ranks that shard each kind of state.
        expert_shards: Ranks that shard those of routed experts.
        stays: 1 where optimizer states are on the device, and where gradients are, else 0.
    """

    state: StateBytes
    shards: Shards
    expert_shards: Shards
    stays: tuple[Column, Column]

    @classmethod
    def of(
        cls, kinds: Sequence[Kind], sharing: Column, num_shards: Column, expert_shards: Column
    ) -> Self:
        """Return the states of layouts, each of one of *kinds*, by its index in *sharing*."""
        state = np.array([astuple(kind.state) for kind in kinds], np.int64)[sharing].T
        is_split = np.array([kind.replication.shards for kind in kinds])[sharing].T > 1
        moved = np.array([kind.moved for kind in kinds], np.int64)[sharing].T
        return cls(
            StateBytes(*state),
            Shards(*np.where(is_split, num_shards, 1)),
            # Of the optimizer's states they know themselves whether it splits them.
            Shards(*np.where(is_split | OF_OPTIMIZER, expert_shards, 1)),
            (1 - moved[0], 1 - moved[1]),
        )

    def held(self, parameters: Column, experts: Column) -> RankStates[Size]:
        """Return the states of ranks with so many parameters, so many of these of experts."""
        states = RankStates.of(parameters - experts, self.state, self.shards)
        states = states.beside(RankStates.of(experts, self.state, self.expert_shards))
        optimizer, gradients = self.stays
        return states.staying(1, gradients, optimizer)


def least_weights(state: StateBytes, recipe: EightBitRecipe | None) -> StateBytes:
    """Return *state* with the fewest bytes that any weight has by an 8-bit *recipe*."""
    if recipe is None:
        return state
    held = EIGHT_BIT_BYTES if recipe.holds_parameters else MOST_WEIGHT_BYTES
    gathered = EIGHT_BIT_BYTES if recipe.gathers_parameters else MOST_WEIGHT_BYTES
    return replace(
        state,
        parameter=min(state.parameter, held),
        sharded_parameter=min(state.sharded_parameter, held),
        gathered_parameter=min(state.gathered_parameter, gathered),
    )


def least_state_bytes(
    job: TrainingJob, stack: StackProfile, plan: ResolvedPlan, num_gpus: int
) -> int:
    """Return a lower bound of the live bytes of the fullest of so many devices, in any layout.

    During the update weights, gradients and optimizer states of all parameters are on some device:
    one at least has the mean of all.

    Args:
        job: Model, sequence length and batch.
        stack: Software stack.
        plan: Plan with the formats and the offloading of the layouts.
        num_gpus: Number of devices.

    >>> from meshwright.hwprofiles import load_stack
    >>> from meshwright.simulator import load_model
    >>> job = TrainingJob(model=load_model("gpt2"), global_batch_size=8, seq_len=1024)
    >>> least_state_bytes(job, load_stack("megatron-core"), ResolvedPlan(), 8) * 8 / 124439808
    18.0
    """
    # Hosts may keep all states.
    if plan.offload is not Offload.NONE:
        return 0
    formats = plan.gradient_formats
    state = StateBytes.of(stack, job.precision, formats, plan.moment_precision)
    state = least_weights(state, stack.recipes.get(job.precision))
    gradient = min(gradient_bytes(stack, job.precision, formats))
    each = RankStates.of_share(1, state, min(state.parameter, state.sharded_parameter), gradient)
    return count_trained_parameters(job.model) * int(each.static_bytes) // num_gpus
