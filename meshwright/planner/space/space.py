"""Layouts of a job, as columns of integers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import chain
from operator import mul
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from meshwright.hwprofiles import StackProfile
from meshwright.planner.space.columns import Column, chosen_rows, distinct
from meshwright.planner.space.limits import Launcher
from meshwright.planner.space.pipelines import Pipeline, block_kinds, stage_layers
from meshwright.planner.space.switches import SWITCHES
from meshwright.simulator import ResolvedPlan, Schedule, TrainingJob
from meshwright.simulator.layout import (
    DEFAULT_CHECKPOINTS,
    DP_CP,
    EXPERT_SHARDS,
    JOINT_AXES,
    NO_OFFLOAD,
    PLAN_FIELDS,
    SEARCHED_FIELDS,
    SHARDS,
    Stage,
    plan_stages,
    resolve,
)
from meshwright.simulator.model import BlockKind

# Fields that decide the stages of a pipeline, and the passes of its ranks.
OF_PIPELINES = (
    "pp",
    "num_virtual_stages",
    "schedule",
    "microbatch_group_size",
    "stages",
    "recompute_layers",
    "recompute_method",
    "expert_overlap",
    "offload_layers",
    "offload_modules",
)


@dataclass(frozen=True)
class Shared:
    """Stages and pipelines of a job's layouts, computed once for all spaces derived from one."""

    stages: dict[tuple[int, ...], tuple[int, Schedule, tuple[Stage, ...]]] = field(
        default_factory=dict
    )
    pipelines: dict[tuple[object, ...], Pipeline] = field(default_factory=dict)


