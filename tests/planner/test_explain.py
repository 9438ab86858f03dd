"""Explanations and comparisons: terms that add up, and figures that a simulation repeats."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import (
    ResolvedPlan,
    StepResult,
    TrainingJob,
    load_cluster,
    load_model,
    load_stack,
    main,
    simulate,
)
from meshwright.hwprofiles import Precision, Recompute, with_facts
from meshwright.planner.compare import Comparison, memory_terms, time_terms
from meshwright.planner.explain import explain
from meshwright.planner.explain.memory import memory_products, passes_in_flight
from meshwright.planner.explain.resources import Resource, resource_changes
from meshwright.simulator import Category, CostModel, account, build_step, simulate_folded
from meshwright.simulator.account import critical_path
from meshwright.simulator.layout import with_stages

JOB = TrainingJob(model=load_model("gpt2"), global_batch_size=64, seq_len=1024)
pytestmark = pytest.mark.usefixtures("no_pictures")
CLUSTER = load_cluster("dgx-a100")
WORDS = ["gpt2", "--cluster", "dgx-a100", "--gpus", "16", "--global-batch", "64"]
LAYOUT = ["--tp", "2", "--pp", "2"]
PLANS = {
    "megatron-core": {"tp": 2, "pp": 2, "dp": 4},
    "megatron-lm-2021": {"tp": 1, "pp": 4, "dp": 2, "num_virtual_stages": 3},
    "megatron-deepspeed-2022": {"tp": 2, "pp": 3, "dp": 2, "zero_stage": 1},
    "torchtitan": {"tp": 1, "pp": 2, "dp": 4, "zero_stage": 3},
    "fsdp": {"dp": 8, "zero_stage": 3},
    "ddp": {"dp": 8},
}


def plan_of(stack: str) -> ResolvedPlan:
    """Return the plan of a stack in `PLANS`."""
    fields = PLANS[stack]
    schedule = "interleaved" if fields.get("num_virtual_stages", 1) > 1 else "1f1b"
    profile = load_stack(stack)
    return ResolvedPlan.of(
        {"zero_stage": profile.zero_stage, "attention": profile.attention, "schedule": schedule}
        | fields
    )


@pytest.mark.parametrize("stack", PLANS)
def test_the_critical_path_is_as_long_as_the_step(stack: str) -> None:
    profile = load_stack(stack)
    plan = with_stages(JOB, plan_of(stack), profile)
    costs = CostModel(CLUSTER, profile, plan.world_size)
    built = build_step(JOB, plan, costs)
    times = simulate_folded(built.work)
    path = critical_path(built, times)
    assert sum(path.time_ps.values()) == times.step_ps
    assert min(path.time_ps.values()) >= 0
    assert path.time_ps[Category.BUBBLE] == 0
    step = account(built, times, costs)
    if plan.pp == 1:  # one rank: nothing to wait for, nothing to average
        assert path.time_ps == {**step.breakdown_ps, Category.BUBBLE: 0}
    else:
        # Forward and backward of the first and the last microbatch pass through every stage.
        assert path.num_passes >= 2 * (plan.num_stages - 1) + 2
        assert sorted(path.by_rank_ps) == list(range(plan.pp))


# Of DGX A100: 312 TFLOP/s, 2,039 GB/s, a card of 200 Gb/s a device.
BY_HAND = {
    "matrix rate": "device.peak.bf16=343.2 TFLOP/s",
    "memory bandwidth": "device.memory_bandwidth=2242.9 GB/s",
    "links between nodes": "inter_node.bandwidth=27.5 GB/s per direction",
}


def test_a_tenth_more_is_what_the_changed_hardware_gives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", *WORDS, *LAYOUT, "--json", "-"]) == 0
    explained = json.loads(capsys.readouterr().out)
    gains = explained["a_tenth_more"]
    assert [gain["resource"] for gain in gains] == [each.value for each in Resource]
    for gain in gains:
        by_hand = BY_HAND.get(gain["resource"])
        changes = [by_hand] if by_hand else gain["set"]
        facts = [word for change in changes for word in ("--set", change)]
        assert main(["simulate", *WORDS, *LAYOUT, *facts, "--json", "-"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert gain["step_time_s"] == again["step_time_s"]
        assert gain["fits"] == again["memory"]["fits"]
    by_resource = {gain["resource"]: gain["step_time_s"] for gain in gains}
    assert by_resource.pop("memory capacity") == explained["step_time_s"]
    assert max(by_resource.values()) <= explained["step_time_s"]
    assert by_resource["matrix rate"] < explained["step_time_s"]


# Numbers of a cluster and a stack by the resource that they are of.
NUMBERS = {
    Resource.MATRIX_RATE: r"device\.peak_flops_per_s\.(fp8|bf16)",
    Resource.MEMORY_BANDWIDTH: r"device\.memory_bandwidth_bytes_per_s",
    Resource.MEMORY_CAPACITY: r"device\.(memory_capacity|overheads\.usable)_bytes",
    Resource.LINKS_IN_A_NODE: r"intra_node\.(collectives\.\d+\.busbw|bandwidth)_bytes_per_s",
    Resource.LINKS_BETWEEN_NODES: r"inter_node\.bandwidth_bytes_per_s",
    Resource.HOST: r"(kernel_gap|expert_launch|host_\w+)_s|host_link\.bandwidth_bytes_per_s",
}


def numbers(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a document by their keys, one behind the other."""
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in items:
            yield from numbers(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float):
        yield path, value


