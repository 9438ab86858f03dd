"""Megatron-LM: a script that starts pretrain_gpt.py with its options.

Options are those of megatron/training/arguments.py and of the dataclasses that it makes options of,
in core_v0.16.1 (https://github.com/NVIDIA/Megatron-LM, commit 55ac7082).
"""

from collections.abc import Mapping
from math import prod
from typing import cast

from meshwright.hwprofiles import LossKernel, Precision
from meshwright.planner.export.launch import Framework
from meshwright.planner.export.megatron_core import (
    BATCHES,
    expert_fields,
    groups_row,
    shards_row,
    shared_rows,
    stages_row,
)
from meshwright.planner.export.table import Facts, Keys, Row, Words, check_model, not_offered
from meshwright.planner.export.texts import command_words, flags, layer_numbers, read_flags
from meshwright.simulator import ModelSpec, PlanError

WORDS = Words("megatron-lm")
# te: Transformer Engine's kernel on 16-bit logits; native: Megatron's own, compiled in parts.
LOSSES: Mapping[object, str | None] = {
    LossKernel.FUSED: "te",
    LossKernel.COMPILED: "native",
    LossKernel.IN_PLACE: None,
}
# Megatron-FSDP takes checkpoints of its own alone (validate_args).
SHARDED: Keys = {
    "use-megatron-fsdp": True,
    "data-parallel-sharding-strategy": "optim_grads_params",
    "ckpt-format": "fsdp_dtensor",
}
PRECISIONS: Mapping[object, Keys] = {
    Precision.BF16: {"bf16": True},
    Precision.FP16: {"fp16": True},
    Precision.FP32: {},
    Precision.FP8: {"bf16": True, "fp8-format": "hybrid"},
    Precision.MXFP8: {"bf16": True, "fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
}
# Formats of exp_avg_dtype; the first is that of any other optimizer.
MOMENTS = Precision.FP32, Precision.FP16, Precision.BF16, Precision.FP8


def table() -> tuple[Row, ...]:
    """Return the correspondences."""
    words = WORDS
    return (
        _launcher(),
        *(words.same(field, _dashed(key)) for field, key in BATCHES.items()),
        words.same("seq_len", "seq-length"),
        _model(),
        shards_row(words, ("use-distributed-optimizer",), SHARDED, off=None),
        *shared_rows(words, _dashed, overlap=_dashed, off=None),
        stages_row(
            words,
            "pipeline-model-parallel-layout",
            "num-virtual-stages-per-pipeline-rank",
            says_both=False,
        ),
        groups_row(words, "microbatch-group-size-per-virtual-pipeline-stage"),
        words.together("precision", PRECISIONS),
        _gradients(),
        _moments(),
        _overlap(),
        _loss(),
        _tensor_overlap(),
        words.held("optimizer", ("adam",)),
    )


OTHER_RANKS = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _launcher() -> Row:
    """Return the row of the ranks, of which torchrun's options tell."""
    nodes, ranks = "nnodes", "nproc-per-node"

    def read(keys: Keys, _: Facts) -> Keys:
        if ranks not in keys:
            return {}
        world = WORDS.whole(keys, nodes, 1) * WORDS.whole(keys, ranks, 1)
        others = prod(WORDS.whole(keys, each, 1) for each in OTHER_RANKS)
        if world % others:
            raise WORDS.unknown(ranks, keys[ranks], (f"a multiple of {others} ranks in all",))
        return {"world_size": world, "dp": world // others}

    return Row(fields=("world_size", "dp"), keys=(nodes, ranks), write=lambda _: {}, read=read)


def _gradients() -> Row:
    """Return the row of the format in which gradients are kept, and so reduced.

    Weights in bf16 have fp32 gradients unless they are reduced in bf16, those in fp16 have not
    (validate_args of arguments.py).
    """
    fp32, bf16 = "accumulate-allreduce-grads-in-fp32", "grad-reduce-in-bf16"
    key: Mapping[object, Keys] = {
        Precision.FP32: {fp32: True},
        Precision.BF16: {bf16: True},
        Precision.FP16: {},
    }

    def write(facts: Facts) -> Keys:
        stored = cast("Precision", facts.get("precision")).storage
        kept = WORDS.known("gradient_precision", facts, {Precision.FP32: 1, stored: 1})
        return {} if stored is Precision.FP32 else dict(key[kept])

    def read(keys: Keys, facts: Facts) -> Keys:
        stored = cast("Precision", facts.get("precision")).storage
        is_half = bf16 in keys if stored is Precision.BF16 else fp32 not in keys
        return {"gradient_precision": stored if is_half else Precision.FP32}

    return Row(fields=("gradient_precision",), keys=(fp32, bf16), write=write, read=read)


def _moments() -> Row:
    """Return the row of Adam's moments, and of the gradients that its optimizer reads.

    Without a word these are fp32 ones, which are then kept, too (validate_args of arguments.py).
    """
    is_on, gradients = "use-precision-aware-optimizer", "main-grads-dtype"
    first, second = "exp-avg-dtype", "exp-avg-sq-dtype"

    def write(facts: Facts) -> Keys:
        moments = facts.get("moment_precision")
        if moments is None:
            return {}
        found: Keys = {is_on: True, first: str(moments), second: str(moments)}
        kept = facts.get("gradient_precision")
        return found | ({gradients: "bf16"} if kept is Precision.BF16 else {})

    def read(keys: Keys, facts: Facts) -> Keys:
        on = is_on in keys
        usual = str(Precision.FP32)
        said: Keys = {key: WORDS.word(keys, key, usual) for key in (first, second)}
        if said[first] not in (MOMENTS if on else MOMENTS[:1]):
            raise WORDS.unknown(first, said[first], MOMENTS if on else MOMENTS[:1])
        WORDS.held(second, (said[first],)).read(said, facts)
        kept = (Precision.FP32, Precision.BF16) if on else MOMENTS[:1]
        WORDS.held(gradients, kept).read(keys, facts)
        return {"moment_precision": Precision(str(said[first]))} if on else {}

    return Row(
        fields=("moment_precision",), keys=(is_on, first, second, gradients), write=write, read=read
    )


def _overlap() -> Row:
    """Return the row of what the stack does under computation; parameters only of shards."""
    names = {
        "stack.overlap_gradient_reduce": "overlap-grad-reduce",
        "stack.overlap_parameter_gather": "overlap-param-gather",
    }

    def told(facts: Facts) -> Mapping[str, str]:
        return names if facts.number("zero_stage") else dict([*names.items()][:1])

    return Row(
        fields=tuple(names),
        keys=tuple(names.values()),
        write=lambda facts: {key: True for name, key in told(facts).items() if facts.get(name)},
        read=lambda keys, facts: {name: key in keys for name, key in told(facts).items()},
    )


def _loss() -> Row:
    fused, kind = "cross-entropy-loss-fusion", "cross-entropy-fusion-impl"

    def write(facts: Facts) -> Keys:
        theirs = LOSSES[WORDS.known("stack.loss", facts, LOSSES)]
        return {} if theirs is None else {fused: True, kind: theirs}

    def read(keys: Keys, _: Facts) -> Keys:
        theirs = keys.get(kind, "native") if fused in keys else None
        for ours, each in LOSSES.items():
            if each == theirs:
                return {"stack.loss": ours}
        raise WORDS.unknown(kind, theirs, (each for each in LOSSES.values() if each))

    return Row(fields=("stack.loss",), keys=(fused, kind), write=write, read=read)


def _tensor_overlap() -> Row:
    """Return the row of tensor-parallel collectives that go in pieces beside every product.

    Without the flag Transformer Engine still gathers beside the product of an input's gradient and
    scatters its sum beside that of a weight's: both are started with ``async_op`` whatever the
    flag says (pytorch/module/linear.py and layernorm_linear.py, 1.x and 2.x).
    """
    fact, key = "stack.tp_in_pieces", "tp-comm-overlap"

    def is_split(facts: Facts) -> bool:
        return facts.number("tp") > 1 and bool(facts.get("sequence_parallel"))

    def write(facts: Facts) -> Keys:
        return {key: True} if is_split(facts) and facts.get(fact) else {}

    def read(keys: Keys, facts: Facts) -> Keys:
        return {fact: key in keys} if is_split(facts) else {}

    return Row(fields=(fact,), keys=(key,), write=write, read=read)


def _model() -> Row:
    """Return the row of the model: its sizes are written, and compared with those of --model."""

    def write(facts: Facts) -> Keys:
        assert facts.model is not None  # of every plan
        return _model_options(facts.model, cast("int", facts.get("stack.vocabulary_multiple")))

    def read(keys: Keys, facts: Facts) -> Keys:
        if facts.model is None:
            return {}
        own = _model_options(facts.model, 1)
        for key in MODEL_KEYS:
            theirs = keys.get(key)
            layers = layer_numbers(theirs, facts.model.num_layers) if key in LAYER_KEYS else []
            if layers:
                theirs = None if all(layers) else str(layers).replace(" ", "")
            if key in keys and theirs != own.get(key):
                raise PlanError(
                    f"{key}={theirs} is not that of model {facts.model.name}; "
                    f"allowed: {own.get(key, 'leave it out')}"
                )
        return {}

    keys = (*MODEL_KEYS, *VOCABULARY_KEYS)
    return Row(fields=("model",), keys=keys, write=write, read=read)


MODEL_KEYS = (
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "group-query-attention",
    "num-query-groups",
    "max-position-embeddings",
    "position-embedding-type",
    "normalization",
    "swiglu",
    "disable-bias-linear",
    "add-qkv-bias",
    "untie-embeddings-and-output-weights",
    "hidden-dropout",
    "attention-dropout",
    "kv-channels",
    "qk-layernorm",
    "num-experts",
    "moe-router-topk",
    "moe-ffn-hidden-size",
    "moe-router-score-function",
    "moe-router-enable-expert-bias",
    "moe-router-num-groups",
    "moe-router-group-topk",
    "moe-shared-expert-intermediate-size",
    "moe-shared-expert-gate",
    "moe-layer-freq",
)
LAYER_KEYS = {"moe-layer-freq"}
VOCABULARY_KEYS = ("vocab-size", "make-vocab-size-divisible-by")


def _model_options(model: ModelSpec, vocabulary_multiple: int) -> Keys:
    """Return what describes *model*; raises PlanError where pretrain_gpt.py has no such model."""
    _check_model(model)
    dropout = 0.1 if model.dropout else 0.0
    switches = {
        "swiglu": model.gated_mlp,
        "disable-bias-linear": not model.mlp_bias,
        "add-qkv-bias": model.attention_bias and not model.mlp_bias,
        "untie-embeddings-and-output-weights": not model.tied_embeddings,
        "group-query-attention": model.num_kv_heads < model.num_heads,
        "qk-layernorm": model.qk_norm == "head",
    }
    width = model.head_dim
    own_width = {"kv-channels": width} if width * model.num_heads != model.hidden_size else {}
    return {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.ffn_hidden_size,
        "num-attention-heads": model.num_heads,
        **own_width,
        **({"num-query-groups": model.num_kv_heads} if switches["group-query-attention"] else {}),
        "max-position-embeddings": model.max_positions,
        "position-embedding-type": POSITIONS[model.positions],
        "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        **{name: True for name, is_on in switches.items() if is_on},
        **{_dashed(name): value for name, value in expert_fields(model).items()},
        "hidden-dropout": dropout,
        "attention-dropout": dropout,
        # NullTokenizer adds one token, that ends a document.
        "vocab-size": model.vocab_size - 1,
        "make-vocab-size-divisible-by": vocabulary_multiple,
    }


POSITIONS = {"learned": "learned_absolute", "rotary": "rope"}


# Facts of a model that the options above tell.
TOLD = {
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads"),
    *("max_positions", "positions", "norm", "gated_mlp", "mlp_bias", "output_bias"),
    *("attention_bias", "tied_embeddings", "dropout", "vocab_size", "fused_qkv"),
    *("head_dim", "qk_norm", "experts", "prediction_layers"),
}
# Of experts, what they are as usual.
PLAIN = {"bias": False, "activation": "silu", "weighs_inputs": False}


def _check_model(model: ModelSpec) -> None:
    """Raise PlanError for what pretrain_gpt.py has no model of, as it is told here."""
    check_model(model, WORDS.framework, TOLD)
    facts: dict[str, tuple[object, tuple[object, ...]]] = {
        "qk_norm": (model.qk_norm, ("none", "head"))
    }
    if model.experts is not None:
        facts |= {f"experts.{key}": (getattr(model.experts, key), (PLAIN[key],)) for key in PLAIN}
    for name, (value, allowed) in facts.items():
        if value not in allowed:
            raise not_offered(f"{name} of model {model.name}", value, WORDS.framework, allowed)
    biases = model.attention_bias, model.output_bias, model.mlp_bias
    if biases[1] != biases[2] or biases[2] > biases[0]:
        raise PlanError(
            f"model={model.name} has attention_bias={biases[0]}, output_bias={biases[1]} and "
            f"mlp_bias={biases[2]}, which cannot be expressed for megatron-lm; allowed: all of "
            "them, the first alone or none"
        )


# What else a first run needs; it leaves the layout as it is.
SAMPLE: Keys = {
    "transformer-impl": "transformer_engine",
    "tokenizer-type": "NullTokenizer",
    "mock-data": True,
    "train-iters": 100,
    "lr": 0.0001,
}
FRAMEWORK = Framework(
    name="megatron-lm",
    source="Megatron-LM core_v0.16.1",
    write_table=lambda *_: table(),
    read_table=lambda _: table(),
    files=lambda _: {},
    command=lambda export: ("pretrain_gpt.py", *flags(export.keys), *flags(SAMPLE)),
    is_script=lambda _: True,
    read=lambda text: read_flags(command_words(text)),
    stack=lambda _: "megatron-core",
    suffixes=(".sh", ".sbatch", ".args"),
    harmless=(
        *("standalone", "node-rank", "master-*", "rdzv-*", "max-restarts", "tee", "log-dir"),
        *("transformer-impl", "tokenizer-*", "mock-data", "data-path", "split", "vocab-file"),
        *("merge-file", "train-*", "lr*", "min-lr", "weight-decay*", "adam-*", "clip-grad", "seed"),
        *("init-method-std", "log-*", "eval-*", "save*", "load*", "no-save-*", "no-load-*"),
        *("tensorboard-*", "wandb-*", "exit-*", "distributed-*", "use-mcore-models", "ckpt-*"),
        *("num-workers", "timing-*", "manual-gc*", "rotary-*", "norm-epsilon", "data-cache-path"),
        *("kill-on-bad-exit", "use-checkpoint-*", "dist-ckpt-*", "async-save"),
        *("moe-aux-loss-coeff", "moe-z-loss-coeff", "moe-router-load-balancing-type"),
        *("moe-router-bias-update-rate", "moe-router-topk-scaling-factor", "mtp-loss-*"),
    ),
)
