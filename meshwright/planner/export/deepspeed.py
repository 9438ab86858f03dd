"""DeepSpeed: the JSON that `deepspeed.initialize` takes.

Keys are those of DeepSpeedConfig (deepspeed/runtime/config.py, zero/config.py and
zero/offload_config.py of 0.19.8). Pipelines of DeepSpeed are made in the script.
"""

from collections.abc import Mapping
from typing import cast

from meshwright.hwprofiles import Attention, Offload, Precision, Recompute
from meshwright.planner.export.launch import Framework
from meshwright.planner.export.table import Facts, Keys, Row, Words
from meshwright.planner.export.texts import json_keys, read_json
from meshwright.simulator import PlanError

WORDS = Words("deepspeed")
ZERO = "zero_optimization."
FILE = "ds_config.json"
MICRO, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
BATCH, TENSOR = "train_batch_size", "tensor_parallel.autotp_size"
EAGER, FLASH = "eager", "flash_attention_2"
# What models of transformers with attention sinks run instead, in modeling_gpt_oss.py of 5.23 the
# first of _compatible_flash_implementations: FlashAttention 2 has none.
SINKS = "kernels-community/vllm-flash-attn3"
# Latent attention is predicted as PyTorch's, which takes values of a width of their own; before
# FlashAttention 2 transformers fills them up (integrations/flash_attention.py of 5.23).
SDPA = "sdpa"
CHECKPOINTS: Mapping[object, str | None] = {
    Recompute.NONE: None,
    Recompute.FULL: "model.gradient_checkpointing_enable()",
}
OFFLOADS: Mapping[object, Keys] = {
    Offload.NONE: {},
    Offload.OPTIMIZER: {f"{ZERO}offload_optimizer.device": "cpu"},
    Offload.PARAMETERS: {
        f"{ZERO}offload_optimizer.device": "cpu",
        f"{ZERO}offload_param.device": "cpu",
    },
}


def table() -> tuple[Row, ...]:
    """Return the correspondences."""
    words = WORDS
    return (
        *words.one_stage(),
        _tensor_parallel(),
        _batches(),
        precision_row(),
        *shared_rows(words),
        words.choice("zero_stage", f"{ZERO}stage", {stage: stage for stage in range(4)}, default=0),
        offload_row(words, OFFLOADS),
        _format("gradient_precision", "data_types.grad_accum_dtype"),
        _format("reduce_precision", "communication_data_type"),
        words.same("stack.gradient_bucket_parameters", f"{ZERO}reduce_bucket_size", 500_000_000),
        words.choice(
            "stack.overlap_gradient_reduce",
            f"{ZERO}overlap_comm",
            {True: True, False: False},
            also={None: True},
            default=None,
        ),
        words.held(f"{ZERO}reduce_scatter", (True,)),
        words.held(f"{ZERO}zero_hpz_partition_size", (1,)),
        words.held(f"{ZERO}mics_shard_size", (-1,)),
        words.held(f"{ZERO}zero_quantized_weights", (False,)),
        words.held(f"{ZERO}zero_quantized_gradients", (False,)),
    )


def shared_rows(words: Words) -> tuple[Row, ...]:
    """Return the correspondences of DeepSpeed's engine, and of a script that uses it."""
    return (
        words.only("sequence_parallel", False),  # noqa: FBT003  (the value that goes)
        attention_row(words),
        checkpoints_row(words),
        words.told(("seq_len", "model"), sample),
        words.rule("dp_shard", lambda facts: facts.number("dp")),
        words.rule("reshard_after_forward", lambda facts: facts.number("zero_stage") == 3 or None),
        # Stages 2 and 3 reduce in every backward pass (engine.py, no_sync).
        words.rule("sync_each_microbatch", lambda facts: facts.number("zero_stage") >= 2),
    )


def attention_row(words: Words) -> Row:
    """Return the row of the attention kernel, of which a script tells transformers."""

    def line(facts: Facts) -> str:
        flash, model = FLASH, facts.model
        if model is not None and model.latent is not None:
            flash = SDPA
        elif model is not None and model.attention_sinks:
            flash = SINKS
        kernels: Mapping[object, str] = {Attention.FLASH: flash, Attention.UNFUSED: EAGER}
        kernel = kernels[words.known("attention", facts, kernels)]
        return f'attn_implementation="{kernel}" for a model of transformers'

    return words.told(("attention",), line)


def checkpoints_row(words: Words) -> Row:
    """Return the row of recomputation, which a script asks a model of transformers for."""
    return words.told(
        ("recompute",), lambda facts: CHECKPOINTS[words.known("recompute", facts, CHECKPOINTS)]
    )


def sample(facts: Facts) -> str:
    """Return which model a script trains, and on what."""
    return f"model {facts.get('model')}, sequences of {facts.get('seq_len')} tokens"


def _tensor_parallel() -> Row:
    def read(keys: Keys, _: Facts) -> Keys:
        return {"tp": WORDS.whole(keys, TENSOR, 0, least=0) or 1}

    return Row(
        fields=("tp",),
        keys=(TENSOR,),
        write=lambda facts: {TENSOR: facts.number("tp")} if facts.number("tp") > 1 else {},
        read=read,
    )


