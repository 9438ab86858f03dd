"""Runners of a step's microbatches through a rank's stages: a loop, or a pipeline."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining import _utils as pipelining_parts

from meshwright.simulator import PlanError
from meshwright.validate.programs.contract import ProgramRequest
from meshwright.validate.programs.pytorch.layout import RankLayout
from meshwright.validate.programs.pytorch.loss import LossOfMicrobatch
from meshwright.validate.programs.pytorch.precision import DTYPES

SINGLE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTIPLE_STAGES = {"interleaved": ScheduleInterleaved1F1B}
SCHEDULES = (*SINGLE_STAGE, *MULTIPLE_STAGES)
# A stage's output is checked against its example. Of logits that are split over tensor-parallel
# ranks releases with this class compare the rank's part, those before it (to 2.11) the whole.
CHECKS_PARTS = hasattr(pipelining_parts, "InferenceMode")


class Runner(Protocol):
    """Computes the gradients of a step."""

    def __call__(self, tokens: Tensor, targets: Tensor) -> None:
        """Run forward and backward of all microbatches of a replica's share of the batch."""


def microbatch_loop(
    model: nn.Module, request: ProgramRequest, loss: LossOfMicrobatch, *, reduces_each: bool
) -> Runner:
    """Return the runner of one microbatch after the other through a module that FSDP2 may shard.

    Args:
        model: The whole model.
        request: Number and size of the microbatches.
        loss: Of a microbatch.
        reduces_each: Reduce gradients, and keep them as shards, after every microbatch; if not,
            the whole gradients of a unit are kept and summed until the last one.
    """

    def run(tokens: Tensor, targets: Tensor) -> None:
        last = request.num_microbatches - 1
        batches = zip(*(each.chunk(last + 1) for each in (tokens, targets)), strict=True)
        for index, (ids, labels) in enumerate(batches):
            if isinstance(model, FSDPModule):
                # Without a sync FSDP2 keeps unsharded gradients, and adds to them.
                model.set_requires_gradient_sync(reduces_each or index == last)
            loss(model(ids), labels).backward()

    return run


def pipeline(
    stages: Sequence[tuple[int, nn.Module]],
    request: ProgramRequest,
    layout: RankLayout,
    loss: LossOfMicrobatch,
) -> Runner:
    """Return the runner of the microbatches through `torch.distributed.pipelining`.

    Gradients are reduced after the last microbatch. Outputs of the last stage are not kept, but
    PyTorch holds a buffer for each message of a step, not one for each microbatch in flight.

    Args:
        stages: Virtual stages of this rank with their indices.
        request: Schedule, number and size of microbatches.
        layout: The pipeline's group.
        loss: Of a microbatch.
    """
    parts = [_pipeline_stage(index, stage, request, layout) for index, stage in stages]
    schedule = _schedule(parts, request, loss)
    is_first, is_last = parts[0].is_first, parts[-1].is_last

    def run(tokens: Tensor, targets: Tensor) -> None:
        schedule(
            *((tokens,) if is_first else ()),
            target=targets if is_last else None,
            return_outputs=False,
        )

    return run


def _schedule(
    stages: Sequence[PipelineStage], request: ProgramRequest, loss: LossOfMicrobatch
) -> Callable[..., object]:
    name, count = request.plan.schedule, request.num_microbatches
    # The loss is a microbatch's share already.
    if name in SINGLE_STAGE and len(stages) == 1:
        return SINGLE_STAGE[name](stages[0], count, loss_fn=loss, scale_grads=False).step
    if name in MULTIPLE_STAGES:
        return MULTIPLE_STAGES[name](list(stages), count, loss_fn=loss, scale_grads=False).step
    raise PlanError(
        f"schedule={name} with {len(stages)} virtual stages a rank has no PyTorch program; "
        f"allowed: {', '.join(SINGLE_STAGE)} with 1, {', '.join(MULTIPLE_STAGES)}"
    )


def _pipeline_stage(
    index: int, stage: nn.Module, request: ProgramRequest, layout: RankLayout
) -> PipelineStage:
    """Return *stage* with the shapes of its inputs and outputs, so that none are sent ahead."""
    plan, job = request.plan, request.job
    size, tokens = plan.microbatch_size, job.seq_len // plan.cp
    dtype = DTYPES[job.precision]
    local_tokens = tokens // plan.tp if plan.sequence_parallel else tokens
    vocabulary = _own_rows(request, layout) if CHECKS_PARTS else request.vocab_size
    hidden = _example((size, local_tokens, job.transformer.hidden_size), dtype)
    ids = torch.empty((size, tokens), dtype=torch.long, device="meta")
    logits = _example((size, tokens, vocabulary), dtype)
    return PipelineStage(
        stage,
        index,
        plan.num_stages,
        request.device,
        input_args=(ids if index == 0 else hidden,),
        output_args=(logits if index == plan.num_stages - 1 else hidden,),
        group=layout.mesh["pp"].get_group(),
    )


def _own_rows(request: ProgramRequest, layout: RankLayout) -> int:
    """Return this rank's rows of the output matrix: DTensor cuts pieces of the first one's size."""
    rows = -(-request.vocab_size // request.plan.tp)
    return min(rows, request.vocab_size - layout.coordinate("tp") * rows)


def _example(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
