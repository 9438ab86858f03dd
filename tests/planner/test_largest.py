"""The largest sequence, microbatch and batch that fit, against plain scans over all values."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from meshwright import main
from meshwright.hwprofiles import GIBI, Attention, StageSplit, load_cluster, load_stack
from meshwright.planner.footprint import device_bytes_column, peak_bytes
from meshwright.planner.footprint.groups import LargestPeaks
from meshwright.planner.largest import Quantity, find_largest, find_largest_of_plan
from meshwright.planner.largest.quantity import deeper_job, stretches
from meshwright.planner.search import search
from meshwright.planner.space import ShapeTable, Space, SpaceLimits, enumerate_space
from meshwright.simulator import (
    ModelSpec,
    PlanError,
    ResolvedPlan,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.layout import resolve_stages, with_stages
from meshwright.simulator.model import Experts

CLUSTER = load_cluster("dgx-a100")
# Its head costs seven layers of short sequences, so that rules for stages go by their length.
SMALL = ModelSpec(
    name="small",
    num_layers=5,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=32768,
    seq_len=512,
    gated_mlp=True,
    ffn_hidden_size=1024,
    tied_embeddings=False,
    positions="rotary",
    norm="rmsnorm",
)
ROUTED = SMALL.model_copy(
    update={"experts": Experts(num_experts=8, experts_per_token=2, hidden_size=384)}
)
LIMIT = 4 * GIBI


def job_of(model: ModelSpec = SMALL, batch: int = 8, seq_len: int = 512) -> TrainingJob:
    return TrainingJob(model=model, global_batch_size=batch, seq_len=seq_len)


def fits(job: TrainingJob, stack: str, limits: SpaceLimits, gpus: int = 4) -> bool:
    """Return whether some layout of a plain search fits."""
    found = search(
        job, CLUSTER, load_stack(stack), gpus, limits=limits, memory_limit_bytes=LIMIT, top=1
    )
    return found.feasible > 0


def largest(
    job: TrainingJob, stack: str, quantity: Quantity, limits: SpaceLimits, gpus: int = 4
) -> tuple[int | None, int | None]:
    found, result = find_largest(
        job,
        CLUSTER,
        load_stack(stack),
        gpus,
        quantity,
        limits=limits,
        memory_limit_bytes=LIMIT,
        top=1,
    )
    at = {
        Quantity.SEQ_LEN: result.job.seq_len,
        Quantity.GLOBAL_BATCH: result.job.global_batch_size,
        Quantity.MICRO_BATCH: result.plans[0].plan.microbatch_size,
        Quantity.LAYERS: result.job.model.num_layers,
    }
    assert (result.optimal, at[quantity]) == (True, found.value)
    return found.value, found.next_value


@pytest.mark.parametrize(
    ("stack", "gpus", "pins"),
    [
        ("megatron-core", 4, {"recompute": ("none",), "microbatch_size": (8,), "tp": (1, 2)}),
        (
            "megatron-core",
            6,
            {"zero_stage": (1,), "microbatch_size": (8,), "attention": ("flash",)},
        ),
        ("torchtitan", 4, {"microbatch_size": (2,), "recompute": ("none",)}),
    ],
)
def test_the_longest_sequence_is_that_of_a_scan_by_searches(
    stack: str, gpus: int, pins: dict[str, tuple[object, ...]]
) -> None:
    job, limits = job_of(seq_len=1024), SpaceLimits(**pins)
    value, following = largest(job, stack, Quantity.SEQ_LEN, limits, gpus)
    assert value is not None
    assert following == value + 1024
    cut = limits.pinned(max_cp=gpus)
    scanned = [
        length
        for length in range(1024, value * 5 // 4, 1024)
        if fits(replace(job, seq_len=length), stack, cut, gpus)
    ]
    assert scanned[-1] == value


@pytest.mark.parametrize("stack", ["megatron-core", "ddp"])
def test_the_largest_microbatch_is_that_of_a_scan_by_searches(stack: str) -> None:
    job, limits = job_of(batch=768), SpaceLimits(recompute=("none",), tp=(1,), pp=(1,))
    value, following = largest(job, stack, Quantity.MICRO_BATCH, limits)
    sizes = [size for size in range(1, 193) if 192 % size == 0]
    scanned = [size for size in sizes if fits(job, stack, limits.pinned(microbatch_size=(size,)))]
    assert value == scanned[-1]
    assert following == sizes[sizes.index(value) + 1]


def test_the_largest_batch_at_once_is_that_of_a_scan_by_searches() -> None:
    limits = SpaceLimits(recompute=("none",), attention=("flash",), tp=(2,))
    value, following = largest(job_of(seq_len=2048), "megatron-core", Quantity.GLOBAL_BATCH, limits)
    assert value is not None
    assert following == value + 1

    def fits_at_once(batch: int) -> bool:
        shares = [(dp, batch // dp) for dp in (1, 2, 4) if batch % dp == 0]
        pins = [limits.pinned(dp=(dp,), microbatch_size=(size,)) for dp, size in shares]
        return any(fits(job_of(batch=batch, seq_len=2048), "megatron-core", each) for each in pins)

    assert [each for each in range(1, value * 3 // 2) if fits_at_once(each)][-1] == value


def test_the_deepest_model_is_that_of_a_scan_by_searches() -> None:
    # Microbatches so large that few layers fill a device.
    job = job_of(ROUTED, batch=64, seq_len=2048)
    limits = SpaceLimits(recompute=("none",), microbatch_size=(16,), attention=("flash",))
    value, following = largest(job, "megatron-core", Quantity.LAYERS, limits)
    assert value is not None
    assert following == value + 1

    def fits_evenly(count: int) -> bool:
        at, equal = deeper_job(job, count), {"stages": (StageSplit.EVEN,)}
        pins = [limits.pinned(pp=(pp,), **equal) for pp in (1, 2, 4) if count % pp == 0]
        return any(fits(at, "megatron-core", each) for each in pins)

    assert [each for each in range(1, value * 3 // 2) if fits_evenly(each)][-1] == value


PLAN = ResolvedPlan(tp=2, pp=2, zero_stage=1, attention=Attention.FLASH)
REPLICAS = ResolvedPlan(dp=4, attention=Attention.FLASH)


@pytest.mark.parametrize(
    ("quantity", "stack", "plan", "values"),
    [
        (Quantity.SEQ_LEN, "megatron-core", PLAN, range(256, 32768, 256)),
        (Quantity.SEQ_LEN, "megatron-core", replace(PLAN, pp=1, cp=2), range(256, 32768, 256)),
        (Quantity.LAYERS, "megatron-core", replace(PLAN, pp=4), range(4, 400, 4)),
        (Quantity.MICRO_BATCH, "ddp", REPLICAS, (1, 2, 4, 8, 16, 32, 64)),
        (Quantity.GLOBAL_BATCH, "fsdp", replace(REPLICAS, zero_stage=3), range(1024, 25600, 256)),
    ],
)
def test_the_largest_of_a_plan_is_that_of_a_scan_by_simulations(
    quantity: Quantity, stack: str, plan: ResolvedPlan, values: range | tuple[int, ...]
) -> None:
    job, profile = job_of(batch=256, seq_len=256), load_stack(stack)

    def plan_of(job: TrainingJob, size: int | None) -> ResolvedPlan:
        return with_stages(job, replace(plan, microbatch_size=size or 1), profile)

    found, step = find_largest_of_plan(
        job, CLUSTER, profile, plan_of, quantity, memory_limit_bytes=LIMIT
    )

    def fits_at(value: int) -> bool:
        at, size = job, None
        if quantity is Quantity.SEQ_LEN:
            at = replace(job, seq_len=value)
        elif quantity is Quantity.LAYERS:
            at = deeper_job(job, value)
        elif quantity is Quantity.MICRO_BATCH:
            size = value
        else:
            at, size = replace(job, global_batch_size=value), value // 256
        result = simulate(at, plan_of(at, size), CLUSTER, profile, memory_limit_bytes=LIMIT)
        return result.memory.fits

    scanned = [value for value in values if fits_at(value)]
    assert found.value == scanned[-1] < [*values][-1]
    assert step.memory.fits


def test_a_plan_that_never_fits_is_told_at_the_smallest_value() -> None:
    stack = load_stack("ddp")
    found, step = find_largest_of_plan(
        job_of(),
        CLUSTER,
        stack,
        lambda job, _: with_stages(job, ResolvedPlan(dp=4), stack),
        Quantity.SEQ_LEN,
        memory_limit_bytes=GIBI // 2,
    )
    assert (found.value, found.next_value, step.job.seq_len) == (None, 512, 512)
    assert str(found) == "no seq_len fits"


@pytest.mark.parametrize("quantity", [Quantity.MICRO_BATCH, Quantity.GLOBAL_BATCH])
def test_replicas_that_a_batch_does_not_reach_are_refused(quantity: Quantity) -> None:
    stack = load_stack("ddp")
    with pytest.raises(PlanError, match="global_batch_size=8 is not divisible by dp=32"):
        find_largest_of_plan(
            job_of(),
            CLUSTER,
            stack,
            lambda job, _: with_stages(job, ResolvedPlan(dp=32), stack),
            quantity,
        )


def test_learned_positions_end_a_sequence() -> None:
    model = load_model("gpt2")
    job = TrainingJob(model=model, global_batch_size=8, seq_len=1024)
    found, _ = find_largest(job, CLUSTER, load_stack("ddp"), 8, Quantity.SEQ_LEN, top=1)
    assert (found.value, found.next_value) == (1024, None)
    assert found.why == "gpt2 has 1,024 learned positions"


def test_stages_are_the_same_along_a_stretch_of_lengths() -> None:
    job = job_of()
    ranges = stretches(job)
    assert len(ranges) > 3
    assert ranges[0][1] == 10**8

    def split(length: int) -> list[tuple[int, ...]]:
        rules = ("even", "balanced", "ends", "greedy")
        sizes = range(1, SMALL.num_layers + 1)
        return [resolve_stages(SMALL, length, n, StageSplit(rule)) for rule in rules for n in sizes]

    for low, high in ranges:
        assert all(split(low) == split(each) for each in {high, (low + high) // 2})
    assert len({str(split(low)) for low, _ in ranges}) > 1


def spaces() -> Iterator[tuple[Space, Callable[[Space, int], Space], tuple[int, ...]]]:
    """Yield spaces, how they grow, and values within a stretch."""

    def longer(space: Space, value: int) -> Space:
        return replace(space, job=replace(space.job, seq_len=value))

    def wider(space: Space, value: int) -> Space:
        sizes = np.full(len(space), value)
        batch = value * space.job.global_batch_size
        wide = replace(space, job=replace(space.job, global_batch_size=batch))
        return replace(wide, columns={**space.columns, "microbatch_size": sizes})

    low = stretches(job_of())[0][0]
    lengths = tuple(48 * -(-low // 48) + 48 * each for each in (0, 1, 50))
    for stack, model in (
        ("megatron-core", ROUTED),
        ("megatron-core", SMALL),
        ("torchtitan", SMALL),
    ):
        job, profile = job_of(model), load_stack(stack)
        at, limits = replace(job, seq_len=lengths[0]), SpaceLimits(gradient_precision=(None,))
        yield (
            enumerate_space(at, profile, 4, limits.pinned(max_cp=4, microbatch_size=(2,))),
            longer,
            lengths,
        )
        batch = replace(job, global_batch_size=4)
        pinned = limits.pinned(microbatch_size=(1,))
        yield enumerate_space(batch, profile, 4, pinned), wider, (2, 3, 9)


def test_memory_of_every_layout_only_grows_along_a_stretch() -> None:
    for space, at, values in spaces():
        columns = []
        for value in values:
            grown = at(space, value)
            peaks = peak_bytes(grown, ShapeTable.of(grown), BlockTable())
            columns.append(device_bytes_column(grown, CLUSTER, peaks))
        assert (np.diff(np.stack(columns), axis=0) >= 0).all()


def test_what_does_not_go_together_is_refused() -> None:
    job, limits = job_of(), SpaceLimits(microbatch_size=(2,))
    with pytest.raises(PlanError, match="--max micro-batch and --micro-batch contradict"):
        largest(job, "megatron-core", Quantity.MICRO_BATCH, limits)
    with pytest.raises(PlanError, match="does not go with resnet50, which lists its layers"):
        largest(job_of(load_model("resnet50"), seq_len=1), "ddp", Quantity.LAYERS, SpaceLimits())
    with pytest.raises(PlanError, match="does not go with stack dataparallel"):
        largest(job, "dataparallel", Quantity.SEQ_LEN, SpaceLimits())


def test_experts_among_ranks_that_cut_sequences_are_looked_at() -> None:
    job, stack = job_of(ROUTED, seq_len=1024), load_stack("megatron-core")
    pins = {"ep": (4,), "cp": (4,), "recompute": ("full",), "attention": ("flash",)}
    found = search(job, CLUSTER, stack, 4, limits=SpaceLimits(**pins), top=1)
    plan = found.plans[0].plan
    assert (plan.ep, plan.cp, plan.tp, plan.dp) == (4, 4, 1, 1)
    assert found.plans[0].hfu_fraction > found.plans[0].mfu_fraction


def test_the_largest_value_is_a_line_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "gpt2", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "64"]
    for more, lines in ((["--max", "micro-batch"], ["microbatch_size=8;"]), ([], [])):
        assert main([*words, *more]) == 0
        said = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [line[1] for line in said if line[:1] == ["largest"]] == lines


def test_what_needs_more_than_any_device_has_never_comes_out_small() -> None:
    """Reserved bytes are counted in ten-thousandths, which 64 bits must hold."""
    space = enumerate_space(
        TrainingJob(model=load_model("gpt2"), global_batch_size=8, seq_len=1024),
        load_stack("megatron-core"),
        1,
        SpaceLimits(),
    )
    ranks = LargestPeaks.of(space, 2**62)
    indices = np.arange(len(space))
    ranks.add(indices, np.full(len(space), 2**60, np.int64), np.zeros(len(space), np.int64))
    assert (device_bytes_column(space, CLUSTER, ranks.peaks) > 2**45).all()
