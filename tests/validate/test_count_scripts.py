"""``meshwright count``: scripts that know nothing of it, each as one rank of a large world."""

import json
import os
from pathlib import Path
from textwrap import dedent

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from meshwright import main  # noqa: E402
from meshwright.validate.counting.shards import Chunks  # noqa: E402

FP32 = 4
WIDTH = 256
WEIGHTS = 4 * (WIDTH * WIDTH + WIDTH)  # of four linear layers
ROWS = 128
DDP = f"""
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
layers = [each for _ in range(4) for each in (nn.Linear({WIDTH}, {WIDTH}), nn.ReLU())]
model = DistributedDataParallel(nn.Sequential(*layers).to(device), device_ids=[device.index])
"""
LOOP = f"""
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(100):
    rows = torch.randn({ROWS}, {WIDTH}, device=device, requires_grad=True)
    model(rows).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step > 10:
        raise AssertionError("it should have been stopped")
"""


def counted(folder: Path, script: str, *options: str, status: int = 0) -> dict[str, object]:
    path = folder / "train.py"
    path.write_text(dedent(script), encoding="utf-8")
    out = folder / "count.json"
    assert main(["count", *options, "--json", str(out), "--", str(path)]) == status
    found: dict[str, object] = json.loads(out.read_text(encoding="utf-8"))
    return found


def calls_of(count: dict[str, object]) -> list[tuple[object, ...]]:
    return [tuple(call.values()) for call in count["collectives"]]


def test_replicas_on_thousands_of_ranks(tmp_path: Path) -> None:
    count = counted(tmp_path, DDP + LOOP, "--rank", "2050", "--world", "3072")
    assert count["flops"] == 4 * 3 * 2 * ROWS * WIDTH * WIDTH
    size = FP32 * WEIGHTS
    assert calls_of(count) == [("world", "all_reduce", 3072, size, 1)]
    kinds = count["bytes_at_peak"]
    assert (kinds["parameters"], kinds["gradients"]) == (size, size)
    assert kinds["optimizer states"] == 2 * size + 8 * FP32  # with the number of the step
    # At the end of backward: the reducer's bucket, and the first rows with their gradient.
    assert kinds["activations and buffers"] >= size
    assert sum(kinds.values()) == count["peak_bytes"]
    assert not dist.is_initialized()
    assert not torch.cuda.is_available()
    assert "LOCAL_RANK" not in os.environ


