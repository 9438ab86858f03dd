"""Layers of PyTorch's own modules, for one rank or to be split from outside, and their weights."""

import re
from math import sqrt

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from meshwright.simulator import ModelSpec
from meshwright.simulator.model import parameter_tensors
from meshwright.validate.programs.context import ContextGroup, shifted
from meshwright.validate.programs.contract import Routing, initial_weight
from meshwright.validate.programs.experts import (
    GatedShared,
    PlainExperts,
    RoutedGroup,
    TitanExperts,
    TransformersExperts,
)
from meshwright.validate.programs.fused import RmsNorm
from meshwright.validate.programs.layers import (
    NORM_EPSILON,
    AttentionCore,
    GatedSilu,
    LayerOptions,
    Mlp,
    ResidualAdd,
    SquaredRelu,
    VirtualStage,
)
from meshwright.validate.programs.pytorch.context import TorchRingAttention
from meshwright.validate.programs.pytorch.loss import token_loss

NORMS = "attention_norm", "attention_output_norm", "mlp_norm", "mlp_out_norm"
OF_EXPERTS = "router", "experts", "shared_gate"
PREDICTION_NORMS = "enorm", "hnorm", "prediction_norm"


class PlainRmsNorm(nn.Module):
    """RMSNorm in one kernel, also of tokens that are split over a mesh."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, values: Tensor) -> Tensor:
        """Return the normalised values, placed as they came."""
        if not isinstance(values, DTensor):
            return RmsNorm.apply(values, self.weight, NORM_EPSILON)
        # The kernel runs on each rank's tokens: its weight gradient is a part of the sum.
        assert isinstance(self.weight, DTensor)
        weight = self.weight.to_local(grad_placements=[Partial()])
        local = RmsNorm.apply(values.to_local(), weight, NORM_EPSILON)
        return DTensor.from_local(local, values.device_mesh, values.placements)


class DropoutAdd(nn.Module):
    """Addition of dropped-out values to the residual stream; keeps a mask of a byte an element."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, update: Tensor, residual: Tensor) -> Tensor:
        """Return the sum."""
        return residual + drop(update, self.dropout, training=self.training)


class Embedding(nn.Module):
    """Word embedding, and position embedding where the model learns one."""

    def __init__(
        self,
        model: ModelSpec,
        vocab_size: int,
        dropout: float,
        starts: tuple[int, ...] = (0,),
    ) -> None:
        super().__init__()
        self.starts = starts
        self.words = nn.Embedding(vocab_size, model.hidden_size)
        learned = model.positions == "learned"
        self.positions = nn.Embedding(model.max_positions, model.hidden_size) if learned else None
        self.dropout = dropout
        self.scale = sqrt(model.hidden_size) if model.scaled_embeddings else None

    def forward(self, ids: Tensor) -> Tensor:
        """Return the activations before the first layer."""
        hidden: Tensor = self.words(ids)
        if self.scale is not None:
            hidden = hidden * self.scale
        if self.positions is not None:
            part = ids.shape[1] // len(self.starts)
            places = [torch.arange(start, start + part, device=ids.device) for start in self.starts]
            hidden = hidden + self.positions(places[0] if len(places) == 1 else torch.cat(places))
        return drop(hidden, self.dropout, training=self.training)


