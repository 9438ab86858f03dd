"""Codecs of MaxText: what no table says of its YAML.

Defaults are those of src/maxtext/configs/base.yml, rules those of create_device_mesh and of
MaxTextConfig, commit e591f30c.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from meshwright.planner.tables import Codec, Facts, FileValues, Keys, Program, Roles
from meshwright.simulator import ModelSpec, PlanError, list_models
from meshwright.simulator.model import parse_model

# Sizes of a model that is not named, by our field.
SIZES: Mapping[str, tuple[str, int]] = {
    "hidden_size": ("base_emb_dim", 2048),
    "num_heads": ("base_num_query_heads", 16),
    "num_kv_heads": ("base_num_kv_heads", 16),
    "ffn_hidden_size": ("base_mlp_dim", 7168),
    "num_layers": ("base_num_decoder_layers", 16),
    "head_dim": ("head_dim", 128),
    "vocab_size": ("vocab_size", 32000),
}
# The same names, of a Llama or as one of its family.
MODEL_ALIASES = {
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.3-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
}
DEFAULT, LLAMA = "default", ("llama2", "mistral")
GATED = ["silu", "linear"]
AXES = ("data", "fsdp", "tensor", "tensor_sequence", "context", "pipeline", "expert")
FREE = -1
SHORTEST_FLASH_TOKENS = 128  # tokens below which no flash attention is chosen (attention_op.py)


def _read_model(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the model that a file names, or that its sizes make: a decoder as Llama's."""
    name = words.word(keys, roles["name"], DEFAULT)
    of_sizes = [key for key, _ in SIZES.values() if key in keys]
    if name != DEFAULT:
        built_in = MODEL_ALIASES.get(name, name)
        if built_in not in NAMED:
            raise words.unknown(roles["name"], name, (DEFAULT, *NAMED, *MODEL_ALIASES))
        if of_sizes:
            raise PlanError(f"{of_sizes[0]} of maxtext stands beside {roles['name']}={name}")
        return {"model": built_in}
    # Decoders without a name are read as Llama's: what would make others is refused.
    for key, values in {
        "decoder_block": (*LLAMA, None),
        "global_parameter_scale": (1,),
        "mlp_activations": (GATED,),
        "trainable_position_size": (FREE,),
        "dropout_rate": (0,),
    }.items():
        words.held(keys, key, values)
    sizes = {ours: words.whole(keys, key, default) for ours, (key, default) in SIZES.items()}
    model_facts: dict[str, object] = {
        **sizes,
        "name": "maxtext-llama",
        "seq_len": facts.get("seq_len") or words.whole(keys, "max_target_length", 2048),
        "positions": "rotary",
        "norm": "rmsnorm",
        "gated_mlp": True,
        "tied_embeddings": keys.get("logits_via_embedding", False),
        "attention_bias": keys.get("attention_bias", False),
        "output_bias": False,
        "mlp_bias": False,
        "dropout": False,
        "fused_qkv": keys.get("fused_qkv", False),
        "source": "a configuration of MaxText",
    }
    return {"model": parse_model(model_facts, origin="model of maxtext")}


NAMED = tuple(
    name for name in list_models() if name.startswith(("llama2-", "llama3-", "mixtral-", "qwen3-"))
)


class _Axes(NamedTuple):
    """Degrees of the axes; ``is_open`` where nobody says how data and fsdp share their ranks."""

    degrees: dict[str, int]
    is_open: bool = False


