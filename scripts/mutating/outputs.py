"""What commands of ``same_parts`` print in the checkout that is imported: a digest of each.

``python -P outputs.py COMMANDS INPUTS`` runs them in one process and prints a list as JSON.
"""

import contextlib
import hashlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

from same_parts.blocks import read_blocks

STEP = 3
LEFT_OUT = ("--out", "validate", "calibrate", "--help", "gpt3-175b", "megatron-1t")


def chosen_lines(text: str) -> list[list[str]]:
    """Return every third command that draws nothing and needs no PyTorch."""
    blocks = [block for block in read_blocks(text) if len(block.lines) == 1]
    lines = [
        block.commands[0]
        for block in blocks
        if not any(word in block.commands[0] for word in LEFT_OUT)
    ]
    return lines[::STEP]


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


if __name__ == "__main__":
    commands, inputs = map(Path, sys.argv[1:])
    lines = chosen_lines(commands.read_text(encoding="utf-8"))
    sys.stdout.write(json.dumps([digest(words, inputs.resolve()) for words in lines]))
