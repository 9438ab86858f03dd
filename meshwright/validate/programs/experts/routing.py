"""Routing of tokens to experts: by their scores, or balanced."""

import torch
from torch import Tensor

from meshwright.hwprofiles import Dispatcher
from meshwright.simulator import PlanError, ResolvedPlan, TrainingJob
from meshwright.simulator.model import Experts
from meshwright.validate.programs.contract import Routing
from meshwright.validate.programs.experts.balance import RoutingBias
from meshwright.validate.programs.fused import AutogradFunction, Context


def choose_experts(
    scores: Tensor, experts: Experts, routing: Routing, bias: RoutingBias | None = None
) -> Tensor:
    """Return the ``[tokens, k]`` experts of tokens, by ``[tokens, E]`` *scores* and *bias*.

    Balanced routing deals tokens out round-robin, whatever their scores.  Where groups are chosen,
    too, logits are no scores: sums of them are in another order.
    """
    num_tokens, num_experts = scores.shape
    chosen = experts.experts_per_token
    if not routing.is_balanced:
        scores = scores.detach() if bias is None else bias(scores)
        if experts.num_groups > 1:
            scores = _mask_other_groups(scores, experts)
        return scores.topk(chosen, dim=-1).indices
    turns = torch.arange(num_tokens * chosen, device=scores.device)
    return turns.remainder_(num_experts).view(num_tokens, chosen)


def outside_expert_groups(scores: Tensor, experts: Experts, routing: Routing) -> Tensor:
    """Return a mask of *scores* outside of a token's expert groups; none where balanced."""
    if routing.is_balanced:
        return torch.zeros_like(scores, dtype=torch.bool)
    return _mask_other_groups(scores.detach(), experts).isneginf()


def _mask_other_groups(scores: Tensor, experts: Experts) -> Tensor:
    """Return *scores* without those outside of a token's groups.

    A group is as good as its best experts together, as many as a token takes of each (DeepSeek-V3,
    arXiv 2412.19437, 2.1.2; `group_limited_topk` of megatron/core/transformer/moe, core 0.16).
    """
    grouped = scores.unflatten(-1, (experts.num_groups, -1))
    best = grouped.topk(max(1, experts.experts_per_token // experts.groups_per_token)).values
    groups = best.sum(dim=-1).topk(experts.groups_per_token).indices
    in_groups = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, groups, value=True)
    return grouped.masked_fill(~in_groups.unsqueeze(-1), -torch.inf).flatten(-2)


class GatheredScores(AutogradFunction):
    """Scores of each token's experts; keeps their indices, as `torch.topk` does."""

    @staticmethod
    def forward(ctx: Context, scores: Tensor, expert_indices: Tensor) -> Tensor:
        """Return ``[tokens, k]`` of ``[tokens, E]`` *scores*."""
        ctx.save_for_backward(expert_indices)
        ctx.num_experts = scores.shape[1]
        return scores.gather(1, expert_indices)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of all scores."""
        (expert_indices,) = ctx.saved_tensors
        score_gradient = gradient.new_zeros((gradient.shape[0], ctx.num_experts))
        return score_gradient.scatter_(1, expert_indices, gradient), None


def refuse_routing(job: TrainingJob, plan: ResolvedPlan) -> None:
    """Raise PlanError for experts whose routing no program writes."""
    experts = job.transformer.experts
    if experts is None:
        return
    unsupported = {
        f"dispatcher={plan.dispatcher}": plan.dispatcher not in (None, Dispatcher.ALL_TO_ALL),
        f"expert_overlap={plan.expert_overlap}": plan.expert_overlap is not None,
        f"imbalance={job.imbalance:g}": job.imbalance != 1,
    }
    for setting, is_set in unsupported.items():
        if is_set:
            raise PlanError(f"{setting} has no PyTorch program; allowed: leave it out")
    split = plan.tp if plan.sequence_parallel else 1
    num_tokens = job.seq_len // plan.cp // split * plan.microbatch_size
    rows = num_tokens * experts.experts_per_token
    if rows % experts.num_experts:
        raise PlanError(
            f"a rank's {num_tokens:,} tokens go to {rows:,} experts in all, which "
            f"num_experts={experts.num_experts} does not divide: no PyTorch program is balanced so"
        )
