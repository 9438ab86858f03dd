"""What came of faults, by folder."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mutating.faults import Fault

KINDS = ("killed", "survived", "timed out", "not called", "no change")
TOLD = KINDS[1:4]


class Found(NamedTuple):
    """What tests and commands found: one of `KINDS`, and by what."""

    kind: str
    reason: str = ""


class Verdict(NamedTuple):
    """What came of a fault.

    ``killed``: a test failed.  ``survived``: a command prints something else, and no test failed.
    ``timed out``: tests did not end.  ``not called``: tests that name it pass, and no command runs
    it.  ``no change``: they pass, and all commands print what they do without it.
    """

    fault: Fault
    kind: str
    reason: str
    difference: str


def report(judged: Sequence[Verdict]) -> str:
    """Return a line for each folder, and the faults that a person has to look at."""
    counts = Counter((each.fault.folder, each.kind) for each in judged)
    lines = [f"{'folder':44}" + "".join(f"{kind:>11}" for kind in KINDS)]
    lines += [
        f"{folder:44}" + "".join(f"{counts[folder, kind]:11}" for kind in KINDS)
        for folder in sorted({each.fault.folder for each in judged})
    ]
    totals = {kind: sum(each.kind == kind for each in judged) for kind in KINDS}
    lines.append(f"{'all':44}" + "".join(f"{total:11}" for total in totals.values()))
    for kind in TOLD:
        for each in judged:
            if each.kind == kind:
                place = f"{each.fault.path}:{each.fault.line} {kind} {each.reason}".rstrip()
                lines += ["", place, each.difference]
    if changing := totals["killed"] + totals["survived"]:
        share = totals["killed"] / changing
        lines += ["", f"killed: {share:.0%} of {changing} faults that a test or an output shows"]
    return "\n".join(lines) + "\n"
