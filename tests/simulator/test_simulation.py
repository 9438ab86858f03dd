"""A simulated step as a whole: what is refused, how its time adds up, and what it reports."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    Attention,
    Cluster,
    Precision,
    Recompute,
    Source,
    StackProfile,
    StageSplit,
    list_stacks,
    load_cluster,
    load_stack,
)
from meshwright.simulator import (
    COMMUNICATION,
    Category,
    CostModel,
    ModelSpec,
    ParallelPlan,
    PlanError,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    build_step,
    check_plan,
    hardware_flops,
    load_model,
    rank_timeline,
    resolve_stages,
    simulate,
    simulate_folded,
    simulation,
)
from meshwright.simulator.account.breakdown import time_breakdown
from meshwright.simulator.blocks import model_flops
from meshwright.simulator.costs import Cost
from meshwright.simulator.engine import PassWork, RankWork
from meshwright.simulator.ledger import StepPoint
from meshwright.simulator.schedules import Action, Phase

RELAXED = settings(deadline=None, max_examples=25)
CLUSTER = load_cluster("dgx-a100")
CORE, OLD = load_stack("megatron-core"), load_stack("megatron-lm-2021")
GPT2 = load_model("gpt2")


def make_plan(model: ModelSpec = GPT2, **fields: object) -> ResolvedPlan:
    """Return a plan with even stages and the attention that every stack knows."""
    pp, vpp = (int(str(fields.pop(name, 1))) for name in ("pp", "num_virtual_stages"))
    stages = resolve_stages(model, model.seq_len, pp * vpp, StageSplit.EVEN)
    settled = {"attention": Attention.UNFUSED, **fields}
    plan = ResolvedPlan(**settled, stages=(1,))
    return replace(plan, pp=pp, num_virtual_stages=vpp, stages=stages)


def make_job(global_batch_size: int = 16, model: ModelSpec = GPT2) -> TrainingJob:
    return TrainingJob(model=model, global_batch_size=global_batch_size, seq_len=1024)


@st.composite
def plans(draw: st.DrawFn) -> tuple[ResolvedPlan, StackProfile]:
    """Draw a plan for GPT-2 that a stack can run with 48 sequences."""
    stack = draw(st.sampled_from([CORE, OLD]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    interleaves = schedule == "interleaved"
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([2, 4] if interleaves else [1, 2, 3, 4]))
    in_pipelines = stack.pipeline_zero_stages
    zero_stages = [each for each in stack.zero_stages if pp == 1 or each in in_pipelines]
    plan = make_plan(
        tp=tp,
        dp=draw(st.sampled_from([1, 2, 4])),
        pp=pp,
        num_virtual_stages=draw(st.sampled_from([2, 3])) if interleaves else 1,
        microbatch_size=draw(st.sampled_from([1, 3])),
        zero_stage=draw(st.sampled_from(zero_stages)),
        sequence_parallel=stack.sequence_parallel and tp > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(stack.recompute_modes)),
        attention=draw(st.sampled_from(stack.attention_kernels)),
        schedule=schedule,
    )
    return plan, stack


@RELAXED
@given(case=plans())
def test_the_breakdown_adds_up_to_the_step(case: tuple[ResolvedPlan, StackProfile]) -> None:
    plan, stack = case
    result = simulate(make_job(48), plan, CLUSTER, stack)
    assert set(result.breakdown_ps) == set(Category)
    assert all(time_ps >= 0 for time_ps in result.breakdown_ps.values())
    # Each category is rounded down once.
    assert 0 <= result.step_ps - sum(result.breakdown_ps.values()) < len(Category)
    assert sum(result.source_fractions.values()) == pytest.approx(1, rel=1e-12)
    assert set(result.source_fractions) == set(Source)
    exposed_ps = sum(result.breakdown_ps[each] for each in COMMUNICATION)
    assert result.exposed_comm_s == exposed_ps / 10**12


def sending_ps(result: StepResult, pp_rank: int, action: Action) -> int:
    """Return for how long a pass's message keeps its rank from computing."""
    work = result.work
    virtual_stage = work.ranks[pp_rank].virtual_stages[action.virtual_stage]
    stage, last = action.virtual_stage * work.pp + pp_rank, work.pp * work.num_virtual_stages - 1
    if not work.blocking_messages:
        return 0
    if action.phase is Phase.FORWARD:
        return virtual_stage[action.phase].message.occupy_ps if stage < last else 0
    return virtual_stage[action.phase].message.occupy_ps if stage > 0 else 0


