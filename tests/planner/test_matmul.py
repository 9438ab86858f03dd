"""`meshwright matmul`: the textbook products, chains, the pipeline, the files and the mistakes."""

import contextlib
import io
import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from words_said import said_once

from meshwright import main
from meshwright.hwprofiles import PS_PER_S, Cluster, Precision, load_cluster
from meshwright.planner.matmul.picture import COLOURS, panels_of, plot_matmul_split
from meshwright.planner.matmul.study import (
    MatmulStudy,
    ProductRow,
    Refusal,
    parse_matrices,
    study_matmul,
)
from meshwright.planner.plots import save_figure
from meshwright.simulator.blocks.operators import Gemm
from meshwright.simulator.costs.collectives import p2p_cost
from meshwright.simulator.costs.compute import gemm_cost
from meshwright.simulator.layout import default_precision
from meshwright.simulator.matmul.signatures import Shape

Document = dict[str, Any]
PAIR = ["matmul", "4x5", "5x8", "--devices", "2"]
CHAIN = ["matmul", "4x5", "5x8", "8x3", "--devices", "2"]


def run(words: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(said_once(words))
    return status, out.getvalue(), err.getvalue()


def document(words: list[str]) -> Document:
    status, out, err = run([*words, "--json", "-"])
    assert (status, err) == (0, "")
    result: Document = json.loads(out)
    return result


def by_name(result: Document) -> dict[str, Document]:
    return {each["name"]: each for each in result["signatures"]}


def dgx() -> Cluster:
    return load_cluster("dgx-a100")


def study(
    *shapes: Shape, num_devices: int = 2, precision: Precision = Precision.FP32
) -> MatmulStudy:
    return study_matmul(shapes, num_devices, dgx(), precision)


# --- one product ------------------------------------------------------------------------------


def test_data_parallel_gives_two_2x8_halves_and_model_parallel_two_4x4() -> None:
    rows = by_name(document(PAIR))
    data, model = rows["data parallel"], rows["model parallel (column)"]
    assert (data["a"], data["b"], data["c"]) == ("S(0)", "R", "S(0)")
    assert data["local_shapes"] == {"a": [2, 5], "b": [5, 8], "c": [2, 8]}
    assert (model["a"], model["b"], model["c"]) == ("R", "S(1)", "S(1)")
    assert model["local_shapes"] == {"a": [4, 5], "b": [5, 4], "c": [4, 4]}
    assert data["flops"] == model["flops"] == 4 * 5 * 8  # half of 2 m k n
    assert rows["replicated"]["flops"] == 2 * 4 * 5 * 8


def test_bytes_to_a_replicated_product_are_those_of_its_collective() -> None:
    rows = by_name(document([*PAIR, "--precision", "fp32"]))
    sent = {
        name: (each["boxing"]["collectives"], each["boxing"]["sent_bytes"])
        for name, each in rows.items()
        if each["refused"] is None
    }
    assert sent == {
        "data parallel": (["all_gather"], 64),
        "model parallel (column)": (["all_gather"], 64),
        "partial A": (["all_reduce"], 128),
        "partial B": (["all_reduce"], 128),
        "replicated": ([], 0),
    }


def test_five_over_two_is_refused_in_its_row_with_the_reason() -> None:
    contraction = by_name(document(PAIR))["contraction split"]
    assert contraction["refused"] == "5 columns of A over 2"
    assert set(contraction) == {"name", "a", "b", "c", "refused"}
    _, text, _ = run(PAIR)
    (line,) = (line for line in text.splitlines() if line.startswith("contraction split"))
    assert "refused: 5 columns of A over 2" in line


def test_an_even_contraction_splits_into_summands() -> None:
    contraction = by_name(document(["matmul", "4x6", "6x8", "--devices", "2"]))["contraction split"]
    assert contraction["local_shapes"] == {"a": [4, 3], "b": [3, 8], "c": [4, 8]}
    assert contraction["boxing"]["collectives"] == ["all_reduce"]


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_times_are_those_of_the_cost_model(num_devices: int) -> None:
    result = study((4096, 8192), (8192, 1024), num_devices=num_devices, precision=Precision.BF16)
    local = {
        "data parallel": (4096 // num_devices, 8192, 1024),
        "model parallel (column)": (4096, 8192, 1024 // num_devices),
        "contraction split": (4096, 8192 // num_devices, 1024),
    }
    for row in result.rows:
        assert isinstance(row, ProductRow)
        m, k, n = local.get(row.signature.name, (4096, 8192, 1024))
        cost = gemm_cost(Gemm("matmul", m=m, n=n, k=k), dgx().device, Precision.BF16)
        assert row.run.costs == (cost,)
        assert row.time_ps == cost.time_ps + row.boxing.time_ps
        has_wire = num_devices > 1 and row.signature.name != "replicated"
        assert (row.boxing.time_ps > 0) == has_wire


def test_the_best_chain_of_one_product_is_its_best_row() -> None:
    result = study((4096, 8192), (8192, 1024), num_devices=8)
    rows = [row for row in result.rows if isinstance(row, ProductRow)]
    assert [chain.time_ps for chain in result.chains] == [row.time_ps for row in rows]
    assert result.best.time_ps == min(row.time_ps for row in rows)
    assert result.pipeline is None


# --- chains and the pipeline ------------------------------------------------------------------


def test_the_pipeline_sends_the_4x8_product_and_multiplies_it_by_8x3_on_device_1() -> None:
    pipeline = document(CHAIN)["pipeline"]
    first, second = pipeline["stages"]
    assert (first["device"], second["device"]) == (0, 1)
    assert [each["local_shapes"]["c"] for each in first["products"]] == [[4, 8]]
    assert second["products"][0]["local_shapes"] == {"a": [4, 8], "b": [8, 3], "c": [4, 3]}
    (message,) = pipeline["messages"]
    assert (message["shape"], message["size_bytes"]) == ([4, 8], 4 * 8 * 2)
    total = pipeline["compute_time_s"] + pipeline["message_time_s"]
    assert pipeline["total_time_s"] == pytest.approx(total, rel=1e-12)


def test_the_message_costs_what_a_message_of_its_size_costs() -> None:
    result = study((4, 5), (5, 8), (8, 3))
    assert result.pipeline is not None
    cost = p2p_cost(128, dgx(), crosses_nodes=False, network_fraction=1.0)
    assert result.pipeline.message_ps == cost.transfer.time_ps + cost.latency.time_ps
    assert result.pipeline.time_ps == result.pipeline.compute_ps + result.pipeline.message_ps


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.sampled_from([4, 64, 1024, 4096]), min_size=4, max_size=8),
    num_devices=st.integers(2, 4),
)
def test_no_split_of_a_pipeline_has_a_faster_slowest_device(
    sizes: list[int], num_devices: int
) -> None:
    shapes = tuple(pairwise(sizes))
    pipeline = study(*shapes, num_devices=num_devices).pipeline
    assert pipeline is not None
    runs = [run for stage in pipeline.stages for run in stage]
    num_stages = min(num_devices, len(runs))
    assert len(pipeline.stages) == num_stages
    slowest = [
        max(sum(run.time_ps for run in runs[i:j]) for i, j in pairwise((0, *cuts, len(runs))))
        for cuts in combinations(range(1, len(runs)), num_stages - 1)
    ]
    assert max(pipeline.stage_ps) == min(slowest)
    assert pipeline.period_ps >= max(pipeline.stage_ps)


def test_a_message_between_nodes_costs_more() -> None:
    shapes = ((64, 64),) * 8
    cluster = dgx().model_copy(update={"devices_per_node": 2})
    pipeline = study_matmul(shapes, 4, cluster, Precision.BF16).pipeline
    assert pipeline is not None
    inside, across, again = (message.time_ps for message in pipeline.messages)
    assert inside == again
    assert across != inside


def test_a_chain_lists_the_best_sequence_for_each_first_signature() -> None:
    result = document(CHAIN)
    firsts = [each["steps"][0]["name"] for each in result["sequences"]]
    assert firsts == [each["name"] for each in result["signatures"] if each["refused"] is None]
    times = [each["total_time_s"] for each in result["sequences"]]
    assert result["best"]["total_time_s"] == min(times)
    assert result["best"] in result["sequences"]
    data = result["sequences"][0]
    assert [step["name"] for step in data["steps"]] == ["data parallel"] * 2
    assert data["last_boxing"]["collectives"] == ["all_gather"]
    assert data["sent_bytes"] == 4 * 3 * 2 // 2


def test_large_products_are_split_and_small_ones_are_not() -> None:
    big = study((8192, 12288), (12288, 49152), (49152, 12288), num_devices=8)
    assert big.best.flops == 2 * 2 * 8192 * 12288 * 49152 // 8
    assert big.best.sent_bytes > 0
    small = study((4, 5), (5, 8), (8, 3))
    assert [step.run.name for step in small.best.steps] == ["replicated"] * 2


# --- report, JSON and picture -----------------------------------------------------------------


def test_the_report_names_every_signature_its_shapes_and_its_evidence() -> None:
    status, text, err = run(PAIR)
    assert (status, err) == (0, "")
    lines = {line.split("  ")[0]: line for line in text.splitlines() if line}
    assert "2x5 x 5x8 = 2x8" in lines["data parallel"]
    assert "4x5 x 5x4 = 4x4" in lines["model parallel (column)"]
    assert all(name in lines for name in ("partial A", "partial B", "replicated", "fastest"))
    assert dgx().intra_node.title in lines["link"]
    assert all(len(line) <= 130 for line in text.splitlines())


def test_the_report_of_a_chain_shows_the_best_sequence_and_the_pipeline() -> None:
    _, text, _ = run(CHAIN)
    assert "best sequence" in text
    assert "data parallel -> data parallel" in text
    assert "contraction split: refused, 5 columns of A over 2" in text
    assert "4x8 to device 1" in text


@pytest.mark.parametrize("words", [PAIR, CHAIN])
def test_two_runs_write_the_same_bytes(words: list[str], tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        status, _, err = run([*words, "--out", str(folder), "--json", str(tmp_path / "x.json")])
        assert (status, err) == (0, "")
        assert sorted(path.name for path in folder.iterdir()) == ["matmul.png", "result.json"]
    for name in ("matmul.png", "result.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert json.loads((folders[0] / "result.json").read_text("utf-8")) == document(words)


def test_a_folder_in_use_is_refused_without_force(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep", encoding="utf-8")
    status, out, err = run([*PAIR, "--out", str(tmp_path)])
    assert (status, out) == (2, "")
    assert "is not empty" in err
    assert run([*PAIR, "--out", str(tmp_path), "--force"])[0] == 0


def coloured(figure: Figure) -> list[list[str]]:
    """Return the colours of the rectangles of each panel, in the order they were drawn."""
    return [
        [
            to_hex(patch.get_facecolor()).upper()
            for patch in axes.patches
            if isinstance(patch, Rectangle)
        ]
        for axes in figure.axes
    ]


def test_the_picture_colours_slices_and_cards_by_device() -> None:
    figure = plot_matmul_split(study((4, 5), (5, 8)))
    zero, one = COLOURS[:2]
    data, model, contraction, *_ = coloured(figure)
    assert data == [zero, one, one, zero, zero, one]  # cards are drawn from the last to the first
    assert model == [one, zero, zero, one, zero, one]
    assert len(contraction) == 3
    assert not set(contraction) & set(COLOURS)  # refused: grey


def test_the_slices_of_the_picture_have_the_local_shapes() -> None:
    axes = plot_matmul_split(study((4, 5), (5, 8))).axes[0]
    sizes = [
        (patch.get_height(), patch.get_width())
        for patch in axes.patches
        if isinstance(patch, Rectangle)
    ]
    assert sizes == [(2, 5), (2, 5), (5, 8), (5, 8), (2, 8), (2, 8)]


def test_slices_are_named_and_lie_within_their_panel() -> None:
    chosen = study((4, 5), (5, 8))
    data = panels_of(chosen)[0]
    assert [each.label for each in data.matrices] == ["S(0): 2x5 each", "R", "S(0): 2x8 each"]
    axes = plot_matmul_split(chosen).axes[0]
    begin, end = axes.get_xlim()
    rectangles = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert all(begin <= each.get_x() for each in rectangles)
    assert all(each.get_x() + each.get_width() <= end for each in rectangles)


@pytest.mark.parametrize(
    ("shapes", "num_devices"),
    [
        (((1, 1), (1, 1)), 1),
        (((8192, 12288), (12288, 49152)), 64),
        (((1024, 1024), (1024, 1024)), 256),
        (((32, 16), *[(16, 16)] * 7), 4),
        (((10**7, 1), (1, 1)), 10),
    ],
)
def test_pictures_of_all_sizes_can_be_drawn(
    shapes: tuple[Shape, ...], num_devices: int, tmp_path: Path
) -> None:
    result = study(*shapes, num_devices=num_devices)
    figure = plot_matmul_split(result)
    assert len(figure.axes) == len(panels_of(result))
    save_figure(figure, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5_000


# --- mistakes ---------------------------------------------------------------------------------

MISTAKES = {
    "not a shape": (["4y5", "5x8"], ["'4y5'", "4x5"]),
    "three sizes": (["4x5x6", "6x8"], ["'4x5x6'"]),
    "negative": (["4x5", "--", "-5x8"], ["'-5x8'"]),
    "zero": (["0x5", "5x8"], ["0x5", "allowed 1 to 10000000"]),
    "huge": (["4x99999999", "99999999x8"], ["99999999", "10000000"]),
    "digits": (["4x" + "9" * 5000, "5x8"], ["is not ROWSxCOLUMNS"]),
    "other digits": (["4x\uff15", "5x8"], ["is not ROWSxCOLUMNS"]),
    "inner sizes": (["4x5", "6x8"], ["6 rows", "5 columns", "nearest: 5x8"]),
    "inner sizes later": (["4x5", "5x8", "7x3"], ["7 rows", "8 columns", "nearest: 8x3"]),
    "one matrix": (["4x5"], ["1 matrices", "2 to 8"]),
    "no matrix": ([], ["0 matrices", "2 to 8"]),
    "nine matrices": (["2x2"] * 9, ["9 matrices", "2 to 8"]),
    "no devices": (["4x5", "5x8", "--devices", "0"], ["--devices 0", "1 to 1024"]),
    "negative devices": (["4x5", "5x8", "--devices", "-2"], ["--devices -2", "1 to 1024"]),
    "too many devices": (["4096x5", "5x8", "--devices", "1025"], ["1025", "1 to 1024"]),
    "more devices than sizes": (["4x5", "5x8", "--devices", "9"], ["any dim", "1 to 8"]),
    "devices in words": (["4x5", "5x8", "--devices", "two"], ["'two'", "whole number"]),
    "cluster": (["4x5", "5x8", "--cluster", "dgx-a10"], ["'dgx-a10'", "dgx-a100"]),
    "precision": (["4x5", "5x8", "--precision", "int4"], ["'int4'"]),
    "precision of a device": (
        ["4x5", "5x8", "--cluster", "dgx-1v", "--precision", "bf16"],
        ["precision=bf16", "v100"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(name: str) -> None:
    words, parts = MISTAKES[name]
    given_devices = any(word == "--devices" for word in words)
    status, out, err = run(["matmul", *([] if given_devices else ["--devices", "2"]), *words])
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(part in err for part in parts)


def test_missing_devices_are_asked_for() -> None:
    assert run(["matmul", "4x5", "5x8"])[2] == "error: --devices is missing; allowed 1 to 1024\n"


def test_a_cluster_with_too_few_devices_is_refused() -> None:
    small = dgx().model_copy(update={"num_nodes": 1})
    with pytest.raises(ValueError, match=r"^mesh of 16 devices: dgx-a100 has 8 devices$"):
        study_matmul(((16, 16), (16, 16)), 16, small, Precision.BF16)


def test_the_default_precision_is_one_the_device_has() -> None:
    assert default_precision(dgx().device) is Precision.BF16
    assert default_precision(load_cluster("dgx-1v").device) is Precision.FP16


def test_shapes_are_read_in_order() -> None:
    assert parse_matrices(["4x5", "5x8", "8x3"]) == ((4, 5), (5, 8), (8, 3))


def test_every_option_changes_the_result() -> None:
    plain = document(PAIR)
    for change in (["--cluster", "dgx-1v"], ["--precision", "fp32"], ["--devices", "4"]):
        assert document([*PAIR, *change]) != plain


def test_refusals_keep_their_signature() -> None:
    (refused,) = (row for row in study((4, 5), (5, 8)).rows if isinstance(row, Refusal))
    assert refused.signature.name == "contraction split"


def test_times_in_json_are_seconds() -> None:
    result, rows = document(PAIR), study((4, 5), (5, 8), precision=Precision.BF16).rows
    first = rows[0]
    assert isinstance(first, ProductRow)
    assert result["signatures"][0]["total_time_s"] == first.time_ps / PS_PER_S


# --- what docs/placements.md says of it --------------------------------------------------------


def test_what_the_page_says_of_small_and_large_products_holds() -> None:
    small = study((4, 5), (5, 8))
    assert small.best.steps[0].run.name == "replicated"
    large = study((8192, 12288), (12288, 49152))
    assert max(large.chains, key=lambda chain: chain.compute_ps).flops == 2 * large.best.flops
    assert large.chains[-1].time_ps > large.best.time_ps