def test_shards_that_are_replicated_are_named_by_their_mesh(tmp_path: Path) -> None:
    script = f"""
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    dist.init_process_group()
    mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range(2)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        model(torch.randn({ROWS}, {WIDTH}, device="cuda")).float().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    """
    count = counted(tmp_path, script, "--rank", "9", "--world", "32")
    weight = WIDTH * WIDTH
    assert calls_of(count) == [
        ("replicate", "all_reduce", 4, FP32 * weight // 8, 2),
        ("shard", "all_gather", 8, 2 * weight, 4),  # forward and backward
        ("shard", "all_reduce", 8, FP32 * 2, 1),  # a norm of each parameter
        ("shard", "reduce_scatter", 8, FP32 * weight, 2),
    ]
    kinds = count["bytes_at_peak"]
    assert kinds["parameters"] == FP32 * 2 * weight // 8
    assert kinds["optimizer states"] == 2 * FP32 * 2 * weight // 8


def test_shards_of_thousands_are_made_one_by_one() -> None:
    """As `_fsdp_common._chunk_with_empty` makes them all."""
    for size, num_chunks in ((5, 4), (5, 8), (8, 4), (0, 2)):
        tensor = torch.arange(2 * size).reshape(2, size)
        every = list(torch.chunk(tensor, num_chunks, dim=1))
        every += [torch.empty(0)] * (num_chunks - len(every))
        found = list(Chunks(tensor, num_chunks, dim=1))
        assert [each.tolist() for each in found] == [each.tolist() for each in every]


def test_a_table_and_a_loss_over_a_mesh_that_makes_the_first_group(tmp_path: Path) -> None:
    script = f"""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel
    mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Embedding(64, {WIDTH}), nn.Linear({WIDTH}, 64, bias=False)).cuda()
    head = parallel.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    table = parallel.RowwiseParallel(input_layouts=Replicate())
    parallel.parallelize_module(model, mesh, {{"0": table, "1": head}})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        ids = torch.randint(64, ({ROWS},), device="cuda")
        with parallel.loss_parallel():
            nn.functional.cross_entropy(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    count = counted(tmp_path, script, "--rank", "2", "--world", "4")
    assert count["flops"] == 3 * 2 * ROWS * WIDTH * 64 // 4
    row = FP32 * ROWS  # of the loss: its largest number, the sum, the label's own
    assert set(calls_of(count)) == {
        ("tp", "all_reduce", 4, row, 3),
        ("tp", "all_reduce", 4, row * WIDTH, 2),  # rows of the table, and their gradient
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, at its own import
def test_states_of_an_optimizer_in_another_are_sharded(tmp_path: Path) -> None:
    loop = LOOP.replace(
        "torch.optim.AdamW(model.parameters(), fused=True)",
        "ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, momentum=0.9)",
    )
    head = "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
    count = counted(tmp_path, head + DDP + loop, "--rank", "1", "--world", "4")
    states = count["bytes_at_peak"]["optimizer states"]
    assert 0 < states < FP32 * WEIGHTS
    assert ("world", "all_reduce", 4, FP32 * WEIGHTS, 1) in calls_of(count)
    sent = sum(size * n for _, op, _, size, n in calls_of(count) if op == "broadcast")
    assert sent == FP32 * WEIGHTS  # every rank's part of the weights, to all


def test_a_pipeline_of_messages(tmp_path: Path) -> None:
    script = f"""
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage = torch.nn.Linear({WIDTH}, {WIDTH})
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    while True:
        rows = torch.empty({ROWS}, {WIDTH}, requires_grad=True)
        dist.recv(rows.detach(), rank - 1)
        result = stage(rows)
        dist.send(result.detach(), rank + 1)
        gradient = torch.empty_like(result)
        dist.recv(gradient, rank + 1)
        result.backward(gradient)
        dist.send(rows.grad, rank - 1)
        optimizer.step()
        optimizer.zero_grad()
    """
    count = counted(tmp_path, script, "--rank", "3", "--world", "8")
    size = FP32 * ROWS * WIDTH
    assert calls_of(count) == [("world", "recv", 2, size, 2), ("world", "send", 2, size, 2)]
    assert count["flops"] == 3 * 2 * ROWS * WIDTH * WIDTH
    # Nothing is on a GPU: what is on the host is what counts.
    assert count["bytes_at_peak"]["parameters"] == FP32 * (WIDTH * WIDTH + WIDTH)


PIPELINE = f"""
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, {{schedule}}
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank)
layers = [nn.Linear({WIDTH}, {WIDTH}).to(device) for _ in range({{chunks}})]
stages = [
    PipelineStage(layer, rank + size * i, size * len(layers), device)
    for i, layer in enumerate(layers)
]
loss = nn.functional.mse_loss
schedule = {{schedule}}(stages if len(stages) > 1 else stages[0], 4, loss_fn=loss)
optimizer = torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0.1)
rows = torch.randn(4 * {ROWS}, {WIDTH}, device=device)
while True:
    given = (rows,) if rank == 0 else ()
    schedule.step(*given, target=rows if rank == size - 1 else None)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("schedule", "chunks", "rank", "sent"),
    [("Schedule1F1B", 1, 1, 8), ("ScheduleInterleaved1F1B", 2, 0, 12)],
)
def test_stages_ask_each_other_for_shapes(
    schedule: str, chunks: int, rank: int, sent: int, tmp_path: Path
) -> None:
    script = PIPELINE.format(schedule=schedule, chunks=chunks)
    count = counted(tmp_path, script, "--rank", str(rank), "--world", "4")
    assert count["rank"] == rank
    products = 4 * (3 * chunks - (rank == 0))  # the rows of the first layer have no gradient
    assert count["flops"] == products * 2 * ROWS * WIDTH * WIDTH
    size = FP32 * ROWS * WIDTH
    assert {(op, each, times) for _, op, _, each, times in calls_of(count)} == {
        ("send", size, sent),
        ("recv", size, sent),
    }


def test_autocast_keeps_what_a_gpu_keeps(tmp_path: Path) -> None:
    script = """
    import torch
    from torch import nn
    from torch.nn import functional
    layer = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    while True:
        with torch.autocast("cuda", torch.bfloat16):
            x = layer(torch.randn(8, 4, 32, 64, device="cuda"))
            assert x.dtype is torch.bfloat16 and x.is_cuda
            x = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            assert functional.layer_norm(x, (64,)).dtype is torch.float32
            loss = functional.cross_entropy(x.flatten(0, -2), torch.zeros(1024).long().cuda())
            assert loss.dtype is torch.float32
            assert torch.tensor([[loss]]).tolist() == [[0.0]]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    flops = counted(tmp_path, script)["flops_by_operator"]
    square = 2 * 2 * 8 * 4 * 32 * 32 * 64
    assert flops["aten._scaled_dot_product_flash_attention.default"] == square
    assert flops["aten._scaled_dot_product_flash_attention_backward.default"] == square * 5 // 2


def test_an_activations_gradient_is_one_kernel_as_on_a_gpu(tmp_path: Path) -> None:
    script = """
    import torch
    from torch.nn import functional
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1)
    while True:
        functional.silu(x).backward(torch.ones_like(x))
        optimizer.step()
        optimizer.zero_grad()
    """
    # What is trained, what is made of it, and the gradients of both: nothing beside them.
    assert counted(tmp_path, script)["peak_bytes"] == 4 * 1024 * 1024 * FP32


def test_values_that_are_not_there_are_noted(tmp_path: Path) -> None:
    script = DDP + LOOP.replace(
        "    optimizer.step()\n",
        """    ids = torch.randperm(50)
    assert ids.sum().item() == 1225 and len(ids[ids > 9]) == 40  # the host's numbers are there
    assert ids.to(device).max().item() == 49
    if not torch.isfinite(rows).all():
        raise ValueError
    print(rows.sum().item(), rows.detach().cpu().numpy().shape)
    torch.save(model.state_dict(), "weights.pt")
    optimizer.step()
