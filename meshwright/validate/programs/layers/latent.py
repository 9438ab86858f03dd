"""Multi-head latent attention (MLA): keys and values of all heads come from a narrow latent."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.hwprofiles import Recompute
from meshwright.simulator import ModelSpec
from meshwright.validate.programs.fused import Rotary

if TYPE_CHECKING:
    from meshwright.validate.programs.layers.transformer import LayerOptions, Parts


class LatentSelfAttention(nn.Module):
    """MLA: a latent of queries, and one of keys and values, around the attention core.

    RoPE is on a part of each head of its own, which all keys share (DeepSeek-V2,
    arXiv 2405.04434, 2.1.3).  Local heads follow from the width that arrives.
    """

    def __init__(
        self, model: ModelSpec, options: "LayerOptions", parts: "Parts", rotary_base: float
    ) -> None:
        super().__init__()
        latent, width, heads = model.latent, model.hidden_size, model.num_heads
        assert latent is not None
        self.widths = latent
        self.place = parts.seq_dim, rotary_base, parts.starts, latent.rotary_head_dim
        self.recomputes = options.recompute is Recompute.SELECTIVE
        queries = heads * latent.query_head_dim
        if latent.query_rank:
            self.query_down = parts.replicated_linear(width, latent.query_rank)
            self.query_latent_norm = parts.norm(model, latent.query_rank)
            self.query_up = parts.column_linear(latent.query_rank, queries, bias=False)
        else:
            self.query = parts.column_linear(width, queries, bias=False)
        self.kv_down = parts.replicated_linear(width, latent.kv_rank + latent.rotary_head_dim)
        self.kv_latent_norm = parts.norm(model, latent.kv_rank)
        self.gathered, self.copies = parts.gathered_tokens, parts.copies_operands
        pairs = latent.plain_head_dim + latent.value_head_dim
        self.kv_up = parts.column_linear(latent.kv_rank, heads * pairs, bias=False)
        self.core = parts.attention_core(model, options, 0)
        self.output = parts.row_linear(heads * latent.value_head_dim, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the projected attention of normalised activations."""
        given = self._heads(*self._latents(inputs))
        if self.recomputes and self.training:
            context = checkpoint(self.core, *given, use_reentrant=False)
        else:
            context = self.core(*given)
        del given
        out: Tensor = self.output(context.flatten(2))
        return out

    def _latents(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the latents of queries and of keys and values, and the RoPE part of all keys.

        Queries have a latent of their own, or are made straight of *inputs*.
        """
        source = inputs
        if self.widths.query_rank:
            source = self.query_latent_norm(self.query_down(inputs))
        widths = [self.widths.kv_rank, self.widths.rotary_head_dim]
        narrow, shared = self.kv_down(inputs).split(widths, dim=-1)
        shared = self.gathered(shared)
        return source, self.kv_latent_norm(narrow), shared.unsqueeze(2)

    def _heads(
        self, source: Tensor, narrow: Tensor, shared: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as ``[.., .., heads, width]``."""
        plain_dim, widths = self.widths.plain_head_dim, self.widths
        project = self.query_up if widths.query_rank else self.query
        given = project(source).unflatten(-1, (-1, widths.query_head_dim))
        plain, rotated = given.split([plain_dim, widths.rotary_head_dim], dim=-1)
        rotated = Rotary.apply(rotated, *self.place)
        query = torch.cat((plain, rotated), dim=-1)
        pairs = self.kv_up(narrow).unflatten(-1, (-1, plain_dim + widths.value_head_dim))
        plain, value = pairs.split([plain_dim, widths.value_head_dim], dim=-1)
        shared = Rotary.apply(shared, *self.place).expand(-1, -1, plain.shape[2], -1)
        key = torch.cat((plain, shared), dim=-1)
        return query, key, value.contiguous() if self.copies else value