@dataclass(frozen=True)
class Space:
    """Layouts of a job on a number of GPUs, with their pipelines.

    ``columns`` has the number of each field in every layout; of a field with few values that is the
    index of one (`PlanField.choices`).
    """

    job: TrainingJob
    stack: StackProfile
    num_gpus: int
    columns: Mapping[str, Column]
    launcher: Launcher | None = None
    known: dict[object, Shared] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        """Return the number of layouts."""
        return len(next(iter(self.columns.values())))

    def chosen(self, rows: Column) -> Self:
        """Return the space of the layouts in *rows*, which may repeat."""
        columns = {name: chosen_rows(column, rows) for name, column in self.columns.items()}
        return replace(self, columns=columns)

    def column(self, name: str) -> Column:
        """Return the numbers of one field, or of a product of degrees."""
        if name in JOINT_AXES:
            return self._joint[name]
        if name in {SHARDS, EXPERT_SHARDS}:
            return self.num_shards if name == SHARDS else self.expert_shards
        if name not in self.columns:  # a field that no search varies, which a stack's rule may read
            definition = PLAN_FIELDS[name]
            shape = next(iter(self.columns.values())).shape
            return np.broadcast_to(np.int64(definition.code(definition.default)), shape)
        return self.columns[name]

    @cached_property
    def _joint(self) -> dict[str, Column]:
        return {name: _product(map(self.column, axes)) for name, axes in JOINT_AXES.items()}

    @cached_property
    def num_microbatches(self) -> Column:
        """Number of microbatches of each layout's data-parallel ranks."""
        sequences = self.job.global_batch_size // self.column("dp")
        return sequences // self.column("microbatch_size")

    @cached_property
    def num_shards(self) -> Column:
        """Ranks of a shard group in each layout; see `ResolvedPlan.num_shards`."""
        shards = self.column("dp_shard")
        return self.column("cp") * np.where(shards, shards, self.column("dp"))

    @cached_property
    def expert_shards(self) -> Column:
        """Ranks that shard the optimizer states of the same routed experts, in each layout."""
        tp, etp, ep = (self.column(name) for name in ("tp", "etp", "ep"))
        ranks = tp * self.num_shards // (ep * np.where(etp, etp, tp))
        return np.where(self.column("zero_stage"), ranks, 1)

    @cached_property
    def sharing(self) -> Column:
        """Number of each layout's setting of the other fields, whatever its shard groups' size."""
        has_sets = np.asarray(self.num_shards < self.column(DP_CP), np.int64)
        others = [self.column(name) for name in SWITCHES if name != "dp_shard"]
        return distinct([has_sets, *others])[1]

    @cached_property
    def _pipeline_columns(self) -> tuple[Column, Column]:
        return distinct([self.column(name) for name in OF_PIPELINES])

    @property
    def pipeline_numbers(self) -> Column:
        """Index in `pipelines` of each layout's."""
        return self._pipeline_columns[1]

    @property
    def shared(self) -> Shared:
        """Stages and pipelines of this job and stack: a space derived from it may have others."""
        return self.known.setdefault((self.job, self.stack), Shared())

    @cached_property
    def pipelines(self) -> list[Pipeline]:
        """Distinct pipelines of the layouts."""
        for key, laid in self._stages.items():
            if (key, self.kinds) not in self.shared.pipelines:
                self.shared.pipelines[key, self.kinds] = Pipeline(*laid, self.kinds)
        return [self.shared.pipelines[key, self.kinds] for key in self._stages]

    @cached_property
    def _stages(self) -> dict[tuple[int, ...], tuple[int, Schedule, tuple[Stage, ...]]]:
        """Ranks, schedule and virtual stages of each distinct pipeline, by its numbers."""
        first, laid_out = self._pipeline_columns[0].tolist(), self.shared.stages
        columns = [self.column(name)[first].tolist() for name in OF_PIPELINES]
        keys = list(zip(*columns, strict=True)) if first else []
        new = [index for index, key in zip(first, keys, strict=True) if key not in laid_out]
        plans = iter(self.plans(new))
        for key in keys:
            if key not in laid_out:
                plan = next(plans)
                schedule = plan.schedule_of(self.stack.pipeline_runtime)
                laid_out[key] = plan.pp, schedule, plan_stages(self.job.model, plan)
        return {key: laid_out[key] for key in keys}

    @cached_property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Kinds of blocks that passes go through, in column order."""
        all_stages = [stages for _, _, stages in self._stages.values()]
        derived = any(
            stages[0].checkpoints != DEFAULT_CHECKPOINTS
            or stages[0].offload != NO_OFFLOAD
            or stages[-1].copies
            for stages in all_stages
        )
        return block_kinds(self.job.model, chain(*all_stages) if derived else ())

    def plan(self, index: int) -> ResolvedPlan:
        """Return layout *index* as a plan."""
        return self.plans([index])[0]

    def plans(self, indices: Sequence[int]) -> list[ResolvedPlan]:
        """Return layouts as resolved plans."""
        rules = PLAN_FIELDS["stages"].values(self.column("stages")[indices].tolist())
        return [
            resolve(self.job, None, self.stack, self._options(values, rule))
            for values, rule in zip(self._values(indices), rules, strict=True)
        ]

    def plans_without_stages(self, indices: Sequence[int]) -> list[ResolvedPlan]:
        """Return layouts as plans without the layers of their stages."""
        return [ResolvedPlan.of(values) for values in self._values(indices)]

    def _options(self, values: Mapping[str, object], rule: object) -> dict[str, object]:
        """Return a layout's fields as user options; one rank has no ZeRO stage the stack lacks."""
        pp, vpp = (cast("int", values[name]) for name in ("pp", "num_virtual_stages"))
        options = {**values, "stages": stage_layers(self.job, pp * vpp, rule)}
        if (
            values["dp"] == values["cp"] == 1
            and options["zero_stage"] not in self.stack.zero_stages
        ):
            del options["zero_stage"]
        return options

    def _values(self, indices: Sequence[int]) -> list[dict[str, object]]:
        """Return the fields of layouts but for their stages; None is the stack's default."""
        fields = [field for field in SEARCHED_FIELDS if field.name != "stages"]
        names = [field.name for field in fields]
        columns = [field.values(self.columns[field.name][indices].tolist()) for field in fields]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def slices_shards(column: Callable[[str], Column]) -> NDArray[np.bool_]:
    """Return the mask of layouts whose expert ranks are slices of a shard group."""
    tp, etp, ep, shards = (column(name) for name in ("tp", "etp", "ep", SHARDS))
    is_whole = tp * shards % (ep * np.where(etp, etp, tp)) == 0
    return np.asarray((ep == 1) | is_whole)


def _product(columns: Iterable[Column]) -> Column:
    """Return the product of *columns*, number by number."""
    return reduce(mul, columns)
