"""Position of a rank in a PyTorch program: device mesh, process groups, stages."""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.simulator import ResolvedPlan
from meshwright.simulator.layout import Axis, Mesh, context_parallel_type
from meshwright.validate.programs.context import ContextGroup
from meshwright.validate.programs.contract import ProgramRequest
from meshwright.validate.programs.experts import ExpertGroup
from meshwright.validate.programs.layers import Ends, LayerOptions, VirtualStage
from meshwright.validate.programs.pytorch.parts import PlainParts, initialise_whole
from meshwright.validate.ranks import (
    MESH_DIMS,
    batch_ranks,
    mesh_shape,
    model_shard_ranks,
    plan_groups,
    stage_ranks,
    tied_embedding_ranks,
)

EXPERT_DIMS = ("pp", "dp_replicate", "edp", "ep")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """A rank's mesh, ranks numbered as in the simulator's mesh: tp fastest, then dp, then pp.

    Ranks of one HSDP shard group are neighbours on the data-parallel axis.

    Args:
        mesh: Of dims `MESH_DIMS`.
        norm_group: Ranks that hold different parts of the model; None if this one holds all.
        batch_group: Ranks that train on parts of a batch; None if this one has all.
        stage_group: All ranks of a stage; None where there is one.
        tied_embedding_group: First and last pipeline rank, where each holds a tied embedding and
            this rank is one of them.
        context: The context-parallel ranks of this one; None where it has whole sequences.
        groups: Axis of each group by its ranks.
        experts: Ranks that share experts with this one.
        expert_mesh: Of dims `EXPERT_DIMS`, where ranks have different experts; else None.
        sums_tokens: Whether a step first sums the tokens of its batch.
    """

    mesh: DeviceMesh
    norm_group: dist.ProcessGroup | None
    batch_group: dist.ProcessGroup | None
    stage_group: dist.ProcessGroup | None
    tied_embedding_group: dist.ProcessGroup | None
    context: ContextGroup | None
    groups: dict[tuple[int, ...], str]
    experts: ExpertGroup
    expert_mesh: DeviceMesh | None
    sums_tokens: bool

    def coordinate(self, dim: str) -> int:
        """Return this rank's position along a dim of the mesh."""
        return self.mesh.get_local_rank(dim)

    @property
    def dp_rank(self) -> int:
        """Data-parallel replica of the batch that this rank trains on."""
        shards = self.mesh["dp_shard"].size()
        rank = self.coordinate("dp_replicate") * shards + self.coordinate("dp_shard")
        return rank if self.context is None else rank // self.context.size

    @property
    def reports(self) -> bool:
        """Whether this rank is the one of its tensor-parallel group that reports losses."""
        return self.coordinate("tp") == 0

    @property
    def data_mesh(self) -> DeviceMesh:
        """The mesh that FSDP shards over: hybrid where shards are replicated."""
        if self.mesh["dp_replicate"].size() > 1:
            return self.mesh["dp_replicate", "dp_shard"]
        return self.mesh["dp_shard"]

    @property
    def expert_norm_meshes(self) -> list[DeviceMesh]:
        """The meshes over which norms of experts are summed: as one where these are all ranks.

        So they are where tokens are summed, for which these ranks are a mesh, too.
        """
        is_one = self.sums_tokens and self.mesh["dp_replicate"].size() == 1
        if self.expert_mesh is None or is_one:
            return [self.mesh["dp_shard"]]
        return [self.expert_mesh["edp"], self.expert_mesh["ep"]]

    @property
    def expert_data_mesh(self) -> DeviceMesh | None:
        """The mesh that FSDP shards a rank's experts over; None where it is that of layers."""
        if self.expert_mesh is None or self.mesh["dp_replicate"].size() == 1:
            return self.expert_mesh and self.expert_mesh["edp"]
        return self.expert_mesh["dp_replicate", "edp"]


