"""Plans for which the simulator and PyTorch are compared: the tables of docs/agreement.md.

``python -m meshwright.validate.agreement [NAME ...]`` prints them, of all plans or of those named.
"""

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from meshwright.hwprofiles import Offload, counted, suggestion
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import PlanError, StepResult
from meshwright.simulator.layout import without_defaults
from meshwright.validate.cli import plan_of_options
from meshwright.validate.comparison import (
    HOST_PEAK,
    PEAK,
    TO_DEVICE,
    TO_HOST,
    Check,
    CheckUnit,
    CheckVerdict,
    compare_rank,
)
from meshwright.validate.ranks import capped, predict_members, representative_members
from meshwright.validate.runs import measure_fakes

FILE = "agreement_plans.csv"
CLUSTER = "dgx-a100"  # its times are not compared; any would do
PLAN_HEAD = (
    "plan",
    "stack",
    "model",
    "tp x pp x dp",
    "schedule",
    "ZeRO",
    "SP",
    "recompute",
    "attention",
    "precision",
    "batch x tokens",
    "besides",
)
RANK_HEAD = (
    "plan",
    "rank",
    "FLOPs",
    "calls (kinds)",
    "peak bytes predicted",
    "measured",
    "difference",
)
HOST_HEAD = (
    "plan",
    "rank",
    "host bytes predicted",
    "measured",
    "difference",
    "to the device",
    "to the host",
)


def _words(text: object) -> object:
    return tuple(int(word) for word in text.split()) if isinstance(text, str) else text


