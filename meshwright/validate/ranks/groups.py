"""The process groups that a rank of a plan is in, by the axes of its mesh."""

from meshwright.simulator import ResolvedPlan
from meshwright.simulator.layout import Axis, ContextAxis, ExpertAxis, Mesh, tied_embedding_rank

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "tp")
_AXES = ("pp", "replica", "dp", "tp")  # of these dims, as measurements name them


def mesh_shape(plan: ResolvedPlan) -> tuple[int, ...]:
    """Return the sizes of `MESH_DIMS`; tensor ranks vary fastest.

    >>> mesh_shape(ResolvedPlan(tp=2, dp=4, dp_shard=2, zero_stage=3, stages=(1,)))
    (1, 2, 2, 2)
    """
    return (plan.pp, plan.dp_cp // plan.num_shards, plan.num_shards, plan.tp)


def plan_groups(plan: ResolvedPlan, rank: int, *, is_tied: bool) -> dict[tuple[int, ...], str]:
    """Return the axis of each group that *rank* is in, by its ranks; none has one rank only.

    Args:
        plan: The layout.
        rank: Rank, from 0.
        is_tied: Whether two pipeline ranks hold a tied embedding.

    >>> plan_groups(ResolvedPlan(tp=2, dp=2, stages=(1,)), 1, is_tied=False)
    {(0, 1, 2, 3): 'world', (0, 1): 'tp', (1, 3): 'dp'}
    """
    shape = mesh_shape(plan)
    groups = {tuple(range(plan.world_size)): "world"}
    groups.setdefault(stage_ranks(plan, rank), "stage")
    groups.setdefault(model_shard_ranks(plan, rank), "parts")
    groups |= {ranks: axis.value for axis, ranks in expert_groups(plan, rank).items()}
    groups[batch_ranks(plan, rank)] = "batch" if plan.cp == 1 else "dp"
    groups |= {_along(rank, shape, index): axis for index, axis in enumerate(_AXES)}
    groups[_along(rank, (plan.pp, plan.dp, plan.cp, plan.tp), 2)] = "cp"
    groups |= {ranks: axis.value for axis, ranks in context_groups(plan, rank).items()}
    if is_tied:
        groups.setdefault(tied_embedding_ranks(plan, rank), "table")
    return {ranks: axis for ranks, axis in groups.items() if len(ranks) > 1}


def context_groups(plan: ResolvedPlan, rank: int) -> dict[ContextAxis, tuple[int, ...]]:
    """Return the all-to-all and the ring group of *rank* in hybrid ring + all-to-all.

    >>> context_groups(ResolvedPlan(cp=2), 1)
    {}
    """
    mesh = Mesh.of(plan)
    if not all(mesh.degree(axis) > 1 for axis in ContextAxis):
        return {}
    return {axis: mesh.group(rank, axis) for axis in ContextAxis}


def expert_groups(plan: ResolvedPlan, rank: int) -> dict[ExpertAxis, tuple[int, ...]]:
    """Return the ranks with other experts than *rank*, and those that share shards of its own.

    >>> expert_groups(ResolvedPlan(dp=8, dp_shard=4, ep=2, zero_stage=1, stages=(1,)), 5)
    {<ExpertAxis.EP: 'ep'>: (4, 5), <ExpertAxis.EDP: 'edp'>: (5, 7)}
    """
    if plan.ep == 1:
        return {}
    mesh = Mesh.of(plan)
    sizes = {ExpertAxis.EP: plan.ep, ExpertAxis.EDP: plan.expert_shards}
    return {axis: _ranks_apart(rank, mesh.stride(axis), size) for axis, size in sizes.items()}


def _ranks_apart(rank: int, stride: int, size: int) -> tuple[int, ...]:
    first = rank - rank // stride % size * stride
    return tuple(range(first, first + stride * size, stride))


def model_shard_ranks(plan: ResolvedPlan, rank: int) -> tuple[int, ...]:
    """Return the ranks of the replica of *rank*: all that hold different parts of the model.

    >>> model_shard_ranks(ResolvedPlan(dp=4, dp_shard=2, zero_stage=3, stages=(1,)), 3)
    (2, 3)
    """
    size = (plan.num_shards if plan.zero_stage else 1) * plan.tp
    stride = plan.dp_cp * plan.tp
    first = rank % stride // size * size
    return tuple(
        stage * stride + first + offset for stage in range(plan.pp) for offset in range(size)
    )


def batch_ranks(plan: ResolvedPlan, rank: int) -> tuple[int, ...]:
    """Return the ranks with other sequences, across HSDP shard groups, too.

    >>> batch_ranks(ResolvedPlan(cp=2, dp=2), 1)
    (1, 3)
    """
    return Mesh.of(plan).group(rank, Axis.DP)


def stage_ranks(plan: ResolvedPlan, rank: int) -> tuple[int, ...]:
    """Return all ranks of the pipeline stages of *rank*.

    >>> stage_ranks(ResolvedPlan(pp=2, dp=2, stages=(1, 1)), 2)
    (2, 3)
    """
    return _along(rank, (plan.pp, plan.world_size // plan.pp), 1)


def tied_embedding_ranks(plan: ResolvedPlan, rank: int) -> tuple[int, ...]:
    """Return the ranks of a pipeline that may share an embedding, if *rank* is one of them."""
    pipeline = _along(rank, mesh_shape(plan), 0)
    ends = (pipeline[0], pipeline[tied_embedding_rank(plan)])
    return ends if ends[0] != ends[1] and rank in ends else ()


def _along(rank: int, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Return the ranks that differ from *rank* along one dim of a mesh only.

    >>> _along(5, (2, 2, 2), 1)
    (5, 7)
    """
    stride = 1
    for size in shape[dim + 1 :]:
        stride *= size
    return _ranks_apart(rank, stride, shape[dim])
