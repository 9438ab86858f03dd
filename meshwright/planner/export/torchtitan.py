"""torchtitan: TOML up to 0.2, options of its command from 0.3 on.

Keys are those of JobConfig (torchtitan/config/job_config.py of 0.2.2), and of Trainer.Config
(torchtitan/trainer.py and torchtitan/config/configs.py of 0.3.0).
"""

from collections.abc import Mapping
from typing import cast

from meshwright.hwprofiles import Attention, Kernels, Offload, Precision, Recompute, StageSplit
from meshwright.planner.export.framework import Export, Framework
from meshwright.planner.export.table import Facts, Keys, Row, Words, not_offered
from meshwright.planner.export.texts import (
    command_words,
    read_flags,
    read_toml,
    remarks,
    toml_text,
)
from meshwright.simulator import PlanError

WORDS = Words("torchtitan")
TOML, COMMAND = "0.2", "0.3"
# Module and flavor by the name of a model; a configuration of 0.3 is MODULE_FLAVOR.
MODELS: Mapping[str, tuple[str, str]] = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
}
# Modules with a `pipelining_fn` in 0.2.2 (models/*/__init__.py), of those above.
PIPELINED = ("llama3",)
# Names of a Llama's modules before its layers and after them.
ENDS = {
    TOML: (["tok_embeddings"], ["norm", "output"]),
    COMMAND: (["tok_embeddings"], ["norm", "lm_head"]),
}
SCHEDULES: dict[object, object] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
}
CHECKPOINTS: dict[object, object] = {
    Recompute.NONE: "none",
    Recompute.SELECTIVE_OP: "selective",
    Recompute.FULL: "full",
}
FLOAT8 = "quantize.linear.float8"
PARTS = "parallelism.module_fqns_per_model_part"
REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
LOCAL_BATCH, GLOBAL_BATCH = "training.local_batch_size", "training.global_batch_size"
PP = "parallelism.pipeline_parallel"
# What no plan speaks of, and what changes a layout.
HELD: Mapping[str, object] = {
    "training.dtype": "float32",
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_tensor_parallel_degree": 1,
    "parallelism.disable_loss_parallel": False,
    "parallelism.enable_async_tensor_parallel": False,
    f"{PP}_first_stage_less_layers": 1,
    f"{PP}_last_stage_less_layers": 1,
    f"{PP}_schedule_csv": "",
}
RESHARD = "parallelism.fsdp_reshard_after_forward"


def table(version: str) -> tuple[Row, ...]:
    """Return the correspondences of a version of torchtitan."""
    words = WORDS
    return (
        _model(version),
        words.same("seq_len", "training.seq_len", 2048),
        words.same("tp", "parallelism.tensor_parallel_degree", 1),
        words.same("pp", f"{PP}_degree", 1),
        words.same("ep", "parallelism.expert_parallel_degree", 1),
        words.choice("schedule", f"{PP}_schedule", SCHEDULES, default="1F1B"),
        _replicas(),
        _batch(),
        _stages(version),
        words.only("zero_stage", 3),
        words.choice(
            "offload",
            "training.enable_cpu_offload",
            {Offload.NONE: False, Offload.PARAMETERS: True},
            default=False,
        ),
        _reshard(),
        # attention of its Llama is PyTorch's scaled_dot_product_attention.
        words.only("attention", Attention.FLASH),
        # Shards are fp32, and so are their gradients.
        words.only("gradient_precision", Precision.FP32),
        words.choice(
            "reduce_precision",
            "training.mixed_precision_reduce",
            {Precision.FP32: "float32"},
            default="float32",
        ),
        # Trainer.train_step of torchtitan/train.py never turns the reduction off; in a pipeline
        # PyTorch's stages do.
        words.rule("sync_each_microbatch", lambda facts: facts.number("pp") == 1),
        *(_toml_rows() if version == TOML else _command_rows()),
        _compile(),
        *(words.held(key, (value,)) for key, value in HELD.items()),
    )


