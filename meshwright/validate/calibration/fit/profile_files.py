"""Profiles as TOML, in the form that `hwprofiles` reads."""

from pathlib import Path

from meshwright.hwprofiles import (
    GIBI,
    GIGA,
    MEGA,
    TERA,
    Device,
    DeviceOverheads,
    GemmKernels,
    Link,
    Profile,
    quoted,
    toml_key,
)
from meshwright.planner.reports import write_output

UNUSED_LINK = "loopback"  # a cluster of one device needs a link, but sends nothing over it


def _bytes(size_bytes: int) -> str:
    return f"{size_bytes // GIBI} GiB" if size_bytes % GIBI == 0 else f"{size_bytes} B"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GIGA:.10g} GB/s"


def _time(time_s: float) -> str:
    return f"{time_s * MEGA:.10g} us"


def _kernels(kernels: Profile) -> list[str]:
    """Return the keys of a table whose values have no unit; not those that are not there."""
    values = {name: getattr(kernels, name) for name in type(kernels).model_fields}
    return [
        f"{name} = {quoted(value) if isinstance(value, str) else f'{value:.10g}'}"
        for name, value in values.items()
        if value is not None and not isinstance(value, Profile)
    ]


def _beside(gemm: GemmKernels) -> list[str]:
    """Return the tables of products that differ, where they are there."""
    tables = [*gemm.eight_bit.items(), ("grouped", gemm.grouped)]
    lines: list[str] = []
    for name, kernels in tables:
        if kernels is not None:
            lines += ["", f"[gemm.{name}]", *_kernels(kernels)]
    return lines


def _overheads(overheads: DeviceOverheads) -> list[str]:
    """Return the keys of a table whose values are bytes."""
    sizes = ("usable", "communicator", "product_workspace", "engine_workspace")
    return [
        *(f'{key} = "{_bytes(getattr(overheads, f"{key}_bytes"))}"' for key in sizes),
        f"kind = {quoted(overheads.kind)}",
        f"source = {quoted(overheads.source)}",
    ]


def device_toml(device: Device) -> str:
    """Return the file of *device*."""
    peaks = [
        f'{key} = "{rate / TERA:.10g} TFLOP/s"' for key, rate in device.peak_flops_per_s.items()
    ]
    lines = [
        f"name = {quoted(device.name)}",
        f"title = {quoted(device.title)}",
        f'memory_capacity = "{_bytes(device.memory_capacity_bytes)}"',
        f'memory_bandwidth = "{_rate(device.memory_bandwidth_bytes_per_s)}"',
        f"num_sms = {device.num_sms}",
        f"source = {quoted(device.source)}",
        *("", "[peak]", *peaks),
        *("", "[gemm]", *_kernels(device.gemm)),
        *_beside(device.gemm),
        *("", "[memory]", *_kernels(device.memory)),
        *("", "# Causal attention counts half of the full square; backward is 2.5 x forward."),
        "[flash]",
    ]
    for kernel, facts in sorted(device.flash.items()):
        lines += ["", f"[flash.{toml_key(kernel)}]", *_kernels(facts)]
        for name in ("narrow", "narrow_window"):
            own = getattr(facts, name)
            if own is not None:
                lines += ["", f"[flash.{toml_key(kernel)}.{name}]", *_kernels(own)]
    if device.convolution is not None:
        lines += ["", "[convolution]", *_kernels(device.convolution)]
    if device.overheads is not None:
        lines += ["", "[overheads]", *_overheads(device.overheads)]
    return "\n".join(lines) + "\n"


def link_toml(link: Link) -> str:
    """Return the file of *link*."""
    lines = [
        f"name = {quoted(link.name)}",
        f"title = {quoted(link.title)}",
        f'bandwidth = "{_rate(link.bandwidth_bytes_per_s)} per direction"',
        f'latency = "{_time(link.latency_s)}"',
        f"busbw_fraction = {link.busbw_fraction:.10g}",
        f"kind = {quoted(link.kind)}",
        f"source = {quoted(link.source)}",
    ]
    for fact in link.collectives:
        lines += [
            "",
            "[[collectives]]",
            f"op = {quoted(fact.op)}",
            f"num_ranks = {fact.num_ranks}",
            f'busbw = "{_rate(fact.busbw_bytes_per_s)}"',
            f'latency = "{_time(fact.latency_s)}"',
            f"kind = {quoted(fact.kind)}",
            f"source = {quoted(fact.source)}",
        ]
    return "\n".join(lines) + "\n"


def cluster_toml(name: str, title: str, device: str, link: str, num_devices: int) -> str:
    """Return the file of one node of *num_devices*; *device* and *link* are names or paths."""
    lines = [
        f"name = {quoted(name)}",
        f"title = {quoted(title)}",
        f"device = {quoted(device)}",
        f"devices_per_node = {num_devices}",
        f"intra_node = {quoted(link)}",
        f"inter_node = {quoted(link)} # one node: no step goes between nodes",
        "nics_per_node = 1",
        "num_nodes = 1",
        f"source = {quoted('one machine, calibrated; its device and link say on what')}",
    ]
    return "\n".join(lines) + "\n"


def write_profiles(
    folder: Path, name: str, *, device: Device | str | None, link: Link | None, num_devices: int
) -> list[Path]:
    """Write what there is of device, link and cluster; return the files.

    Args:
        folder: Where they go.
        name: Their names begin with it; the cluster's is it.
        device: A calibrated device, or the name of a built-in one.
        link: A calibrated link.
        num_devices: Of the cluster's node.
    """
    texts: dict[str, str] = {}
    if isinstance(device, Device):
        texts[f"{name}-device.toml"] = device_toml(device)
    if link is not None:
        texts[f"{name}-link.toml"] = link_toml(link)
    if device is not None:
        reference = device if isinstance(device, str) else f"{name}-device.toml"
        wire = UNUSED_LINK if link is None else f"{name}-link.toml"
        count = 1 if link is None else num_devices
        title = f"one machine of {count} x {reference.removesuffix('.toml')}, calibrated"
        texts[f"{name}.toml"] = cluster_toml(name, title, reference, wire, count)
    for file, text in texts.items():
        write_output(folder / file, text)
    return [folder / file for file in texts]
