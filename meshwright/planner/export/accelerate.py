"""Accelerate: the YAML that ``accelerate config`` writes and ``accelerate launch`` takes.

Keys are those of ClusterConfig (accelerate/commands/config/config_args.py of 1.15.0) and of the
options of ``accelerate launch`` that its sections set (accelerate/commands/launch.py).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import cast

from meshwright.hwprofiles import Offload, Precision, Recompute
from meshwright.planner.export import deepspeed
from meshwright.planner.export.launch import Framework, Starter
from meshwright.planner.export.table import Facts, Keys, Row, Words, not_offered
from meshwright.planner.export.texts import read_yaml, remarks, yaml_text
from meshwright.simulator import PlanError

WORDS = Words("accelerate")
FILE = "accelerate.yaml"
FSDP2, FSDP1 = "fsdp2", "fsdp1"
FSDP, DEEPSPEED, PARALLEL = "fsdp_config.fsdp_", "deepspeed_config.", "parallelism_config."
REPLICAS, SHARDS, TENSOR = (
    f"{PARALLEL}parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "tp")
)
STEPS = f"{DEEPSPEED}gradient_accumulation_steps"
OFFLOADS: Mapping[object, Keys] = {
    Offload.NONE: {},
    Offload.OPTIMIZER: {f"{DEEPSPEED}offload_optimizer_device": "cpu"},
    Offload.PARAMETERS: {
        f"{DEEPSPEED}offload_optimizer_device": "cpu",
        f"{DEEPSPEED}offload_param_device": "cpu",
    },
}


class Kind(StrEnum):
    """Which of its engines Accelerate trains with."""

    DDP = "MULTI_GPU"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"


STACKS = {Kind.DDP: "ddp", Kind.FSDP: "fsdp", Kind.DEEPSPEED: "deepspeed"}


def kind_of(facts: Facts) -> Kind:
    """Return the engine of a plan: that of its ZeRO stage, DeepSpeed for plans of its stacks."""
    stage = facts.number("zero_stage")
    is_deepspeed = facts.stack is not None and facts.stack.name.startswith("deepspeed")
    if is_deepspeed or stage in (1, 2):
        return Kind.DEEPSPEED
    return Kind.FSDP if stage else Kind.DDP


def table(kind: Kind, version: str) -> tuple[Row, ...]:
    """Return the correspondences of an engine; *version* is that of FSDP."""
    words, splits = WORDS, kind is Kind.FSDP and version == FSDP2
    engines: Mapping[Kind, tuple[Row, ...]] = {
        Kind.DDP: _ddp_rows(),
        Kind.FSDP: (*_fsdp_rows(), *(_fsdp2_rows() if version == FSDP2 else _fsdp1_rows())),
        Kind.DEEPSPEED: _deepspeed_rows(),
    }
    return (
        _constant("distributed_type", value=str(kind)),
        words.same("num_nodes", "num_machines", 1),
        words.same("world_size", "num_processes"),
        words.choice(
            "precision",
            "mixed_precision",
            {Precision.BF16: "bf16", Precision.FP16: "fp16", Precision.FP32: "no"},
            default="no",
        ),
        *words.one_stage(),
        words.told(("tp",), _planned_model) if splits else words.only("tp", 1),
        *engines[kind],
        words.held("use_cpu", (False,)),
        words.held("compute_environment", ("LOCAL_MACHINE",)),
    )


def _script_rows() -> tuple[Row, ...]:
    """Return the rows of what a script says of its own, with DDP and with FSDP."""
    words = WORDS
    return (
        words.only("sequence_parallel", False),  # noqa: FBT003  (the value that goes)
        deepspeed.attention_row(words),
        words.told(("seq_len", "model"), deepspeed.sample),
        words.told(
            ("microbatch_size",),
            lambda facts: f"DataLoader(batch_size={facts.number('microbatch_size')})",
        ),
        words.told(("global_batch_size", "sync_each_microbatch"), _accumulation),
        words.only("gradient_precision", Precision.FP32),
    )


def _accumulation(facts: Facts) -> str | None:
    """Return how a script accumulates gradients; Accelerate reduces them in the last pass."""
    steps = facts.num_microbatches
    if steps == 1:
        return None
    if facts.get("sync_each_microbatch"):
        plugin = f"GradientAccumulationPlugin(num_steps={steps}, sync_each_batch=True)"
        return f"Accelerator(gradient_accumulation_plugin={plugin})"
    return f"Accelerator(gradient_accumulation_steps={steps})"


def _ddp_rows() -> tuple[Row, ...]:
    words = WORDS
    return (
        *_script_rows(),
        words.rule("dp", lambda facts: facts.world_size),
        words.only("zero_stage", 0),
        deepspeed.checkpoints_row(words),
        words.only("offload", Offload.NONE),
        words.rule("dp_shard", lambda facts: facts.number("dp")),
        words.rule("reshard_after_forward", lambda _: None),
        words.told(("reduce_precision", "find_unused"), _ddp_handler),
        words.only("stack.gradient_bucket_parameters", 6_553_600),
    )


def _ddp_handler(facts: Facts) -> str | None:
    """Return the arguments of DDP that a script gives (accelerate/utils/dataclasses.py)."""
    hooks = {Precision.BF16: "BF16", Precision.FP16: "FP16", Precision.FP32: None}
    hook = hooks[cast("Precision", WORDS.known("reduce_precision", facts, hooks))]
    said = [] if hook is None else [f"comm_hook=DDPCommunicationHookType.{hook}"]
    said += ["find_unused_parameters=True"] if facts.get("find_unused") else []
    if not said:
        return None
    return f"Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({', '.join(said)})])"


def _fsdp_rows() -> tuple[Row, ...]:
    words = WORDS
    return (
        *_script_rows(),
        words.only("zero_stage", 3),
        words.choice(
            "offload",
            f"{FSDP}offload_params",
            {Offload.NONE: False, Offload.PARAMETERS: True},
            default=False,
        ),
        words.choice(
            "recompute",
            f"{FSDP}activation_checkpointing",
            {Recompute.NONE: False, Recompute.FULL: True},
            default=False,
        ),
        # set_mixed_precision of FullyShardedDataParallelPlugin reduces in what it computes in.
        words.rule("reduce_precision", lambda facts: facts.get("precision")),
        _constant(f"{FSDP}auto_wrap_policy", value="TRANSFORMER_BASED_WRAP"),
        _constant(f"{FSDP}state_dict_type", value="SHARDED_STATE_DICT"),
        _constant(f"{FSDP}cpu_ram_efficient_loading", value=True),
    )


def _constant(key: str, *, value: object) -> Row:
    """Return the row of a key that an export writes and no layout depends on."""
    return Row(fields=(), keys=(key,), write=lambda _: {key: value}, read=lambda *_: {})


def _fsdp2_rows() -> tuple[Row, ...]:
    words = WORDS
    return (
        _constant(f"{FSDP}version", value=2),
        words.choice(
            "reshard_after_forward",
            f"{FSDP}reshard_after_forward",
            {True: True, False: False},
            default=True,
        ),
        _parallelism(),
    )


def _planned_model(facts: Facts) -> str | None:
    """Return how a script splits its model over tensor-parallel ranks.

    `_prepare_tp` of Accelerate 1.15 imports a class that transformers has up to 4.57 together with
    parameters that are DTensors; its version 5.23 has it no longer.

    Raises:
        PlanError: If the ranks would split it otherwise.
    """
    if facts.number("tp") == 1:
        return None
    if facts.stack is not None and not facts.stack.tp_plan:
        raise not_offered("tp", facts.number("tp"), WORDS.framework, (1, "more with stack fsdp"))
    given = 'tp_plan="auto", device_mesh=accelerator.torch_device_mesh'
    return f"transformers 4.57: from_pretrained(..., {given})"


def _fsdp1_rows() -> tuple[Row, ...]:
    words = WORDS
    return (
        _constant(f"{FSDP}version", value=1),
        words.choice(
            "reshard_after_forward",
            f"{FSDP}sharding_strategy",
            {True: "FULL_SHARD", False: "SHARD_GRAD_OP"},
            default="FULL_SHARD",
        ),
        words.rule("dp", lambda facts: facts.world_size),
        words.rule("dp_shard", lambda facts: facts.number("dp")),
    )


def _parallelism() -> Row:
    """Return the row of a mesh of several axes, which FSDP2 alone goes with."""

    def write(facts: Facts) -> Keys:
        dp, shards, tp = (facts.number(name) for name in ("dp", "dp_shard", "tp"))
        if shards == dp and tp == 1:
            return {}
        return {REPLICAS: dp // shards, SHARDS: shards, TENSOR: tp}

    def read(keys: Keys, facts: Facts) -> Keys:
        tp, replicas = (WORDS.whole(keys, key, 1) for key in (TENSOR, REPLICAS))
        ranks = facts.world_size
        if ranks % tp:
            raise WORDS.unknown(TENSOR, tp, (f"a divisor of {ranks} processes",))
        dp = ranks // tp
        shards = WORDS.whole(keys, SHARDS, dp // replicas, least=0)
        if shards * replicas != dp:
            raise WORDS.unknown(SHARDS, shards, (dp // replicas,))
        return {"tp": tp, "dp": dp, "dp_shard": shards}

    return Row(
        fields=("tp", "dp", "dp_shard"), keys=(REPLICAS, SHARDS, TENSOR), write=write, read=read
    )


def _deepspeed_rows() -> tuple[Row, ...]:
    words = WORDS

    def read(keys: Keys, facts: Facts) -> Keys:
        steps = WORDS.whole(keys, STEPS, 1)
        batch = cast("int | None", facts.get("global_batch_size"))
        if batch is None:
            raise PlanError(f"--global-batch is missing; {STEPS} is {steps}")
        each = facts.world_size * steps
        if batch % each:
            raise PlanError(f"--global-batch {batch} is not a multiple of {each} = ranks x {STEPS}")
        return {"microbatch_size": batch // each, "dp": facts.world_size}

    return (
        *deepspeed.shared_rows(words),
        Row(
            fields=("global_batch_size", "dp"),
            keys=(STEPS,),
            write=lambda facts: {STEPS: facts.num_microbatches},
            read=read,
        ),
        words.told(
            ("microbatch_size",),
            lambda facts: f"DataLoader(batch_size={facts.number('microbatch_size')})",
        ),
        words.choice(
            "zero_stage", f"{DEEPSPEED}zero_stage", {stage: stage for stage in range(4)}, default=2
        ),
        deepspeed.offload_row(words, OFFLOADS),
        # What engine.py of DeepSpeed does without a configuration of its own.
        words.rule("gradient_precision", lambda facts: facts.get("precision")),
        words.rule("reduce_precision", lambda facts: facts.get("precision")),
        words.only("stack.gradient_bucket_parameters", 500_000_000),
        _constant(f"{DEEPSPEED}zero3_init_flag", value=True),
    )


def _read_kind(keys: Keys) -> Kind:
    theirs = WORDS.word(keys, "distributed_type", "")
    if theirs not in set(Kind):
        raise WORDS.unknown("distributed_type", theirs, Kind)
    return Kind(theirs)


def _read_table(keys: Keys) -> tuple[Row, ...]:
    is_second = keys.get(f"{FSDP}version", 1) == 2
    return table(_read_kind(keys), FSDP2 if is_second else FSDP1)


def _write_table(version: str, facts: Facts) -> tuple[Row, ...]:
    return table(kind_of(facts), version)


FRAMEWORK = Framework(
    name="accelerate",
    source="Accelerate 1.15.0",
    versions=(FSDP2, FSDP1),
    write_table=_write_table,
    read_table=_read_table,
    files=lambda export: {FILE: remarks(export.remarks) + yaml_text(export.keys)},
    command=lambda _: (f"--config_file {FILE}", '"${SCRIPT:?is not set: your script}"'),
    starter=Starter.ACCELERATE,
    read=read_yaml,
    stack=lambda keys: STACKS[_read_kind(keys)],
    suffixes=(".yaml", ".yml"),
    harmless=(
        *("debug", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend"),
        *("same_network", "main_training_function", "enable_cpu_affinity", "gpu_ids"),
        *("downcast_bf16", "tpu_*", "mpirun_config*", "dynamo_config.dynamo_mode"),
        *("fsdp_config.fsdp_backward_prefetch*", "fsdp_config.fsdp_forward_prefetch"),
        *("fsdp_config.fsdp_use_orig_params", "fsdp_config.fsdp_sync_module_states"),
        *("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "deepspeed_config.zero3_save_*"),
        *("deepspeed_config.gradient_clipping", "deepspeed_config.deepspeed_multinode_launcher"),
    ),
)
