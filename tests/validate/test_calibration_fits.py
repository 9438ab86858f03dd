"""Fits find the constants that rows were made with, and the files they go to are read again."""

import json
import random
from pathlib import Path

import pytest

import meshwright
from meshwright.hwprofiles import (
    CollectiveOp,
    Device,
    Precision,
    Source,
    load_cluster,
    load_device,
    load_link,
)
from meshwright.simulator.costs.collectives import p2p_cost
from meshwright.validate.calibration.fit.calibrated import (
    calibrated_device,
    calibrated_link,
    combined_rows,
)
from meshwright.validate.calibration.fit.cost_fit import (
    FLASH_KERNEL,
    LaunchFloor,
    fit_collective,
    fit_flash,
    fit_gemm,
    fit_memory,
    launch_floor,
    modelled_s,
)
from meshwright.validate.calibration.fit.datasheet import known_device
from meshwright.validate.calibration.fit.profile_files import write_profiles
from meshwright.validate.calibration.fit.residuals import residuals_of, summaries
from meshwright.validate.calibration.rows.cases import (
    collective_cases,
    covering,
    device_cases,
    in_batches,
)
from meshwright.validate.calibration.rows.machine import Accelerator, Machine
from meshwright.validate.calibration.rows.row_file import RowFile
from meshwright.validate.calibration.rows.rows import BenchmarkCase, CaseGroup, Row, collective

LAUNCH_S = 4e-6
FLOOR = LaunchFloor(LAUNCH_S, Accelerator.CUDA)
NOISE = 0.03
TRUE = load_device("a100-sxm4-80gb").model_copy(
    update={"flash": {FLASH_KERNEL: load_device("a100-sxm4-80gb").flash[FLASH_KERNEL]}}
)
# The first part of the order: the fits must not need all of it.
CASES = device_cases(Accelerator.CUDA, Precision.BF16, TRUE.memory_capacity_bytes)[:160]
MACHINE = Machine(
    accelerator=Accelerator.CUDA,
    device="NVIDIA A100-SXM4-80GB",
    driver="550.54",
    versions="PyTorch 2.9.0, CUDA 12.8",
    threads=1,
    num_sms=108,
    memory_bytes=85_000_000_000,
)


def row(case: BenchmarkCase, time_s: float) -> Row:
    return Row(case, time_s, time_s, time_s, 9)


def rows_of(device: Device, noise: float) -> list[Row]:
    """Return what *device* would measure if the cost model were right, with noise."""
    order = random.Random(7)
    rows = []
    for case in CASES:
        time_s = LAUNCH_S if case.group is CaseGroup.LAUNCH else modelled_s(case, device, FLOOR)
        if time_s is not None:
            rows.append(row(case, time_s * order.lognormvariate(0.0, noise)))
    return rows


def elsewhere(device: Device) -> Device:
    """Return *device* with constants far from its own, where a search starts."""
    gemm = {
        "plateau_fraction": 0.5,
        "prologue_k": 20.0,
        "half_rate_intensity": 10.0,
        "partial_wave_fraction": 0.2,
        "misaligned_linear_fraction": 0.8,
    }
    return device.model_copy(
        update={
            "gemm": device.gemm.model_copy(update=gemm),
            "memory": device.memory.model_copy(update={"bandwidth_fraction": 0.5}),
        }
    )


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return rows_of(TRUE, NOISE)


def test_the_bandwidth_fraction_is_found(rows: list[Row]) -> None:
    found = fit_memory(rows, elsewhere(TRUE), FLOOR)
    # About 25 rows of 3 % noise: their mean is good to 0.6 %; three times that.
    assert found.bandwidth_fraction == pytest.approx(TRUE.memory.bandwidth_fraction, rel=0.02)


def test_the_constants_of_products_are_found(rows: list[Row]) -> None:
    start = elsewhere(TRUE).model_copy(update={"memory": TRUE.memory})
    found, true = fit_gemm(rows, start, FLOOR), TRUE.gemm
    # The plateau moves every row; the others only small, narrow or odd products.
    assert found.plateau_fraction == pytest.approx(true.plateau_fraction, rel=0.02)
    assert found.prologue_k == pytest.approx(true.prologue_k, rel=0.15)
    assert found.half_rate_intensity == pytest.approx(true.half_rate_intensity, rel=0.2)
    assert found.partial_wave_fraction == pytest.approx(true.partial_wave_fraction, abs=0.08)
    linear = found.misaligned_linear_fraction
    assert linear == pytest.approx(true.misaligned_linear_fraction, rel=0.1)


def test_a_few_disturbed_rows_do_not_decide(rows: list[Row]) -> None:
    disturbed = [
        row(each.case, each.median_s * (5 if index % 12 == 0 else 1))
        for index, each in enumerate(rows)
    ]
    found = fit_memory(disturbed, elsewhere(TRUE), FLOOR)
    assert found.bandwidth_fraction == pytest.approx(TRUE.memory.bandwidth_fraction, rel=0.1)


