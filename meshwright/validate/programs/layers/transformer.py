"""Layers of a transformer, GPT or Llama style, made of a stack's parts."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.hwprofiles import Attention, Recompute
from meshwright.simulator import ModelSpec
from meshwright.simulator.model import EXPERT_LAYERS, WINDOWED_LAYERS, BlockKind
from meshwright.validate.programs.fused import (
    CachedRotary,
    CausalSoftmax,
    FusedAttention,
    Rotary,
    Scores,
    Swiglu,
    apply_rope_unfused,
)
from meshwright.validate.programs.layers.chunks import ChunkedAttention, cut, joined
from meshwright.validate.programs.layers.latent import LatentSelfAttention
from meshwright.validate.programs.layers.pointwise import UnweightedNorm
from meshwright.validate.programs.layers.selective_recompute import operator_contexts

ROTARY_BASE = 10_000.0
DROPOUT = 0.1


class Parts(Protocol):
    """Interface of a stack's parts: how a layer is made parallel and what is fused.

    Widths are those of the whole model; a part that splits a weight over ranks divides them.
    ``seq_dim`` is the dim of activations that counts tokens: 0 or 1; these are equal parts of a
    sequence, one from each of ``starts`` on.  A checkpoint that ``is_reentrant`` runs autograd once
    more inside its backward pass, and has names there for what came out and for its gradient.
    With ``casts_rope_cache`` each layer gets a copy of the RoPE cache, cast as activations are.
    Where a stack ``norms_after_rope``, norms without weights are of queries and keys after RoPE has
    run; one that ``copies_operands`` gives attention keys and values in a stretch of their own,
    one that ``cuts_chunks`` cuts sequences for it ahead of positions.
    """

    seq_dim: int
    starts: tuple[int, ...]
    fuses_qkv: bool
    fuses_gate: bool
    is_reentrant: bool
    casts_rope_cache: bool
    norms_after_rope: bool
    copies_operands: bool
    cuts_chunks: bool

    def norm(self, model: ModelSpec, width: int) -> nn.Module:
        """Return a norm of the model's kind."""

    def column_linear(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        """Return a linear layer whose outputs are split where tensor parallelism is by hand."""

    def row_linear(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        """Return a linear layer whose inputs are split where tensor parallelism is by hand."""

    def replicated_linear(self, inputs: int, outputs: int) -> nn.Module:
        """Return a linear layer that every tensor-parallel rank has whole, for its own tokens."""

    def attention_core(self, model: ModelSpec, options: "LayerOptions", window: int) -> nn.Module:
        """Return the module from queries, keys and values to attention to a *window*, 0 for all."""

    def activation(self, model: ModelSpec) -> nn.Module:
        """Return the activation between the two linear layers of an MLP."""

    def experts(self, model: ModelSpec) -> nn.Module:
        """Return the experts of a layer that has them in the place of an MLP, without a bias."""

    def residual_add(self, row: nn.Module, *, dropout: float) -> "ResidualAdd":
        """Return the function that adds the output of *row* to the residual stream, dropped out."""

    def embedding(self, model: ModelSpec) -> nn.Module:
        """Return the module from token ids to activations."""

    def head(self, model: ModelSpec, losses: nn.Module | None) -> nn.Module:
        """Return the module from activations to logits, final norm included.

        MTP *losses*, if there are some, come first in the place of the norm.
        """

    def gathered_columns(self, values: Tensor) -> Tensor:
        """Return all outputs of a `column_linear`, of the tokens of a rank."""

    def gathered_tokens(self, values: Tensor) -> Tensor:
        """Return all ranks' tokens of a `replicated_linear`: each rank needs all for its heads."""

    def leading_tokens_loss(self, logits: Tensor, targets: Tensor, num_left_out: int) -> Tensor:
        """Return the mean loss of all tokens of each sequence but the last ones."""

    def shifted(self, numbers: Tensor) -> Tensor:
        """Return the number of the token after each of ``[batch, tokens]``; 0 after the last."""


ResidualAdd = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """Options of every layer.

    Args:
        attention: Kernel of the attention core.
        recompute: Activation recomputation.
        dropout: Probability of hidden and attention dropout.
        num_microbatches: Of a step; its loss is the mean of theirs.
    """

    attention: Attention
    recompute: Recompute
    dropout: float
    num_microbatches: int = 1


class AttentionCore(nn.Module):
    """Scores, softmax and values: the part without weights."""

    def __init__(
        self,
        model: ModelSpec,
        options: LayerOptions,
        seq_dim: int,
        window: int = 0,
        *,
        num_ranks: int = 1,
    ) -> None:
        super().__init__()
        self.causal, self.window, self.softcap = model.causal, window, model.attention_softcap
        own = torch.empty(model.num_heads // num_ranks)
        self.sinks = nn.Parameter(own) if model.attention_sinks else None
        self.scale = 1 / sqrt(model.head_dim)
        self.seq_dim = seq_dim
        self.flash = options.attention is Attention.FLASH
        self.dropout = 0.0 if self.flash else options.dropout

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return ``[.., .., heads, width]`` laid out as *query*, beside its *sinks* if given."""
        sinks = self.sinks if sinks is None else sinks
        if self.flash:
            window = self.window if self.window < key.shape[self.seq_dim] else 0
            given = (query, key, value, *(() if sinks is None else (sinks,)))
            scores = Scores(self.causal, window, self.softcap)
            out: Tensor = FusedAttention.apply(self.seq_dim, scores, *given)
            return out
        heads = query.shape[2]
        # Batched GEMMs need as many key heads as query heads.
        q, k, v = (self._batched(_repeat(each, heads)) for each in (query, key, value))
        weights = self._weights(q, k) if sinks is None else self._weights_with_sinks(sinks, q, k)
        if self.dropout and self.training:
            weights = torch.native_dropout(weights, self.dropout, train=True)[0]
        return self._unbatched(torch.bmm(weights, v), query.shape)

    def _weights(self, query: Tensor, key: Tensor) -> Tensor:
        scores = torch.bmm(query, key.transpose(1, 2))
        out: Tensor = CausalSoftmax.apply(scores, self.scale, self.causal, self.window)
        return out

    def _weights_with_sinks(self, sinks: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return probabilities with *sinks* in their sum, made in fp32, one operator at a time.

        As the fallback of `FusedScaleMaskSoftmax` and `SoftmaxOne` of Megatron-Core have it
        (megatron/core/fusions/fused_softmax.py, core 0.16).
        """
        nothing = query.new_zeros(())
        # With beta=0 the first operand is not read.
        scores = torch.baddbmm(nothing, query, key.transpose(1, 2), beta=0, alpha=self.scale)
        scores = scores.unflatten(0, (-1, len(sinks))).float()
        if self.causal:
            scores.masked_fill_(self._mask(scores), float("-inf"))
        joined = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        both = torch.softmax(joined, -1)
        del joined
        return both[..., :-1].to(query.dtype).flatten(0, 1)

    def _mask(self, scores: Tensor) -> Tensor:
        square = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
        return square.triu(1) | square.tril(-self.window or -len(square))

    def _batched(self, tensor: Tensor) -> Tensor:
        """Return ``[batch * heads, tokens, width]``; a view where the layout allows it."""
        if self.seq_dim == 0:
            return tensor.flatten(1, 2).transpose(0, 1)
        return tensor.transpose(1, 2).flatten(0, 1)

    def _unbatched(self, tensor: Tensor, shape: torch.Size) -> Tensor:
        if self.seq_dim == 0:
            return tensor.transpose(0, 1).contiguous().view(shape)
        batch, _, heads, _ = shape
        return tensor.unflatten(0, (batch, heads)).transpose(1, 2).contiguous()


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    repeats = heads // tensor.shape[2]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=2)


class SelfAttention(nn.Module):
    """Projections around the attention core; local heads follow from the width that arrives."""

    def __init__(
        self, model: ModelSpec, options: LayerOptions, parts: Parts, kind: BlockKind
    ) -> None:
        super().__init__()
        width, query_width = model.hidden_size, model.query_hidden_size
        kv_width, bias = model.kv_hidden_size, model.attention_bias
        self.head_dim = model.head_dim
        self.queries_per_group = model.num_heads // model.num_kv_heads
        self.rotary = model.has_positions(kind)
        is_unfused = model.scaled_angles and parts.copies_operands
        self.rope = apply_rope_unfused if is_unfused else Rotary.apply
        is_shared = model.num_kv_heads < model.num_heads
        self.copies = parts.copies_operands and is_shared and not self.rotary
        self.place = parts.seq_dim, ROTARY_BASE, parts.starts, model.rotary_dim
        self.recomputes = options.recompute is Recompute.SELECTIVE
        self.fused = parts.fuses_qkv
        if self.fused:
            self.qkv = parts.column_linear(width, query_width + 2 * kv_width, bias=bias)
        else:
            self.query = parts.column_linear(width, query_width, bias=bias)
            self.key = parts.column_linear(width, kv_width, bias=bias)
            self.value = parts.column_linear(width, kv_width, bias=bias)
        self.qk_norm, self.norms_after_rope = model.qk_norm, parts.norms_after_rope
        if self.qk_norm != "none":
            self.query_norm, self.key_norm = _norms_of_heads(model, parts)
        window = model.window if kind in WINDOWED_LAYERS else 0
        chunk = window if model.chunked_window else 0
        self.core = parts.attention_core(model, options, 0 if chunk else window)
        if chunk and not parts.cuts_chunks:
            self.core = ChunkedAttention(self.core, chunk, parts.seq_dim)
        self.chunk = chunk if parts.cuts_chunks else 0
        self.output = parts.row_linear(query_width, width, bias=model.output_bias)

    def forward(self, inputs: Tensor, *angles: Tensor) -> Tensor:
        """Return the projected attention of normalised activations; *angles* are a RoPE cache."""
        query, key, value = self._projected(inputs)
        num_tokens, batch = query.shape[:2]
        is_cut = 0 < self.chunk < num_tokens
        is_last = self.qk_norm == "unweighted" and self.norms_after_rope
        if self.qk_norm in {"head", "unweighted"} and not is_last:
            query, key = self.query_norm(query), self.key_norm(key)
        if is_cut:  # one after the other: what was cut goes
            query = cut(query, self.chunk)
            key = cut(key, self.chunk)
            value = cut(value, self.chunk)
        if angles:
            query, key = (CachedRotary.apply(each, *angles) for each in (query, key))
        elif self.rotary:
            query, key = (self.rope(each, *self.place) for each in (query, key))
        if is_last and self.rotary:  # norms go with positions there
            query, key = self.query_norm(query), self.key_norm(key)
        given = key, value  # names that live as long as attention runs
        if self.copies:
            key, value = key.contiguous(), value.contiguous()
        if self.recomputes and self.training:
            context = checkpoint(self.core, query, key, value, use_reentrant=False)
        else:
            context = self.core(query, key, value)
        del query, key, value, given
        if is_cut:
            context = joined(context, num_tokens, batch)
        out: Tensor = self.output(context.flatten(2))
        return out

    def _projected(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as ``[.., .., heads, width]``.

        A fused projection holds, for each group of heads, its queries, its key and its value.
        """
        if not self.fused:
            query, key, value = self.query(inputs), self.key(inputs), self.value(inputs)
            if self.qk_norm == "width":
                query, key = self.query_norm(query), self.key_norm(key)
            by_heads = (-1, self.head_dim)
            return (
                query.unflatten(-1, by_heads),
                key.unflatten(-1, by_heads),
                value.unflatten(-1, by_heads),
            )
        grouped = self.qkv(inputs).unflatten(-1, (-1, self.queries_per_group + 2, self.head_dim))
        query, key, value = grouped.split([self.queries_per_group, 1, 1], dim=3)
        return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def _norms_of_heads(model: ModelSpec, parts: Parts) -> tuple[nn.Module, nn.Module]:
    """Return norms of queries and of keys."""
    if model.qk_norm == "unweighted":
        return UnweightedNorm(), UnweightedNorm()
    widths = (model.head_dim,) * 2
    if model.qk_norm == "width":
        widths = model.query_hidden_size, model.kv_hidden_size
    return parts.norm(model, widths[0]), parts.norm(model, widths[1])


class Mlp(nn.Module):
    """Two linear layers around an activation; a gated one has gate and value apart unless fused.

    Args:
        model: Model.
        parts: The stack's parts.
        ffn: Its width; by default that of the model's MLPs.
        bias: Whether linear layers have one; by default as in the model's MLPs.
    """

    def __init__(
        self, model: ModelSpec, parts: Parts, ffn: int | None = None, *, bias: bool | None = None
    ) -> None:
        super().__init__()
        width = model.hidden_size
        ffn = model.ffn_hidden_size if ffn is None else ffn
        bias = model.mlp_bias if bias is None else bias
        self.separate = model.gated_mlp and not parts.fuses_gate
        if self.separate:
            self.gate = parts.column_linear(width, ffn, bias=bias)
        widths = 2 * ffn if model.gated_mlp and not self.separate else ffn
        self.expand = parts.column_linear(width, widths, bias=bias)
        self.activation = parts.activation(model)
        self.contract = parts.row_linear(ffn, width, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the MLP of normalised activations."""
        if self.separate:
            hidden = Swiglu.apply(self.gate(inputs), self.expand(inputs))
        else:
            hidden = self.activation(self.expand(inputs))
        out: Tensor = self.contract(hidden)
        return out


class TransformerLayer(nn.Module):
    """One transformer layer: norms before attention and MLP, or experts, after them, or both.

    A parallel MLP reads the norm that attention reads, or one of its own.
    """

    def __init__(
        self, model: ModelSpec, options: LayerOptions, parts: Parts, kind: BlockKind
    ) -> None:
        super().__init__()
        self.is_parallel_mlp = model.parallel_mlp != "no"

        def norm(*, is_there: bool) -> nn.Module:
            return parts.norm(model, model.hidden_size) if is_there else nn.Identity()

        before, after = model.norm_places != "after", model.norm_places != "before"
        self.attention_norm = norm(is_there=before)
        self.attention = (
            SelfAttention(model, options, parts, kind)
            if model.latent is None
            else LatentSelfAttention(model, options, parts, ROTARY_BASE)
        )
        self.attention_output_norm = norm(is_there=after)
        self.mlp_norm = norm(is_there=before and model.parallel_mlp != "one norm")
        mlp = None if kind in EXPERT_LAYERS else Mlp(model, parts)
        self.mlp = parts.experts(model) if mlp is None else mlp
        self.mlp_out_norm = norm(is_there=after)
        dropout = 0.0 if self.is_parallel_mlp else options.dropout
        self.add_attention = parts.residual_add(self.attention.output, dropout=dropout)
        self.add_mlp = parts.residual_add(
            self.mlp if mlp is None else mlp.contract, dropout=dropout
        )
        self.keeps_operators = options.recompute is Recompute.SELECTIVE_OP

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the activations after the layer, of those before it and perhaps a RoPE cache."""
        run = self._run_parallel if self.is_parallel_mlp else self._run
        if not (self.keeps_operators and self.training):
            return run(*inputs)
        out: Tensor = checkpoint(run, *inputs, use_reentrant=False, context_fn=operator_contexts)
        return out

    def _run(self, inputs: Tensor, *angles: Tensor) -> Tensor:
        attended = self.attention_output_norm(self.attention(self.attention_norm(inputs), *angles))
        middle = self.add_attention(attended, inputs)
        del attended
        return self.add_mlp(self.mlp_out_norm(self.mlp(self.mlp_norm(middle))), middle)

    def _run_parallel(self, inputs: Tensor, *angles: Tensor) -> Tensor:
        normed = self.attention_norm(inputs)
        attended = self.attention(normed, *angles)
        has_own = not isinstance(self.mlp_norm, nn.Identity)
        mlp_output = self.mlp(self.mlp_norm(inputs) if has_own else normed)
        return self.add_mlp(self.add_attention(mlp_output, attended), inputs)
