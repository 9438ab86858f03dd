"""Files and JSON texts that configurations of Hugging Face's trainers name."""

from pathlib import Path

from meshwright.hwprofiles import shown
from meshwright.planner.configuration import FRAMEWORK_FILE, PARENTS, named_file, read_json
from meshwright.planner.tables import Keys
from meshwright.simulator import PlanError

CONFIG = "config.json"
MARK = "in the file"  # the value of a section's name whose keys stand in the configuration itself
DEEPSPEED, FSDP = "deepspeed", "fsdp_config"
SWITCHES = (DEEPSPEED, FSDP, "fsdp")  # what is empty is off
DICTIONARIES = (
    *(DEEPSPEED, FSDP, "accelerator_config"),
    *("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
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
    included: Keys = {}
    for key, value in keys.items():
        name = key.replace("-", "_")
        section, _, inner = key.partition(".")
        if name in SWITCHES and value in (None, False, "", [], {}):
            continue
        if inner and section.replace("-", "_") in (DEEPSPEED, FSDP):
            if value is None:
                continue
            # Its keys stand in the configuration itself: there is no file to read.
            included.setdefault(section, MARK)
        included[_without_prefix(key)] = value
        if name in DICTIONARIES and value not in (None, {}):
            included |= _dictionary(key, value, folder)
        elif name in MODELS and isinstance(value, str):
            included[key] = _model(value, folder)
    return included


def _without_prefix(key: str) -> str:
    section, _, name = key.partition(".")
    is_old = section.replace("-", "_") == FSDP and name.startswith(PREFIX)
    return f"{section}.{name.removeprefix(PREFIX)}" if is_old else key


def _dictionary(key: str, value: object, folder: Path) -> Keys:
    """Return the keys of a section that is JSON, or the name of a file of it."""
    if not isinstance(value, str):
        raise PlanError(f"{key}={shown(value)} is no section; allowed: the name of a JSON file")
    # The command line takes JSON itself in the place of a file.
    is_text = value.lstrip().startswith("{")
    text = value if is_text else FRAMEWORK_FILE.read_text(_file(key, value, folder))
    try:
        document = read_json(text)
    except PlanError as error:
        raise PlanError(f"{key}={shown(value)}: {error}") from None
    for name in sorted(document.dotted):
        raise PlanError(f"{key}={shown(value)}: {shown(name)} is one name, not a key of a section")
    return {_without_prefix(f"{key}.{name}"): each for name, each in document.keys.items()}


def _model(value: str, folder: Path) -> str:
    """Return the config.json of a model's folder, or its name as it stands."""
    return str(named_file(str(Path(value) / CONFIG), folder) or value)


def _file(key: str, value: str, folder: Path) -> Path:
    """Return the file that a key names; raises PlanError if there is none where it may be."""
    path = named_file(value, folder)
    if path is None:
        raise PlanError(
            f"{key}={shown(value)} is not there; allowed: a file beside the configuration or in "
            f"one of the {PARENTS} folders above"
        )
    return path
