"""What a transformer is: the sizes and switches that decide its shapes."""

from collections.abc import Mapping
from functools import cache
from typing import Literal, Self

from pydantic import Field, model_validator

from meshwright.simulator.model.described import MAX_LAYERS, MAX_WIDTH, Model, ProductSize, parse
from meshwright.simulator.model.kinds import EXPERT_LAYER, TRANSFORMER_LAYER, BlockRun, join_runs
from meshwright.simulator.model.parts import Experts, LatentAttention

MAX_FFN_WIDTH = 4_194_304
MAX_VOCABULARY = 16_777_216
MAX_TOKENS = 134_217_728


def _is_absent(value: object) -> bool:
    return value is None


@cache
def _mixed_runs(experts: Experts, num_layers: int) -> tuple[BlockRun, ...]:
    kinds = (
        EXPERT_LAYER if experts.has_layer(number) else TRANSFORMER_LAYER
        for number in range(num_layers)
    )
    return join_runs([BlockRun(kind, 1) for kind in kinds])


class ModelSpec(Model):
    """A transformer; defaults describe a GPT-2 style decoder.

    With ``experts`` some or all layers have routed experts in the place of the MLP; with ``latent``
    all have multi-head latent attention.

    An encoder such as BERT has ``causal=False``: each token attends to all.  ``mlm_head`` is
    BERT's head: pooler and next-sentence classifier on the first token, then a dense layer with
    activation and norm before the logits in place of the final norm, and a bias on the logits.
    ``scored_fraction`` is the share of positions that reach the head: 1 for a decoder, less where
    only masked ones are scored.

    Omitted sizes follow the usual rules: ``num_kv_heads`` equals
    ``num_heads``, ``ffn_hidden_size`` is four times ``hidden_size`` (it must
    be given for a gated MLP, unless all layers have experts), ``max_positions`` equals ``seq_len``,
    ``title`` equals ``name``, and ``fused_qkv``, whether transformers makes queries, keys and
    values in one product, holds for decoders without rotary positions.

    >>> spec = ModelSpec(
    ...     name="tiny", num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, seq_len=32
    ... )
    >>> spec.head_dim, spec.num_kv_heads, spec.ffn_hidden_size, spec.max_positions
    (16, 4, 256, 32)
    """

    name: str = Field(min_length=1, max_length=200)
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    hidden_size: int = Field(ge=1, le=MAX_WIDTH)
    num_heads: int = Field(ge=1, le=MAX_WIDTH)
    vocab_size: int = Field(ge=1, le=MAX_VOCABULARY)
    seq_len: int = Field(ge=1, le=MAX_TOKENS)
    # Validators fill these four before their limits are checked.
    title: str = Field(default="", min_length=1, max_length=200)
    num_kv_heads: int = Field(default=0, ge=1, le=MAX_WIDTH)
    ffn_hidden_size: int = Field(default=0, ge=1, le=MAX_FFN_WIDTH)
    max_positions: int = Field(default=0, ge=1, le=MAX_TOKENS)
    gated_mlp: bool = False
    tied_embeddings: bool = True
    positions: Literal["learned", "rotary", "alibi"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    attention_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    embedding_norm: bool = False
    causal: bool = True
    token_types: int = Field(default=0, ge=0, le=MAX_WIDTH)
    mlm_head: bool = False
    scored_fraction: float = Field(default=1.0, gt=0, le=1)
    dropout: bool = True
    # Models without one do not show it: what is written of them stays as it was.
    experts: Experts | None = Field(default=None, exclude_if=_is_absent)
    latent: LatentAttention | None = Field(default=None, exclude_if=_is_absent)
    fused_qkv: bool = True
    source: str = "not given"

    @property
    def layer_runs(self) -> tuple[BlockRun, ...]:
        """Layers in model order, by kind."""
        if self.experts is None:
            return (BlockRun(TRANSFORMER_LAYER, self.num_layers),)
        return _mixed_runs(self.experts, self.num_layers)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def query_head_dim(self) -> int:
        """Width of a head's queries, and of its keys."""
        return self.head_dim if self.latent is None else self.latent.query_head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_head_dim

    @property
    def kv_hidden_size(self) -> int:
        """Width of the keys, and of the values, over all their heads."""
        return self.num_kv_heads * self.head_dim

    def split_refusal(self, tp: int) -> str | None:
        """Return why *tp* ranks cannot split its tensors, or None where they can."""
        sizes = {
            name: getattr(self, name) for name in ("num_heads", "ffn_hidden_size", "hidden_size")
        }
        if self.experts is not None:
            sizes["experts.hidden_size"] = self.experts.hidden_size
            sizes["experts.shared_hidden_size"] = self.experts.shared_hidden_size
        for name, size in sizes.items():
            if size % tp:
                return f"{name}={size} is not divisible by tp={tp}"
        # Ranks beyond the key-value heads hold copies of them, as many of each.
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            return f"num_kv_heads={self.num_kv_heads} and tp={tp}: one must divide the other"
        return None

    def product_sizes(self, tp: int) -> tuple[ProductSize, ...]:
        """Return the sizes on one of *tp* ranks that should be multiples of a load."""
        widths = {"hidden_size": self.hidden_size, "ffn_hidden_size": self.ffn_hidden_size}
        if self.experts is not None:
            widths["experts.hidden_size"] = self.experts.hidden_size
        return (
            ProductSize("head dim", self.query_head_dim, is_linear=False),
            *(ProductSize(f"{name} / tp", size // tp) for name, size in widths.items()),
        )

    @model_validator(mode="before")
    @classmethod
    def _fill_derived_sizes(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        derived = {
            "num_kv_heads": data.get("num_heads"),
            "max_positions": data.get("seq_len"),
            "fused_qkv": data.get("positions") != "rotary" and data.get("causal") is not False,
        }
        hidden_size = data.get("hidden_size")
        if isinstance(hidden_size, int) and data.get("gated_mlp") is not True:
            derived["ffn_hidden_size"] = 4 * hidden_size
        derived["ffn_hidden_size"] = derived.get("ffn_hidden_size") or _only_width(data)
        known = {key: value for key, value in derived.items() if value is not None}
        return {**known, **data}

    @model_validator(mode="after")
    def _check_fields_agree(self) -> Self:
        if self.ffn_hidden_size == 0:
            raise ValueError("ffn_hidden_size is missing; gated_mlp=true has no usual value for it")
        _check_parts(self)
        if self.latent is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}; "
                f"nearest that does: {_nearest_divisor(self.hidden_size, self.num_heads)}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; "
                f"nearest that does: {_nearest_divisor(self.num_heads, self.num_kv_heads)}"
            )
        if self.positions == "learned" and self.seq_len > self.max_positions:
            raise ValueError(
                f"seq_len={self.seq_len} exceeds max_positions={self.max_positions}, "
                "the number of learned positions"
            )
        return self


def _check_parts(model: ModelSpec) -> None:
    """Raise for what neither experts nor latent attention were published with."""
    needed: dict[str, object] = {}
    if model.experts is not None:
        needed |= {"gated_mlp": True, "mlp_bias": False, "dropout": False}
    if model.latent is not None:
        needed |= {"positions": "rotary", "norm": "rmsnorm", "num_kv_heads": model.num_heads}
        needed |= {"attention_bias": False, "output_bias": False, "dropout": False}
    for name, value in needed.items():
        if getattr(model, name) != value:
            part = "latent" if model.latent is not None else "experts"
            raise ValueError(
                f"{name}={getattr(model, name)} does not go with {part}; allowed: {value}"
            )


def _only_width(data: Mapping[object, object]) -> object:
    """Return the width of experts where no layer has an MLP, which has none to tell then."""
    given = data.get("experts")
    experts = given.model_dump(exclude_defaults=True) if isinstance(given, Experts) else given
    if not isinstance(experts, Mapping) or {"first_dense_layers", "layer_step"} & {*experts}:
        return None
    return experts.get("hidden_size")


def parse_model(data: Mapping[str, object], *, origin: str) -> ModelSpec:
    """Return the transformer that a mapping read from a file describes.

    Raises:
        PlanError: If a key is missing, unknown or out of range, or if sizes disagree.

    >>> parse_model({"name": "tiny"}, origin="tiny.toml")
    Traceback (most recent call last):
    meshwright.simulator.errors.PlanError: tiny.toml: num_layers is missing
    """
    return parse(ModelSpec, data, origin=origin)


def _nearest_divisor(size: int, wanted: int) -> int:
    """Return the divisor of *size* closest to *wanted*, the smaller of two equally close.

    >>> _nearest_divisor(2048, 24)
    16
    """
    divisors = [value for value in range(1, size + 1) if size % value == 0]
    return min(divisors, key=lambda value: (abs(value - wanted), value))
