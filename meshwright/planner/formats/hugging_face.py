"""Codecs of transformers' Trainer, LLaMA-Factory and axolotl.

Rules are those of transformers 5.23 (training_args.py, trainer.py, integrations/deepspeed.py),
LLaMA-Factory 0.9.6.dev0 and axolotl 0.18.
"""

from collections.abc import Mapping
from pathlib import Path

from meshwright.hwprofiles import FileKind, shown
from meshwright.planner.export import FRAMEWORKS
from meshwright.planner.formats.included import CONFIG, MARK, with_included
from meshwright.planner.formats.launched import Spelling, with_accelerate
from meshwright.planner.formats.precisions import (
    AUTO,
    AXOLOTL,
    LLAMA_FACTORY,
    TRANSFORMERS,
    Dialect,
    axolotl_ddp,
    axolotl_fsdp,
    engine_precision,
    fsdp_version,
    listed,
    master_precision,
    plain_precision,
    sharded_precision,
    switch,
)
from meshwright.planner.tables import (
    Codec,
    Codecs,
    Facts,
    FileValues,
    Keys,
    MissingError,
    Program,
    Roles,
    spelled,
)
from meshwright.simulator import PlanError, load_model

HUB_FILE = Path(__file__).resolve().parents[1] / "data" / "hub_models.csv"
HUB_TABLE = FileKind(title="table of models", most_bytes=1_000_000)


def model_of(roles: Roles, keys: Keys, facts: Facts, _: FileValues) -> Keys:
    """Return the model of a path in a configuration, or of a name on the hub."""
    paths = listed(roles, "path")
    value = next((keys[key] for key in paths if keys.get(key) is not None), None)
    # A config.json at hand says more than a name on the hub.
    if isinstance(value, str) and Path(value).name == CONFIG:
        return {"model": load_model(value)}
    model = hub_models().get(str(value))
    if model is not None:
        return {"model": model}
    if facts.get("model") is not None or facts.model is not None:
        return {}
    path_text = f"{paths[-1]}={shown(value)}" if value else f"no {paths[-1]}"
    raise MissingError("model", f"{path_text} is no model that is known by its name")


def hub_models() -> Mapping[str, str]:
    """Return the built-in models that are those of the hub, by their names there."""
    _, lines = HUB_TABLE.parse_table(HUB_FILE.read_text("utf-8"), HUB_FILE.name)
    return {cells["id"]: cells["model"] for _, cells in lines}


