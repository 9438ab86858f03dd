"""Shape inference of stages of `torch.distributed.pipelining`."""
# ruff: noqa: SLF001 - private interfaces of torch

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch


def pipeline_patches(*, asks: bool = False) -> Iterator[AbstractContextManager[object]]:
    """Yield the patch that skips the vote of pipeline stages on static or dynamic shapes.

    Args:
        asks: Whether stages that were not told them ask the others, who must be there; else it is
            an error.
    """
    from torch.distributed.pipelining import schedules  # noqa: PLC0415 - slow to import

    base = schedules._PipelineSchedule
    if hasattr(base, "_warmup_p2p"):
        yield patch.object(base, "_warmup_p2p", _without_vote(asks=asks))


def _without_vote(*, asks: bool) -> Callable[..., None]:
    from torch.distributed.pipelining._utils import InferenceMode  # noqa: PLC0415 - recent releases

    def vote(
        _schedule: object,
        stages: Sequence[Any],
        has_backward: bool,  # noqa: FBT001 - the signature is torch's
        _p2p_done: object,
    ) -> None:
        for stage in stages:
            is_told = not InferenceMode.needs_dynamic(stage._user_meta, has_backward)
            if not (is_told or asks):
                raise ValueError(
                    f"pipeline stage {stage.stage_index} of the fake cluster needs input_args and "
                    "output_args, those that get gradients with requires_grad"
                )
            stage._inference_mode = InferenceMode.STATIC if is_told else InferenceMode.DYNAMIC

    return vote