def _read_axes(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the degrees of all axes; data, fsdp and expert are one axis here."""
    degrees, is_open = _axes(roles, keys, facts, words)
    tensor, tensor_sequence = degrees["tensor"], degrees["tensor_sequence"]
    # Both split tensors; tensor_sequence splits activations along the sequence, too.
    if tensor > 1 and tensor_sequence > 1:
        raise words.unknown(
            roles["ici_tensor_sequence"], tensor_sequence, (f"1 beside tensor={tensor}",)
        )
    degrees_here: Keys = {
        "tp": tensor * tensor_sequence,
        "sequence_parallel": tensor_sequence > 1,
        "pp": degrees["pipeline"],
        "cp": degrees["context"],
        "ep": degrees["expert"],
        "dp": degrees["data"] * degrees["fsdp"] * degrees["expert"],
        "world_size": prod(degrees.values()),
    }
    if is_open:
        return {**degrees_here, "zero_stage": 3}
    shards = degrees["fsdp"] * degrees["expert"]
    stage = 3 if degrees["fsdp"] > 1 else int(bool(keys.get(roles["optimizer"], False)))
    return {
        **degrees_here,
        "zero_stage": stage,
        "dp_shard": shards if stage == 3 else degrees_here["dp"],
    }


def _axes(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> _Axes:
    """Return the degree of each axis; of data and fsdp, where both are free, the product alone."""
    defaults = {"ici_fsdp": FREE, "dcn_data": FREE}
    given = {
        (place, axis): words.whole(
            keys, roles[f"{place}_{axis}"], defaults.get(f"{place}_{axis}", 1), least=FREE
        )
        for place in ("ici", "dcn")
        for axis in AXES
    }
    if 0 in given.values():
        raise PlanError("a degree of an axis of maxtext is 0; allowed: -1, or 1 and more")
    products = {
        place: prod(each for at, each in given.items() if at[0] == place and each > 0)
        for place in ("ici", "dcn")
    }
    # An axis may span slices (dcn) and the chips within them (ici).
    degrees = {axis: max(given["ici", axis], 1) * max(given["dcn", axis], 1) for axis in AXES}
    free = {place: axis for (place, axis), each in given.items() if each == FREE}
    # Two free axes of one place would leave their degrees open.
    if sum(each == FREE for each in given.values()) > len(free):
        raise PlanError("two axes of maxtext within slices, or between them, are -1; allowed: one")
    if not free:
        return _Axes(degrees)
    ranks, fixed_ranks = facts.world_size, products["ici"] * products["dcn"]
    slices = words.whole(keys, roles["slices"], FREE, least=FREE)
    if slices > 0 and "dcn" in free:
        degrees[free.pop("dcn")] *= _share(slices, products["dcn"], "num_slices")
        fixed_ranks = prod(degrees.values())
    if len({*free.values()}) == 1:
        degrees[next(iter(free.values()))] *= _share(ranks, fixed_ranks, "--gpus")
    elif free:
        return _open(degrees, free, facts, _share(ranks, fixed_ranks, "--gpus"))
    if prod(degrees.values()) != ranks:
        raise PlanError(f"axes of maxtext are {prod(degrees.values())} ranks; --gpus is {ranks}")
    return _Axes(degrees)


def _open(degrees: dict[str, int], free: Mapping[str, str], facts: Facts, rest: int) -> _Axes:
    """Return the degrees where *rest* ranks go to two axes: --dp-shard alone decides how."""
    if {*free.values()} != {"data", "fsdp"}:
        raise PlanError(
            f"num_slices of maxtext is missing: {free['ici']} within slices and {free['dcn']} "
            "between them are -1"
        )
    shards = facts.get("dp_shard")
    if not isinstance(shards, int):
        degrees["data"] *= rest
        return _Axes(degrees, is_open=True)
    shard_share = _share(shards, degrees["fsdp"] * degrees["expert"], "--dp-shard")
    degrees["fsdp"] *= shard_share
    degrees["data"] *= _share(rest, shard_share, "--gpus")
    return _Axes(degrees)


def _share(whole: int, part: int, name: str) -> int:
    """Return the quotient of ranks; raises PlanError where they do not divide."""
    if whole % part:
        raise PlanError(f"{name} {whole} is no multiple of the {part} that axes of maxtext take")
    return whole // part


def _read_batch(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the global batch, and the microbatch of a data-parallel rank."""
    key, pp = roles["device"], facts.number("pp")
    # A batch of a device may be a fraction: 0.5 is a sequence on two devices.
    device, steps = keys.get(key, 12.0), words.whole(keys, roles["steps"], 1)
    if type(device) not in {int, float}:
        raise words.unknown(key, device, ("a number",))
    count = words.whole(keys, roles["microbatches"], FREE, least=FREE)
    # Without a number MaxText runs as many microbatches as there are stages.
    count = 1 if pp == 1 else pp if count < 0 else count
    if steps > 1 and pp > 1:
        raise words.unknown(roles["steps"], steps, (f"1 with {pp} stages",))
    whole = float(str(device)) * facts.world_size
    micro = whole / (facts.number("dp") * count)
    if micro < 1 or micro != int(micro):
        raise words.unknown(key, device, ("a number that makes whole microbatches of ranks",))
    return {"global_batch_size": round(whole * steps), "microbatch_size": round(micro)}


def _read_pipeline(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the schedule of a pipeline with one stage a rank: GPipe."""
    pp, named = facts.number("pp"), facts.get("model")
    model = facts.model or named
    if pp == 1 or not isinstance(model, ModelSpec):
        return {}
    layers = words.whole(keys, roles["layers"], 1)
    words.held(keys, roles["repeats"], (FREE, 1))
    if layers * pp != model.num_layers:
        raise words.unknown(
            roles["layers"], layers, (f"{model.num_layers / pp:g}: one stage a rank",)
        )
    return {"schedule": "gpipe", "stages": (layers,) * pp}


def _read_attention(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    kernel = words.word(keys, roles["kernel"], "autoselected")
    # `autoselected` goes by the length of sequences and the hardware.
    is_short = words.whole(keys, roles["length"], 2048) < SHORTEST_FLASH_TOKENS
    is_cpu = words.word(keys, roles["hardware"], "tpu") == "cpu"
    kernels = {
        "autoselected": "unfused" if is_short or is_cpu else "flash",
        "dot_product": "unfused",
        "flash": "flash",
        "cudnn_flash_te": "flash",
        "cudnn_flash_jax": "flash",
    }
    if kernel not in kernels:
        raise words.unknown(roles["kernel"], kernel, kernels)
    return {"attention": kernels[kernel]}


PROGRAM = Program(
    codecs={
        "model of MaxText": Codec(read=_read_model),
        "axes of MaxText": Codec(read=_read_axes),
        "batch of MaxText": Codec(read=_read_batch),
        "pipeline of MaxText": Codec(read=_read_pipeline),
        "attention of MaxText": Codec(read=_read_attention),
    },
)
