"""docs/gallery.md: the strategies beside each other, and what its text says of single ones."""

import json
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from documents.tables import cells_of, table
from documents.terminal import run, step_of

SECTION = re.compile(
    r"^## (?P<title>.*)\n\n```\nmeshwright (?P<command>.*) --trace \S+\n```\n\n"
    r"!\[.*\]\((?P<picture>.*)\)$",
    re.MULTILINE,
)
HEAD = ("strategy", "step", "idle", "exposed communication", "fullest device", "closed form")
NODE = "simulate gpt2-medium --cluster dgx-a100 --gpus 8 --global-batch 64 --micro-batch 8"
BUCKETS = ("1 MB", "150 MB", "400 MB", "1 GB", "2 GB", "4 GB", "8 GB")
BUCKET_JOB = "simulate gpt2-xl --cluster a100-4xhdr200 --gpus 64 --global-batch 64 --stack ddp"
ONE_V100 = "--cluster dgx-2 --gpus 1 --stack deepspeed --global-batch 1 --recompute full"
# The widths of Ren et al. 2021 for models of about that size; heads are 128 wide.
PLAIN_WIDTH, OFFLOADED_WIDTH = 2048, 4096
OFFLOADED = "--zero 2 --offload optimizer"
GPT_TOML = """name = "gpt"
num_layers = {layers}
hidden_size = {width}
num_heads = {heads}
vocab_size = 50257
seq_len = 1024
"""


class Section(NamedTuple):
    """A strategy: its title, the words after ``meshwright`` without the trace, its picture."""

    title: str
    command: str
    picture: str

    @property
    def link(self) -> str:
        """Its title, which leads to it."""
        anchor = re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")
        return f"[{self.title}](#{anchor})"


def sections(page: str) -> tuple[Section, ...]:
    """Return the strategies of the page in their order."""
    return tuple(Section(*match.groups()) for match in SECTION.finditer(page))


def strategies(page: str) -> str:
    """Return the table of all strategies; closed forms are kept as they stand in the page's."""
    closed_forms = {cells[0]: cells[-1] for cells in cells_of(page) if cells[0].startswith("[")}
    rows = []
    for section in sections(page):
        step = step_of(section.command)
        rows.append(
            (
                section.link,
                _milliseconds(step.step_time_s),
                f"{step.bubble_fraction:.1%}",
                _milliseconds(step.exposed_comm_s),
                f"{step.device_bytes / 2**30:.1f} GiB",
                closed_forms.get(section.link, "-"),
            )
        )
    return table(HEAD, rows)


def bucket_sizes() -> str:
    """Return the step of DDP by how much is reduced at a time."""
    steps = (step_of(f'{BUCKET_JOB} --bucket-size "{size}"') for size in BUCKETS)
    times = [_milliseconds(step.step_time_s) for step in steps]
    return table(("`--bucket-size`", *BUCKETS), [("step", *times)])


def offloaded_fsdp2() -> str:
    """Return the step of FSDP2 with its parameters on the host."""
    return _milliseconds(step_of(f"{NODE} --stack torchtitan --offload parameters").step_time_s)


def largest_models() -> str:
    """Return the parameters that one device holds without offloading and with it."""
    plain = _largest(PLAIN_WIDTH, "--zero 0")
    moved = _largest(OFFLOADED_WIDTH, OFFLOADED)
    return f"{plain / 1e9:.1f} B parameters without and {moved / 1e9:.1f} B with it"


def _largest(width: int, options: str) -> int:
    """Return the parameters of the deepest model of a width that fits, by halving."""
    fitting, parameters, too_deep = 1, 0, 128
    while too_deep - fitting > 1:
        layers = (fitting + too_deep) // 2
        fits, found = _tried(layers, width, options)
        if fits:
            fitting, parameters = layers, found
        else:
            too_deep = layers
    return parameters


def _tried(layers: int, width: int, options: str) -> tuple[bool, int]:
    """Return whether a GPT of so many layers fits one device, and its parameters."""
    with tempfile.TemporaryDirectory() as folder:
        text = GPT_TOML.format(layers=layers, width=width, heads=width // 128)
        (Path(folder) / "gpt.toml").write_text(text, encoding="utf-8")
        words = f"simulate gpt.toml {ONE_V100} {options} --json -".split()
        step = json.loads(run(words, Path(folder)))
    return bool(step["memory"]["fits"]), int(step["model"]["parameters"])


def _milliseconds(time_s: float) -> str:
    return f"{time_s * 1e3:.1f} ms"
