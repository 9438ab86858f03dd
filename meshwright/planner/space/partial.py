"""Partial layouts: degrees, pipeline and microbatch of layouts, with the other fields open.

Rules take layouts out here before these are laid out: a rule reads one number for each partial
layout, for each choice of the open fields, or for each setting of the others, and the three are
combined by broadcasting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import StackProfile
from meshwright.planner.space.choices import (
    OF_VIRTUAL_STAGES,
    OPEN,
    PARTIAL,
    Choices,
    Places,
    Settings,
    Values,
)
from meshwright.planner.space.columns import Column, combinations, is_constant, joined_columns
from meshwright.planner.space.limits import COLUMNS, SpaceLimits, launcher_of
from meshwright.planner.space.rules import offered, take_out, told
from meshwright.planner.space.space import Space, slices_shards
from meshwright.planner.space.switches import SWITCHES
from meshwright.simulator import PlanError, TrainingJob
from meshwright.simulator.layout import JOINT_AXES, SEARCHED_FIELDS, model_refusal, stack_gaps

Mask = NDArray[np.bool_]
Cells = tuple[NDArray[np.int64], ...]
"""Indices of layouts: of the partial layout, of the choice and of the setting of each."""
EXPERTS = "ep", "etp"


@dataclass(frozen=True)
class PartialLayouts:
    """Partial layouts with the same choices open.

    Args:
        space: Space of the job, without layouts.
        limits: Limits of the search.
        columns: Numbers of the fields in `PARTIAL`.
        blocks: Number of the choice of degrees, virtual stages, experts and microbatch of each, in
            the order of layouts; within one they differ in schedule and rule for stages.
        choices: Numbers of the fields in `OPEN`, one column for each choice.
    """

    space: Space
    limits: SpaceLimits
    columns: Mapping[str, Column]
    blocks: Column
    choices: Mapping[str, Column]

    def __len__(self) -> int:
        """Return the number of partial layouts."""
        return len(self.blocks)

    @cached_property
    def _places(self) -> tuple[Column, Settings]:
        """Place number of each partial layout and choice, and the settings there."""
        places = Places(self.space.job, self.space.stack, self.limits)
        numbers, known = places.settings(self.columns, self.num_microbatches, self.choices)
        # Layouts that the stack lacks share the first place, which has one setting.
        return np.where(self._lacks_basic, 0, numbers), known

    @cached_property
    def _lacks_basic(self) -> Mask:
        """Mask of partial layouts and choices that the stack lacks, whatever their other fields."""
        own = {name: column[:, None] for name, column in self.columns.items()}
        columns = own | {name: row[None] for name, row in self.choices.items()}
        grid = replace(self.space, columns=columns)
        products = (name for name, axes in JOINT_AXES.items() if {*axes} <= columns.keys())
        names = {*columns, *products}
        lacks = np.zeros((len(self), len(self.choices["zero_stage"])), np.bool_)
        for gap in stack_gaps(self.space.stack, self.space.job):
            if gap.fields <= names:
                lacks |= gap.lacks(grid.column)
        return lacks

    @cached_property
    def grid(self) -> Space:
        """All layouts, as columns over partial layouts, choices and settings."""
        numbers, known = self._places
        columns: dict[str, Column] = {
            name: column[:, None, None] for name, column in self.columns.items()
        }
        columns |= {name: row[None, :, None] for name, row in self.choices.items()}
        codes = dict(zip(SWITCHES, known.codes, strict=True))
        # Columns of one value stay scalars: few fields have settings at all.
        varied = [name for name, row in codes.items() if not is_constant(row)]
        columns |= {name: row[:1].reshape(1, 1, 1) for name, row in codes.items()}
        if varied:
            most = np.arange(known.counts.max())
            at = most % np.maximum(known.counts, 1)[:, None] + known.starts[:, None]
            at = np.minimum(at, known.codes.shape[1] - 1)[numbers]  # of a place without settings
            columns |= {name: codes[name][at] for name in varied}
        return replace(self.space, columns=columns)

    @cached_property
    def exists(self) -> Mask:
        """Mask of cells of partial layouts, choices and settings that are layouts."""
        numbers, known = self._places
        found = (np.arange(known.counts.max()) < known.counts[:, None])[numbers]
        return np.asarray(found & slices_shards(self.grid.column))

    @cached_property
    def num_microbatches(self) -> Column:
        """Number of microbatches of a step."""
        replicas = self.columns["dp"] * self.columns["microbatch_size"]
        return np.asarray(self.space.job.global_batch_size // replicas, np.int64)

    @cached_property
    def _left(self) -> tuple[Mask, Mask, dict[str, int]]:
        counts: dict[str, int] = {}
        known = take_out(self.exists, offered(self.grid), counts)
        return known, take_out(known, told(self.grid), counts), counts

    @property
    def offered(self) -> Mask:
        """Mask of cells that are layouts which the stack runs."""
        return self._left[0]

    @property
    def told(self) -> Mask:
        """Mask of cells that the framework of the search can express, too."""
        return self._left[1]

    @property
    def rejections(self) -> dict[str, int]:
        """Number of layouts that each rule over plans takes out, by reason."""
        return self._left[2]

    def numbers(self, name: str) -> Column:
        """Return the numbers of a field in layouts that can be launched, each at least once."""
        if name in self.columns:
            return self.columns[name][self.told.any(axis=(1, 2))]
        if name in self.choices:
            return self.choices[name][self.told.any(axis=(0, 2))]
        column = self.grid.columns[name]
        if column.size == 1:
            return column.ravel()[: int(self.told.any())]
        return np.asarray(np.broadcast_to(column, self.told.shape)[self.told], np.int64)

    def layouts(self, cells: Cells) -> tuple[dict[str, Column], NDArray[np.int64]]:
        """Return the columns of the layouts at *cells*, and rows of numbers to sort them by."""
        own, choice, setting = cells
        numbers, known = self._places
        at = known.starts[numbers[own, choice]] + setting
        codes = dict(zip(SWITCHES, known.codes, strict=True))
        columns = {name: column[own] for name, column in self.columns.items()}
        columns |= {name: row[choice] for name, row in self.choices.items()}
        columns |= {
            name: np.broadcast_to(row[0], at.shape) if is_constant(row) else row[at]
            for name, row in codes.items()
        }
        return {name: columns[name] for name in COLUMNS}, self._order(own, choice, setting)

    def _order(self, own: Column, choice: Column, setting: Column) -> NDArray[np.int64]:
        """Return rows of numbers that sort layouts in the order of a plan's fields."""
        blocks = self.blocks[own]
        return np.stack([blocks, choice, own - np.searchsorted(self.blocks, blocks), setting])


