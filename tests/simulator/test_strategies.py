"""Replicas of one process, and parameter servers: bytes, time, memory and staleness."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from link_bytes import module_link_bytes, server_link_bytes, sharded_worker_bytes

from meshwright.hwprofiles import CollectiveOp, Precision, Strategy, load_cluster, load_stack
from meshwright.simulator import (
    Category,
    ParameterServer,
    PlanError,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.account.lanes import ResourceLane
from meshwright.simulator.account.traffic import Traffic
from meshwright.simulator.blocks import BlockShape, BlockTable, MemoryBound, sum_flops
from meshwright.simulator.engine import TaskKind
from meshwright.simulator.layout import whole_model
from meshwright.simulator.layout.mesh import Axis
from meshwright.simulator.replication.data_parallel import stage_parameters
from meshwright.simulator.strategies import STRATEGIES, graph_step

MODULE, SERVER, DDP_LIKE = "dataparallel", "parameter-server", "megatron-lm-2022"
WEIGHTS = (TaskKind.BROADCAST, TaskKind.REDUCTION)


def make_job(model: str, batch: int, precision: Precision = Precision.FP16) -> TrainingJob:
    spec = load_model(model)
    return TrainingJob(
        model=spec, global_batch_size=batch, seq_len=spec.seq_len, precision=precision
    )


@cache
def run(
    stack: str,
    dp: int,
    *,
    model: str = "gpt2-medium",
    cluster: str = "dgx-a100",
    microbatch_size: int = 1,
    num_microbatches: int = 1,
    precision: Precision = Precision.FP16,
    servers: ParameterServer | None = None,
) -> StepResult:
    job = make_job(model, dp * microbatch_size * num_microbatches, precision)
    plan = ResolvedPlan(
        dp=dp,
        microbatch_size=microbatch_size,
        stages=(job.model.num_layers,),
        parameter_server=servers,
    )
    return simulate(job, plan, load_cluster(cluster), load_stack(stack))


def lane(result: StepResult, name: str) -> ResourceLane:
    return next(each for each in result.lanes if each.name == name)


def weight_bytes(result: StepResult) -> int:
    shape = BlockShape.of(result.job, result.plan, result.stack)
    stage = whole_model(result.job.model)
    fp32 = result.job.precision is Precision.FP32
    return stage_parameters(shape, stage) * (4 if fp32 else result.stack.gradient_reduce_bytes)


def test_every_strategy_but_the_mesh_is_registered() -> None:
    assert set(STRATEGIES) == set(Strategy) - {Strategy.MESH}


@pytest.mark.parametrize("cluster", ["dgx-a100", "dgx-1v"])
@pytest.mark.parametrize("precision", [Precision.FP16, Precision.FP32])
@pytest.mark.parametrize("dp", range(2, 9))
def test_one_process_is_slower_than_ranks_and_its_first_device_fuller(
    dp: int, precision: Precision, cluster: str
) -> None:
    one = run(MODULE, dp, cluster=cluster, precision=precision)
    ranks = run(DDP_LIKE, dp, cluster=cluster, precision=precision)
    assert one.step_ps > ranks.step_ps
    assert one.memory.worst_rank == 0
    assert one.memory.peak_bytes > ranks.memory.peak_bytes
    others = {stage.peak_bytes for stage in one.memory.by_stage[1:]}
    assert len(others) == 1
    assert others.pop() < ranks.memory.peak_bytes


@pytest.mark.parametrize("cluster", ["dgx-a100", "dgx-1v"])
@pytest.mark.parametrize("model", ["gpt2", "gpt2-medium"])
def test_one_process_is_slower_and_fuller_than_ddp_and_the_more_so_with_more_devices(
    cluster: str, model: str
) -> None:
    """The stack of PyTorch's other data parallelism, with the same kernels, batch and precision."""
    results = {
        dp: (
            run(MODULE, dp, model=model, cluster=cluster),
            run("ddp", dp, model=model, cluster=cluster),
        )
        for dp in range(2, 9)
    }
    for one, ranks in results.values():
        assert one.job == ranks.job
        assert one.plan.attention is ranks.plan.attention
        assert one.step_ps > ranks.step_ps
        assert one.memory.worst_rank == 0
        assert one.memory.peak_bytes > ranks.memory.peak_bytes
    for (fewer, few_ranks), (more, more_ranks) in pairwise(results.values()):
        assert more.step_ps - more_ranks.step_ps > fewer.step_ps - few_ranks.step_ps
        assert more.memory.peak_bytes > fewer.memory.peak_bytes
        assert more_ranks.memory.peak_bytes == few_ranks.memory.peak_bytes


