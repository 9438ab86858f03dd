"""Model of Megatron-LM's options, read from them and written as them.

Both ways stand side by side. What an option means where it is absent is of arguments.py and of
TransformerConfig in core_v0.16.1 (https://github.com/NVIDIA/Megatron-LM, commit 55ac7082).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

from meshwright.planner.export.megatron_core import expert_fields
from meshwright.planner.tables import (
    Codec,
    Facts,
    FileValues,
    Keys,
    MissingError,
    Roles,
    layer_numbers,
)
from meshwright.simulator import ModelSpec, PlanError
from meshwright.simulator.model import parse_model

POSITIONS = {"learned": "learned_absolute", "rotary": "rope"}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
NULL_TOKENIZERS = ("NullTokenizer", "NullMultimodalTokenizer")
GPT2_TOKENIZER, GPT2_FILE, GPT2_TOKENS = "GPT2BPETokenizer", "gpt2-vocab", 50257
TIKTOKEN_TOKENS = 131072
VOCABULARY = "vocab_size"
MULTIPLE_KEY, MULTIPLE = "make-vocab-size-divisible-by", 128
SIZES = {
    "num-layers": "num_layers",
    "hidden-size": "hidden_size",
    "num-attention-heads": "num_heads",
    "max-position-embeddings": "max_positions",
}
SCORES = {"softmax": "softmax", "sigmoid": "sigmoid"}
SOFTMAX = {"usual": "vanilla", "sinks": "learnable"}
# Switches of activations; without any it is GELU of no gate.
ACTIVATIONS = {"swiglu": "silu", "squared-relu": "squared relu", "quick-geglu": "clamped"}
WINDOW = re.compile(r"\(?(-?\d+),(-?\d+)\)?")


def write_model(_: Roles, facts: Facts) -> Keys:
    """Return the options that describe the model of *facts*."""
    model = facts.model
    assert model is not None  # of every plan
    dropout = 0.1 if model.dropout else 0.0
    switches = {
        "swiglu": model.gated_mlp,
        "disable-bias-linear": not model.mlp_bias,
        # With biases in all linear layers the QKV projection has one anyway.
        "add-qkv-bias": model.attention_bias and not model.mlp_bias,
        "untie-embeddings-and-output-weights": not model.tied_embeddings,
        "group-query-attention": model.num_kv_heads < model.num_heads,
        "qk-layernorm": model.qk_norm == "head",
    }
    width = model.head_dim
    # Megatron-LM divides hidden-size by the heads unless told.
    own_width = {"kv-channels": width} if width * model.num_heads != model.hidden_size else {}
    return {
        **{option: getattr(model, field) for option, field in SIZES.items()},
        "ffn-hidden-size": model.ffn_hidden_size,
        **own_width,
        **({"num-query-groups": model.num_kv_heads} if switches["group-query-attention"] else {}),
        "position-embedding-type": POSITIONS[model.positions],
        "normalization": NORMS[model.norm],
        **{name: True for name, is_on in switches.items() if is_on},
        **{name.replace("_", "-"): value for name, value in expert_fields(model).items()},
        "hidden-dropout": dropout,
        "attention-dropout": dropout,
        # NullTokenizer adds one token, that ends a document.
        "vocab-size": model.vocab_size - 1,
    }


def read_model(_: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the model that the options of a file describe.

    What they leave open, such as the vocabulary of a tokenizer's files, is that of ``--model``.

    Raises:
        MissingError: If they leave something open, and no model is given.
        PlanError: If no model has what they say.
    """
    like = facts.model
    defaults = {} if like is None else {key: getattr(like, name) for key, name in SIZES.items()}
    sizes = {key: keys.get(key, defaults.get(key)) for key in SIZES}
    if missing_keys := [key for key, value in sizes.items() if value is None]:
        raise MissingError("model", f"{', '.join(missing_keys)}: not in the file")
    options = _ModelOptions({**keys, **sizes}, words)
    length = keys.get("seq-length") or facts.get("seq_len")
    most = options.whole("max-position-embeddings", 0)
    # Megatron-LM refuses sequences beyond its position embeddings.
    if isinstance(length, int) and length > most:
        raise words.unknown("max-position-embeddings", most, (f"{length} positions or more",))
    fields: Keys = {
        "name": "imported",
        "title": "options of a script",
        "source": f"options of {words.framework}",
        **{name: options.whole(key, 0) for key, name in SIZES.items()},
        "seq_len": length or sizes["max-position-embeddings"],
        "vocab_size": _vocabulary(options, facts),
        **_attention(options),
        **_mlp(options),
        **_windows(options),
        **_whole_model(options),
    }
    model = parse_model(fields, origin=f"the model of {words.framework}")
    return {"model": model if like is None else _as_in(model, like), VOCABULARY: fields[VOCABULARY]}


