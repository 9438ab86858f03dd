"""ZeRO-3 as first published: owners broadcast, gradients go to them (arXiv 1910.02054, 7.2.2)."""

from fractions import Fraction
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    CollectiveOp,
    Precision,
    ProfileError,
    StackProfile,
    load_cluster,
    load_stack,
)
from meshwright.simulator import (
    Axis,
    CostModel,
    ModelSpec,
    PlanError,
    ResolvedPlan,
    TrainingJob,
    simulate,
)
from meshwright.simulator.account.result import StepResult
from meshwright.simulator.account.traffic import rank_traffic, sent_bytes
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.costs.links import bus_ratio, sent_ratio
from meshwright.simulator.layout import Stage
from meshwright.simulator.layout.mesh import GroupSpan
from meshwright.simulator.ledger import gradient_reductions, parameter_gathers, price
from meshwright.simulator.model import BlockRun
from meshwright.simulator.replication.data_parallel import (
    Replication,
    WireBytes,
    stage_parameters,
)
from meshwright.simulator.replication.reductions import owned_parts, reduced_parts

OWNERS, SHARDS = load_stack("zero-broadcast"), load_stack("deepspeed")
WIRE = WireBytes.of(OWNERS, Precision.FP16)
MODEL = ModelSpec(
    name="small", num_layers=6, hidden_size=512, num_heads=8, vocab_size=4096, seq_len=256
)
WHOLE = Stage((BlockRun("layer", 6),), has_embedding=True, has_head=True)


def run(stack: StackProfile, dp: int, cluster: str = "dgx-2") -> StepResult:
    return simulate(job_of(dp), plan_of(dp), load_cluster(cluster), stack)


def job_of(dp: int) -> TrainingJob:
    return TrainingJob(model=MODEL, global_batch_size=dp, seq_len=256, precision=Precision.FP16)


def plan_of(dp: int) -> ResolvedPlan:
    return ResolvedPlan(dp=dp, zero_stage=3, stages=(6,))


