"""What a rank puts on the wire in a step: every collective with its axis, size and count."""

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from meshwright.hwprofiles import CollectiveOp, StackProfile
from meshwright.simulator.blocks import SHIFTED_BYTES, BlockTable
from meshwright.simulator.costs import sent_ratio
from meshwright.simulator.layout import Axis, MeshAxis, ResolvedPlan, TrainingJob
from meshwright.simulator.ledger import LedgerEntry, Moment, StepSetting, pass_entries, rank_ledger

OTHER_SUMS = (Moment.SUMS, Moment.TIED_TABLE)
# Who takes part in a norm that is one number is `norm_ranks`.
ELSEWHERE = (*OTHER_SUMS, Moment.TOKENS, Moment.NORM, Moment.MESSAGE)
REPEATED = tuple(moment for moment in Moment if moment not in ELSEWHERE)


class Traffic(NamedTuple):
    """Equal collectives of one rank in one step; ``size_bytes`` as in `Collective`."""

    axis: MeshAxis
    op: CollectiveOp
    size_bytes: int
    num_ranks: int
    num_calls: int

    @property
    def sent_bytes(self) -> Fraction:
        """Bytes the rank sends in all of them, by ring; where one rank is the root, on average.

        >>> from meshwright.simulator.layout import Axis
        >>> Traffic(Axis.DP, CollectiveOp.ALL_REDUCE, 800, 8, 1).sent_bytes
        Fraction(1400, 1)
        """
        return self.num_calls * self.size_bytes * sent_ratio(self.op, self.num_ranks)

    def shifts_tokens(self, microbatch_size: int) -> bool:
        """Return whether they take a number of a token of each sequence to a neighbour.

        Where sequences begin and end there is one neighbour, which half of them go to.  Keys and
        values of a ring are more: of two tokens and two elements a head at least.
        """
        is_message = self.axis is Axis.CP and self.op is CollectiveOp.P2P
        return is_message and self.size_bytes in {each * microbatch_size for each in SHIFTED_BYTES}


def rank_traffic(
    job: TrainingJob, plan: ResolvedPlan, stack: StackProfile, pp_rank: int
) -> tuple[Traffic, ...]:
    """Return the tensor- and data-parallel collectives of a pipeline rank in one step.

    Args:
        job: What is trained.
        plan: How it is laid out.
        stack: With what software.
        pp_rank: Whose collectives; messages between stages are not among them, nor what
            `closing_traffic` returns.
    """
    setting = StepSetting.of(job, plan, stack)
    passes = pass_entries(setting, BlockTable(), pp_rank)
    return _traffic([*passes, *rank_ledger(setting, pp_rank).entries], REPEATED)


def closing_traffic(
    job: TrainingJob, plan: ResolvedPlan, stack: StackProfile, pp_rank: int
) -> tuple[Traffic, ...]:
    """Return the collectives after the last backward pass, but for those of the replicas.

    Gradients of weights that saw only a rank's own tokens are summed over the tensor-parallel
    ranks, a tied table's over both ends of the pipeline.
    """
    entries = rank_ledger(StepSetting.of(job, plan, stack), pp_rank).closing
    return _traffic(entries, OTHER_SUMS)


def token_traffic(
    job: TrainingJob, plan: ResolvedPlan, stack: StackProfile, pp_rank: int
) -> tuple[Traffic, ...]:
    """Return what all ranks of a stage sum of the tokens of experts, if routing has biases."""
    entries = rank_ledger(StepSetting.of(job, plan, stack), pp_rank).closing
    return _traffic(entries, (Moment.TOKENS,))


def norm_traffic(
    job: TrainingJob, plan: ResolvedPlan, stack: StackProfile, pp_rank: int
) -> tuple[Traffic, ...]:
    """Return what sums the gradient norm, and the tokens, where that goes axis by axis.

    Else `norm_ranks` sum one number.
    """
    entries = rank_ledger(StepSetting.of(job, plan, stack), pp_rank).closing
    return _traffic(entries, (Moment.NORM,)) if stack.norm_by_axis else ()


def message_traffic(
    job: TrainingJob, plan: ResolvedPlan, stack: StackProfile, pp_rank: int
) -> tuple[tuple[Traffic, ...], tuple[Traffic, ...]]:
    """Return what a pipeline rank sends, and what it receives with the gathers that follow."""
    entries = pass_entries(StepSetting.of(job, plan, stack), BlockTable(), pp_rank)
    received = _traffic(entries, (Moment.MESSAGE,))
    return tuple(each for each in received if each.op is CollectiveOp.P2P), received


def _traffic(entries: Iterable[LedgerEntry], moments: tuple[Moment, ...]) -> tuple[Traffic, ...]:
    """Return what is sent at *moments*, with what fills it up; a rank alone sends nothing."""
    counted: Counter[tuple[MeshAxis, CollectiveOp, int, int]] = Counter()
    for entry in entries:
        for each in entry.collectives if entry.moment in moments else ():
            size_bytes = each.size_bytes + each.padding_bytes
            call = each.axis, each.op, size_bytes, each.span.num_ranks
            counted[call] += each.num_calls * entry.num_times * (each.span.num_ranks > 1)
    return tuple(Traffic(*call, count) for call, count in counted.items() if count)


def norm_ranks(plan: ResolvedPlan) -> int:
    """Return over how many ranks the gradient norm is summed; 1 where each has all gradients.

    Replicas of a set of shards hold the same gradients: one set is enough.
    """
    shards = plan.num_shards if plan.zero_stage else 1
    return plan.tp * plan.pp * shards


def norm_calls(plan: ResolvedPlan, stack: StackProfile) -> Counter[int]:
    """Return over how many ranks a gradient norm is summed, and how often: one number each.

    Experts that other ranks hold have an optimizer of their own, which with whole states sums over
    the ranks of all experts (ChainedOptimizer.get_grad_norm of Megatron-Core 0.16).
    """
    calls = Counter({norm_ranks(plan): 1})
    if plan.ep > 1 and not (stack.joint_gradient_norm and plan.zero_stage):
        calls[norm_ranks(plan) if plan.zero_stage else expert_norm_ranks(plan)] += 1
    return calls


def expert_norm_ranks(plan: ResolvedPlan) -> int:
    """Return the ranks that hold all experts once between them, with whole states."""
    return plan.expert_tp * plan.ep * plan.pp


def sent_bytes(traffic: tuple[Traffic, ...], axis: MeshAxis) -> Fraction:
    """Return what a rank sends over *axis* in a step."""
    return sum((each.sent_bytes for each in traffic if each.axis is axis), start=Fraction(0))
