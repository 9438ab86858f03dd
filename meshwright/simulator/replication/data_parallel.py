"""Data parallelism of a rank's step: gradient reductions, parameter gathers and the update."""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.hwprofiles import (
    CollectiveOp,
    Offload,
    ParameterGather,
    Precision,
    StackProfile,
    Units,
)
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.costs import Category, CostModel, PhaseCost
from meshwright.simulator.layout import (
    REPLICATED,
    STACK_FORMATS,
    Axis,
    Casts,
    ExpertAxis,
    GroupSpan,
    Mesh,
    MeshAxis,
    ResolvedPlan,
    Stage,
    casts_of,
    copies_embedding,
    gradient_bytes,
    is_unwrapped,
    main_gradient_bytes,
    optimizer_bytes,
    reshards_units,
    syncs_by_default,
    zero_communication,
)
from meshwright.simulator.memory import Shards
from meshwright.simulator.model import BlockRun

MAX_STAGE = 3  # of ZeRO: parameters are shards, too
# An fp32 Adam update reads weight, gradient and two moments and writes all but the gradient.
FP32_UPDATE_TRAFFIC_BYTES = 28
EIGHT_BIT_BYTES = 1  # of a weight, or of what is cast of it
# A gradient beside its bucket is copied there and back, each fp32 read once and written once, and
# the first pass of a step adds it to nothing: two reads and a write less.
BUCKET_COPY_TRAFFIC_BYTES = 16 - 12


