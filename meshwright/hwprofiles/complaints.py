"""Turn what pydantic found wrong into one line a person can act on."""

import re
from collections.abc import Mapping
from typing import Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshwright.hwprofiles.errors import ProfileError
from meshwright.hwprofiles.names import shown, suggestion

_MAP_KEY: Final = "[key]"  # how pydantic marks a mistake in a key of a table
_SUBJECT: Final = re.compile(r"^[A-Z][a-z]+ should ")
_TOML_WORDS: Final = {  # what a file calls the things pydantic names after Python
    "a valid dictionary": "a table",
    "a valid tuple": "a list",
    "a valid string": "a text",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
}


def one_line(error: ValidationError) -> str:
    """Return the first mistake of *error* as ``KEY: what is wrong; what is allowed``.

    >>> from meshwright.hwprofiles.schema import MemoryKernels
    >>> try:
    ...     MemoryKernels.model_validate({"bandwidth_fraction": 1.5, "kind": "fitted"})
    ... except ValidationError as error:
    ...     print(one_line(error))
    bandwidth_fraction: 1.5 is not allowed; it must be less than or equal to 1
    """
    details = error.errors(include_url=False)[0]
    parts = [_word(part) for part in details["loc"] if part != _MAP_KEY]
    context = details.get("ctx", {})
    if details["type"] == "unknown_key":
        parts.append(_word(context["key"]))
        text = f"unknown key; {context['hint']}"
    elif details["type"] == "missing":
        text = "missing key; it is required"
    elif isinstance(context.get("error"), ProfileError):
        text = str(context["error"])
    else:
        text = _mistake(details, context)
    key = ".".join(parts)
    return f"{key}: {text}" if key else text


def _mistake(details: ErrorDetails, context: Mapping[str, object]) -> str:
    wanted = _SUBJECT.sub("", " ".join(details["msg"].split()))
    for python_word, toml_word in _TOML_WORDS.items():
        wanted = wanted.replace(python_word, toml_word)
    value = details["input"]
    text = f"{shown(value)} is not allowed; it must {wanted}"
    expected = context.get("expected")
    if details["type"] != "enum" or not isinstance(value, str) or not isinstance(expected, str):
        return text
    choices = re.findall(r"'([^']*)'", expected)
    return f"{text}; {suggestion(value, choices)}"


def _word(part: int | str) -> str:
    word = str(part)
    return word if re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", word) else shown(word)