class AgreementPlan(BaseModel):
    """Plan given as the options of ``meshwright simulate``.

    Args:
        name: Its name in the tables.
        is_sampled: Whether it is computed with every change, not by the command alone.
        options: Model and options, all but the cluster.
        ranks: Ranks to compare; empty: one of each kind.
        note: Known differences; empty where all agrees.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    is_sampled: bool
    options: str
    ranks: Annotated[tuple[int, ...], BeforeValidator(_words)]
    note: str

    @property
    def command(self) -> str:
        """The words after ``meshwright``."""
        return f"simulate {self.options} --cluster {CLUSTER}"

    def saved(self) -> SavedPlan:
        """Return the plan that the command writes with ``--out``."""
        return plan_of_options(self.options, CLUSTER)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAgreement:
    """One rank of a plan: predicted against counted.

    Args:
        plan: Plan of the rank.
        rank: Rank, from 0.
        checks: Predicted against counted, as `compare_rank` returns them.
    """

    plan: AgreementPlan
    rank: int
    checks: tuple[Check, ...]

    @property
    def flops(self) -> Check:
        """FLOPs."""
        return next(check for check in self.checks if check.unit is CheckUnit.FLOPS)

    @property
    def calls(self) -> list[Check]:
        """Collectives and messages, a check for each kind."""
        return [check for check in self.checks if check.unit is CheckUnit.CALLS]

    @property
    def peak(self) -> Check:
        """Peak of the live bytes."""
        return next(check for check in self.checks if check.quantity == PEAK)

    def failures(self) -> list[Check]:
        """Return the checks that do not agree as they must."""
        return [check for check in self.checks if check.verdict is CheckVerdict.FAILED]

    def cells(self) -> tuple[str, ...]:
        """Return its row below `RANK_HEAD`; what differs says by how much."""
        calls, kinds = sum(int(check.measured) for check in self.calls), len(self.calls)
        differing = [check for check in self.calls if check.verdict is CheckVerdict.FAILED]
        counted = f"{calls:,} ({kinds})" + (f", {len(differing)} differ" if differing else "")
        flops = f"{self.flops.measured:,}"
        if self.flops.verdict is CheckVerdict.FAILED:
            flops += f", predicted {self.flops.predicted:,}"
        return (self.plan.name, str(self.rank), flops, counted, *_peak_cells(self.peak))

    def host_cells(self) -> tuple[str, ...]:
        """Return its row below `HOST_HEAD`; nothing where the plan offloads nothing."""
        checks = {check.quantity: check for check in self.checks}
        if HOST_PEAK not in checks:
            return ()
        copies = (checks[TO_DEVICE], checks[TO_HOST])
        exact = (_copy_cell(check) for check in copies)
        return (self.plan.name, str(self.rank), *_peak_cells(checks[HOST_PEAK]), *exact)


def _peak_cells(peak: Check) -> tuple[str, str, str]:
    difference = f"{peak.difference_fraction or 0.0:+.4%}"
    if peak.verdict is CheckVerdict.FAILED:
        difference = f"**{difference}**"
    return (f"{peak.predicted:,}", f"{peak.measured:,}", difference)


def _copy_cell(copied: Check) -> str:
    failed = copied.verdict is CheckVerdict.FAILED
    return f"{copied.measured:,}" + (f", predicted {copied.predicted:,}" if failed else "")


def load_agreement_plans() -> tuple[AgreementPlan, ...]:
    """Return the plans, in the order of the tables.

    >>> load_agreement_plans()[0].options
    'gpt2 --gpus 8 --global-batch 8 --stack ddp'
    """
    text = (files("meshwright.validate") / "data" / FILE).read_text(encoding="utf-8")
    return tuple(AgreementPlan.model_validate(row) for row in csv.DictReader(text.splitlines()))


def chosen_plans(names: Sequence[str]) -> tuple[AgreementPlan, ...]:
    """Return the plans of these names, or all if there are none.

    Raises:
        PlanError: If there is no such plan.
    """
    plans = {plan.name: plan for plan in load_agreement_plans()}
    for name in names:
        if name not in plans:
            raise PlanError(f"unknown plan {name!r}; {suggestion(name, plans)}")
    return tuple(plans[name] for name in names or plans)


def compare_plan(plan: AgreementPlan, ranks: Iterable[int] = ()) -> Iterator[RankAgreement]:
    """Yield the comparison of *ranks*, by default those of the tables.

    Microbatches beyond those that counts need to scale exactly are left out.

    Args:
        plan: Plan that is predicted, and run on fake tensors.
        ranks: Ranks, or devices of one process.
    """
    for rank, checks in validate_plan(plan.saved(), ranks or plan.ranks):
        yield RankAgreement(plan=plan, rank=rank, checks=checks)


def validate_plan(
    step: StepResult | SavedPlan, ranks: Iterable[int] = ()
) -> Iterator[tuple[int, tuple[Check, ...]]]:
    """Yield each rank's checks: its program on fake tensors against the prediction.

    Args:
        step: Plan, with its job, cluster and stack.
        ranks: Ranks to compare; by default one of each kind.
    """
    saved = SavedPlan(job=step.job, plan=step.plan, cluster=step.cluster, stack=step.stack)
    # Counts scale exactly with microbatches, so that few of them answer for the whole step.
    chosen = tuple(ranks) or representative_members(saved)
    saved = capped(saved, chosen)
    predictions = predict_members(saved, chosen)
    for measured in measure_fakes(saved, chosen):
        yield measured.rank, tuple(compare_rank(predictions[measured.rank], measured))


def plan_cells(agreement: AgreementPlan) -> tuple[str, ...]:
    """Return the row of a plan below `PLAN_HEAD`."""
    saved = agreement.saved()
    job, plan = saved.job, without_defaults(saved.job, saved.stack, saved.plan)
    besides = {
        f"vpp={plan.num_virtual_stages}": plan.num_virtual_stages > 1,
        f"micro-batch {plan.microbatch_size}": plan.microbatch_size > 1,
        f"ep {plan.ep}": plan.ep > 1,
        f"etp {plan.expert_tp}": plan.ep > 1 and plan.expert_tp != plan.tp,
        f"dp-shard {plan.dp_shard}": plan.dp_shard is not None,
        "weights kept after forward": plan.reshard_after_forward is False,
        "weights freed after forward": plan.reshard_after_forward is True,
        f"offload {plan.offload}": plan.offload is not Offload.NONE,
        "reduced in the last microbatch": plan.sync_each_microbatch is False,
        f"gradients in {plan.gradient_precision}": plan.gradient_precision is not None,
        f"reduced in {plan.reduce_precision}": plan.reduce_precision is not None,
        counted(job.prediction_layers, "prediction layer"): job.prediction_layers > 0,
        f"{min(plan.stages)} to {max(plan.stages)} layers": len(set(plan.stages)) > 1,
    }
    return (
        agreement.name,
        saved.stack.name,
        job.model.name,
        f"{plan.tp} x {plan.pp} x {plan.dp}",
        plan.schedule if plan.pp > 1 else "-",
        str(plan.zero_stage),
        "yes" if plan.sequence_parallel else "no",
        plan.recompute,
        plan.attention,
        job.precision,
        f"{job.global_batch_size:,} x {job.seq_len:,}",
        ", ".join(words for words, holds in besides.items() if holds),
    )


def table_row(cells: Iterable[str]) -> str:
    """Return a line of a Markdown table.

    >>> table_row(["plan", "rank"])
    '| plan | rank |'
    """
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def table_head(names: Sequence[str]) -> str:
    """Return the two lines that a Markdown table begins with."""
    return table_row(names) + "\n" + table_row(["---"] * len(names))


def main(names: Sequence[str]) -> int:
    """Write the tables of the plans of these names, each row as soon as it is known.

    Returns:
        1 if something differs that is not noted to, else 0.
    """
    plans = chosen_plans(names)
    rows = [table_head(PLAN_HEAD), *(table_row(plan_cells(plan)) for plan in plans)]
    sys.stdout.write("\n".join([*rows, "", table_head(RANK_HEAD)]) + "\n")
    surprises, on_hosts = 0, []
    for plan in plans:
        for found in compare_plan(plan):
            sys.stdout.write(table_row(found.cells()) + "\n")
            sys.stdout.flush()
            # Differences that a plan's note explains are expected.
            surprises += bool(found.failures()) and not plan.note
            on_hosts += [table_row(cells) for cells in (found.host_cells(),) if cells]
    if on_hosts:
        sys.stdout.write("\n".join(["", table_head(HOST_HEAD), *on_hosts]) + "\n")
    return int(surprises > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PlanError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