def test_the_shares_of_attention_are_found(rows: list[Row]) -> None:
    found = fit_flash(rows, TRUE, FLOOR)
    assert found is not None
    true = TRUE.flash[FLASH_KERNEL]
    assert found.forward_fraction == pytest.approx(true.forward_fraction, rel=0.05)
    assert found.backward_fraction == pytest.approx(true.backward_fraction, rel=0.05)


def test_attention_without_backward_gives_no_kernel(rows: list[Row]) -> None:
    assert fit_flash([each for each in rows if each.case.op == "forward"], TRUE, FLOOR) is None


def test_the_launch_is_the_floor_of_a_gpu_and_an_addition_on_a_processor(rows: list[Row]) -> None:
    on_gpu = launch_floor(rows, Accelerator.CUDA)
    assert on_gpu.launch_s == pytest.approx(LAUNCH_S, rel=4 * NOISE)
    assert LaunchFloor(1.0, Accelerator.CPU).apply(2.0) == 3.0
    assert launch_floor([], Accelerator.CUDA).apply(2.0) == 2.0


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "p2p"])
def test_bandwidth_and_latency_of_a_collective_are_found(op: str) -> None:
    order = random.Random(3)
    ranks = 2 if op == "p2p" else 4
    cases = [case for case in collective_cases(ranks) if (case.op, case.sizes[1]) == (op, ranks)]
    assert len(cases) == 10
    rows = [
        row(case, (25e-6 + case.work / 200e9) * order.lognormvariate(0.0, NOISE)) for case in cases
    ]
    found = fit_collective(rows)
    assert found.busbw_bytes_per_s == pytest.approx(200e9, rel=0.06)
    assert found.latency_s == pytest.approx(25e-6, rel=0.06)


def test_a_gpu_is_known_by_name_processors_and_memory() -> None:
    def found(device: str, num_sms: int, memory_bytes: float) -> str | None:
        machine = Machine(
            accelerator=Accelerator.CUDA,
            device=device,
            driver="",
            versions="",
            threads=1,
            num_sms=num_sms,
            memory_bytes=int(memory_bytes),
        )
        known = known_device(machine, None)
        return None if known is None else known.name

    assert found("NVIDIA A100-SXM4-80GB", 108, 85.0e9) == "a100-sxm4-80gb"
    assert found("NVIDIA A100-SXM4-40GB", 108, 42.4e9) == "a100-sxm4-40gb"
    assert found("NVIDIA A100 80GB PCIe", 108, 85.0e9) == "a100-pcie-80gb"
    assert found("NVIDIA H100 80GB HBM3", 132, 85.0e9) == "h100-sxm5-80gb"
    assert found("NVIDIA H200", 132, 150.0e9) == "h200-sxm"
    assert found("NVIDIA GeForce RTX 4090", 128, 25.3e9) == "rtx-4090"
    assert found("NVIDIA T4", 40, 15.6e9) is None


