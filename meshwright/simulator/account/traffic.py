"""Collectives of a rank in a step, each with its axis, size and count."""

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp, StackProfile
from meshwright.simulator.blocks import SHIFTED_BYTES, BlockTable
from meshwright.simulator.costs import sent_ratio
from meshwright.simulator.layout import Axis, MeshAxis, ResolvedPlan, TrainingJob
from meshwright.simulator.ledger import (
    LedgerEntry,
    StepPoint,
    StepSetting,
    pass_entries,
    rank_ledger,
)

OTHER_SUMS = (StepPoint.SUMS, StepPoint.TIED_TABLE)
# `norm_ranks` has the group of a norm that is one number.
ELSEWHERE = (*OTHER_SUMS, StepPoint.TOKENS, StepPoint.NORM, StepPoint.MESSAGE)
REPEATED = tuple(moment for moment in StepPoint if moment not in ELSEWHERE)


class Traffic(NamedTuple):
    """Equal collectives of one rank in one step; ``size_bytes`` as in `Collective`."""

    axis: MeshAxis
    op: CollectiveOp
    size_bytes: int
    num_ranks: int
    num_calls: int

    @property
    def sent_bytes(self) -> Fraction:
        """Bytes the rank sends in all calls, by ring; where one rank is the root, on average.

        >>> from meshwright.simulator.layout import Axis
        >>> Traffic(Axis.DP, CollectiveOp.ALL_REDUCE, 800, 8, 1).sent_bytes
        Fraction(1400, 1)
        """
        return self.num_calls * self.size_bytes * sent_ratio(self.op, self.num_ranks)

    def shifts_tokens(self, microbatch_size: int) -> bool:
        """Return True if they send a number of a token of each sequence to a neighbour.

        At the ends of sequences there is one neighbour, and half of them are sent there. Keys and
        values of ring attention are more: of two tokens and two elements a head at least.
        """
        is_message = self.axis is Axis.CP and self.op is CollectiveOp.P2P
        return is_message and self.size_bytes in {each * microbatch_size for each in SHIFTED_BYTES}


def rank_traffic(
    job: TrainingJob, plan: ResolvedPlan, stack: StackProfile, pp_rank: int
) -> tuple[Traffic, ...]:
    """Return the tensor- and data-parallel collectives of a pipeline rank in one step.

    Args:
        job: Model, sequence length and batch.
        plan: Parallel degrees and the like.
        stack: Software stack.
        pp_rank: Pipeline rank; messages between stages are not among them, nor what
            `closing_traffic` returns.
    """
    setting = StepSetting.of(job, plan, stack)
    passes = pass_entries(setting, BlockTable(), pp_rank)
    return _traffic([*passes, *rank_ledger(setting, pp_rank).entries], REPEATED)


def closing_traffic(
    job: TrainingJob, plan: ResolvedPlan, stack: StackProfile, pp_rank: int
) -> tuple[Traffic, ...]:
    """Return the collectives after the last backward pass, but for data-parallel ones.

    Gradients of weights that saw a rank's own tokens alone are all-reduced over the tensor-parallel
    ranks, a tied embedding's over both ends of the pipeline.
    """
    entries = rank_ledger(StepSetting.of(job, plan, stack), pp_rank).closing
    return _traffic(entries, OTHER_SUMS)


def token_traffic(
    job: TrainingJob, plan: ResolvedPlan, stack: StackProfile, pp_rank: int
) -> tuple[Traffic, ...]:
    """Return the all-reduces of experts' token counts over a stage, if routing has biases."""
    entries = rank_ledger(StepSetting.of(job, plan, stack), pp_rank).closing
    return _traffic(entries, (StepPoint.TOKENS,))


def norm_traffic(
    job: TrainingJob, plan: ResolvedPlan, stack: StackProfile, pp_rank: int
) -> tuple[Traffic, ...]:
    """Return the all-reduces of gradient norm and token counts, where they go axis by axis.

    Else `norm_ranks` sum one number.
    """
    entries = rank_ledger(StepSetting.of(job, plan, stack), pp_rank).closing
    return _traffic(entries, (StepPoint.NORM,)) if stack.norm_by_axis else ()


def message_traffic(
    job: TrainingJob, plan: ResolvedPlan, stack: StackProfile, pp_rank: int
) -> tuple[tuple[Traffic, ...], tuple[Traffic, ...]]:
    """Return the sends of a pipeline rank, and its receives with the gathers that follow."""
    entries = pass_entries(StepSetting.of(job, plan, stack), BlockTable(), pp_rank)
    received = _traffic(entries, (StepPoint.MESSAGE,))
    return tuple(each for each in received if each.op is CollectiveOp.P2P), received


def _traffic(entries: Iterable[LedgerEntry], moments: tuple[StepPoint, ...]) -> tuple[Traffic, ...]:
    """Return the collectives at *moments*, with padding; those of one rank alone are left out."""
    counted: Counter[tuple[MeshAxis, CollectiveOp, int, int]] = Counter()
    for entry in entries:
        for each in entry.collectives if entry.moment in moments else ():
            # Padding of shards is sent, too.
            size_bytes = each.size_bytes + each.padding_bytes
            call = each.axis, each.op, size_bytes, each.span.num_ranks
            counted[call] += each.num_calls * entry.num_times * (each.span.num_ranks > 1)
    return tuple(Traffic(*call, count) for call, count in counted.items() if count)


def norm_ranks(plan: ResolvedPlan) -> int:
    """Return the ranks over which the gradient norm is summed; 1 where each has all gradients.

    Replicas of a shard group hold the same gradients: one group is enough.
    """
    # Without ZeRO every data-parallel rank has all gradients.
    shards = plan.num_shards if plan.zero_stage else 1
    return plan.tp * plan.pp * shards


def norm_calls(plan: ResolvedPlan, stack: StackProfile) -> Counter[int]:
    """Return the all-reduces of gradient norms, of one number each, by group size.

    Experts with a data-parallel group of their own have their own optimizer, which with whole
    states sums over the ranks of all experts (ChainedOptimizer.get_grad_norm of Megatron-Core
    0.16).
    """
    calls = Counter({norm_ranks(plan): 1})
    if plan.ep > 1 and not (stack.joint_gradient_norm and plan.zero_stage):
        calls[norm_ranks(plan) if plan.zero_stage else expert_norm_ranks(plan)] += 1
    return calls


def expert_norm_ranks(plan: ResolvedPlan) -> int:
    """Return the ranks that hold all experts once between them, with unsharded states."""
    return plan.expert_tp * plan.ep * plan.pp


def sent_bytes(traffic: tuple[Traffic, ...], axis: MeshAxis) -> Fraction:
    """Return the bytes that a rank sends over *axis* in a step."""
    return sum((each.sent_bytes for each in traffic if each.axis is axis), start=Fraction(0))
