"""Sequences that are cut into chunks for attention, each a sequence of its own (Llama 4).

As NVIDIA has Llama 4 on Megatron-Core, which knows no chunks itself: `Llama4SelfAttention` of
NeMo 2.5 (nemo/collections/llm/gpt/model/llama4_utils.py), the same in Megatron Bridge.  Its kernels
are those of shorter sequences, and more of them; a last chunk is filled up with zeros.
"""

from typing import NamedTuple

from meshwright.simulator.graph import Block, Dim, Gradient, Tensor, rounded_up
from meshwright.simulator.model import WINDOWED_LAYERS, BlockKind, ModelSpec


def chunk_tokens(model: ModelSpec, kind: BlockKind, seq_len: int) -> int:
    """Return the tokens of the chunks that a layer of a kind cuts sequences into; 0 if it does not.

    >>> from meshwright.simulator import load_model
    >>> llama4 = load_model("llama4-maverick")
    >>> [chunk_tokens(llama4, "windowed layer", each) for each in (8192, 32768)]
    [0, 8192]
    """
    is_cut = model.chunked_window and kind in WINDOWED_LAYERS and model.window < seq_len
    return model.window if is_cut else 0


class Chunks(NamedTuple):
    """Dims of sequences that are cut, and of what they are cut into.

    Args:
        tokens: Of a sequence.
        batch: Sequences.
        size: Tokens of a chunk.
        rows: Chunks of all sequences.
        whole: Tokens of a sequence's chunks.
        fills_up: These are more than a sequence has.
    """

    tokens: Dim
    batch: Dim
    size: Dim
    rows: Dim
    whole: Dim
    fills_up: bool

    @classmethod
    def of(cls, tokens: Dim, batch: Dim, size: int, *, fills_up: bool) -> "Chunks":
        """Return the dims of sequences of *tokens* in chunks of a *size*."""
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
        """Return *x* with chunks for sequences: a copy, since one chunk's tokens lie together.

        What it gets has a name until the copy is there; its gradient is put together by a copy.
        """
        given, width = x, x.dims[-1]
        if self.fills_up:
            added = Dim("added tokens", self.whole.size - self.tokens.size)
            zeros = x.like("zeros", dims=(added, self.batch, width))
            more = x.like(f"{x.name} filled up", dims=(self.whole, self.batch, width))
            back, work = Gradient(x, passes_through=True, at=x.at), block.traffic(x, more)
            x = block.add([x], [more], [back], work, scratch=((zeros,), ()))
        out = x.like(f"{given.name} in chunks", dims=(self.size, self.rows, width))
        work = block.traffic(x, out)
        out = block.add([x], [out], [Gradient(x, (), (work,), at=x.at)], work)
        block.hold(given)
        return out

    def joined(self, block: Block, x: Tensor) -> Tensor:
        """Return *x* in the order of tokens: a copy, of which those that were there are a slice.

        The gradient of a slice is copied into one of the whole, even where it is all of it.
        """
        whole = x.like(f"{x.name} in order", dims=(self.whole, self.batch, x.dims[-1]))
        work = block.traffic(x, whole)
        whole = block.add([x], [whole], [Gradient(x, (), (work,), at=x.at)], work)
        own = (self.tokens, self.batch, x.dims[-1])
        out = whole.like(x.name, dims=own, base=whole.storage)
        return block.add([whole], [out], [Gradient(whole, (), (work,), at=whole.at)])
