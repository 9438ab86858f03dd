"""Find the names a person probably meant."""

import difflib
from collections.abc import Iterable
from pathlib import Path

MAX_SHOWN_LENGTH = 60


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three of *known* that look most like *name*, best first.

    The comparison ignores case. A name that resembles nothing gives an empty list.

    Args:
        name: What was written.
        known: What could have been meant.

    >>> nearest_names("A100", ["a100-sxm4-80gb", "a100-sxm4-40gb", "h100"])
    ['h100', 'a100-sxm4-80gb', 'a100-sxm4-40gb']
    """
    originals = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower()[:MAX_SHOWN_LENGTH], originals, cutoff=0.3)
    return [originals[match] for match in matches]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the nearest names, or all where none is near.

    >>> suggestion("kye", ["key", "value"])
    'nearest: key'
    >>> suggestion("qqq", ["b", "a"])
    'known: a, b'
    """
    candidates = sorted(known)
    nearest = nearest_names(name, candidates)
    if nearest:
        return f"nearest: {', '.join(nearest)}"
    return f"known: {', '.join(candidates) or 'none'}"


def shown(value: object) -> str:
    r"""Return *value* as one short line for an error message.

    >>> shown("two\nlines")
    "'two\\nlines'"
    """
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}..."


def shown_path(path: str | Path) -> str:
    r"""Return a path as it is shown in an error, quoted only where it would break the line.

    >>> shown_path("a b.toml"), shown_path("a\n.toml")
    ('a b.toml', "'a\\n.toml'")
    """
    text = str(path)
    return text if text.isprintable() else ascii(text)