def idle_ps(result: StepResult, pp_rank: int) -> int:
    """Return the time a rank neither computes nor communicates, gap by gap."""
    rank, work = result.times.ranks[pp_rank], result.work
    actions = work.actions[pp_rank]
    total, free_ps = 0, 0
    for action, start_ps, end_ps in zip(actions, rank.starts_ps, rank.ends_ps, strict=True):
        assert start_ps >= free_ps
        total += start_ps - free_ps
        free_ps = end_ps + sending_ps(result, pp_rank, action)
    assert rank.passes_end_ps == free_ps
    total += (
        rank.reduce_end_ps - free_ps - rank.reduce_wait_ps - work.ranks[pp_rank].norm_all_reduce_ps
    )
    assert rank.update_start_ps >= rank.reduce_end_ps + work.norm_ps
    total += rank.update_start_ps - work.norm_ps - rank.reduce_end_ps
    held = work.ranks[pp_rank]
    assert rank.end_ps == rank.update_start_ps + held.optimizer_ps + held.gather_ps
    return total + max(each.end_ps for each in result.times.ranks) - rank.end_ps


@RELAXED
@given(case=plans())
def test_the_bubble_is_the_mean_of_the_gaps_on_every_rank(
    case: tuple[ResolvedPlan, StackProfile],
) -> None:
    plan, stack = case
    result = simulate(make_job(48), plan, CLUSTER, stack)
    idle = sum(idle_ps(result, pp_rank) for pp_rank in range(plan.pp))
    assert result.breakdown_ps[Category.BUBBLE] == -(-idle // plan.pp)


@RELAXED
@given(case=plans())
def test_communication_of_stages_and_replicas_is_what_keeps_ranks_waiting(
    case: tuple[ResolvedPlan, StackProfile],
) -> None:
    plan, stack = case
    result = simulate(make_job(48), plan, CLUSTER, stack)
    sent_ps = sum(
        sending_ps(result, pp_rank, action)
        for pp_rank in range(plan.pp)
        for action in result.work.actions[pp_rank]
    )
    assert result.breakdown_ps[Category.PP_COMM] == sent_ps // plan.pp
    waited_ps = sum(
        rank.gather_wait_ps + rank.reduce_wait_ps + work.gather_ps + result.work.norm_ps
        for rank, work in zip(result.times.ranks, result.work.ranks, strict=True)
    )
    assert result.breakdown_ps[Category.DP_COMM] == waited_ps // plan.pp


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp"),
    [("gpipe", 1, 1), ("gpipe", 4, 1), ("1f1b", 3, 1), ("1f1b", 4, 1), ("interleaved", 4, 3)],
)
def test_measured_idle_is_the_closed_form_for_equal_stages_and_free_communication(
    schedule: str, pp: int, vpp: int
) -> None:
    plan = make_plan(pp=pp, num_virtual_stages=vpp, schedule=schedule)
    costs = CostModel(CLUSTER, CORE, plan.world_size)
    built = build_step(make_job(8), plan, costs)
    inner = built.virtual_stage_costs[pp // 2][0]  # alike on all ranks: layers only where pp > 2
    virtual_stage = {phase: PassWork(cost.time_ps) for phase, cost in inner.items()}
    work = built.work._replace(
        ranks=(RankWork(virtual_stages=(virtual_stage,) * vpp),) * pp,
        norm_ps=0,
        overhead_per_million=0,
    )
    nothing = inner[Phase.FORWARD] * 0
    equal = replace(
        built,
        work=work,
        virtual_stage_costs=((inner,) * vpp,) * pp,
        update_costs=(nothing,) * pp,
        closing_costs=({moment: Cost(0, Source.DATASHEET) for moment in StepPoint},) * pp,
    )
    times = simulate_folded(work)
    parts, _ = time_breakdown(equal, times)
    passes_ps = sum(each.compute_ps for each in virtual_stage.values())
    assert times.step_ps == (8 * vpp + pp - 1) * passes_ps
    assert parts[Category.BUBBLE] == (pp - 1) * passes_ps
    closed = simulate(make_job(8), plan, CLUSTER, CORE).schedule_bubble_fraction
    assert parts[Category.BUBBLE] / times.step_ps == closed == (pp - 1) / (8 * vpp + pp - 1)


def test_embedding_and_head_may_have_stages_of_their_own() -> None:
    plan = replace(make_plan(pp=4), stages=(0, 6, 6, 0), dp=2, zero_stage=1)
    result = simulate(make_job(16), plan, CLUSTER, CORE)
    assert 0 <= result.step_ps - sum(result.breakdown_ps.values()) < len(Category)
    first, inner = result.memory.by_stage[0], result.memory.by_stage[1]
    assert first.parameters_bytes == 2 * 768 * (50_304 + 1024)  # padded table and positions
    assert inner.parameters_bytes == 2 * 6 * (12 * 768**2 + 13 * 768)


def test_one_rank_is_never_idle() -> None:
    result = simulate(make_job(8), make_plan(), CLUSTER, CORE)
    assert result.breakdown_ps[Category.BUBBLE] == 0
    assert result.bubble_fraction == result.schedule_bubble_fraction == 0
    assert all(result.breakdown_ps[each] == 0 for each in COMMUNICATION)


@RELAXED
@given(case=plans())
def test_the_same_plan_gives_the_same_bytes_with_a_fresh_or_a_shared_cost_model(
    case: tuple[ResolvedPlan, StackProfile],
) -> None:
    plan, stack = case
    shared = CostModel(CLUSTER, stack, plan.world_size)
    runs = [simulate(make_job(48), plan, CLUSTER, stack, costs=costs) for costs in (shared, None)]
    again = simulate(make_job(48), plan, CLUSTER, stack, costs=shared)
    assert repr(runs[0]) == repr(runs[1]) == repr(again)


PRINT_A_STEP = """
from meshwright.hwprofiles import Attention, load_cluster, load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob, load_model, simulate

plan = ResolvedPlan(tp=2, pp=2, dp=2, zero_stage=1, attention=Attention.FLASH, stages=(6, 6))
job = TrainingJob(model=load_model("gpt2"), global_batch_size=16, seq_len=1024)
print(repr(simulate(job, plan, load_cluster("dgx-a100"), load_stack("megatron-core"))))
"""


def test_another_process_with_another_hash_seed_prints_the_same_bytes() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PRINT_A_STEP],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@RELAXED
@given(case=plans())
def test_memory_of_each_rank_is_static_plus_the_fullest_moment(
    case: tuple[ResolvedPlan, StackProfile],
) -> None:
    plan, stack = case
    result = simulate(make_job(48), plan, CLUSTER, stack)
    built = build_step(make_job(48), plan, CostModel(CLUSTER, stack, plan.world_size))
    for stage, memory in zip(result.memory.by_stage, built.memory, strict=True):
        events = rank_timeline(built, result.times, stage.stage)
        live = max(event.activations_bytes + event.buffers_bytes for event in events)
        assert stage.peak_bytes == memory.static_bytes + live
        # Modules of Megatron-Core keep their last inputs, with gradients, until the next step.
        left = sum(2 * sent.gradient for sent in memory.sent) if memory.p2p_position else 0
        stand_ins = memory.buffers_bytes if stack.keeps_stand_ins else 0
        assert events[-1].activations_bytes == left + stand_ins
        assert stage.parameters_bytes == memory.parameters_bytes
    assert result.memory.peak_bytes == max(each.peak_bytes for each in result.memory.by_stage)
    worst = result.memory.worst_stage
    assert result.memory.worst_rank == worst.stage * plan.tp * plan.dp


