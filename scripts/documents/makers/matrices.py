"""The table of docs/placements.md: what ``meshwright matmul`` prints, in other words and fewer."""

import re

from documents.tables import table
from documents.terminal import run

COMMAND = ("matmul", "4x5", "5x8", "--devices", "2", "--precision", "fp32")
HEAD = ("signature", "A", "B", "C", "each device computes", "C to `R`", "sends")


def signatures() -> str:
    """Return every signature of the textbook product."""
    printed = run(COMMAND, columns="200").split("\n\n")[1].splitlines()
    rows = []
    for line in printed[1:]:
        name, *placements, computes, flops, _, collective, sends, _, _ = re.split(r" {2,}", line)
        if flops == "-":  # refused: nothing follows
            collective = sends = ""
        rows.append((name, *placements, computes, collective, sends))
    return table(HEAD, rows).replace("  ", " ")
