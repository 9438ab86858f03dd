"""The process groups of a rank in a mesh of pipeline, data and tensor ranks."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright.simulator import ParallelPlan
from meshwright.simulator.layout import Axis
from meshwright.validate.programs.context import ContextGroup
from meshwright.validate.programs.contract import ProgramRequest
from meshwright.validate.programs.megatron.buffers import DataParallelGroup
from meshwright.validate.programs.megatron.messages import Neighbours
from meshwright.validate.programs.megatron.tensor_parallel import TensorParallelGroup


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
    if plan.cp > 1:
        sharing = _sharing_sequences(plan)
        groups[Axis.CP] = _own_group(sharing, next(ranks for ranks in sharing if rank in ranks))
    norms = _norm_ranks(plan)
    summed = next(ranks for ranks in norms if rank in ranks)
    norm = _own_group(norms, summed) if len(summed) > 1 else None
    names: dict[tuple[int, ...], str] = {summed: "parts"}
    names[tuple(range(plan.world_size))] = "world"
    names[own[0], own[-1]] = "pp"
    for name, group in groups.items():
        names[tuple(dist.get_process_group_ranks(group))] = name
    return MegatronGroups(
        tp=TensorParallelGroup(groups["tp"], tp_rank, plan.tp, plan.sequence_parallel),
        cp=_context_group(request, groups.get(Axis.CP), dp_rank % plan.cp),
        dp=DataParallelGroup(groups["dp"], dp_rank, plan.dp_cp),
        pipeline=Neighbours(ranks=own, index=index, groups=messages),
        ends=ends if index in (0, plan.pp - 1) else None,
        norm=norm,
        names=names,
    )


def _context_group(
    request: ProgramRequest, group: dist.ProcessGroup | None, rank: int
) -> ContextGroup:
    size, num_tokens = request.plan.cp, request.job.seq_len
    if group is None:
        return ContextGroup(None, rank, size, num_tokens)
    way = request.plan.cp_type or request.stack.context_parallel[0]
    return ContextGroup(group, rank, size, num_tokens, way)


def _norm_ranks(plan: ParallelPlan) -> list[tuple[int, ...]]:
    """Return the sets of ranks that hold all gradients once between them."""
    everyone = tuple(range(plan.world_size))
    if plan.zero_stage or plan.dp_cp == 1:
        return [everyone]
    return [
        tuple(rank for rank in everyone if rank // plan.tp % plan.dp_cp == dp_rank)
        for dp_rank in range(plan.dp_cp)
    ]


def _sharing_sequences(plan: ParallelPlan) -> list[tuple[int, ...]]:
    """Return the sets of ranks that hold parts of the same sequences: next to tensor ranks."""
    span = plan.tp * plan.cp
    return [
        tuple(range(first + tp_rank, first + span, plan.tp))
        for first in range(0, plan.world_size, span)
        for tp_rank in range(plan.tp)
    ]


def _own_group(groups: list[tuple[int, ...]], own: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group with the ranks *own*, after making all *groups*."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
    return made[own]
