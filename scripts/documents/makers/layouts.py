"""What pages say of whole layouts: published ones, the proven best, GPT-3's days, walks."""

from typing import NamedTuple

from documents.tables import table
from documents.terminal import Step, best_of, step_of
from meshwright.hwprofiles import PS_PER_S
from walking.run import walk_lines
from walking.searches import SEARCHES
from walking.walk import walk

HEAD = (
    "layout of 3,072 A100 (`--stack megatron-lm-2021 --recompute full`, batch as published)",
    "step",
    "MFU",
    "idle",
)
PUBLISHED = "--tp 8 --pp 64"  # of a trillion parameters, Narayanan et al. 2021, Table 1
GPT3 = "simulate gpt3-175b --global-batch 1536 --cluster dgx-a100 --stack megatron-lm-2021"
GPT3_TOKENS = 300e9
SECONDS_A_DAY = 86_400


class Subject(NamedTuple):
    """A model in the published layout: its batch, and how the row is told."""

    model: str
    batch: int
    told: str


SUBJECTS = (
    Subject("megatron-1t", 3072, "published: pp 64 x dp 6 x tp 8, 2 layers a stage"),
    Subject("gpt3-175b", 1536, "the same layout: pp 64 x dp 6 x tp 8, 1 or 2 layers a stage"),
)


def published_layouts() -> str:
    """Return the table of the published layout beside the proven best one, of two models."""
    rows: list[tuple[str, ...]] = []
    for model, batch, told in SUBJECTS:
        words = f"{model} --cluster dgx-a100 --gpus 3072 --global-batch {batch}"
        words += " --stack megatron-lm-2021 --recompute full"
        rows.append((f"{model}, {told}", *_figures(step_of(f"simulate {words} {PUBLISHED}"))))
        best = best_of(f"search {words}")
        rows.append((f"{model}, proven best: {_told(best.degrees)}", *_figures(best.step)))
    return table(HEAD, rows)


def gpt3_days() -> str:
    """Return how long GPT-3 trains on 1,024 devices, and how fast (section 5.1 of the paper)."""
    step = step_of(f"{GPT3} --gpus 1024 --tp 8 --pp 16 --recompute full")
    days = GPT3_TOKENS / step.tokens_per_s / SECONDS_A_DAY
    return f"{days:.1f} days at {step.hardware_flops_per_s_per_gpu / 1e12:.0f} TFLOP/s a GPU"


def _figures(step: Step) -> tuple[str, ...]:
    return (
        f"{step.step_time_s:.1f} s",
        f"{step.mfu_fraction:.1%}",
        f"{step.bubble_fraction:.1%}",
    )


def _told(degrees: dict[str, int]) -> str:
    mesh = f"pp {degrees['pp']} x dp {degrees['dp']} x tp {degrees['tp']}"
    vpp = degrees["num_virtual_stages"]
    virtual = f", vpp {vpp}" if vpp > 1 else ""
    return f"{mesh}{virtual}, microbatch {degrees['microbatch_size']}"


def walked_searches() -> str:
    """Return what came of turning every switch of the best plans of searches."""
    rows = []
    for name, search in SEARCHES.items():
        walked = walk(search.run())
        best = walked.result.plans[0]
        what = f"`{name}`, {search.num_gpus:,} GPUs of {search.cluster}, {search.stack}"
        faster = "; ".join(walk_lines(walked)) or "nothing"
        rows.append((what, f"{best.step_ps / PS_PER_S:.4g} s", walked.num_simulated, faster))
    return table(("search", "proven", "switched plans", "faster"), rows)
