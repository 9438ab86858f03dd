"""The tables of docs/accuracy.md, and README.md's first: predictions beside published figures."""

from collections.abc import Callable
from functools import cache

from documents.makers.training_times import (
    PHASES,
    SMALLEST,
    efficiency,
    predicted_minutes,
    published_times,
    step_of_phase,
)
from documents.pages import DocumentError
from documents.tables import block, cells_of, table, with_cells
from meshwright.validate import (
    Comparison,
    Quantity,
    Scoreboard,
    TableStyle,
    format_comparisons,
    format_scoreboard,
    load_published_runs,
    scoreboard,
)

NARAYANAN = "narayanan21_t1_"
NARAYANAN_HEAD = (
    "model",
    "GPUs",
    "tp x pp x dp, vpp, microbatch",
    "published",
    "predicted",
    "error",
)
TITAN_A100_SHORT = ("titan_a100_Llama213B_sele_1904", "titan_a100_llama2_70b_b1_selective")
# Read after the fits of fully sharded stacks.
SINCE = (
    *(f"llmfoundry_h100_80gb_3b_2048_{each}" for each in ("512", "256", "128")),
    *("titan_a100_8b_ever", "titan_a100_Llama213B_sele_1914"),
)
# Not in the second fit.
TITAN_CP = ("titan_8b_cp2_65536", "titan_8b_cp4_131072", "titan_8b_cp8_262144")
EXPERTS = ", experts"
# Groups of rows by how their ids begin.
GROUPS: dict[str, tuple[str, ...]] = {
    "Narayanan": (NARAYANAN,),
    "Megatron README": ("megatron_readme_gpt3_175b_1024",),
    "BLOOM": ("bloom_",),
    "Zero Bubble": ("zb_",),
    "Korthikanti": ("korthikanti22_",),
    "dgxc": ("dgxc_",),
    "llm-foundry, H100": ("llmfoundry_h100_80gb_",),
    "llm-foundry, A100 80 GB": ("llmfoundry_a100_80gb_",),
    "llm-foundry, A100 40 GB": ("llmfoundry_a100_40gb_",),
    "torchtitan, H100 96 GB": ("titan_8b_", "titan_h100_"),
    "torchtitan, A100": ("titan_a100_",),
    "torchtitan": ("titan_",),
}


@cache
def board() -> Scoreboard:
    """Return every published row beside its prediction, computed once."""
    return scoreboard()


def errors_by_source() -> str:
    """Return the errors by source, the verdicts, and what is left out."""
    return block(format_scoreboard(board(), style=TableStyle.MARKDOWN))


def every_row() -> str:
    """Return every published figure beside its prediction."""
    return block(format_comparisons(board(), style=TableStyle.MARKDOWN))


def narayanan_table() -> str:
    """Return the ten rows of Narayanan et al. 2021, Table 1."""
    runs = {run.id: run for run in load_published_runs()}
    rows, errors = [], []
    for each in _rows("Narayanan", Quantity.STEP_TIME):
        run = runs[each.id]
        layout = f"{run.tp} x {run.pp} x {run.dp}, {run.vpp}, {run.microbatch_size}"
        times = (f"{each.published:.2f} s", f"{each.predicted:.2f} s")
        name, num_gpus = each.id.removeprefix(NARAYANAN), run.tp * run.pp * run.dp
        rows.append((name, num_gpus, layout, *times, f"{each.error_fraction:+.1%}"))
        errors.append(abs(each.error_fraction))
    mean = sum(errors) / len(errors)
    last = f"| mean absolute error | | | | | {mean:.1%} |"
    return block(table(NARAYANAN_HEAD, rows).strip("\n") + "\n" + last)


def bert_times() -> str:
    """Return the training times of BERT-Large by number of devices."""
    rows = published_times()
    printed = {count: row.minutes for count, row in rows.items()}
    found = {count: predicted_minutes(count) for count in rows}
    head = ("GPUs", "published", "predicted", "error", "efficiency", "predicted")
    lines = [
        (
            f"{count:,}",
            f"{row.minutes:,.0f} min",
            f"{found[count]:,.0f} min",
            f"{found[count] / row.minutes - 1:+.1%}",
            f"{efficiency(printed, count):.1%}",
            f"{efficiency(found, count):.1%}",
        )
        for count, row in rows.items()
    ]
    return table(head, lines, rule=" --- ")


def bert_rates() -> str:
    """Return the sequences a second a device takes on one node, of both lengths."""
    rates = (
        phase.global_batch_size / step_of_phase(phase, SMALLEST).step_time_s / SMALLEST
        for phase in PHASES
    )
    return " and ".join(f"{rate:.0f}" for rate in rates)


