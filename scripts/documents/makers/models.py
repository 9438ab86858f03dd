"""What docs/strategies.md and docs/chains.md say: layouts of kinds of models, chains on stages."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from documents.pages import ROOT
from documents.tables import table
from documents.terminal import BestLayout, Step, best_of, run, scratch_folder, terminal
from meshwright.hwprofiles import Precision, format_bytes, format_time, load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob, load_model
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.layout import model_stages
from meshwright.simulator.memory import BlockMemory, block_bytes, stage_messages
from meshwright.simulator.model import parameter_tensors

NODES = "--cluster dgx-a100 --gpus 32"
PIPELINES = (2, 4, 8)
SUBJECTS = {"resnet50": 2048, "bert-large": 512, "gpt3-13b": 512}
CHAINS = "docs/chains.md"
TWO_GPUS = "--cluster dgx-a100 --gpus 2 --global-batch 8192 --micro-batch 1024"
PUBLISHED = ROOT / "tests" / "golden" / "resnet50_throughput.csv"
CLUSTERS = {
    "a100-sxm4-80gb": "dgx-a100",
    "v100-sxm2-16gb": "dgx-1v-16gb.toml",
    "v100-sxm2-32gb": "dgx-1v",
}
PUBLISHED_BATCH = 2048


def models_and_strategies() -> str:
    """Return the best layout of each model, the best pipeline, and what that costs."""
    head = ("model, batch", "best of all layouts", "step", "best pipeline", "step", "slower")
    return table(head, (_row(*each) for each in SUBJECTS.items()))


def _row(model: str, batch: int) -> Iterator[str]:
    words = f"search {model} {NODES} --global-batch {batch}"
    best = best_of(words)
    pipelines = [best_of(f"{words} --pp {degree}") for degree in PIPELINES]
    pipeline = min(pipelines, key=lambda each: each.step.step_time_s)
    slower = pipeline.step.step_time_s / best.step.step_time_s - 1
    yield f"`{model}`, {batch:,}"
    yield from (_told(best), format_time(best.step.step_time_s))
    yield from (_told(pipeline), format_time(pipeline.step.step_time_s))
    yield "itself the best" if slower == 0 else f"{slower:.0%}"


def _told(layout: BestLayout) -> str:
    degrees = layout.degrees
    axes = " x ".join(f"{axis} {degrees[axis]}" for axis in ("tp", "pp", "dp") if degrees[axis] > 1)
    return f"{axes}, {degrees['microbatch_size']} a microbatch"


def resnet_throughput() -> str:
    """Return published rates of ResNet-50 beside those that are simulated."""
    head = ("device", "precision", "a GPU", "GPUs", "published", "simulated", "error")
    folder = scratch_folder()
    with PUBLISHED.open(encoding="utf-8") as file:
        return table(head, [_rate(row, folder) for row in csv.DictReader(file)])


def _rate(row: dict[str, str], folder: Path) -> tuple[str, ...]:
    size, num_gpus = int(row["microbatch_size"]), int(row["num_gpus"])
    cluster = CLUSTERS[row["device"]]
    if cluster.endswith(".toml"):
        found = ROOT / "meshwright" / "hwprofiles" / "data" / "clusters" / "dgx-1v.toml"
        text = found.read_text(encoding="utf-8").replace("v100-sxm2-32gb", row["device"])
        (folder / cluster).write_text(text.replace('"dgx-1v"', '"dgx-1v-16gb"'), encoding="utf-8")
    batch = PUBLISHED_BATCH // (size * num_gpus) * size * num_gpus
    words = f"resnet50 --cluster {cluster} --gpus {num_gpus} --global-batch {batch}"
    words += f" --micro-batch {size} --stack ddp --precision {row['precision']}"
    step = _step_in(folder, words)
    published = float(row["images_per_s"])
    shown = (f"{published:,.0f}", f"{step.tokens_per_s:,.0f}")
    error = f"{step.tokens_per_s / published - 1:+.1%}"
    return (row["device"], row["precision"], str(size), str(num_gpus), *shown, error)


def _step_in(folder: Path, words: str) -> Step:
    found = json.loads(run(["simulate", *words.split(), "--json", "-"], folder))
    flat = {**found, **found["memory"]}
    return Step(**{name: flat[name] for name in Step._fields})


def four_layouts() -> str:
    """Return four layers on two devices: as stages, split, and copied."""
    head = ("layout", "options", "step", "exposed communication", "idle", "fullest device")
    ways = {"two stages": "--pp 2", "each matrix split": "--tp 2", "two copies": ""}
    rows = []
    for way, options in ways.items():
        step = _step_in(terminal(CHAINS).folder, f"four.toml {TWO_GPUS} {options}")
        times = (format_time(step.step_time_s), format_time(step.exposed_comm_s))
        idle, size = f"{step.bubble_fraction:.1%}", format_bytes(step.device_bytes)
        rows.append((way, f"`{options}`" if options else "none", *times, idle, size))
    return table(head, rows)


class _Chain(NamedTuple):
    """A chain on two stages, and the bytes of its blocks."""

    shape: BlockShape
    layers: tuple[int, ...]
    blocks: dict[str, BlockMemory[int]]

    @classmethod
    def of(cls, name: str, rows: int, precision: Precision) -> "_Chain":
        """Return the chain that a file of the page describes, with *rows* a microbatch."""
        model = load_model(str(terminal(CHAINS).folder / name))
        layers = (model.num_layers // 2,) * 2
        plan = ResolvedPlan(pp=2, microbatch_size=rows, stages=layers)
        job = TrainingJob(model=model, global_batch_size=rows, seq_len=1, precision=precision)
        shape = BlockShape.of(job, plan, load_stack("megatron-core"))
        return cls(shape, layers, block_bytes(BlockTable(), shape))


def four_message() -> str:
    """Return the message between the stages of four layers."""
    chain = _Chain.of("four.toml", 1024, Precision.BF16)
    first = model_stages(chain.shape.trained, chain.layers)[0]
    return format_bytes(stage_messages(chain.blocks, first).output)


def textbook_stages() -> str:
    """Return what the textbook's two stages hold and send."""
    chain = _Chain.of("textbook.toml", 4, Precision.FP32)
    model, width = chain.shape.trained, chain.shape.element_bytes
    head = ("stage", "input", "weights", "output", "bytes of weights", "sends on", "sends back")
    rows = []
    for number, stage in enumerate(model_stages(model, chain.layers)):
        kind = stage.layers[0].kind
        (weight,) = [each for each in parameter_tensors(model) if each.block == kind]
        outputs, inputs = weight.shape
        sent = stage_messages(chain.blocks, stage)
        shapes = (f"4 x {inputs}", f"{inputs} x {outputs}", f"4 x {outputs}")
        sizes = (inputs * outputs * width, sent.output, sent.gradient)
        rows.append((number, *shapes, *(f"{size} B" if size else "nothing" for size in sizes)))
    return table(head, rows)
