"""Megatron-LM: a script that starts pretrain_gpt.py with its options.

Options are those of megatron/training/arguments.py and of the dataclasses that it makes options of,
in core_v0.16.1 (https://github.com/NVIDIA/Megatron-LM, commit 55ac7082).
"""

from functools import partial
from math import prod
from typing import cast

from meshwright.hwprofiles import Dispatcher, Precision, StageSplit
from meshwright.planner.export import megatron_core
from meshwright.planner.export.megatron_model import MODEL
from meshwright.planner.tables import Codec, Facts, FileValues, Keys, Program, Roles, flags
from meshwright.simulator import PlanError

# Formats of exp_avg_dtype; the first is that of any other optimizer.
MOMENTS = Precision.FP32, Precision.FP16, Precision.BF16, Precision.FP8

# Kernels by the word of --attention-backend; without Transformer Engine there are others.
BACKENDS = {"auto": "flash", "flash": "flash", "fused": "flash", "unfused": "unfused"}


def _ranks_of_replica(roles: Roles, keys: Keys, words: FileValues) -> int:
    """Return the ranks of one replica: tp x pp x cp."""
    return prod(words.whole(keys, roles[axis], 1) for axis in ("tp", "pp", "cp"))


def _read_ranks(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    world, replica_ranks = facts.world_size, _ranks_of_replica(roles, keys, words)
    if world % replica_ranks:
        raise PlanError(f"{world} ranks are no multiple of the {replica_ranks} of tp, pp and cp")
    return {"dp": world // replica_ranks}


def _write_batch(roles: Roles, facts: Facts) -> Keys:
    return {roles["batch"]: facts.get("global_batch_size")}


def _read_batch(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the global batch size: by default one microbatch of each replica."""
    if roles["batch"] in keys:
        return {"global_batch_size": keys[roles["batch"]]}
    size = words.whole(keys, roles["microbatch"], facts.number("microbatch_size"))
    return {"global_batch_size": size * (facts.world_size // _ranks_of_replica(roles, keys, words))}


def _read_attention(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the attention kernel; NVTE_ variables exclude some (language_module.py)."""
    backend = words.word(keys, roles["backend"], "auto")
    if backend not in BACKENDS:
        raise words.unknown(roles["backend"], backend, BACKENDS)
    kernels = [roles[role] for role in ("flash", "fused")]
    for key in kernels:
        words.held(keys, key, ("0", "1"))
    # Transformer Engine then falls back to unfused attention.
    if BACKENDS[backend] == "flash" and all(keys.get(key) == "0" for key in kernels):
        raise PlanError(
            f"{'=0 and '.join(kernels)}=0 leave {words.framework} unfused attention, which "
            f"{roles['backend']}=unfused says"
        )
    return {"attention": BACKENDS[backend]}


def _read_sequence_parallel(roles: Roles, keys: Keys, facts: Facts, _: FileValues) -> Keys:
    """Return sequence parallelism, which is off on one tensor-parallel rank."""
    return {"sequence_parallel": keys.get(roles["switch"]) is True and facts.number("tp") > 1}


def _stored(facts: Facts) -> Precision:
    """Return the format in which weights are stored."""
    return cast("Precision", facts.get("precision")).storage


def _write_gradients(roles: Roles, facts: Facts) -> Keys:
    """Return the key of the format in which gradients are kept, and so reduced."""
    stored = _stored(facts)
    if stored is Precision.FP32:
        return {}
    if facts.get("gradient_precision") is Precision.FP32:
        return {roles["fp32"]: True}
    return {roles["bf16"]: True} if stored is Precision.BF16 else {}


def _read_gradients(roles: Roles, keys: Keys, facts: Facts, _: FileValues) -> Keys:
    if facts.get("precision") is None:
        return {}  # which is refused
    stored = _stored(facts)
    is_half = roles["fp32"] not in keys
    # With bf16 gradients are accumulated and reduced in fp32 by default (arguments.py).
    if stored is Precision.BF16:
        is_half = roles["bf16"] in keys or keys.get(roles["main"]) == Precision.BF16
    return {"gradient_precision": stored if is_half else Precision.FP32}


def _write_weights(roles: Roles, facts: Facts) -> Keys:
    holds = facts.get(f"stack.{facts.get('precision')}.holds_parameters")
    return dict.fromkeys(roles.values(), True) if holds else {}


def _read_weights(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the fact that weights are 8-bit alone; MXFP8 ones are gathered in gradient buffers."""
    switches = {key: keys.get(key) is True for key in roles.values()}
    if len({*switches.values()}) > 1:
        text = " and ".join(roles.values())
        raise PlanError(f"of {text} of {words.framework} one stands alone; allowed: both or none")
    return {f"stack.{facts.get('precision')}.holds_parameters": switches[roles["gather"]]}


def _write_moments(roles: Roles, facts: Facts) -> Keys:
    moments = facts.get("moment_precision")
    if moments is None:
        return {}
    moment_keys: Keys = {
        roles["switch"]: True,
        roles["first"]: str(moments),
        roles["second"]: str(moments),
    }
    gradient_format = facts.get("gradient_precision")
    return moment_keys | ({roles["gradients"]: "bf16"} if gradient_format is Precision.BF16 else {})


def _read_moments(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    first, second = roles["first"], roles["second"]
    on = roles["switch"] in keys
    default = str(Precision.FP32)
    formats: Keys = {key: words.word(keys, key, default) for key in (first, second)}
    if formats[first] not in (MOMENTS if on else MOMENTS[:1]):
        raise words.unknown(first, formats[first], MOMENTS if on else MOMENTS[:1])
    words.held(formats, second, (formats[first],))
    words.held(keys, roles["gradients"], (Precision.FP32, Precision.BF16) if on else MOMENTS[:1])
    return {"moment_precision": Precision(str(formats[first]))} if on else {}


def _read_dispatcher(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the token dispatcher of experts; on one rank tokens go nowhere."""
    kind = words.word(keys, roles["type"], "allgather")
    backends = Dispatcher.DEEPEP, Dispatcher.HYBRIDEP
    # A plan without a dispatcher has this one.
    if kind == "alltoall":
        return {"dispatcher": None}
    if kind == "flex":
        backend = words.word(keys, roles["backend"], backends[0])
        if backend not in backends:
            raise words.unknown(roles["backend"], backend, backends)
        return {"dispatcher": Dispatcher(backend)}
    # allgather is the default, which matters only where experts have several ranks.
    if kind != "allgather" or facts.number("ep") * facts.number("etp") > 1:
        raise words.unknown(roles["type"], kind, ("alltoall", "flex"))
    return {}


def _core_codec(codec: str, roles: Roles) -> tuple[Codec, Roles]:
    """Return Megatron-Core's codec of an entry, with its roles."""
    return megatron_core.CODECS[codec], {name: roles[name] for name in CORE_ROLES[codec]}


VIRTUAL_ROLES = ("virtual_of_even", "per_stage")
STAGE_ROLES = ("first", "last", "embedding", "loss", "per_stage", "virtual_of_even")
RECOMPUTE, LAYOUT = "recompute of Megatron", "layout of Megatron"
CORE_ROLES = {
    RECOMPUTE: ("granularity", "method", "num_layers", "modules"),
    LAYOUT: ("layout", "virtual_of_even"),
}


def _write_core(codec: str, roles: Roles, facts: Facts) -> Keys:
    core_codec, core_roles = _core_codec(codec, roles)
    assert core_codec.write is not None
    return core_codec.write(core_roles, facts)


def _read_recompute(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the recomputation, which releases before 2022-05 set by switches."""
    keys = dict(keys)
    if keys.get(roles["selective"]) is True:
        keys[roles["granularity"]] = "selective"
    if keys.get(roles["full"]) is True or roles["full_method"] in keys:
        keys[roles["granularity"]] = "full"
        keys[roles["method"]] = keys.get(roles["full_method"], "uniform")
        keys.setdefault(roles["num_layers"], 1)
    core_codec, core_roles = _core_codec(RECOMPUTE, roles)
    assert core_codec.read is not None
    return core_codec.read(core_roles, keys, facts, words)


def _read_stages(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the layers of stages, for which Megatron-LM has options of its own, too."""
    core_codec, core_roles = _core_codec(LAYOUT, roles)
    assert core_codec.read is not None
    stage_keys = [
        roles[role] for role in STAGE_ROLES if role not in core_roles and roles[role] in keys
    ]
    if stage_keys and roles["layout"] in keys:
        raise words.unknown(stage_keys[0], keys[stage_keys[0]], (f"without {roles['layout']}",))
    virtual = [roles[role] for role in VIRTUAL_ROLES if roles[role] in keys]
    if len(virtual) > 1:
        raise words.unknown(virtual[1], keys[virtual[1]], (f"without {virtual[0]}",))
    split = (_stages if stage_keys else core_codec.read)(
        roles if stage_keys else core_roles, keys, facts, words
    )
    if split.get("num_virtual_stages", 1) != 1 and facts.number("pp") == 1:
        key = virtual[0] if virtual else roles["layout"]
        raise words.unknown(key, keys.get(key), ("one stage a rank, or pipeline ranks",))
    return split


def _stages(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the stages of get_num_layers_to_build (core/transformer/transformer_block.py)."""
    pp, num_layers = facts.number("pp"), 1 if facts.model is None else facts.model.num_layers
    layers = words.whole(keys, roles["layers"], num_layers)
    ends = {role: roles[role] in keys for role in ("embedding", "loss")}
    fixed = {
        rank: words.whole(keys, roles[role], 1)
        for role, rank in (("first", 0), ("last", pp - 1))
        if roles[role] in keys
    }
    if fixed and any(ends.values()):
        raise PlanError(
            f"{roles['first']} or {roles['last']} of {words.framework} goes without "
            f"{roles['embedding']} and {roles['loss']}"
        )
    # Layers of an even split, in which ends may count, without those of fixed stages.
    remaining = layers + sum(ends.values()) - sum(fixed.values())
    each, rest = divmod(remaining, pp - len(fixed)) if pp > len(fixed) else (0, remaining)
    count = words.whole(keys, roles["virtual_of_even"], 1)
    # --num-layers-per-virtual-pipeline-stage gives virtual stages by their layers.
    if roles["per_stage"] in keys:
        count, odd = divmod(each, words.whole(keys, roles["per_stage"], 1))
        rest += odd + len(fixed)
    ranks = [fixed.get(rank, each) for rank in range(pp)]
    stages = [size // max(count, 1) for _ in range(count) for size in ranks]
    if stages:
        # The ends took a layer's place in the split; they are none.
        stages[0] -= ends["embedding"]
        stages[-1] -= ends["loss"]
    if rest or min(stages, default=-1) < 0 or any(size % count for size in ranks):
        layout_options = ", ".join(
            f"{roles[role]}={keys[roles[role]]}" for role in STAGE_ROLES if roles[role] in keys
        )
        raise PlanError(f"{layout_options} of {words.framework} does not divide {layers} layers")
    is_even = len({*stages}) == 1
    split = {"stages": StageSplit.EVEN if is_even else tuple(stages)} if pp > 1 else {}
    return {"num_virtual_stages": count, **split}


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
        "ranks of Megatron-LM": Codec(lambda *_: {}, _read_ranks),
        "batch of Megatron-LM": Codec(_write_batch, _read_batch),
        "attention of Megatron-LM": Codec(read=_read_attention),
        "sequence parallelism of Megatron-LM": Codec(read=_read_sequence_parallel),
        "recompute of Megatron-LM": Codec(partial(_write_core, RECOMPUTE), _read_recompute),
        "layout of Megatron-LM": Codec(partial(_write_core, LAYOUT), _read_stages),
        "dispatcher of Megatron-LM": Codec(read=_read_dispatcher),
        "model of Megatron-LM": MODEL,
        "gradients of Megatron-LM": Codec(_write_gradients, _read_gradients),
        "8-bit weights of Megatron-LM": Codec(_write_weights, _read_weights),
        "moments of Megatron-LM": Codec(_write_moments, _read_moments),
    },
)
