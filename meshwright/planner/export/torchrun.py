"""PyTorch alone: a script that trains the model on random tokens with DDP or FSDP2.

What the script does is in planner/data/train.py.txt; the lines before it say the plan.
"""

from collections.abc import Mapping
from pathlib import Path

from meshwright.hwprofiles import quoted, single_line
from meshwright.planner.tables import Codec, Export, Facts, Keys, Program, Roles

FILE = "train.py"
PROGRAM_FILE = Path(__file__).resolve().parents[1] / "data" / "train.py.txt"
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


def _write_model(_: Roles, facts: Facts) -> Keys:
    assert facts.model is not None  # of every plan
    model, fused = facts.model, facts.get("stack.fused_qkv")
    return {
        **{key: getattr(model, name) for key, name in MODEL.items()},
        # A stack that says `model` leaves it to the model's own code.
        "FUSED_QKV": model.fused_qkv if fused == "model" else fused,
        # The rate changes no time: that of GPT-2.
        "DROPOUT": 0.1 if model.dropout else 0.0,
        "ROTARY_BASE": 10_000.0,
    }


def _files(export: Export) -> Mapping[str, str]:
    lines = [
        '"""Trains a model on random tokens, laid out as a plan says.',
        "",
        # As in a Python literal: a remark may hold quotes and backslashes.
        *(quoted(single_line(line))[1:-1] for line in export.remarks),
        '"""',
        "",
        *(f"{key} = {value!r}" for key, value in export.keys.items()),
        "",
    ]
    return {FILE: "\n".join(lines) + "\n" + PROGRAM_FILE.read_text(encoding="utf-8")}


PROGRAM = Program(
    files=_files,
    command=lambda _: (FILE,),
    is_script=lambda _: True,
    codecs={"model of the script": Codec(_write_model)},
)
