"""Words of commands and of layouts that frameworks read, from keys and back."""

import re
import shlex
from collections.abc import Iterable

from meshwright.hwprofiles import single_line
from meshwright.planner.tables.facts import Keys

RELEASE = re.compile(r"^# stack ([\w.-]+@[\w.-]+)$", re.MULTILINE)
# A list of digits, and how often it is repeated, as "[0,1]*12".
LISTS = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,4}))?")


def remarks(lines: Iterable[str]) -> str:
    """Return *lines* as comments of TOML, YAML and shells, each on one line whatever it holds."""
    return "".join(f"# {single_line(line)}\n" for line in lines)


def release_remark(stack: str) -> str:
    """Return the line at the head of an export that names the release of its plan.

    >>> named_release(remarks([release_remark("megatron-core@0.16")]))
    'megatron-core@0.16'
    """
    return f"stack {stack}"


def named_release(text: str) -> str | None:
    """Return the release that such a line of a file names; None where it has none."""
    match = RELEASE.search(text)
    return None if match is None else match[1]


def flags(keys: Keys) -> list[str]:
    """Return *keys* as options of a command; True is a flag alone, a list several words.

    >>> flags({"bf16": True, "lr": 0.1, "modules": ["a", "b"]})
    ['--bf16', '--lr 0.1', '--modules a b']
    """
    return [
        f"--{key}" if value is True else f"--{key} {_shell_words(value)}"
        for key, value in keys.items()
    ]


def _shell_words(value: object) -> str:
    words = value if isinstance(value, list) else [value]
    return " ".join(shlex.quote(str(each)) for each in words)


def single_quoted(word: str) -> str:
    """Return *word* in single quotes, which a shell reads as it stands.

    >>> print(single_quoted("a=$b"), single_quoted("it's"))
    'a=$b' 'it'"'"'s'
    """
    return "'" + word.replace("'", "'\"'\"'") + "'"


def tyro_options(keys: Keys) -> list[str]:
    """Return *keys* as options of a command that tyro parses.

    >>> tyro_options({"a.b_c": False, "a.d_e": [["x", "y"], ["z"]]})
    ['--a.no-b-c', '--a.d_e x,y z']
    """
    options = []
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        if isinstance(value, bool):
            options.append(f"--{section}.{'' if value else 'no-'}{name.replace('_', '-')}")
        elif isinstance(value, list):
            parts = [each if isinstance(each, str) else ",".join(each) for each in value]
            options.append(f"--{key} {_shell_words(parts)}")
        else:
            options.append(f"--{key} {_shell_words(value)}")
    return options


def layout_text(
    stages: tuple[int, ...], count_mtp_layers: int = 0, prediction_stage: int | None = None
) -> str:
    """Return stages as Megatron-Core's PipelineParallelLayerLayout has them.

    >>> layout_text((3, 4, 0)), layout_text((3, 2), 1), layout_text((3, 2, 0, 0), 1, 2)
    ('Et*3|t*4|L', 'Et*3|t*2mL', 'Et*3|t*2|m|L')
    """
    parts = [f"t*{count}" if count else "" for count in stages]
    # MTP layers follow the last layers of their stage.
    parts[-1 if prediction_stage is None else prediction_stage] += "m" * count_mtp_layers
    return f"E{'|'.join(parts)}L"


def layer_numbers(value: object, num_layers: int) -> list[int]:
    """Return the number of each layer that a frequency, or a sum of lists, stands for.

    So Megatron-LM spells which layers have experts (``moe_freq_type`` of its arguments.py): one in
    so many, from the first on, or ``([0]*3+[1]*58)``. Empty where it is neither,
    or of another number of layers.

    >>> layer_numbers("([0]*1+[1]*3)", 4), layer_numbers(2, 4), layer_numbers("some", 4)
    ([0, 1, 1, 1], [1, 0, 1, 0], [])
    """
    if isinstance(value, int) and value > 0:
        return [int(layer % value == 0) for layer in range(num_layers)]
    text = str(value).replace(" ", "").removeprefix("(").removesuffix(")")
    parts = [LISTS.fullmatch(each) for each in text.split("+")]
    counted = [(each[1], int(each[2] or 1)) for each in parts if each is not None]
    if len(counted) < len(parts) or sum(times for _, times in counted) > num_layers:
        return []
    numbers = [int(each) for listed, times in counted for each in times * listed.split(",")]
    return numbers if len(numbers) == num_layers else []
