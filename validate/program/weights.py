"""Initial weights and batches that do not depend on the layout: every rank can make its part."""

from zlib import crc32

import torch
from torch import Tensor

from simulator import TrainingJob

STANDARD_DEVIATION = 0.02


def initial_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the whole fp32 weight called *name*, such as ``layers.3.qkv.weight``.

    Norm weights are one and biases zero; both with a small noise, so that a rank that updates
    them wrongly is found out.
    """
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    noise = STANDARD_DEVIATION * torch.randn(shape, generator=generator)
    return noise + 1 if name.endswith("norm.weight") else noise


def token_batch(job: TrainingJob, step: int, sequences: range) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of some sequences of a step's global batch.

    Args:
        job: Sequence length and vocabulary.
        step: Which step; each has a batch of its own.
        sequences: Which sequences of the global batch.

    Returns:
        Two ``[sequences, tokens]`` tensors of ids; a target is the token that follows.
    """
    rows = []
    for sequence in sequences:
        generator = torch.Generator().manual_seed(1_000_003 * step + sequence)
        rows.append(torch.randint(job.model.vocab_size, (job.seq_len + 1,), generator=generator))
    ids = torch.stack(rows)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
