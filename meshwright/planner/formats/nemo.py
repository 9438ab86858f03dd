"""Codecs of NeMo 1: what no table says of its YAML.

Rules are those of MegatronGPTModel and MegatronBaseModel (nemo/collections/nlp/models/
language_modeling), commit 8cfedd72.
"""

from collections.abc import Mapping
from math import prod

from meshwright.hwprofiles import MEBI, Precision
from meshwright.planner.export import MEGATRON_CODECS
from meshwright.planner.tables import Codec, Facts, FileValues, Keys, MissingError, Program, Roles
from meshwright.simulator import PlanError
from meshwright.simulator.model import parse_model

MODEL = "model."
NORMS = {
    "layernorm": "layernorm",
    "layernorm1p": "layernorm",
    "LayerNorm": "layernorm",
    "rmsnorm": "rmsnorm",
    "RMSNorm": "rmsnorm",
}
GATED = ("swiglu", "fast-swiglu")
ACTIVATIONS = {"gelu": "usual", "squared-relu": "squared relu", **dict.fromkeys(GATED, "usual")}
POSITIONS = {"learned_absolute": "learned", "rope": "rotary"}
# Words of tokenizers that have them without a file.
GPT2 = {("megatron", "GPT2BPETokenizer"), ("huggingface", "gpt2")}
GPT2_WORDS = 50257
PLAIN, APEX, CORE = "fused_adam", "distributed_fused_adam", "mcore_distributed_optim"
FORMATS = {16: "fp16", "16": "fp16", "16-mixed": "fp16", "bf16": "bf16", "bf16-mixed": "bf16"}
FORMATS |= {32: "fp32", "32": "fp32", "32-true": "fp32"}


