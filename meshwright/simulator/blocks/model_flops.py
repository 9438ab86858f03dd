"""Model FLOPs of a step by the usual convention: GEMMs, full attention, no recomputation.

Per token, forward: ``2 (h (2 q + 2 g) + k h f)`` a layer for the linear layers, with the widths q
of queries (h, unless a head's width is given) and g of keys; for attention ``4 s q`` over all s
keys (not halved for causality), or ``4 min(s, w) q`` in a layer with a window of w (a whole band);
``2 h V`` for the head and ``2 h^2`` more for that of BERT, whose pooler (one token a sequence) is
left out, both of scored positions only; backward is twice that.  For a GPT this is
``72 B s l h^2 (1 + s / 6h + V / 12 l h)`` (Narayanan et al. 2021, arXiv 2104.04473, appendix;
Korthikanti et al. 2022, arXiv 2205.05198, appendix A).
Of routed experts the active ones count; latent attention has head dims of its own.  An MTP layer
adds a projection of 2h inputs and its own logits.  Models that list their layers, and recomputed
FLOPs, are counted in the blocks themselves.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from meshwright.hwprofiles import LossKernel, StackProfile
from meshwright.simulator.blocks.kinds import OUTPUT, listed, walk
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.graph import (
    Block,
    Convolution,
    FusedAttention,
    Lowering,
    Phase,
    Product,
    WeightGradients,
    Work,
)
from meshwright.simulator.layout import ResolvedPlan, TrainingJob, recomputed_layers
from meshwright.simulator.model import (
    EMBEDDING,
    HEAD,
    BlockKind,
    BlockRun,
    ChainModel,
    ImageModel,
    ModelSpec,
    layer_flops,
    mtp_flops,
)

CONVENTION = (
    "matrix products of forward and backward, full attention (not halved for causality), "
    "no recomputation; hardware FLOPs add recomputation"
)
BACKWARD_FACTOR = 2


def model_flops(job: TrainingJob) -> int:
    """Return the model FLOPs of one step over all ranks.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> job = TrainingJob(model=load_model("gpt3-175b"), global_batch_size=1536, seq_len=2048)
    >>> h, l, s, v = 12288, 96, 2048, 51200
    >>> published = 72 * 1536 * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
    >>> round(model_flops(job) / published, 9)
    1.0
    """
    if isinstance(job.model, ModelSpec):
        forward = _transformer_flops(job, job.model)
    else:
        forward = _listed_flops(job.model) * job.global_batch_size
    return (1 + BACKWARD_FACTOR) * forward


def hardware_flops(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> int:
    """Return hardware FLOPs: model FLOPs plus those that *stack* recomputes."""
    undivided = replace(plan, ep=1, etp=None)  # before cp=1: ep may span context-parallel ranks
    one = replace(undivided, tp=1, cp=1, cp_type=None, cp_inner=None, microbatch_size=1)
    unsharded = BlockShape.of(job, one, stack)

    def recomputed_flops(kind: BlockKind) -> int:
        steps = walk(unsharded, kind).tape.steps
        return _flops(each.work for each in steps if each.phase is Phase.RECOMPUTE)

    runs = [*recomputed_layers(job.model, plan)]
    if isinstance(job.model, ModelSpec) and job.model.prediction_layers:
        runs.append(BlockRun(HEAD, 1))
    recomputed = sum(count * recomputed_flops(kind) for kind, count in runs)
    return model_flops(job) + recomputed * job.global_batch_size


def _transformer_flops(job: TrainingJob, model: ModelSpec) -> int:
    """Return the FLOPs of all forward passes of a step."""
    per_token = sum(
        count * layer_flops(model, kind, job.seq_len) for kind, count in model.layer_runs
    )
    hidden = model.hidden_size
    head_width = model.vocab_size + (hidden if model.mlm_head else 0)
    num_scored = ceil(job.tokens_per_step * model.scored_fraction)
    per_token += mtp_flops(model, job.seq_len)
    return per_token * job.tokens_per_step + 2 * hidden * head_width * num_scored


def _listed_flops(model: ImageModel | ChainModel) -> int:
    """Return the FLOPs of a sample's forward pass; they do not depend on the lowering."""
    eager = Lowering(
        fuses_products=False,
        fuses_gate=False,
        fuses_redistribute=False,
        fuses_residual=False,
        saves_first=True,
        weight_gradients=WeightGradients.ADDED,
        loss=LossKernel.EAGER,
    )

    def forward(kind: BlockKind) -> int:
        block = Block({}, eager)
        listed(block, model, kind, 1)
        return _flops(work for each in block.operators for work in each.work)

    runs = (BlockRun(EMBEDDING, 1), *model.layer_runs, BlockRun(OUTPUT, 1))
    return sum(count * forward(kind) for kind, count in runs)


def _flops(works: Iterable[Work]) -> int:
    products = Product | Convolution | FusedAttention
    return sum(int(work.flops) for work in works if isinstance(work, products))
