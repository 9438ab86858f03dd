"""``count`` beside FlopCounterMode and CommDebugMode of PyTorch, on the same script."""

import json
import runpy
import warnings
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from meshwright import main  # noqa: E402

RANK, LAYERS, WIDTH = 1, 2, 32
# Attention as its products: FlopCounterMode has no formula for the kernel of a processor.
SCRIPT = f"""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range(4)
        )
        self.up, self.down = nn.Linear({WIDTH}, {4 * WIDTH}), nn.Linear({4 * WIDTH}, {WIDTH})

    def forward(self, x):
        query, key, value = (
            each(x).unflatten(-1, (-1, 8)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        attended = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))

device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, {{mesh}}, mesh_dim_names=("dp", "tp"))
column, row = parallel.ColwiseParallel(), parallel.RowwiseParallel()
split = dict.fromkeys(("query", "key", "value", "up"), column) | {{{{"out": row, "down": row}}}}
model = nn.Sequential(*(Block() for _ in range({LAYERS}))).to(device)
for block in model:
    if mesh["tp"].size() > 1:
        parallel.parallelize_module(block, mesh["tp"], split)
    if mesh["dp"].size() > 1:
        fully_shard(block, mesh=mesh["dp"])
if mesh["dp"].size() > 1:
    fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.ones(2, 16, {WIDTH}, device=device, requires_grad=True)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

while __name__ == "__main__":
    step()
"""
WORDS = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}


def counted_by_pytorch(script: Path, world: int) -> tuple[dict[str, int], Counter[str]]:
    """Return FLOPs by operator and calls of the script's second step, on tensors with data."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=world)
    calls, flops = CommDebugMode(), FlopCounterMode(display=False)
    try:
        step = runpy.run_path(str(script), run_name="script")["step"]
        step()
        # CommDebugMode hooks modules whose inputs have no gradients, and PyTorch warns of that.
        with warnings.catch_warnings(action="ignore"), calls, flops:
            step()
    finally:
        dist.destroy_process_group()
    found: Counter[str] = Counter()
    for operator, times in calls.get_comm_counts().items():
        name = str(operator).replace("_", "")
        found[next(word for key, word in WORDS.items() if key in name)] += times
    return {str(name): n for name, n in flops.get_flop_counts()["Global"].items()}, found


@pytest.mark.parametrize("mesh", [(4, 1), (1, 4), (4, 2)], ids=["fsdp", "tp", "fsdp and tp"])
def test_flops_and_collectives_are_those_that_pytorch_counts(
    mesh: tuple[int, int], tmp_path: Path
) -> None:
    dp, tp = mesh
    script, out = tmp_path / "train.py", tmp_path / "count.json"
    script.write_text(SCRIPT.format(mesh=mesh), encoding="utf-8")
    flops, calls = counted_by_pytorch(script, dp * tp)
    words = ["--rank", str(RANK), "--world", str(dp * tp), "--json", str(out)]
    assert main(["count", *words, "--", str(script)]) == 0
    count = json.loads(out.read_text(encoding="utf-8"))
    found: Counter[str] = Counter()
    for call in count["collectives"]:
        found[call["op"]] += call["num_calls"]
    assert found == calls
    assert calls.total() > 0
    # FlopCounterMode sees a product of DTensors before it is split, as of all ranks of tp;
    # attention is of local tensors.
    ours = {name.removesuffix(".default"): n for name, n in count["flops_by_operator"].items()}
    assert {name: each * (1 if name == "aten.bmm" else tp) for name, each in ours.items()} == flops