class Replication(NamedTuple):
    """Data-parallel side of a plan: sharding, groups and their collectives.

    ``keeps_units`` says that parameters stay gathered from a backward pass to the next pass, as
    between the microbatches of a pipeline, ``finds_unused`` is DDP's ``find_unused_parameters``,
    ``is_unwrapped`` that there are no units: one rank alone is not wrapped in fully_shard,
    ``is_flat`` that units are those of Megatron-FSDP. ``span`` is that of a shard group (of a
    data-parallel group where nothing is sharded), ``replica_span`` that of an HSDP replicate group,
    whose ranks hold the same shard: None where all share one shard group.
    """

    zero_stage: int
    span: GroupSpan
    replica_span: GroupSpan | None
    reduce_op: CollectiveOp
    gather_op: CollectiveOp | None
    shards: Shards
    reduces_each_microbatch: bool
    reshards: bool = True
    offload: Offload = Offload.NONE
    keeps_units: bool = False
    finds_unused: bool = False
    is_unwrapped: bool = False
    is_flat: bool = False
    axis: MeshAxis = Axis.DP
    experts: "Replication | None" = None
    """That of routed experts, where other ranks than those of a replica hold the same ones."""

    @property
    def has_replicas(self) -> bool:
        """Whether gradients of some weights are reduced over several ranks."""
        return self.dp_cp > 1 or (self.experts is not None and self.experts.dp_cp > 1)

    @property
    def dp_cp(self) -> int:
        """Number of ranks over which gradients are reduced: data- times context-parallel ones."""
        return self.span.num_ranks * (self.replica_span.num_ranks if self.replica_span else 1)

    @property
    def in_units(self) -> bool:
        """Whether passes gather parameters, reduce sharded gradients or offload them."""
        return self.gathers_units or self.shards.gradients > 1 or self.offload is Offload.OPTIMIZER

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether gradients are accumulated whole, unsharded, until the last microbatch."""
        return self.keeps_units or not self.reduces_each_microbatch

    def in_steps_of(self, num_microbatches: int) -> "Replication":
        """Return the replication of steps of so many microbatches: a single one reduces at once."""
        # Pipeline runtimes keep units and whole gradients whatever the number.
        if num_microbatches > 1 or self.keeps_units:
            return self
        shards = Shards.of(self.span.num_ranks, self.zero_stage)
        return self._replace(reduces_each_microbatch=True, shards=shards)

    @property
    def gathers_units(self) -> bool:
        """Whether passes gather parameters unit by unit; of Megatron-FSDP's maybe some alone."""
        holders = [self, *([self.experts] if self.is_flat and self.experts else [])]
        is_split = any(each.shards.parameters > 1 for each in holders)
        return is_split or self.offload is Offload.PARAMETERS

    @property
    def has_flat_units(self) -> bool:
        """Whether units are Megatron-FSDP's, whose embedding and head stay gathered for a step."""
        return self.is_flat and self.gathers_units

    @property
    def sums_replicas_last(self) -> bool:
        """Whether the replicate groups' all-reduce waits for the last microbatch."""
        return self.is_flat and self.zero_stage == MAX_STAGE and self.replica_span is not None

    @property
    def has_owners(self) -> bool:
        """Whether an owner broadcasts each parameter, and its gradient is reduced to the owner."""
        return self.gather_op is CollectiveOp.BROADCAST

    @classmethod
    def of(
        cls,
        zero_stage: int,
        span: GroupSpan,
        *,
        replica_span: GroupSpan | None = None,
        reduces_each_microbatch: bool = False,
        parameter_gather: ParameterGather = ParameterGather.ALL_GATHER,
    ) -> "Replication":
        """Return the replication of a plan; its collectives follow from the placements.

        Where owners broadcast sharded parameters (Rajbhandari et al. 2020, arXiv 1910.02054,
        section 7.2.2), shards are as large, but each is a contiguous part of the model, not of
        every unit.

        Args:
            zero_stage: ZeRO stage, 0 to 3.
            span: Span of a shard group; without sharding, of a data-parallel group.
            replica_span: Span of an HSDP replicate group.
            reduces_each_microbatch: Whether gradients are reduced in each microbatch.
            parameter_gather: How stage 3 gets parameters to the ranks.
        """
        communication = zero_communication(zero_stage)
        reduce_op = communication.gradient.op
        gather_op = communication.parameters and communication.parameters.op
        # Owners receive the sum of a gradient and broadcast the updated parameter.
        if zero_stage >= 3 and parameter_gather is ParameterGather.BROADCAST:
            reduce_op, gather_op = CollectiveOp.REDUCE, CollectiveOp.BROADCAST
        assert reduce_op is not None
        return cls(
            zero_stage=zero_stage,
            span=span,
            replica_span=replica_span,
            reduce_op=reduce_op,
            gather_op=gather_op,
            shards=Shards.of(
                span.num_ranks, zero_stage, reduces_each_microbatch=reduces_each_microbatch
            ),
            reduces_each_microbatch=reduces_each_microbatch,
        )


def replication_of(plan: ResolvedPlan, stack: StackProfile, mesh: Mesh) -> Replication:
    """Return the data-parallel side of *plan*.

    A shard group is of neighbouring ranks, its replicas are further apart.
    """
    usual = syncs_by_default(stack, plan.zero_stage, plan.pp)
    replicas = plan.dp_cp // plan.num_shards
    stride = mesh.stride(REPLICATED[0])
    found = Replication.of(
        plan.zero_stage,
        mesh.span_of(stride, plan.num_shards),
        replica_span=mesh.span_of(stride * plan.num_shards, replicas) if replicas > 1 else None,
        reduces_each_microbatch=(
            usual if plan.sync_each_microbatch is None else plan.sync_each_microbatch
        ),
        parameter_gather=stack.parameter_gather,
    )._replace(
        reshards=reshards_units(plan, stack),
        offload=plan.offload,
        keeps_units=stack.is_fully_sharded and plan.pp > 1,
        finds_unused=plan.find_unused,
        is_unwrapped=bool(is_unwrapped(stack, plan.dp_cp)),
        is_flat=stack.units is Units.FLAT and plan.pp == 1,
    )
    # Without expert parallelism experts are reduced with all other weights.
    if plan.ep == 1:
        return found
    # Weights of experts have buffers and optimizers of their own (core/distributed and
    # core/optimizer of Megatron-Core 0.16: parameters whose `allreduce` is not set), or units
    # (efsdp of torchtitan 0.2.2, distributed/parallel_dims.py).
    span = mesh.span_of(mesh.stride(ExpertAxis.EDP), plan.expert_shards)
    each = found.reduces_each_microbatch
    shards = Shards.of(span.num_ranks, plan.zero_stage, reduces_each_microbatch=each)
    return found._replace(experts=found._replace(span=span, shards=shards, axis=ExpertAxis.EDP))


