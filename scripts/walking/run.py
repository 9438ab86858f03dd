"""Turn every switch of the best plan of each search, one at a time; say what is faster and fits.

What a search says that it held, or left out, may be faster: it is told with that reason. Anything
else that is faster than what was proven is a fault.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

from meshwright.hwprofiles import PS_PER_S
from walking.searches import SEARCHES
from walking.switches import LEFT_OUT
from walking.walk import Walk, walk


def walk_lines(walked: Walk) -> list[str]:
    """Return the fastest switch of each reason, and how many more there are."""
    found = []
    for reason in dict.fromkeys(each.held for each in walked.faster):
        changes = [each.change for each in walked.faster if each.held == reason]
        more = f", {len(changes) - 1} more" if len(changes) > 1 else ""
        first = f"{changes[0].slower_fraction:+.2%} `{changes[0].options}`{more}"
        found.append(f"{first} ({reason or 'FAULT'})")
    return found


def run(words: Sequence[str] | None = None) -> int:
    """Walk as *words* ask; return 1 if something is at fault."""
    left_out = "; ".join(f"{name}: {why}" for name, why in LEFT_OUT.items())
    parser = argparse.ArgumentParser(
        prog="scripts/walk", description=__doc__, epilog=f"Not turned: {left_out}."
    )
    parser.add_argument("searches", metavar="NAME", nargs="*", help=f"of {', '.join(SEARCHES)}")
    parser.add_argument("--also", action="store_true", help="search with --also all")
    chosen = parser.parse_args(words)
    if unknown := {*chosen.searches} - {*SEARCHES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(SEARCHES)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    num_faults = 0
    for name in chosen.searches or SEARCHES:
        begin_s = time.process_time()
        walked = walk(SEARCHES[name].run(also_all=chosen.also))
        num_faults += len(walked.faults) + (not walked.result.optimal)
        best, seconds = walked.result.plans[0], time.process_time() - begin_s
        proof = "proven" if walked.result.optimal else "NOT PROVEN"
        head = f"{name}: {best.step_ps / PS_PER_S:.4g} s {proof}"
        counts = f"{walked.num_simulated} switched, {len(walked.faster)} faster"
        sys.stdout.write(f"{head}, {counts}, {len(walked.faults)} at fault; {seconds:.0f} s\n")
        sys.stdout.writelines(f"  {line}\n" for line in walk_lines(walked))
        sys.stdout.flush()
    sys.stdout.write(f"{num_faults} at fault\n")
    return int(num_faults > 0)
