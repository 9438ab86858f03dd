"""Parts of a transformer layer in Megatron-LM and Megatron-Core."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshwright.hwprofiles import ContextParallel, LossKernel
from meshwright.simulator import ModelSpec
from meshwright.simulator.model import Experts
from meshwright.validate.programs.context import (
    AllGatherAttention,
    ContextGroup,
    RingAttention,
    UlyssesAttention,
    shifted,
)
from meshwright.validate.programs.contract import Routing
from meshwright.validate.programs.experts import ExpertGroup, GatedShared
from meshwright.validate.programs.fused import (
    BiasDropoutAdd,
    GradientSink,
    RmsNorm,
    positions,
)
from meshwright.validate.programs.layers import (
    NORM_EPSILON,
    AttentionCore,
    GatedSilu,
    LayerOptions,
    Mlp,
    ResidualAdd,
    SquaredRelu,
)
from meshwright.validate.programs.megatron.experts import MegatronExperts
from meshwright.validate.programs.megatron.loss import vocabulary_loss
from meshwright.validate.programs.megatron.tensor_parallel import (
    ALONE,
    BufferedGroup,
    ColumnLinear,
    RowLinear,
    TensorParallelGroup,
    column_product,
    gather_columns,
    gather_tokens,
    scatter_sum,
    scatter_tokens,
    sum_ranks,
)


class LayerNorm(nn.Module):
    """Layer norm; keeps its input and two statistics a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, values: Tensor) -> Tensor:
        """Return the normalised values."""
        return F.layer_norm(values, self.weight.shape, self.weight, self.bias, NORM_EPSILON)


