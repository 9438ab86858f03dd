"""How two outcomes of a command differ, in lines to show."""

import difflib
import hashlib
import re
import shlex
from collections.abc import Sequence

from same_parts.outcomes import STATUS, Outcome, has_ended

MOST_LINES = 40
LONG_LINE = 400
CONTEXT = 3


def differences(line: str, old: Outcome, new: Outcome) -> list[str]:
    """Return what differs between the outcomes of the command *line*; nothing if none does."""
    words, shown = shlex.split(line), list[str]()
    if old[STATUS] == new[STATUS] and not has_ended(new):
        shown.append(f"{STATUS}: {new[STATUS].decode().strip()}, in both; nothing is compared")
    for part in sorted(old.keys() | new.keys()):
        if part not in old or part not in new:
            shown.append(f"{part}: only in {'new' if part in new else 'base'}")
            continue
        before, after = (without_package(words, part, each[part]) for each in (old, new))
        if before != after:
            shown += difference(part, before, after)
    return shown


def without_package(words: Sequence[str], part: str, data: bytes) -> bytes:
    """Return *data* with the worker's module as it was called before all code had one package.

    Scripts of ``validate --emit`` start ``-m validate.launch.worker``, which moves with the code
    into the package ``meshwright``, and ``spec.json`` beside them names the function that measures,
    wherever it stands.  What they start is the same; nothing else may name a module.

    >>> without_package(["--emit"], "file x/run.sh", b"-m meshwright.validate.launch.worker")
    b'-m validate.launch.worker'
    """
    if "--emit" in words and part.endswith(("/run.sbatch", "/run.sh")):
        return data.replace(b"-m meshwright.validate.", b"-m validate.")
    if "--emit" in words and part.endswith("/spec.json"):
        return re.sub(rb'"measure": "[\w.]+:', b'"measure": ":', data)
    return data


def difference(part: str, old: bytes, new: bytes) -> list[str]:
    r"""Return how *old* and *new* differ: a unified diff, or of what is no text the hashes.

    >>> difference("standard output", b"1 s\n", b"2 s\n")[1:4]
    ['@@ -1,2 +1,2 @@', '-1 s', '+2 s']
    """
    try:
        texts = [each.decode() for each in (old, new)]
    except UnicodeDecodeError:
        texts = ["\0"]
    if any("\0" in text for text in texts):
        hashes = [hashlib.sha256(each).hexdigest()[:16] for each in (old, new)]
        return [f"{part}: {len(old)} bytes {hashes[0]}, now {len(new)} bytes {hashes[1]}"]
    before, after = (lines_of(text) for text in texts)
    pairs = enumerate(zip(before, after, strict=False))
    first = next((at for at, (one, other) in pairs if one != other), min(len(before), len(after)))
    start = max(first - CONTEXT, 0)
    # A trace has 100,000 lines, of which a diff takes minutes; nobody reads past the first.
    window = slice(start, start + 10 * MOST_LINES)
    diff = list(difflib.unified_diff(before[window], after[window], lineterm="", n=CONTEXT))[2:]
    more = ["... and more"] * (len(diff) > MOST_LINES)
    return [f"{part}, after line {start}:", *diff[:MOST_LINES], *more]


def lines_of(text: str) -> list[str]:
    """Return the lines of *text*, ends visible; very long ones, as of JSON, cut at commas."""
    lines = text.split("\n")
    if max(map(len, lines)) > LONG_LINE:
        lines = text.replace(",", ",\n").split("\n")
    return [line.replace("\r", "\\r") for line in lines]
