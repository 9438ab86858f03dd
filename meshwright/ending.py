"""How a process of the command begins and ends: its streams, its signals, its last line.

Status 0 is success, 1 that a plan disagrees or nothing fits, 2 a user's mistake, 70 a fault of
ours (EX_SOFTWARE of sysexits.h), and 128 plus its number a signal.
"""

import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import fill
from types import FrameType

USER_MISTAKE, FAULT = 2, 70
OUTPUT = "standard output"
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []


class Ended(KeyboardInterrupt):
    """A signal that ends the command as Ctrl-C does.

    Of a plain KeyboardInterrupt that passes through code run from a text, as that of dataclasses
    is, Python keeps in mind that nothing caught it: `python -m` would die of SIGINT at its end,
    whatever its status (`unhandled_keyboard_interrupt` of Python/pythonrun.c, 3.11).
    """


def begin() -> bool:
    """Make streams and signals of this process what the rest takes for granted.

    A closed stream would be the number of the first file that is opened, and receive what is
    printed; so something else takes its place. A signal that would end the process at once ends
    it as Ctrl-C does, so that nothing is left behind.

    Returns:
        Whether there is a standard output.
    """
    has_output = sys.stdout is not None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
    if not has_output:
        _drop_output()
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    for each in SIGNALS:
        if signal.getsignal(each) is signal.SIG_DFL:  # nohup's choice is kept
            signal.signal(each, _end_once)
    return has_output


def _end_once(number: int, _frame: FrameType | None) -> None:
    """End as Ctrl-C does; the signal again must not stop the cleaning up."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    _received.append(number)
    raise Ended


def interrupted() -> int:
    """Say what stopped the command and return its status."""
    number = _received.pop() if _received else signal.SIGINT
    word = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    return complain(word, 128 + number)


def write_output(text: str = "") -> None:
    """Write *text* and what standard output still holds; raises OSError that names it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, OUTPUT) from None


def refused(error: OSError) -> int:
    """Say what the system refused and return the status, 141 where a reader of ours has gone."""
    if isinstance(error, BrokenPipeError) or error.filename == OUTPUT:
        _drop_output()
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    where = f": {error.filename}" if error.filename else ""
    return complain(f"{error.strerror or error}{where}", USER_MISTAKE)


def _drop_output() -> None:
    """Leave nothing for the flush at the end of the process to fail on."""
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def fault(error: Exception, words: Sequence[str]) -> int:
    """Say in one line that the fault is ours and where its traceback is kept; return 70."""
    text = f"meshwright {' '.join(map(ascii, words))}\n{''.join(traceback.format_exception(error))}"
    kept = "its traceback could not be kept"
    with suppress(OSError):
        handle, name = tempfile.mkstemp(prefix="meshwright-fault-", suffix=".txt")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:  # noqa: PTH123
            file.write(text)
        kept = f"its traceback is in {name}"
    what = f"{type(error).__name__}: {ascii(str(error)[:200])[1:-1]}".rstrip(": ")
    return complain(f"a fault of meshwright itself, {what}; {kept}", FAULT)


def complain(message: str, status: int) -> int:
    """Print *message* as one plain line, on a terminal in lines of its width; return *status*."""
    line = " ".join(message.split())
    encoding = sys.stderr.encoding or "utf-8"
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
    said = f"error: {text}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        said = fill(said, width, break_long_words=False, break_on_hyphens=False)
    with suppress(OSError):  # nobody is left to be told
        sys.stderr.write(f"{said}\n".encode(encoding, "backslashreplace").decode(encoding))
    return status
