"""Profiles as TOML, in the form that `hwprofiles` reads."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

import tomlkit

from meshwright.hwprofiles import (
    GIBI,
    GIGA,
    MEGA,
    TERA,
    Device,
    DeviceOverheads,
    FlashKernels,
    GemmKernels,
    Link,
    Profile,
    toml_table,
)
from meshwright.planner.reports import write_output

if TYPE_CHECKING:
    from tomlkit.items import Item, Table

FLASH_REMARK = "Causal attention counts half of the full square; backward is 2.5 x forward."
UNUSED_LINK = "loopback"  # a cluster of one device needs a link, but sends nothing over it


def _bytes(size_bytes: int) -> str:
    return f"{size_bytes // GIBI} GiB" if size_bytes % GIBI == 0 else f"{size_bytes} B"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GIGA:.10g} GB/s"


def _time(time_s: float) -> str:
    return f"{time_s * MEGA:.10g} us"


def _rounded(value: float) -> float:
    """Return a number of at most ten digits, an int where it is whole."""
    # Ten digits hide the noise of binary fractions.
    number = float(f"{value:.10g}")
    return int(number) if number.is_integer() else number


def _kernels(kernels: Profile) -> dict[str, object]:
    """Return the unitless keys of a table, without those that are None."""
    values = {name: getattr(kernels, name) for name in type(kernels).model_fields}
    return {
        name: str(value) if isinstance(value, str) else _rounded(value)
        for name, value in values.items()
        if value is not None and not isinstance(value, Profile)
    }


def _gemm(gemm: GemmKernels) -> dict[str, object]:
    """Return the GEMM table, with those of 8-bit and grouped GEMMs where they differ."""
    inner = [*gemm.eight_bit.items(), ("grouped", gemm.grouped)]
    tables = {str(name): _kernels(each) for name, each in inner if each is not None}
    return {**_kernels(gemm), **tables}


def _flash(kernel: FlashKernels) -> dict[str, object]:
    tables = {name: getattr(kernel, name) for name in ("narrow", "narrow_window")}
    inner = {name: _kernels(each) for name, each in tables.items() if each is not None}
    return {**_kernels(kernel), **inner}


def _overheads(overheads: DeviceOverheads) -> dict[str, object]:
    """Return the keys of a table whose values are bytes."""
    sizes = ("usable", "communicator", "product_workspace", "engine_workspace")
    return {
        **{key: _bytes(getattr(overheads, f"{key}_bytes")) for key in sizes},
        "kind": str(overheads.kind),
        "source": overheads.source,
    }


def device_toml(device: Device) -> str:
    """Return the file of *device*."""
    rates = device.peak_flops_per_s.items()
    tables: dict[str, object] = {
        "name": device.name,
        "title": device.title,
        "memory_capacity": _bytes(device.memory_capacity_bytes),
        "memory_bandwidth": _rate(device.memory_bandwidth_bytes_per_s),
        "num_sms": device.num_sms,
        "source": device.source,
        "peak": {key: f"{rate / TERA:.10g} TFLOP/s" for key, rate in rates},
        "gemm": _gemm(device.gemm),
        "memory": _kernels(device.memory),
        "flash": {name: _flash(kernel) for name, kernel in sorted(device.flash.items())},
    }
    if device.convolution is not None:
        tables["convolution"] = _kernels(device.convolution)
    if device.overheads is not None:
        tables["overheads"] = _overheads(device.overheads)
    document = toml_table(tables)
    before_flash = cast("Table", document["memory"])
    before_flash.add(tomlkit.nl())
    before_flash.add(tomlkit.comment(FLASH_REMARK))
    return document.as_string()


def link_toml(link: Link) -> str:
    """Return the file of *link*."""
    tables: dict[str, object] = {
        "name": link.name,
        "title": link.title,
        "bandwidth": f"{_rate(link.bandwidth_bytes_per_s)} per direction",
        "latency": _time(link.latency_s),
        "busbw_fraction": _rounded(link.busbw_fraction),
        "kind": str(link.kind),
        "source": link.source,
    }
    collectives = [
        {
            "op": str(fact.op),
            "num_ranks": fact.num_ranks,
            "busbw": _rate(fact.busbw_bytes_per_s),
            "latency": _time(fact.latency_s),
            "kind": str(fact.kind),
            "source": fact.source,
        }
        for fact in link.collectives
    ]
    if collectives:
        tables["collectives"] = collectives
    return toml_table(tables).as_string()


def cluster_toml(name: str, title: str, device: str, link: str, num_devices: int) -> str:
    """Return the file of one node of *num_devices*; *device* and *link* are names or paths."""
    table = toml_table(
        {
            "name": name,
            "title": title,
            "device": device,
            "devices_per_node": num_devices,
            "intra_node": link,
            "inter_node": link,
            "nics_per_node": 1,
            "num_nodes": 1,
            "source": "one machine, calibrated; its device and link say on what",
        }
    )
    cast("Item", table["inter_node"]).comment("one node: no step goes between nodes")
    return table.as_string()


def write_profiles(
    folder: Path, name: str, *, device: Device | str | None, link: Link | None, num_devices: int
) -> list[Path]:
    """Write what there is of device, link and cluster; return the files.

    Args:
        folder: Folder to write.
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
