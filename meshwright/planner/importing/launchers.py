"""Launchers: their options are read, known or refused as those of frameworks are.

Accelerate's says a layout itself, by its own options and the configuration that it names.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.planner.configuration import (
    FRAMEWORK_FILE,
    Effect,
    Option,
    OptionWord,
    load_options,
    read_options,
    read_yaml,
)
from meshwright.planner.importing.reading import mistake

if TYPE_CHECKING:
    from meshwright.planner.shell import Launch

ACCELERATE = "accelerate"
OPTIONS = {
    "torchrun": "torchrun-2.13",
    "deepspeed": "deepspeed-launcher-0.19",
    ACCELERATE: "accelerate-launch-1.15",
    "srun": "srun-25",
    "sbatch": "srun-25",
}
CONFIGURATION = "accelerate-1.15"
SECTIONS = ("", "fsdp_config.", "deepspeed_config.", "parallelism_config.", "megatron_lm_config.")
# Numbers of ranks, which every launch reads.
RANKS = ("num-machines", "num-processes", "multi-gpu", "gpu-ids")
STRATEGIES = {
    "use-megatron-lm": "MEGATRON_LM",
    "use-deepspeed": "DEEPSPEED",
    "use-fsdp": "FSDP",
    "multi-gpu": "MULTI_GPU",
}
TYPE = "distributed_type"
OF_SCRIPTS = "transformers-5.23"  # options that users' own scripts have, too


def launcher_refusals(launch: "Launch", *, is_configuration: bool) -> Iterator[str]:
    """Yield what is wrong with the options of a launch's launchers.

    Args:
        launch: The launch.
        is_configuration: Whether Accelerate's options are read as its configuration.
    """
    for name, words in launch.launcher_words.items():
        if name not in OPTIONS:
            continue
        known = load_options(OPTIONS[name])
        said = read_options(words, known)
        yield from said.refusals
        for key, value in said.keys.items():
            text = mistake(name, f"--{key}", value, _dashed(known), ())
            option = known.get(key)
            is_layout = name == ACCELERATE and option is not None and option.effect is Effect.READ
            if is_layout and not is_configuration and key not in RANKS:
                text = f"--{key} of {name} says a layout beside that of {launch.program.text}"
            if text:
                yield f"line {said.lines[key]}: {text}"


def _dashed(options: Mapping[str, Option]) -> Mapping[str, Option]:
    return {f"--{key}": each for key, each in options.items()}


def accelerate_keys(
    launch: "Launch", folder: Path, find: Callable[[OptionWord, Path], Path]
) -> tuple[dict[str, object], dict[str, int]]:
    """Return values and lines of the configuration that ``accelerate launch`` makes.

    Args:
        launch: The launch.
        folder: Of the script.
        find: Finds the file that a word names.

    Raises:
        PlanError: If its file is not there, or is none.
    """
    words = launch.launcher_words[ACCELERATE]
    said = read_options(words, load_options(OPTIONS[ACCELERATE]))
    keys: dict[str, object] = {}
    lines: dict[str, int] = {}
    if "config-file" in said.keys:
        word = next(each for each in words if each.text.endswith(str(said.keys["config-file"])))
        document = read_yaml(FRAMEWORK_FILE.read_text(find(word, folder)))
        keys, lines = dict(document.keys), dict(document.lines)
    known = load_options(CONFIGURATION)
    for key, value in said.keys.items():
        names = (f"{section}{key.replace('-', '_')}" for section in SECTIONS)
        name = next((each for each in names if each in known), None)
        if name is not None:
            keys[name], lines[name] = value, said.lines[key]
    told = [kind for key, kind in STRATEGIES.items() if key in said.keys]
    if told or TYPE not in keys:
        # Without a word it starts several processes as with --multi_gpu (launch.py).
        keys[TYPE] = told[0] if told else "MULTI_GPU"
    return keys, lines


def script_refusals(launch: "Launch") -> Iterator[str]:
    """Yield what is not known of the options of a user's own script, which may say a layout."""
    known = load_options(OF_SCRIPTS)
    said = read_options(launch.arguments, known)
    for key, line in said.lines.items():
        option = known.get(key)
        if option is None or option.effect is not Effect.NONE:
            yield f"line {line}: --{key} of {launch.program.text} may change the plan"
