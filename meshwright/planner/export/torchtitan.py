"""torchtitan: TOML up to 0.2, options of its command from 0.3 on.

Keys are those of JobConfig (torchtitan/config/job_config.py of 0.2.2), and of Trainer.Config
(torchtitan/trainer.py and torchtitan/config/configs.py of 0.3.0).
"""

from collections.abc import Mapping
from typing import cast

from meshwright.hwprofiles import Attention, Kernels, Offload, Precision, Recompute, StageSplit
from meshwright.planner.export.framework import Export, Framework
from meshwright.planner.export.table import Facts, Keys, Row, Words
from meshwright.planner.export.texts import (
    command_words,
    read_toml,
    read_tyro,
    remarks,
    toml_text,
    tyro_options,
)
from meshwright.simulator import PlanError

WORDS = Words("torchtitan")
TOML, COMMAND = "0.2", "0.3"
# Module and flavor by the name of a model; a configuration of 0.3 is MODULE_FLAVOR.
MODELS: Mapping[str, tuple[str, str]] = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
}
# Whose configuration of 0.3 has linear layers in float8, which no option takes out (llama3_405b of
# torchtitan/models/llama3/config_registry.py).
FLOAT8_ALONE = ("llama3-405b",)
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
OFFLOADS: dict[object, object] = {Offload.NONE: False, Offload.PARAMETERS: True}
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
    "parallelism.expert_parallel_degree": 1,
    f"{PP}_first_stage_less_layers": 1,
    f"{PP}_last_stage_less_layers": 1,
    f"{PP}_schedule_csv": "",
}
REDUCED, GRAPHLESS = "training.mixed_precision_reduce", "training.disable_cuda_graphs"
RESHARD = "parallelism.fsdp_reshard_after_forward"


def table(version: str) -> tuple[Row, ...]:
    """Return the correspondences of a version of torchtitan."""
    words = WORDS
    return (
        _model(version),
        words.same("seq_len", "training.seq_len", 2048),
        words.same("tp", "parallelism.tensor_parallel_degree", 1),
        words.same("pp", f"{PP}_degree", 1),
        words.choice("schedule", f"{PP}_schedule", SCHEDULES, default="1F1B"),
        _replicas(),
        _batch(),
        _stages(version),
        words.only("zero_stage", 3),
        words.choice("offload", "training.enable_cpu_offload", OFFLOADS, default=False),
        _reshard(),
        # attention of its Llama is PyTorch's scaled_dot_product_attention.
        words.only("attention", Attention.FLASH),
        # Shards are fp32, and so are their gradients.
        words.only("gradient_precision", Precision.FP32),
        words.choice("reduce_precision", REDUCED, {Precision.FP32: "float32"}, default="float32"),
        # Trainer.train_step of torchtitan/train.py never turns the reduction off; in a pipeline
        # PyTorch's stages do.
        words.rule("sync_each_microbatch", lambda facts: facts.number("pp") == 1),
        *(_toml_rows() if version == TOML else _command_rows()),
        _compile(),
        *(words.held(key, (value,)) for key, value in HELD.items()),
    )


def _toml_rows() -> tuple[Row, ...]:
    words = WORDS
    return (
        # apply_tp of 0.2 has sequence parallelism with every tensor parallelism.
        words.rule("sequence_parallel", lambda facts: facts.number("tp") > 1),
        _toml_precision(),
        _toml_recompute(),
        words.held("parallelism.expert_tensor_parallel_degree", (1,)),
        words.held("parallelism.disable_loss_parallel", (False,)),
        words.held("parallelism.enable_async_tensor_parallel", (False,)),
    )


def _command_rows() -> tuple[Row, ...]:
    words = WORDS
    return (
        words.choice(
            "sequence_parallel",
            "parallelism.enable_sequence_parallel",
            {True: True, False: False},
            default=True,
        ),
        words.choice(
            "precision",
            "training.mixed_precision_param",
            {Precision.BF16: "bfloat16", Precision.FP32: "float32"},
            default="bfloat16",
        ),
        words.choice("recompute", "activation-checkpoint", CHECKPOINTS),
        words.held("compile.enable_async_tensor_parallel", (False,)),
        _graphless(),
    )


