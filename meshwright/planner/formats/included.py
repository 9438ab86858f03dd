"""Files, and texts of JSON, that a configuration of Hugging Face's trainers names."""

from pathlib import Path
from typing import NamedTuple

from meshwright.hwprofiles import shown
from meshwright.planner.export import FRAMEWORK_FILE, Keys
from meshwright.simulator import PlanError

PARENTS = 4  # folders above a configuration in which a file that it names is looked for
CONFIG = "config.json"
MARK = "in the file"  # the value of a section's name whose keys stand in the configuration itself
DEEPSPEED, FSDP = "deepspeed", "fsdp_config"
SWITCHES = (DEEPSPEED, FSDP, "fsdp")  # what is empty is off
DICTIONARIES = (
    *(DEEPSPEED, FSDP, "accelerator_config", "optim_args", "lr_scheduler_kwargs"),
    *("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "liger_kernel_config"),
)
MODELS = ("model_name_or_path", "base_model")
PREFIX = "fsdp_"  # transformers and axolotl take keys of fsdp_config with it and without


def with_included(keys: Keys, folder: Path) -> Keys:
    """Return *keys* with those of the files, or of the JSON, that they name.

    These stand behind the name of the key: ``deepspeed.zero_optimization.stage``. A model's folder
    becomes its config.json. What is switched off is left out.

    Args:
        keys: Of the configuration.
        folder: Of its file.

    Raises:
        PlanError: If a file is not there, or holds no JSON object.
    """
    found: Keys = {}
    for key, value in keys.items():
        name = key.replace("-", "_")
        section, _, inner = key.partition(".")
        if name in SWITCHES and value in (None, False, "", []):
            continue
        if inner and section.replace("-", "_") in (DEEPSPEED, FSDP):
            if value is None:
                continue
            found.setdefault(section, MARK)
        found[_without_prefix(key)] = value
        if name in DICTIONARIES and isinstance(value, str):
            found |= _dictionary(key, value, folder)
        elif name in MODELS and isinstance(value, str):
            found[key] = _model(key, value, folder)
    return found


def _without_prefix(key: str) -> str:
    section, _, name = key.partition(".")
    is_old = section.replace("-", "_") == FSDP and name.startswith(PREFIX)
    return f"{section}.{name.removeprefix(PREFIX)}" if is_old else key


def _dictionary(key: str, value: str, folder: Path) -> Keys:
    """Return the keys of a section that is JSON, or the name of a file of it."""
    text = value if value.lstrip().startswith("{") else FRAMEWORK_FILE.read_text(
        named_file(key, value, folder)
    )
    document = FRAMEWORK_FILE.parse_json(text, f"{key}={shown(value)}")
    if not isinstance(document, dict):
        raise PlanError(f"{key}={shown(value)} must hold a JSON object")
    return {_without_prefix(inner): each for inner, each in _flat(document, key).items()}


def _flat(document: dict[str, object], section: str) -> Keys:
    found: Keys = {}
    waiting = [(section, document)]
    while waiting:
        prefix, table = waiting.pop()
        for name, each in table.items():
            if isinstance(each, dict):
                waiting.append((f"{prefix}.{name}", each))
            else:
                found[f"{prefix}.{name}"] = each
    return found


def _model(key: str, value: str, folder: Path) -> str:
    """Return the config.json of a model's folder, or its name as it stands."""
    places = [*_places(value, folder)]
    for place in places:
        if (place.path / CONFIG).is_file():
            return str(place.path / CONFIG)
    return value


class _Place(NamedTuple):
    path: Path


def named_file(key: str, value: str, folder: Path) -> Path:
    """Return the file that a key names, in the configuration's folder or in one above it.

    Raises:
        PlanError: If there is none.
    """
    for place in _places(value, folder):
        if place.path.is_file():
            return place.path
    raise PlanError(
        f"{key}={shown(value)} is not there; it is looked for beside the configuration and in "
        f"{PARENTS} folders above"
    )


def _places(value: str, folder: Path) -> list[_Place]:
    name = Path(value)
    above = [folder.resolve(), *folder.resolve().parents][: PARENTS + 1]
    if name.is_absolute():
        return [_Place(name)] if any(name.is_relative_to(each) for each in above[:-1]) else []
    return [_Place(each / name) for each in above if ".." not in name.parts]