def _as_in(model: ModelSpec, like: ModelSpec) -> ModelSpec:
    """Return a model with what no option says, from *like*: fused QKV, and widths of no layer."""
    changed: dict[str, object] = {"fused_qkv": like.fused_qkv}
    experts, like_experts = model.experts, like.experts
    if experts is not None and like_experts is not None:
        scores = {
            "softmax": "softmax of chosen"
        }  # of Megatron-Core both are of a token's own experts
        expert_values: dict[str, object] = {"casts_shares": like_experts.casts_shares}
        if scores.get(experts.scores) == like_experts.scores:
            expert_values["scores"] = like_experts.scores
        changed["experts"] = experts.model_copy(update=expert_values)
        if all(map(experts.has_layer, range(model.num_layers))):
            changed["ffn_hidden_size"] = like.ffn_hidden_size
    return model.model_copy(update=changed)


class _ModelOptions(NamedTuple):
    """Options of a file that describe a model, and their reader."""

    keys: Keys
    words: FileValues

    def has(self, key: str) -> bool:
        """Return True if a switch stands in the file."""
        return self.keys.get(key) is True

    def whole(self, key: str, default: int) -> int:
        """Return a whole number."""
        return self.words.whole(self.keys, key, default, least=0)

    def number(self, key: str, default: float) -> float:
        """Return a number."""
        value = self.keys.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.words.unknown(key, value, ("a number",))
        return value

    def chosen(self, key: str, default: str, values: Mapping[str, str]) -> str:
        """Return the name in *values* of the word that an option has."""
        word = self.words.word(self.keys, key, default)
        for name, option_word in values.items():
            if option_word == word:
                return name
        raise self.words.unknown(key, word, values.values())

    def refusal(self, key: str, allowed: str) -> PlanError:
        """Return the error of an option that does not go with others."""
        return self.words.unknown(key, self.keys.get(key, False), (allowed,))


def _whole_model(options: _ModelOptions) -> Keys:
    """Return positions, norm, embedding tying and dropout."""
    positions = options.keys.get("position-embedding-type", POSITIONS["learned"])
    if options.has("use-rotary-position-embeddings"):
        # The older switch overrides --position-embedding-type.
        positions = POSITIONS["rotary"]
    if options.has("no-position-embedding") and positions != POSITIONS["rotary"]:
        raise options.refusal("no-position-embedding", "with position-embedding-type=rope")
    kind = _ModelOptions({"position-embedding-type": positions}, options.words)
    hidden, attention = (
        options.number(key, 0.1) for key in ("hidden-dropout", "attention-dropout")
    )
    # A model has dropout in both places here, or in none.
    if (hidden > 0) != (attention > 0):
        allowed = "0" if hidden == 0 else "above 0"
        text = f"{allowed} with hidden-dropout={hidden:g}"
        raise options.words.unknown("attention-dropout", attention, (text,))
    is_rotary = positions == POSITIONS["rotary"]
    return {
        "positions": kind.chosen("position-embedding-type", "", POSITIONS),
        "rotary_fraction": options.number("rotary-percent", 1.0) if is_rotary else 1.0,
        "norm": options.chosen("normalization", "LayerNorm", NORMS),
        "tied_embeddings": not options.has("untie-embeddings-and-output-weights"),
        "dropout": hidden > 0,
    }


