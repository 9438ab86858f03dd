"""The commands of docs/count.md that need a framework, as a reader would type them."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/count.md").read_text(encoding="utf-8")
FILES = re.compile(r"^```(?:python|toml)\n# ([\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^meshwright (count --rank .*)$", re.MULTILINE)
PLANS = re.compile(r"^\| `([\w.]+)` \| `(.*?)` \| (.*?) \|$", re.MULTILINE)
SHARDED = "count --rank 5 --world 16 -- -m torchtitan.train --job.config_file sharded.toml"
Calls = dict[tuple[str, int], int]


def run(folder: Path, *words: str, status: int = 0) -> None:
    command = [sys.executable, "-P", *words]
    assert subprocess.run(command, cwd=folder, check=False, timeout=600).returncode == status


def counted(folder: Path, script: str) -> dict[str, object]:
    """Return the JSON of the page's command with *script*, in a folder with the page's files."""
    for name, text in FILES.findall(PAGE):
        (folder / name).write_text(text, encoding="utf-8")
    (command,) = (each for each in [*COMMANDS.findall(PAGE), SHARDED] if script in each)
    if "torchtitan" in command:
        run(folder, "assets.py")
    count, *rest = shlex.split(command)
    of_plan = {name: words for name, words, _ in PLANS.findall(PAGE)}
    if script in of_plan:
        simulate = ["simulate", *of_plan[script].split(), "--cluster", "dgx-h100", "--out", "plan"]
        run(folder, "-m", "meshwright", *simulate)
        rest = ["--plan", "plan/plan.json", *rest]
    status = 0 if script != "pretrain.py" else 1  # its peak
    run(folder, "-m", "meshwright", count, "--json", "count.json", *rest, status=status)
    found: dict[str, object] = json.loads((folder / "count.json").read_text(encoding="utf-8"))
    if script in of_plan:
        equal = dict(zip(of_plan, (each[2] for each in PLANS.findall(PAGE)), strict=True))[script]
        assert_equal(found, equal.split(", "))
    return found


def assert_equal(count: dict[str, object], quantities: list[str]) -> None:
    """Assert that all but the peak is as the plan says, and the peak where it is listed."""
    (rank,) = count["comparison"]["ranks"]
    checks = [each for each in rank["checks"] if each["verdict"] != "reported"]
    failed = {each["quantity"] for each in checks if each["verdict"] != "pass"}
    assert failed == ({"peak live bytes"} if "peak" not in quantities else set())


def calls_of(count: dict[str, object]) -> Calls:
    """Return how often a rank makes each call, by operation and bytes."""
    calls: Calls = {}
    for each in count["collectives"]:
        key = each["op"], each["size_bytes"]
        calls[key] = calls.get(key, 0) + each["num_calls"]
    return calls


def test_the_page_has_a_command_of_each_kind() -> None:
    ends = ["trainer.py", "accelerated.py", "titan.toml", "pretrain.py"]
    assert [each.split()[-1] for each in COMMANDS.findall(PAGE)] == ends


def test_trainer(tmp_path: Path) -> None:
    count = counted(tmp_path, "trainer.py")
    tokens, width, layers, rows = 4 * 1024, 768, 12, 50257
    attention = (2 + 5) * 2 * layers * tokens * 1024 * width
    assert count["flops"] == 6 * tokens * (12 * layers * width**2 + rows * width) + attention
    parameters = 12 * layers * width**2 + 13 * layers * width + (rows + 1024 + 2) * width
    reduced = {size: n for (op, size), n in calls_of(count).items() if op == "all_reduce"}
    unused = 4 * (12 * layers + 4)  # which parameters have no gradient: a number for each
    assert reduced.pop(unused) == 1
    assert sum(size * n for size, n in reduced.items()) == 4 * parameters


def test_accelerate(tmp_path: Path) -> None:
    count = counted(tmp_path, "accelerated.py")
    width, ffn, layers, rows, seq = 4096, 11008, 4, 32000, 4096
    matrices = 4 * width**2 + 3 * width * ffn
    attention = (2 + 5) * 2 * layers * seq * seq * width
    assert count["flops"] == 6 * seq * (layers * matrices + rows * width) + attention
    calls = calls_of(count)
    layer = matrices + 2 * width
    assert calls["all_gather", 2 * layer] == 2 * layers
    assert calls["reduce_scatter", 2 * layer] == layers


def test_torchtitan(tmp_path: Path) -> None:
    count = counted(tmp_path, "titan.toml")
    sent = 2 * 256 // 2 * 256  # a sequence in bf16, a half of it on each rank
    calls = calls_of(count)
    assert calls["send", sent] == calls["recv", sent] == 4


def test_torchtitan_sharded(tmp_path: Path) -> None:
    calls = calls_of(counted(tmp_path, "sharded.toml"))
    assert calls["reduce_scatter", 4 * 2048 * 256 + 4 * 256] == 1  # the head and its norm in fp32


def test_torchtitan_hybrid(tmp_path: Path) -> None:
    """Both stages agree with the plan: norms of DTensors are one kernel, as on a GPU."""
    files = dict(FILES.findall(PAGE))
    files["titan.toml"] += '[activation_checkpoint]\nmode = "none"\n'
    for name in ("assets.py", "debug.toml", "titan.toml"):
        (tmp_path / name).write_text(files[name], encoding="utf-8")
    run(tmp_path, "assets.py")
    options = "--gpus 16 --tp 2 --pp 2 --sequence-parallel --global-batch 16 --stack torchtitan@0.2"
    simulate = f"simulate debug.toml {options} --set kernels=eager --cluster dgx-h100 --out plan"
    run(tmp_path, "-m", "meshwright", *simulate.split())
    script = "-- -m torchtitan.train --job.config_file titan.toml"
    for rank in (0, 15):
        count = f"count --rank {rank} --plan plan/plan.json {script}"
        run(tmp_path, "-m", "meshwright", *count.split())  # status 0: all agrees


def test_megatron_core(tmp_path: Path) -> None:
    count = counted(tmp_path, "pretrain.py")
    width, seq, sequences, layers, tp = 768, 1024, 2 * 4, 4 // 2, 2
    products = 6 * sequences * seq * layers * 12 * width**2 // tp
    attention = 3 * 2 * 2 * sequences * layers * seq**2 * width // tp
    assert count["flops"] == products + attention
    calls = calls_of(count)
    hidden = 2 * 2 * seq * width  # two sequences in bf16
    assert calls["send", hidden] == calls["recv", hidden] == 4
    table = 4 * (50304 // tp) * width  # tied: its gradients are summed with those of the last stage
    assert calls["all_reduce", table] == 1