def test_time_and_memory_of_one_process_grow_with_its_devices() -> None:
    results = [run(MODULE, dp) for dp in range(1, 9)]
    for fewer, more in pairwise(results):
        assert more.step_ps > fewer.step_ps
        assert more.memory.peak_bytes > fewer.memory.peak_bytes


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("dp", [1, 2, 5, 8])
def test_device_0_moves_a_broadcast_and_a_reduction_a_pass(dp: int, num_microbatches: int) -> None:
    result = run(MODULE, dp, model="gpt2", num_microbatches=num_microbatches)
    links = [each for each in result.lanes if each.name.startswith("device 0 link")]
    moved = sum(link.moved_bytes(WEIGHTS) for link in links)
    assert moved == module_link_bytes(weight_bytes(result), dp, num_microbatches)
    shape = BlockShape.of(result.job, result.plan, result.stack)
    logits = shape.num_tokens * shape.local_vocab_size * 2
    gathered = sum(link.moved_bytes([TaskKind.GATHER]) for link in links)
    assert gathered == (dp - 1) * logits * num_microbatches


def test_the_interpreter_launches_every_kernel_of_every_replica_in_turn() -> None:
    result = run(MODULE, 8)
    assert lane(result, "host").busy_ps == 8 * lane(run(MODULE, 1), "host").busy_ps
    faster = load_stack(MODULE).model_copy(update={"host_per_launch_s": 0.0})
    quick = simulate(result.job, result.plan, result.cluster, faster)
    assert quick.step_ps < result.step_ps
    assert quick.breakdown_ps[Category.HOST] == 0 < result.breakdown_ps[Category.HOST]


def test_the_head_of_a_replica_is_split_from_the_loss() -> None:
    """PyTorch's chain of fp32 kernels moves 38 and 14 bytes a logit."""
    result = run(MODULE, 2)
    shape, table = BlockShape.of(result.job, result.plan, result.stack), BlockTable()
    head, output = (table.operators(shape, kind) for kind in ("head", "output"))
    num_logits = shape.num_tokens * shape.local_vocab_size
    for passes, loss in (
        ((head.forward, output.forward), 38),
        ((head.backward, output.backward), 14),
    ):
        assert len({sum_flops(operators) for operators in passes}) == 1
        whole, rest = (
            sum(each.size_bytes for each in operators if isinstance(each, MemoryBound))
            for operators in passes
        )
        assert whole - rest == loss * num_logits


@pytest.mark.parametrize("dp", [1, 2, 7, 16])
def test_a_server_of_its_own_moves_two_buffers_a_worker(dp: int) -> None:
    result = run(SERVER, dp, model="gpt2")
    moved = sum(lane(result, f"server 0 port {way}").moved_bytes() for way in ("in", "out"))
    assert moved == server_link_bytes(weight_bytes(result), dp)


@pytest.mark.parametrize(
    ("servers", "says"), [("all", []), (1, ["1 server has a host"]), (2, ["2 servers have own"])]
)
def test_hosts_beside_the_devices_are_told_of(servers: int | str, says: list[str]) -> None:
    result = run(SERVER, 4, model="gpt2", servers=ParameterServer(servers=servers))
    told = [each for each in result.warnings if "server" in each]
    assert [each[: len(said)] for each, said in zip(told, says, strict=True)] == says


@pytest.mark.parametrize("dp", [1, 2, 4, 16, 32])
def test_servers_on_all_workers_move_the_bytes_of_a_ring_all_reduce(dp: int) -> None:
    servers = ParameterServer(servers="all")
    result = run(SERVER, dp, model="gpt2", servers=servers)
    size_bytes = weight_bytes(result)
    ring = Traffic(Axis.DP, CollectiveOp.ALL_REDUCE, size_bytes, dp, 1).sent_bytes
    assert sharded_worker_bytes(size_bytes, dp) == ring
    sent = [each.moved_bytes() for each in result.lanes if each.name.endswith("out")]
    assert sum(sent) == dp * ring
    if dp <= 8:  # one worker a link: each sends the same
        assert set(sent) in ({int(ring)}, set())


@pytest.mark.parametrize("count", [1, 3, 8])
def test_more_servers_share_the_bytes(count: int) -> None:
    result = run(SERVER, 4, model="gpt2", servers=ParameterServer(servers=count))
    ports = [
        each for each in result.lanes if each.name.startswith("server") and "port" in each.name
    ]
    assert len(ports) == 2 * count
    assert sum(port.moved_bytes() for port in ports) == server_link_bytes(weight_bytes(result), 4)
    assert len(result.memory.by_stage) == 4 + count


def test_synchronous_time_has_a_closed_form_for_one_server() -> None:
    result = run(SERVER, 4, model="gpt2", microbatch_size=2)
    pulls = lane(result, "server 0 port out")
    worker = lane(result, "worker 3")
    server = lane(result, "server 0")
    push_ps = lane(result, "server 0 port in").busy_ps // 4
    sums = [span for span in server.spans if span.kind is TaskKind.SUM]
    add_ps, update_ps = sums[0].end_ps - sums[0].start_ps, server.spans[-1].end_ps
    update_ps -= server.spans[-1].start_ps
    end_ps = pulls.busy_ps + worker.busy_ps + push_ps + add_ps + update_ps
    assert result.step_ps == end_ps + end_ps * 4000 // 1_000_000


