"""PyTorch alone: a script that trains the model on random tokens with DDP or FSDP2.

What the script does is in planner/data/train.py.txt; the lines before it say the plan.
"""

from collections.abc import Mapping
from pathlib import Path

from meshwright.hwprofiles import Attention, Offload, Precision, Recompute, quoted, single_line
from meshwright.planner.export.launch import Export, Framework
from meshwright.planner.export.table import Facts, Keys, Row, Words, check_model

WORDS = Words("torchrun")
FILE = "train.py"
PROGRAM = Path(__file__).resolve().parents[1] / "data" / "train.py.txt"
MODEL: Mapping[str, str] = {
    "NUM_LAYERS": "num_layers",
    "WIDTH": "hidden_size",
    "FFN_WIDTH": "ffn_hidden_size",
    "NUM_HEADS": "num_heads",
    "NUM_KV_HEADS": "num_kv_heads",
    "VOCABULARY": "vocab_size",
    "MAX_POSITIONS": "max_positions",
    "POSITIONS": "positions",
    "NORM": "norm",
    "GATED": "gated_mlp",
    "TIED": "tied_embeddings",
    "ATTENTION_BIAS": "attention_bias",
    "OUTPUT_BIAS": "output_bias",
    "MLP_BIAS": "mlp_bias",
    "FUSED_QKV": "fused_qkv",
}


def table(facts: Facts) -> tuple[Row, ...]:
    """Return the correspondences, from fields to the names at the head of the script."""
    words = WORDS
    is_sharded = facts.number("zero_stage") == 3
    return (
        _model(),
        *words.one_stage(),
        words.only("tp", 1),
        words.only("sequence_parallel", False),  # noqa: FBT003  (the value that goes)
        words.told(("dp", "world_size"), lambda _: None),
        words.same("seq_len", "SEQ_LEN"),
        words.same("microbatch_size", "MICROBATCH"),
        Row(
            fields=("global_batch_size",),
            keys=("NUM_MICROBATCHES",),
            write=lambda facts: {"NUM_MICROBATCHES": facts.num_microbatches},
            read=lambda *_: {},
        ),
        words.choice(
            "precision",
            "PRECISION",
            {each: str(each) for each in (Precision.BF16, Precision.FP16, Precision.FP32)},
        ),
        words.choice("zero_stage", "SHARDED", {0: False, 3: True}),
        words.same("dp_shard", "NUM_SHARDS"),
        words.choice("recompute", "RECOMPUTES", {Recompute.NONE: False, Recompute.FULL: True}),
        words.choice("attention", "ATTENTION", {each: str(each) for each in Attention}),
        words.choice("reshard_after_forward", "RESHARDS", {True: True, False: False, None: False}),
        words.only("gradient_precision", Precision.FP32),
        words.choice("reduce_precision", "REDUCED", {each: str(each) for each in Precision}),
        words.choice("sync_each_microbatch", "SYNCS_EACH", {True: True, False: False, None: False}),
        words.choice("offload", "OFFLOADS", _offloads(is_sharded=is_sharded)),
        words.choice("find_unused", "FINDS_UNUSED", {False: False, True: True}),
        *(() if is_sharded else (words.only("stack.gradient_bucket_parameters", 6_553_600),)),
    )


def _offloads(*, is_sharded: bool) -> Mapping[object, object]:
    kept: dict[object, object] = {Offload.NONE: False}
    return kept | ({Offload.PARAMETERS: True} if is_sharded else {})


def _model() -> Row:
    def write(facts: Facts) -> Keys:
        assert facts.model is not None  # of every plan
        model = facts.model
        check_model(model, WORDS.framework, {*MODEL.values(), "dropout"})
        fused = facts.get("stack.fused_qkv")
        return {
            **{key: getattr(model, name) for key, name in MODEL.items()},
            "FUSED_QKV": model.fused_qkv if fused == "model" else fused,
            "DROPOUT": 0.1 if model.dropout else 0.0,
            "ROTARY_BASE": 10_000.0,
        }

    keys = (*MODEL, "DROPOUT", "ROTARY_BASE")
    return Row(fields=("model",), keys=keys, write=write, read=lambda *_: {})


def _files(export: Export) -> Mapping[str, str]:
    lines = [
        '"""Trains a model on random tokens, laid out as a plan says.',
        "",
        *(quoted(single_line(line))[1:-1] for line in export.remarks),
        '"""',
        "",
        *(f"{key} = {value!r}" for key, value in export.keys.items()),
        "",
    ]
    return {FILE: "\n".join(lines) + "\n" + PROGRAM.read_text(encoding="utf-8")}


FRAMEWORK = Framework(
    name="torchrun",
    source="PyTorch 2.9 to 2.13",
    write_table=lambda _, facts: table(facts),
    read_table=lambda _: (),
    files=_files,
    command=lambda _: (FILE,),
    is_script=lambda _: True,
    stack=lambda keys: "fsdp" if keys.get("SHARDED") else "ddp",
)