@pytest.mark.parametrize("stack_name", ["megatron-core", "megatron-deepspeed", "dataparallel"])
def test_a_tenth_more_raises_every_number_of_a_resource_and_no_other(stack_name: str) -> None:
    """A rate and a size by a tenth; a time is as long as ten of eleven parts of it.

    Some stack has each time of the host.
    """
    parts = load_cluster("dgx-h100"), load_stack(stack_name)
    before = dict(numbers([each.model_dump() for each in parts]))
    for resource, names in NUMBERS.items():
        changes = resource_changes(resource, replace(JOB, precision=Precision.FP8), *parts)
        after = dict(numbers([each.model_dump() for each in with_facts(*parts, changes)]))
        assert before.keys() == after.keys()
        for name, number in before.items():
            is_raised = re.fullmatch(names, name.partition(".")[2])
            is_time = is_raised and resource is Resource.HOST and "bandwidth" not in name
            factor = 10 / 11 if is_time else 1.1 if is_raised else 1
            assert after[name] == pytest.approx(number * factor, rel=1e-9), name


def test_with_a_tenth_more_memory_a_plan_fits_that_needs_as_much() -> None:
    plan, stack = plan_of("megatron-core"), load_stack("megatron-core")
    needed = simulate(JOB, plan, CLUSTER, stack).memory.device_bytes
    for share, fits in ((1.05, True), (1.15, False)):
        usable = f"device.overheads.usable={int(needed / share)} B"
        smaller, _ = with_facts(CLUSTER, stack, (usable,))
        explanation = explain(JOB, plan, smaller, stack)
        assert not explanation.step.memory.fits
        (gain,) = (each for each in explanation.gains if each.resource is Resource.MEMORY_CAPACITY)
        assert gain.fits == fits


def test_the_fastest_neighbour_that_a_tenth_more_memory_lets_in_is_named() -> None:
    """Without recomputation a step is the fastest of those that need a little more."""
    stack = load_stack("megatron-core")
    plan = replace(plan_of("megatron-core"), recompute=Recompute.FULL)
    needed, of_two, without = (
        simulate(JOB, each, CLUSTER, stack).memory.device_bytes
        for each in (
            plan,
            replace(plan, microbatch_size=2),
            replace(plan, recompute=Recompute.NONE),
        )
    )
    assert needed < of_two < without < 1.1 * needed
    for usable, wanted in (
        (needed, "--recompute none"),
        (int(of_two / 1.1) + 1, "--micro-batch 2"),  # for the other a tenth is not enough
        (without, None),  # and what else does not fit is slower
    ):
        full, _ = with_facts(CLUSTER, stack, (f"device.overheads.usable={usable} B",))
        roomier = explain(JOB, plan, full, stack).roomier
        assert (roomier and roomier.change.options) == wanted
        if usable == needed:
            assert roomier is not None
            assert roomier.costliest == ("recompute", roomier.more_ps["recompute"])
            assert roomier.more_ps["recompute"] < 0
    assert explain(JOB, plan, full, stack, memory_limit_bytes=needed).roomier is None