def test_a_slow_worker_slows_all_that_wait_for_it() -> None:
    slow = run(SERVER, 4, model="gpt2", servers=ParameterServer(slow_worker=2.0))
    equal = run(SERVER, 4, model="gpt2")
    late_ps = lane(slow, "worker 3").busy_ps - lane(equal, "worker 3").busy_ps
    assert lane(slow, "worker 3").busy_ps == pytest.approx(2 * lane(equal, "worker 3").busy_ps)
    assert slow.step_ps - equal.step_ps == pytest.approx(1.004 * late_ps, rel=1e-6)


def async_run(dp: int, slow_worker: float = 1.0, servers: int | str = 1) -> StepResult:
    options = ParameterServer(servers=servers, asynchronous=True, slow_worker=slow_worker)
    return run(SERVER, dp, model="gpt2", microbatch_size=32, servers=options)


@pytest.mark.parametrize("servers", [1, 3, "all"])
@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_equal_asynchronous_workers_are_stale_by_all_others(dp: int, servers: int | str) -> None:
    found = async_run(dp, servers=servers).asynchronous
    assert found is not None
    assert min(found.rounds) >= 48
    # The first round, when all start from the same parameters, and waits before a pull take less.
    assert found.mean_staleness == pytest.approx(dp - 1, rel=0.04)
    assert found.mean_staleness <= dp - 1


@pytest.mark.parametrize("dp", [8, 32])
def test_transfers_between_workers_spread_over_their_links(dp: int) -> None:
    result = run(SERVER, dp, model="gpt2", servers=ParameterServer(servers="all"))
    # Beside computing and its own transfers a worker waits for those that finish later: little.
    assert result.bubble_fraction < 0.03


def test_a_slow_asynchronous_worker_does_not_slow_the_others() -> None:
    equal, slow = async_run(8).asynchronous, async_run(8, 3.0).asynchronous
    assert equal is not None
    assert slow is not None
    for before, after in zip(equal.round_ps[:-1], slow.round_ps[:-1], strict=True):
        assert after == pytest.approx(before, rel=0.01)
    assert slow.round_ps[-1] > 2.5 * equal.round_ps[-1]
    assert slow.max_staleness > equal.max_staleness
    # Seven of eight workers go on as before, the last at a third: 22/24 of the throughput.
    lost = async_run(8, 3.0).tokens_per_s / async_run(8).tokens_per_s
    assert lost == pytest.approx(22 / 24, rel=0.02)
    waits = run(SERVER, 8, model="gpt2", microbatch_size=32, servers=ParameterServer(slow_worker=3))
    assert async_run(8, 3.0).tokens_per_s > 2 * waits.tokens_per_s


@pytest.mark.parametrize(
    "result",
    [run(MODULE, 3, model="gpt2"), run(SERVER, 3, model="gpt2"), async_run(3, 2.0, "all")],
    ids=["module", "servers", "asynchronous"],
)
def test_the_breakdown_adds_up_and_repeats(result: StepResult) -> None:
    assert sum(result.breakdown_ps.values()) == result.step_ps
    assert all(time_ps >= 0 for time_ps in result.breakdown_ps.values())
    assert sum(result.source_fractions.values()) == pytest.approx(1)
    again = simulate(result.job, result.plan, result.cluster, result.stack)
    assert again == result


def test_a_plan_says_its_servers() -> None:
    assert run(SERVER, 2, model="gpt2").plan.parameter_server == ParameterServer()


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"dp=16 .* 8 devices of a node of dgx-a100"):
        run(MODULE, 16)
    with pytest.raises(PlanError, match="servers=1 is not offered by stack megatron-core"):
        run("megatron-core", 2, servers=ParameterServer())
    one = ParameterServer()  # unsaid they are on the workers, where there is no other host
    with pytest.raises(PlanError, match="more hosts than the 1 of localhost-cpu"):
        run(SERVER, 1, cluster="localhost-cpu", precision=Precision.FP32, servers=one)
    with monkeypatch.context() as patch:
        patch.setattr(graph_step, "MAX_TASKS", 100)
        with pytest.raises(PlanError, match="more than 100 tasks is too many to simulate"):
            run(SERVER, 64, model="gpt2", servers=ParameterServer(servers="all"))
    for wrong in ({"servers": 0}, {"slow_worker": 0.5}, {"slow_worker": float("nan")}):
        with pytest.raises(PlanError, match="out of range"):
            ParameterServer(**wrong)


def test_a_mesh_plan_is_not_touched() -> None:
    result = run(DDP_LIKE, 2, model="gpt2")
    assert (result.lanes, result.asynchronous) == ((), None)
    assert result.plan == replace(result.plan, parameter_server=None)


def test_an_update_takes_its_bytes_over_the_bandwidth() -> None:
    once = run(MODULE, 4)
    stack = load_stack(MODULE)
    twice = stack.model_copy(update={"optimizer_traffic_bytes": 2 * stack.optimizer_traffic_bytes})
    again = simulate(once.job, once.plan, once.cluster, twice)
    of_update = [each.breakdown_ps[Category.OPTIMIZER] for each in (once, again)]
    assert of_update[1] == pytest.approx(2 * of_update[0], abs=4)
