"""The model that options of Megatron-LM describe, and the options that describe a model.

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
    FileWords,
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
        "add-qkv-bias": model.attention_bias and not model.mlp_bias,
        "untie-embeddings-and-output-weights": not model.tied_embeddings,
        "group-query-attention": model.num_kv_heads < model.num_heads,
        "qk-layernorm": model.qk_norm == "head",
    }
    width = model.head_dim
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


def read_model(_: Roles, keys: Keys, facts: Facts, words: FileWords) -> Keys:
    """Return the model that the options of a file describe.

    What they leave open, such as the vocabulary of a tokenizer's files, is that of ``--model``.

    Raises:
        MissingError: If they leave something open, and no model is given.
        PlanError: If no model has what they say.
    """
    like = facts.model
    usual = {} if like is None else {key: getattr(like, name) for key, name in SIZES.items()}
    sizes = {key: keys.get(key, usual.get(key)) for key in SIZES}
    if lacking := [key for key, value in sizes.items() if value is None]:
        raise MissingError("model", f"{', '.join(lacking)}: not in the file")
    said = _Said({**keys, **sizes}, words)
    length = keys.get("seq-length") or facts.get("seq_len")
    most = said.whole("max-position-embeddings", 0)
    if isinstance(length, int) and length > most:
        raise words.unknown("max-position-embeddings", most, (f"{length} positions or more",))
    found: Keys = {
        "name": "imported",
        "title": "options of a script",
        "source": f"options of {words.framework}",
        **{name: said.whole(key, 0) for key, name in SIZES.items()},
        "seq_len": length or sizes["max-position-embeddings"],
        "vocab_size": _vocabulary(said, facts),
        **_attention(said),
        **_mlp(said),
        **_windows(said),
        **_whole_model(said),
    }
    model = parse_model(found, origin=f"the model of {words.framework}")
    return {"model": model if like is None else _as_in(model, like), VOCABULARY: found[VOCABULARY]}


def _as_in(model: ModelSpec, like: ModelSpec) -> ModelSpec:
    """Return a model with what no option says: the code of transformers, and widths of no layer."""
    changed: dict[str, object] = {"fused_qkv": like.fused_qkv}
    experts, others = model.experts, like.experts
    if experts is not None and others is not None:
        scores = {
            "softmax": "softmax of chosen"
        }  # of Megatron-Core both are of a token's own experts
        own: dict[str, object] = {"casts_shares": others.casts_shares}
        if scores.get(experts.scores) == others.scores:
            own["scores"] = others.scores
        changed["experts"] = experts.model_copy(update=own)
        if all(map(experts.has_layer, range(model.num_layers))):
            changed["ffn_hidden_size"] = like.ffn_hidden_size
    return model.model_copy(update=changed)


class _Said(NamedTuple):
    """The options of a file that describe a model, and what reads them."""

    keys: Keys
    words: FileWords

    def has(self, key: str) -> bool:
        """Return whether a switch stands in the file."""
        return self.keys.get(key) is True

    def whole(self, key: str, usual: int) -> int:
        """Return a whole number."""
        return self.words.whole(self.keys, key, usual, least=0)

    def number(self, key: str, usual: float) -> float:
        """Return a number."""
        value = self.keys.get(key, usual)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.words.unknown(key, value, ("a number",))
        return value

    def chosen(self, key: str, usual: str, values: Mapping[str, str]) -> str:
        """Return which of *values* an option has, by our name."""
        word = self.words.word(self.keys, key, usual)
        for ours, theirs in values.items():
            if theirs == word:
                return ours
        raise self.words.unknown(key, word, values.values())

    def refusal(self, key: str, allowed: str) -> PlanError:
        """Return the error of an option that does not go with others."""
        return self.words.unknown(key, self.keys.get(key, False), (allowed,))


def _whole_model(said: _Said) -> Keys:
    """Return what is not of one part of a layer."""
    positions = said.keys.get("position-embedding-type", POSITIONS["learned"])
    if said.has("use-rotary-position-embeddings"):
        positions = POSITIONS["rotary"]
    if said.has("no-position-embedding") and positions != POSITIONS["rotary"]:
        raise said.refusal("no-position-embedding", "with position-embedding-type=rope")
    kind = _Said({"position-embedding-type": positions}, said.words)
    hidden, attention = (said.number(key, 0.1) for key in ("hidden-dropout", "attention-dropout"))
    if (hidden > 0) != (attention > 0):
        allowed = "0" if hidden == 0 else "above 0"
        text = f"{allowed} with hidden-dropout={hidden:g}"
        raise said.words.unknown("attention-dropout", attention, (text,))
    is_rotary = positions == POSITIONS["rotary"]
    return {
        "positions": kind.chosen("position-embedding-type", "", POSITIONS),
        "rotary_fraction": said.number("rotary-percent", 1.0) if is_rotary else 1.0,
        "norm": said.chosen("normalization", "LayerNorm", NORMS),
        "tied_embeddings": not said.has("untie-embeddings-and-output-weights"),
        "dropout": hidden > 0,
    }


def _attention(said: _Said) -> Keys:
    """Return heads, biases and norms of attention."""
    heads, hidden = (said.whole(key, 0) for key in ("num-attention-heads", "hidden-size"))
    if heads < 1 or ("kv-channels" not in said.keys and hidden % heads):
        raise said.refusal("num-attention-heads", f"a divisor of hidden-size={hidden}")
    has_bias = not said.has("disable-bias-linear")
    is_latent = said.has("multi-latent-attention")
    is_grouped = said.has("group-query-attention")
    if is_latent and is_grouped:
        raise said.refusal("group-query-attention", "without multi-latent-attention")
    own = hidden // heads
    return {
        "num_kv_heads": said.whole("num-query-groups", 1) if is_grouped else heads,
        "head_dim": own if is_latent else said.whole("kv-channels", own),
        "attention_bias": has_bias or said.has("add-qkv-bias"),
        "output_bias": has_bias,
        "attention_sinks": said.chosen("softmax-type", "vanilla", SOFTMAX) == "sinks",
        **({"latent": _latent(said)} if is_latent else {"qk_norm": _qk_norm(said)}),
    }


def _qk_norm(said: _Said) -> str:
    if said.has("qk-l2-norm"):
        return "unweighted"
    return "head" if said.has("qk-layernorm") else "none"


def _latent(said: _Said) -> Keys:
    """Return widths of multi-head latent attention, whose latents have norms here."""
    if not said.has("qk-layernorm") or said.has("qk-l2-norm"):
        raise said.refusal("multi-latent-attention", "with qk-layernorm")
    return {
        "query_rank": said.whole("q-lora-rank", 0),
        "kv_rank": said.whole("kv-lora-rank", 32),
        "plain_head_dim": said.whole("qk-head-dim", 128),
        "rotary_head_dim": said.whole("qk-pos-emb-head-dim", 64),
        "value_head_dim": said.whole("v-head-dim", 128),
    }


def _windows(said: _Said) -> Keys:
    """Return the window and the layers that have it (is_layer_window_attention of core)."""
    key, skips = "window-size", "window-attn-skip-freq"
    if key not in said.keys:
        return {}
    layers, skipped = said.whole("num-layers", 0), said.keys.get(skips)
    match = WINDOW.fullmatch(str(said.keys[key]).replace(" ", ""))
    if match is None or int(match[1]) < 0 or int(match[2]) != 0:
        raise said.refusal(key, "how many tokens before its own a token sees, and 0, as 127,0")
    if skipped is None:
        pattern = "W"
    elif str(skipped).isdecimal():
        pattern = "W" * min(int(str(skipped)) - 1, layers) + "F"
    else:
        pattern = "".join("FW"[number] for number in layer_numbers(skipped, layers))
    if "W" not in pattern:
        raise said.refusal(skips, f"a number from 2, or a list of {layers} layers")
    return {"window": int(match[1]) + 1, "layer_pattern": pattern}


def _activation(said: _Said) -> str:
    """Return the activation; that of experts with a bound and an offset is ``clamped``."""
    named = [key for key in ACTIVATIONS if said.has(key)]
    if named[1:]:
        raise said.refusal(named[1], f"without {named[0]}")
    found = ACTIVATIONS[named[0]] if named else "gelu"
    offset, bound = (
        said.number(key, 0) for key in ("glu-linear-offset", "activation-func-clamp-value")
    )
    if found == "clamped" and not (said.whole("num-experts", 0) and offset == 1 and bound):
        text = "with num-experts, glu-linear-offset=1 and activation-func-clamp-value"
        raise said.refusal("quick-geglu", text)
    if found != "clamped" and (offset or bound):
        key = "glu-linear-offset" if offset else "activation-func-clamp-value"
        raise said.refusal(key, "with quick-geglu")
    return found


def _mlp(said: _Said) -> Keys:
    """Return the MLP, and experts in its place."""
    activation, hidden = _activation(said), said.whole("hidden-size", 0)
    # With swiglu two thirds of the usual width, as a multiple of 64 (validate_args).
    usual = int((4 * hidden * 2 / 3) / 64) * 64 if activation == "silu" else 4 * hidden
    width, has_bias = said.whole("ffn-hidden-size", usual), not said.has("disable-bias-linear")
    found: Keys = {
        "gated_mlp": activation in {"silu", "clamped"},
        "ffn_hidden_size": width,
        "activation": activation if activation == "squared relu" else "usual",
        "mlp_bias": has_bias,
    }
    if not said.whole("num-experts", 0):
        return found
    experts = _experts(said, activation, width)
    is_mixed = bool(experts.keys() & {"first_dense_layers", "layer_step"})
    if has_bias and (is_mixed or experts["shared_hidden_size"]):
        raise said.refusal("disable-bias-linear", "true beside shared experts, or MLPs")
    return found | {"mlp_bias": False, "experts": experts | {"bias": has_bias}}


def _experts(said: _Said, activation: str, width: int) -> Keys:
    """Return routed and shared experts; *width* is that of an MLP."""
    group_topk = said.whole("moe-router-group-topk", 0)
    return {
        "num_experts": said.whole("num-experts", 0),
        "experts_per_token": said.whole("moe-router-topk", 2),
        "hidden_size": said.whole("moe-ffn-hidden-size", width),
        "shared_hidden_size": said.whole("moe-shared-expert-intermediate-size", 0),
        "shared_gate": said.has("moe-shared-expert-gate"),
        "scores": said.chosen("moe-router-score-function", "softmax", SCORES),
        "routing_bias": said.has("moe-router-enable-expert-bias"),
        "activation": activation,
        "weighs_inputs": said.has("moe-apply-probs-on-input"),
        "num_groups": said.whole("moe-router-num-groups", 1) if group_topk else 1,
        "groups_per_token": group_topk or 1,
        **_expert_layers(said),
    }


def _expert_layers(said: _Said) -> Keys:
    """Return which layers have experts: all behind the first ones, or one in so many."""
    key, layers = "moe-layer-freq", said.whole("num-layers", 0)
    frequency = said.keys.get(key, 1)
    if str(frequency).isdecimal():
        frequency = int(str(frequency))
    numbers = layer_numbers(frequency, layers)
    first = numbers.index(1) if 1 in numbers else layers
    if first < layers and all(numbers[first:]):
        return {"first_dense_layers": first} if first else {}
    for step in range(2, layers + 1):
        if numbers == [int((layer + 1) % step == 0) for layer in range(layers)]:
            return {"layer_step": step}
    raise said.refusal(
        key, f"a list of {layers}: 0 for the first ones, or 1 for the last of so many"
    )


def _vocabulary(said: _Said, facts: Facts) -> int:
    """Return the tokens of the vocabulary: of ``--model`` where padding makes both equal.

    Raises:
        MissingError: If a tokenizer's files say how many, and no option does.
    """
    found, like = _told_vocabulary(said), facts.model
    if found is None:
        found = cast("int | None", facts.get(VOCABULARY))
    if like is None:
        if found is None:
            kind = said.keys.get("tokenizer-type", GPT2_TOKENIZER)
            raise MissingError(VOCABULARY, f"in the files of {kind}; with --model that model's")
        return found
    multiple = said.whole(MULTIPLE_KEY, MULTIPLE) * said.whole("tensor-model-parallel-size", 1)
    own = like.vocab_size
    is_equal = found is None or (multiple and -(-found // multiple) == -(-own // multiple))
    return own if found is None or is_equal else found


def _told_vocabulary(said: _Said) -> int | None:
    """Return the tokens that the options tell; None where a tokenizer's files do."""
    kind = said.words.word(said.keys, "tokenizer-type", GPT2_TOKENIZER)
    if kind in NULL_TOKENIZERS:
        if "vocab-size" not in said.keys:
            raise MissingError("model", f"vocab-size of {kind}: not in the file")
        return said.whole("vocab-size", 0) + 1
    if kind == "TikTokenizer":
        return said.whole("vocab-size", TIKTOKEN_TOKENS)
    file = Path(str(said.keys.get("vocab-file", ""))).name
    return GPT2_TOKENS if kind == GPT2_TOKENIZER and file.startswith(GPT2_FILE) else None


MODEL = Codec(write_model, read_model)