class Head(nn.Module):
    """Final norm and output matrix, whose logits may be softcapped."""

    def __init__(
        self,
        norm: nn.Module,
        model: ModelSpec,
        vocab_size: int,
        losses: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.norm, self.losses = norm, losses
        self.output = nn.Linear(model.hidden_size, vocab_size, bias=False)
        self.cap = model.logit_softcap

    def forward(self, hidden: Tensor, *read: Tensor) -> Tensor:
        """Return the logits."""
        hidden = self.norm(hidden)
        if self.losses is not None:
            hidden = self.losses(hidden, *read, self.output)
        if self.cap:
            return torch.tanh(self.output(hidden) / self.cap) * self.cap
        logits: Tensor = self.output(hidden)
        return logits


class PlainParts:
    """Modules of whole layers, batch first.

    Args:
        vocab_size: Rows of the word embedding, padding included.
        dropout: Probability of dropout after the embedding.
        fuses_qkv: Queries, keys and values are one linear layer.
        cp: The context-parallel ranks of this one, if there are others.
        experts: Who shares experts with this rank, and how tokens are sent to them; by default all
            are here, run one after the other, and get tokens by their scores.
    """

    seq_dim = 1
    fuses_gate = False
    is_reentrant = False
    casts_rope_cache = False
    norms_after_rope = True
    copies_operands = False
    cuts_chunks = False
    of_transformers = False

    def __init__(
        self,
        vocab_size: int,
        dropout: float,
        *,
        fuses_qkv: bool,
        cp: ContextGroup | None = None,
        experts: RoutedGroup | None = None,
    ) -> None:
        self.of_experts = experts
        self.cp, self.starts = cp, cp.starts if cp else (0,)
        self.vocab_size = vocab_size
        self.dropout = dropout
        self.fuses_qkv = fuses_qkv

    def norm(self, model: ModelSpec, width: int) -> nn.Module:
        """Return a norm of the model's kind."""
        if model.norm == "layernorm":
            return nn.LayerNorm(width, eps=NORM_EPSILON)
        return PlainRmsNorm(width)

    def column_linear(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        """Return a whole linear layer."""
        return nn.Linear(inputs, outputs, bias=bias)

    def row_linear(self, inputs: int, outputs: int, *, bias: bool) -> nn.Module:
        """Return a whole linear layer."""
        return nn.Linear(inputs, outputs, bias=bias)

    def replicated_linear(self, inputs: int, outputs: int) -> nn.Module:
        """Return a linear layer."""
        return nn.Linear(inputs, outputs, bias=False)

    def attention_core(self, model: ModelSpec, options: LayerOptions, window: int) -> nn.Module:
        """Return the module from queries, keys and values to the attention."""
        if self.cp is None or self.cp.way is None:
            return AttentionCore(model, options, self.seq_dim, window)
        return TorchRingAttention(self.cp)

    def activation(self, model: ModelSpec) -> nn.Module:
        """Return the exact GELU; a gated MLP has its activation in the gate unless fused."""
        if model.activation == "squared relu":
            return SquaredRelu()
        if model.gated_mlp:
            return GatedSilu() if self.fuses_gate else nn.Identity()
        return nn.GELU()

    def experts(self, model: ModelSpec) -> nn.Module:
        """Return all experts of a layer."""
        experts = model.experts
        assert experts is not None
        width = experts.shared_hidden_size
        shared: nn.Module | None = Mlp(model, self, width, bias=False) if width else None
        if self.of_experts is not None and self.of_experts.of_transformers:
            return TransformersExperts(experts, model.hidden_size, self.of_experts, shared)
        if shared is not None and experts.shared_gate:
            shared = GatedShared(nn.Linear(model.hidden_size, 1, bias=False), shared)
        if self.of_experts is None:
            return PlainExperts(
                experts,
                model.hidden_size,
                Routing(),
                shared,
                of_transformers=self.of_transformers,
            )
        return TitanExperts(experts, model.hidden_size, self.of_experts, shared)

    def residual_add(self, row: nn.Module, *, dropout: float) -> ResidualAdd:  # noqa: ARG002
        """Return the addition of an output and its bias to the residual stream, dropped out."""
        return DropoutAdd(dropout)

    def embedding(self, model: ModelSpec) -> nn.Module:
        """Return the module from token ids to activations."""
        return Embedding(model, self.vocab_size, self.dropout, self.starts)

    def head(self, model: ModelSpec, losses: nn.Module | None = None) -> nn.Module:
        """Return the module from activations to logits, with the final norm unless MTP has it."""
        has_norm = losses is None
        norm = self.norm(model, model.hidden_size) if has_norm else nn.Identity()
        return Head(norm, model, self.vocab_size, losses)

    def gathered_columns(self, values: Tensor) -> Tensor:
        """Return *values*, which are whole."""
        return values

    def gathered_tokens(self, values: Tensor) -> Tensor:
        """Return *values*, which are of all tokens."""
        return values

    def leading_tokens_loss(self, logits: Tensor, targets: Tensor, num_left_out: int) -> Tensor:
        """Return the mean loss of all tokens of each sequence but the last ones."""
        return token_loss(logits[:, :-num_left_out], targets[:, :-num_left_out])

    def shifted(self, numbers: Tensor) -> Tensor:
        """Return the number of the token after each of ``[batch, tokens]``; 0 after the last."""
        return shifted(numbers, None)


def plain_parts(
    model: ModelSpec,
    *,
    vocab_size: int,
    dropout: float,
    fuses_qkv: bool = False,
    cp: ContextGroup | None = None,
    experts: RoutedGroup | None = None,
) -> PlainParts:
    """Return the parts of *model* with embeddings of *vocab_size* rows."""
    dropped = dropout if model.dropout else 0.0
    return PlainParts(vocab_size, dropped, fuses_qkv=fuses_qkv, cp=cp, experts=experts)


def drop(values: Tensor, probability: float, *, training: bool) -> Tensor:
    """Return *values* after dropout that keeps a mask of one byte an element, as on a GPU."""
    if not (probability and training):
        return values
    return torch.native_dropout(values, probability, train=True)[0]


def tie_embeddings(stage: VirtualStage) -> None:
    """Tie the output matrix of *stage* to its word embedding, where it holds both."""
    if isinstance(stage.embedding, Embedding) and isinstance(stage.head, Head):
        stage.head.output.weight = stage.embedding.words.weight


@torch.no_grad()
def initialise_whole(
    stage: VirtualStage, model: ModelSpec, experts: RoutedGroup | None = None
) -> None:
    """Give each parameter of a stage that is not split yet its part of `initial_weight`.

    A gate without a matrix of its own is ahead of the values in theirs.

    Of *experts* that other ranks have, too, it is that of the rank's own.
    """
    has_gates = any(name.endswith(".gate.weight") for name, _ in stage.named_parameters())
    for name, parameter in stage.named_parameters():
        with parameter.device:
            values = initial_parameter(model, name, fuses_gate=not has_gates)
        if ".mlp.experts." in name and experts is not None:
            own_experts = experts.ranks.own(len(values))
            values = values[own_experts.start : own_experts.stop]
        if values.shape != parameter.shape:  # a padded vocabulary: rows that no token has
            parameter.zero_()
        parameter[: values.shape[0]] = values


def initial_parameter(model: ModelSpec, name: str, *, fuses_gate: bool = False) -> Tensor:
    """Return the whole initial value of a parameter of a `VirtualStage` made of `PlainParts`.

    Args:
        model: Model.
        name: As in ``stage.named_parameters()``.
        fuses_gate: Whether a gate of an MLP is in one product with the values.

    >>> from meshwright.simulator import load_model
    >>> gpt2 = load_model("gpt2")
    >>> tuple(initial_parameter(gpt2, "layers.7.attention.query.weight").shape)
    (768, 768)
    >>> initial_parameter(gpt2, "layers.7.mlp.expand.bias").equal(
    ...     initial_weight("layers.7.mlp_in.bias", (3072,)))
    True
    """
    layer, module, tensor = _split_name(name)
    width, ffn = model.hidden_size, model.ffn_hidden_size
    if module == "output" and not layer:
        table = "word" if model.tied_embeddings else "output"
        return initial_weight(f"{table}_embedding.weight", (model.vocab_size, width))
    if model.latent is not None and ".attention." in name:
        wanted = "attention_output" if module == "output" else module
        shapes = {each.name: each.shape for each in parameter_tensors(model)}
        return initial_weight(f"{layer}{wanted}.{tensor}", shapes[f"{wanted}.{tensor}"])
    if module in ("qkv", "query", "key", "value"):
        rows = model.query_hidden_size + 2 * model.kv_hidden_size
        whole = _initial(f"{layer}qkv.{tensor}", rows, width)
        return whole if module == "qkv" else _of_groups(model, whole, module)
    if ".mlp.shared." in name or module in (*OF_EXPERTS, "mlp"):
        return _initial_of_experts(model, name)
    if module in ("gate", "expand"):
        whole = _initial(f"{layer}mlp_in.{tensor}", ffn * (1 + model.gated_mlp), width)
        own = slice(ffn) if module == "gate" else slice(0 if fuses_gate else -ffn, None)
        return whole[own]
    wide = model.qk_norm == "width"
    query_norm, key_norm = (
        (model.query_hidden_size, model.kv_hidden_size) if wide else (model.head_dim,) * 2
    )
    canonical, outputs, inputs = {
        "words": ("word_embedding", model.vocab_size, width),
        "positions": ("position_embedding", model.max_positions, width),
        "output": (f"{layer}attention_output", width, model.query_hidden_size),
        "core": (layer[:-1], model.num_heads, 0),
        "query_norm": (f"{layer}query_norm", query_norm, 0),
        "key_norm": (f"{layer}key_norm", key_norm, 0),
        "contract": (f"{layer}mlp_out", width, ffn),
        "norm": ("final_norm", width, 0),
        **{name: (f"{layer}{name}", width, 0) for name in (*NORMS, *PREDICTION_NORMS)},
        "eh_proj": (f"{layer}eh_proj", width, 2 * width),
    }[module]
    return _initial(f"{canonical}.{tensor}", outputs, inputs)


def _initial_of_experts(model: ModelSpec, name: str) -> Tensor:
    """Return the whole initial value of a router, of all experts, or of shared ones."""
    layer, module, tensor = _split_name(name)
    experts, width = model.experts, model.hidden_size
    assert experts is not None
    num, inner, shared = experts.num_experts, experts.hidden_size, experts.shared_hidden_size
    first = experts.num_parts * inner
    if module in ("gate", "expand"):
        whole = _initial(f"{layer}shared_in.weight", experts.num_parts * shared, width)
        return whole[-shared:] if module == "expand" else whole[:shared]
    if module == "experts" and tensor in ("gate", "up"):
        both = initial_weight(f"{layer}experts_in.weight", (num, first, width))
        return both[:, inner:] if tensor == "up" else both[:, :inner]
    shapes = {
        "out": ("experts_out.weight", (num, width, inner)),
        "router.weight": ("router.weight", (num, width)),
        "router.bias": ("router.bias", (num,)),
        "shared_gate.weight": ("shared_gate.weight", (1, width)),
        "contract.weight": ("shared_out.weight", (width, shared)),
        "experts_in": ("experts_in.weight", (num, first, width)),
        "experts_out": ("experts_out.weight", (num, width, inner)),
        "experts_in_bias": ("experts_in.bias", (num, first)),
        "experts_out_bias": ("experts_out.bias", (num, width)),
    }
    key = tensor if module in ("mlp", "experts") else f"{module}.{tensor}"
    canonical, shape = shapes[key]
    return initial_weight(f"{layer}{canonical}", shape)


def _initial(name: str, outputs: int, inputs: int) -> Tensor:
    is_matrix = inputs and name.endswith("weight")
    return initial_weight(name, (outputs, inputs) if is_matrix else (outputs,))


def _split_name(name: str) -> tuple[str, str, str]:
    """Return the layer's prefix, the module's last name and the tensor's.

    >>> _split_name("layers.3.attention.query.weight")
    ('layers.3.', 'query', 'weight')
    """
    layer = re.match(r"(layers|predictions)\.(?:layers\.)?(\d+)\.", name)
    *_, module, tensor = name.split(".")
    return f"{layer[1]}.{layer[2]}." if layer else "", module, tensor


def _of_groups(model: ModelSpec, whole: Tensor, part: str) -> Tensor:
    """Return the rows of queries, keys or values: each group has its queries, key, value."""
    queries = model.num_heads // model.num_kv_heads
    grouped = whole.unflatten(0, (model.num_kv_heads, queries + 2, model.head_dim))
    first, last = {"query": (0, queries), "key": (-2, -1), "value": (-1, None)}[part]
    return grouped[:, first:last].flatten(0, 2)
