"""Errors this package raises on purpose."""


class PlanError(ValueError):
    """A model, job or plan that can never run; the message is one line for the user."""


class TooManyTasksError(PlanError):
    """A plan that could run, but has more tasks than are simulated."""


class DeadlockError(RuntimeError):
    """A simulated step that stopped early because actions wait for each other."""


def shorten(value: object) -> str:
    """Return a value as it is shown in an error: one line of at most 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
