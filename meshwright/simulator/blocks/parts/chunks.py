"""Chunked attention (Llama 4): each chunk of a sequence attends to itself alone.

As NVIDIA has Llama 4 on Megatron-Core, which knows no chunks itself: `Llama4SelfAttention` of
NeMo 2.5 (nemo/collections/llm/gpt/model/llama4_utils.py), the same in Megatron Bridge.  Its kernels
see more and shorter sequences; the last chunk is padded with zeros.
"""

from typing import NamedTuple

from meshwright.simulator.graph import Block, Dim, Gradient, Tensor, rounded_up
from meshwright.simulator.model import WINDOWED_LAYERS, BlockKind, ModelSpec


def chunk_tokens(model: ModelSpec, kind: BlockKind, seq_len: int) -> int:
    """Return the chunk length in tokens of a layer's attention; 0 without chunks.

    >>> from meshwright.simulator import load_model
    >>> llama4 = load_model("llama4-maverick")
    >>> [chunk_tokens(llama4, "windowed layer", each) for each in (8192, 32768)]
    [0, 8192]
    """
    is_cut = model.chunked_window and kind in WINDOWED_LAYERS and model.window < seq_len
    return model.window if is_cut else 0


class Chunks(NamedTuple):
    """Dims of sequences and of their chunks.

    Args:
        tokens: Tokens of a sequence.
        batch: Sequences.
        size: Tokens of a chunk.
        rows: Chunks of all sequences.
        whole: Tokens of a sequence with padding.
        fills_up: Whether the last chunk is padded.
    """

    tokens: Dim
    batch: Dim
    size: Dim
    rows: Dim
    whole: Dim
    fills_up: bool

    @classmethod
    def of(cls, tokens: Dim, batch: Dim, size: int, *, fills_up: bool) -> "Chunks":
        """Return the dims of sequences of *tokens* in chunks of *size*."""
        whole = rounded_up(tokens.size, size)
        return cls(
            tokens=tokens,
            batch=batch,
            size=Dim("tokens of a chunk", size),
            rows=Dim("chunks", batch.size * (whole // size)),
            whole=Dim("tokens of all chunks", whole),
            fills_up=fills_up,
        )

    def cut(self, block: Block, x: Tensor) -> Tensor:
        """Return *x* in chunks: a copy, since a chunk's tokens become contiguous.

        A local variable keeps *x* until the copy is there; its gradient is copied back.
        """
        before, width = x, x.dims[-1]
        if self.fills_up:
            padding = Dim("added tokens", self.whole.size - self.tokens.size)
            zeros = x.like("zeros", dims=(padding, self.batch, width))
            padded = x.like(f"{x.name} filled up", dims=(self.whole, self.batch, width))
            gradient, work = Gradient(x, passes_through=True, at=x.at), block.traffic(x, padded)
            x = block.add([x], [padded], [gradient], work, scratch=((zeros,), ()))
        out = x.like(f"{before.name} in chunks", dims=(self.size, self.rows, width))
        work = block.traffic(x, out)
        out = block.add([x], [out], [Gradient(x, (), (work,), at=x.at)], work)
        block.hold(before)
        return out

    def joined(self, block: Block, x: Tensor) -> Tensor:
        """Return chunks *x* as sequences again: a copy, sliced to the tokens without padding.

        Backward of the slice allocates a gradient of the whole, even where nothing is cut off.
        """
        whole = x.like(f"{x.name} in order", dims=(self.whole, self.batch, x.dims[-1]))
        work = block.traffic(x, whole)
        whole = block.add([x], [whole], [Gradient(x, (), (work,), at=x.at)], work)
        unpadded = (self.tokens, self.batch, x.dims[-1])
        out = whole.like(x.name, dims=unpadded, base=whole.storage)
        return block.add([whole], [out], [Gradient(whole, (), (work,), at=whole.at)])
