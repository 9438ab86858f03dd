"""What is trained and how it is laid out: the job and the parallel plan."""

from dataclasses import dataclass
from typing import Literal

from meshwright.hwprofiles import Attention, Offload, Precision, Recompute, StackProfile, Strategy
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.formats import Formats, formats_refusal
from meshwright.simulator.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """One training step to lay out: the model, its batch and its number format.

    Args:
        model: Architecture that is trained.
        global_batch_size: Sequences of one optimizer step, over all ranks.
        seq_len: Tokens of a sequence.
        precision: Number format of parameters and activations.
    """

    model: ModelSpec
    global_batch_size: int
    seq_len: int
    precision: Precision = Precision.BF16

    def __post_init__(self) -> None:
        """Refuse a batch or a sequence that no run could have."""
        for field, limit in (("global_batch_size", 10**7), ("seq_len", 10**8)):
            value = getattr(self, field)
            if not 1 <= value <= limit:
                raise PlanError(f"{field}={value} is out of range; allowed 1 to {limit}")
        model = self.model
        if model.positions == "learned" and self.seq_len > model.max_positions:
            raise PlanError(
                f"seq_len={self.seq_len} is longer than the {model.max_positions} learned "
                f"positions of {model.name}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step consumes."""
        return self.global_batch_size * self.seq_len


MAX_SERVERS = 1024
MAX_SLOWDOWN = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServer:
    """Where parameters live when workers pull them, and how workers keep step.

    Args:
        servers: Hosts of their own over which parameters are spread, or all workers.
        asynchronous: Each worker loops on its own; if not, all wait for the update.
        slow_worker: How many times longer the last worker computes than the others.
    """

    servers: int | Literal["all"] = 1
    asynchronous: bool = False
    slow_worker: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values that no run can have."""
        if self.servers != "all" and not 1 <= self.servers <= MAX_SERVERS:
            raise PlanError(f"servers={self.servers} is out of range; allowed 1 to {MAX_SERVERS}")
        if not 1 <= self.slow_worker <= MAX_SLOWDOWN:
            raise PlanError(
                f"slow_worker={self.slow_worker:g} is out of range; allowed 1 to {MAX_SLOWDOWN:g}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """A complete layout; the product of its degrees is the world size.

    Args:
        tp: Tensor-parallel degree.
        pp: Pipeline-parallel degree.
        dp: Data-parallel degree.
        num_virtual_stages: Virtual stages a pipeline rank holds (vpp).
        microbatch_size: Sequences of one forward pass.
        zero_stage: What is sharded over the data-parallel axis: 0 nothing, 1 optimizer states,
            2 gradients, too, 3 parameters, too.
        dp_shard: Data-parallel ranks that share one set of shards; by default all of them. Fewer
            make replicas of the shards (hybrid sharding).
        reshard_after_forward: With sharded parameters, free a unit's after its forward pass and
            gather them again for its backward; if not, they are kept until then.
        sequence_parallel: Activations outside tensor-parallel regions split over the tp axis.
        recompute: Activation recomputation in the backward pass.
        attention: Attention kernel.
        schedule: Name of the pipeline schedule.
        stages: Layers of each virtual stage in model order, ``pp * num_virtual_stages`` numbers.
        parameter_server: Servers of a stack that has them; the data-parallel ranks are workers.
        gradient_precision: Number format in which gradients are kept; None is the stack's.
        reduce_precision: Number format in which they are reduced; None is the stack's, or what
            goes with the gradient precision.
        sync_each_microbatch: Reduce gradients in every microbatch, not in the last one alone;
            None is the stack's habit.
        offload: What is kept and updated on the host.
        find_unused: Look in each step for weights that the loss did not use, whose gradients the
            reduction would otherwise wait for, and tell the other replicas which they are.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    num_virtual_stages: int = 1
    microbatch_size: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    attention: Attention = Attention.UNFUSED
    schedule: str = "1f1b"
    stages: tuple[int, ...] = ()
    parameter_server: ParameterServer | None = None
    dp_shard: int | None = None
    reshard_after_forward: bool = True
    gradient_precision: Precision | None = None
    reduce_precision: Precision | None = None
    sync_each_microbatch: bool | None = None
    offload: Offload = Offload.NONE
    find_unused: bool = False

    def __post_init__(self) -> None:
        """Refuse values that no layout can have."""
        for field in ("tp", "pp", "dp", "num_virtual_stages", "microbatch_size"):
            if getattr(self, field) < 1:
                raise PlanError(f"{field} must be >= 1, got {getattr(self, field)}")
        if self.dp_shard is not None and (self.dp_shard < 1 or self.dp % self.dp_shard):
            raise PlanError(f"dp_shard={self.dp_shard} does not divide dp={self.dp}")
        if len(self.stages) != self.num_stages:
            raise PlanError(
                f"stages lists {len(self.stages)} stages; the plan has "
                f"pp={self.pp} x vpp={self.num_virtual_stages} = {self.num_stages}"
            )
        if min(self.stages) < 0 or 0 in self.stages[1:-1] or self.stages == (0,):
            raise PlanError(
                "every stage needs at least one layer, but for the first and the last one, which "
                f"hold the embedding and the head; got {min(self.stages)}"
            )

    @property
    def num_shards(self) -> int:
        """Data-parallel ranks that share one set of shards."""
        return self.dp if self.dp_shard is None else self.dp_shard

    @property
    def gradient_formats(self) -> Formats:
        """Formats that the plan asks for; None where the stack's are as good."""
        return Formats(self.gradient_precision, self.reduce_precision)

    @property
    def world_size(self) -> int:
        """Ranks that the plan occupies."""
        return self.tp * self.pp * self.dp

    @property
    def num_stages(self) -> int:
        """Virtual stages over all pipeline ranks."""
        return self.pp * self.num_virtual_stages

    def num_microbatches(self, job: TrainingJob) -> int:
        """Return the microbatches that each data-parallel replica runs in a step."""
        return job.global_batch_size // (self.dp * self.microbatch_size)


def check_sharding(job: TrainingJob, plan: ParallelPlan) -> None:
    """Raise PlanError unless *plan* divides the tensors and the batch of *job* evenly.

    Raises:
        PlanError: Naming the first dimension that does not divide.
    """
    model = job.model
    divisions = [
        ("num_heads", model.num_heads, "tp", plan.tp),
        ("ffn_hidden_size", model.ffn_hidden_size, "tp", plan.tp),
        ("hidden_size", model.hidden_size, "tp", plan.tp),
        ("global_batch_size", job.global_batch_size, "dp", plan.dp),
    ]
    if plan.sequence_parallel:
        divisions.append(("seq_len", job.seq_len, "tp", plan.tp))
    for name, value, axis, degree in divisions:
        if value % degree:
            raise PlanError(f"{name}={value} is not divisible by {axis}={degree}")
    if model.num_kv_heads % plan.tp and plan.tp % model.num_kv_heads:
        raise PlanError(
            f"num_kv_heads={model.num_kv_heads} and tp={plan.tp}: one must divide the other"
        )
    per_replica = job.global_batch_size // plan.dp
    if per_replica % plan.microbatch_size:
        raise PlanError(
            f"global_batch_size={job.global_batch_size} leaves {per_replica} sequences a replica "
            f"at dp={plan.dp}, not divisible by microbatch_size={plan.microbatch_size}"
        )
    if sum(plan.stages) != model.num_layers:
        raise PlanError(
            f"stages hold {sum(plan.stages)} layers in all; {model.name} has {model.num_layers}"
        )


def stack_refusal(job: TrainingJob, plan: ParallelPlan, stack: StackProfile) -> str | None:
    """Return why *stack* cannot run *plan*, or None when it can."""
    if plan.parameter_server is not None and stack.strategy is not Strategy.PARAMETER_SERVER:
        return f"parameter_server is not offered by stack {stack.name}; it has no servers"
    offers: list[tuple[str, object, tuple[object, ...]]] = [
        ("precision", job.precision, stack.precisions),
        ("schedule", plan.schedule, stack.schedules),
        ("attention", plan.attention, stack.attention_kernels),
        ("zero_stage", plan.zero_stage, _zero_stages(plan, stack)),
        ("recompute", plan.recompute, stack.recompute_modes),
    ]
    for axis, degree, offered in (
        ("tp", plan.tp, stack.tensor_parallel),
        ("pp", plan.pp, stack.pipeline_parallel),
    ):
        if degree > 1 and not offered:
            return f"{axis}={degree} is not offered by stack {stack.name}; allowed: 1"
    if plan.num_shards < plan.dp and not (stack.hybrid_sharding and plan.zero_stage):
        offers.append(("dp_shard", plan.dp_shard, (plan.dp,)))
    if not plan.reshard_after_forward and not (stack.hybrid_sharding and plan.zero_stage >= 3):
        offers.append(("reshard_after_forward", False, (True,)))
    if plan.sequence_parallel and plan.tp > 1:
        offers.append(("sequence_parallel", True, (False, True)[: 1 + stack.sequence_parallel]))
    for field, value, allowed in offers:
        if value not in allowed:
            known = ", ".join(str(item) for item in allowed) or f"none at pp={plan.pp}"
            return f"{field}={value} is not offered by stack {stack.name}; allowed: {known}"
    return _gradient_refusal(job, plan, stack)


def syncs_by_default(stack: StackProfile, zero_stage: int, pp: int) -> bool:
    """Return whether *stack* reduces gradients in each microbatch unless told otherwise.

    In a pipeline they stay whole until the last microbatch, whatever the stage.
    """
    return stack.reduces_each_microbatch and zero_stage >= 2 and pp == 1


def reduces_once(job: TrainingJob, plan: ParallelPlan, stack: StackProfile) -> bool:
    """Return whether gradients are summed over several microbatches before they are reduced.

    So they are in a pipeline, however few its microbatches.
    """
    each = plan.sync_each_microbatch
    if each is None:
        each = syncs_by_default(stack, plan.zero_stage, plan.pp)
    return plan.pp > 1 or (plan.num_microbatches(job) > 1 and not each)


def _gradient_refusal(job: TrainingJob, plan: ParallelPlan, stack: StackProfile) -> str | None:
    """Return why *stack* cannot treat gradients as *plan* wants, or None when it can."""
    sync = plan.sync_each_microbatch
    if plan.find_unused and not stack.finds_unused:
        return f"find_unused=True is not offered by stack {stack.name}; allowed: False"
    if plan.find_unused and sync:
        return "find_unused=True does not go with sync_each_microbatch=True; allowed: False"
    if stack.strategy is not Strategy.MESH:
        for field in ("gradient_precision", "reduce_precision", "sync_each_microbatch"):
            if getattr(plan, field) is not None:
                return (
                    f"{field}={getattr(plan, field)} is not offered by stack {stack.name}; "
                    f"allowed: with a stack of strategy {Strategy.MESH}"
                )
    if sync and plan.pp > 1:
        return f"sync_each_microbatch=True does not go with pp={plan.pp}; allowed: False"
    usual = syncs_by_default(stack, plan.zero_stage, plan.pp)
    if sync is not None and sync != usual and not stack.optional_microbatch_sync:
        return (
            f"sync_each_microbatch={sync} is not offered by stack {stack.name} at "
            f"zero_stage={plan.zero_stage}; allowed: {usual}"
        )
    return formats_refusal(stack, job.precision, plan.gradient_formats)


def _zero_stages(plan: ParallelPlan, stack: StackProfile) -> tuple[int, ...]:
    """Return the ZeRO stages of *stack* that go with the plan's degrees.

    One replica has nothing to shard: any stage the stack knows is the same as none.
    """
    if plan.dp == 1:
        return tuple(sorted({0, 1, *stack.zero_stages}))
    if plan.pp == 1:
        return stack.zero_stages
    return tuple(stage for stage in stack.zero_stages if stage in stack.pipeline_zero_stages)