def test_a_plan_fits_exactly_while_the_device_holds_it() -> None:
    job, plan = make_job(), make_plan(pp=2)
    need = simulate(job, plan, CLUSTER, CORE).memory.device_bytes
    tight = simulate(job, plan, CLUSTER, CORE, memory_limit_bytes=need)
    short = simulate(job, plan, CLUSTER, CORE, memory_limit_bytes=need - 1)
    assert tight.memory.fits
    assert not short.memory.fits
    assert tight.step_ps == short.step_ps
    assert any("runs this full tend to be slower" in warning for warning in tight.warnings)
    assert any(warning.startswith("does not fit: rank 0 needs ") for warning in short.warnings)


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_full_rank_is_named_without_a_walk_of_all(
    vpp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model("gpt3-175b")
    job = TrainingJob(model=model, global_batch_size=32, seq_len=2048)
    plan = ParallelPlan(tp=8, pp=16, num_virtual_stages=vpp)
    step = job, plan, load_cluster("dgx-a100"), CORE
    need = simulate(*step).memory.device_bytes
    walked: list[object] = []
    walk = simulation.peak_event

    def counted(*step: object, **changes: object) -> object:
        walked.append(step)
        return walk(*step, **changes)  # type: ignore[arg-type]

    monkeypatch.setattr(simulation, "peak_event", counted)
    for limit in (need, need - 1):
        walked.clear()
        full = simulate(*step, memory_limit_bytes=limit)
        assert len(walked) < 16
        held = [full.memory.stage_device_bytes(each) for each in full.memory.by_stage]
        rank = full.memory.by_stage[held.index(max(held))].rank
        assert any(f"rank {rank} " in warning for warning in full.warnings)


def test_the_rank_that_is_said_to_be_full_is_the_one_whose_device_is() -> None:
    """One that needs less may hold more: of states that come and go less is held beyond."""
    sizes = {"num_layers": 4, "hidden_size": 512, "num_heads": 8, "vocab_size": 50257}
    fields = {"name": "small", "seq_len": 512, "tied_embeddings": False, **sizes}
    model = ModelSpec.model_validate(fields)
    job = TrainingJob(model=model, global_batch_size=16, seq_len=512)
    plan = replace(make_plan(tp=2, dp=2, schedule="gpipe"), pp=2, stages=(3, 1))
    step = simulate(job, plan, CLUSTER, CORE, memory_limit_bytes=10**9)
    held = {each.rank: step.memory.stage_device_bytes(each) for each in step.memory.by_stage}
    assert step.memory.worst_rank == 0
    assert held[0] < held[4] == step.memory.device_bytes
    assert any(warning.startswith("does not fit: rank 4 needs ") for warning in step.warnings)


def test_rates_follow_from_the_step_time() -> None:
    job, plan = make_job(64), make_plan(tp=2, dp=4, recompute=Recompute.FULL)
    result = simulate(job, plan, CLUSTER, CORE)
    assert result.num_microbatches == 16
    seconds = result.step_ps / 10**12
    assert result.step_time_s == seconds
    assert result.tokens_per_s == 64 * 1024 / seconds
    assert result.tokens_per_s_per_gpu == 64 * 1024 / seconds / 8
    assert result.mfu_fraction == pytest.approx(model_flops(job) / (seconds * 8 * 312e12))
    ratio = hardware_flops(job, plan, CORE) / model_flops(job)
    assert result.hfu_fraction / result.mfu_fraction == pytest.approx(ratio)
    assert 0 < result.mfu_fraction < result.hfu_fraction < 1


def test_model_flops_are_the_published_formula() -> None:
    gpt3 = load_model("gpt3-175b").model_copy(update={"vocab_size": 51_200})
    job = TrainingJob(model=gpt3, global_batch_size=1536, seq_len=2048)
    b, s, layers, h, v = 1536, 2048, 96, 12_288, 51_200
    # 72 B s l h^2 (1 + s / 6h + V / 12 l h), multiplied out.
    expected = 72 * b * s * layers * h * h + 12 * b * s * s * layers * h + 6 * b * s * h * v
    assert model_flops(job) == expected
    plan = make_plan(gpt3, recompute=Recompute.FULL)
    # 96 B s l h^2 (1 + s / 6h + V / 16 l h) (Narayanan et al. 2021).
    full = 96 * b * s * layers * h * h + 16 * b * s * s * layers * h + 6 * b * s * h * v
    assert hardware_flops(job, plan, CORE) == full
    selective = replace(plan, recompute=Recompute.SELECTIVE)
    assert hardware_flops(job, selective, CORE) == expected + 4 * b * s * s * layers * h


def test_step_overhead_is_a_share_of_the_time_the_engine_found() -> None:
    result = simulate(make_job(), make_plan(dp=2), CLUSTER, CORE)
    end_ps = max(rank.end_ps for rank in result.times.ranks)
    assert result.breakdown_ps[Category.STEP_OVERHEAD] == end_ps * 4_000 // 1_000_000
    assert result.step_ps == end_ps + end_ps * 4_000 // 1_000_000


@pytest.mark.parametrize(
    ("fields", "stack", "message"),
    [
        ({"tp": 5}, CORE, "num_heads=12 is not divisible by tp=5"),
        ({"dp": 5}, CORE, "global_batch_size=16 is not divisible by dp=5; nearest: 15 or 20"),
        (
            {"dp": 4, "microbatch_size": 3},
            CORE,
            (
                "global_batch_size=16 leaves 4 sequences a replica at dp=4, "
                "not divisible by microbatch_size=3"
            ),
        ),
        (
            {"stages": (11,)},
            CORE,
            "stages hold 11 layers in all; gpt2 has 12",
        ),
        (
            {"pp": 3, "num_virtual_stages": 2, "schedule": "interleaved"},
            OLD,
            "interleaved needs num_microbatches=16 to be a multiple of pp=3",
        ),
        (
            {"attention": Attention.FLASH},
            OLD,
            (
                "attention=flash is not offered by stack megatron-lm-2021; allowed: unfused "
                "(Megatron-LM of April 2021 (arXiv 2104.04473) has no other); "
                "stacks with it: ddp, fsdp, megatron-core, torchtitan"
            ),
        ),
        (
            {"dp": 2, "zero_stage": 2},
            CORE,
            (
                "zero_stage=2 is not offered by stack megatron-core@0.18; allowed: 0, 1, 3 (not "
                "modelled here: 2 is optim_grads of --data-parallel-sharding-strategy, "
                "Megatron-Core 0.16); stacks with it: deepspeed"
            ),
        ),
        (
            {"pp": 3, "stages": (6, 0, 6)},
            OLD,
            (
                "a stage without layers between the first and the last one is not offered by stack "
                "megatron-lm-2021; allowed: 1 layer or more"
            ),
        ),
    ],
)
def test_a_plan_that_can_never_run_is_refused_with_the_field_and_what_is_allowed(
    fields: dict[str, object], stack: StackProfile, message: str
) -> None:
    stages = fields.pop("stages", None)
    plan = make_plan(**fields)
    if stages is not None:
        plan = replace(plan, stages=stages)
    with pytest.raises(PlanError) as caught:
        simulate(make_job(), plan, CLUSTER, stack)
    assert str(caught.value) == message


def test_a_stage_without_layers_copies_what_it_hands_on() -> None:
    """Two passes of 4 and 6 layers, and of none: 8 bytes a bf16 number are read and written."""
    plan = make_plan(pp=2, num_virtual_stages=2, schedule="interleaved", attention=Attention.FLASH)
    built = build_step(make_job(), replace(plan, stages=(4, 0, 6, 2)), CostModel(CLUSTER, CORE, 2))
    copy, layers = built.virtual_stage_costs[1]
    elements = 1024 * GPT2.hidden_size
    moved_ps = 2 * 2 * elements / CLUSTER.device.memory_bandwidth_bytes_per_s * 1e12
    assert moved_ps < copy[Phase.FORWARD].time_ps < layers[Phase.FORWARD].time_ps / 10
    assert copy[Phase.BACKWARD].time_ps == 0
    kept, message = built.memory[1].virtual_stages[0], 2 * elements
    assert (kept.saved_bytes, kept.sent) == (message, (message, message))
    assert not built.setting.parts[built.setting.stages[1]]


def test_a_plan_larger_than_its_cluster_is_refused() -> None:
    small = CLUSTER.model_copy(update={"num_nodes": 1})
    check_plan(make_job(), make_plan(dp=8), small, CORE)
    with pytest.raises(PlanError, match=r"^gpus=16 is more than the 8 of dgx-a100$"):
        check_plan(make_job(), make_plan(dp=16), small, CORE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "tp must be >= 1, got 0"),
        ({"pp": 2}, "stages lists 1 stage; the plan has pp=2 x vpp=1 = 2"),
        ({"stages": (0,)}, "stages=0 are no layers; allowed: 0 or more on each, 1 or more in all"),
        (
            {"pp": 2, "stages": (-1, 13)},
            "stages=-1,13 are no layers; allowed: 0 or more on each, 1 or more in all",
        ),
    ],
)
def test_a_plan_that_contradicts_itself_cannot_be_made(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        ResolvedPlan(**{"stages": (12,), **fields})
    assert str(caught.value) == message


def test_a_sequence_longer_than_the_learned_positions_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        TrainingJob(model=GPT2, global_batch_size=1, seq_len=1025)
    assert str(caught.value) == "seq_len=1025 is longer than the 1024 learned positions of gpt2"
    rotary = load_model("llama3-8b")
    assert TrainingJob(model=rotary, global_batch_size=1, seq_len=10**6).tokens_per_step == 10**6


def warnings_of(cluster: Cluster = CLUSTER, **fields: object) -> tuple[str, ...]:
    return simulate(make_job(48), make_plan(**fields), cluster, CORE).warnings


def test_a_plain_plan_has_no_warnings() -> None:
    assert warnings_of() == ()


def test_switches_without_effect_are_named() -> None:
    assert "sequence_parallel has no effect at tp=1" in warnings_of(sequence_parallel=True)
    assert "zero_stage=1 has no effect at dp=1" in warnings_of(zero_stage=1)


def test_a_switch_that_is_said_to_have_no_effect_has_none() -> None:
    """On one rank FSDP2 copies units and reduces gradients, too, as its memory says."""
    job = TrainingJob(model=GPT2, global_batch_size=4, seq_len=256, precision=Precision.BF16)
    told = 0
    for stack in map(load_stack, list_stacks()):
        switched = [{"zero_stage": each} for each in range(4)]
        switched += [{"sync_each_microbatch": each} for each in (None, True, False)]
        found: dict[tuple[int, int], list[str]] = {}
        for fields in switched:
            usual = {"zero_stage": stack.zero_stage, "attention": stack.attention}
            try:
                step = simulate(job, make_plan(**(usual | fields)), load_cluster("dgx-h100"), stack)
            except PlanError:
                continue
            key = step.step_ps, step.memory.device_bytes
            found.setdefault(key, []).extend(each for each in step.warnings if "effect" in each)
        told += any(found.values())
        assert len(found) <= 1 or not any(found.values()), stack.name
    assert told > 10


@pytest.mark.parametrize("name", ["fsdp", "torchtitan@0.2"])
def test_a_stage_that_fully_shard_does_not_have_is_told_what_it_is(name: str) -> None:
    stack, cluster, job = load_stack(name), load_cluster("dgx-h100"), make_job(4)

    def of(**fields: object) -> StepResult:
        return simulate(job, make_plan(**{"attention": Attention.FLASH, **fields}), cluster, stack)

    sharded = of(zero_stage=3)
    for stage in range(3):
        step = of(zero_stage=stage)
        assert step.step_ps == sharded.step_ps
        assert step.memory.device_bytes == sharded.memory.device_bytes
        line = f"zero_stage={stage} is predicted as --zero 3: {stack.name} runs fully_shard on one"
        assert sum(warning.startswith(line) for warning in step.warnings) == 1
    assert not any("zero_stage" in warning for warning in sharded.warnings)


def test_tensor_parallelism_over_nodes_is_named() -> None:
    assert "tp=3 crosses nodes of 8 devices" in warnings_of(tp=3, dp=4)
    assert "tp=12 crosses nodes of 8 devices" in warnings_of(tp=12)


def test_misaligned_matrices_are_named_in_16_bit_alone() -> None:
    odd = GPT2.model_copy(update={"hidden_size": 12 * 60, "head_dim": 60})
    job = TrainingJob(model=odd, global_batch_size=8, seq_len=1024)
    expected = "head dim = 60 is not a multiple of 8: its matrix products run slowly"
    plan = make_plan(odd)
    assert expected in simulate(job, plan, CLUSTER, CORE).warnings
    fp32 = replace(job, precision=Precision.FP32)
    assert expected not in simulate(fp32, plan, CLUSTER, CORE).warnings


def test_extrapolated_evidence_is_named() -> None:
    link = CLUSTER.intra_node
    facts = tuple(
        fact.model_copy(update={"kind": Source.EXTRAPOLATED}) for fact in link.collectives
    )
    guessed = link.model_copy(update={"collectives": facts})
    cluster = CLUSTER.model_copy(update={"intra_node": guessed})
    warnings = warnings_of(cluster, tp=4)
    assert any(each.endswith("of the busy time rests on extrapolation") for each in warnings)


def test_only_messages_of_one_device_a_stage_rest_on_measured_hops() -> None:
    """Inside a node a hop was measured; nothing else of two stages without replicas was."""
    result = simulate(make_job(), make_plan(pp=2), CLUSTER, OLD)
    parts = result.breakdown_ps
    idle_ps = parts[Category.BUBBLE] + parts[Category.STEP_OVERHEAD]
    share = parts[Category.PP_COMM] / (result.step_ps - idle_ps)
    assert result.source_fractions[Source.MEASURED] == pytest.approx(share, rel=1e-6)
    assert share > 1e-4


def test_the_largest_tensor_is_one_that_lives_at_the_peak() -> None:
    """The stage with the head peaks in its logits, an inner one in what is recomputed."""
    plan = ResolvedPlan(pp=4, recompute=Recompute.FULL, stages=(1,) * 4)
    model = ModelSpec(
        name="wide head", num_layers=4, hidden_size=256, num_heads=4, vocab_size=50_000, seq_len=128
    )
    job = TrainingJob(model=model, global_batch_size=8, seq_len=128, precision=Precision.FP16)
    stages = simulate(job, plan, CLUSTER, load_stack("megatron-lm-2022")).memory.by_stage
    assert stages[-1].largest_tensor == "logits"
    inner = stages[1]
    assert inner.peak_moment.startswith("B")
    assert inner.largest_tensor == "mlp in"
