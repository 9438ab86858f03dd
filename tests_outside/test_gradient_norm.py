"""Over how many ranks Megatron-Core's optimizers sum the gradient norm, and how often."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from witnesses import megatron_job
from witnesses.boundary import cluster_answered

from meshwright.hwprofiles import load_stack
from meshwright.simulator import ResolvedPlan
from meshwright.simulator.account import norm_calls
from meshwright.validate.counting import RankOracle

from megatron.core import parallel_state  # isort: skip  (after what stands for Apex)
from megatron.core.distributed import (  # isort: skip
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer import (  # isort: skip
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)

RANKS, WIDTH = 16, 64


class Model(nn.Module):
    """A weight of all ranks, and one that it says is of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts.weight.allreduce = False

    def forward(self, x: Tensor) -> Tensor:
        """Read both."""
        return self.experts(self.dense(x))


def model_and_optimizer(plan: ResolvedPlan) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Return what a rank trains, in buckets, and what updates it."""
    shards, instances = plan.zero_stage > 0, plan.dp // plan.num_shards
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        plan.tp,
        plan.pp,
        expert_model_parallel_size=plan.ep,
        expert_tensor_parallel_size=plan.expert_tp,
        num_distributed_optimizer_instances=instances,
        create_gloo_process_groups=False,
    )
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=shards,
        num_distributed_optimizer_instances=instances,
    )
    config = SimpleNamespace(calculate_per_token_loss=False)
    chunk = DistributedDataParallel(config, settings, Model().bfloat16())
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=1.0,
            use_distributed_optimizer=shards,
        ),
        [chunk],
        use_gloo_process_groups=False,
    )
    return chunk, optimizer


def counted(plan: ResolvedPlan) -> list[tuple[int, int]]:
    """Return ranks and number of the sums of one fp32 number in a second update.

    In a first one core 0.19 asks all ranks once for groups of norms.
    """
    with cluster_answered(0, RANKS), megatron_job.answers():
        chunk, optimizer = model_and_optimizer(plan)
        for _ in range(2):
            optimizer.zero_grad()
            chunk(torch.zeros(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
            chunk.finish_grad_sync()
            oracle = RankOracle({})
            with oracle:
                optimizer.step()
    calls = [each for each in oracle.collectives if (each.op, each.size_bytes) == ("all_reduce", 4)]
    return sorted((each.num_ranks, each.num_calls) for each in calls)


@pytest.mark.parametrize(
    "plan",
    [
        ResolvedPlan(dp=16, ep=4, zero_stage=1),
        ResolvedPlan(tp=2, pp=2, dp=4, ep=4, zero_stage=1, stages=(1, 1)),
        ResolvedPlan(tp=2, pp=2, dp=4, dp_shard=2, ep=2, zero_stage=1, stages=(1, 1)),
        ResolvedPlan(tp=2, pp=2, dp=4, ep=4, etp=1, zero_stage=0, stages=(1, 1)),
        ResolvedPlan(tp=2, dp=8, ep=2, zero_stage=0),
    ],
    ids=str,
)
def test_a_gradient_norm_is_summed_as_often_as_predicted(plan: ResolvedPlan) -> None:
    assert counted(plan) == sorted(norm_calls(plan, load_stack("megatron-core")).items())
