"""`ModelSpec`: sizes and options of a transformer."""

from collections.abc import Callable, Mapping
from typing import Literal, Self

from meshwright.hwprofiles import LayerFact
from meshwright.records import Field, model_serializer, model_validator, rare
from meshwright.simulator.model.derived import FUSED_QKV, derived_sizes, mixed_runs
from meshwright.simulator.model.described import (
    MAX_LAYERS,
    MAX_WIDTH,
    Model,
    ProductSize,
    parse,
)
from meshwright.simulator.model.huggingface import MAX_TOKENS
from meshwright.simulator.model.kinds import WINDOWED_LAYERS, BlockKind, BlockRun, mixes_windows
from meshwright.simulator.model.parts import Experts, LatentAttention, product_sizes

MAX_FFN_WIDTH = 4_194_304
MAX_VOCABULARY, MAX_MTP_LAYERS = 16_777_216, 64

Spelling = Literal[
    "llama",
    "gemma",
    "olmo2",
    "phi3",
    "glm4",
    "glm4_moe",
    "gpt_neox",
    "gpt_oss",
    "llama4",
    "falcon",
    "falcon-groups",
]
FUSED_MLP = {"phi3", "glm4"}  # gate_up_proj in transformers
NEVER_WITH_EXPERTS = {"gemma", "olmo2", *FUSED_QKV, *FUSED_MLP}
NOT_WITH_EXPERTS = ("parallel_mlp",)
NOT_WITH_LATENT = (
    *NOT_WITH_EXPERTS,
    "window",
    "attention_sinks",
    "qk_norm",
    "norm_places",
    "rotary_fraction",
    "scaled_angles",
    "attention_softcap",
    "spelling",
)