@dataclass(frozen=True)
class PartialSpace:
    """All layouts of a job on a number of GPUs, grouped by their open choices.

    Args:
        space: Space of the job, without layouts.
        families: Partial layouts with the same choices open.
    """

    space: Space
    families: tuple[PartialLayouts, ...]

    @classmethod
    def of(cls, job: TrainingJob, stack: StackProfile, num_gpus: int, limits: SpaceLimits) -> Self:
        """Return the space that divisibility and *limits* allow.

        Raises:
            PlanError: If *limits* ask for a value that says nothing of the model.
        """
        for field in SEARCHED_FIELDS:
            for value in limits.values(field.name) or ():
                refusal = model_refusal(field, value, job.model)
                if refusal is not None:
                    raise PlanError(refusal)
        launcher, _ = launcher_of(job, stack, limits)
        none = {name: np.zeros(0, np.int64) for name in COLUMNS}
        space = Space(job=job, stack=stack, num_gpus=num_gpus, columns=none, launcher=launcher)
        # Degrees with the same open values are one family, so that rules look at few arrays.
        rows: dict[Values, list[NDArray[np.int64]]] = {}
        choices, block = Choices(job, stack, limits), 0
        for degrees in choices.degrees(num_gpus):
            experts = np.array(choices.experts(degrees), np.int64).reshape(-1, 2).T
            own = rows.setdefault(choices.open_values(degrees), [])
            for vpp, schedules in choices.virtual_stages(degrees):
                found = _rows(degrees, experts, choices.passes(degrees, vpp, schedules), block)
                own.append(found)
                block = int(found[-1, -1]) + 1 if found.size else block
        return cls(space, tuple(_family(space, limits, *each) for each in rows.items()))

    def __len__(self) -> int:
        """Return the number of layouts."""
        return sum(int(np.count_nonzero(each.exists)) for each in self.families)

    def numbers(self, name: str) -> Column:
        """Return the numbers of a field in layouts that can be launched, each at least once."""
        found = [each.numbers(name) for each in self.families]
        return np.concatenate([np.zeros(0, np.int64), *found])

    @property
    def every(self) -> list[Cells]:
        """Cells of all layouts."""
        return [np.nonzero(each.exists) for each in self.families]

    def layouts(self, cells: Sequence[Cells]) -> tuple[Space, Column]:
        """Return the layouts at *cells* of each family in order, and the number of each."""
        found = [each.layouts(own) for each, own in zip(self.families, cells, strict=True)]
        order = np.concatenate([np.zeros((4, 0), np.int64), *(row for _, row in found)], axis=1)
        # Rows of numbers as one number in a mixed radix, so that one sort does.
        numbers = np.zeros(order.shape[1], np.int64)
        for row, most in zip(order, self._most, strict=True):
            numbers = numbers * most + row
        rows = np.argsort(numbers, kind="stable")
        columns = {
            name: joined_columns([each[name] for each, _ in found]) for name in self.space.columns
        }
        return replace(self.space, columns=columns).chosen(rows), numbers[rows]

    @cached_property
    def _most(self) -> tuple[int, int, int, int]:
        """Upper bounds of the numbers by which layouts are sorted."""
        shapes = [each.exists.shape[1:] for each in self.families]
        places = [int(np.bincount(each.blocks).max(initial=0)) for each in self.families]
        choices, settings = (max(each) for each in zip((0, 0), *shapes, strict=True))
        return 0, choices, max(places, default=0), settings

    @property
    def rejections(self) -> dict[str, int]:
        """Number of layouts that each rule over plans takes out, by reason."""
        found: dict[str, int] = {}
        for family in self.families:
            for reason, count in family.rejections.items():
                found[reason] = found.get(reason, 0) + count
        return found