def make_layout(request: ProgramRequest) -> RankLayout:
    """Return the layout of the request's plan; makes the process groups that it needs."""
    plan, rank = request.plan, request.rank
    mesh = init_device_mesh(request.device.type, mesh_shape(plan), mesh_dim_names=MESH_DIMS)
    expert_mesh = _expert_mesh(request)
    groups = plan_groups(plan, rank, is_tied=request.job.transformer.tied_embeddings)
    different = model_shard_ranks(plan, rank)
    ends = tied_embedding_ranks(plan, rank) if request.job.transformer.tied_embeddings else ()
    return RankLayout(
        mesh=mesh,
        norm_group=_group(different, groups, plan.world_size),
        batch_group=_group(batch_ranks(plan, rank), groups, plan.world_size),
        stage_group=_group(stage_ranks(plan, rank), groups, plan.world_size),
        tied_embedding_group=_group(ends, groups, plan.world_size),
        context=_context(request, groups),
        groups=groups,
        experts=_expert_group(plan, expert_mesh),
        expert_mesh=expert_mesh,
        sums_tokens=request.stack.sums_tokens,
    )


def _expert_mesh(request: ProgramRequest) -> DeviceMesh | None:
    """Return the mesh of the ranks of `MESH_DIMS` by their experts."""
    plan = request.plan
    if plan.ep == 1:
        return None
    shape = (plan.pp, plan.dp_cp // plan.num_shards, plan.num_shards // plan.ep, plan.ep)
    return init_device_mesh(request.device.type, shape, mesh_dim_names=EXPERT_DIMS)


def _expert_group(plan: ResolvedPlan, mesh: DeviceMesh | None) -> ExpertGroup:
    if mesh is None:
        return ExpertGroup()
    rank = int(mesh.get_local_rank("ep"))
    return ExpertGroup(ep=mesh["ep"].get_group(), ep_rank=rank, num_ep=plan.ep)


def _context(request: ProgramRequest, groups: dict[tuple[int, ...], str]) -> ContextGroup | None:
    plan = request.plan
    if plan.cp == 1:
        return None
    ranks = Mesh.of(plan).group(request.rank, Axis.CP)
    group = _group(ranks, groups, plan.world_size)
    way = context_parallel_type(plan, request.stack)
    return ContextGroup(group, ranks.index(request.rank), plan.cp, request.job.seq_len, way)


def stage_indices(plan: ResolvedPlan, pp_rank: int) -> list[int]:
    """Return the virtual stages of a pipeline rank, in model order.

    >>> stage_indices(ResolvedPlan(pp=2, num_virtual_stages=2, stages=(1, 1, 1, 1)), 1)
    [1, 3]
    """
    return list(range(pp_rank, plan.num_stages, plan.pp))


def build_stage(
    request: ProgramRequest, index: int, parts: PlainParts, device: torch.device
) -> VirtualStage:
    """Return one virtual stage, whole and in fp32, on *device*; initialised if it is asked for."""
    plan, model = request.plan, request.job.transformer
    first = [0, *accumulate(plan.stages)]
    options = LayerOptions(
        attention=plan.attention, recompute=plan.recompute, dropout=parts.dropout
    )
    layers = range(first[index], first[index + 1])
    is_last = index == plan.num_stages - 1
    with device:
        angles = _idle_angles(request, parts)
        ends = Ends(embedding=index == 0, head=is_last, idle_rope_elements=angles)
        stage = VirtualStage(model, layers, options, parts, ends)
    if request.initialise:
        initialise_whole(stage, model, parts.of_experts)
    return stage


def _idle_angles(request: ProgramRequest, parts: PlainParts) -> int:
    """Return the elements of a stage's RoPE cache that no layer here reads.

    They make angles in their kernels, or of the tokens that a rank has (`casts_rope_cache`).
    """
    table, cp = request.num_rope_elements, request.plan.cp
    return table // cp * (cp - 1) if parts.casts_rope_cache else table


def _group(
    ranks: tuple[int, ...], groups: dict[tuple[int, ...], str], world_size: int
) -> dist.ProcessGroup | None:
    """Return the process group of *ranks*, or None where it would have fewer than two."""
    assert len(ranks) < 2 or ranks in groups
    if len(ranks) < 2:
        return None
    if len(ranks) == world_size:
        return dist.group.WORLD
    # Local: ranks outside of the group do not call this.
    return dist.new_group(list(ranks), use_local_synchronization=True)
