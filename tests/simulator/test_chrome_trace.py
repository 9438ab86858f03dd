"""The trace of a step: exact times, no overlap, and nothing that the step did not do."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from meshwright.hwprofiles import (
    PS_PER_S,
    ContextParallel,
    ExpertOverlap,
    Precision,
    Recompute,
    StackProfile,
    StageSplit,
    load_cluster,
    load_stack,
)
from meshwright.simulator import (
    Category,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_model,
    resolve_stages,
    simulate,
)
from meshwright.simulator import chrome_trace as chrome_trace_module
from meshwright.simulator.chrome_trace import (
    ChromeTrace,
    TraceEvent,
    chrome_trace,
    write_chrome_trace,
)
from meshwright.simulator.engine import Span, SpanKind
from meshwright.simulator.schedules import Phase

# stack, cluster, tp, pp, dp, vpp, zero_stage: blocking and overlapped messages, shared port,
# collectives hidden and not, a pipeline of one. With a stack that can, tokens are split over tp.
CASES = {
    "blocking": ("megatron-lm-2021", "dgx-a100", 2, 4, 4, 1, 0),
    "interleaved": ("megatron-lm-2021", "dgx-a100", 2, 4, 2, 2, 0),
    "zero": ("megatron-deepspeed-2022", "jean-zay-a100", 2, 4, 8, 1, 1),
    "overlapped": ("megatron-core", "dgx-h100", 2, 4, 16, 1, 1),
    "overlapped-interleaved": ("megatron-core", "dgx-h100", 8, 4, 4, 3, 1),
    "no-pipeline": ("megatron-core", "dgx-h100", 1, 1, 8, 1, 1),
    "sums-first": ("megatron-lm-2022", "dgx-a100", 2, 2, 4, 1, 0),
    "fsdp": ("fsdp", "dgx-h100", 1, 1, 8, 1, 3),
    "ddp": ("ddp", "dgx-a100", 1, 1, 8, 1, 0),
    "offloaded": ("megatron-core-2026", "dgx-h100", 1, 1, 8, 1, 1),
    "offloaded-shards": ("megatron-core-2026", "dgx-h100", 1, 1, 8, 1, 3),
}
OFFLOADED = 12  # layers of 24, where activations wait on the host


def narrowest(stack: StackProfile, cluster: str) -> Precision:
    rates = load_cluster(cluster).device.peak_flops_per_s
    return next(each for each in reversed(stack.precisions) if each in rates)


def step(case: str) -> StepResult:
    stack_name, cluster, tp, pp, dp, vpp, zero_stage = CASES[case]
    model = load_model("megatron-1.7b")
    stack = load_stack(stack_name)
    number = OFFLOADED if case.startswith("offloaded") else None
    job = TrainingJob(
        model=model,
        global_batch_size=(16 if pp > 1 else 2) * dp,
        seq_len=2048,
        precision=Precision.BF16 if number else narrowest(stack, cluster),
    )
    plan = ResolvedPlan(
        tp=tp,
        pp=pp,
        dp=dp,
        num_virtual_stages=vpp,
        zero_stage=zero_stage,
        sequence_parallel=stack.sequence_parallel,
        recompute=Recompute.NONE if number else Recompute.FULL,
        offload_layers=number,
        attention=stack.attention,
        schedule="interleaved" if vpp > 1 else "1f1b",
        stages=resolve_stages(model, 2048, pp * vpp, StageSplit.BALANCED),
    )
    return simulate(job, plan, load_cluster(cluster), stack)


@pytest.fixture(scope="module", params=sorted(CASES))
def result(request: pytest.FixtureRequest) -> StepResult:
    return step(request.param)


def events(trace: ChromeTrace, kind: str) -> list[TraceEvent]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def total_ps(spans: tuple[Span, ...], *kinds: SpanKind) -> int:
    return sum(span.end_ps - span.start_ps for span in spans if not kinds or span.kind in kinds)


def test_times_in_the_file_are_exact_to_the_picosecond(result: StepResult) -> None:
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    text = json.dumps(chrome_trace(result))
    for event in events(json.loads(text), "X"):
        tracks[event["pid"], event["tid"]].append(
            (round(event["ts"] * 1e6), round((event["dur"]) * 1e6))
        )
    for pp_rank, rank in enumerate(result.times.ranks):
        streams = rank.streams()
        for tid, spans in enumerate((streams.compute, streams.messages, streams.data_parallel)):
            expected = [(span.start_ps, span.end_ps - span.start_ps) for span in spans]
            if tid:
                assert tracks[pp_rank, tid] == expected
            assert set(expected) <= set(tracks[pp_rank, tid])


def test_spans_of_a_track_never_overlap_and_end_with_the_step(result: StepResult) -> None:
    for pp_rank, rank in enumerate(result.times.ranks):
        streams = result.times.ranks[pp_rank].streams()
        for spans in (streams.compute, streams.messages, streams.data_parallel):
            assert all(a.end_ps <= b.start_ps for a, b in pairwise(spans))
            assert all(0 <= span.start_ps < span.end_ps <= rank.end_ps for span in spans)


def test_durations_add_up_to_the_busy_time_of_the_step(result: StepResult) -> None:
    """Computation, messages that block it and collectives that it waits for are all but idle."""
    busy_ps = 0
    for pp_rank, rank in enumerate(result.times.ranks):
        streams = result.times.ranks[pp_rank].streams()
        busy_ps += total_ps(streams.compute) + rank.reduce_wait_ps
        busy_ps += result.work.norm_ps + result.work.ranks[pp_rank].gather_ps
        busy_ps += total_ps(streams.messages) if result.work.blocking_messages else 0
    end_ps = max(rank.end_ps for rank in result.times.ranks)
    idle_ps = result.breakdown_ps[Category.BUBBLE]
    assert end_ps - busy_ps // result.plan.pp == idle_ps


def test_reductions_and_sums_end_when_gradients_are_reduced(result: StepResult) -> None:
    for pp_rank, rank in enumerate(result.times.ranks):
        streams = result.times.ranks[pp_rank].streams()
        reductions = (SpanKind.GRADIENT_REDUCTION, SpanKind.SHARED_EMBEDDING)
        ends = [span.end_ps for span in streams.data_parallel if span.kind in reductions]
        ends += [span.end_ps for span in streams.compute if span.kind is SpanKind.TENSOR_SUM]
        assert max([rank.passes_end_ps, *ends]) == rank.reduce_end_ps


def test_sums_over_tensor_ranks_stand_where_the_stack_does_them(result: StepResult) -> None:
    """Megatron-Core sums after the reductions over replicas, the others before they end."""
    for pp_rank, rank in enumerate(result.times.ranks):
        streams = result.times.ranks[pp_rank].streams()
        sums = [span for span in streams.compute if span.kind is SpanKind.TENSOR_SUM]
        assert len(sums) == (result.plan.sequence_parallel and result.plan.tp > 1)
        for span in sums:
            before = rank.reduce_wait_ps if result.stack.name.startswith("megatron-core") else 0
            shared = result.work.ranks[pp_rank].shared_embedding_ps
            assert span.start_ps - rank.passes_end_ps >= before - shared
            assert before or span.start_ps == rank.passes_end_ps
    if result.plan.sequence_parallel and result.plan.tp > 1:
        norm_all_reduce_ps = [rank.norm_all_reduce_ps for rank in result.work.ranks]
        assert (
            result.breakdown_ps[Category.TP_COMM]
            > sum(norm_all_reduce_ps) // len(norm_all_reduce_ps)
            > 0
        )


def test_gathers_explain_when_first_forward_passes_end(result: StepResult) -> None:
    for pp_rank, rank in enumerate(result.times.ranks):
        if rank.copies:  # passes wait for them, too: test_activation_offload.py
            continue
        streams = result.times.ranks[pp_rank].streams()
        gathered: dict[int, list[int]] = defaultdict(list)
        for span in streams.data_parallel:
            if span.kind is SpanKind.PARAMETER_GATHER and span.virtual_stage >= 0:
                gathered[span.virtual_stage].append(span.end_ps)
        waited_ps = 0
        for span in streams.compute:
            if (
                span.kind == Phase.FORWARD.label
                and span.microbatch == 0
                and span.virtual_stage in gathered
            ):
                stage = result.work.ranks[pp_rank].virtual_stages[span.virtual_stage]
                segments = stage[Phase.FORWARD].gathers
                now = span.start_ps
                for segment, ready_ps in zip(segments, gathered[span.virtual_stage], strict=True):
                    waited_ps += max(0, ready_ps - now)
                    now = max(now, ready_ps) + segment.compute_ps
                assert now == span.end_ps
        forward = result.work.ranks[pp_rank].virtual_stages[0][Phase.FORWARD]
        if not forward.units:  # of sharded units: more
            assert waited_ps == rank.gather_wait_ps


def test_memory_counter_peaks_at_the_reported_peak(result: StepResult) -> None:
    live: dict[int, list[int]] = defaultdict(list)
    for event in events(chrome_trace(result), "C"):
        live[event["pid"]].append(event["args"]["live_bytes"])
    for stage in result.memory.by_stage:
        assert max(live[stage.stage]) == stage.peak_bytes
        static = stage.parameters_bytes + stage.gradients_bytes + stage.optimizer_states_bytes
        assert live[stage.stage][-1] == static


def test_every_pass_and_every_track_is_named(result: StepResult) -> None:
    trace = chrome_trace(result)
    passes = [
        (event["pid"], event["args"]["phase"], event["args"]["chunk"], event["args"]["microbatch"])
        for event in events(trace, "X")
        if event["tid"] == 0 and "microbatch" in event["args"]
    ]
    plan = result.plan
    assert len(set(passes)) == len(passes) == 2 * plan.num_stages * result.num_microbatches
    named = {event["pid"] for event in events(trace, "M") if event["name"] == "process_name"}
    assert named == set(range(plan.pp))
    per_process = [e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"]
    copies = ["host copies"] if plan.offload_layers else []
    assert per_process == ["compute", "messages", "data parallel", *copies] * plan.pp
    (copied,) = {len(rank.copies) for rank in result.times.ranks}
    assert copied == 2 * result.num_microbatches * (plan.offload_layers or 0)


def stretch_ps(event: TraceEvent) -> tuple[int, int]:
    start_ps = round(event["ts"] * 1e6)
    return start_ps, start_ps + round(event["dur"] * 1e6)


def outer_slices(trace: ChromeTrace) -> list[TraceEvent]:
    """Return slices with nothing around them, after each was found inside the one around it."""
    outer: list[TraceEvent] = []
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in events(trace, "X"):
        around, (start_ps, end_ps) = open_until[event["pid"], event["tid"]], stretch_ps(event)
        while around and around[-1] <= start_ps:
            around.pop()
        assert not around or end_ps <= around[-1]
        outer += [] if around else [event]
        around.append(end_ps)
    return outer


def test_slices_nest_and_passes_are_full_of_their_layers_and_waits(result: StepResult) -> None:
    trace = chrome_trace(result)
    outer = outer_slices(trace)
    passes = [each for each in outer if "microbatch" in each["args"] and each["tid"] == 0]
    inside = [each for each in events(trace, "X") if each not in outer]
    kinds = {each["cat"] for each in inside}
    assert kinds <= {"layers", "compute", "in layers"}
    assert ("in layers" in kinds) == (result.plan.tp > 1)
    lasting = defaultdict(int)
    for each in inside:
        lasting[each["cat"]] += stretch_ps(each)[1] - stretch_ps(each)[0]
    waits = lasting["layers"] + lasting["compute"]
    assert sum(end - start for start, end in map(stretch_ps, passes)) == waits
    plan, layers = result.plan, [each for each in inside if each["cat"] == "layers"]
    blocks = result.job.model.num_layers + 2
    assert len(layers) == 2 * result.num_microbatches * blocks
    assert {event["name"] for event in layers} >= {"embedding", "head", "layer 0", "layer 23"}
    assert any(each["name"] == "wait for parameters" for each in inside) == (
        any(rank.gather_wait_ps for rank in result.times.ranks)
    )
    assert plan.pp == len({each["pid"] for each in outer})


def test_what_slices_are_spent_on_adds_up_to_the_breakdown(result: StepResult) -> None:
    spent_us: dict[str, float] = defaultdict(float)
    for event in events(chrome_trace(result), "X"):
        for category, time_us in event["args"].get("category_us", {}).items():
            spent_us[category] += time_us
        if event["cat"] == "messages" and result.work.blocking_messages:
            spent_us["pp_comm"] += event["dur"]
    spent_us["bubble"] = result.step_ps / 1e6 * result.plan.pp - sum(spent_us.values())
    for category, time_ps in result.breakdown_ps.items():
        # The breakdown rounds each category down to whole picoseconds.
        mean_us = spent_us[category] / result.plan.pp
        assert mean_us * 1e6 == pytest.approx(time_ps, abs=1 + result.step_ps * 1e-12)


def routed_step() -> StepResult:
    model, stack = load_model("mixtral-8x7b"), load_stack("megatron-core")
    job = TrainingJob(model=model, global_batch_size=16, seq_len=8192)
    layout = {"tp": 2, "cp": 2, "dp": 4, "ep": 8, "etp": 1, "sequence_parallel": True}
    switches = {"zero_stage": 1, "cp_type": ContextParallel.ALL_GATHER}
    plan = ResolvedPlan(**layout, **switches, attention=stack.attention, stages=(32,))
    return simulate(job, plan, load_cluster("dgx-h100"), stack)


def test_layers_of_the_first_microbatches_hold_their_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = routed_step()
    for most, opened in ((10**6, {0, 1, 2, 3}), (1, {0})):
        monkeypatch.setattr(chrome_trace_module, "MOST_INSIDE", most)
        trace = chrome_trace(result)
        inside = [each for each in events(trace, "X") if each["cat"] == "in layers"]
        assert {each["name"] for each in inside} >= {
            "tp all_gather",
            "cp all_gather",
            "ep all_to_all",
        }
        passes = [each for each in events(trace, "X") if "microbatch" in each["args"]]
        held = {
            each["args"]["microbatch"]
            for each in passes
            for start, end in [stretch_ps(each)]
            if any(start <= stretch_ps(part)[0] < end for part in inside[:: len(inside) // 99 or 1])
        }
        assert held == opened
        test_what_slices_are_spent_on_adds_up_to_the_breakdown(result)


def test_exchanges_beside_another_microbatch_are_as_long_as_what_shows_of_them() -> None:
    model, stack = load_model("qwen3-30b-a3b"), load_stack("megatron-core")
    job = TrainingJob(model=model, global_batch_size=64, seq_len=4096)
    overlap = {"expert_overlap": ExpertOverlap.MICROBATCHES, "zero_stage": 1}
    layout = {"pp": 2, "dp": 8, "ep": 8, "num_virtual_stages": 2, "schedule": "interleaved"}
    kernel = {"attention": stack.attention}
    plan = ResolvedPlan(**layout, **overlap, **kernel, stages=(12,) * 4)
    result = simulate(job, plan, load_cluster("dgx-h100"), stack)
    test_what_slices_are_spent_on_adds_up_to_the_breakdown(result)
    assert outer_slices(chrome_trace(result))  # which look at how slices nest


def test_flows_pair_and_end_where_the_next_stage_starts(result: StepResult) -> None:
    trace = chrome_trace(result)
    begun = {each["id"]: each for each in events(trace, "s")}
    ended = {each["id"]: each for each in events(trace, "f")}
    num_flows = len(events(trace, "s"))
    assert len(begun) == len(ended) == num_flows == len(events(trace, "f"))
    num_messages = 2 * (result.plan.num_stages - 1) * result.num_microbatches
    assert num_flows == (num_messages if result.plan.pp > 1 else 0)
    slices = {(each["pid"], each["tid"], each["ts"]): each for each in outer_slices(trace)}
    for number, start in begun.items():
        end = ended[number]
        message = slices[start["pid"], start["tid"], start["ts"]]
        taken = slices[end["pid"], end["tid"], end["ts"]]
        assert message["args"]["microbatch"] == taken["args"]["microbatch"]
        assert message["ts"] + message["dur"] <= taken["ts"]
        is_forward = taken["args"]["phase"] == "forward"
        step = 1 if is_forward else -1
        assert end["pid"] == (start["pid"] + step) % result.plan.pp


def test_counters_never_go_back_in_time(result: StepResult) -> None:
    for pp_rank in range(result.plan.pp):
        times = [e["ts"] for e in events(chrome_trace(result), "C") if e["pid"] == pp_rank]
        assert times[0] == 0
        assert all(one < other for one, other in pairwise(times))
        assert times[-1] <= result.step_ps / 1e6


def test_a_parameter_server_has_flows_between_ports_and_lanes_of_its_breakdown() -> None:
    stack, model = load_stack("parameter-server"), load_model("gpt2")
    job = TrainingJob(
        model=model, global_batch_size=4, seq_len=1024, precision=narrowest(stack, "dgx-a100")
    )
    plan = ResolvedPlan(dp=4, attention=stack.attention)
    result = simulate(job, plan, load_cluster("dgx-a100"), stack)
    trace = chrome_trace(result)
    lanes = {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    outer = outer_slices(trace)
    assert len(outer) == len(events(trace, "X"))
    flows = zip(events(trace, "s"), events(trace, "f"), strict=True)
    pairs = [
        (start["id"] == end["id"], lanes[start["tid"]], lanes[end["tid"]]) for start, end in flows
    ]
    assert len(pairs) >= 2 * plan.dp  # a pull and a push of each worker
    assert all(same and out.endswith(" out") and into.endswith(" in") for same, out, into in pairs)
    overhead_us = sum(each["dur"] for each in outer if lanes[each["tid"]] == "step overhead")
    assert overhead_us * 1e6 == pytest.approx(result.breakdown_ps[Category.STEP_OVERHEAD], abs=1)
    assert {each for pair in pairs for each in pair[1:]} < set(lanes.values())


def test_events_are_sorted_by_time(result: StepResult) -> None:
    timed = [event for event in chrome_trace(result)["traceEvents"] if event["ph"] != "M"]
    times = [event["ts"] for event in timed]
    assert times == sorted(times)
    for one, other in pairwise(timed):  # what a process counts, and then its slices
        if (one["ts"], one["pid"]) == (other["ts"], other["pid"]):
            assert ("tid" in one) <= ("tid" in other)
    assert chrome_trace(result)["otherData"]["step_time_us"] * 1e6 == pytest.approx(
        result.step_time_s * PS_PER_S, abs=1
    )


def test_same_step_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        write_chrome_trace(step("overlapped-interleaved"), tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text())["displayTimeUnit"] == "ms"


def test_shared_port_cases_really_share_it() -> None:
    """Otherwise paused collectives would be tested on nothing."""
    work = step("overlapped").work
    assert work.shared_port
    assert work.ranks[1].virtual_stages[0][Phase.FORWARD].gathers
    assert work.ranks[1].virtual_stages[0][Phase.BACKWARD].reductions
    assert step("no-pipeline").times.ranks[0].gather_wait_ps > 0