class NarrowUnit(NamedTuple):
    """FSDP unit, a layer, whose linear weights fully_shard gathers in 8 bits.

    Args:
        num_parameters: Parameters of the unit, as it is gathered.
        num_narrow: Parameters of these that are gathered in 8 bits.
        num_scales: All-reduces of a weight's largest element before the gather.
        scale_bytes: Bytes of each such all-reduce.
    """

    num_parameters: int
    num_narrow: int
    num_scales: int
    scale_bytes: int


class WireBytes(NamedTuple):
    """Bytes of a parameter in each collective and in the update, and casts around them."""

    reduce_bytes: int
    gather_bytes: int
    update_traffic_bytes: int
    casts: Casts | None = None
    narrow: NarrowUnit | None = None

    def gathered_bytes(self, num_parameters: int) -> int:
        """Return the bytes of the all-gather of a unit, or a bucket, of so many parameters."""
        size_bytes = num_parameters * self.gather_bytes
        # Only layers have 8-bit weights; other units are gathered in one format.
        if self.narrow is None or num_parameters != self.narrow.num_parameters:
            return size_bytes
        return size_bytes - self.narrow.num_narrow * (self.gather_bytes - EIGHT_BIT_BYTES)

    @classmethod
    def of(
        cls, stack: StackProfile, precision: Precision, plan: ResolvedPlan | None = None
    ) -> "WireBytes":
        """Return the bytes of *stack*, with the formats of *plan*; fp32 gathers fp32."""
        wanted = STACK_FORMATS if plan is None else plan.gradient_formats
        kept_bytes, reduce_bytes = gradient_bytes(stack, precision, wanted)
        casts = casts_of(stack, precision, wanted)
        copies = 0 if stack.gradient_as_bucket_view else BUCKET_COPY_TRAFFIC_BYTES
        # fp32 has no master weights to write besides.
        if precision is Precision.FP32:
            return cls(reduce_bytes, 4, FP32_UPDATE_TRAFFIC_BYTES + copies, casts)
        moments = None if plan is None else plan.moment_precision
        copy_bytes = main_gradient_bytes(stack, precision, wanted, moments)
        copies += copy_bytes + kept_bytes if copy_bytes else 0
        update = _update_traffic_bytes(stack, precision, moments) + copies
        return cls(reduce_bytes, precision.num_bytes, update, casts)


def _update_traffic_bytes(
    stack: StackProfile, precision: Precision, moments: Precision | None
) -> int:
    """Return the memory traffic of an update: the stack's, less that of narrower states.

    States are read and written; copies to fp32, where they are made, are read and written twice.
    The stack's number is more than its bytes by a share that is fitted, which stays.
    """
    size, copied = optimizer_bytes(stack, precision, moments)
    saved = 2 * (stack.optimizer_bytes - size)
    whole = 2 * stack.optimizer_bytes + Precision.FP32.num_bytes  # and the gradient
    scratch = 4 * (copied - stack.optimizer_temporary_bytes)
    return stack.optimizer_traffic_bytes * (whole - saved) // whole + scratch


def spread(total: int, num_parts: int) -> list[int]:
    """Return *total* split into *num_parts* whole numbers that differ by at most one.

    >>> spread(7, 3)
    [3, 2, 2]
    """
    share, extra = divmod(total, num_parts)
    return [share + (index < extra) for index in range(num_parts)]


