"""Start and end of a command's process: its streams, its signals and its exit status.

Status 0 is success, 1 that a plan disagrees or nothing fits, 2 a user's mistake, 70 a fault of
ours (EX_SOFTWARE of sysexits.h), and 128 plus its number a signal. Imports are local: most
processes end well.
"""
# ruff: noqa: PLC0415

import os
import sys

TYPE_CHECKING = False  # as type checkers see it
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import TextIO

USER_MISTAKE, FAULT = 2, 70
OUTPUT = "standard output"
SIGNALS = ("SIGTERM", "SIGHUP")
_received: list[int] = []


class TerminationSignal(KeyboardInterrupt):
    """A signal that ends the command as Ctrl-C does.

    Of a plain KeyboardInterrupt that passes through code run from a text, as that of dataclasses
    is, Python keeps in mind that nothing caught it: `python -m` would die of SIGINT at its end,
    whatever its status (`unhandled_keyboard_interrupt` of Python/pythonrun.c, 3.11).
    """


def begin() -> bool:
    """Replace the standard streams that this process lacks.

    A closed stream would be the number of the first file that is opened, and receive what is
    printed; so something else takes its place.

    Returns:
        Whether there is a standard output.
    """
    has_output = sys.stdout is not None
    # In order, so that each file opened below takes the descriptor that is missing.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
    if not has_output:
        _drop_output()
    # Without a descriptor Python starts with no stream at all.
    if sys.stderr is None:
        sys.stderr = _nowhere()
    return has_output


def catch_signals() -> None:
    """End as Ctrl-C does, which cleans up, on a signal that would end the process at once."""
    import signal

    for each in SIGNALS:
        number = signal.Signals[each]
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup's choice is kept
            signal.signal(number, _end_once)


def _end_once(number: int, _frame: "FrameType | None") -> None:
    """End as Ctrl-C does; the signal again must not stop the cleaning up."""
    import signal

    for each in SIGNALS:
        signal.signal(signal.Signals[each], signal.SIG_IGN)
    _received.append(number)
    raise TerminationSignal


def interrupted() -> int:
    """Print what stopped the command; return its exit status."""
    import signal

    number = _received.pop() if _received else signal.SIGINT
    word = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    return print_error(word, 128 + number)


def write_output(text: str = "") -> None:
    """Write *text* and what standard output still holds; raises OSError that names it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, OUTPUT) from None


def refused(error: OSError) -> int:
    """Print what the system refused; return the exit status, 141 after a closed pipe."""
    if isinstance(error, BrokenPipeError) or error.filename == OUTPUT:
        _drop_output()
    if isinstance(error, BrokenPipeError):
        import signal

        # As a shell reports a process that SIGPIPE ended; nobody is left to read a message.
        return 128 + signal.SIGPIPE
    filename = f": {error.filename}" if error.filename else ""
    return print_error(f"{error.strerror or error}{filename}", USER_MISTAKE)


def _drop_output() -> None:
    """Discard standard output, whose flush at the end of the process would fail."""
    sys.stdout = _nowhere()


def _nowhere() -> "TextIO":
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123


def fault(error: Exception, words: "Sequence[str]") -> int:
    """Print one line on a fault of ours and where its traceback is kept; return 70."""
    import tempfile
    import traceback
    from contextlib import suppress

    # As ASCII: an argument may hold bytes that no encoding can write.
    text = f"meshwright {' '.join(map(ascii, words))}\n{''.join(traceback.format_exception(error))}"
    traceback_note = "its traceback could not be kept"
    with suppress(OSError):
        handle, name = tempfile.mkstemp(prefix="meshwright-fault-", suffix=".txt")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:  # noqa: PTH123
            file.write(text)
        traceback_note = f"its traceback is in {name}"
    cause = f"{type(error).__name__}: {ascii(str(error)[:200])[1:-1]}".rstrip(": ")
    return print_error(f"a fault of meshwright itself, {cause}; {traceback_note}", FAULT)


def print_error(message: str, status: int) -> int:
    """Print *message* as one plain line, on a terminal in lines of its width; return *status*."""
    import shutil
    from contextlib import suppress
    from textwrap import fill

    line = " ".join(message.split())
    encoding = sys.stderr.encoding or "utf-8"
    # Control characters of a message must not reach the terminal.
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)
    printed = f"error: {text}"
    if sys.stderr.isatty():
        # A terminal would break words at its edge.
        width = shutil.get_terminal_size().columns
        printed = fill(printed, width, break_long_words=False, break_on_hyphens=False)
    with suppress(OSError):  # nobody is left to be told
        sys.stderr.write(f"{printed}\n".encode(encoding, "backslashreplace").decode(encoding))
    return status
