"""FLOPs of a step by the usual convention: matrix products, full attention, no recomputation.

Per token, forward: ``2 (2 h (h + g) + k h f)`` a layer for the linear products, ``4 s h`` for
attention over all s keys (not halved for causality), ``2 h V`` for the head and ``2 h^2`` more
for that of BERT, whose pooler (one token a sequence) is left out, both of scored positions only;
backward is twice that.  For a GPT this is ``72 B s l h^2 (1 + s / 6h + V / 12 l h)`` (Narayanan et
al. 2021, arXiv 2104.04473, appendix; Korthikanti et al. 2022, arXiv 2205.05198, appendix A).
"""

from math import ceil

from meshwright.hwprofiles import Precision, Recompute
from meshwright.simulator.blocks.recompute_policy import repeated_products
from meshwright.simulator.layout import ParallelPlan, TrainingJob
from meshwright.simulator.model import ModelSpec

CONVENTION = (
    "matrix products of forward and backward, full attention (not halved for causality), "
    "no recomputation; hardware FLOPs add recomputation"
)
BACKWARD_FACTOR = 2


def layer_forward_flops(job: TrainingJob) -> int:
    """Return one layer's forward FLOPs for a whole step."""
    model = job.transformer
    hidden, kv_width = model.hidden_size, model.kv_hidden_size
    matrices = 3 if model.gated_mlp else 2
    weights = 2 * hidden * (hidden + kv_width) + matrices * hidden * model.ffn_hidden_size
    return 2 * weights * job.tokens_per_step + attention_forward_flops(job)


def attention_forward_flops(job: TrainingJob) -> int:
    """Return one layer's attention-core FLOPs, forward, for a whole step."""
    return 4 * job.tokens_per_step * job.seq_len * job.transformer.hidden_size


def model_flops(job: TrainingJob) -> int:
    """Return the model FLOPs of one step over all ranks.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> job = TrainingJob(model=load_model("gpt3-175b"), global_batch_size=1536, seq_len=2048)
    >>> h, l, s, v = 12288, 96, 2048, 51200
    >>> published = 72 * 1536 * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
    >>> round(model_flops(job) / published, 9)
    1.0
    """
    model = job.model
    if not isinstance(model, ModelSpec):
        return (1 + BACKWARD_FACTOR) * model.forward_flops * job.global_batch_size
    head_width = model.vocab_size + (model.hidden_size if model.mlm_head else 0)
    num_scored = ceil(job.tokens_per_step * model.scored_fraction)
    head = 2 * model.hidden_size * head_width * num_scored
    forward = model.num_layers * layer_forward_flops(job) + head
    return (1 + BACKWARD_FACTOR) * forward


def hardware_flops(job: TrainingJob, plan: ParallelPlan) -> int:
    """Return the model FLOPs plus what recomputation repeats."""
    model = job.model
    if not isinstance(model, ModelSpec):
        again = model.layers_forward_flops if plan.recompute is Recompute.FULL else 0
        return model_flops(job) + again * job.global_batch_size
    match plan.recompute:
        case Recompute.NONE:
            repeated = 0
        case Recompute.SELECTIVE:
            repeated = attention_forward_flops(job)
        case Recompute.FULL:
            repeated = layer_forward_flops(job)
        case Recompute.SELECTIVE_OP:
            is_fp8 = job.precision is Precision.FP8
            products = repeated_products(model, is_fp8=is_fp8)
            weights = sum(each.inputs * each.outputs for each in products)
            repeated = 2 * weights * job.tokens_per_step
    return model_flops(job) + model.num_layers * repeated
