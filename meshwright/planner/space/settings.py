"""Layouts with every setting of their switches, as columns."""

from collections.abc import Callable, Iterable, Sequence
from math import gcd

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import StackProfile
from meshwright.planner.space.columns import Column, chosen_rows, distinct
from meshwright.planner.space.limits import COLUMNS, SpaceLimits
from meshwright.planner.space.pipelines import stage_layers
from meshwright.planner.space.switches import (
    ACTIVATIONS,
    BASIC,
    SWITCHES,
    USUAL,
    Place,
    Setting,
    Wanted,
    settings,
)
from meshwright.simulator import TrainingJob
from meshwright.simulator.layout import JOINT_AXES, PLAN_FIELDS, stack_gaps

PASSES = (
    *("recompute_modules", "recompute_layers", "recompute_method", "microbatch_group_size"),
    *ACTIVATIONS,
)
"""Switches of what passes run, which are searched where they are asked for."""
READ_BY = {
    "recompute": {"recompute_modules", "recompute_layers", "expert_overlap", *ACTIVATIONS},
    "schedule": {"microbatch_group_size", "expert_overlap"},
    "num_microbatches": {"microbatch_group_size"},
    "most_layers": {"recompute_layers"},
    "common_layers": {"recompute_layers"},
    "ep": {"expert_overlap"},
}
"""Of some numbers of a `Place`, the switches whose settings depend on them."""


def with_switches(
    job: TrainingJob, stack: StackProfile, limits: SpaceLimits, basic: NDArray[np.int64]
) -> dict[str, Column]:
    """Return *basic* layouts with every setting of the switches that has an effect there.

    Args:
        job: What is trained.
        stack: With what software.
        limits: What is asked for.
        basic: Numbers of the other fields: ``[fields, layouts]``.

    Returns:
        Those of each field, by its name, in the order of `COLUMNS`.
    """
    wanted = _wanted(limits)
    places = _places(job, stack, wanted, dict(zip(BASIC, basic, strict=True)))
    first, member = distinct(places)
    tables = [
        _codes(settings(job, stack, Place(*row), wanted))
        for row in np.stack(places, axis=1)[first].tolist()
    ]
    sizes = np.array([table.shape[1] for table in tables], np.int64)
    num_settings = sizes[member]
    family = np.repeat(np.arange(len(member)), num_settings)
    before = np.cumsum(num_settings) - num_settings
    number = np.arange(len(family)) - before[family] + (np.cumsum(sizes) - sizes)[member[family]]
    switches = np.concatenate([*tables, _codes([])], axis=1)
    columns = {
        name: chosen_rows(column, rows)
        for fields, known, rows in ((BASIC, basic, family), (SWITCHES, switches, number))
        for name, column in zip(fields, known, strict=True)
    }
    return {name: columns[name] for name in COLUMNS}


def _wanted(limits: SpaceLimits) -> Wanted:
    """Return the values of switches that are asked for; a largest number is one of a range."""
    wanted = {name: values for name in SWITCHES if (values := limits.values(name)) is not None}
    for name in SWITCHES:
        most = limits.most(name) if PLAN_FIELDS[name].declaration.is_limited else None
        if most is not None and name not in wanted:
            wanted[name] = (None, *range(1, most + 1))
    zero_stages = limits.values("zero_stage")
    return wanted if zero_stages is None else wanted | {"zero_stage": zero_stages}


def _places(
    job: TrainingJob, stack: StackProfile, wanted: Wanted, columns: dict[str, Column]
) -> list[Column]:
    """Return the numbers of the `Place` of each layout of *columns*."""
    joint = {name: names for name, names in JOINT_AXES.items() if {*names} <= columns.keys()}
    columns |= {name: product_of(columns[each] for each in names) for name, names in joint.items()}
    count = job.global_batch_size // columns["dp"] // columns["microbatch_size"]
    lacks = np.zeros(len(count), np.bool_)
    for gap in stack_gaps(stack, job):
        if gap.fields <= columns.keys():
            lacks |= gap.lacks(columns.__getitem__)
    names = ("pp", "cp", "dp", "zero_stage")
    places = [*(columns[name] for name in names), count > 1, lacks]
    # At its habit a switch has an effect everywhere, or nowhere.
    asked = {name for name in SWITCHES if wanted.get(name, (USUAL[name],)) != (USUAL[name],)}
    known = columns | {"num_microbatches": count}
    if "recompute_layers" in asked:
        known["most_layers"] = _of_stages(job, columns, max)
        known["common_layers"] = _of_stages(job, columns, gcd)
    nothing = np.broadcast_to(np.int64(0), count.shape)
    places += [known[name] if asked & reading else nothing for name, reading in READ_BY.items()]
    return [np.asarray(each, np.int64) for each in places]


def _of_stages(job: TrainingJob, columns: dict[str, Column], number: Callable[..., int]) -> Column:
    """Return a *number* of the layers of each layout's virtual stages."""
    known = [columns[name] for name in ("pp", "num_virtual_stages", "stages")]
    first, member = distinct(known)
    rule = PLAN_FIELDS["stages"].value
    found = [
        number(*stage_layers(job, pp * vpp, rule(code)), 0)
        for pp, vpp, code in np.stack(known, axis=1)[first].tolist()
    ]
    return np.array(found, np.int64)[member]


def _codes(known: Sequence[Setting]) -> NDArray[np.int64]:
    """Return settings as columns of numbers, a row a switch."""
    fields = [PLAN_FIELDS[name] for name in SWITCHES]
    rows = [[field.code(each[field.name]) for each in known] for field in fields]
    return np.array(rows, np.int64).reshape(len(SWITCHES), -1)


def product_of(columns: Iterable[Column]) -> Column:
    """Return the product of *columns*, number by number."""
    return np.asarray(np.prod([*columns], axis=0), np.int64)
