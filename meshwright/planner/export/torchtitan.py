"""torchtitan: TOML up to 0.2, options of its command from 0.3 on.

Keys are those of JobConfig (torchtitan/config/job_config.py of 0.2.2), and of Trainer.Config
(torchtitan/trainer.py and torchtitan/config/configs.py of 0.3.0).
"""

from collections.abc import Mapping
from typing import cast

from meshwright.hwprofiles import Attention, Kernels, Offload, Precision, Recompute, RecomputeMethod
from meshwright.planner.export.launch import Export, Framework
from meshwright.planner.export.table import Facts, Keys, Row, not_offered
from meshwright.planner.export.texts import (
    command_words,
    read_toml,
    read_tyro,
    remarks,
    toml_text,
    tyro_options,
)
from meshwright.planner.export.torchtitan_ranks import (
    COMMAND,
    PARTS,
    PP,
    TOML,
    WORDS,
    batch_row,
    replicas_row,
    reshard_row,
    stages_row,
)
from meshwright.simulator import PlanError

# Module and flavor by the name of a model; a configuration of 0.3 is MODULE_FLAVOR.
MODELS: Mapping[str, tuple[str, str]] = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
}
# Whose configuration of 0.3 has linear layers in float8, which no option takes out (llama3_405b of
# torchtitan/models/llama3/config_registry.py).
FLOAT8_ALONE = ("llama3-405b",)
# Modules with a `pipelining_fn` in 0.2.2 (models/*/__init__.py), of those above.
PIPELINED = ("llama3",)
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
# What no plan speaks of, and what changes a layout.
HELD: Mapping[str, object] = {
    "training.dtype": "float32",
    "parallelism.context_parallel_degree": 1,
    f"{PP}_first_stage_less_layers": 1,
    f"{PP}_last_stage_less_layers": 1,
    f"{PP}_schedule_csv": "",
}
REDUCED, GRAPHLESS = "training.mixed_precision_reduce", "training.disable_cuda_graphs"


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
        replicas_row(),
        batch_row(),
        stages_row(version),
        words.only("zero_stage", 3),
        words.choice("offload", "training.enable_cpu_offload", OFFLOADS, default=False),
        reshard_row(),
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
    return (
        WORDS.same("sequence_parallel", "parallelism.enable_sequence_parallel", default=True),
        WORDS.choice(
            "precision",
            "training.mixed_precision_param",
            {Precision.BF16: "bfloat16", Precision.FP32: "float32"},
            default="bfloat16",
        ),
        WORDS.choice("recompute", "activation-checkpoint", CHECKPOINTS),
        WORDS.held("compile.enable_async_tensor_parallel", (False,)),
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

    # What 0.3 calls its others is held against none of its files.
    models = {
        model: each
        for model, each in MODELS.items()
        if version == TOML or (each[0] in PIPELINED and model not in FLOAT8_ALONE)
    }

    def name(module: str, flavor: str) -> tuple[str, str]:
        return module, flavor if version == TOML else f"{module}_{flavor.lower()}"

    known = {name(*each): model for model, each in models.items()}

    def write(facts: Facts) -> Keys:
        theirs = models[cast("str", WORDS.known("model", facts, models))]
        if facts.number("pp") > 1 and theirs[0] not in PIPELINED:
            raise not_offered("pp", facts.number("pp"), WORDS.framework, ("1 with Qwen3",))
        return dict(zip(keys, name(*theirs), strict=True))

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
    fields = "recompute", "recompute_layers", "recompute_method"

    def write(facts: Facts) -> Keys:
        number = facts.get("recompute_layers")
        if number is not None:
            WORDS.known("recompute_method", facts, (RecomputeMethod.EVERY,))
            return {mode: "selective", option: str(number)}
        found = row.write(facts)
        return found | ({option: "op"} if found[mode] == "selective" else {})

    def read(keys: Keys, facts: Facts) -> Keys:
        said = str(keys.get(option, "2"))
        if keys.get(mode, "selective") != "selective" or said == "op":
            return {**row.read(keys, facts)}
        if not said.isdecimal():
            raise WORDS.unknown(option, said, ("op", "a number of layers"))
        # Of 0, as of 1, all layers run again (`_apply_layer_sac`).
        values = Recompute.FULL, max(1, int(said)), RecomputeMethod.EVERY
        return dict(zip(fields, values, strict=True))

    return Row(fields=fields, keys=(mode, option), write=write, read=read)


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
