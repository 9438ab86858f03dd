"""The parallel plan, each of whose fields is declared here and nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from meshwright.hwprofiles import (
    Attention,
    Offload,
    OffloadModule,
    PipelineRuntime,
    Precision,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    StageSplit,
)
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.axes import (
    AXES,
    DP_CP,
    JOINT_AXES,
    Axis,
    check_expert_degrees,
    check_inner,
    check_layers,
    check_modules,
    check_offloaded,
    check_stages,
)
from meshwright.simulator.layout.fields import (
    Declaration,
    Degrees,
    ParameterServer,
    fields_of,
    written,
)
from meshwright.simulator.layout.formats import Formats
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.schedules import SCHEDULES, Schedule, get_schedule

# Ranks of an HSDP sharding group, and those of them that hold the same experts.
SHARDS, EXPERT_SHARDS = "shards", "expert_shards"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputation(Degrees):
    """Microbatches and virtual stages, ZeRO, and activation recomputation."""

    num_virtual_stages: int = Declaration(
        help="Virtual stages of a pipeline rank.",
        option="vpp",
        heading="vpp",
        is_limited=True,
        is_basic=True,
    ).field(1)

    microbatch_size: int = Declaration(
        help="Sequences of one forward pass.",
        option="micro_batch",
        heading="mb",
        is_limited=True,
        is_basic=True,
    ).field(1)

    zero_stage: int = Declaration(
        help="ZeRO stage [the stack's].",
        option="zero",
        heading="zero",
        is_basic=True,
        acts_on=DP_CP,
    ).field(0)
    """Sharded over dp: 0 nothing, 1 optimizer states, 2 gradients, too, 3 parameters, too."""

    sequence_parallel: bool = Declaration(
        help="Split activations outside tensor-parallel regions over the tp axis.",
        heading="sp",
        is_basic=True,
        offered_by="sequence_parallel",
        acts_on=Axis.TP,
    ).field(False)

    recompute: Recompute = Declaration(
        help="What backward computes again; selective: attention; selective-op: torchtitan's.",
        heading="recompute",
        is_basic=True,
        offered_by="recompute_modes",
        without_attention=(Recompute.NONE, Recompute.FULL),
    ).field(Recompute.NONE)

    recompute_modules: tuple[RecomputeModule, ...] = Declaration(
        help="Parts of layers that backward computes again [core_attn].",
        metavar="LIST",
        heading="modules",
        group="replication",
        members=tuple(RecomputeModule),
        without_attention=((),),
    ).field(())

    recompute_layers: int | None = Declaration(
        help="The number N of --recompute-method, with full recomputation [all, one by one].",
        metavar="N",
        heading="layers",
        group="replication",
        is_limited=True,
        is_rare=True,
    ).field(None)
    """The N of `recompute_method`, with full recomputation; None checkpoints each layer."""

    recompute_method: RecomputeMethod | None = Declaration(
        help="The first N layers of a stage; all, N to a checkpoint; every N-th of a rank [block].",
        heading="method",
        group="replication",
        is_rare=True,
        offered_by="recompute_methods",
    ).field(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFields(Recomputation):
    """All fields of a plan, with defaults and declarations."""

    attention: Attention = Declaration(
        help="Attention kernel [the stack's].",
        heading="attention",
        is_basic=True,
        offered_by="attention_kernels",
        without_attention=(),
    ).field(Attention.UNFUSED)

    schedule: str = Declaration(
        help="Pipeline schedule [1f1b; interleaved with --vpp].",
        metavar="NAME",
        after="microbatch_size",
        heading="schedule",
        is_basic=True,
        choices=lambda: tuple(SCHEDULES),
        offered_by="schedules",
        acts_on=Axis.PP,
    ).field("1f1b")

    microbatch_group_size: int | None = Declaration(
        help="Microbatches in a row through a virtual stage [the fewest].",
        metavar="N",
        heading="group",
        group="replication",
        is_rare=True,
        acts_on=Axis.PP,
    ).field(None)

    stages: tuple[int, ...] = Declaration(
        help="Layers of stages: even, ends, balanced, greedy, 3,2,2,1 or Et*3|tt|tL [the stack's].",
        metavar="RULE|LIST",
        heading="stages",
        choices=lambda: tuple(StageSplit),
        is_basic=True,
    ).field(())
    """Layers of each virtual stage in model order; empty where the stack's rule splits them."""

    prediction_stage: int | None = Declaration(
        help="Virtual stage of layers that predict further tokens, from 0 [the loss's].",
        group="replication",
        is_rare=True,
    ).field(None)

    parameter_server: ParameterServer | None = Declaration(
        group="replication", after="offload"
    ).field(None)

    dp_shard: int | None = Declaration(
        help="Ranks that share one set of shards [--dp].", heading="shard", group="replication"
    ).field(None)

    reshard_after_forward: bool | None = Declaration(
        help="Gather again for backward [the stack's].", heading="reshard", group="replication"
    ).field(None)

    gradient_precision: Precision | None = Declaration(
        help="Format of kept gradients [the stack's].",
        metavar="fp32|fp16|bf16",
        heading="grads",
        group="replication",
        is_asked=True,
    ).field(None)

    reduce_precision: Precision | None = Declaration(
        help="Format of reduced ones [the stack's].",
        metavar="fp32|fp16|bf16",
        heading="reduce",
        group="replication",
        is_asked=True,
        acts_on=DP_CP,
    ).field(None)

    moment_precision: Precision | None = Declaration(
        help="Format of Adam's moments, in a precision-aware optimizer [the stack's].",
        metavar="fp32|fp16|bf16|fp8",
        heading="moments",
        group="replication",
        is_rare=True,
        is_asked=True,
        offered_by="moment_precisions",
    ).field(None)

    sync_each_microbatch: bool | None = Declaration(
        help="Reduce gradients in every microbatch.",
        heading="sync",
        group="replication",
        acts_on=DP_CP,
    ).field(None)
    """Reduce gradients in every microbatch, not in the last alone."""

    offload: Offload = Declaration(
        help="What is kept and updated on the host.",
        heading="offload",
        group="replication",
        is_asked=True,
        offered_by="offload_modes",
    ).field(Offload.NONE)

    offload_layers: int | None = Declaration(
        help="First layers whose saved tensors wait on the host [none].",
        metavar="N",
        heading="offloaded",
        group="replication",
        after="offload",
        is_rare=True,
        offered_by="offloads_layers",
    ).field(None)

    offload_modules: tuple[OffloadModule, ...] = Declaration(
        help="Parts of layers whose saved tensors wait on the host.",
        metavar="LIST",
        heading="offloaded parts",
        group="replication",
        after="offload_layers",
        is_rare=True,
        members=tuple(OffloadModule),
        offered_by="offload_modules",
        without_attention=((),),
    ).field(())

    find_unused: bool = Declaration(
        help="Search weights without a gradient.",
        offered_by="finds_unused",
        group="replication",
        after="sync_each_microbatch",
    ).field(False)
    """DDP's ``find_unused_parameters``: search each step's graph, and all-reduce the result."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ResolvedPlan(PlanFields):
    """A complete layout; the product of its degrees is the world size.

    >>> ResolvedPlan(tp=8, pp=2, dp=4)
    ResolvedPlan(tp=8, pp=2, dp=4)
    """

    def __post_init__(self) -> None:
        """Refuse values that contradict each other, whatever the job and the stack."""
        for name in (*AXES, "ep", "num_virtual_stages", "microbatch_size"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} must be >= 1, got {getattr(self, name)}")
        check_inner(self.cp, self.cp_type, self.cp_inner)
        # Experts are divided within a stage, and within a sharding group.
        ranks = self.world_size // self.pp, self.tp * self.num_shards
        check_expert_degrees(self.ep, self.etp, self.tp, *ranks)
        check_modules(self.recompute, self.recompute_modules)
        check_layers(self.recompute, self.recompute_layers, self.recompute_method)
        check_offloaded(self.offload_layers, self.offload_modules)
        if self.dp_shard is not None and (self.dp_shard < 1 or self.dp % self.dp_shard):
            raise PlanError(f"dp_shard={self.dp_shard} does not divide dp={self.dp}")
        check_stages(self.stages, self.pp, self.num_virtual_stages)

    @property
    def expert_tp(self) -> int:
        """Ranks that split the widths of an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def num_shards(self) -> int:
        """Ranks of an HSDP sharding group; context-parallel ranks are always in one."""
        return self.cp * (self.dp if self.dp_shard is None else self.dp_shard)

    @property
    def expert_shards(self) -> int:
        """Ranks of a sharding group, tensor-parallel ones included, that hold the same experts."""
        return self.tp * self.num_shards // (self.ep * self.expert_tp)

    @property
    def dp_cp(self) -> int:
        """Ranks that hold the same parameters, over which gradients are reduced."""
        return self.number(DP_CP)

    @property
    def gradient_formats(self) -> Formats:
        """Gradient formats of the plan; None for the stack's own."""
        return Formats(self.gradient_precision, self.reduce_precision)

    @property
    def world_size(self) -> int:
        """Ranks that the plan occupies."""
        return prod(self.degree(axis) for axis in Axis)

    def degree(self, axis: Axis) -> int:
        """Return the ranks along *axis*."""
        return cast("int", getattr(self, axis))

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees that are shown to people, in the order of the fields."""
        axes = [axis for each in PLAN_FIELDS.values() if (axis := each.declaration.axis)]
        return {
            axis.value: self.degree(axis)
            for axis in axes
            if self.degree(axis) > 1 or not AXES[axis].is_rare
        }

    def number(self, name: str) -> int:
        """Return the column's number of a field, or the ranks of joint axes or sharding groups."""
        if name in JOINT_AXES:
            return prod(map(self.number, JOINT_AXES[name]))
        if name == SHARDS:
            return self.num_shards
        if name == EXPERT_SHARDS:
            return self.expert_shards
        return PLAN_FIELDS[name].code(getattr(self, name))

    @property
    def num_stages(self) -> int:
        """Virtual stages over all pipeline ranks."""
        return self.pp * self.num_virtual_stages

    def schedule_of(self, runtime: PipelineRuntime) -> Schedule:
        """Return the schedule as *runtime* runs it."""
        overlaps = self.expert_overlap is not None
        return get_schedule(self.schedule, runtime, self.microbatch_group_size, beside=overlaps)

    def num_microbatches(self, job: TrainingJob) -> int:
        """Return the microbatches that each data-parallel rank runs in a step."""
        # `check_sharding` has refused remainders.
        return job.global_batch_size // (self.dp * self.microbatch_size)

    @classmethod
    def of(cls, values: Mapping[str, object]) -> "ResolvedPlan":
        """Return the plan with *values* by the names of its fields."""
        return cls(**cast("dict[str, Any]", dict(values)))

    def __repr__(self) -> str:
        """Return the fields that differ from the declared defaults."""
        changed = (
            f"{each.name}={written(getattr(self, each.name))}"
            for each in PLAN_FIELDS.values()
            if getattr(self, each.name) != each.default
        )
        return f"ResolvedPlan({', '.join(changed)})"


PLAN_FIELDS = {each.name: each for each in fields_of(ResolvedPlan)}
# Fields of the search space, one column each, in this order.
SEARCHED_FIELDS = tuple(each for each in PLAN_FIELDS.values() if each.declaration.heading)