""",
    )
    count = counted(tmp_path, script, "--steps", "2")
    line = script.splitlines().index(
        "    print(rows.sum().item(), rows.detach().cpu().numpy().shape)"
    )
    notes = {
        note["what"]: (note["where"].rpartition("/")[2], note["times"]) for note in count["notes"]
    }
    assert notes == {
        "a checkpoint that is to be saved: nothing is written": (f"train.py:{line + 2}", 2),
        "a value of a tensor without data: 0.0": (f"train.py:{line + 1}", 2),
        "an array of a tensor without data: zeros": (f"train.py:{line + 1}", 2),
    }
    assert not Path("weights.pt").exists()


@pytest.mark.parametrize(
    "question", ["x[x > 0]", "x.nonzero()", "torch.masked_select(x, x > 0)", "x.unique()"]
)
def test_sizes_that_depend_on_data_are_refused_by_place(
    question: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "asks.py"
    made = "import torch\nx = torch.randn(3, device='cuda')\n"
    code = f"{made}try:\n    {question}\nexcept Exception:\n    pass\n"
    path.write_text(code, encoding="utf-8")
    assert main(["count", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}:4: aten.")
    assert "depends on data" in error


def test_a_script_that_fails_shows_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fails.py"
    path.write_text(DDP + LOOP.replace("step > 10", "step > 0"), encoding="utf-8")
    assert main(["count", str(path)]) == 1
    error = capsys.readouterr().err
    assert "runpy" not in error
    assert error.endswith(
        "AssertionError: it should have been stopped\nerror: the script failed after 2 steps\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "SCRIPT is missing"),
        (["nowhere.py"], "script 'nowhere.py' is not a file"),
        (["--", "-m"], "-m names no module"),
        (["--rank", "4", "--world", "4", "x.py"], "--rank 4 is out of range; allowed 0 to 3"),
        (["--steps", "0", "x.py"], "--steps 0 is out of range; allowed 1 to 1000"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["count", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_what_a_launcher_starts_is_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "train.py", tmp_path / "count.json"
    script.write_text(DDP + LOOP, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=8", str(script)]
    options = ["count", "--json", str(out), "--rank", "9", "--world"]
    assert main([*options, "16", "--", *launcher]) == 0
    calls = calls_of(json.loads(out.read_text(encoding="utf-8")))
    assert calls == [("world", "all_reduce", 16, FP32 * WEIGHTS, 1)]
    assert main([*options, "32", "--", *launcher]) == 2
    capfd.readouterr()
    assert main([*options, "16", "--", *launcher[:-1], "--no-python", "/bin/true"]) == 2
    assert "error: the launcher starts /bin/true; allowed: " in capfd.readouterr().err


def test_a_script_that_never_steps_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "looks.py"
    path.write_text("import sys\nassert sys.argv[1:] == ['--lr', '3']\n", encoding="utf-8")
    assert main(["count", str(path), "--lr", "3"]) == 2
    assert "ended after 0 of 3 steps" in capsys.readouterr().err


CHAIN = f"""
name = "chain"
kind = "chain"

[[linear]]
inputs = {WIDTH}
outputs = {WIDTH}
count = 4
bias = true
activation = true
"""


@pytest.mark.parametrize(("rows", "status"), [(ROWS, 0), (2 * ROWS, 1)])
def test_a_script_is_compared_with_a_plan(rows: int, status: int, tmp_path: Path) -> None:
    model = tmp_path / "chain.toml"
    model.write_text(CHAIN, encoding="utf-8")
    plan = tmp_path / "plan"
    job = f"simulate {model} --cluster dgx-a100 --gpus 8 --stack ddp --precision fp32 --tp 1 --pp 1"
    batch = f"--global-batch {8 * rows} --micro-batch {rows} --out {plan}"
    assert main([*job.split(), *batch.split()]) == 0
    options = ("--rank", "3", "--plan", str(plan / "plan.json"))
    count = counted(tmp_path, DDP + LOOP, *options, status=status)
    assert count["world_size"] == 8
    assert calls_of(count) == [("dp", "all_reduce", 8, FP32 * WEIGHTS, 1)]
    assert count["comparison"]["agrees"] is (status == 0)
