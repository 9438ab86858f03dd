"""Experts divided among context-parallel ranks, too: the groups that frameworks make of them."""

from collections.abc import Mapping

import pytest
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from witnesses import megatron_job  # what stands for Apex comes before Megatron-Core
from witnesses.boundary import values_answered

from meshwright.simulator import ResolvedPlan
from meshwright.simulator.layout import Axis, ExpertAxis, Mesh, MeshAxis
from meshwright.validate.counting import fake_cluster

from megatron.core import parallel_state  # isort: skip

Ranks = tuple[int, ...]
MEGATRON: Mapping[str, tuple[MeshAxis, ...]] = {
    "tp": (Axis.TP,),
    "cp": (Axis.CP,),
    "dp-cp": (Axis.CP, Axis.DP),
    "pp": (Axis.PP,),
    "ep": (ExpertAxis.EP,),
    "etp": (ExpertAxis.ETP,),
    "etp-ep": (ExpertAxis.ALL,),
    "edp": (ExpertAxis.EDP,),
}


def megatron_groups(plan: ResolvedPlan) -> dict[str, Ranks]:
    """Return the groups of a rank that Megatron-Core makes."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        plan.tp,
        plan.pp,
        context_parallel_size=plan.cp,
        expert_model_parallel_size=plan.ep,
        expert_tensor_parallel_size=plan.expert_tp,
        create_gloo_process_groups=False,
    )
    found = {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp-cp": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "etp": parallel_state.get_expert_tensor_parallel_group(),
        "etp-ep": parallel_state.get_expert_tensor_and_model_parallel_group(),
        "edp": parallel_state.get_expert_data_parallel_group(),
    }
    return {name: tuple(dist.get_process_group_ranks(group)) for name, group in found.items()}


@pytest.mark.parametrize(
    ("degrees", "etp"),
    [
        ({"cp": 2, "dp": 4, "ep": 4}, 1),
        ({"cp": 4, "dp": 2, "ep": 8}, 1),
        ({"tp": 2, "cp": 2, "dp": 2, "ep": 4}, 1),
        ({"tp": 2, "cp": 2, "dp": 2, "ep": 2}, 2),
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2, "ep": 2}, 1),
    ],
)
def test_megatron_divides_experts_among_ranks_of_one_sequence(
    degrees: dict[str, int], etp: int
) -> None:
    plan = ResolvedPlan(**degrees, etp=etp)
    mesh = Mesh.of(plan)
    for rank in range(plan.world_size):
        with fake_cluster(rank, plan.world_size), values_answered(), megatron_job.answers():
            counted = megatron_groups(plan)
        assert counted == {name: mesh.group(rank, *axes) for name, axes in MEGATRON.items()}


def titan_groups(plan: ResolvedPlan, sets: int) -> dict[str, Ranks]:
    """Return the groups of a rank that torchtitan makes, of several ranks alone."""
    dims = ParallelDims(
        dp_replicate=sets,
        dp_shard=plan.dp // sets,
        cp=plan.cp,
        tp=1,
        pp=plan.pp,
        ep=plan.ep,
        etp=1,
        world_size=plan.world_size,
    )
    dims.build_mesh()
    meshes = {name: dims.get_optional_mesh(name) for name in TITAN}
    return {
        name: tuple(dist.get_process_group_ranks(mesh.get_group()))
        for name, mesh in meshes.items()
        if mesh is not None
    }


def predicted_groups(plan: ResolvedPlan, rank: int) -> dict[str, Ranks]:
    """Return the same by the strides and sizes that collectives are priced with."""
    mesh = Mesh.of(plan)
    sizes = {
        "pp": (mesh.stride(Axis.PP), plan.pp),
        "dp_replicate": (plan.num_shards, plan.dp_cp // plan.num_shards),
        "fsdp": (mesh.stride(Axis.CP), plan.num_shards),
        "cp": (mesh.stride(Axis.CP), plan.cp),
        "ep": (mesh.stride(ExpertAxis.EP), plan.ep),
        "efsdp": (mesh.stride(ExpertAxis.EDP), plan.expert_shards),
    }
    firsts = {name: rank - rank // stride % size * stride for name, (stride, size) in sizes.items()}
    return {
        name: tuple(range(firsts[name], firsts[name] + stride * size, stride))
        for name, (stride, size) in sizes.items()
        if size > 1
    }


TITAN = ("pp", "dp_replicate", "fsdp", "cp", "ep", "efsdp")


@pytest.mark.parametrize(
    "degrees",
    [
        {"cp": 2, "dp": 4, "ep": 2},
        {"cp": 2, "dp": 4, "ep": 4},
        {"cp": 4, "dp": 2, "ep": 4},
        {"cp": 2, "dp": 4, "dp_shard": 2, "ep": 2},
        {"cp": 2, "dp": 2, "pp": 2, "ep": 2},
    ],
)
def test_torchtitan_divides_experts_among_ranks_of_one_sequence(degrees: dict[str, int]) -> None:
    plan = ResolvedPlan(**degrees, zero_stage=3)
    sets = plan.dp // (plan.dp_shard or plan.dp)
    for rank in range(plan.world_size):
        with fake_cluster(rank, plan.world_size):
            counted = titan_groups(plan, sets)
        assert counted == predicted_groups(plan, rank)
