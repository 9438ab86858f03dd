"""The programs of PyTorch's own parallelism: DDP, FSDP2, torchtitan's composition."""

from meshwright.validate.programs.pytorch.layout import build_stage
from meshwright.validate.programs.pytorch.loss import LossOfMicrobatch
from meshwright.validate.programs.pytorch.optimizer import (
    clip_gradients,
    local_gradients,
    make_optimizer,
    sum_of_squares,
    trained_tensors,
)
from meshwright.validate.programs.pytorch.parts import plain_parts, tie_embeddings
from meshwright.validate.programs.pytorch.precision import autocast
from meshwright.validate.programs.pytorch.programs import (
    build_ddp,
    build_fully_sharded,
    refuse_unsupported,
)
from meshwright.validate.programs.pytorch.reference import reference_losses

__all__ = [
    "LossOfMicrobatch",
    "autocast",
    "build_ddp",
    "build_fully_sharded",
    "build_stage",
    "clip_gradients",
    "local_gradients",
    "make_optimizer",
    "plain_parts",
    "reference_losses",
    "refuse_unsupported",
    "sum_of_squares",
    "tie_embeddings",
    "trained_tensors",
]
