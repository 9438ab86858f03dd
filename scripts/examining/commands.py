"""What a command of Megatron-LM's says of its layout, read from its words alone.

Not one line of ours is used: defaults are those of megatron/training/arguments.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath

Claims = dict[str, object]
Options = dict[str, list[str]]

STARTERS = {"torchrun", "deepspeed", "accelerate", "python", "python3"}
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
# What trains a decoder alone; all else, were it read as a plan, would be read wrong.
TRAINS = re.compile(
    r"(pretrain|finetune)_(?!bert|t5|ict|vision|retro|hybrid|mamba|vlm|huggingface)\w+\.py|train\.py"
)
EITHER = re.compile(r"train|finetune|sft|run_|main", re.IGNORECASE)
OLD_NAMES = {
    "moe-expert-parallel-size": "expert-model-parallel-size",
    "encoder-seq-length": "seq-length",
    "num-local-experts": "num-experts",
    "intermediate-size": "ffn-hidden-size",  # of Pai-Megatron-Patch
}


def program_of(argv: Sequence[str]) -> str:
    """Return the program that a command trains with; nothing where it starts none.

    >>> program_of(["torchrun", "--nnodes", "2", "-m", "torchtitan.train", "--x"])
    'torchtitan.train'
    >>> program_of(["python", "-m", "torch.distributed.run", "a/pretrain_gpt.py"])
    'pretrain_gpt.py'
    >>> program_of(["python", "-c", "print()"])
    ''
    """
    if argv[0] not in STARTERS:
        return ""
    modules = [b for a, b in pairwise(argv) if a in ("-m", "--module")]
    programs = [each for each in modules if each not in LAUNCHERS]
    scripts = [PurePath(each).name for each in argv[1:] if each.endswith(".py")]
    return (programs + scripts + [""])[0]


def launches(commands: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the commands that train something, the rest prepares or measures."""
    return [[*each] for each in commands if EITHER.search(program_of(each))]


def options_of(argv: Sequence[str]) -> Options:
    """Return the words behind each option; of one that is told again, those of the last time.

    >>> options_of(["torchrun", "--nproc_per_node=8", "--x", "-1", "b", "--y"])
    {'nproc-per-node': ['8'], 'x': ['-1', 'b'], 'y': []}
    """
    found: Options = {}
    words: list[str] = []
    for word in argv[1:]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            words = found[OLD_NAMES.get(name, name)] = [value] if equals else []
        else:
            words.append(word)
    return found


def devices_of(argv: Sequence[str], header: Mapping[str, str], otherwise: int) -> int:
    """Return how many devices a command trains on.

    Args:
        argv: All its words.
        header: Options of the batch script that it is of.
        otherwise: Where nobody says it.

    >>> devices_of(["deepspeed", "--num_nodes", "2", "--num_gpus=8", "a.py"], {}, 1)
    16
    >>> devices_of(["python", "a.py"], {"nodes": "4", "ntasks-per-node": "8"}, 1)
    32
    """
    said = options_of(argv)
    names = ("num-nodes", "num-gpus") if argv[0] == "deepspeed" else ("nnodes", "nproc-per-node")
    nodes, ranks = ((said.get(name) or [""])[0].rpartition(":")[2] for name in names)
    if argv[0] == "torchrun" or {*argv} & {*LAUNCHERS}:
        nodes, ranks = nodes or "1", ranks or "1"
    if ranks.isdecimal():
        return int(nodes or 1) * int(ranks)
    if "nodes" in header and "ntasks-per-node" in header:
        return int(header["nodes"]) * int(header["ntasks-per-node"])
    return 1 if argv[0].startswith("python") and not header else otherwise