def batches(dialect: Dialect) -> Codec:
    """Return the codec of a batch: microbatch, times accumulation steps, times replicas."""

    def read(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
        size = _count(roles, keys, words, "micro", dialect.microbatch_size)
        steps = _count(roles, keys, words, "steps", 1)
        total = roles.get("total", "")
        # A total batch gives the accumulation steps that nobody sets.
        if keys.get(total) is not None and keys.get(roles["steps"]) is None:
            steps = words.whole(keys, total, size) // size
        dp = facts.world_size // facts.number("tp")
        sizes = {"micro": size, "steps": steps, "batch": size * steps * dp}
        for name, value in sizes.items():
            # transformers fills in what is auto, and refuses what is not the same.
            key = roles.get(f"deepspeed_{name}", "")
            if key in keys and keys[key] not in (AUTO, value):
                raise words.unknown(key, keys[key], (value, AUTO))
        return {"microbatch_size": size, "global_batch_size": sizes["batch"], "dp": dp}

    return Codec(read=read)


def _count(roles: Roles, keys: Keys, words: FileValues, role: str, default: int) -> int:
    """Return the count of a role; *default* where no key has it."""
    key = roles[role]
    return default if keys.get(key) is None else words.whole(keys, key, default)


def checkpoints(dialect: Dialect) -> Codec:
    """Return the codec of recomputation: all layers, one by one, or none."""

    def read(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
        switches = [key for key in listed(roles, "switch") if keys.get(key) is not None]
        is_on = any(switch(words, keys, key, default=False) for key in switches)
        off, fsdp = roles.get("off", ""), roles.get("fsdp", "")
        if off:
            is_on = is_on or not switch(words, keys, off, default=not dialect.recomputes)
        by_fsdp = switch(words, keys, fsdp, default=False)
        if is_on and by_fsdp:
            asked = off or ", ".join(switches)
            raise PlanError(f"{fsdp} of {words.framework} does not go with {asked}")
        reentrant_keys = listed(roles, "reentrant")
        uses_reentrant = any(
            switch(words, keys, key, default=dialect.is_reentrant)
            for key in reentrant_keys
            if key in keys or dialect.is_reentrant
        )
        if is_on and uses_reentrant and "fsdp" in roles:
            raise words.unknown(reentrant_keys[0], value=True, allowed=("false with FSDP",))
        recompute: Keys = {"recompute": "full" if is_on or by_fsdp else "none"}
        # Non-reentrant recomputation ends with the last tensor that backward needs.
        return {**recompute, "stack.recompute_stops_early": not (is_on and uses_reentrant)}

    return Codec(read=read)


def _unused(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return DDP's search for unused parameters: without recomputation it is on."""
    default = facts.get("recompute") != "full"
    key = roles["switch"]
    if keys.get(key) is None:
        return {"find_unused": default}
    return {"find_unused": switch(words, keys, key, default=default)}


GATHERS_AHEAD = ("BACKWARD_PRE", "1")
SHARDING = {"full_shard": True, "shard_grad_op": False}


def shards(dialect: Dialect) -> Codec:
    """Return the codec of FSDP: reshard after forward, and CPU offload."""

    def read(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
        version = fsdp_version(dialect, roles, keys, words)
        options = _fsdp_options(roles["fsdp"], keys, words)
        keywords = {*SHARDING, "auto_wrap", "offload"}
        for each in options:
            if each not in keywords:
                raise words.unknown(roles["fsdp"], each, sorted(keywords))
        if "wraps" in roles and "auto_wrap" not in options:
            raise words.unknown(roles["fsdp"], " ".join(options), ("full_shard auto_wrap",))
        named = [SHARDING[each] for each in options if each in SHARDING]
        ahead = roles.get("ahead", "")
        # FSDP 1 prefetches in backward only if it is asked to.
        if version == 1 and not ahead:
            allowed = "2: with 1 its configuration drops what is gathered ahead, which no plan has"
            raise words.unknown(roles["version"], version, (allowed,))
        if version == 1 and spelled(keys.get(ahead)).upper() not in GATHERS_AHEAD:
            allowed = f"{GATHERS_AHEAD[0]} with FSDP 1, which else gathers nothing ahead"
            raise words.unknown(ahead, keys.get(ahead), (allowed,))
        reshards = _reshards(version, roles["reshard"], keys, words)
        if reshards is None:
            reshards = named[0] if named else True
        offloads = "offload" in options or switch(
            words, keys, roles.get("offload", ""), default=False
        )
        return {
            "zero_stage": 3,
            "reshard_after_forward": reshards,
            "offload": "parameters" if offloads else "none",
        }

    return Codec(read=read)


def _fsdp_options(key: str, keys: Keys, words: FileValues) -> list[str]:
    value = keys.get(key)
    if value is None or value is True or value == MARK or str(value).lower() == "true":
        return []
    if isinstance(value, list):
        return [str(each) for each in value]
    if not isinstance(value, str):
        raise words.unknown(key, shown(value), ("full_shard auto_wrap",))
    return value.replace(",", " ").split()


def _reshards(version: int, key: str, keys: Keys, words: FileValues) -> bool | None:
    value = keys.get(key)
    if value is None:
        return None
    word = str(value).lower()
    words_to_reshard = SHARDING if version == 1 else {"true": True, "false": False}
    if word not in words_to_reshard:
        raise words.unknown(key, value, words_to_reshard)
    return words_to_reshard[word]


def attention(names: Mapping[str, str], *, on_deepspeed: bool) -> Codec:
    """Return the codec of the attention kernel; without a word PyTorch's, which is flash.

    Args:
        names: Kernels by the trainer's words.
        on_deepspeed: Whether the plan's stack has to be told of the kernel.
    """

    def read(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
        key = roles["word"]
        value = keys.get(key)
        kernel_name = "flash"
        if facts.model is not None and facts.model.attention_sinks:
            kernel_name = "unfused"  # modeling_gpt_oss.py: none of PyTorch's has them
        if value is not None:
            if str(value) not in names:
                raise words.unknown(key, value, names)
            kernel_name = names[str(value)] or kernel_name
        for role, kernel in OLD_ATTENTION.items():
            if role in roles and switch(words, keys, roles[role], default=False):
                kernel_name = kernel
        if not on_deepspeed or kernel_name != "flash":
            return {"attention": kernel_name}
        # The stack of DeepSpeed has unfused attention alone unless it is told.
        offered = {"stack.attention_kernels": '["unfused", "flash"]'}
        return {"attention": kernel_name, **offered, "stack.flash_kernel": "sdpa-fa2"}

    return Codec(read=read)


OLD_ATTENTION = {"flash": "flash", "sdpa": "flash", "eager": "unfused"}
ATTENTION = {
    "eager": "unfused",
    "sdpa": "flash",
    "flash_attention_2": "flash",
}
LLAMA_FACTORY_ATTENTION = {"auto": "", "disabled": "unfused", "sdpa": "flash", "fa2": "flash"}


def _mesh(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the data-parallel ranks and the shards among them: all of them unless told."""
    dp = facts.world_size
    replicas, size = (_count(roles, keys, words, name, 1) for name in ("replicas", "shards"))
    if replicas * size == 1:
        size = dp
    if size * replicas != dp:
        raise words.unknown(roles["shards"], size, (f"{dp} ranks / {roles['replicas']}",))
    return {"dp": dp, "dp_shard": size}


def _codecs(dialect: Dialect, names: Mapping[str, str], own: Codecs) -> Codecs:
    return {
        **FRAMEWORKS["deepspeed"].program.codecs,
        "model of the hub": Codec(read=model_of),
        "batches of a trainer": batches(dialect),
        "formats beside DDP": plain_precision(dialect),
        "formats of fp32 weights": master_precision(dialect),
        "formats beside FSDP": sharded_precision(dialect),
        "formats on DeepSpeed": engine_precision(dialect),
        "checkpoints of a trainer": checkpoints(dialect),
        "unused weights": Codec(read=_unused),
        "FSDP of a trainer": shards(dialect),
        "attention of transformers": attention(names, on_deepspeed=False),
        "attention on DeepSpeed": attention(names, on_deepspeed=True),
        **own,
    }


def _program(
    dialect: Dialect, names: Mapping[str, str], spelling: Spelling, own: Codecs | None = None
) -> Program:
    return Program(
        included=with_included,
        launched=with_accelerate(spelling),
        codecs=_codecs(dialect, names, own or {}),
    )


PROGRAMS: Mapping[str, Program] = {
    "transformers": _program(
        TRANSFORMERS, ATTENTION, Spelling("fsdp", "fsdp-config", "cpu_offload")
    ),
    "llama-factory": _program(
        LLAMA_FACTORY,
        LLAMA_FACTORY_ATTENTION,
        # prepare_model_for_training of model_utils/checkpointing.py.
        Spelling("fsdp", "fsdp_config", "", "auto_wrap", beside={"use_reentrant_gc": False}),
    ),
    "axolotl": _program(
        AXOLOTL,
        ATTENTION,
        # It says mixed precision itself, and changes FSDP by its own configuration alone.
        Spelling("", "fsdp_config", "", is_mixed=False),
        {
            "formats of axolotl's DDP": Codec(read=axolotl_ddp),
            "formats of axolotl's FSDP": Codec(read=axolotl_fsdp),
            "mesh of axolotl": Codec(read=_mesh),
        },
    ),
}
