"""Initial weights and batches that do not depend on the layout: every rank can make its part."""

from zlib import crc32

import torch
from torch import Tensor

from meshwright.simulator import TrainingJob

STANDARD_DEVIATION = 0.02
CPU = torch.device("cpu")


def initial_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the whole fp32 weight called *name*, such as ``layers.3.qkv.weight``.

    Norm weights are one and biases zero; both with a small noise, so that a rank that updates
    them wrongly is found out. They are drawn on the default device: on a GPU other numbers than
    on a processor, the same for every rank and layout, and as fast as it writes.
    """
    device = torch.get_default_device()
    generator = torch.Generator(device).manual_seed(crc32(name.encode()))
    noise = STANDARD_DEVIATION * torch.randn(shape, generator=generator)
    return noise + 1 if name.endswith("norm.weight") else noise


def token_batch(
    job: TrainingJob, step: int, sequences: range, device: torch.device = CPU
) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of some sequences of a step's global batch.

    Args:
        job: Sequence length and vocabulary.
        step: Step number; each step has its own batch.
        sequences: Indices of sequences in the global batch.
        device: Device of the result; the copy to a GPU does not wait for the GPU's work.

    Returns:
        Two ``[sequences, tokens]`` tensors of ids; a target is the token that follows.
    """
    rows, vocab_size = [], job.transformer.vocab_size
    for sequence in sequences:
        # A stride beyond any global batch: no two steps share a seed.
        generator = torch.Generator().manual_seed(1_000_003 * step + sequence)
        rows.append(torch.randint(vocab_size, (job.seq_len + 1,), generator=generator))
    ids = torch.stack(rows)
    if device.type == "cuda":  # from other memory a copy waits for all that the device has to do
        ids = ids.pin_memory()
    ids = ids.to(device, non_blocking=True)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