def _read_model(_: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the model, if the file or ``--model`` says the size of its vocabulary."""
    _check_defaults(keys, words)
    vocabulary = _vocabulary(keys, facts)
    model_facts = _dense(keys, facts, words) | {"vocab_size": vocabulary}
    if model_facts["positions"] == "rotary":
        model_facts["rotary_fraction"] = keys.get(f"{MODEL}rotary_percentage", 1.0)
    if (number := keys.get(f"{MODEL}num_moe_experts")) is not None:
        model_facts["experts"] = {
            "num_experts": number,
            "experts_per_token": keys.get(f"{MODEL}moe_router_topk", 2),
            "hidden_size": model_facts["ffn_hidden_size"],
        }
    return {"model": parse_model(model_facts, origin="model of nemo"), "vocab_size": vocabulary}


def _dense(keys: Keys, facts: Facts, words: FileValues) -> dict[str, object]:
    """Return the fields of a model without experts, but its vocabulary."""
    width, heads = (_size(keys, name, words) for name in ("hidden_size", "num_attention_heads"))
    activation = _choice(keys, "activation", "gelu", tuple(ACTIVATIONS), words)
    positions = POSITIONS[
        _choice(keys, "position_embedding_type", "learned_absolute", tuple(POSITIONS), words)
    ]
    bias = keys.get(f"{MODEL}bias", True)
    dropouts = (keys.get(MODEL + name, 0.1) for name in ("hidden_dropout", "attention_dropout"))
    return {
        "name": "nemo-gpt",
        "num_layers": _size(keys, "num_layers", words),
        "hidden_size": width,
        "num_heads": heads,
        "num_kv_heads": _value_or_default(keys, "num_query_groups", heads),
        "head_dim": _value_or_default(keys, "kv_channels", width // heads),
        "ffn_hidden_size": _size(keys, "ffn_hidden_size", words),
        "seq_len": facts.get("seq_len") or words.whole(keys, f"{MODEL}encoder_seq_length", 512),
        "positions": positions,
        "norm": NORMS[_choice(keys, "normalization", "layernorm", tuple(NORMS), words)],
        "gated_mlp": activation in GATED,
        "activation": ACTIVATIONS[activation],
        "tied_embeddings": keys.get(f"{MODEL}share_embeddings_and_output_weights", True),
        "attention_bias": bias or keys.get(f"{MODEL}qkv_bias", False),
        "output_bias": bias,
        "mlp_bias": bias,
        "dropout": any(dropouts),
        "source": "a configuration of NeMo",
    }


def _check_defaults(keys: Keys, words: FileValues) -> None:
    """Raise PlanError where a file extends others: their keys are not here."""
    names = keys.get("defaults") or []
    for each in names if isinstance(names, list) else [names]:
        is_optional = isinstance(each, Mapping) and all(key.startswith("optional ") for key in each)
        if each != "_self_" and not is_optional:
            raise words.unknown("defaults", each, ("_self_",))


def _vocabulary(keys: Keys, facts: Facts) -> object:
    override = keys.get(f"{MODEL}override_vocab_size")
    if override is not None:
        return override
    tokenizer = keys.get(f"{MODEL}tokenizer.library"), keys.get(f"{MODEL}tokenizer.type")
    if tokenizer in GPT2:
        return GPT2_WORDS
    vocab_size = facts.get("vocab_size") or facts.get("model.vocab_size")
    if vocab_size is None:
        raise MissingError("vocab_size", "in the files of a tokenizer; with --model that model's")
    return vocab_size


def _size(keys: Keys, name: str, words: FileValues) -> int:
    if MODEL + name not in keys:
        raise PlanError(f"{MODEL}{name} of nemo is missing")
    return words.whole(keys, MODEL + name, 1)


def _value_or_default(keys: Keys, name: str, default: int) -> object:
    value = keys.get(MODEL + name)
    return default if value is None else value


def _choice(
    keys: Keys, name: str, default: str, allowed: tuple[str, ...], words: FileValues
) -> str:
    word = words.word(keys, MODEL + name, default)
    if word not in allowed:
        raise words.unknown(MODEL + name, word, allowed)
    return word


def _read_length(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    length = words.whole(keys, roles["length"], 512)
    words.held(keys, roles["data"], (length,))
    return {"seq_len": length}


def _read_ranks(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the ranks, where the trainer counts devices; -1 and auto are what a node has."""
    devices, nodes = keys.get(roles["devices"], "auto"), words.whole(keys, roles["nodes"], 1)
    if devices in ("auto", -1, "-1"):
        return {}
    # The trainer counts the devices of a node.
    ranks = words.whole(keys, roles["devices"], 1) * nodes
    model_ranks = prod(words.whole(keys, roles[axis], 1) for axis in ("tp", "pp", "cp"))
    if ranks % model_ranks:
        raise words.unknown(
            roles["devices"], devices, (f"multiples of {model_ranks} ranks in all",)
        )
    return {"world_size": ranks, "dp": ranks // model_ranks}


def _read_precision(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the number format: 16-bit weights are copies of masters, which O2 alone has."""
    trainer_precision = keys.get(roles["trainer"])
    if trainer_precision is None:
        return {}
    allowed = [key for key, each in FORMATS.items() if each != "fp16"]  # O2 has no fp16
    if trainer_precision not in allowed:
        raise words.unknown(roles["trainer"], trainer_precision, dict.fromkeys(map(str, allowed)))
    is_eight = keys.get(roles["eight"], False) is True
    if FORMATS[trainer_precision] == "bf16" and keys.get(roles["weights"], False) is not True:
        raise words.unknown(roles["weights"], value=False, allowed=(True,))
    if not is_eight:
        return {"precision": Precision(FORMATS[trainer_precision])}
    if keys.get(roles["hybrid"], False) is not True or keys.get(roles["e4m3"], False):
        raise words.unknown(roles["hybrid"], keys.get(roles["hybrid"], False), (True,))
    return {"precision": Precision.FP8}


def _read_gradients(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the format of gradients: those of fused_adam's O2 are fp32 (MainParamsOptimizer)."""
    if keys.get(roles["optimizer"]) == PLAIN:
        return {"gradient_precision": Precision.FP32}
    formats = {"fp32": Precision.FP32, "bf16": Precision.BF16, 32: Precision.FP32}
    word = keys.get(roles["sync"], "fp32")
    if word not in formats:
        raise words.unknown(roles["sync"], word, formats)
    return {"gradient_precision": formats[word]}


def _read_overlap(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the overlap of gradient reduction with backward, and the fusion of accumulation.

    What the file leaves out is as the optimizer has it.
    """
    optimizer, pp = keys.get(roles["optimizer"], PLAIN), words.whole(keys, roles["pp"], 1)
    fuses = keys.get(roles["fusion"], False) is True
    if optimizer == PLAIN:
        # fused_adam overlaps the reduction of plain data parallelism alone.
        overlaps = pp == 1 and not fuses and not keys.get(roles["sequence"], False)
        fuses = fuses and (pp > 1 or facts.number("dp") == 1)
    else:
        overlaps = keys.get(roles["overlap"], optimizer == APEX) is True
    return {"stack.overlap_gradient_reduce": overlaps, "stack.fused_gradient_accumulation": fuses}


def _read_buckets(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the bucket size of Apex's, or core's, optimizer in parameters."""
    if keys.get(roles["optimizer"]) == APEX:
        # Apex sizes buckets in megabytes of the format that is reduced.
        size = 2 if keys.get(roles["sync"]) == "bf16" else 4
        count = words.whole(keys, roles["megabytes"], 100) * MEBI // size
    elif keys.get(roles["optimizer"]) == CORE and keys.get(roles["parameters"]) is not None:
        count = words.whole(keys, roles["parameters"], 1)
    else:
        return {}
    return {
        "stack.gradient_bucket_parameters": count,
        "stack.gradient_bucket_parameters_per_replica": 0,
    }


def _read_sequences(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    words.held(keys, roles["switch"], (True, False, None))
    return {
        "sequence_parallel": bool(keys.get(roles["switch"]))
        and words.whole(keys, roles["tp"], 1) > 1
    }


def _read_attention(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    kernels = {"auto": "flash", "fused": "flash", "flash": "flash", "unfused": "unfused"}
    backend = words.word(keys, roles["backend"], "auto")
    if backend not in kernels:
        raise words.unknown(roles["backend"], backend, kernels)
    return {"attention": kernels[backend] if keys.get(roles["engine"]) is True else "unfused"}


PROGRAM = Program(
    codecs={
        **MEGATRON_CODECS,
        "model of NeMo": Codec(read=_read_model),
        "length of NeMo": Codec(read=_read_length),
        "ranks of NeMo": Codec(read=_read_ranks),
        "precision of NeMo": Codec(read=_read_precision),
        "gradients of NeMo": Codec(read=_read_gradients),
        "overlap of NeMo": Codec(read=_read_overlap),
        "buckets of NeMo": Codec(read=_read_buckets),
        "sequences of NeMo": Codec(read=_read_sequences),
        "attention of NeMo": Codec(read=_read_attention),
    },
)