@given(counts=st.lists(st.integers(1, 10**6), min_size=1, max_size=20), owners=st.integers(1, 40))
def test_owners_hold_equal_stretches_of_the_model(counts: list[int], owners: int) -> None:
    parts = owned_parts(counts, owners)
    assert [sum(unit) for unit in parts] == counts
    share = -(-sum(counts) // owners)
    ends = [0, *accumulate(part for unit in parts for part in unit)]
    for start, end in pairwise(ends):
        assert start < end
        assert start // share == (end - 1) // share, "a part has one owner"
    assert len(ends) - 1 <= len(counts) + owners - 1


@pytest.mark.parametrize("dp", [2, 3, 8])
def test_a_rank_sends_three_times_the_model_as_the_paper_says(dp: int) -> None:
    """Two gathers and a reduction of Psi parameters each, of which a rank's own part stays."""
    traffic = rank_traffic(job_of(dp), plan_of(dp), OWNERS, 0)
    assert {each.op for each in traffic} == {CollectiveOp.BROADCAST, CollectiveOp.REDUCE}
    shape = BlockShape.of(job_of(dp), plan_of(dp), OWNERS)
    weights_bytes = 2 * stage_parameters(shape, WHOLE)
    buffers = sum(each.num_calls * each.size_bytes for each in traffic)
    assert buffers == 3 * weights_bytes
    sent = sent_bytes(traffic, Axis.DP)
    assert sent == 3 * Fraction(dp - 1, dp) * weights_bytes
    gathered = rank_traffic(job_of(dp), plan_of(dp), SHARDS, 0)
    # Shards have one size: where the ranks do not divide a unit they are filled up.
    filled = sum(2 * (dp - 1) * each.num_calls for each in gathered) if dp == 3 else 0
    assert 0 <= sent_bytes(gathered, Axis.DP) - sent <= filled


@pytest.mark.parametrize("num_ranks", [2, 5, 8])
def test_what_a_rank_forwards_in_rings_of_every_owner(num_ranks: int) -> None:
    """Rank by rank: in the ring of an owner all send but the rank before the owner."""
    share = 700
    for rank in range(num_ranks):
        sends = sum(share for owner in range(num_ranks) if rank != (owner - 1) % num_ranks)
        mean = sent_ratio(CollectiveOp.BROADCAST, num_ranks) * share * num_ranks
        assert sends == mean
    assert sent_ratio(CollectiveOp.REDUCE, num_ranks) == sent_ratio(
        CollectiveOp.ALL_GATHER, num_ranks
    )


def test_bus_ratios_of_rooted_collectives_are_those_of_nccl_tests() -> None:
    for op in (CollectiveOp.BROADCAST, CollectiveOp.REDUCE):
        assert [bus_ratio(op, n) for n in (2, 4, 8)] == [1, 1, 1]


@pytest.mark.parametrize("dp", [2, 8, 16])
def test_an_owner_needs_the_memory_of_a_shard(dp: int) -> None:
    owners, shards = run(OWNERS, dp), run(SHARDS, dp)
    assert owners.memory.peak_bytes == shards.memory.peak_bytes
    parameters = stage_parameters(BlockShape.of(job_of(dp), plan_of(dp), OWNERS), WHOLE)
    (rank,) = owners.memory.by_stage
    share = -(-parameters // dp)
    assert (rank.parameters_bytes, rank.gradients_bytes) == (2 * share, 2 * share)
    assert rank.optimizer_states_bytes == 12 * share


@pytest.mark.parametrize(("dp", "span"), [(8, GroupSpan(8, 1, 8)), (16, GroupSpan(16, 1, 16))])
def test_the_link_of_the_owner_carries_what_all_links_share_in_an_all_gather(
    dp: int, span: GroupSpan
) -> None:
    """On links of one rate: N / (N - 1) of the time, besides the start of each owner's turn."""
    costs = CostModel(load_cluster("dgx-2"), OWNERS, dp)
    replication = Replication.of(3, span, parameter_gather=OWNERS.parameter_gather)
    even = Replication.of(3, span)
    small, large = 10**9, 2 * 10**9
    for exchange in (parameter_gathers, gradient_reductions):
        grown = [
            price(costs, exchange(large, WIRE, each)).time_ps
            - price(costs, exchange(small, WIRE, each)).time_ps
            for each in (replication, even)
        ]
        assert grown[0] / grown[1] == pytest.approx(dp / (dp - 1), rel=1e-9)


@pytest.mark.parametrize("cluster", ["dgx-2", "dgx-a100", "dgx-1v"])
@pytest.mark.parametrize("dp", [4, 8, 16, 32])
def test_all_gathers_are_faster_than_broadcasts(dp: int, cluster: str) -> None:
    owners, shards = run(OWNERS, dp, cluster), run(SHARDS, dp, cluster)
    assert owners.step_ps > shards.step_ps
    assert owners.exposed_comm_s > shards.exposed_comm_s


def test_a_unit_of_several_owners_goes_out_in_turn() -> None:
    replication = Replication.of(3, GroupSpan(8, 1, 8), parameter_gather=OWNERS.parameter_gather)
    shape = BlockShape.of(job_of(8), plan_of(8), OWNERS)
    parts = reduced_parts(shape, WHOLE, replication)
    assert [part.stage.num_layers for part in parts] == [1] * 6
    counts = [sum(part.buckets) for part in parts]
    assert sum(counts) == stage_parameters(shape, WHOLE)
    assert [list(part.buckets) for part in parts] == owned_parts(counts, 8)
    assert owned_parts([8, 4, 4], 8)[0] == [2] * 4


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_other_stages_are_not_offered(zero_stage: int) -> None:
    plan = ResolvedPlan(dp=2, zero_stage=zero_stage, stages=(6,))
    with pytest.raises(PlanError, match=r"zero_stage=. is not offered by stack zero-broadcast"):
        simulate(job_of(2), plan, load_cluster("dgx-2"), OWNERS)


@pytest.mark.parametrize("stages", ["[0, 1, 3]", "[0]"])
def test_a_stack_cannot_broadcast_what_is_not_sharded(stages: str, tmp_path: Path) -> None:
    data = files("meshwright.hwprofiles") / "data" / "stacks" / "zero-broadcast.toml"
    text = data.read_text(encoding="utf-8").replace("zero_stage = 3", "zero_stage = 0")
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("zero_stages = [0, 3]", f"zero_stages = {stages}"))
    with pytest.raises(ProfileError, match="parameter_gather: broadcast"):
        load_stack(path)


def test_a_stack_cannot_broadcast_from_the_host(tmp_path: Path) -> None:
    data = files("meshwright.hwprofiles") / "data" / "stacks" / "zero-broadcast.toml"
    path = tmp_path / "mine.toml"
    modes = 'zero_stages = [0, 3]\noffload_modes = ["none", "parameters"]'
    text = data.read_text(encoding="utf-8").replace("zero_stages = [0, 3]", modes)
    path.write_text(text)
    with pytest.raises(ProfileError, match="without hybrid_sharding or offloading"):
        load_stack(path)
