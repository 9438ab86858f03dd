"""The tables of docs/agreement.md: ranks of plans as predicted, and as PyTorch runs them.

PyTorch is imported when a rank is compared: the other pages can be made without it.
"""

import logging
import re
from functools import cache
from typing import TYPE_CHECKING

from documents.pages import Kind, regions_of
from documents.tables import cells_of, table

if TYPE_CHECKING:
    from meshwright.validate.agreement import AgreementPlan, RankAgreement

RANKS, HOSTS = "agreement ranks", "agreement hosts"
RULE = " --- "
log = logging.getLogger(__name__)


def plans() -> "dict[str, AgreementPlan]":
    """Return the plans by name."""
    from meshwright.validate.agreement import load_agreement_plans  # noqa: PLC0415

    return {plan.name: plan for plan in load_agreement_plans()}


@cache
def compared(name: str, ranks: tuple[int, ...] = ()) -> "tuple[RankAgreement, ...]":
    """Return the comparison of *ranks* of a plan, by default those of the page."""
    from meshwright.validate.agreement import compare_plan  # noqa: PLC0415

    log.info("comparing %s with PyTorch", name)
    return tuple(compare_plan(plans()[name], ranks))


def plan_table() -> str:
    """Return the plans."""
    from meshwright.validate.agreement import PLAN_HEAD, plan_cells  # noqa: PLC0415

    return table(PLAN_HEAD, map(plan_cells, plans().values()), rule=RULE)


def rank_table() -> str:
    """Return what was found of every rank."""
    from meshwright.validate.agreement import RANK_HEAD  # noqa: PLC0415

    return table(RANK_HEAD, [each.cells() for each in _all()], rule=RULE)


def host_table() -> str:
    """Return what was found on the hosts, where something is kept there."""
    from meshwright.validate.agreement import HOST_HEAD  # noqa: PLC0415

    rows = [each.host_cells() for each in _all() if each.plan.saved().plan.offload != "none"]
    return table(HOST_HEAD, rows, rule=RULE)


def outside_table() -> str:
    """Return what frameworks' own programs were counted to do, beside what is predicted now."""
    from meshwright.validate.outside import TABLE_HEAD, outside_rows  # noqa: PLC0415

    return table(TABLE_HEAD, outside_rows(), rule=RULE)


def farthest(page: str) -> str:
    """Return the largest difference of a peak in the page's tables of ranks and hosts."""
    differences = [
        abs(float(match[1]))
        for region in regions_of(page)
        if region.kind is Kind.MADE and region.name in {RANKS, HOSTS}
        for cells in cells_of(region.text)
        for cell in cells
        if (match := re.fullmatch(r"\**([-+][\d.]+)%\**", cell))
    ]
    return f"{max(differences):.2f}%"


def _all() -> "list[RankAgreement]":
    return [found for name in plans() for found in compared(name)]
