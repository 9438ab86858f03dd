"""References of a configuration to its own keys, as OmegaConf writes them: ``${section.key}``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.planner.tables import Keys
from meshwright.simulator import PlanError

# A name, with dots before it where it is counted from its own section.  What calls a function
# (${multiply:...}) or asks the environment (${oc.env:...}) is none.
REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_][\w.-]*)\}")
MOST_STEPS, MOST_CHARACTERS = 16, 100_000


def resolved(keys: Mapping[str, object]) -> Keys:
    """Return *keys* with values in the place of references to other keys of the same file.

    What names no key stays as it is written, so that it is refused where it matters.

    Args:
        keys: With sections joined by dots.

    Raises:
        PlanError: If a reference leads back to itself or through more than 16 others, or if they
            make more than 100,000 characters of text in all.

    >>> resolved({"model.length": 2048, "a": "${model.length}", "model.b": "x${.length}"})
    {'model.length': 2048, 'a': 2048, 'model.b': 'x2048'}
    """
    resolver = _Resolver(keys)
    return {key: resolver.value(key, ()) for key in keys}


@dataclass(slots=True)
class _Resolver:
    """Values of keys: each is worked out once.

    Args:
        keys: As they are written.
        known: Values by now.
        size: Characters of text that references made by now.
    """

    keys: Mapping[str, object]
    known: Keys = field(default_factory=dict)
    size: int = 0

    def value(self, key: str, path: tuple[str, ...]) -> object:
        """Return the value of a key, to which *path* leads; lists are left as they are."""
        # A reference in a loop would be resolved for ever.
        if key in path or len(path) > MOST_STEPS:
            raise PlanError(
                f"{path[0]}={self.keys[path[0]]} leads back to itself, or through more than "
                f"{MOST_STEPS} others"
            )
        if key not in self.known:
            written = self.keys[key]
            is_text = isinstance(written, str) and "${" in written
            self.known[key] = self._read(str(written), (*path, key)) if is_text else written
        return self.known[key]

    def _read(self, text: str, path: tuple[str, ...]) -> object:
        whole = REFERENCE.fullmatch(text)
        # A value that is a reference and nothing else keeps its type.
        if whole is not None:
            name = _named(whole, path[-1])
            return self.value(name, path) if name in self.keys else text
        return REFERENCE.sub(lambda match: self._part(match, path), text)

    def _part(self, match: "re.Match[str]", path: tuple[str, ...]) -> str:
        """Return the text of a reference within a longer text."""
        name = _named(match, path[-1])
        value_text = str(self.value(name, path)) if name in self.keys else match[0]
        self.size += len(value_text)
        if self.size > MOST_CHARACTERS:
            raise PlanError(f"{path[0]}: references make over {MOST_CHARACTERS} characters of text")
        return value_text


def _named(match: "re.Match[str]", key: str) -> str:
    """Return the key of a reference; with a dot before it, it is one of the same section."""
    dots, name = len(match[1]), match[2]
    return ".".join([*key.split(".")[:-dots], name]) if dots else name
