"""Codecs of nanotron: what no table says of its YAML.

Rules are those of commit 2411b022 (src/nanotron), version 0.4 of the package.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import prod

from meshwright.hwprofiles import MEBI
from meshwright.planner.tables import Codec, Facts, FileValues, Keys, Program, Roles
from meshwright.simulator import ModelSpec, PlanError
from meshwright.simulator.model import parse_model

MODEL = "model.model_config."
LLAMA, QWEN = f"{MODEL}is_llama_config", f"{MODEL}is_qwen2_config"
POSITIONS = "return_positions"
# Defaults of LlamaConfig and Qwen2Config, which are the same.
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
ALL_GATHER_KERNEL = "llama3_ring_attention"


def _read_model(_: Roles, keys: Keys, _facts: Facts, words: FileValues) -> Keys:
    """Return the model of Llama's or Qwen2's configuration."""
    kinds = [each for each in (LLAMA, QWEN) if keys.get(each) is True]
    if len(kinds) != 1:
        raise PlanError(f"{LLAMA} or {QWEN} of nanotron must be true, one of them")
    sizes = {name: words.whole(keys, MODEL + name, default) for name, default in SIZES.items()}
    heads, num_kv_heads = sizes["num_attention_heads"], keys.get(f"{MODEL}num_key_value_heads")
    is_qwen = kinds == [QWEN]
    window = keys.get(f"{MODEL}sliding_window_size") if is_qwen else None
    model_facts: dict[str, object] = {
        "name": "nanotron-qwen2" if is_qwen else "nanotron-llama",
        "num_layers": sizes["num_hidden_layers"],
        "hidden_size": sizes["hidden_size"],
        "ffn_hidden_size": sizes["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": heads if num_kv_heads is None else num_kv_heads,
        "vocab_size": sizes["vocab_size"],
        "seq_len": words.whole(keys, "tokens.sequence_length", 1),
        "tied_embeddings": keys.get(f"{MODEL}tie_word_embeddings", False),
        # The QKV projection of Qwen2 alone can have a bias, none of Llama's.
        "attention_bias": is_qwen and keys.get(f"{MODEL}attention_bias", False),
        "source": "a configuration of nanotron",
        **LIKE_LLAMA,
    }
    if window is not None:
        model_facts |= {"window": window, "layer_pattern": "W"}
    return {"model": parse_model(model_facts, origin="model.model_config of nanotron")}


LIKE_LLAMA: Mapping[str, object] = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "gated_mlp": True,
    "output_bias": False,
    "mlp_bias": False,
    "dropout": False,
}


def _read_length(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the length of sequences, which stages of data may not change."""
    key = roles["length"]
    if key not in keys:
        return {}
    length, stages = words.whole(keys, key, 1), keys.get(roles["stages"]) or []
    for stage in stages if isinstance(stages, list) else ():
        stage_length = stage.get("sequence_length") if isinstance(stage, Mapping) else None
        if stage_length not in {None, length}:
            raise words.unknown(
                f"{roles['stages']}: sequence_length", stage_length, (f"{key}={length}",)
            )
        # Positions that begin anew with each document cut attention of Qwen2 (models/qwen.py).
        if keys.get(QWEN) is True and _restarts_positions(stage):
            raise words.unknown(f"{roles['stages']}: {POSITIONS}", value=True, allowed=(False,))
    return {"seq_len": length}


def _restarts_positions(stage: object) -> bool:
    """Return True if positions begin anew with each document, as by default."""
    for section in ("data", "dataset"):
        stage = stage.get(section) if isinstance(stage, Mapping) else None
    return isinstance(stage, Mapping) and "dataset_folder" in stage and stage.get(POSITIONS, True)


def _read_ranks(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    if roles["dp"] not in keys:
        return {}
    world_size = prod(words.whole(keys, roles[axis], 1) for axis in ("tp", "pp", "cp", "dp"))
    return {"dp": keys[roles["dp"]], "world_size": world_size}


def _read_batch(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    if not {*roles.values()} <= {*keys}:
        return {}
    micro, steps, dp = (words.whole(keys, roles[name], 1) for name in ("micro", "steps", "dp"))
    return {"global_batch_size": micro * steps * dp, "microbatch_size": micro}


def _read_overlap(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the overlap of tensor-parallel collectives: none unless they are asynchronous."""
    key, tp = roles["asynchronous"], words.whole(keys, roles["tp"], 1)
    words.held(keys, key, (True, False, None))
    return {} if tp == 1 or keys.get(key) else {"stack.tp_overlap_fraction": 0.0}


def _read_buckets(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the bucket size of DistributedDataParallel in parameters."""
    # Buckets are sized in megabytes (bucket_cap_mb) of gradients in fp32 or 16 bits.
    size = 4 if facts.get("precision") == "fp32" else 2
    return {
        "stack.gradient_bucket_parameters": words.whole(keys, roles["megabytes"], 25)
        * (MEBI // size),
        "stack.gradient_bucket_parameters_per_replica": 0,
    }


def _read_context(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the degree of context parallelism, whose ranks all-gather keys and values."""
    cp, kernel = words.whole(keys, roles["cp"], 1), keys.get(roles["kernel"])
    if cp == 1:
        return {"cp": 1}
    if kernel != ALL_GATHER_KERNEL:
        raise words.unknown(
            roles["kernel"], kernel, (f"{ALL_GATHER_KERNEL} with {roles['cp']}={cp}",)
        )
    heads_per_rank = words.whole(keys, roles["heads"], 1) // words.whole(keys, roles["tp"], 1)
    words.held(keys, roles["stride"], (heads_per_rank,))
    return {"cp": cp, "cp_type": "all-gather"}


def _read_stages(_: Roles, _keys: Keys, facts: Facts, _words: FileValues) -> Keys:
    """Return the layers of each stage, balanced by costs; a stage ends past its share."""
    pp, model = facts.number("pp"), facts.model or facts.get("model")
    if pp == 1 or not isinstance(model, ModelSpec):
        return {}
    counts = [0] * pp
    # The blocks around the layers are the embedding, the last norm and the head.
    for layer, rank in zip(range(-1, model.num_layers + 2), _block_ranks(model, pp), strict=True):
        counts[rank] += 0 <= layer < model.num_layers
    return {"stages": tuple(counts)}


def _block_ranks(model: ModelSpec, pp: int) -> Iterator[int]:
    """Yield the rank of each block: embedding, layers, last norm, and head (build_model)."""
    # Costs are nanotron's own: weights of attention, MLP and head.
    layer = 4 * model.query_hidden_size * model.hidden_size
    layer += 3 * model.ffn_hidden_size * model.hidden_size
    head = model.vocab_size * model.hidden_size
    costs = [0, *[layer] * model.num_layers, 0, head]
    rank, whole = 0, sum(costs)
    for cost in accumulate(costs):
        yield rank
        if cost > whole * ((rank + 1) / pp):
            rank += 1


PROGRAM = Program(
    codecs={
        "model of nanotron": Codec(read=_read_model),
        "length of nanotron": Codec(read=_read_length),
        "ranks of nanotron": Codec(read=_read_ranks),
        "batch of nanotron": Codec(read=_read_batch),
        "overlap of nanotron": Codec(read=_read_overlap),
        "buckets of nanotron": Codec(read=_read_buckets),
        "context of nanotron": Codec(read=_read_context),
        "stages of nanotron": Codec(read=_read_stages),
    },
)