def test_a_neighbour_is_a_simulation_and_its_terms_add_up() -> None:
    stack = load_stack("megatron-core")
    explanation = explain(JOB, plan_of("megatron-core"), CLUSTER, stack)
    options = {each.change.options: each for each in explanation.neighbours}
    assert {"--tp 4", "--tp 1", "--pp 4", "--pp 1", "--micro-batch 2", "--zero 0"} <= set(options)
    assert "--vpp 2 --schedule interleaved" in options
    for neighbour in (options["--tp 4"], options["--zero 0"]):
        change = neighbour.change
        again = simulate(JOB, change.plan, CLUSTER, stack)
        assert (again.step_ps, again.memory.device_bytes) == (change.step_ps, change.device_bytes)
        assert sum(neighbour.more_ps.values()) == again.step_ps - explanation.step.step_ps
        assert neighbour.fits == again.memory.fits


@pytest.mark.parametrize("stack", PLANS)
def test_products_of_memory_add_up_to_the_live_bytes(stack: str) -> None:
    explanation = explain(JOB, plan_of(stack), CLUSTER, load_stack(stack))
    memory = explanation.step.memory
    assert sum(term.size_bytes for term in explanation.memory) == memory.peak_bytes
    assert min(term.size_bytes for term in explanation.memory) > 0