def _toml_rows() -> tuple[Row, ...]:
    return (
        # apply_tp of 0.2 has sequence parallelism with every tensor parallelism.
        WORDS.rule("sequence_parallel", lambda facts: facts.number("tp") > 1),
        _toml_precision(),
        _toml_recompute(),
    )


def _command_rows() -> tuple[Row, ...]:
    return (
        WORDS.same("sequence_parallel", "parallelism.enable_sequence_parallel", default=True),
        WORDS.choice(
            "precision",
            "training.mixed_precision_param",
            {Precision.BF16: "bfloat16", Precision.FP32: "float32"},
            default="bfloat16",
        ),
        WORDS.choice("recompute", "activation-checkpoint", CHECKPOINTS),
    )


def _model(version: str) -> Row:
    """Return the row of the model, which torchtitan knows by two words."""
    keys = ("model.name", "model.flavor") if version == TOML else ("module", "config")

    # What 0.3 calls its others is held against none of its files.
    used = {m: each for m, each in MODELS.items() if version == TOML or each[0] in PIPELINED}
    names = {
        model: (module, flavor if version == TOML else f"{module}_{flavor.lower()}")
        for model, (module, flavor) in used.items()
    }
    known = {each: model for model, each in names.items()}

    def write(facts: Facts) -> Keys:
        theirs = names[cast("str", WORDS.known("model", facts, names))]
        if facts.number("pp") > 1 and theirs[0] not in PIPELINED:
            raise not_offered("pp", facts.number("pp"), WORDS.framework, ("1 with Qwen3",))
        return dict(zip(keys, theirs, strict=True))

    def read(found: Keys, _: Facts) -> Keys:
        theirs = tuple(str(found[key]) for key in keys if key in found)
        if not theirs:
            return {}
        model = known.get(cast("tuple[str, str]", theirs))
        if model is None:
            allowed = (" ".join(each) for each in known)
            raise WORDS.unknown(" and ".join(keys), " ".join(theirs), allowed)
        return {"model": model}

    return Row(fields=("model",), keys=keys, write=write, read=read)


def _compile() -> Row:
    """Return the row of layers that are compiled; the loss is not."""
    enable, parts = "compile.enable", "compile.components"
    choices: dict[object, bool] = {Kernels.COMPILED: True, Kernels.EAGER: False}

    def write(facts: Facts) -> Keys:
        is_on = choices[WORDS.known("stack.kernels", facts, choices)]
        return {enable: True, parts: ["model"]} if is_on else {enable: False}

    def read(keys: Keys, _: Facts) -> Keys:
        parted = "model" in cast("list[str]", keys.get(parts, ["model"]))
        is_on = bool(keys.get(enable, False)) and parted
        return {"stack.kernels": Kernels.COMPILED if is_on else Kernels.EAGER}

    return Row(fields=("stack.kernels",), keys=(enable, parts), write=write, read=read)


def _toml_precision() -> Row:
    param, converters = "training.mixed_precision_param", "model.converters"
    choices: dict[object, object] = {
        Precision.BF16: ("bfloat16", []),
        Precision.FP32: ("float32", []),
        # Linear layers of torchao, all with tensor-wise scales, as without a recipe.
        Precision.FP8: ("bfloat16", [FLOAT8]),
    }

    def write(facts: Facts) -> Keys:
        dtype, used = cast(
            "tuple[str, list[str]]", choices[WORDS.known("precision", facts, choices)]
        )
        return {param: dtype} | ({converters: used} if used else {})

    def read(keys: Keys, _: Facts) -> Keys:
        theirs = keys.get(param, "bfloat16"), keys.get(converters, [])
        for ours, each in choices.items():
            if each == theirs:
                return {"precision": ours}
        raise WORDS.unknown(f"{param} with {converters}", theirs, choices.values())

    return Row(fields=("precision",), keys=(param, converters), write=write, read=read)


