"""Megatron-LM: a script that starts pretrain_gpt.py with its options.

Options are those of megatron/training/arguments.py and of the dataclasses that it makes options of,
in core_v0.16.1 (https://github.com/NVIDIA/Megatron-LM, commit 55ac7082).
"""

from math import prod
from typing import cast

from meshwright.hwprofiles import Precision
from meshwright.planner.export import megatron_core
from meshwright.planner.export.facts import Facts, FileWords, Keys
from meshwright.planner.export.megatron_core import expert_fields
from meshwright.planner.export.table import Codec, Program, Roles
from meshwright.planner.export.texts import flags, layer_numbers
from meshwright.simulator import ModelSpec, PlanError

# Formats of exp_avg_dtype; the first is that of any other optimizer.
MOMENTS = Precision.FP32, Precision.FP16, Precision.BF16, Precision.FP8


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _read_ranks(roles: Roles, keys: Keys, _: Facts, words: FileWords) -> Keys:
    ranks = roles["ranks"]
    if ranks not in keys:
        return {}
    world = words.whole(keys, roles["nodes"], 1) * words.whole(keys, ranks, 1)
    others = prod(words.whole(keys, roles[axis], 1) for axis in ("tp", "pp", "cp"))
    if world % others:
        raise words.unknown(ranks, keys[ranks], (f"a multiple of {others} ranks in all",))
    return {"world_size": world, "dp": world // others}


def _stored(facts: Facts) -> Precision:
    return cast("Precision", facts.get("precision")).storage


def _write_gradients(roles: Roles, facts: Facts) -> Keys:
    """Return the format in which gradients are kept, and so reduced."""
    stored = _stored(facts)
    if stored is Precision.FP32:
        return {}
    if facts.get("gradient_precision") is Precision.FP32:
        return {roles["fp32"]: True}
    return {roles["bf16"]: True} if stored is Precision.BF16 else {}


def _read_gradients(roles: Roles, keys: Keys, facts: Facts, _: FileWords) -> Keys:
    stored = _stored(facts)
    is_half = roles["bf16"] in keys if stored is Precision.BF16 else roles["fp32"] not in keys
    return {"gradient_precision": stored if is_half else Precision.FP32}


def _write_moments(roles: Roles, facts: Facts) -> Keys:
    moments = facts.get("moment_precision")
    if moments is None:
        return {}
    found: Keys = {
        roles["switch"]: True,
        roles["first"]: str(moments),
        roles["second"]: str(moments),
    }
    kept = facts.get("gradient_precision")
    return found | ({roles["gradients"]: "bf16"} if kept is Precision.BF16 else {})


def _read_moments(roles: Roles, keys: Keys, _: Facts, words: FileWords) -> Keys:
    first, second = roles["first"], roles["second"]
    on = roles["switch"] in keys
    usual = str(Precision.FP32)
    said: Keys = {key: words.word(keys, key, usual) for key in (first, second)}
    if said[first] not in (MOMENTS if on else MOMENTS[:1]):
        raise words.unknown(first, said[first], MOMENTS if on else MOMENTS[:1])
    words.held(said, second, (said[first],))
    words.held(keys, roles["gradients"], (Precision.FP32, Precision.BF16) if on else MOMENTS[:1])
    return {"moment_precision": Precision(str(said[first]))} if on else {}


def _write_model(_: Roles, facts: Facts) -> Keys:
    assert facts.model is not None  # of every plan
    return _model_options(facts.model, cast("int", facts.get("stack.vocabulary_multiple")))


def _read_model(roles: Roles, keys: Keys, facts: Facts, _words: FileWords) -> Keys:
    """Return nothing: sizes are compared with those of --model."""
    if facts.model is None:
        return {}
    own = _model_options(facts.model, 1)
    for key in (each for each in roles if each not in VOCABULARY_KEYS):
        theirs = keys.get(key)
        layers = layer_numbers(theirs, facts.model.num_layers) if key in LAYER_KEYS else []
        if layers:
            theirs = None if all(layers) else str(layers).replace(" ", "")
        if key in keys and theirs != own.get(key):
            raise PlanError(
                f"{key}={theirs} is not that of model {facts.model.name}; "
                f"allowed: {own.get(key, 'leave it out')}"
            )
    return {}


LAYER_KEYS = {"moe-layer-freq"}
VOCABULARY_KEYS = {"vocab-size", "make-vocab-size-divisible-by"}


def _model_options(model: ModelSpec, vocabulary_multiple: int) -> Keys:
    """Return what describes *model*, of which pretrain_gpt.py has such a one."""
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
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.ffn_hidden_size,
        "num-attention-heads": model.num_heads,
        **own_width,
        **({"num-query-groups": model.num_kv_heads} if switches["group-query-attention"] else {}),
        "max-position-embeddings": model.max_positions,
        "position-embedding-type": POSITIONS[model.positions],
        "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        **{name: True for name, is_on in switches.items() if is_on},
        **{_dashed(name): value for name, value in expert_fields(model).items()},
        "hidden-dropout": dropout,
        "attention-dropout": dropout,
        # NullTokenizer adds one token, that ends a document.
        "vocab-size": model.vocab_size - 1,
        "make-vocab-size-divisible-by": vocabulary_multiple,
    }


POSITIONS = {"learned": "learned_absolute", "rotary": "rope"}
# What else a first run needs; it leaves the layout as it is.
SAMPLE: Keys = {
    "transformer-impl": "transformer_engine",
    "tokenizer-type": "NullTokenizer",
    "mock-data": True,
    "train-iters": 100,
    "lr": 0.0001,
}
PROGRAM = Program(
    command=lambda export: ("pretrain_gpt.py", *flags(export.keys), *flags(SAMPLE)),
    is_script=lambda _: True,
    codecs={
        **megatron_core.CODECS,
        "ranks of torchrun": Codec(lambda *_: {}, _read_ranks),
        "model of Megatron-LM": Codec(_write_model, _read_model),
        "gradients of Megatron-LM": Codec(_write_gradients, _read_gradients),
        "moments of Megatron-LM": Codec(_write_moments, _read_moments),
    },
)