def stage_parameters(shape: BlockShape, stage: Stage) -> int:
    """Return the parameters that one rank holds of *stage*.

    The embedding that a head reads on another stage is a copy.
    """
    total = sum([count * shape.parameters[kind] for kind, count in stage.blocks])
    if copies_embedding(shape.trained, stage):
        total += shape.tied_embedding_parameters
    return total


class BufferCopies(NamedTuple):
    """Copies of a unit on its rank: out of the all-gather's buffer, into the reduce-scatter's."""

    unpack_ps: int
    pack_ps: int


def unit_buffer_copies(
    costs: CostModel,
    num_parameters: int,
    wire: WireBytes,
    replication: Replication,
    *,
    adds_up: bool,
) -> BufferCopies:
    """Return the copy times of a unit of *num_parameters*; 0 where it is gathered flat.

    With per-parameter sharding a rank's message holds a piece of every parameter, so that neither
    buffer holds a parameter in one piece (FSDP2 of PyTorch 2.6, _fsdp_collectives.py:
    split_with_sizes_copy after the all-gather; _chunk_cat, which casts, before the reduce-scatter).
    Gradients that *adds_up* over microbatches are kept in the format in which they are reduced.
    """
    if not (
        costs.stack.copies_units and replication.gathers_units and replication.span.num_ranks > 1
    ):
        return BufferCopies(0, 0)
    kept_bytes = wire.reduce_bytes if adds_up else wire.gather_bytes
    # Each is read once and written once; into the reduction's buffer with a cast between.
    unpack = costs.memory_traffic(2 * wire.gathered_bytes(num_parameters))
    pack = costs.memory_traffic(num_parameters * (kept_bytes + wire.reduce_bytes))
    return BufferCopies(unpack.time_ps, pack.time_ps)


class ParametersByGroup(NamedTuple):
    """Parameters of a rank: those that its replicas hold, too, and those of experts."""

    of_replicas: int
    of_experts: int = 0

    def by_holders(self, replication: Replication) -> list[tuple[int, Replication]]:
        """Return each count with the data-parallel group that holds the same parameters."""
        found = [(self.of_replicas, replication)]
        if replication.experts is not None:
            found.append((self.of_experts, replication.experts))
        return found


def update_cost(
    costs: CostModel,
    held: ParametersByGroup,
    wire: WireBytes,
    replication: Replication,
    cast_bytes: int = 0,
) -> PhaseCost:
    """Return the time of the optimizer on one rank's shard of the *held* parameters.

    *cast_bytes* is the traffic of casting the rank's weights to fp8 after it, if the stack does.
    """
    # Rounded up: ranks whose shard is full decide when a step ends.
    num_updated = sum(
        -(-count // holders.shards.optimizer) for count, holders in held.by_holders(replication)
    )
    cost = costs.memory_traffic(num_updated * wire.update_traffic_bytes + cast_bytes)
    return PhaseCost.total([(Category.OPTIMIZER, cost)])


def parameters_by_group(shape: BlockShape, stages: Sequence[Stage]) -> ParametersByGroup:
    """Return the parameters of a rank that holds *stages*, by data-parallel group."""
    counts, experts = shape.expert_parameters, 0
    # Empty unless experts have a data-parallel group of their own.
    if counts:
        experts = sum(n * counts.get(kind, 0) for stage in stages for kind, n in stage.blocks)
    return ParametersByGroup(sum_parameters(shape, stages) - experts, experts)


def blocks_of(stages: Sequence[Stage]) -> list[BlockRun]:
    """Return the layers, embedding and head of a rank that holds *stages*."""
    return [run for stage in stages for run in stage.blocks]


def sum_parameters(shape: BlockShape, stages: Sequence[Stage]) -> int:
    """Return the number of parameters of a rank that holds *stages*."""
    return sum([stage_parameters(shape, stage) for stage in stages])
