"""Put faults into a copy of the checkout, one at a time, and say which the tests find.

A fault is killed if a test fails: first run its module's examples and the few test files that name
most of what is at fault.  Where those pass, the commands that call what is at fault say whether it
changes a byte of what they print; if not, it is not counted.  If it does, all other tests run until
one fails.  Faults for which tests do not end are counted apart.  The same seed gives the same
faults, and nothing is written to the checkout.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mutating.checkout import ROOT, Copy
from mutating.faults import PACKAGES, chosen_faults
from mutating.report import Verdict, report

INTERRUPTED = 130


def read_words(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the script."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("count", metavar="N", type=int, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="of the choice [0]")
    parser.add_argument(
        "--under", metavar="FOLDER", default="meshwright", help="where [meshwright]"
    )
    parser.add_argument("--from", dest="first", type=int, default=1, help="begin with this one [1]")
    parser.add_argument(
        "--most-seconds", type=float, default=1e5, help="of tests for a fault [all of them]"
    )
    options = parser.parse_args(words)
    options.under = Path(options.under).as_posix()
    folders = ("meshwright", *(f"meshwright/{each}" for each in PACKAGES))
    is_inside = options.under == folders[0] or options.under.startswith(folders[1:])
    if not is_inside or not (ROOT / options.under).is_dir():
        parser.error(f"--under {options.under} is no folder of {', '.join(folders[1:])}")
    return options


def run(words: Sequence[str] | None = None) -> int:
    """Do as *words* ask; return 1 if a fault survived."""
    options = read_words(words)
    os.nice(19)  # hours of work for nobody who waits
    faults = chosen_faults(ROOT, options.under, options.count, options.seed)
    judged: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as folder:
        try:
            copy = Copy(Path(folder), options.most_seconds)
            for number, fault in enumerate(faults[options.first - 1 :], options.first):
                judged.append(copy.judge(fault))
                place = f"{number} of {len(faults)}  {fault.path}:{fault.line}"
                sys.stderr.write(f"{place}  {judged[-1].kind}  {judged[-1].reason}\n")
        except KeyboardInterrupt:
            sys.stdout.write(report(judged))
            return INTERRUPTED
    sys.stdout.write(report(judged))
    return int(any(each.kind == "survived" for each in judged))
