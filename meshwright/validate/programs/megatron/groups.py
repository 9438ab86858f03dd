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
    context_parallel_type,
    tied_embedding_rank,
)
from meshwright.validate.programs.context import ContextGroup
from meshwright.validate.programs.contract import ProgramRequest
from meshwright.validate.programs.experts import ExpertGroup
from meshwright.validate.programs.megatron.buffers import DataParallelGroup
from meshwright.validate.programs.megatron.messages import Neighbours
from meshwright.validate.programs.megatron.tensor_parallel import TensorParallelGroup
from meshwright.validate.ranks import (
    MESH_DIMS,
    batch_ranks,
    context_groups,
    expert_groups,
    mesh_shape,
    model_shard_ranks,
    stage_ranks,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronGroups:
    """Process groups of a rank, and its position in each.

    Args:
        tp: Tensor-parallel ranks.
        cp: Context-parallel ranks.
        dp: Ranks with the same parameters, data- times context-parallel ranks, and the shards that
            they have of the optimizer's states.
        experts: Ranks that share the experts of a layer.
        edp: Ranks with the same experts; None where these are those of *dp*.
        pipeline: Pipeline ranks.
        ends: Pipeline ranks that may share a tied embedding, on these; None elsewhere.
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
    mesh = init_device_mesh(device.type, mesh_shape(plan), mesh_dim_names=MESH_DIMS)
    index, tp_rank = (int(mesh.get_local_rank(name)) for name in ("pp", "tp"))
    stride = plan.dp_cp * plan.tp
    # Tensor ranks are neighbours, then context and data ranks, then pipeline ranks.
    dp_rank = rank // plan.tp % plan.dp_cp
    columns = [tuple(range(first, plan.world_size, stride)) for first in range(stride)]
    own = columns[rank % stride]
    other, messages = tied_embedding_rank(plan), {}
    pairs: list[tuple[int, ...]] = [(ranks[0], ranks[other]) for ranks in columns]
    ends = _own_group(pairs, (own[0], own[other])) if other else None
    if plan.pp > 1:
        returns = (False, True)[: 1 + (plan.num_virtual_stages > 1)]
        messages = {(way, back): _own_group(columns, own) for way in (1, -1) for back in returns}
    groups = {"pp": mesh.get_group("pp")}
    groups |= {"dp": mesh.get_group("dp_shard"), "tp": mesh.get_group("tp")}
    groups |= _context_groups(request)
    has_sets = plan.num_shards < plan.dp_cp
    replicas = mesh.get_group("dp_replicate") if has_sets else None
    divided = _expert_groups(plan, rank)
    norms = list(dict.fromkeys(model_shard_ranks(plan, each) for each in range(plan.world_size)))
    summed = model_shard_ranks(plan, rank)
    norm = _own_group(norms, summed) if len(summed) > 1 else None
    stages = [tuple(range(first, first + stride)) for first in range(0, plan.world_size, stride)]
    sets = {} if replicas is None else {"replica": replicas}
    names = _names(plan, rank, sets | divided | groups)
    names.setdefault((own[0], own[other]), "pp")
    return MegatronGroups(
        tp=TensorParallelGroup(groups["tp"], tp_rank, plan.tp, plan.sequence_parallel),
        cp=_context_group(request, groups, dp_rank % plan.cp),
        dp=DataParallelGroup(groups["dp"], dp_rank, plan.num_shards, plan.dp_cp, replicas),
        experts=_expert_group(plan, rank, divided, groups["tp"]),
        edp=_expert_replicas(plan, rank, divided, replicas),
        pipeline=Neighbours(ranks=own, index=index, groups=messages),
        ends=ends if index in (0, other) else None,
        stage=_own_group(stages, stages[index]) if stride > 1 else None,
        norm=norm,
        names=names,
    )


def _names(
    plan: ResolvedPlan, rank: int, groups: Mapping[str, dist.ProcessGroup]
) -> dict[tuple[int, ...], str]:
    """Return the axis of each group of a rank, by its ranks; of several axes the last one's."""
    names = {stage_ranks(plan, rank): "stage", model_shard_ranks(plan, rank): "parts"}
    names[tuple(range(plan.world_size))] = "world"
    if plan.num_shards < plan.dp_cp:
        names[batch_ranks(plan, rank)] = "batch"
    names |= {tuple(dist.get_process_group_ranks(each)): name for name, each in groups.items()}
    if plan.cp > 1:  # replicas that share no sequences, and that only share them
        names[batch_ranks(plan, rank)] = Axis.DP
        names[Mesh.of(plan).group(rank, Axis.CP)] = Axis.CP
    return names


def _context_group(
    request: ProgramRequest, groups: Mapping[str, dist.ProcessGroup], rank: int
) -> ContextGroup:
    plan, num_tokens = request.plan, request.job.seq_len
    way, inner = context_parallel_type(plan, request.stack), plan.cp_inner or 1
    group = ContextGroup(groups.get(Axis.CP), rank, plan.cp, num_tokens, way)
    if ContextAxis.INNER not in groups:
        return group
    levels = (
        ContextGroup(groups[ContextAxis.INNER], rank % inner, inner, num_tokens),
        ContextGroup(groups[ContextAxis.OUTER], rank // inner, plan.cp // inner, num_tokens),
    )
    return replace(group, levels=levels)


def _expert_groups(plan: ResolvedPlan, rank: int) -> dict[str, dist.ProcessGroup]:
    """Return the groups of ranks with other experts, other parts of them, or shards of the same."""
    mesh = Mesh.of(plan)
    known = ExpertAxis.ALL, ExpertAxis.ETP, ExpertAxis.EP  # the last name counts
    axes = [axis for axis in known if mesh.degree(axis) > 1] if plan.ep > 1 else []
    groups: dict[str, dist.ProcessGroup] = {axis: _mesh_group(mesh, axis, rank) for axis in axes}
    if plan.ep > 1 and plan.expert_shards > 1:
        axis = ExpertAxis.EDP
        ranks = [expert_groups(plan, each)[axis] for each in range(plan.world_size)]
        groups[axis] = _own_group(list(dict.fromkeys(ranks)), ranks[rank])
    return groups


def _expert_group(
    plan: ResolvedPlan, rank: int, groups: Mapping[str, dist.ProcessGroup], tp: dist.ProcessGroup
) -> ExpertGroup:
    """Return the group that shares experts; without ``ep`` the tp ranks, which split them."""
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
    plan: ResolvedPlan,
    rank: int,
    groups: Mapping[str, dist.ProcessGroup],
    replicas: dist.ProcessGroup | None,
) -> DataParallelGroup | None:
    """Return the ranks with the same experts, where these are others than with the same layers."""
    if plan.ep == 1:
        return None
    place = Mesh.of(plan).group(rank, ExpertAxis.EDP).index(rank)
    group = groups.get(ExpertAxis.EDP)
    return DataParallelGroup(group, place, plan.expert_shards, plan.dp_cp, replicas)


def _context_groups(request: ProgramRequest) -> dict[str, dist.ProcessGroup]:
    """Return the groups of context-parallel ranks; of hybrid ring + all-to-all both levels.

    MTP shifts tokens among all of these ranks.
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


def _own_group(groups: list[tuple[int, ...]], own: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group with the ranks *own*, after making all *groups*."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
    return made[own]