class MegatronRmsNorm(nn.Module):
    """RMS norm; keeps its input and one statistic a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, values: Tensor) -> Tensor:
        """Return the normalised values."""
        out: Tensor = RmsNorm.apply(values, self.weight, NORM_EPSILON)
        return out


class Gelu(nn.Module):
    """GELU; keeps its input."""

    def forward(self, values: Tensor) -> Tensor:
        """Return the activated values."""
        return F.gelu(values)


class VocabularyEmbedding(nn.Module):
    """Token and position embeddings; each rank holds some rows of the first."""

    def __init__(
        self,
        model: ModelSpec,
        tp: TensorParallelGroup,
        *,
        num_rows: int,
        dropout: float,
        starts: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.tp, self.dropout, self.starts = tp, dropout, starts
        self.num_rows = num_rows
        self.weight = nn.Parameter(torch.empty(self.num_rows, model.hidden_size))
        learned = model.positions == "learned"
        shape = (model.max_positions, model.hidden_size)
        self.positions = nn.Parameter(torch.empty(shape)) if learned else None
        self.norm = megatron_norm(model, model.hidden_size) if model.embedding_norm else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return activations of ``[batch, tokens]`` ids."""
        hidden = self._looked_up(tokens.t().contiguous())
        # One reduce-scatter sums and splits, where no positions are added in between.
        if self.tp.splits_tokens and self.positions is None:
            hidden = scatter_sum(hidden, self.tp)
        else:
            hidden = sum_ranks(hidden, self.tp)
            if self.positions is not None:
                places = positions(tokens.shape[1], self.starts, tokens.device)
                hidden = hidden + F.embedding(places, self.positions).unsqueeze(1)
            if self.tp.splits_tokens:
                hidden = scatter_tokens(hidden, self.tp)
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.dropout and self.training:
            hidden = torch.native_dropout(hidden, self.dropout, train=True)[0]
        return hidden

    def _looked_up(self, tokens: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.tp.rank * self.num_rows
        outside = (local < 0) | (local >= self.num_rows)
        hidden = F.embedding(local.masked_fill_(outside, 0), self.weight)
        # Rows that other ranks hold are 0 here, so that the sum over ranks is the embedding.
        return hidden.masked_fill_(outside.unsqueeze(-1), 0.0)


class OutputMatrix(nn.Module):
    """This rank's rows of the output matrix."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class VocabularyHead(nn.Module):
    """Final norm and output matrix, tied or not; the matrix comes last, as in Megatron-Core.

    With MTP it has no norm.
    """

    def __init__(
        self,
        model: ModelSpec,
        tp: TensorParallelGroup,
        sink: GradientSink,
        table: nn.Parameter,
        losses: nn.Module | None,
    ) -> None:
        super().__init__()
        has_norm = losses is None
        self.norm = megatron_norm(model, model.hidden_size) if has_norm else nn.Identity()
        self.losses = losses
        buffered = BufferedGroup(tp.group, tp.rank, tp.size, tp.sequence_parallel)
        self.tp, self.sink = tp if has_norm else buffered, sink
        self.output = OutputMatrix(table)

    def forward(self, hidden: Tensor, *read: Tensor) -> Tensor:
        """Return this rank's logits of all tokens."""
        hidden = self.norm(hidden)
        if self.losses is not None:
            hidden = self.losses(hidden, *read, self._logits)
        return self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        return column_product(hidden, self.output.weight, None, self.tp, self.sink)


def megatron_norm(model: ModelSpec, width: int) -> nn.Module:
    """Return the norm of the model's kind."""
    kind = LayerNorm if model.norm == "layernorm" else MegatronRmsNorm
    return kind(width)


class ExpertSetting(NamedTuple):
    """Expert-parallel ranks, routing, and the accumulator of experts' weight gradients."""

    group: ExpertGroup
    routing: Routing
    sink: GradientSink


class MegatronParts:
    """Parts of Megatron's layers: fused, tensor parallel, tokens first."""

    seq_dim = 0
    fuses_qkv = True
    fuses_gate = True
    is_reentrant = True
    casts_rope_cache = False
    norms_after_rope = False
    copies_operands = False
    cuts_chunks = True
    loss = LossKernel.FUSED

    def __init__(
        self,
        tp: TensorParallelGroup,
        sink: GradientSink,
        *,
        vocab_size: int,
        dropout: float,
        cp: ContextGroup | None = None,
        experts: ExpertSetting | None = None,
    ) -> None:
        self.of_experts = experts
        self.tp, self.cp, self.sink, self.dropout = tp, cp, sink, dropout
        self.starts = cp.starts if cp else (0,)
        self.num_rows = vocab_size // tp.size
        self.table: nn.Parameter | None = None

    def norm(self, model: ModelSpec, width: int) -> nn.Module:
        """Return a norm."""
        return megatron_norm(model, width)

    def column_linear(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        """Return a column-parallel layer."""
        return ColumnLinear(inputs, outputs // self.tp.size, self.tp, self.sink, bias=bias)

    def row_linear(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        """Return a row-parallel layer."""
        return RowLinear(inputs // self.tp.size, outputs, self.tp, self.sink, bias=bias)

    def replicated_linear(self, inputs: int, outputs: int) -> nn.Module:
        """Return a linear layer as one rank alone has it."""
        return ColumnLinear(inputs, outputs, ALONE, self.sink, bias=False)

    def attention_core(self, model: ModelSpec, options: LayerOptions, window: int) -> nn.Module:
        """Return the core of attention to the tokens of all context-parallel ranks."""
        core = AttentionCore(model, options, self.seq_dim, window, num_ranks=self.tp.size)
        if self.cp is None or self.cp.way is None:
            return core
        if self.cp.way is ContextParallel.ALL_TO_ALL:
            sinks, core.sinks = core.sinks, None  # of all heads: a core has some of them
            return UlyssesAttention(core, self.cp, sinks)
        if self.cp.way is ContextParallel.HYBRID_RING:
            inner, outer = self.cp.levels
            return UlyssesAttention(RingAttention(outer), inner)
        if self.cp.way is ContextParallel.ALL_GATHER:
            return AllGatherAttention(self.cp, window)
        return RingAttention(self.cp)

    def activation(self, model: ModelSpec) -> nn.Module:
        """Return the activation."""
        if model.activation == "squared relu":
            return SquaredRelu()
        return GatedSilu() if model.gated_mlp else Gelu()

    def experts(self, model: ModelSpec) -> nn.Module:
        """Return a rank's experts."""
        facts, setting = model.experts, self.of_experts
        assert facts is not None
        assert setting is not None
        return MegatronExperts(
            facts,
            model.hidden_size,
            group=setting.group,
            routing=setting.routing,
            sinks=(self.sink, setting.sink),
            shared=self._shared(model, facts),
        )

    def _shared(self, model: ModelSpec, experts: Experts) -> nn.Module | None:
        """Return shared experts, if there are any, each rank with a gate of its own tokens."""
        if not experts.shared_hidden_size:
            return None
        mlp = Mlp(model, self, experts.shared_hidden_size, bias=False)
        if not experts.shared_gate:
            return mlp
        return GatedShared(ColumnLinear(model.hidden_size, 1, ALONE, self.sink, bias=False), mlp)

    def residual_add(self, row: nn.Module, *, dropout: float) -> ResidualAdd:
        """Return the fused bias, dropout and addition after *row*."""

        def add(values: Tensor, residual: Tensor) -> Tensor:
            probability = dropout if row.training else 0.0
            out: Tensor = BiasDropoutAdd.apply(values, row.bias, residual, probability)
            return out

        return add

    def embedding(self, model: ModelSpec) -> nn.Module:
        """Return the embedding, and keep its weight for a tied head."""
        embedding = VocabularyEmbedding(
            model,
            self.tp,
            num_rows=self.num_rows,
            dropout=self.dropout,
            starts=self.starts,
        )
        self.table = embedding.weight
        return embedding

    def gathered_columns(self, values: Tensor) -> Tensor:
        """Return all columns of a rank's tokens."""
        return gather_columns(values, self.tp)

    def gathered_tokens(self, values: Tensor) -> Tensor:
        """Return the tokens of all ranks."""
        return gather_tokens(values, self.tp)

    def leading_tokens_loss(self, logits: Tensor, targets: Tensor, num_left_out: int) -> Tensor:
        """Return the mean loss of all tokens of each sequence but the last ones.

        The mean over the ranks that share sequences is that of all tokens.  In Megatron-Core each
        divides by the number of its own (GPTModel._postprocess, core 0.16), which weighs those of
        the rank with the last ones more.
        """
        targets, cp = targets.t().contiguous(), self.cp
        num_scored = len(targets) - num_left_out
        if cp is not None and cp.size > 1:
            num_scored = cp.num_before(cp.num_tokens - num_left_out)
        loss = vocabulary_loss(logits, targets, self.tp, kernel=self.loss, num_scored=num_scored)
        if cp is not None and cp.size > 1:
            loss = loss * (num_scored * cp.size / (cp.num_tokens - num_left_out))
        return loss

    def shifted(self, numbers: Tensor) -> Tensor:
        """Return the number of the token after each of ``[batch, tokens]``; 0 after the last."""
        return shifted(numbers, self.cp)

    def head(self, model: ModelSpec, losses: nn.Module | None) -> nn.Module:
        """Return the head."""
        table = self.table if model.tied_embeddings else None
        if table is None:
            table = nn.Parameter(torch.empty(self.num_rows, model.hidden_size))
        return VocabularyHead(model, self.tp, self.sink, table, losses)
