"""Put faults into a copy of the checkout, one at a time, and say which the tests find.

A fault is killed if a test fails. Which tests call what is at fault is noted before, once, in ten
to twenty minutes for all of them: of these those in the module's examples and in the few test files
that name most of what is at fault run first, the shortest first. Where those pass, the commands
that call it say whether it changes a byte of what they print; if not, it is not counted. If it
does, all other tests that call it run until one fails; with --most N the shortest of them, N
seconds in all, and what these do not find has survived. Faults for which tests do not end are
counted apart. The same seed gives the same faults. Nothing is written to the checkout but below
.mutate: what was noted, and what came of faults, so that a run that was interrupted goes on; a
fault that survived is judged again.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mutating.checkout import ROOT, Copy
from mutating.faults import PACKAGES, chosen_faults
from mutating.judging import Judge
from mutating.report import Verdict, report
from mutating.verdicts import Verdicts

INTERRUPTED = 130
KEPT = ROOT / ".mutate"


def read_words(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the script."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("count", metavar="N", type=int, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="of the choice [0]")
    parser.add_argument(
        "--under",
        metavar="FOLDER",
        nargs="+",
        default=["meshwright"],
        help="folders or modules that they are in [meshwright]",
    )
    parser.add_argument(
        "--most", metavar="N", type=float, default=math.inf, help="seconds of tests [all of them]"
    )
    options = parser.parse_args(words)
    options.under = [Path(each).as_posix() for each in options.under]
    folders = ("meshwright", *(f"meshwright/{each}" for each in PACKAGES))
    for each in options.under:
        is_inside = each == folders[0] or each.startswith(folders[1:])
        if not is_inside or not (ROOT / each).exists():
            parser.error(f"--under {each} is nothing below {', '.join(folders[1:])}")
    return options


def run(words: Sequence[str] | None = None) -> int:
    """Do as *words* ask; return 1 if a fault survived."""
    options = read_words(words)
    os.nice(19)  # hours of work for nobody who waits
    faults = chosen_faults(ROOT, options.under, options.count, options.seed)
    judged: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
        try:
            copy = Copy(Path(folder))
            judge = Judge(copy, KEPT, options.most)
            kept = Verdicts(KEPT / "verdicts.jsonl", copy.root)
            for number, fault in enumerate(faults, 1):
                verdict = kept.of(fault)
                if verdict is None:
                    verdict = judge.judge(fault)
                    kept.add(verdict)
                judged.append(verdict)
                place = f"{number} of {len(faults)}  {fault.path}:{fault.line}"
                sys.stderr.write(f"{place}  {verdict.kind}  {verdict.reason}\n")
        except KeyboardInterrupt:
            sys.stdout.write(report(judged))
            return INTERRUPTED
    sys.stdout.write(report(judged))
    return int(any(each.kind == "survived" for each in judged))
