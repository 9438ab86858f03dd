"""Errors that this package raises on purpose."""

from collections.abc import Iterable


class PlanError(ValueError):
    """A model, job or plan that can never run; the message is one line for the user."""


class MistakesError(PlanError):
    """Several mistakes of one file, a line each."""

    def __init__(self, messages: Iterable[str]) -> None:
        self.messages = tuple(messages)
        super().__init__("\n".join(self.messages))

    def of_file(self, file: str) -> "MistakesError":
        """Return the same mistakes, each with the file's name before it."""
        return MistakesError(f"{file}: {each}" for each in self.messages)


class TooManyTasksError(PlanError):
    """A plan that could run, but has more tasks than are simulated.

    ``num_passes`` were run before that was known.
    """

    def __init__(self, message: str, num_passes: int = 0) -> None:
        super().__init__(message)
        self.num_passes = num_passes


class DeadlockError(RuntimeError):
    """A simulated step that stopped early because actions wait for each other."""


def shorten(value: object) -> str:
    """Return a value as it is shown in an error: one line of at most 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
