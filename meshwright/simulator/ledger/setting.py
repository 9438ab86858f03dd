"""Setting of a plan's ledger: its stages, groups and number formats."""

from collections.abc import Mapping
from typing import NamedTuple

from meshwright.hwprofiles import StackProfile
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.layout import Mesh, ResolvedPlan, Stage, TrainingJob, plan_stages
from meshwright.simulator.memory import StateBytes
from meshwright.simulator.replication import (
    Replication,
    StagePart,
    WireBytes,
    reduced_parts,
    replication_of,
    wire_bytes,
)
from meshwright.simulator.schedules import (
    MAX_ACTIVE_STAGES,
    NO_REFETCHES,
    Refetches,
    count_refetches,
)


class StepSetting(NamedTuple):
    """Stages of a plan in model order, and its groups, formats and parts.

    ``parts`` are the parts of each stage whose gradients are reduced in passes.
    """

    job: TrainingJob
    plan: ResolvedPlan
    stages: tuple[Stage, ...]
    shape: BlockShape
    mesh: Mesh
    wire: WireBytes
    state: StateBytes
    replication: Replication
    parts: Mapping[Stage, tuple[StagePart, ...]]

    @classmethod
    def of(
        cls, job: TrainingJob, plan: ResolvedPlan, stack: StackProfile, node_size: int = 1
    ) -> "StepSetting":
        """Return the setting of *plan* on nodes of so many devices."""
        shape = BlockShape.of(job, plan, stack)
        return cls.without_stages(job, plan, shape, node_size).of_stages(
            plan_stages(job.model, plan)
        )

    @classmethod
    def without_stages(
        cls, job: TrainingJob, plan: ResolvedPlan, shape: BlockShape, node_size: int
    ) -> "StepSetting":
        """Return the setting of a plan of that *shape*, without its stages."""
        mesh, stack = Mesh.of(plan, node_size), shape.stack
        return cls(
            job=job,
            plan=plan,
            stages=(),
            shape=shape,
            mesh=mesh,
            wire=wire_bytes(shape, plan),
            state=StateBytes.of(stack, job.precision, plan.gradient_formats, plan.moment_precision),
            replication=replication_of(plan, stack, mesh),
            parts={},
        )

    def of_stages(self, stages: tuple[Stage, ...]) -> "StepSetting":
        """Return the setting with *stages*, of a whole pipeline or of one rank."""
        parts = {
            stage: reduced_parts(self.shape, stage, self.replication)
            for stage in dict.fromkeys(stages)
        }
        return self._replace(stages=stages, parts=parts)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each replica."""
        return self.plan.num_microbatches(self.job)

    @property
    def num_reductions(self) -> int:
        """Number of times that a step reduces a gradient over the replicas."""
        return self.num_microbatches if self.replication.reduces_each_microbatch else 1

    @property
    def gathers_in_pass(self) -> bool:
        """Whether the first forward pass gathers updated parameters, bucket by bucket."""
        replication = self.replication
        overlaps = self.shape.stack.overlap_parameter_gather and not replication.gathers_units
        return overlaps and replication.gather_op is not None and replication.has_replicas

    def rank_stages(self, pp_rank: int) -> tuple[Stage, ...]:
        """Return the virtual stages of a pipeline rank."""
        return self.stages[pp_rank :: self.plan.pp]

    def refetches(self, pp_rank: int) -> list[Refetches]:
        """Return the repeated gathers of each virtual stage of a rank, for want of room."""
        plan, vpp = self.plan, self.plan.num_virtual_stages
        # Few virtual stages all stay gathered from pass to pass.
        if not self.replication.keeps_units or vpp <= MAX_ACTIVE_STAGES:
            return [NO_REFETCHES] * vpp
        schedule = plan.schedule_of(self.shape.stack.pipeline_runtime)
        order = schedule.order(pp_rank, plan.pp, self.num_microbatches, vpp)
        return count_refetches(order, vpp)
