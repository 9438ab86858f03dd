"""Bytes of the tensors that live for a moment in a layer's passes."""

from typing import NamedTuple

from meshwright.hwprofiles import Attention
from meshwright.simulator.blocks import BlockShape


class Widths(NamedTuple):
    """Bytes of the tensors of a layer's passes on one rank.

    ``local`` is an activation outside tensor-parallel regions, ``whole`` one with all tokens,
    ``gathered`` a copy with all tokens where the rank has its own only, ``regathered`` the same
    where backward gathers again; ``repeated`` are keys and values that are copied for more heads.
    """

    local: int
    whole: int
    gathered: int
    regathered: int
    core: int
    key_value: int
    mlp_in: int
    mlp_out: int
    scores: int
    score_mask: int
    repeated: int

    @classmethod
    def of(cls, shape: BlockShape) -> "Widths":
        """Return the widths of *shape*."""
        element = shape.num_tokens * shape.element_bytes
        whole = element * shape.model.hidden_size
        num_scores = 0
        if shape.attention is Attention.UNFUSED:
            num_scores = shape.num_local_heads * shape.microbatch_size * shape.seq_len**2
        return cls(
            local=shape.message_bytes,
            whole=whole,
            gathered=whole if shape.sequence_parallel else 0,
            regathered=0 if shape.stack.keeps_gathered_inputs else whole * shape.sequence_parallel,
            core=element * shape.local_width,
            key_value=element * shape.local_kv_width,
            mlp_in=element * shape.mlp_in_width,
            mlp_out=element * shape.local_ffn_width,
            scores=num_scores * shape.element_bytes,
            score_mask=num_scores if shape.model.dropout else 0,
            repeated=2 * element * shape.local_width * shape.repeats_key_values,
        )

    @property
    def qkv(self) -> int:
        """Queries, keys and values."""
        return self.core + 2 * self.key_value
