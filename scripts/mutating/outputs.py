"""What commands of ``same_parts`` print in the checkout that is imported, and what they call.

``python -P outputs.py COMMANDS INPUTS`` runs all of them in one process, twice, and prints as JSON
what each one printed, how long it took and which functions it called.  With ``FILE NUMBERS...`` it
runs those of FILE's commands until one prints something else, and prints the number of that one.
"""

import contextlib
import hashlib
import io
import json
import shutil
import sys
import tempfile
import time
from cProfile import Profile
from pathlib import Path
from typing import NamedTuple

from mutating.places import called
from same_parts.blocks import read_blocks

LEFT_OUT = ("--help", "--rank 8", "no-such.json")  # text of others, and a fake run of seconds
MOST_S = 1.5  # the few that take longer call nothing that no other calls


class Output(NamedTuple):
    """What came of a command without a fault.

    Args:
        words: Of the command.
        digest: Of its status, output and files.
        seconds: It took, of the processor.
        calls: Of the project's functions, as `place` writes them.
    """

    words: list[str]
    digest: str
    seconds: float
    calls: list[str]


def command_lines(text: str) -> list[list[str]]:
    """Return the commands that stand alone in their folders."""
    blocks = [block for block in read_blocks(text) if len(block.lines) == 1]
    return [
        block.commands[0]
        for block in blocks
        if not any(left_out in block.lines[0] for left_out in LEFT_OUT)
    ]


def digest(words: list[str], inputs: Path) -> str:
    """Return a digest of status, output and files of a command."""
    from meshwright import main  # noqa: PLC0415 - of the checkout, which may be at fault

    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copytree(inputs, "inputs")
        tempfile.tempdir = folder
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words)
        tempfile.tempdir = None
        content = f"{status} {out.getvalue()} {err.getvalue()}".replace(folder, "")
        files = [path for path in sorted(Path().rglob("*")) if path.is_file()]
        shown = [
            (path.as_posix(), path.read_bytes()) for path in files if path.parts[0] != "inputs"
        ]
    return hashlib.sha256(repr((content, shown)).encode()).hexdigest()[:16]


def observed(words: list[str], inputs: Path) -> Output:
    """Return what a command prints, and what it calls."""
    profile = Profile(builtins=False, subcalls=False)
    begin_s = time.process_time()
    profile.enable()
    try:
        found = digest(words, inputs)
    finally:
        profile.disable()
    return Output(words, found, time.process_time() - begin_s, called(profile))


def usual(text: str, inputs: Path) -> list[Output]:
    """Return the outputs of commands that print the same when they run again, the fastest first."""
    outputs = [observed(words, inputs) for words in command_lines(text)]
    return sorted(
        (
            each
            for each in outputs
            if each.seconds < MOST_S and digest(each.words, inputs) == each.digest
        ),
        key=lambda each: each.seconds,
    )


def first_changed(outputs: list[Output], numbers: list[int], inputs: Path) -> int | None:
    """Return the first of *numbers* whose command prints something else; None where none does."""
    for number in numbers:
        if digest(outputs[number].words, inputs) != outputs[number].digest:
            return number
    return None


if __name__ == "__main__":
    commands, inputs = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    if len(sys.argv) == 3:
        found: object = usual(commands.read_text(encoding="utf-8"), inputs)
    else:
        known = json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))
        found = first_changed([Output(*each) for each in known], [*map(int, sys.argv[4:])], inputs)
    sys.stdout.write(json.dumps(found))