def _attention(options: _ModelOptions) -> Keys:
    """Return heads, biases and norms of attention."""
    heads, hidden = (options.whole(key, 0) for key in ("num-attention-heads", "hidden-size"))
    if heads < 1 or ("kv-channels" not in options.keys and hidden % heads):
        raise options.refusal("num-attention-heads", f"a divisor of hidden-size={hidden}")
    has_bias = not options.has("disable-bias-linear")
    is_latent = options.has("multi-latent-attention")
    is_grouped = options.has("group-query-attention")
    if is_latent and is_grouped:
        raise options.refusal("group-query-attention", "without multi-latent-attention")
    default_head_dim = hidden // heads
    return {
        "num_kv_heads": options.whole("num-query-groups", 1) if is_grouped else heads,
        "head_dim": default_head_dim
        if is_latent
        else options.whole("kv-channels", default_head_dim),
        "attention_bias": has_bias or options.has("add-qkv-bias"),
        "output_bias": has_bias,
        "attention_sinks": options.chosen("softmax-type", "vanilla", SOFTMAX) == "sinks",
        **({"latent": _latent(options)} if is_latent else {"qk_norm": _qk_norm(options)}),
    }


def _qk_norm(options: _ModelOptions) -> str:
    # L2 norm has no weights.
    if options.has("qk-l2-norm"):
        return "unweighted"
    return "head" if options.has("qk-layernorm") else "none"


def _latent(options: _ModelOptions) -> Keys:
    """Return widths of multi-head latent attention, whose latents have norms."""
    if not options.has("qk-layernorm") or options.has("qk-l2-norm"):
        raise options.refusal("multi-latent-attention", "with qk-layernorm")
    return {
        "query_rank": options.whole("q-lora-rank", 0),
        "kv_rank": options.whole("kv-lora-rank", 32),
        "plain_head_dim": options.whole("qk-head-dim", 128),
        "rotary_head_dim": options.whole("qk-pos-emb-head-dim", 64),
        "value_head_dim": options.whole("v-head-dim", 128),
    }


def _windows(options: _ModelOptions) -> Keys:
    """Return the sliding window and its layers (is_layer_window_attention of core)."""
    key, skips = "window-size", "window-attn-skip-freq"
    if key not in options.keys:
        return {}
    layers, skipped = options.whole("num-layers", 0), options.keys.get(skips)
    match = WINDOW.fullmatch(str(options.keys[key]).replace(" ", ""))
    if match is None or int(match[1]) < 0 or int(match[2]) != 0:
        raise options.refusal(key, "how many tokens before its own a token sees, and 0, as 127,0")
    if skipped is None:
        pattern = "W"
    elif str(skipped).isdecimal():
        # One layer in so many sees the whole sequence.
        pattern = "W" * min(int(str(skipped)) - 1, layers) + "F"
    else:
        pattern = "".join("FW"[number] for number in layer_numbers(skipped, layers))
    if "W" not in pattern:
        raise options.refusal(skips, f"a number from 2, or a list of {layers} layers")
    # Megatron counts the tokens before a token, a window counts that token, too.
    return {"window": int(match[1]) + 1, "layer_pattern": pattern}


def _activation(options: _ModelOptions) -> str:
    """Return the activation; that of experts with a bound and an offset is ``clamped``."""
    named = [key for key in ACTIVATIONS if options.has(key)]
    if named[1:]:
        raise options.refusal(named[1], f"without {named[0]}")
    activation = ACTIVATIONS[named[0]] if named else "gelu"
    offset, bound = (
        options.number(key, 0) for key in ("glu-linear-offset", "activation-func-clamp-value")
    )
    if activation == "clamped" and not (options.whole("num-experts", 0) and offset == 1 and bound):
        text = "with num-experts, glu-linear-offset=1 and activation-func-clamp-value"
        raise options.refusal("quick-geglu", text)
    if activation != "clamped" and (offset or bound):
        key = "glu-linear-offset" if offset else "activation-func-clamp-value"
        raise options.refusal(key, "with quick-geglu")
    return activation


def _mlp(options: _ModelOptions) -> Keys:
    """Return the MLP, and experts in its place."""
    activation, hidden = _activation(options), options.whole("hidden-size", 0)
    # With swiglu two thirds of the usual width, as a multiple of 64 (validate_args).
    default_width = int((4 * hidden * 2 / 3) / 64) * 64 if activation == "silu" else 4 * hidden
    width, has_bias = (
        options.whole("ffn-hidden-size", default_width),
        not options.has("disable-bias-linear"),
    )
    fields: Keys = {
        "gated_mlp": activation in {"silu", "clamped"},
        "ffn_hidden_size": width,
        "activation": activation if activation == "squared relu" else "usual",
        "mlp_bias": has_bias,
    }
    if not options.whole("num-experts", 0):
        return fields
    # Experts take the MLP's activation and, unless told, its width.
    experts = _experts(options, activation, width)
    is_mixed = bool(experts.keys() & {"first_dense_layers", "layer_step"})
    if has_bias and (is_mixed or experts["shared_hidden_size"]):
        raise options.refusal("disable-bias-linear", "true beside shared experts, or MLPs")
    return fields | {"mlp_bias": False, "experts": experts | {"bias": has_bias}}


