"""A mistake in a file: one line that says where, what, and what is allowed."""

import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import ProfileError, load_cluster, load_device, load_link, load_stack

Load = Callable[[str | Path], object]
LOADERS: dict[str, Load] = {
    "devices/a100-sxm4-80gb": load_device,
    "links/nvlink3-nvswitch": load_link,
    "clusters/dgx-a100": load_cluster,
    "stacks/megatron-core": load_stack,
}


def built_in_text(name: str) -> str:
    return (files("meshwright.hwprofiles") / "data" / f"{name}.toml").read_text(encoding="utf-8")


def complaint(load: Load, path: Path) -> str:
    with pytest.raises(ProfileError) as caught:
        load(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def complaint_about(tmp_path: Path, name: str, old: str, new: str) -> str:
    text = built_in_text(name)
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return complaint(LOADERS[name], path)


DEVICE, LINK, CLUSTER, STACK = sorted(LOADERS, key=list(LOADERS).index)
FP8_KERNELS = """[gemm.fp8]
plateau_fraction = 0.5
prologue_k = 9
kind = "fitted"
source = "a test"
"""
MISTAKES = [
    (DEVICE, '"80 GiB"', "80", ": memory_capacity: 80 has no unit; allowed: a text with a unit"),
    (DEVICE, '"80 GiB"', '"80"', ": memory_capacity: '80' has no unit; allowed: a number and one"),
    (DEVICE, '"80 GiB"', '"80 GHz"', ": memory_capacity: '80 GHz' has the wrong unit 'GHz'; allow"),
    (
        DEVICE,
        '"80 GiB"',
        '"-80 GiB"',
        ": memory_capacity: '-80 GiB' is negative; allowed: 0 or more",
    ),
    (
        DEVICE,
        '"80 GiB"',
        '"0 GiB"',
        ": memory_capacity: '0 GiB' is not allowed; it must be more than 0",
    ),
    (
        DEVICE,
        '"2.039 TB/s"',
        '"2 TB/s bidirectional"',
        ": memory_bandwidth: '2 TB/s bidirectional'",
    ),
    (DEVICE, "num_sms", "num_sm", ": num_sm: unknown key; nearest: num_sms"),
    (DEVICE, "num_sms = 108", "", ": num_sms: missing key"),
    (
        DEVICE,
        "num_sms = 108",
        "num_sms = true",
        ": num_sms: True is not allowed; it must be a whole",
    ),
    (
        DEVICE,
        "num_sms = 108",
        "num_sms = 0",
        ": num_sms: 0 is not allowed; it must be greater than",
    ),
    (
        DEVICE,
        "num_sms = 108",
        "num_sms = '108'",
        ": num_sms: '108' is not allowed; it must be a whole",
    ),
    (
        DEVICE,
        "num_sms",
        "num_sms = 1\nnum_sms",
        ": not valid TOML: Cannot overwrite a value (at line",
    ),
    (
        DEVICE,
        "memory_capacity",
        "memory_capacity_bytes",
        ": memory_capacity_bytes: unknown key; near",
    ),
    (
        DEVICE,
        "bf16 =",
        "bf17 =",
        ": peak.bf17: 'bf17' is not allowed; it must be 'fp32', 'fp16', 'bf16', 'fp8' or 'mxfp8'",
    ),
    (DEVICE, '"19.5 TFLOP/s"', '"19.5 TFLOPS"', ": peak.fp32: '19.5 TFLOPS' has the wrong unit"),
    (
        DEVICE,
        "plateau_fraction = 0.79",
        "plateau_fraction = 1.80",
        ": gemm.plateau_fraction: 1.8 is",
    ),
    (DEVICE, "plateau_fraction = 0.79", "", ": gemm.plateau_fraction: missing key"),
    (
        DEVICE,
        "misaligned_fraction",
        "misaligned",
        ": gemm.misaligned: unknown key; nearest: misalign",
    ),
    (
        DEVICE,
        'kind = "fitted"',
        'kind = "fited"',
        ": gemm.kind: 'fited' is not allowed; it must be",
    ),
    (
        DEVICE,
        "forward_fraction = 0.60",
        "forward_fraction = nan",
        ": flash.te-cudnn.forward_fraction",
    ),
    (
        DEVICE,
        "[memory]",
        "[memory",
        ": not valid TOML: Expected ']' at the end of a table declaration",
    ),
    (
        LINK,
        "300 GB/s per direction",
        "300 GB/s",
        ": bandwidth: '300 GB/s' does not say its direction",
    ),
    (
        LINK,
        '"5 us"',
        '"5 GB"',
        ": latency: '5 GB' has the wrong unit 'GB'; allowed: a number and one",
    ),
    (
        LINK,
        "busbw_fraction = 0.77",
        "busbw_fraction = 0.0",
        ": busbw_fraction: 0.0 is not allowed; it",
    ),
    (
        LINK,
        "num_ranks = 4",
        "num_ranks = 2",
        ": collectives: all_reduce over 2 ranks stands twice; al",
    ),
    (
        LINK,
        "num_ranks = 2",
        "num_ranks = 1",
        ": collectives.0.num_ranks: 1 is not allowed; it must",
    ),
    (
        LINK,
        '"all_reduce"',
        '"allreduce"',
        ": collectives.0.op: 'allreduce' is not allowed; it must be",
    ),
    (
        LINK,
        '"200 GB/s"',
        "200",
        ": collectives.0.busbw: 200 has no unit; allowed: a text with a unit",
    ),
    (LINK, "[[collectives]]", "[collectives]", ": not valid TOML: Cannot overwrite"),
    (
        CLUSTER,
        '"a100-sxm4-80gb"',
        '"a100-80gb"',
        ": device: unknown device 'a100-80gb'; nearest: a100",
    ),
    (CLUSTER, '"a100-sxm4-80gb"', '"no.toml"', ": device: "),
    (
        CLUSTER,
        '"a100-sxm4-80gb"',
        "['a']",
        ": device: ['a'] is not a text; allowed: a built-in name",
    ),
    (
        CLUSTER,
        '"nvlink3-nvswitch"',
        '"nvlink"',
        ": intra_node: unknown link 'nvlink'; nearest: nvlink",
    ),
    (CLUSTER, '"infiniband-hdr"', '"../x"', ": inter_node: "),
    (
        CLUSTER,
        "nics_per_node = 8",
        "nics_per_node = -8",
        ": nics_per_node: -8 is not allowed; it must",
    ),
    (
        CLUSTER,
        "nics_per_node = 8",
        "nics_per_node = 8.5",
        ": nics_per_node: 8.5 is not allowed; it mus",
    ),
    (
        CLUSTER,
        "nics_per_node = 8",
        "nics_per_node = 8\noversubscription = 0.5",
        ": oversubscription: 0.5",
    ),
    (
        CLUSTER,
        "nics_per_node = 8",
        "nics_per_node = 8\nnum_nodes = 0",
        ": num_nodes: 0 is not allowed",
    ),
    (
        CLUSTER,
        "nics_per_node = 8",
        "nics_per_node = 8\nprice = 2.5",
        ": price: 2.5 has no unit; allowed",
    ),
    (CLUSTER, "nics_per_node = 8", 'nics_per_node = 8\n"a\\nb" = 2', ": 'a\\nb': unknown key; "),
    (
        CLUSTER,
        'name = "dgx-a100"',
        'name = "my cluster"',
        ": name: 'my cluster' is not allowed; it",
    ),
    (STACK, "[fitted]", "[fited]", ": fited: unknown key; nearest: "),
    (
        STACK,
        'kernel_gap = "3 us"',
        "kernel_gap = 3",
        ": fitted.kernel_gap: 3 has no unit; allowed: a",
    ),
    (STACK, 'kernel_gap = "3 us"', "", ": fitted.kernel_gap: missing key"),
    (
        STACK,
        "kernel_gap",
        "kernel_gab",
        ": fitted.kernel_gab: unknown key; nearest: fitted.kernel_gap",
    ),
    (
        STACK,
        "dp_bandwidth_fraction = 0.70",
        "dp_bandwidth_fraction = 0",
        ": fitted.dp_bandwidth_fracti",
    ),
    (
        STACK,
        'attention = "flash"',
        'attention = "fast"',
        ": attention: 'fast' is not allowed; it must",
    ),
    (
        STACK,
        '["flash", "unfused"]',
        '["unfused"]',
        ": attention: flash is not in attention_kernels; al",
    ),
    (
        STACK,
        "zero_stage = 1",
        "zero_stage = 2",
        ": zero_stage: 2 is not in zero_stages; allowed: 0, 1, 3",
    ),
    (
        STACK,
        "zero_stages = [0, 1, 3]",
        "zero_stages = [0, 4]",
        ": zero_stages.1: 4 is not allowed; it must",
    ),
    (
        STACK,
        "zero_stages = [0, 1, 3]",
        "zero_stages = [1, 1]",
        ": zero_stages: 1, 1 repeats a value; allow",
    ),
    (
        STACK,
        "zero_stages = [0, 1, 3]",
        "zero_stages = 1",
        ": zero_stages: 1 is not allowed; it must be a l",
    ),
    (
        STACK,
        'flash_kernel = "te-cudnn"',
        "",
        ": flash_kernel: '' does not go with attention_kernels; a",
    ),
    (
        STACK,
        "overlap_p2p = true",
        "overlap_p2p = 1",
        ": overlap_p2p: 1 is not allowed; it must be true",
    ),
    (
        STACK,
        'date = "2025-03"',
        'date = "2024"',
        ": date: '2024' is not allowed; it must match pattern",
    ),
    (
        STACK,
        "gradient_bytes = 4",
        "gradient_bytes = -4",
        ": gradient_bytes: -4 is not allowed; it must",
    ),
    (
        STACK,
        '["bf16", "bf16"], ["fp16", "fp16"]',
        '["bf16", "bf16"], ["bf16", "bf16"]',
        ": gradient_precisions: fp32/fp32, bf16/bf16, bf16/bf16 repeats a value",
    ),
    (
        STACK,
        '["fp16", "fp16"]',
        '["fp16", "int8"]',
        ": gradient_precisions.2.1: 'int8' is not allowed",
    ),
    (
        STACK,
        '["fp16", "fp16"]',
        '["fp16", "fp8"]',
        ": gradient_precisions: fp8 is not a format of gradients; allowed: bf16, fp16, fp32",
    ),
    (
        STACK,
        '["fp16", "fp16"]',
        '["fp16"]',
        ": gradient_precisions.2",
    ),
    (
        STACK,
        "gradient_bucket_parameters = 40000000",
        "gradient_bucket_parameters = 40000000\nfirst_gradient_bucket_parameters = 0",
        ": first_gradient_bucket_parameters: 0 is not allowed; it must",
    ),
    (
        STACK,
        'units = "flat"',
        'units = "layers"',
        ": gradient_bucket_parameters_per_replica: does not go with zero_stages 0, 1, 3; allowed",
    ),
    (
        CLUSTER,
        'host_memory = "2 TiB"\n',
        "",
        ": host_memory: missing; allowed: host_link, host_memory, host_memory_bandwidth, host_so",
    ),
    (
        CLUSTER,
        'host_link = "pcie4-x16"',
        'host_link = "pcie-4"',
        ": host_link: unknown link 'pcie-4'; nearest: pcie5-x16, pcie4-x16",
    ),
    (
        STACK,
        "sequence_parallel = true",
        'sequence_parallel = true\noffload_modes = ["none", "optimizer"]',
        ": fitted.host_bandwidth_fraction: 0 does not go with offload_modes; allowed: more than 0",
    ),
    (
        STACK,
        "sequence_parallel = true",
        'sequence_parallel = true\noffload_modes = ["optimizer"]',
        ": offload_modes: none is not in offload_modes; allowed: optimizer",
    ),
    (
        STACK,
        '"bf16", "fp8", "mxfp8"]',
        '"bf16", "mxfp8"]',
        ": fp8: does not go with precisions fp32, fp16, bf16, mxfp8; allowed",
    ),
    (
        STACK,
        '"bf16", "fp8", "mxfp8"]',
        '"bf16", "fp8"]',
        ": mxfp8: does not go with precisions fp32, fp16, bf16, fp8; allowed: a table [mxfp8]",
    ),
    (
        STACK,
        "saved_input_bytes = 1",
        "saved_input_bytes = 4",
        ": fp8.saved_input_bytes: 4 is not allowed; it must",
    ),
    (
        STACK,
        'weight_casts = "step"',
        'weight_casts = "never"',
        ": fp8.weight_casts: 'never' is not allowed; it must be 'step', 'forward'",
    ),
    (
        DEVICE,
        "bf16 =",
        'fp8 = "1 TFLOP/s"\nbf16 =',
        ": peak.fp8: stands without gemm.fp8; allowed: both or neither",
    ),
    (
        DEVICE,
        "[memory]",
        FP8_KERNELS + "[memory]",
        ": gemm.fp8: stands without peak.fp8; allowed: both or neither",
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "start"), MISTAKES)
def test_a_mistake_is_one_line_with_file_key_value_and_what_is_allowed(
    name: str, old: str, new: str, start: str, tmp_path: Path
) -> None:
    assert complaint_about(tmp_path, name, old, new).startswith(start)


def test_fitted_has_to_be_a_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("fitted = 3\n", encoding="utf-8")
    assert complaint(load_stack, path) == ": fitted: 3 is not a table; allowed: [fitted]"


@pytest.mark.parametrize(
    ("content", "start"),
    [
        (b"name = \n", ": not valid TOML: Invalid value (at line 1"),
        (b"\nname = 'x'\n= 3\n", ": not valid TOML: Invalid statement (at line 3"),
        (b"name = 'x'\ntitle = '\xff'\n", ": line 2: not UTF-8"),
        (b"x = " + b"[" * 5000, ": not valid TOML: nested too deeply"),
        (b"x = 1" + b"0" * 5000, ": not valid TOML: "),
        (b"", ": name: missing key"),
    ],
)
@pytest.mark.parametrize("load", LOADERS.values())
def test_a_file_that_is_not_a_profile_is_refused(
    load: Load, content: bytes, start: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    assert complaint(load, path).startswith(start)


@pytest.mark.parametrize("load", LOADERS.values())
def test_a_path_that_cannot_be_read_is_named(load: Load, tmp_path: Path) -> None:
    missing = complaint(load, tmp_path / "none.toml")
    assert missing == ": no such file; allowed: a TOML file"
    assert complaint(load, tmp_path).startswith(": cannot be read: ")
    with pytest.raises(ProfileError, match="cannot be read"):
        load("a\0b.toml")


def test_a_path_that_would_break_the_line_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = built_in_text("clusters/dgx-a100").replace('"a100-sxm4-80gb"', r'"/\r"')
    path.write_text(text, encoding="utf-8")
    assert complaint(load_cluster, path) == (r": device: '/\r': no such file; allowed: a TOML file")
    broken = tmp_path / "a\nb.toml"
    broken.write_text("name =", encoding="utf-8")
    for load in LOADERS.values():
        with pytest.raises(ProfileError) as caught:
            load(broken)
        assert len(str(caught.value).splitlines()) == 1


literals = st.one_of(
    st.integers(-(10**25), 10**25).map(str),
    st.floats().map(str),  # inf and nan too: TOML has them
    st.booleans().map(lambda flag: str(flag).lower()),
    st.text(max_size=20).map(json.dumps),
    st.sampled_from(["[]", "{}", "[1]", "{a = 1}", "2021-04-01", "'5 us'", "'5 GB/s'", "''", "!"]),
)


@pytest.mark.parametrize("name", sorted(LOADERS))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), literal=literals)
def test_any_value_at_any_key_loads_or_gives_one_line(
    name: str, data: st.DataObject, literal: str, tmp_path: Path
) -> None:
    lines = built_in_text(name).splitlines()
    spots = [index for index, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    spot = data.draw(st.sampled_from(spots))
    lines[spot] = f"{lines[spot].partition(' = ')[0]} = {literal}"
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    try:
        LOADERS[name](path)
        message = "none"
    except ProfileError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
    assert len(message) < 700


def test_fp8_needs_bf16_beside_it(tmp_path: Path) -> None:
    text = built_in_text(DEVICE).replace('bf16 = "312 TFLOP/s"', 'fp8 = "624 TFLOP/s"')
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("[memory]", FP8_KERNELS + "[memory]"), encoding="utf-8")
    expected = ": peak.fp8: stands without peak.bf16, in which the rest of fp8 training runs"
    assert complaint(load_device, path).startswith(expected)


@pytest.mark.parametrize(
    ("stack", "old", "new"),
    [
        ("megatron-core", '"selective", "full"', '"selective", "selective-op", "full"'),
        ("ddp", "recompute_modes = [", 'recompute_modes = ["selective-op", '),
        ("parameter-server", "recompute_modes = [", 'recompute_modes = ["selective-op", '),
        (
            "torchtitan@0.2",
            'attention_kernels = ["flash"',
            'attention_kernels = ["unfused", "flash"',
        ),
    ],
)
def test_operators_are_chosen_in_pytorchs_own_layers_alone(
    stack: str, old: str, new: str, tmp_path: Path
) -> None:
    text = built_in_text(f"stacks/{stack}")
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    expected = ": recompute_modes: selective-op is of PyTorch's own layers; allowed: with strategy"
    assert complaint(load_stack, path).startswith(expected)
