"""When nothing fits: the layout that misses by least, and what would help."""

from dataclasses import replace

import numpy as np

from meshwright.hwprofiles import Strategy, format_bytes
from meshwright.planner.footprint import device_bytes_column, peak_bytes
from meshwright.planner.search.result import Nearest
from meshwright.planner.space import (
    COLUMNS,
    Candidates,
    Column,
    ShapeTable,
    Space,
    SpaceLimits,
    apply_rules,
    enumerate_space,
)
from meshwright.simulator.blocks import BlockTable

GPU_MULTIPLES = (2, 4, 8, 16, 32, 64)


def find_nearest(candidates: Candidates, limits: SpaceLimits, limit_bytes: int) -> Nearest | None:
    """Return the layout that needs the least memory of those only memory rules out.

    Returns:
        None where there is no such layout.
    """
    unlimited = replace(candidates, memory_limit_bytes=np.iinfo(np.int64).max)
    left, _ = apply_rules(unlimited)
    indices = np.flatnonzero(left)
    if not len(indices):
        return None
    device_bytes = candidates.device_bytes[indices]
    index = int(indices[np.argmin(device_bytes)])
    lacks_bytes = int(candidates.device_bytes[index]) - limit_bytes
    return Nearest(
        plan=candidates.space.plan(index),
        lacks_bytes=lacks_bytes,
        changes=_changes(candidates, limits, index, lacks_bytes),
    )


def _changes(
    candidates: Candidates, limits: SpaceLimits, index: int, lacks_bytes: int
) -> tuple[str, ...]:
    space = candidates.space
    changes = [f"{format_bytes(lacks_bytes)} more memory a device"]
    if space.stack.strategy is not Strategy.MESH:
        return tuple(changes)
    free = SpaceLimits(attention=limits.attention, stages=limits.stages)
    if not limits.is_free:
        changes += _freed(candidates, free, space.rows[index])
    if len(changes) == 1:
        changes += _more_gpus(candidates, free)
    return tuple(changes)


def _fitting(candidates: Candidates, limits: SpaceLimits, num_gpus: int) -> tuple[Space, Column]:
    """Return a space and the layouts of it that every rule leaves."""
    old = candidates.space
    space = enumerate_space(old.job, old.stack, num_gpus, limits)
    peaks = peak_bytes(space, ShapeTable.of(space), BlockTable())
    device_bytes = device_bytes_column(peaks, old.stack)
    left, _ = apply_rules(replace(candidates, space=space, device_bytes=device_bytes))
    return space, np.flatnonzero(left)


def _freed(candidates: Candidates, free: SpaceLimits, row: Column) -> list[str]:
    """Say which pinned axes to free: the fitting layout that differs in the fewest."""
    space, fitting = _fitting(candidates, free, candidates.space.num_gpus)
    if not len(fitting):
        return []
    index = int(fitting[np.argmin((space.rows[fitting] != row).sum(axis=1))])
    plan = space.plan(index)
    differing = [
        f"{name}={getattr(plan, name)}"
        for name, old, new in zip(COLUMNS, row, space.rows[index], strict=True)
        if old != new
    ]
    return [f"with {', '.join(differing)} it fits"]


def _more_gpus(candidates: Candidates, free: SpaceLimits) -> list[str]:
    for multiple in GPU_MULTIPLES:
        num_gpus = multiple * candidates.space.num_gpus
        nodes = -(-num_gpus // candidates.cluster.devices_per_node)
        if candidates.cluster.num_nodes is not None and nodes > candidates.cluster.num_nodes:
            break
        _, fitting = _fitting(candidates, free, num_gpus)
        if len(fitting):
            return [f"{num_gpus} GPUs hold it"]
    return []
