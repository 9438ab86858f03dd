"""The scoreboard: predictions against published runs, and the tables that documents print."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

import pytest

from documents.makers import accuracy, peaks
from meshwright import validate
from meshwright.hwprofiles import GIBI, ProfileError, list_stacks, load_cluster, load_stack
from meshwright.simulator.memory import Fragmentation, Overheads
from meshwright.validate import (
    Comparison,
    ExcludedRun,
    Quantity,
    Scoreboard,
    SourceSummary,
    Verdict,
    format_comparisons,
    format_scoreboard,
    layer_time_s,
    load_excluded_runs,
    load_padded_lengths,
    load_published_layers,
    load_published_runs,
    scoreboard_json,
    simulate_run,
    step_time_s,
)
from meshwright.validate.published import (
    allocator_fractions,
    load_published_reserves,
    scoreboard,
)

ROOT = Path(__file__).parents[2]
DATA = ROOT / "meshwright" / "validate" / "data"

# Mean absolute error by source: about what leaving the source out of the fit gives, rounded up.
STEP_TIME_LIMITS = {
    "Narayanan": 0.035,
    "Megatron-LM README": 0.04,
    "BigScience": 0.04,
    "Zero Bubble": 0.06,
    "NVIDIA dgxc": 0.04,
    "Korthikanti": 0.02,
    "MosaicML": 0.05,
    "torchtitan": 0.08,
    "Megatron-LM tables": 0.06,
    "NVIDIA DeepLearningExamples": 0.05,
    "SimuMax": 0.04,
    # A model of 15B whose runs reach more of the peak than any other on B200; one of three is
    # faster than the other two by a quarter.
    "Vultr": 0.37,
}
# The same for fp8: the constants of five sources left out one at a time give 2 to 9 %.
FP8_LIMITS = {
    "NVIDIA dgxc": 0.05,
    "NVIDIA NeMo": 0.09,
    "Megatron-LM examples": 0.06,
    "NVIDIA Megatron-Bridge": 0.04,
    # Two runs on H200, whose products are those of H100, became 4 % slower with these; that they
    # gather parameters in fp8 is 1 % and not modelled.
    "torchtitan": 0.09,
    "MosaicML": 0.05,
    "Vultr": 0.06,
}
BRIDGE = "NVIDIA Megatron-Bridge performance summaries 25.09 to 26.06"
BESIDE = f"{BRIDGE}, experts beside microbatches"
# Runs with routed experts.
EXPERT_LIMITS = {
    "SimuMax v1.2, Megatron-LM runs on B200, experts": 0.05,
    "NVIDIA dgxc-benchmarking v24.11, experts, H100 bf16": 0.05,
    "NVIDIA dgxc-benchmarking v24.11, experts, H100 fp8": 0.12,
    "NVIDIA dgxc-benchmarking v25.05 to v25.12, experts": 0.12,
    # Not modelled is why Qwen3 235B on B300 took 49 s.
    BESIDE: 0.12,
    # Nothing was fitted to them.
    "NVIDIA Megatron-Bridge performance summary 26.08, experts": 0.08,
    f"{BESIDE}, H100 fp8": 0.08,
    "NVIDIA dgxc-benchmarking v25.05 to v25.12, experts beside microbatches": 0.14,
    "NVIDIA Megatron-Bridge performance notes, Qwen3 30B on 16 H100, beside microbatches": 0.07,
    "Megatron-MoE-ModelZoo, Qwen3 235B (e865051), beside microbatches": 0.06,
    "NVIDIA Megatron-Bridge performance summaries 25.09 to 26.06, experts": 0.08,
    "NVIDIA Megatron-Bridge performance summaries 25.09 to 26.06, experts mxfp8": 0.07,
    "NVIDIA Megatron-Bridge performance summaries 25.09 to 26.06, experts fp8": 0.08,
    "NVIDIA Megatron-Bridge performance summaries 25.09 to 26.06, experts, gpt-oss 120B": 0.08,
    "NVIDIA Megatron-Bridge performance notes, Qwen3 30B on 16 H100": 0.08,
    "Vultr and AMP, HGX B200 report (2026-05)": 0.07,
    "Megatron-MoE-ModelZoo, Qwen3 235B (e865051)": 0.09,
    "worklog of a cluster of 512 B200 (2026-05)": 0.05,
}
# nvidia-smi figures are whole gigabytes of 30 to 80; torchtitan prints what expandable segments
# held with room to spare, predicted is what they hold without; others depend on gradient formats.
MEMORY_LIMITS = {
    "BigScience": 0.05,
    "Zero Bubble": 0.05,
    "NVIDIA dgxc": 0.10,
    "SimuMax": 0.01,
    "torchtitan": 0.09,
    # Ran with stand-ins for gradients, 0.6 GiB, which stack megatron-core@0.12 does not keep.
    "NVIDIA Megatron-Bridge performance notes": 0.07,
}


@pytest.fixture(scope="module")
def board() -> Scoreboard:
    return accuracy.board()


def limit_of(summary: SourceSummary) -> float:
    if summary.quantity is Quantity.STEP_TIME and summary.source in EXPERT_LIMITS:
        return EXPERT_LIMITS[summary.source]
    is_fp8 = summary.source.endswith("fp8")
    times = FP8_LIMITS if is_fp8 else STEP_TIME_LIMITS
    limits = MEMORY_LIMITS if summary.quantity is Quantity.MEMORY else times
    (limit,) = (value for name, value in limits.items() if summary.source.startswith(name))
    return limit


def comparison(published: float, predicted: float, name: str = "a") -> Comparison:
    return Comparison(
        id=name,
        source="paper",
        quantity=Quantity.STEP_TIME,
        published=published,
        predicted=predicted,
        rel_tol=0.1,
    )


def test_every_source_is_predicted_within_its_limit(board: Scoreboard) -> None:
    errors = {(item.source, item.quantity): item.mean_abs_fraction for item in board.summaries}
    limits = {(item.source, item.quantity): limit_of(item) for item in board.summaries}
    assert len(errors) == 47
    assert {key: error for key, error in errors.items() if error > limits[key]} == {}


def test_every_row_is_predicted_within_its_own_tolerance(board: Scoreboard) -> None:
    assert [row for row in board.comparisons if abs(row.error_fraction) > row.rel_tol] == []


def test_runs_printed_as_out_of_memory_are_predicted_so(board: Scoreboard) -> None:
    called = {verdict.id: verdict.is_called_right for verdict in board.failed}
    # The last needs 70 of 79 GiB by our count; its siblings' figures leave it as much room.
    assert called == {
        "bloom_prequel_L793": True,
        "bloom_prequel_L806": True,
        "bloom_prequel_L807": True,
        "bloom_prequel_L917": True,
        "bloom_prequel_L918": True,
        "bloom_prequel_L957": False,
    }


def test_runs_that_finished_fit_their_devices(board: Scoreboard) -> None:
    routed = {run.id for run in load_published_runs() if run.num_experts}
    fits = [verdict.fits for verdict in board.finished if verdict.id not in routed]
    # The others: 340B and 70B runs on few devices that print no recomputation, and those within
    # 3 % of what there is, six of them of llm-foundry.
    assert len(fits) == 488
    assert sum(fits) / len(fits) >= 0.97
    # One of Qwen3 30B with microbatches of two prints more virtual stages than its script has.
    assert sum(not each.fits for each in board.finished if each.id in routed) <= 1
    assert sum(each.fits for each in board.finished) >= 0.975 * len(board.finished)


def test_peaks_of_an_allocator_are_predicted(board: Scoreboard) -> None:
    assert len(board.verdicts) == len(load_published_runs())
    errors = [error for own in peaks.errors_by_kind().values() for error in own]
    assert len(errors) == 300
    assert abs(median(errors)) < 0.02
    assert sum(error < -0.05 for error in errors) <= 0.05 * len(errors)


def test_the_allocator_holds_what_runs_print_that_print_both() -> None:
    rows = load_published_reserves()
    fitted = allocator_fractions(rows)
    assert sum(row.is_fitted for row in rows) == 12
    # With a series left out they are 0.107 to 0.231 and 0.019 to 0.045: but for long contexts, all
    # rows are states by three quarters and more, which say little of what a step frees.
    for series in {row.series for row in rows if row.is_fitted}:
        others = allocator_fractions(row for row in rows if row.series != series)
        is_needed = series == "SimuMax, long context"
        assert others.passing == pytest.approx(fitted.passing, abs=0.11 if is_needed else 0.02)
        assert others.state == pytest.approx(fitted.state, abs=0.016 if is_needed else 0.011)
    zero = fmean(row.fraction for row in rows if "DeepSpeed ZeRO" in row.series)
    whole = fmean(row.fraction for row in rows if row.series.startswith("SimuMax"))
    for name in list_stacks():
        stack = load_stack(name)
        if stack.allocator_state_fraction is None:
            # Of software before PyTorch 2 nothing tells both apart.
            held = zero if name == "deepspeed@0.6" else whole
            assert stack.allocator_fraction == pytest.approx(held, abs=5e-4)
        else:
            assert stack.allocator_fraction == pytest.approx(fitted.passing, abs=5e-3)
            assert stack.allocator_state_fraction == pytest.approx(fitted.state, abs=5e-3)


def test_states_of_the_rows_an_allocator_is_fitted_on_are_those_of_their_runs() -> None:
    runs = load_published_runs()
    for row in load_published_reserves():
        if row.is_fitted:
            memory = simulate_run(next(run for run in runs if run.id.startswith(row.id))).memory
            states = memory.worst_stage.state_bytes(memory.overheads.fragmentation)
            assert row.state_gib == pytest.approx(states / GIBI, abs=0.006)


def test_all_published_rows_are_compared_or_left_out_with_a_reason(board: Scoreboard) -> None:
    runs, layers = load_published_runs(), load_published_layers()
    compared = {row.id for row in board.comparisons} | {item.id for item in board.verdicts}
    assert compared == {row.id for row in (*runs, *layers)}
    assert board.excluded == load_excluded_runs()
    assert not compared & {row.id for row in board.excluded}
    assert (len(runs), len(layers), len(board.excluded)) == (641, 10, 54)


def test_runs_name_built_in_profiles_and_fill_their_layout() -> None:
    for run in load_published_runs():
        assert load_cluster(run.cluster).name == run.cluster
        assert load_stack(run.stack).name == run.stack
        assert sum(run.plan.stages) == run.num_layers
        assert run.plan.num_microbatches(run.job) * run.dp * run.microbatch_size == (
            run.global_batch_size
        )


def test_a_summary_adds_up_by_hand() -> None:
    summary = SourceSummary.of([comparison(10, 11), comparison(10, 8, "b"), comparison(10, 10)])
    assert summary.num_rows == 3
    assert summary.mean_abs_fraction == pytest.approx(0.1)
    assert summary.median_abs_fraction == pytest.approx(0.1)
    assert summary.bias_fraction == pytest.approx(-0.1 / 3)
    assert summary.worst.id == "b"
    assert summary.worst.error_fraction == pytest.approx(-0.2)


def test_a_board_of_chosen_rows_equals_single_simulations() -> None:
    run, layer = load_published_runs()[0], load_published_layers()[0]
    board = scoreboard([run], [layer], [])
    assert [row.predicted for row in board.comparisons] == [
        simulate_run(run).step_time_s,
        layer_time_s(layer),
    ]
    assert board.excluded == ()


def test_a_source_that_pads_by_batch_is_compared_with_the_mean_of_its_lengths() -> None:
    lengths = load_padded_lengths()
    run = next(each for each in load_published_runs() if each.id == "dle_bert_s512_8")
    assert all((each.source, each.seq_len) == (run.source, 512) for each in lengths)
    sequences = sum(each.num_sequences for each in lengths)
    # Krell et al. 2021 (arXiv 2107.02027): over 16 million sequences, half of the tokens padding.
    assert sequences == 16_279_552
    times = {
        each.padded_len: simulate_run(run.model_copy(update={"seq_len": each.padded_len}))
        for each in lengths
    }
    mean = sum(
        each.num_sequences * times[each.padded_len].step_time_s / sequences for each in lengths
    )
    (compared,) = scoreboard([run], [], []).comparisons
    assert compared.predicted == step_time_s(run) == pytest.approx(mean, rel=1e-12)
    # Padded to 512 throughout, the step would be three quarters longer than printed.
    assert times[512].step_time_s / compared.published == pytest.approx(1.75, abs=0.05)
    other = load_published_runs()[0]
    assert step_time_s(other) == simulate_run(other).step_time_s


def test_two_boards_are_the_same_bytes() -> None:
    run = load_published_runs()[1]
    first, second = (scoreboard_json(scoreboard([run], [], [])) for _ in range(2))
    assert first == second


def test_json_holds_the_whole_board(board: Scoreboard) -> None:
    document = json.loads(scoreboard_json(board))
    assert sorted(document) == ["comparisons", "excluded", "summaries", "verdicts"]
    assert len(document["comparisons"]) == len(board.comparisons)
    assert document["summaries"][0]["num_rows"] == board.summaries[0].num_rows
    assert {row["unit"] for row in document["comparisons"]} == {"s", "B"}


def test_text_tables_are_aligned_and_end_in_one_newline() -> None:
    verdict = Verdict(
        id="v",
        source="paper",
        out_of_memory=True,
        ranks=((GIBI // 2, GIBI // 2), (GIBI, GIBI // 2)),
        overheads=Overheads(0, Fragmentation(5000, 5000), GIBI // 2),
        usable_bytes=GIBI,
    )
    assert verdict.device_bytes == 2 * GIBI
    left_out = ExcludedRun(id="x", source="paper", step_time_s=1.0, reason="no cp")
    small = Scoreboard(
        comparisons=(comparison(10, 11),), verdicts=(verdict,), excluded=(left_out,) * 2
    )
    assert format_scoreboard(small).splitlines() == [
        "quantity   source  rows  mean abs  median  bias    worst   worst row",
        "step time  paper   1     10.0%     10.0%   +10.0%  +10.0%  a",
        "",
        "Out of memory as printed: 1 of 1 predicted so (100.0%).",
        "",
        "rows  source  why left out",
        "2     paper   no cp",
    ]
    assert format_comparisons(small).splitlines() == [
        "row  quantity   published  predicted  error",
        "a    step time  10.000 s   11.000 s   +10.0%",
    ]


def changed(tmp_path: Path, name: str, change: Callable[[str], str]) -> Path:
    path = tmp_path / name
    path.write_text(change((DATA / name).read_text(encoding="utf-8")), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("dgx-a100,", ",", "line 2: cluster='': string should have at least 1 character"),
        (",24,2304,", ",24,23x4,", "line 2: hidden_size='23x4': input should be a valid integer"),
        ("hidden_size", "hiden_size", "column 'hiden_size' is unknown; nearest: hidden_size"),
        (",rel_tol", ",", "column '' is unknown"),
        ("3.528,,,false", ",,,false", "line 2: step_time_s=None with out_of_memory=False"),
        ("3.528,,,", "3.528,60,,", "line 2: peak_memory_gib=60.0 with memory_kind=None"),
        (
            ",32,1,,,1,1f1b,,",
            ',32,1,,,1,1f1b,"1,x",',
            "narayanan21_t1_1.7B: stages='1,x' is neither",
        ),
        ("narayanan21_t1_3.6B", "narayanan21_t1_1.7B", "line 3: id='narayanan21_t1_1.7B' repeats"),
        ("3.528", "inf", "line 2: step_time_s='inf'"),
        (",2304,24,24,", ",2304,25,25,", "narayanan21_t1_1.7B: num_heads=25 does not divide"),
    ],
)
def test_a_mistake_in_a_table_is_one_line(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    path = changed(tmp_path, "published_runs.csv", lambda text: text.replace(old, new, 1))
    with pytest.raises(ProfileError) as caught:
        load_published_runs(path)
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_column_or_file_is_named(tmp_path: Path) -> None:
    path = changed(tmp_path, "published_excluded.csv", lambda text: text.replace(",reason", ""))
    with pytest.raises(ProfileError, match="column 'reason' is missing; required: id, source"):
        load_excluded_runs(path)
    with pytest.raises(ProfileError, match=r"none\.csv: no such file"):
        load_published_layers(tmp_path / "none.csv")


def test_no_batch_is_padded_beyond_the_length_of_its_run(tmp_path: Path) -> None:
    path = changed(
        tmp_path, "padded_lengths.csv", lambda text: text.replace(",512,64,", ",512,640,")
    )
    with pytest.raises(ProfileError, match="padded_len=640 is longer than seq_len=512; allowed"):
        load_padded_lengths(path)


def test_the_public_names_are_the_listed_ones() -> None:
    assert len(set(validate.__all__)) == len(validate.__all__)
    for name in validate.__all__:
        assert getattr(validate, name) is not None