def _toml_recompute() -> Row:
    mode, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"

    def write(facts: Facts) -> Keys:
        theirs = CHECKPOINTS[WORDS.known("recompute", facts, CHECKPOINTS)]
        return {mode: theirs} | ({option: "op"} if theirs == "selective" else {})

    def read(keys: Keys, _: Facts) -> Keys:
        theirs = keys.get(mode, "selective")
        if theirs == "selective" and keys.get(option, "2") != "op":
            raise WORDS.unknown(option, keys.get(option, "2"), ("op",))
        for ours, each in CHECKPOINTS.items():
            if each == theirs:
                return {"recompute": ours}
        raise WORDS.unknown(mode, theirs, CHECKPOINTS.values())

    return Row(fields=("recompute",), keys=(mode, option), write=write, read=read)


def _replicas() -> Row:
    """Return the row of the data-parallel ranks, in groups that share a set of shards."""

    def write(facts: Facts) -> Keys:
        shards = facts.number("dp_shard")
        return {REPLICATE: facts.number("dp") // shards, SHARD: shards}

    def read(keys: Keys, facts: Facts) -> Keys:
        replicas, shards = cast("int", keys.get(REPLICATE, 1)), cast("int", keys.get(SHARD, -1))
        others = facts.number("tp") * facts.number("pp")
        if shards == -1:
            if facts.get("world_size") is None:
                raise PlanError(f"--gpus is missing; {SHARD} is what it leaves")
            shards = facts.world_size // (others * replicas)
        dp = replicas * shards
        return {"dp": dp, "dp_shard": shards, "world_size": dp * others}

    return Row(
        fields=("dp", "dp_shard", "world_size"), keys=(REPLICATE, SHARD), write=write, read=read
    )


def _batch() -> Row:
    """Return the row of the batches: a pipeline takes all microbatches of a rank in one call."""
    own = f"{PP}_microbatch_size"

    def write(facts: Facts) -> Keys:
        size, found = facts.number("microbatch_size"), {}
        found[GLOBAL_BATCH] = facts.number("global_batch_size")
        if facts.number("pp") == 1:
            return {**found, LOCAL_BATCH: size}
        return {**found, LOCAL_BATCH: size * facts.num_microbatches, own: size}

    def read(keys: Keys, facts: Facts) -> Keys:
        local = cast("int", keys.get(LOCAL_BATCH, 8))
        once = local * facts.number("dp")
        batch = cast("int", keys.get(GLOBAL_BATCH, -1))
        batch = once if batch < 0 else batch
        if facts.number("pp") == 1:
            return {"global_batch_size": batch, "microbatch_size": local}
        if batch != once:
            raise WORDS.unknown(LOCAL_BATCH, local, (batch // facts.number("dp"),))
        return {"global_batch_size": batch, "microbatch_size": keys.get(own, 1)}

    return Row(
        fields=("global_batch_size", "microbatch_size"),
        keys=(LOCAL_BATCH, GLOBAL_BATCH, own),
        write=write,
        read=read,
    )


def _stages(version: str) -> Row:
    """Return the row of the layers of each stage: its modules by name."""
    first, last = ENDS[version]

    def write(facts: Facts) -> Keys:
        if facts.number("pp") == 1:
            return {}
        layers = iter(range(sum(stages := cast("tuple[int, ...]", facts.get("stages")))))
        parts = [[f"layers.{next(layers)}" for _ in range(count)] for count in stages]
        parts[0][:0] = first
        parts[-1] += last
        return {PARTS: parts}

    def read(keys: Keys, facts: Facts) -> Keys:
        pp, parts = facts.number("pp"), cast("list[list[str]] | None", keys.get(PARTS))
        if pp == 1:
            return {}
        if parts is None:  # generate_llm_fqn_per_model_part: two stages a rank, or one
            virtual = 1 + (facts.get("schedule") == "interleaved")
            return {"stages": StageSplit.ENDS, "num_virtual_stages": virtual}
        stages = tuple(sum(name.startswith("layers.") for name in part) for part in parts)
        again = write(Facts({"pp": pp, "stages": stages}))
        if again != {PARTS: parts} or len(parts) % pp:
            raise PlanError(
                f"{PARTS} of torchtitan is in no plan; allowed: the modules in their order, "
                f"stages a multiple of {pp}"
            )
        return {"stages": stages, "num_virtual_stages": len(parts) // pp}

    return Row(fields=("stages", "num_virtual_stages"), keys=(PARTS,), write=write, read=read)


def _reshard() -> Row:
    """Return the row of what is freed after its forward pass: by default, but for pipelines."""

    def write(facts: Facts) -> Keys:
        frees = facts.get("reshard_after_forward")
        if frees == (facts.number("pp") == 1):
            return {}
        return {RESHARD: "always" if frees else "never"}

    def read(keys: Keys, facts: Facts) -> Keys:
        choices = {"default": facts.number("pp") == 1, "always": True, "never": False}
        theirs = str(keys.get(RESHARD, "default"))
        if theirs not in choices:
            raise WORDS.unknown(RESHARD, theirs, choices)
        return {"reshard_after_forward": choices[theirs]}

    return Row(fields=("reshard_after_forward",), keys=(RESHARD,), write=write, read=read)


def _files(export: Export) -> Mapping[str, str]:
    if export.version == COMMAND:
        return {}
    return {"train.toml": remarks(export.remarks) + toml_text(export.keys)}


def _command(export: Export) -> tuple[str, ...]:
    start = "-m torchtitan.train"
    if export.version == TOML:
        return (start, "--job.config_file train.toml")
    keys = dict(export.keys)
    checkpoint = keys.pop("activation-checkpoint")
    return (start, *map(_option, keys.items()), f"activation-checkpoint:{checkpoint}")


def _option(entry: tuple[str, object]) -> str:
    key, value = entry
    section, _, name = key.rpartition(".")
    if isinstance(value, bool):
        return f"--{section}.{'' if value else 'no-'}{name.replace('_', '-')}"
    if isinstance(value, list):
        parts = (each if isinstance(each, str) else ",".join(each) for each in value)
        return f"--{key} {' '.join(parts)}"
    return f"--{key} {value}"


def _read(text: str) -> Keys:
    """Return the keys of a TOML file, or of a script with the command."""
    if "torchtitan.train" not in text:
        return read_toml(text)
    words = command_words(text)
    words = words[words.index("torchtitan.train") + 1 :]
    checkpoint = [each for each in words if each.startswith("activation-checkpoint:")]
    found = read_flags([each for each in words if each not in checkpoint])
    keys: Keys = {}
    for key, value in found.items():
        section, dot, name = key.rpartition(".")
        no = name.startswith("no-")
        name = name.removeprefix("no-").replace("-", "_")
        keys[f"{section}{dot}{name}"] = value is not True if no else value
    if PARTS in keys:
        keys[PARTS] = [part.split(",") for part in str(keys[PARTS]).split()]
    if "compile.components" in keys:
        keys["compile.components"] = str(keys["compile.components"]).replace(",", " ").split()
    if not checkpoint:
        raise PlanError(
            "activation-checkpoint:... is missing, which each configuration has of its own; "
            f"allowed: {', '.join(map(str, CHECKPOINTS.values()))}"
        )
    keys["activation-checkpoint"] = checkpoint[0].partition(":")[2]
    return keys


FRAMEWORK = Framework(
    name="torchtitan",
    source="torchtitan 0.2.2 and 0.3.0",
    versions=(TOML, COMMAND),
    write_table=lambda version, _: table(version),
    read_table=lambda keys: table(COMMAND if "module" in keys else TOML),
    files=_files,
    command=_command,
    is_script=lambda version: version == COMMAND,
    read=_read,
    stack=lambda _: "torchtitan",
    suffixes=(".toml",),
    harmless=(
        *("job.*", "profiling.*", "metrics.*", "checkpoint.*", "optimizer.*", "lr_scheduler.*"),
        *("comm.*", "debug.*", "validation.*", "fault_tolerance.*", "memory_estimation.*"),
        *("training.dataset*", "training.dataloader*", "training.steps", "training.max_norm"),
        *("training.gc_*", "model.hf_assets_path", "model.print_after_conversion"),
        *("activation_checkpoint.early_stop", "activation_checkpoint.preserve_rng_state"),
        *("activation_checkpoint.determinism_check", "activation_checkpoint.debug"),
        *("compile.backend", "quantize.linear.float8.emulate"),
    ),
)