def command_claims(argv: Sequence[str], world: int) -> Claims:
    """Return what a command says of its plan, by names of a plan's fields.

    Args:
        argv: All its words.
        world: Devices of the run.
    """
    said = options_of(argv)

    def number(name: str, otherwise: int) -> int:
        words = said.get(name) or [str(otherwise)]
        return int(float(words[0]))

    tp, pp = number("tensor-model-parallel-size", 1), number("pipeline-model-parallel-size", 1)
    cp, layers = number("context-parallel-size", 1), number("num-layers", 0)
    dp = world // (tp * pp * cp)
    micro = number("micro-batch-size", 1)
    ep = number("expert-model-parallel-size", 1) if _has_experts(said) else 1
    virtual = number("num-virtual-stages-per-pipeline-rank", 1)
    if "num-layers-per-virtual-pipeline-stage" in said:
        virtual = layers // pp // number("num-layers-per-virtual-pipeline-stage", 1)
    claims: Claims = {
        "world_size": world,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": dp,
        "ep": ep,
        "num_virtual_stages": virtual,
        "microbatch_size": micro,
        "global_batch_size": number("global-batch-size", micro * dp),
        "seq_len": number("seq-length", 0),
        "precision": _precision(said),
        "sequence_parallel": "sequence-parallel" in said and tp > 1,
        **_recompute(said),
        **_model(said, number),
    }
    if dp * cp > 1:
        claims["zero_stage"] = _zero(said)
    return claims


def _has_experts(said: Options) -> bool:
    return (said.get("num-experts") or ["1"])[0] not in ("1", "")


def _precision(said: Options) -> str:
    fp8 = (said.get("fp8-format") or [""])[0] or ("hybrid" if "fp8-hybrid" in said else "")
    recipe = (said.get("fp8-recipe") or ["delayed"])[0]
    if fp8:
        return {"mxfp8": "mxfp8", "blockwise": "fp8 in blocks"}.get(recipe, "fp8")
    return next((each for each in ("bf16", "fp16") if each in said), "fp32")


def _zero(said: Options) -> int:
    if "use-megatron-fsdp" in said or "use-torch-fsdp2" in said:
        return {"no_shard": 0, "optim": 1, "optim_grads": 2}.get(
            (said.get("data-parallel-sharding-strategy") or [""])[0], 3
        )
    if "zero-stage" in said and "deepspeed" in said:
        return int(said["zero-stage"][0])
    return int("use-distributed-optimizer" in said)


def _recompute(said: Options) -> Claims:
    kind = (said.get("recompute-granularity") or ["none"])[0]
    if "recompute-activations" in said:
        kind = "selective"
    if {"checkpoint-activations", "deepspeed-activation-checkpointing"} & {*said}:
        kind = "full"
    claims: Claims = {"recompute": kind}
    method = (said.get("recompute-method") or [""])[0]
    layers = int((said.get("recompute-num-layers") or ["1"])[0])
    if kind == "full" and (method, layers) != ("uniform", 1) and method:
        claims |= {"recompute_method": method, "recompute_layers": layers}
    return claims


def _model(said: Options, number: Callable[[str, int], int]) -> Claims:
    hidden, heads = number("hidden-size", 0), number("num-attention-heads", 0)
    grouped = "group-query-attention" in said
    gated = "swiglu" in said
    wide = 4 * hidden if not gated else int(4 * hidden * 2 / 3 / 64) * 64
    claims: Claims = {
        "num_layers": number("num-layers", 0),
        "hidden_size": hidden,
        "num_heads": heads,
        # Without a number of groups there is one.
        "num_kv_heads": number("num-query-groups", 1) if grouped else heads,
        "gated_mlp": gated,
        "tied_embeddings": "untie-embeddings-and-output-weights" not in said,
        "norm": "rmsnorm" if (said.get("normalization") or [""])[0] == "RMSNorm" else "layernorm",
        "num_experts": number("num-experts", 0) if _has_experts(said) else 0,
    }
    if not _has_experts(said):
        claims["ffn_hidden_size"] = number("ffn-hidden-size", wide)
    return claims
