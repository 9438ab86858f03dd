"""Words of a command for tests that change one of another command's options."""

from collections.abc import Sequence


def said_once(words: Sequence[str]) -> list[str]:
    """Return *words* without the options that a later one says anew.

    Only what takes one value is looked for: a flag, and ``--set``, may stand as often as it does.

    >>> said_once(["simulate", "gpt2", "--gpus", "8", "--tp", "2", "--gpus", "16"])
    ['simulate', 'gpt2', '--tp', '2', '--gpus', '16']
    """
    kept = list(words)
    for word in {each for each in words if each.startswith("--") and each != "--set"}:
        while kept.count(word) > 1:
            place = kept.index(word)
            del kept[place : place + 2]
    return kept