def test_memory_of_gpt2_is_the_products_of_its_sizes() -> None:
    """A layer of hidden size h has 12 h^2 + 13 h weights, and keeps s b h (34 + 5 a s / h) bytes.

    So says section 4.1 of Korthikanti et al. 2022 (arXiv 2205.05198), but for two numbers of fp32 a
    token of each of two norms.  The first stage has tables of 50,304 words and 1,024 positions, the
    last one a norm and a copy of the first table.  Of interleaved stages a rank runs
    (pp - 1) x 2 + (vpp - 1) x pp + 1 passes ahead; where later ones are larger it is fullest before
    it ends the first of them.
    """
    h, s, a = 768, 1024, 12
    layer, first, last = 12 * h**2 + 13 * h, (50_304 + 1_024) * h, (50_304 + 2) * h
    kept = s * h * (34 + 5 * a * s // h) + 2 * 2 * 4 * s
    mib, interleaved = f"{kept / 2**20:.2f} MiB", {"pp": 2, "schedule": "interleaved"}
    for fields, stages, count, wanted in (
        ({"pp": 4}, (3, 3, 3, 3), first + 3 * layer, {"": (12, "4 in flight x 3 layers")}),
        ({"pp": 2}, (2, 10), last + 10 * layer, {"": (10, "1 in flight x 10 layers")}),
        (
            interleaved | {"num_virtual_stages": 2},
            (3, 3, 3, 3),
            first + 6 * layer,
            {
                " of stage 0": (12, "4 in flight x 3 layers"),
                " of stage 1": (3, "1 in flight x 3 layers"),
            },
        ),
        (
            interleaved | {"num_virtual_stages": 3},
            (1, 1, 3, 2, 3, 2),
            first + 7 * layer,
            {
                " of stage 0": (3, "3 in flight x layer"),
                " of stages 1-2": (12, "2 x 2 in flight x 3 layers"),
            },
        ),
    ):
        plan = ResolvedPlan.of({**fields, "stages": stages})
        costs = CostModel(CLUSTER, load_stack("megatron-lm-2021"), plan.world_size)
        built = build_step(JOB, plan, costs)
        step = account(built, simulate_folded(built.work), costs)
        terms = {each.name: each for each in memory_products(step, built, costs)}
        for name, width in (("parameters", 2), ("gradients", 2), ("optimizer states", 12)):
            assert terms[name] == (name, count * width, f"{count:,} x {width} B")
        for where, (num_kept, factors) in wanted.items():
            name = f"layer activations{where}"
            assert terms[name] == (name, num_kept * kept, f"{factors} x {mib}")


def test_1f1b_has_as_many_passes_in_flight_as_stages_behind_a_rank() -> None:
    plan = ResolvedPlan(pp=4, stages=(3, 3, 3, 3))
    step = simulate(JOB, plan, CLUSTER, load_stack("megatron-lm-2021"))
    flights = [passes_in_flight(step, pp_rank) for pp_rank in range(4)]
    assert flights == [[4], [3], [2], [1]]


def steps_beside() -> tuple[StepResult, ...]:
    """Return a step of each plan."""
    return tuple(simulate(JOB, plan_of(each), CLUSTER, load_stack(each)) for each in PLANS)


def test_terms_of_a_comparison_add_up_to_the_difference() -> None:
    steps = steps_beside()
    comparison = Comparison(names=tuple(PLANS), steps=steps)
    times, sizes = comparison.rows(time_terms), comparison.rows(memory_terms)
    for number, step in enumerate(steps):
        assert (
            sum(row[number] - row[0] for row in times.values()) == step.step_ps - steps[0].step_ps
        )
        assert sum(row[number] for row in sizes.values()) == step.memory.device_bytes


def test_plans_and_stacks_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for pp in ("1", "2"):
        out = tmp_path / f"pp{pp}"
        assert main(["simulate", *WORDS, "--pp", pp, "--out", str(out)]) == 0
        plans.append(str(out / "plan.json"))
    capsys.readouterr()
    assert main(["compare", *plans, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["names"] == ["pp1", "pp2"]
    assert [step["plan"]["pp"] for step in document["steps"]] == [1, 2]
    (more,) = document["differences"]
    assert sum(more["time_terms_s"].values()) == pytest.approx(more["step_time_s"], abs=1e-12)
    out = tmp_path / "out"
    stacks = ["--stack", "ddp,fsdp", "--gpus", "2", "--out", str(out)]
    assert main(["compare", "gpt2", *WORDS[1:3], *stacks, "--global-batch", "4"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"written  {out}: breakdown.png result.json terms.csv\n")
    both = json.loads((out / "result.json").read_text())
    assert [step["stack"] for step in both["steps"]] == ["ddp@2.13", "fsdp@2.13"]


def test_a_stack_that_lacks_what_is_set_is_a_refused_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a comparison and of a sweep; where all lack it, that is a mistake."""
    job = [*WORDS[:3], "--gpus", "2", "--global-batch", "4", "--set", "cuda_graphs=layers"]
    lacks = "--set: cuda_graphs: layers is not in cuda_graph_modes; allowed: none"
    assert main(["compare", *job, "--stack", "ddp,megatron-core"]) == 0
    compared = capsys.readouterr().out
    assert compared.endswith(f"refused  ddp: {lacks}\n")
    assert "megatron-core" in compared
    limits = ["--max-tp", "1", "--max-pp", "1", "--json", "-"]
    assert main(["sweep", *job, *limits, "--vary", "stack=megatron-core,ddp"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert lacks in json.dumps(found)
    assert main(["compare", *job, "--stack", "ddp,fsdp"]) == 2
    assert capsys.readouterr().err == f"error: {lacks}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", *WORDS], "1 to compare; allowed 2 to 12"),
        (["compare"], "compare needs plans, or one model"),
        (["compare", "gpt2", "plan.json"], "compare needs plans, or one model"),
        (["compare", "a/plan.json", "b/plan.json", "--max-tp", "2"], "--max-... has no effect"),
        (["explain", "a/plan.json", "--plan", "b/plan.json"], "are two plans"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err
