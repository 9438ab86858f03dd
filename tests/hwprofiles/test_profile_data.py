"""The built-in profiles: all load, and hold the published figures."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright import hwprofiles
from meshwright.hwprofiles import (
    Attention,
    CollectiveOp,
    Link,
    Precision,
    Recompute,
    Source,
    StageSplit,
    list_clusters,
    list_devices,
    list_links,
    list_stacks,
    load_cluster,
    load_device,
    load_link,
    load_stack,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "hardware_facts.csv"
DOCUMENT = Path(__file__).parents[2] / "docs" / "clusters.md"
LOADERS = {"devices": load_device, "links": load_link, "clusters": load_cluster}


def golden_rows() -> list[dict[str, str]]:
    with GOLDEN.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def lookup(record: object, field: str) -> float:
    name, _, rest = field.partition(".")
    if name == "collectives" and isinstance(record, Link):
        op, num_ranks, fact_field = rest.split(".")
        (fact,) = (
            f
            for f in record.collectives
            if (f.op, f.num_ranks) == (CollectiveOp(op), int(num_ranks))
        )
        return lookup(fact, fact_field)
    value = getattr(record, name)
    if isinstance(value, dict):
        value, rest = value[Precision(rest)], ""
    if rest:
        return lookup(value, rest)
    assert isinstance(value, int | float)
    return value


@pytest.mark.parametrize("row", golden_rows(), ids=lambda r: f"{r['name']}-{r['field']}")
def test_a_fact_is_the_published_one(row: dict[str, str]) -> None:
    record = LOADERS[row["folder"]](row["name"])
    expected = float(row["expected"])
    assert lookup(record, row["field"]) == pytest.approx(expected, rel=float(row["rel_tol"]), abs=0)
    assert row["source"]


@pytest.mark.parametrize("name", list_devices())
def test_a_built_in_device_loads_under_its_own_name(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert Precision.FP32 in device.peak_flops_per_s
    assert load_device(name) is device  # cached


@pytest.mark.parametrize("name", list_links())
def test_a_built_in_link_loads_and_no_fact_beats_the_hardware(name: str) -> None:
    link = load_link(name)
    assert link.name == name
    for fact in link.collectives:
        # Reductions inside a switch may exceed the ring limit of one line rate, at most twofold.
        limit = 2 if "nvls" in name and fact.op is CollectiveOp.ALL_REDUCE else 1
        assert fact.busbw_bytes_per_s < limit * link.bandwidth_bytes_per_s


@pytest.mark.parametrize("name", list_clusters())
def test_a_built_in_cluster_loads_with_built_in_parts(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.device is load_device(cluster.device.name)
    assert cluster.intra_node is load_link(cluster.intra_node.name)
    assert cluster.inter_node is load_link(cluster.inter_node.name)
    assert cluster.intra_node.bandwidth_bytes_per_s > cluster.inter_node.bandwidth_bytes_per_s
    assert cluster.oversubscription == 1.0
    assert cluster.num_nodes == (1 if name == "localhost-cpu" else None)
    if cluster.price_usd_per_gpu_hour is not None:  # a price grows old, so it has a date
        assert re.search(r"\bUSD an hour\b.*\b20[12][0-9]\b", cluster.source)


@pytest.mark.parametrize("name", list_stacks())
def test_a_built_in_stack_loads_and_names_a_flash_kernel_some_device_has(name: str) -> None:
    stack = load_stack(name)
    assert stack.name == name
    if Attention.FLASH in stack.attention_kernels:
        assert any(stack.flash_kernel in load_device(d).flash for d in list_devices())
    # Weight, gradient, master copy and two moments: 16 bytes of 16-bit or of fp32 training.
    assert stack.parameter_bytes + stack.gradient_bytes + stack.optimizer_bytes >= 16


def test_the_lists_hold_what_the_command_line_promises() -> None:
    assert {
        "dgx-1v",
        "dgx-2",
        "dgx-a100",
        "dgx-a100-40",
        "a100-4xhdr200",
        "jean-zay-a100",
        "dgx-h100",
        "h100-96gb",
        "dgx-h200",
        "dgx-b200",
        "dgx-b300",
        "gb200-nvl72",
        "gb300-nvl72",
        "localhost-cpu",
    } <= set(list_clusters())
    assert {
        "megatron-core@0.16",
        "megatron-deepspeed-2022",
        "megatron-deepspeed-2022-02",
        "megatron-deepspeed-2022-bf16",
        "megatron-lm-2021",
        "megatron-lm-2022",
    } <= set(list_stacks())
    assert list_devices() == tuple(sorted(list_devices()))


@pytest.mark.parametrize(
    ("title", "names"),
    [("Clusters", list_clusters()), ("Devices", list_devices()), ("Links", list_links())],
)
def test_the_document_lists_every_built_in_profile(title: str, names: tuple[str, ...]) -> None:
    section = DOCUMENT.read_text(encoding="utf-8").split(f"### {title}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| ((?:`[\w.-]+` ?)+)\|", section, re.MULTILINE)
    assert sorted(re.findall(r"`([\w.-]+)`", "".join(rows))) == list(names)


@pytest.mark.parametrize(
    ("name", "whole", "products", "part"),
    [
        ("h100-sxm5-96gb", "h100-sxm5-80gb", 0.854, 0.79),
        ("h200-sxm", "h100-sxm5-80gb", 1.0, 1.0),
    ],
)
def test_a_device_without_timings_of_its_own_takes_those_of_its_chip(
    name: str, whole: str, products: float, part: float
) -> None:
    device, known = load_device(name), load_device(whole)
    expected = known.gemm.plateau_fraction * products
    assert device.gemm.plateau_fraction == pytest.approx(expected, abs=0.005)
    assert device.gemm.fp8 is not None
    assert known.gemm.fp8 is not None
    fp8_fraction = known.gemm.fp8.plateau_fraction * products
    assert device.gemm.fp8.plateau_fraction == pytest.approx(fp8_fraction, abs=0.005)
    assert device.gemm.fp8.kind is Source.EXTRAPOLATED
    for kernel, facts in device.flash.items():
        rate = known.flash[kernel].forward_fraction * part
        assert facts.forward_fraction == pytest.approx(rate, abs=0.005)
    if part == 1.0:
        kinds = {device.gemm.kind, *(facts.kind for facts in device.flash.values())}
        assert kinds == {Source.EXTRAPOLATED}


@pytest.mark.parametrize("name", ["v100-sxm2-16gb", "v100-sxm2-32gb"])
def test_v100_has_neither_bf16_nor_flash_attention(name: str) -> None:
    device = load_device(name)
    assert Precision.BF16 not in device.peak_flops_per_s
    assert device.flash == {}
    assert device.gemm.kind is Source.EXTRAPOLATED


def test_stacks_differ_as_their_dates_say() -> None:
    old, newer = load_stack("megatron-lm-2021"), load_stack("megatron-lm-2022")
    bloom, core = load_stack("megatron-deepspeed-2022"), load_stack("megatron-core")
    assert (old.zero_stages, old.sequence_parallel, old.tp_overlap_fraction) == ((0,), False, 0.0)
    assert Recompute.SELECTIVE not in old.recompute_modes
    assert newer.sequence_parallel
    assert Recompute.SELECTIVE in newer.recompute_modes
    assert newer.gradient_bytes + newer.optimizer_bytes + 2 == 18  # Megatron mixed precision
    assert bloom.stage_split is StageSplit.GREEDY
    assert bloom.host_per_layer_pass_s == pytest.approx(1.1e-3)
    for field in ("p2p_bandwidth_fraction", "dp_bandwidth_fraction"):  # Omni-Path reaches half
        assert getattr(bloom, field) == pytest.approx(getattr(old, field) / 2, rel=0.05)
    assert (core.attention, core.zero_stage, core.flash_kernel) == (Attention.FLASH, 1, "te-cudnn")
    assert core.overlap_gradient_reduce
    assert core.overlap_parameter_gather
    assert core.overlap_p2p


def test_the_public_names_are_the_listed_ones() -> None:
    assert len(set(hwprofiles.__all__)) == len(hwprofiles.__all__)
    for name in hwprofiles.__all__:
        assert getattr(hwprofiles, name) is not None
    modules = {
        "complaints",
        "conditions",
        "facts",
        "framework_schema",
        "kinds",
        "loader",
        "reading",
        "schema",
    }
    modules |= {"stack_schema", "stack_traits", "stacks"}
    public = {name for name in vars(hwprofiles) if not name.startswith("_")}
    assert public - modules - {"units", "version"} == set(hwprofiles.__all__)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, meshwright.hwprofiles; print(*sorted(m for m in sys.modules if '.' not in m))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "pandas", "simpy", "torch", "matplotlib", "typer"} & set(
        done.stdout.split()
    )
