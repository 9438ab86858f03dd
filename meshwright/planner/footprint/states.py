"""What the states of a model take at least, however devices divide them."""

from meshwright.hwprofiles import Offload, StackProfile
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.simulator.layout import gradient_bytes
from meshwright.simulator.memory import StateBytes
from meshwright.simulator.model import count_trained_parameters
from meshwright.simulator.replication import EIGHT_BIT_BYTES


def least_state_bytes(
    job: TrainingJob, stack: StackProfile, plan: ResolvedPlan, num_gpus: int
) -> int:
    """Return no more bytes than the live ones of the fullest of so many devices, in any layout.

    When the optimizer updates them, weights, gradients and optimizer states of all parameters are
    on some device: one at least has as much as all have on average.

    Args:
        job: What is trained.
        stack: With what software.
        plan: Whose formats layouts have, and what is kept on the host.
        num_gpus: Devices.

    >>> from meshwright.hwprofiles import load_stack
    >>> from meshwright.simulator import load_model
    >>> job = TrainingJob(model=load_model("gpt2"), global_batch_size=8, seq_len=1024)
    >>> least_state_bytes(job, load_stack("megatron-core"), ResolvedPlan(), 8) * 8 / 124439808
    18.0
    """
    if plan.offload is not Offload.NONE:
        return 0
    formats = plan.gradient_formats
    state = StateBytes.of(stack, job.precision, formats, plan.moment_precision)
    weight, recipe = min(state.parameter, state.sharded_parameter), stack.recipes.get(job.precision)
    if recipe is not None and recipe.holds_parameters:
        weight = min(weight, EIGHT_BIT_BYTES)
    gradient = min(gradient_bytes(stack, job.precision, formats))
    each = weight + gradient + state.optimizer
    return count_trained_parameters(job.model) * each // num_gpus