def _graphless() -> Row:
    """Return the row of CUDA graphs, which no plan has; with a pipeline 0.3 refuses them."""

    def write(facts: Facts) -> Keys:
        facts.notes.append(
            "Llama of torchtitan 0.3 has FlexAttention and its loss in chunks; "
            "memory and times of this plan are of 0.2"
        )
        return {GRAPHLESS: True}

    def read(keys: Keys, _: Facts) -> Keys:
        if keys.get(GRAPHLESS) is not True:
            raise WORDS.unknown(GRAPHLESS, keys.get(GRAPHLESS, False), (True,))
        return {}

    return Row(fields=(), keys=(GRAPHLESS,), write=write, read=read)


def _model(version: str) -> Row:
    """Return the row of the model, which torchtitan knows by two words."""
    keys = ("model.name", "model.flavor") if version == TOML else ("module", "config")

    def name(module: str, flavor: str) -> tuple[str, str]:
        return module, flavor if version == TOML else f"{module}_{flavor.lower()}"

    models = {each: MODELS[each] for each in MODELS if version == TOML or each not in FLOAT8_ALONE}
    known = {name(*each): model for model, each in models.items()}

    def write(facts: Facts) -> Keys:
        model = cast("str", WORDS.known("model", facts, models))
        return dict(zip(keys, name(*models[model]), strict=True))

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
        parted = "model" in WORDS.names(keys, parts, ("model",))
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
    row = WORDS.choice("recompute", mode, CHECKPOINTS, default="selective")

    def write(facts: Facts) -> Keys:
        found = row.write(facts)
        return found | ({option: "op"} if found[mode] == "selective" else {})

    def read(keys: Keys, facts: Facts) -> Keys:
        if keys.get(mode, "selective") == "selective" and keys.get(option, "2") != "op":
            raise WORDS.unknown(option, keys.get(option, "2"), ("op",))
        return {**row.read(keys, facts)}

    return Row(fields=("recompute",), keys=(mode, option), write=write, read=read)


def _replicas() -> Row:
    """Return the row of the data-parallel ranks, in groups that share a set of shards."""

    def write(facts: Facts) -> Keys:
        shards = facts.number("dp_shard")
        return {REPLICATE: facts.number("dp") // shards, SHARD: shards}

    def read(keys: Keys, facts: Facts) -> Keys:
        replicas, shards = WORDS.whole(keys, REPLICATE, 1), WORDS.whole(keys, SHARD, -1, least=-1)
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
        size = facts.number("microbatch_size")
        found: Keys = {GLOBAL_BATCH: facts.number("global_batch_size")}
        if facts.number("pp") == 1:
            return {**found, LOCAL_BATCH: size}
        return {**found, LOCAL_BATCH: size * facts.num_microbatches, own: size}

    def read(keys: Keys, facts: Facts) -> Keys:
        local = WORDS.whole(keys, LOCAL_BATCH, 8)
        once = local * facts.number("dp")
        batch = WORDS.whole(keys, GLOBAL_BATCH, -1, least=-1)
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
        if facts.number("pp") == 1:
            return {}
        if PARTS not in keys:  # generate_llm_fqn_per_model_part: two stages a rank, or one
            virtual = 2 if facts.get("schedule") == "interleaved" else 1
            return {"stages": StageSplit.ENDS, "num_virtual_stages": virtual}
        pp, parts = facts.number("pp"), WORDS.lists(keys, PARTS)
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

    def usual(facts: Facts) -> bool:
        return facts.number("pp") == 1

    def write(facts: Facts) -> Keys:
        frees = facts.get("reshard_after_forward")
        if frees == usual(facts):
            return {}
        return {RESHARD: "always" if frees else "never"}

    def read(keys: Keys, facts: Facts) -> Keys:
        choices = {"default": usual(facts), "always": True, "never": False}
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
    checkpoint = keys.pop("activation-checkpoint")  # a subcommand, which has to be the last word
    return (start, *tyro_options(keys), f"activation-checkpoint:{checkpoint}")


def _read(text: str) -> Keys:
    """Return the keys of a TOML file, or of a script with the command."""
    if "torchtitan.train" not in text:
        return read_toml(text)
    words = command_words(text)
    words = words[words.index("torchtitan.train") + 1 :]
    checkpoint = [each for each in words if each.startswith("activation-checkpoint:")]
    keys = read_tyro([each for each in words if each not in checkpoint])
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
    releases={TOML: "torchtitan 0.2.2", COMMAND: "torchtitan 0.3.0"},
    write_table=lambda version, _: table(version),
    read_table=lambda keys: table(COMMAND if "module" in keys else TOML),
    files=_files,
    command=_command,
    is_script=lambda version: version == COMMAND,
    read=_read,
    stack=lambda keys: "torchtitan-2026-08" if "module" in keys else "torchtitan",
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