def test_half_of_the_order_covers_the_range() -> None:
    first = CASES[: len(CASES) // 4]
    assert {case.group for case in first} == set(CaseGroup) - {CaseGroup.COLLECTIVE}
    flops = sorted(case.flops for case in CASES if case.group is CaseGroup.GEMM)
    early = [case.flops for case in first if case.group is CaseGroup.GEMM]
    assert min(early) <= flops[len(flops) // 10]
    assert max(early) >= flops[-len(flops) // 10]
    assert sorted(covering(range(37))) == list(range(37))


def test_chunks_hold_what_fits_together() -> None:
    chunks = in_batches(CASES, most=8, limit_bytes=10**9)
    assert [case for chunk in chunks for case in chunk] == CASES
    assert max(map(len, chunks)) == 8


def file_of(rows: list[Row], machine: Machine = MACHINE) -> RowFile:
    file = RowFile(Path("unused"), machine, "2026-01-02")
    file.rows = rows
    return file


@pytest.fixture(scope="module")
def calibrated(rows: list[Row]) -> Device:
    return calibrated_device(file_of(rows), "mine-device", like=None, peak={})


def collectives(num_ranks: int) -> list[Row]:
    return [row(case, 20e-6 + case.work / 100e9) for case in collective_cases(num_ranks)]


def test_profiles_go_through_files_unchanged(calibrated: Device, tmp_path: Path) -> None:
    device = calibrated
    assert device.peak_flops_per_s == TRUE.peak_flops_per_s
    shared = collectives(4)
    link = calibrated_link(shared, "mine-link", "wires", dict.fromkeys(shared, "here, today"))
    write_profiles(tmp_path, "mine", device=device, link=link, num_devices=4)
    assert load_device(tmp_path / "mine-device.toml") == device
    read = load_link(tmp_path / "mine-link.toml")
    for ours, theirs in zip(link.collectives, read.collectives, strict=True):
        assert theirs.latency_s == pytest.approx(ours.latency_s, rel=1e-9)
        assert theirs.busbw_bytes_per_s == pytest.approx(ours.busbw_bytes_per_s, rel=1e-9)
    cluster = load_cluster(tmp_path / "mine.toml")
    assert (cluster.devices_per_node, cluster.num_nodes) == (4, 1)
    assert cluster.intra_node == read


def test_every_fact_says_when_where_and_how_well(calibrated: Device) -> None:
    device = calibrated
    for kernels in (device.gemm, device.memory, device.flash[FLASH_KERNEL]):
        assert kernels.kind is Source.FITTED
        for word in ("2026-01-02", "A100", "550.54", "PyTorch 2.9.0", " rows, |error| median"):
            assert word in kernels.source


def test_other_attention_kernels_stay_those_of_the_datasheet(calibrated: Device) -> None:
    device = calibrated
    known = load_device("a100-sxm4-80gb")
    assert device.flash.keys() == known.flash.keys()
    other = device.flash["te-cudnn"]
    assert other.forward_fraction == known.flash["te-cudnn"].forward_fraction
    assert other.source.startswith("from a100-sxm4-80gb: ")


def test_an_unknown_device_has_the_best_rates_as_its_peaks(rows: list[Row]) -> None:
    machine = Machine(
        accelerator=Accelerator.CUDA,
        device="Prototype",
        driver="1",
        versions="2",
        threads=1,
        num_sms=108,
        memory_bytes=80_000_000_000,
    )
    device = calibrated_device(file_of(rows, machine), "mine", like=None, peak={})
    best = max(each.rate for each in rows if each.case.group is CaseGroup.GEMM)
    assert device.peak_flops_per_s == {Precision.BF16: pytest.approx(best, rel=1e-3)}
    # Large products reach the plateau, so what they reach is told either way.
    ours = device.peak_flops_per_s[Precision.BF16] * device.gemm.plateau_fraction
    theirs = TRUE.peak_flops_per_s[Precision.BF16] * TRUE.gemm.plateau_fraction
    assert ours == pytest.approx(theirs, rel=0.03)
    peak = {Precision.BF16: 312e12}
    # A third of the rows in a third of the time; noise weighs twice.
    given = calibrated_device(file_of(rows[::3], machine), "mine", like=None, peak=peak)
    assert given.peak_flops_per_s == peak
    assert given.gemm.plateau_fraction == pytest.approx(TRUE.gemm.plateau_fraction, rel=0.06)


def test_a_calibrated_cluster_simulates(calibrated: Device, tmp_path: Path) -> None:
    shared = collectives(2)
    write_profiles(
        tmp_path,
        "mine",
        device=calibrated,
        link=calibrated_link(shared, "mine-link", "wires", dict.fromkeys(shared, "here")),
        num_devices=2,
    )
    result = tmp_path / "result.json"
    command = ["simulate", "gpt2", "--cluster", str(tmp_path / "mine.toml"), "--stack", "ddp"]
    job = ["--gpus", "2", "--global-batch", "4", "--seq-len", "128"]
    assert meshwright.main([*command, *job, "--json", str(result)]) == 0
    shares = json.loads(result.read_text(encoding="utf-8"))["provenance"]
    assert shares["extrapolated"] == shares["datasheet"] == 0


def test_residuals_are_those_of_the_simulators_functions(rows: list[Row]) -> None:
    shared = collectives(2)
    link = calibrated_link(shared, "mine-link", "wires", dict.fromkeys(shared, "here"))
    residuals = residuals_of([*rows, *shared], TRUE, link, FLOOR)
    messages = [each for each in residuals if each.row.case.op == CollectiveOp.P2P]
    cluster = load_cluster("localhost-cpu").model_copy(update={"intra_node": link})
    for each in messages:
        size_bytes = each.row.case.sizes[0]
        cost = p2p_cost(size_bytes, cluster, crosses_nodes=False, network_fraction=1.0)
        total_s = (cost.transfer.time_ps + cost.latency.time_ps) / 1e12
        assert each.modelled_s == pytest.approx(total_s)
    for summary in summaries(residuals):
        if summary.misfit.num_rows:
            # The rows came from this model: what is left is the noise, half of it below 2 %.
            assert summary.misfit.median_fraction < 2 * NOISE, summary


def test_what_was_read_replaces_what_was_measured_of_an_operation() -> None:
    own, read = collectives(2), [row(collective("all_reduce", 4096, 2), 1e-5)]
    together = combined_rows(own, read)
    assert [each for each in together if each.case.op == "all_reduce"] == read
    assert len(together) == len(own) - 10 + 1
