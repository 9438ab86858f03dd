"""What is fuzzed: command lines that are mostly sensible, and files with one thing wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from meshwright.hwprofiles import load_cluster, load_stack, profile_toml
from meshwright.planner.options import LAYOUT, LIMITS, REPLICATION

JOB = ["gpt2", "--cluster", "dgx-a100", "--gpus", "8", "--global-batch", "16"]
EXPERTS = ["mixtral-8x7b", "--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "16"]
SEEDS = (
    ["simulate", *JOB],
    ["simulate", *JOB, "--tp", "2", "--pp", "2"],
    ["simulate", "gpt2", "--cluster", "dgx-1v", "--gpus", "8", "--global-batch", "8"],
    ["simulate", "resnet50", *JOB[1:], "--stack", "ddp"],
    ["simulate", *JOB, "--stack", "parameter-server"],
    ["simulate", *JOB, "--stack", "fsdp", "--precision", "bf16"],
    ["search", *JOB, "--max-pp", "1", "--top", "2"],
    ["search", *JOB, "--tp", "2", "--pp", "2", "--micro-batch", "1"],
    ["simulate", *JOB, "--max", "micro-batch"],
    ["search", *JOB, "--tp", "2", "--pp", "1", "--max", "seq-len"],
    ["simulate", *EXPERTS, "--ep", "8", "--imbalance", "1.5", "--dispatcher", "deepep"],
    ["simulate", *EXPERTS, "--tp", "2", "--recompute", "selective", "--recompute-modules", "moe"],
    ["simulate", *JOB, "--cp", "2", "--cp-type", "ring"],
    ["explain", "plan.json"],
    ["explain", *JOB, "--tp", "2"],
    ["sweep", *JOB, "--simulate", "--jobs", "1", "--vary", "tp=1,2", "--vary", "loss=fused"],
    ["matmul", "4x5", "5x8", "--devices", "2"],
    *(["models", "gpt2"], ["clusters", "dgx-a100"], ["stacks", "fsdp", "--toml"], ["schedules"]),
    ["validate", "plan.json", "--rank", "0", "--collect", "results"],
    ["calibrate", "--trace", "trace.json"],
    ["compare", "plan.json", "plan.json"],
    ["compare", *JOB, "--tp", "1", "--pp", "1", "--stack", "megatron-core,deepspeed"],
    *(["export", "plan.json", "--to", name] for name in ("megatron-lm", "megatron-bridge")),
    ["export", "plan.json", "--to", "torchtitan", "--framework-version", "0.3", "--slurm"],
    ["import", "plan.json", "--from", "deepspeed", "--model", "gpt2", *JOB[1:]],
    ["count", "--world", "2", "--", "no-such.py"],
    *(["--version"], ["--help"], []),
)
NEED_TORCH = (["validate"], ["count"])
GARBAGE = (
    *("", " ", "-", "--", "--tp", "-1", "0", "1", "2", "3", "12", "1.5", "1e9", "nan", "inf"),
    *("None", "{}", "9" * 40, "9" * 5000, "\udcff", "\0", "a" * 300, "8 GPUs", "80 GiB", "../.."),
    *("\u2028", "none", "all", "full", "1,2", "a=b", "=", "name=x", "nodes=-1", "x" * 5000, "4x5"),
    *("seq-len", "global-batch", "core_attn,mlp", "hybridep", "all-to-all", "torchtitan", "0.3"),
    *("10000000", "99999999", "1e18", "2.5 USD/GPU-hour", "-inf", "1e-400", "gpt2", "fp32", "."),
)
# Options that may write or start something stay out of it.
OPTIONS = sorted(
    {f"--{each.name.replace('_', '-')}" for group in (LAYOUT, LIMITS, REPLICATION)
     for each in group.options}
    | {"--gpus", "--global-batch", "--seq-len", "--precision", "--stack", "--cluster", "--set"}
    | {"--memory-limit", "--tokens", "--price", "--top", "--json=-", "--plan", "--devices"}
    | {"--vary", "--weak", "--max", "--imbalance", "--to", "--from", "--framework-version"}
)  # fmt: skip
PLAN = {
    "format": "meshwright-plan-1",
    "model": "gpt2",
    "cluster": "dgx-a100",
    "stack": "megatron-core",
    "job": {"global_batch_size": 16, "seq_len": 1024, "precision": "bf16"},
    "plan": {"tp": 2, "pp": 2, "dp": 2, "num_virtual_stages": 1, "microbatch_size": 1}
    | {"zero_stage": 1, "sequence_parallel": False, "recompute": "none", "attention": "flash"}
    | {"schedule": "1f1b", "stages": [6, 6]},
}
MODEL = """name = "tiny"
num_layers = 2
hidden_size = 64
num_heads = 4
vocab_size = 128
seq_len = 64
source = "here"
"""
TITAN = """[training]
local_batch_size = 1
global_batch_size = 64
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = "none"
"""
SPEED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000000, "overlap_comm": True},
    "data_types": {"grad_accum_dtype": "bf16"},
}
MEGATRON = """torchrun --nproc-per-node 8 pretrain_gpt.py \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1 \\
  --global-batch-size 16 --bf16 --seq-length 1024 --num-layers 12 --recompute-granularity full \\
  --recompute-method uniform --recompute-num-layers 1 --overlap-grad-reduce