def _batches() -> Row:
    """Return the row of the three batch sizes, of which two tell the third and the ranks."""

    def write(facts: Facts) -> Keys:
        return {
            BATCH: facts.number("global_batch_size"),
            MICRO: facts.number("microbatch_size"),
            STEPS: facts.num_microbatches,
        }

    def read(keys: Keys, facts: Facts) -> Keys:
        given = {key: WORDS.whole(keys, key, 1) for key in (BATCH, MICRO, STEPS) if key in keys}
        if len(given) < 3:
            return _completed(given, facts)
        rank = given[MICRO] * given[STEPS]
        if given[BATCH] % rank:
            raise WORDS.unknown(BATCH, given[BATCH], (f"multiples of {rank}",))
        dp = given[BATCH] // rank
        sizes = {"global_batch_size": given[BATCH], "microbatch_size": given[MICRO]}
        return {**sizes, "dp": dp, "world_size": dp * facts.number("tp")}

    return Row(
        fields=("global_batch_size", "microbatch_size", "dp", "world_size"),
        keys=(BATCH, MICRO, STEPS),
        write=write,
        read=read,
    )


def _completed(given: Mapping[str, int], facts: Facts) -> Keys:
    """Return what a file leaves open, as _set_batch_related_parameters of DeepSpeed fills it in.

    What options say counts as said by the file, where transformers would fill it in.
    """
    if facts.get("world_size") is None:
        raise PlanError(f"--gpus is missing; the file leaves out one of {BATCH}, {MICRO}, {STEPS}")
    dp, steps = facts.world_size // facts.number("tp"), given.get(STEPS, 1)
    batch = given.get(BATCH, cast("int | None", facts.get("global_batch_size")))
    size = given.get(MICRO, cast("int | None", facts.get("microbatch_size")))
    if batch is None and size is None:
        raise PlanError(f"--micro-batch is missing; the file has neither {BATCH} nor {MICRO}")
    if batch is None:
        batch = cast("int", size) * steps * dp
    each = dp * (steps if size is None else size)
    if batch % each:
        raise WORDS.unknown(BATCH, batch, (f"multiples of {each} on {dp} ranks",))
    return {"global_batch_size": batch, "microbatch_size": size or batch // each, "dp": dp}


def precision_row() -> Row:
    """Return the row of the format of weights."""
    names = {Precision.BF16: "bf16.enabled", Precision.FP16: "fp16.enabled"}

    def write(facts: Facts) -> Keys:
        ours = WORDS.known("precision", facts, (*names, Precision.FP32))
        return {name: each is ours for each, name in names.items()}

    def read(keys: Keys, _: Facts) -> Keys:
        on = [ours for ours, name in names.items() if keys.get(name, False)]
        if len(on) > 1:
            raise PlanError("bf16.enabled and fp16.enabled are both on; allowed: one of them")
        return {"precision": on[0] if on else Precision.FP32}

    return Row(fields=("precision",), keys=tuple(names.values()), write=write, read=read)


def _format(field: str, key: str) -> Row:
    """Return the row of a format of gradients; that of the weights where a file has none."""
    known = {str(each): each for each in Precision if not each.is_eight_bit}

    def write(facts: Facts) -> Keys:
        return {key: str(WORDS.known(field, facts, known.values()))}

    def read(keys: Keys, facts: Facts) -> Keys:
        theirs = str(keys.get(key) or facts.get("precision"))
        if theirs not in known:
            raise WORDS.unknown(key, theirs, known)
        return {field: known[theirs]}

    return Row(fields=(field,), keys=(key,), write=write, read=read)


def offload_row(words: Words, offloads: Mapping[object, Keys]) -> Row:
    """Return the row of what lives on the host; ``none`` is as good as no key."""
    return words.together("offload", offloads, absent=(None, "none"))


def _read(text: str) -> Keys:
    """Return the keys of a file; what transformers fills in (auto) is not said."""
    return {key: value for key, value in read_json(text).items() if value != "auto"}


FRAMEWORK = Framework(
    name="deepspeed",
    source="DeepSpeed 0.19.8",
    write_table=lambda *_: table(),
    read_table=lambda _: table(),
    files=lambda export: {FILE: json_keys(export.keys)},
    command=lambda _: ('"${SCRIPT:?is not set: your script}"', f"--deepspeed_config {FILE}"),
    read=_read,
    stack=lambda _: "deepspeed",
    suffixes=(".json",),
    harmless=(
        *("optimizer.*", "scheduler.*", "gradient_clipping", "steps_per_print", "prescale_*"),
        *("wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler.*"),
        *("tensorboard.*", "wandb.*", "csv_monitor.*", "comet.*", "aio.*", "checkpoint.*"),
        *("fp16.loss_scale*", "fp16.initial_scale_power", "fp16.hysteresis", "comms_logger.*"),
        *("fp16.min_loss_scale", "fp16.auto_cast", "gradient_predivide_factor", "zero_allow_*"),
        *("zero_optimization.stage3_*", "zero_optimization.*pin_memory", "dataloader_drop_last"),
        *("zero_optimization.allgather_*", "zero_optimization.contiguous_gradients"),
        *("zero_optimization.sub_group_size", "zero_optimization.round_robin_gradients"),
        *("zero_optimization.offload_*.buffer_*", "zero_optimization.load_from_fp32_weights"),
        *("zero_optimization.ignore_unused_parameters", "zero_force_*", "seed"),
    ),
)