def bert_adam_efficiency() -> str:
    """Return the efficiency on most devices with Adam on flat buffers instead of LAMB."""
    largest = max(published_times())
    found = {count: predicted_minutes(count, "deepspeed") for count in (SMALLEST, largest)}
    return f"{efficiency(found, largest):.1%}".replace("%", " %")


def sharded_now(text: str) -> str:
    """Return the table of fully sharded stacks with its last column, what holds now, made anew."""
    changes = {}
    for line, cells in enumerate(cells_of(text)[2:], 2):
        name, count = cells[0].partition(" (not in")[0], int(cells[1])
        rows = _sharded(name)
        if len(rows) != count:
            raise DocumentError(f"{name}: {len(rows)} rows, where the page has {count}")
        changes[line, -1] = _mean(rows)
    return with_cells(text, changes)


def experts_now(text: str) -> str:
    """Return the table of sources with experts with its last column, what holds now, made anew."""
    changes = {}
    for line, cells in enumerate(cells_of(text)[2:], 2):
        name, count = cells[0], int(cells[1])
        rows = [
            row
            for row in board().comparisons
            if row.source.startswith(name) and row.quantity is Quantity.STEP_TIME
        ]
        rows = [row for row in rows if row.source == rows[0].source]
        if len(rows) != count:
            raise DocumentError(f"{name}: {len(rows)} rows, where the page has {count}")
        changes[line, -1] = _mean(rows)
    return with_cells(text, changes)


def torchtitan_now(text: str) -> str:
    """Return the table of torchtitan's second fit with its column of what holds now made anew."""
    others = (*TITAN_CP, *SINCE)
    titan = [row for row in _rows("torchtitan", Quantity.STEP_TIME) if row.id not in others]
    fp8 = [each for each in titan if each.source.endswith("fp8")]
    groups = {
        "H100 96 GB, bf16": _sharded("torchtitan, H100 96 GB"),
        "A100, other rows": _sharded("torchtitan, A100, other rows"),
        "A100, selective at 4,096 tokens": _sharded("torchtitan, A100, selective at 4,096 tokens"),
        "H100 and H200, fp8": fp8,
        "all": titan,
    }
    lines = enumerate(cells_of(text)[2:], 2)
    return with_cells(text, {(line, 3): _mean(groups[cells[0]]) for line, cells in lines})


def times_now(text: str) -> str:
    """Return the table of what the fit of times bought with its last line, today's, made anew."""

    def bf16_mean(name: str) -> str:
        quantity = Quantity.LAYER_TIME if name == "Korthikanti" else Quantity.STEP_TIME
        return _mean([each for each in _rows(name, quantity) if not each.source.endswith("fp8")])

    return _last_line(text, bf16_mean)


def memory_now(text: str) -> str:
    """Return the table of what the fit of memory bought with its last line, today's, made anew."""
    return _last_line(text, lambda name: _mean(_rows(name, Quantity.MEMORY)))


def _last_line(text: str, mean: Callable[[str], str]) -> str:
    """Return a table whose last line is made anew from the names in its head."""
    lines = cells_of(text)
    last = len(lines) - 1
    return with_cells(
        text, {(last, column): mean(name) for column, name in enumerate(lines[0]) if column}
    )


def _rows(group: str, quantity: Quantity) -> list[Comparison]:
    begins = GROUPS[group]
    rows = [row for row in board().comparisons if row.quantity is quantity]
    return [row for row in rows if row.id.startswith(begins) and EXPERTS not in row.source]


def _sharded(name: str) -> list[Comparison]:
    """Return the bf16 step times of a group of fully sharded runs, or of those read since."""
    if name == "five read since":
        return [row for row in board().comparisons if row.id.startswith(SINCE)]
    group = "torchtitan, A100" if name.startswith("torchtitan, A100") else name
    known = [row for row in _rows(group, Quantity.STEP_TIME) if not row.id.startswith(SINCE)]
    rows = [row for row in known if not row.source.endswith("fp8")]
    if group == name:
        return rows
    is_short = "selective" in name
    return [row for row in rows if (row.id in TITAN_A100_SHORT) is is_short]


def _mean(rows: list[Comparison]) -> str:
    """Return the mean size of the errors as the tables of fits print it."""
    mean = sum(abs(row.error_fraction) for row in rows) / len(rows)
    return f"{mean:.1%}".replace("%", " %")