def _experts(options: _ModelOptions, activation: str, width: int) -> Keys:
    """Return routed and shared experts; *width* is that of an MLP."""
    # Without a group top-k the router knows no groups.
    group_topk = options.whole("moe-router-group-topk", 0)
    return {
        "num_experts": options.whole("num-experts", 0),
        "experts_per_token": options.whole("moe-router-topk", 2),
        "hidden_size": options.whole("moe-ffn-hidden-size", width),
        "shared_hidden_size": options.whole("moe-shared-expert-intermediate-size", 0),
        "shared_gate": options.has("moe-shared-expert-gate"),
        "scores": options.chosen("moe-router-score-function", "softmax", SCORES),
        "routing_bias": options.has("moe-router-enable-expert-bias"),
        "activation": activation,
        "weighs_inputs": options.has("moe-apply-probs-on-input"),
        "num_groups": options.whole("moe-router-num-groups", 1) if group_topk else 1,
        "groups_per_token": group_topk or 1,
        **_expert_layers(options),
    }


def _expert_layers(options: _ModelOptions) -> Keys:
    """Return the layers with experts: all behind the first ones, or one in so many."""
    key, layers = "moe-layer-freq", options.whole("num-layers", 0)
    frequency = options.keys.get(key, 1)
    if str(frequency).isdecimal():
        frequency = int(str(frequency))
    numbers = layer_numbers(frequency, layers)
    first = numbers.index(1) if 1 in numbers else layers
    if first < layers and all(numbers[first:]):
        return {"first_dense_layers": first} if first else {}
    for step in range(2, layers + 1):
        if numbers == [int((layer + 1) % step == 0) for layer in range(layers)]:
            return {"layer_step": step}
    raise options.refusal(
        key, f"a list of {layers}: 0 for the first ones, or 1 for the last of so many"
    )


def _vocabulary(options: _ModelOptions, facts: Facts) -> int:
    """Return the size of the vocabulary: that of ``--model`` where padding makes both equal.

    Raises:
        MissingError: If a tokenizer's files say how many, and no option does.
    """
    vocab_size, like = _told_vocabulary(options), facts.model
    if vocab_size is None:
        vocab_size = cast("int | None", facts.get(VOCABULARY))
    if like is None:
        if vocab_size is None:
            kind = options.keys.get("tokenizer-type", GPT2_TOKENIZER)
            raise MissingError(VOCABULARY, f"in the files of {kind}; with --model that model's")
        return vocab_size
    # Megatron pads the embedding to a multiple of this, so that tp divides it.
    multiple = options.whole(MULTIPLE_KEY, MULTIPLE) * options.whole(
        "tensor-model-parallel-size", 1
    )
    model_size = like.vocab_size
    is_equal = vocab_size is None or (
        multiple and -(-vocab_size // multiple) == -(-model_size // multiple)
    )
    return model_size if vocab_size is None or is_equal else vocab_size


def _told_vocabulary(options: _ModelOptions) -> int | None:
    """Return the size of the vocabulary by options; None where a tokenizer's files say it."""
    kind = options.words.word(options.keys, "tokenizer-type", GPT2_TOKENIZER)
    if kind in NULL_TOKENIZERS:
        if "vocab-size" not in options.keys:
            raise MissingError("model", f"vocab-size of {kind}: not in the file")
        # The token that ends a document is added.
        return options.whole("vocab-size", 0) + 1
    if kind == "TikTokenizer":
        return options.whole("vocab-size", TIKTOKEN_TOKENS)
    file = Path(str(options.keys.get("vocab-file", ""))).name
    return GPT2_TOKENS if kind == GPT2_TOKENIZER and file.startswith(GPT2_FILE) else None


MODEL = Codec(write_model, read_model)
