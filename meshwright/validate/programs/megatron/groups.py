"""The process groups of a rank in a mesh of pipeline, data and tensor ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright.simulator import ResolvedPlan
from meshwright.simulator.layout import (
    Axis,
    ContextAxis,
    ExpertAxis,
    Mesh,
    MeshAxis,
    context_way,
    table_rank,
)
from meshwright.validate.programs.context import ContextGroup
from meshwright.validate.programs.contract import ProgramRequest
from meshwright.validate.programs.experts import ExpertGroup
from meshwright.validate.programs.megatron.buffers import DataParallelGroup
from meshwright.validate.programs.megatron.messages import Neighbours
from meshwright.validate.programs.megatron.tensor_parallel import TensorParallelGroup
from meshwright.validate.ranks import batch_ranks, context_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronGroups:
    """Where a rank stands, and with whom it talks.

    Args:
        tp: Tensor-parallel ranks.
        cp: Context-parallel ranks.
        dp: Ranks with the same parameters: data- times context-parallel ranks.
        experts: Ranks that share the experts of a layer.
        edp: Ranks with the same experts; None where these are those of *dp*.
        pipeline: Pipeline ranks.
        ends: The pipeline ranks that may share a table, on these; None elsewhere.
        stage: All ranks of a stage; None where there is one.
        norm: Ranks that hold different gradients, over which the norm is summed: all of them with
            the distributed optimizer, those of one replica without; None where there is one.
        names: Axis of each group, by its ranks.
    """

    tp: TensorParallelGroup
    cp: ContextGroup
    dp: DataParallelGroup
    experts: ExpertGroup
    edp: DataParallelGroup | None
    pipeline: Neighbours
    ends: dist.ProcessGroup | None
    stage: dist.ProcessGroup | None
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
    other, messages = table_rank(plan), {}
    pairs: list[tuple[int, ...]] = [(ranks[0], ranks[other]) for ranks in columns]
    ends = _own_group(pairs, (own[0], own[other])) if other else None
    if plan.pp > 1:
        returns = (False, True)[: 1 + (plan.num_virtual_stages > 1)]
        messages = {(way, back): _own_group(columns, own) for way in (1, -1) for back in returns}
    groups = {name: mesh.get_group(name) for name in ("pp", "dp", "tp")}
    groups |= _context_groups(request)
    expert_groups = _expert_groups(plan, rank)
    norms = _norm_ranks(plan)
    summed = next(ranks for ranks in norms if rank in ranks)
    norm = _own_group(norms, summed) if len(summed) > 1 else None
    stages = [tuple(range(first, first + stride)) for first in range(0, plan.world_size, stride)]
    names: dict[tuple[int, ...], str] = {stages[index]: "stage", summed: "parts"}
    names[tuple(range(plan.world_size))] = "world"
    names[own[0], own[other]] = "pp"
    for name, group in (expert_groups | groups).items():
        names[tuple(dist.get_process_group_ranks(group))] = name
    if plan.cp > 1:  # replicas that share no sequences, and that only share them
        names[batch_ranks(plan, rank)] = Axis.DP
        names[Mesh.of(plan).group(rank, Axis.CP)] = Axis.CP
    return MegatronGroups(
        tp=TensorParallelGroup(groups["tp"], tp_rank, plan.tp, plan.sequence_parallel),
        cp=_context_group(request, groups, dp_rank % plan.cp),
        dp=DataParallelGroup(groups["dp"], dp_rank, plan.dp_cp),
        experts=_expert_group(plan, rank, expert_groups, groups["tp"]),
        edp=_expert_replicas(plan, rank, expert_groups),
        pipeline=Neighbours(ranks=own, index=index, groups=messages),
        ends=ends if index in (0, other) else None,
        stage=_own_group(stages, stages[index]) if stride > 1 else None,
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


def _expert_groups(plan: ResolvedPlan, rank: int) -> dict[str, dist.ProcessGroup]:
    """Return the groups of ranks with other experts, other parts of them, or the same."""
    mesh = Mesh.of(plan)
    known = ExpertAxis.ALL, ExpertAxis.ETP, ExpertAxis.EP, ExpertAxis.EDP  # the last name counts
    axes = [axis for axis in known if mesh.degree(axis) > 1] if plan.ep > 1 else []
    return {axis: _mesh_group(mesh, axis, rank) for axis in axes}


def _expert_group(
    plan: ResolvedPlan, rank: int, groups: Mapping[str, dist.ProcessGroup], tp: dist.ProcessGroup
) -> ExpertGroup:
    """Return who shares experts: without ``ep`` the tensor-parallel ranks, which split them."""
    if plan.ep == 1:
        one = tp if plan.tp > 1 else None
        return ExpertGroup(etp=one, everyone=one, etp_rank=rank % plan.tp, num_etp=plan.tp)
    etp = plan.expert_tp
    return ExpertGroup(
        ep=groups[ExpertAxis.EP],
        etp=groups.get(ExpertAxis.ETP),
        everyone=groups[ExpertAxis.ALL],
        ep_rank=rank // etp % plan.ep,
        etp_rank=rank % etp,
        num_ep=plan.ep,
        num_etp=etp,
    )


def _expert_replicas(
    plan: ResolvedPlan, rank: int, groups: Mapping[str, dist.ProcessGroup]
) -> DataParallelGroup | None:
    """Return the ranks with the same experts, where these are others than with the same layers."""
    if plan.ep == 1:
        return None
    mesh = Mesh.of(plan)
    ranks = mesh.group(rank, ExpertAxis.EDP)
    group = groups.get(ExpertAxis.EDP)
    return DataParallelGroup(group, ranks.index(rank), len(ranks), plan.dp_cp)


def _context_groups(request: ProgramRequest) -> dict[str, dist.ProcessGroup]:
    """Return the groups of ranks that attend to each other's tokens: of a ring of swaps both.

    What predicts further tokens sends them among all ranks.
    """
    plan, rank = request.plan, request.rank
    if plan.cp == 1:
        return {}
    levels: tuple[MeshAxis, ...] = (*context_groups(plan, rank),)
    is_whole = not levels or request.job.transformer.prediction_layers > 0
    axes = (*levels, Axis.CP) if is_whole else levels
    return {axis: _mesh_group(Mesh.of(plan), axis, rank) for axis in axes}


def _mesh_group(mesh: Mesh, axis: MeshAxis, rank: int) -> dist.ProcessGroup:
    """Return the group of *rank* along an axis; all ranks make those of all."""
    groups = dict.fromkeys(mesh.group(each, axis) for each in range(mesh.world_size))
    return _own_group(list(groups), mesh.group(rank, axis))


def _norm_ranks(plan: ResolvedPlan) -> list[tuple[int, ...]]:
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
