"""Scripts within a script: ``bash -c``, ``eval``, files beside it."""

import re
from collections.abc import Sequence
from dataclasses import replace

from meshwright.planner.shell.language import (
    FILE_STRIDE,
    MARKS,
    MOST_BYTES,
    Field,
    State,
    Text,
    Word,
    parse,
    source_of,
)
from meshwright.planner.shell.running.interpreter import Flow, Interpreter, Status
from meshwright.simulator import PlanError

BAD = re.compile("[\0\ud800-\udfff\U000f0000-\U000ffffd]")


def run_script(
    shell: Interpreter,
    words: Sequence[Field],
    text: Text | None,
    outside: tuple[tuple[Word, ...], int],
) -> bool:
    """Read what ``bash -c``, ``bash FILE`` or ``bash <<EOF`` runs; False if that is not there."""
    launcher, place = outside
    arguments = [each.text for each in words[1:]]
    flags = ""
    while arguments and arguments[0].characters.startswith("-"):
        flag = arguments.pop(0).characters
        flags += flag[1:] if flag[1:2] != "-" else ""
    name = words[0].text
    script: Text | None
    if "c" in flags and arguments:
        script, name, *rest = [*arguments[:1], *(arguments[1:] or [name])]
    elif arguments and "s" not in flags:
        script, (name, *rest) = read_beside(shell, arguments[0]), arguments
    else:
        script, rest = text, arguments
    if script is None:
        return False
    outer = shell.state
    exported = {each: value for each, value in outer.variables.items() if each in outer.exported}
    shell.state = State(
        exported,
        outer.exported,
        name=name,
        arguments=tuple(rest),
        knows_arguments=True,
        folder=outer.folder,
    )
    try:
        run_text(shell, script, place, launcher)
    except Flow:
        pass
    finally:
        shell.state = outer
    return True


def run_text(shell: Interpreter, text: Text, place: int, launcher: tuple[Word, ...] = ()) -> Status:
    """Read a text as statements of the shell."""
    shell.budget.depth += 4
    if shell.budget.depth > 70:
        raise shell.unknowns.refusal(place, "scripts nest too deeply")
    if place:  # a text within the script
        shell.spend(place, characters=len(text.characters))
    source = source_of(text)
    root = parse(source, shell.unknowns)
    frame, shell.frame = (
        shell.frame,
        replace(shell.frame, source=source, launcher=shell.frame.launcher + launcher),
    )
    try:
        return shell.run(shell, root)
    finally:
        shell.frame = frame
        shell.budget.depth -= 4


def read_beside(shell: Interpreter, path: Text) -> Text | None:
    """Return the text of a file in the folder of the script; None where there is none."""
    if shell.file is None or MARKS.search(path.characters) or "\0" in path.characters:
        return None
    root = shell.file.parent.resolve()
    file = (root / _known_folder(shell) / path.characters).resolve()
    if not file.is_relative_to(root) or not file.is_file() or file.stat().st_size > MOST_BYTES:
        return None
    if len(shell.unknowns.files) > 50:
        raise shell.unknowns.refusal(path.place, "the script reads over 50 files")
    try:
        characters = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    shell.unknowns.files.append(str(file.relative_to(root)))
    return placed(characters, len(shell.unknowns.files) - 1)


def _known_folder(shell: Interpreter) -> str:
    folder = shell.state.folder.characters
    return "" if MARKS.search(folder) else folder


def placed(characters: str, number: int) -> Text:
    """Return the text of a file, with its lines.

    Raises:
        PlanError: If it has characters that no script has.
    """
    if BAD.search(characters):
        raise PlanError("the script has characters that no text has")
    characters = characters.replace("\r\n", "\n")
    places: list[int] = []
    for line, each in enumerate(characters.split("\n"), 1):
        places.extend([number * FILE_STRIDE + line] * (len(each) + 1))
    return Text(characters, tuple(places[:-1]))