"""
OF_TITAN = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8"]
TRACE = {"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 2.0}]}
VALUES = (
    *(None, True, 0, -1, 1, 2, 3, 10**9, 10**18, 10**40, -0.5, 0.5, 1e308, float("nan")),
    *(float("inf"), "", "x", "gpt2", "none", [], [1], [[]], {}, {"x": 1}, "9" * 400, "\u2028"),
    *('"""+x+"""', "$(touch x)", "$\\foo{$ [/x]", "\x1b[31m", "a\nb", "\x9b\u202e\ud800"),
    *([1] * 300, [0, 12], [6, -6], "\0", "/dev/zero", "../plan.json", "1 GB", "-1 GiB", "1e999 s"),
)


class Case(NamedTuple):
    """A command, and the files that lie in its folder."""

    words: list[str]
    files: dict[str, bytes]


def command_line(random: Random, *, with_runs: bool) -> Case:
    """Return a command with up to four words left out, changed or put in."""
    seeds = [each for each in SEEDS if with_runs or each[:1] not in NEED_TORCH]
    words = list(random.choice(seeds))
    for _ in range(random.randint(1, 4)):
        place = random.randint(0, len(words))
        match random.randint(0, 4):
            case 0 if words:
                del words[min(place, len(words) - 1)]
            case 1 if words:
                words[min(place, len(words) - 1)] = random.choice(GARBAGE)
            case 2:
                words.insert(place, random.choice(GARBAGE))
            case 3:
                words[place:place] = [random.choice(OPTIONS), random.choice(GARBAGE)]
            case _:
                words += [random.choice(OPTIONS), str(random.choice((1, 2, 4, 8, "bf16", "full")))]
    return Case(words, {"plan.json": json.dumps(PLAN).encode()})


def _json(random: Random, document: Any) -> bytes:  # noqa: ANN401 - any JSON
    """Return *document* with one value replaced or left out, or its text cut or struck."""
    document = json.loads(json.dumps(document))
    places: list[tuple[Any, Any]] = []
    remaining = [document]
    while remaining:
        value = remaining.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value))
        places += [(value, key) for key in keys]
        remaining += [value[key] for key in keys if isinstance(value[key], dict | list)]
    holder, key = random.choice(places)
    if random.random() < 0.15:
        del holder[key]
    else:
        holder[key] = random.choice(VALUES)
    return _struck(random, json.dumps(document).encode())


def _toml(random: Random, text: str) -> bytes:
    """Return *text* with one line changed, left out or twice, or cut or struck."""
    lines = text.splitlines()
    place = random.randrange(len(lines))
    key, equals, _ = lines[place].partition("=")
    match random.randint(0, 3):
        case 0:
            del lines[place]
        case 1:
            lines.insert(place, lines[place])
        case _ if equals:
            written = json.dumps(random.choice(VALUES)).replace("NaN", "nan")
            lines[place] = f"{key}= {written.replace('Infinity', 'inf')}"
        case _:
            lines[place] = "[" + lines[place]
    return _struck(random, "\n".join(lines).encode())


def _words(random: Random, text: str) -> bytes:
    """Return *text* with one word replaced, left out or twice, or cut or struck."""
    words = text.split(" ")
    place = random.randrange(len(words))
    words[place : place + 1] = random.choice(
        ([], [words[place]] * 2, [str(random.choice(GARBAGE))], [str(random.choice(VALUES))])
    )
    return _struck(random, " ".join(words).encode("utf-8", "replace"))


def _struck(random: Random, content: bytes) -> bytes:
    """Return *content* as it is; or, one time in five, cut or with a byte put in."""
    place = random.randrange(len(content) + 1)
    match random.randint(0, 9):
        case 0:
            return content[:place]
        case 1:
            odd = random.choice((b"\0", b"\xff", b"{", b'"', b"9" * 5000, b"[" * 3000, b"\r", b"."))
            return content[:place] + odd + content[place:]
        case _:
            return content


def _results(random: Random) -> Case:
    """Return a run's folder in which one file is damaged."""
    run = {"plans": ["plan.json"], "backend": "gloo", "results": "."}
    beat = {"rank": 0, "world_size": 8, "host": "h", "pid": 7, "phase": "done", "plan": 0}
    failure = {"rank": 0, "host": "h", "pid": 7, "phase": "init", "plan": 0, "time_s": 1.0}
    failure |= {"kind": "timeout", "exception": "E", "message": "m", "traceback": "t"}
    measured = {"rank": 0, "world_size": 8, "backend": "gloo", "flops": 1, "peak_bytes": 5}
    measured |= {"collectives": [["dp", "all_reduce", 8, 4, 1]], "bytes_at_peak": {"gradients": 5}}
    measured |= {"host_traffic": [0, 0], "losses": [1.0], "step_times_s": [0.5], "staleness": []}
    documents: dict[str, dict[str, Any]] = {
        "results/run.json": run,
        "results/rank-00000.heartbeat.json": beat | {"time_s": 1.0},
        "results/plan-00/rank-00000.json": measured,
    }
    if random.random() < 0.5:
        documents["results/rank-00000.failure.json"] = failure | {"missing": [1]}
    damaged = random.choice(sorted(documents))
    files = {
        name: _json(random, each) if name == damaged else json.dumps(each).encode()
        for name, each in documents.items()
    }
    files["plan.json"] = json.dumps(PLAN).encode()
    return Case(["validate", "plan.json", "--collect", "results"], files)


