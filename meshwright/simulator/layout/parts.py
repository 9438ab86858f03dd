"""Models with parts that a stack is not known to run."""

from meshwright.hwprofiles import Kernels, Precision, StackProfile
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.model import Experts, ModelSpec


def parts_refusal(job: TrainingJob, model: ModelSpec, stack: StackProfile) -> str | None:
    """Return why *stack*, which has such parts, does not run *model*, or None when it does."""
    if model.experts is None and model.latent is None:
        return None
    if job.precision is Precision.FP8:
        return f"precision=fp8 is not offered for {model.name}; allowed: another one"
    if model.latent is not None and stack.fused_qkv and stack.kernels is Kernels.EAGER:
        return f"kernels=eager is not offered for {model.name}; allowed: {Kernels.FUSED}"
    kinds = {run.kind for run in model.layer_runs}
    if stack.is_fully_sharded and len(kinds) > 1:
        return f"stack {stack.name} shards layers of one kind; {model.name} has {len(kinds)}"
    return None if model.experts is None else _expert_refusal(model.name, model.experts, stack)


def _expert_refusal(name: str, experts: Experts, stack: StackProfile) -> str | None:
    """Return why *stack* cannot run these experts, or None when it can."""
    found = None
    if experts.shared_gate:
        found = "a gate of shared experts"
    elif stack.transformers_layers and experts.shared_hidden_size:
        found = "shared experts"
    elif stack.transformers_layers and experts.scores != "softmax":
        found = "scores by sigmoid"
    return found and f"{name} has {found}, which stack {stack.name} is not known to run"
