"""The process groups of a rank in a mesh of pipeline, data and tensor ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright.simulator import ParallelPlan
from meshwright.simulator.layout import Axis, ContextAxis, Mesh, MeshAxis, context_way
from meshwright.validate.programs.context import ContextGroup
from meshwright.validate.programs.contract import ProgramRequest
from meshwright.validate.programs.megatron.buffers import DataParallelGroup
from meshwright.validate.programs.megatron.messages import Neighbours
from meshwright.validate.programs.megatron.tensor_parallel import TensorParallelGroup
from meshwright.validate.ranks import context_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronGroups:
    """Where a rank stands, and with whom it talks.

    Args:
        tp: Tensor-parallel ranks.
        cp: Context-parallel ranks.
        dp: Ranks with the same parameters: data- times context-parallel ranks.
        pipeline: Pipeline ranks.
        ends: First and last pipeline rank, on these; None elsewhere.
        norm: Ranks that hold different gradients, over which the norm is summed: all of them with
            the distributed optimizer, those of one replica without; None where there is one.
        names: Axis of each group, by its ranks.
    """

    tp: TensorParallelGroup
    cp: ContextGroup
    dp: DataParallelGroup
    pipeline: Neighbours
    ends: dist.ProcessGroup | None
    norm: dist.ProcessGroup | None
    names: dict[tuple[int, ...], str]


def megatron_groups(request: ProgramRequest) -> MegatronGroups:
    """Return the groups of a rank; every rank must call this at the same time."""
    plan, rank, device = request.plan, request.rank, request.device
    sizes = (plan.pp, plan.dp_cp, plan.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp", "tp"))
    index, dp_rank, tp_rank = (int(mesh.get_local_rank(name)) for name in ("pp", "dp", "tp"))
    stride = plan.dp_cp * plan.tp
    columns = [tuple(range(first, plan.world_size, stride)) for first in range(stride)]
    own = columns[rank % stride]
    ends = None
    messages = {}
    if plan.pp > 1:
        ends = _own_group([(ranks[0], ranks[-1]) for ranks in columns], (own[0], own[-1]))
        returns = (False, True)[: 1 + (plan.num_virtual_stages > 1)]
        messages = {(way, back): _own_group(columns, own) for way in (1, -1) for back in returns}
    groups = {name: mesh.get_group(name) for name in ("pp", "dp", "tp")}
    groups |= _context_groups(plan, rank)
    norms = _norm_ranks(plan)
    summed = next(ranks for ranks in norms if rank in ranks)
    norm = _own_group(norms, summed) if len(summed) > 1 else None
    names: dict[tuple[int, ...], str] = {summed: "parts"}
    names[tuple(range(plan.world_size))] = "world"
    names[own[0], own[-1]] = "pp"
    for name, group in groups.items():
        names[tuple(dist.get_process_group_ranks(group))] = name
    if plan.cp > 1:  # replicas that only share sequences are those of cp
        names[Mesh.of(plan).group(rank, Axis.CP)] = Axis.CP
    return MegatronGroups(
        tp=TensorParallelGroup(groups["tp"], tp_rank, plan.tp, plan.sequence_parallel),
        cp=_context_group(request, groups, dp_rank % plan.cp),
        dp=DataParallelGroup(groups["dp"], dp_rank, plan.dp_cp),
        pipeline=Neighbours(ranks=own, index=index, groups=messages),
        ends=ends if index in (0, plan.pp - 1) else None,
        norm=norm,
        names=names,
    )


def _context_group(
    request: ProgramRequest, groups: Mapping[str, dist.ProcessGroup], rank: int
) -> ContextGroup:
    plan, num_tokens = request.plan, request.job.seq_len
    way, inner = context_way(plan, request.stack), plan.cp_inner or 1
    found = ContextGroup(groups.get(Axis.CP), rank, plan.cp, num_tokens, way)
    if ContextAxis.INNER not in groups:
        return found
    levels = (
        ContextGroup(groups[ContextAxis.INNER], rank % inner, inner, num_tokens),
        ContextGroup(groups[ContextAxis.OUTER], rank // inner, plan.cp // inner, num_tokens),
    )
    return replace(found, levels=levels)


def _context_groups(plan: ParallelPlan, rank: int) -> dict[str, dist.ProcessGroup]:
    """Return the groups of ranks that attend to each other's tokens: of a ring of swaps both."""
    if plan.cp == 1:
        return {}
    mesh, ranks = Mesh.of(plan), range(plan.world_size)
    axes: tuple[MeshAxis, ...] = (*context_groups(plan, rank),) or (Axis.CP,)
    return {
        axis: _own_group(
            list(dict.fromkeys(mesh.group(each, axis) for each in ranks)), mesh.group(rank, axis)
        )
        for axis in axes
    }


def _norm_ranks(plan: ParallelPlan) -> list[tuple[int, ...]]:
    """Return the sets of ranks that hold all gradients once between them."""
    everyone = tuple(range(plan.world_size))
    if plan.zero_stage or plan.dp_cp == 1:
        return [everyone]
    return [
        tuple(rank for rank in everyone if rank // plan.tp % plan.dp_cp == dp_rank)
        for dp_rank in range(plan.dp_cp)
    ]


def _own_group(groups: list[tuple[int, ...]], own: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group with the ranks *own*, after making all *groups*."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
    return made[own]