def file_case(random: Random, *, with_runs: bool) -> Case:
    """Return a command with a file in which something is wrong."""
    kinds: list[Callable[[], Case]] = [
        lambda: Case(["simulate", "--plan", "p.json"], {"p.json": _json(random, PLAN)}),
        lambda: Case(["simulate", "m.toml", *JOB[1:]], {"m.toml": _toml(random, MODEL)}),
        lambda: Case(["simulate", "c.json", *JOB[1:]], {"c.json": _json(random, _config())}),
        lambda: _profile(random, "--cluster", _text("dgx-a100", load_cluster)),
        lambda: _profile(random, "--stack", _text("megatron-core", load_stack)),
        lambda: Case(
            ["import", "t.toml", "--from", "torchtitan", *OF_TITAN],
            {"t.toml": _toml(random, TITAN)},
        ),
        lambda: Case(
            ["import", "s.json", "--from", "deepspeed", "--model", *JOB[:5]],
            {"s.json": _json(random, SPEED)},
        ),
        lambda: Case(
            ["import", "m.sh", "--from", "megatron-lm", "--model", *JOB[:3]],
            {"m.sh": _words(random, MEGATRON)},
        ),
        *(
            lambda words=words: Case(words, {"p.json": _json(random, PLAN)})  # type: ignore[misc]
            for words in (
                ["explain", "p.json"],
                ["compare", "p.json", "p.json"],
                ["export", "p.json", "--to", "deepspeed"],
                ["export", "p.json", "--to", "torchrun", "--slurm"],
                ["simulate", "--plan", "p.json", "--max", "micro-batch"],
            )
        ),
        lambda: Case(["calibrate", "--trace", "t.json"], {"t.json": _json(random, TRACE)}),
    ]
    return _results(random) if with_runs and random.random() < 0.3 else random.choice(kinds)()


def _config() -> dict[str, object]:
    """Return the configuration of a small model as Hugging Face writes it."""
    folder = Path(__file__).parents[1] / "same_parts" / "inputs" / "llama"
    config: dict[str, object] = json.loads((folder / "config.json").read_text("utf-8"))
    return config


def _text(name: str, load: Callable[[str], Any]) -> str:
    return profile_toml(load(name))


def _profile(random: Random, option: str, text: str) -> Case:
    return Case(["simulate", *JOB, option, "./x.toml"], {"x.toml": _toml(random, text)})