class ModelSpec(Model):
    """A transformer; defaults are those of a GPT-2 style decoder.

    With ``experts`` layers may have them in the place of the MLP, with ``latent`` latent attention.
    An encoder such as BERT has ``causal=False``: all tokens attend to all.  ``mlm_head`` is BERT's:
    pooler and next-sentence classifier on the first token, then a dense layer with activation and
    norm before the logits, and a bias on these; ``scored_fraction`` of positions reaches it.

    A token of a windowed layer sees itself and ``window - 1`` tokens before it; ``layer_pattern``,
    repeated, says which layers are windowed (W) and which see all (F).  A ``chunked_window`` stays:
    a token sees those before it in its own stretch.  If ``rotary_layers`` are windowed, others have
    no positions (Llama 4).  Of ``scaled_angles`` cosines and sines are times a number (YaRN: arXiv
    2309.00071, 3.4).  A sink is a learned score of each head that no value belongs to.
    ``spelling`` is the family whose code in transformers a layer has: fused products beside
    ``fused_qkv``, and what eager kernels keep.  Each of ``prediction_layers`` behind the last
    predicts one token further.  What none models is ``left_out``; what is omitted, `derived_sizes`.

    >>> sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 256}
    >>> spec = ModelSpec(name="tiny", seq_len=32, **sizes)
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
    experts: Experts | None = rare(None)
    latent: LatentAttention | None = rare(None)
    fused_qkv: bool = True
    head_dim: int = Field(default=0, ge=1, le=MAX_WIDTH)
    qk_norm: Literal["none", "head", "width", "unweighted"] = rare("none")
    norm_places: Literal["before", "after", "both"] = rare("before")
    parallel_mlp: Literal["no", "one norm", "two norms"] = rare("no")
    activation: Literal["usual", "gelu", "squared relu"] = rare("usual")
    rotary_fraction: float = rare(1.0, gt=0, le=1)
    attention_softcap: float = rare(0.0, ge=0)
    logit_softcap: float = rare(0.0, ge=0)
    scaled_embeddings: bool = rare(usual=False)
    window: int = rare(0, ge=0, le=MAX_TOKENS)
    layer_pattern: str = rare("F", pattern=r"^[WF]+$", max_length=MAX_LAYERS)
    chunked_window: bool = rare(usual=False)
    prediction_layers: int = rare(0, ge=0, le=MAX_MTP_LAYERS)
    rotary_layers: Literal["all", "windowed"] = rare("all")
    scaled_angles: bool = rare(usual=False)
    attention_sinks: bool = rare(usual=False)
    spelling: Spelling = rare("llama")
    left_out: str = rare("")
    source: str = "not given"

    @property
    def layer_runs(self) -> tuple[BlockRun, ...]:
        """Layers in model order, by kind."""
        return mixed_runs(self.layer_pattern, self.experts, self.num_layers)

    @property
    def differs_by_window(self) -> bool:
        """Whether layers with and without a window differ in more than the window."""
        return self.rotary_layers != "all" and mixes_windows(self.layer_runs)

    @property
    def query_hidden_size(self) -> int:
        """Width of the queries over all heads."""
        return self.num_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Dims of a head to which RoPE is applied."""
        return round(self.head_dim * self.rotary_fraction)

    @property
    def query_head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.head_dim if self.latent is None else self.latent.query_head_dim

    @property
    def value_head_dim(self) -> int:
        """Width of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_head_dim

    @property
    def kv_hidden_size(self) -> int:
        """Width of the keys, and of the values, over all their heads."""
        return self.num_kv_heads * self.head_dim

    def seen_tokens(self, kind: BlockKind, seq_len: int) -> int:
        """Return the most of *seq_len* tokens that a token attends to in a layer of *kind*."""
        return min(self.window, seq_len) if kind in WINDOWED_LAYERS else seq_len

    def has_positions(self, kind: BlockKind) -> bool:
        """Return True if layers of *kind* apply RoPE."""
        has_rope = self.rotary_layers == "all" or kind in WINDOWED_LAYERS
        return self.positions == "rotary" and has_rope

    def layer_facts(self, seq_len: int) -> tuple[LayerFact, ...]:
        """Return the features beyond those of GPT and Llama, for sequences of *seq_len* tokens."""
        return tuple(fact for fact, holds in _facts(self, seq_len).items() if holds)

    def split_refusal(self, tp: int) -> str | None:
        """Return the reason *tp* ranks cannot split its tensors, or None where they can."""
        return _split_fault(self, tp)

    def product_sizes(self, tp: int) -> tuple[ProductSize, ...]:
        """Return the GEMM dims on one of *tp* ranks, which tensor cores want aligned."""
        sizes = self.query_head_dim, self.hidden_size, self.ffn_hidden_size, self.experts
        return product_sizes(*sizes, tp)

    @model_validator(mode="before")
    @classmethod
    def _fill_derived_sizes(cls, data: object) -> object:
        return {**derived_sizes(data), **data} if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _check_fields_agree(self) -> None:
        fault = _size_fault(self) or _layer_fault(self) or _part_fault(self)
        if fault is not None:
            raise ValueError(fault)

    @model_serializer(mode="wrap")
    def _without_usual_width(self, write: Callable[[Self], dict[str, object]]) -> dict[str, object]:
        # Derived widths are left out, as they are in files of users.
        document = write(self)
        if self.has_usual_heads:
            del document["head_dim"]
        return document

    @property
    def has_usual_heads(self) -> bool:
        """Whether heads together are as wide as the residual stream, or attention is latent."""
        return self.latent is not None or self.query_hidden_size == self.hidden_size


def _split_fault(model: ModelSpec, tp: int) -> str | None:
    """Return the reason *tp* ranks cannot split the tensors of a model, or None where they can."""
    sizes = {name: getattr(model, name) for name in ("num_heads", "ffn_hidden_size", "hidden_size")}
    if model.experts is not None:
        sizes["experts.hidden_size"] = model.experts.hidden_size
        sizes["experts.shared_hidden_size"] = model.experts.shared_hidden_size
    for name, size in sizes.items():
        if size % tp:
            return f"{name}={size} is not divisible by tp={tp}"
    if model.qk_norm == "width" and tp > 1:
        return f"qk_norm=width is over all heads and is not split over tp={tp}; allowed: tp=1"
    # Ranks beyond the number of key-value heads replicate them, each equally often.
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        return f"num_kv_heads={model.num_kv_heads} and tp={tp}: one must divide the other"
    return None


def _facts(model: ModelSpec, seq_len: int) -> dict[LayerFact, bool]:
    """Return, for each feature, whether the model has it at *seq_len* tokens."""
    return {
        LayerFact.ROUTED_EXPERTS: model.experts is not None,
        LayerFact.LATENT_ATTENTION: model.latent is not None,
        LayerFact.HEAD_DIM: not model.has_usual_heads,
        LayerFact.HEAD_NORM: model.qk_norm == "head",
        LayerFact.WIDTH_NORM: model.qk_norm == "width",
        LayerFact.UNWEIGHTED_NORM: model.qk_norm == "unweighted",
        LayerFact.NORM_PLACES: model.norm_places != "before",
        LayerFact.PARALLEL_MLP: model.parallel_mlp != "no",
        LayerFact.ACTIVATION: model.activation != "usual",
        LayerFact.ROTARY_FRACTION: model.rotary_fraction < 1,
        LayerFact.ATTENTION_SOFTCAP: model.attention_softcap > 0,
        LayerFact.LOGIT_SOFTCAP: model.logit_softcap > 0,
        LayerFact.SCALED_EMBEDDINGS: model.scaled_embeddings,
        LayerFact.WINDOW: 0 < model.window < seq_len and not model.chunked_window,
        LayerFact.CHUNKED_WINDOW: 0 < model.window < seq_len and model.chunked_window,
        LayerFact.ROTARY_LAYERS: model.rotary_layers != "all",
        LayerFact.ATTENTION_SINKS: model.attention_sinks,
        LayerFact.PREDICTION_LAYERS: model.prediction_layers > 0,
        **_expert_facts(model.experts),
    }


def _expert_facts(experts: Experts | None) -> dict[LayerFact, bool]:
    if experts is None:
        return {}
    return {
        LayerFact.EXPERT_BIAS: experts.bias,
        LayerFact.EXPERT_ACTIVATION: experts.activation == "clamped",
        LayerFact.EXPERT_GELU: experts.activation == "gelu",
        LayerFact.EXPERT_SQUARED_RELU: experts.activation == "squared relu",
        LayerFact.WEIGHED_INPUTS: experts.weighs_inputs,
    }


def _size_fault(model: ModelSpec) -> str | None:
    """Return the message of the first conflict of sizes, or None."""
    if model.ffn_hidden_size == 0:
        return "ffn_hidden_size is missing; gated_mlp=true has no usual value for it"
    if model.head_dim == 0:
        return (
            f"num_heads={model.num_heads} does not divide hidden_size={model.hidden_size}; "
            f"nearest that does: {_nearest_divisor(model.hidden_size, model.num_heads)}"
        )
    if model.num_heads % model.num_kv_heads:
        return (
            f"num_kv_heads={model.num_kv_heads} does not divide num_heads={model.num_heads}; "
            f"nearest that does: {_nearest_divisor(model.num_heads, model.num_kv_heads)}"
        )
    if model.positions == "learned" and model.seq_len > model.max_positions:
        return (
            f"seq_len={model.seq_len} exceeds max_positions={model.max_positions}, "
            "the number of learned positions"
        )
    return None


def _layer_fault(model: ModelSpec) -> str | None:
    """Return the message of the first conflict of layer options, or None."""
    has_window = "W" in model.layer_pattern
    rotated = model.head_dim * model.rotary_fraction  # RoPE rotates pairs of dims
    faults = {
        f"window={model.window} and layer_pattern={model.layer_pattern!r} disagree: layers (W) "
        "have a window of at least 1": has_window != (model.window > 0),
        f"window={model.window} is of attention to earlier tokens; causal=false has none": (
            has_window and not model.causal
        ),
        f"rotary_fraction={model.rotary_fraction} turns {rotated:g} of head_dim={model.head_dim}; "
        "it must be an even number, with positions='rotary'": (
            model.rotary_fraction < 1 and (rotated % 2 != 0 or model.positions != "rotary")
        ),
        "chunked_window=true needs a window": model.chunked_window and not has_window,
        "rotary_layers='windowed' needs a window and positions='rotary'": (
            model.rotary_layers != "all" and (not has_window or model.positions != "rotary")
        ),
        "scaled_angles=true needs positions='rotary'": (
            model.scaled_angles and model.positions != "rotary"
        ),
        f"parallel_mlp={model.parallel_mlp!r} goes with norm_places='before' alone": (
            model.parallel_mlp != "no" and model.norm_places != "before"
        ),
        f"activation={model.activation!r} is of an MLP without a gate": (
            model.gated_mlp and model.activation != "usual"
        ),
        f"spelling={model.spelling!r} is of a gated MLP": (
            model.spelling in FUSED_MLP and not model.gated_mlp
        ),
        f"spelling={model.spelling!r} is of layers without experts": (
            model.spelling in NEVER_WITH_EXPERTS and model.experts is not None
        ),
        f"spelling={model.spelling!r} is of one product: fused_qkv=false does not go with it": (
            model.spelling in FUSED_QKV and not model.fused_qkv
        ),
        **_prediction_faults(model),
    }
    return next((fault for fault, holds in faults.items() if holds), None)


def _prediction_faults(model: ModelSpec) -> dict[str, bool]:
    """Return the conflicts of MTP layers by message, and whether each applies.

    Megatron-LM refuses other positions (validate_args of megatron/training/arguments.py); tied
    embeddings, windows and softcaps are not modelled with MTP.
    """
    wanted = {"positions": "rotary", "norm_places": "before", "tied_embeddings": False}
    wanted |= {"window": 0, "logit_softcap": 0, "scored_fraction": 1, "mlm_head": False}
    return {
        f"{name}={getattr(model, name)!r} does not go with prediction_layers="
        f"{model.prediction_layers}; allowed: {allowed!r}": (
            model.prediction_layers > 0 and getattr(model, name) != allowed
        )
        for name, allowed in wanted.items()
    }


def _part_fault(model: ModelSpec) -> str | None:
    """Return the message of the first conflict with experts or latent attention, or None."""
    if model.experts is None and model.latent is None:
        return None
    needed: dict[str, object] = {}
    if model.experts is not None:
        squared = model.experts.activation == "squared relu"
        needed |= {"gated_mlp": model.experts.gated, "mlp_bias": False}
        needed |= {"activation": "squared relu" if squared else "usual"}
    if model.latent is not None:
        needed |= {"positions": "rotary", "norm": "rmsnorm", "num_kv_heads": model.num_heads}
        needed |= {"attention_bias": False, "output_bias": False}
        needed |= {"head_dim": model.hidden_size // model.num_heads, "dropout": False}
    part = "latent" if model.latent is not None else "experts"
    others = NOT_WITH_LATENT if part == "latent" else NOT_WITH_EXPERTS
    needed |= {name: ModelSpec.model_fields[name].default for name in others}
    for name, value in needed.items():
        if getattr(model, name) != value:
            return f"{name}={getattr(model, name)} does not go with {part}; allowed: {value}"
    return None


def with_layers(model: ModelSpec, num_layers: int) -> ModelSpec:
    """Return *model* with *num_layers* layers, which its name gets as a suffix.

    >>> sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 256}
    >>> with_layers(ModelSpec(name="tiny", seq_len=32, **sizes), 3).name
    'tiny-3-layers'
    """
    if num_layers == model.num_layers:
        return model
    name = f"{model.name}-{num_layers}-layers"
    return model.model_copy(update={"name": name, "title": name, "num_layers": num_layers})


def parse_model(data: Mapping[str, object], *, origin: str) -> ModelSpec:
    """Return the transformer described by the mapping of a file.

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