def enumerate_space(
    job: TrainingJob, stack: StackProfile, num_gpus: int, limits: SpaceLimits
) -> Space:
    """Return every layout of *job* on *num_gpus* that divisibility and *limits* allow.

    Raises:
        PlanError: If *limits* ask for a value that says nothing of the model.
    """
    known = PartialSpace.of(job, stack, num_gpus, limits)
    return known.layouts(known.every)[0]


def _rows(
    degrees: Mapping[str, int],
    experts: NDArray[np.int64],
    passes: NDArray[np.int64],
    block: int,
) -> NDArray[np.int64]:
    """Return partial layouts of some *degrees*: numbers of `PARTIAL`, and of their block.

    Args:
        degrees: Degrees of all axes.
        experts: Expert degrees that are combined with them.
        passes: Microbatches, schedules and rules for stages, likewise.
        block: Number of the first block.
    """
    num_experts, num_passes = experts.shape[1], passes.shape[1]
    columns = {name: np.repeat(row, num_passes) for name, row in zip(EXPERTS, experts, strict=True)}
    columns |= {
        name: np.tile(row, num_experts) for name, row in zip(OF_VIRTUAL_STAGES, passes, strict=True)
    }
    sizes = passes[OF_VIRTUAL_STAGES.index("microbatch_size")]
    is_first = np.ones(num_experts * num_passes, np.bool_)
    if num_passes:
        is_first = np.tile(np.append(True, sizes[1:] != sizes[:-1]), num_experts)
    found = np.empty((len(PARTIAL) + 1, len(is_first)), np.int64)
    for row, name in zip(found, PARTIAL, strict=False):
        row[:] = columns.get(name, degrees.get(name, 0))
    found[-1] = block - 1 + is_first.cumsum()
    return found


def _family(
    space: Space, limits: SpaceLimits, values: Values, rows: Sequence[NDArray[np.int64]]
) -> PartialLayouts:
    """Return the partial layouts in *rows*, with *values* of the open fields."""
    empty = np.zeros((len(PARTIAL) + 1, 0), np.int64)
    *columns, blocks = np.concatenate([empty, *rows], axis=1)
    choices = dict(zip(OPEN, combinations(values), strict=True))
    columns_by_name = dict(zip(PARTIAL, columns, strict=True))
    return PartialLayouts(space, limits, columns_by_name, blocks, choices)
