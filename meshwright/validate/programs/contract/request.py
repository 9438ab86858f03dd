"""Interface of the reference program of a plan, whatever its stack."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from meshwright.hwprofiles import Offload, StackProfile
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import PlanError, ResolvedPlan, TrainingJob
from meshwright.simulator.blocks import BlockShape, rope_cache_bytes
from meshwright.simulator.model import padded_vocab_size
from meshwright.validate.ranks import ByteKind

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0


@dataclass(slots=True)
class Routing:
    """Routing of tokens to experts; it may change between steps.

    Args:
        is_balanced: To all equally often, as counts are predicted; else by their scores.
    """

    is_balanced: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRequest:
    """Request for one rank's program of a plan.

    Args:
        job: Training job.
        plan: Resolved plan.
        stack: Software stack of the program.
        rank: Rank in the process group, which is initialised and has ``plan.world_size`` ranks.
        device: Device of the tensors.
        initialise: Give weights their initial values; fake tensors have none.
        num_microbatches: Microbatches of a step; fewer than the plan's where counts scale.
        dropout: Probability of dropout where the model has it; 0 to compare losses.
        routing: Routing of tokens to experts, if the model has them.
    """

    job: TrainingJob
    plan: ResolvedPlan
    stack: StackProfile
    rank: int
    device: torch.device
    initialise: bool
    num_microbatches: int
    dropout: float = 0.1
    routing: Routing = field(default_factory=Routing)

    @classmethod
    def of(
        cls, saved: SavedPlan, rank: int, device: torch.device, *, initialise: bool
    ) -> "ProgramRequest":
        """Return the request of a rank of *saved*, for whole steps."""
        return cls(
            job=saved.job,
            plan=saved.plan,
            stack=saved.stack,
            rank=rank,
            device=device,
            initialise=initialise,
            num_microbatches=saved.plan.num_microbatches(saved.job),
        )

    @property
    def vocab_size(self) -> int:
        """Rows of the whole embedding, padded as the stack pads."""
        multiple = self.stack.vocabulary_multiple
        return padded_vocab_size(self.job.transformer, self.plan.tp, multiple)

    @property
    def fuses_qkv(self) -> bool:
        """Whether queries, keys and values are one linear layer."""
        return self.stack.fuses_qkv(in_model=self.job.transformer.fused_qkv)

    @property
    def num_rope_elements(self) -> int:
        """Elements in fp32 with as many bytes as the stack's RoPE cos/sin cache."""
        shape = BlockShape.of(self.job, self.plan, self.stack)
        return rope_cache_bytes(shape) // torch.float32.itemsize


class RankProgram(Protocol):
    """One rank's training program, built and ready.

    ``settling_steps`` come before each step is like the next: the first makes optimizer states.
    """

    settling_steps: int

    @property
    def groups(self) -> Mapping[tuple[int, ...], str]:
        """Axis of each process group, by its global ranks; names as in `CollectiveCount`."""

    def run_step(self, step: int) -> list[Tensor]:
        """Run one whole training step, update included.

        Returns:
            The loss of each microbatch (mean over its tokens) in their order, detached, where
            the rank holds the head and is the one of its tensor-parallel group that reports;
            empty elsewhere.
        """

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield tensors that live between and through steps: weights, gradients, states."""


def refuse_offload(plan: ResolvedPlan, *allowed: Offload) -> None:
    """Raise PlanError for an offload that no program of the plan's stack does."""
    if plan.offload not in (Offload.NONE, *allowed):
        names = ", ".join((Offload.NONE, *allowed))
        raise PlanError(f"offload={plan.offload} has no PyTorch program; allowed: {names}")
