"""Models by name or by file: built-in, model TOML, or Hugging Face config.json."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from meshwright.hwprofiles import FileKind, nearest_names, shown_path
from meshwright.simulator.errors import PlanError, shorten
from meshwright.simulator.model.huggingface import read_config
from meshwright.simulator.model.registry import AnyModel, built_in_model, parse_any_model
from meshwright.simulator.model.spec import parse_model

DATA_FOLDER = Path(__file__).parents[1] / "data" / "models"
FILES = (".json", ".toml")

# A model description is a few hundred bytes; this stops a weights file from being read whole.
MODEL_FILE = FileKind(title="model file", most_bytes=1_000_000, error=PlanError)


def list_models() -> tuple[str, ...]:
    """Return the names of the built-in models, sorted.

    >>> "gpt3-175b" in list_models()
    True
    """
    names = [name for path in _data_files() for name in _models_of(path)]
    assert len(names) == len(set(names)), "a name is that of one model"
    return tuple(sorted(names))


def load_model(name_or_path: str) -> AnyModel:
    """Return a built-in model, or the one a TOML or a Hugging Face config.json describes.

    A built-in name wins over a file of the same name; write ``./NAME`` for the file.

    Raises:
        PlanError: If there is no such model, or its file is at fault; one line.

    >>> load_model("gpt3-175b").num_layers
    96
    """
    path = Path(name_or_path)
    built_in = None if path.suffix in FILES else _built_in_model(name_or_path)
    if built_in is not None:
        return built_in
    _check_readable(path, name_or_path)
    if path.suffix == ".json":
        config = MODEL_FILE.read_json(path)
        if not isinstance(config, dict):
            raise PlanError(f"{shown_path(path)} must hold a JSON object, not {shorten(config)}")
        return parse_model(read_config(config, path=path), origin=shown_path(path))
    models = read_models(path)
    if len(models) > 1:
        raise PlanError(
            f"{shown_path(path)} holds {len(models)} models ({', '.join(models)}); "
            "a file given as a model must hold one"
        )
    return next(iter(models.values()))


def read_models(
    path: Path, parse: Callable[..., AnyModel] = parse_any_model
) -> dict[str, AnyModel]:
    """Return the models of one TOML by name.

    A file holds one model as top-level keys, or several as ``[models.NAME]``
    tables; then the top-level keys are shared by all of them.

    Raises:
        PlanError: If the file is not TOML or describes no valid model.
    """
    document = MODEL_FILE.read_toml(path)
    if "models" not in document:
        model = parse(document, origin=shown_path(path))
        return {model.name: model}
    tables = document.pop("models")
    if not isinstance(tables, dict) or not tables:
        raise PlanError(
            f"{shown_path(path)}: models={shorten(tables)} must be tables [models.NAME]"
        )
    models = {}
    for name, table in tables.items():
        origin = f"{shown_path(path)} [models.{shorten(name)}]"
        if not isinstance(table, dict):
            raise PlanError(f"{origin}: {shorten(table)} must be a table")
        if "name" in document or "name" in table:
            raise PlanError(f"{origin}: name must not be given; the table is the name")
        models[name] = parse({**document, **table, "name": name}, origin=origin)
    return models


@cache
def _built_in_model(name: str) -> AnyModel | None:
    """Return a built-in model, or None."""
    encoded = name.encode(errors="replace")
    for path in _data_files():
        # A search for bytes is far cheaper than parsing TOML files of other models.
        if encoded in path.read_bytes() and name in _models_of(path):
            return _models_of(path)[name]
    return None


def _data_files() -> list[Path]:
    return sorted(DATA_FOLDER.glob("*.toml"))


@cache
def _models_of(path: Path) -> Mapping[str, AnyModel]:
    return MappingProxyType(read_models(path, built_in_model))


def _check_readable(path: Path, name_or_path: str) -> None:
    """Raise PlanError unless *path* is a file with the suffix of a model."""
    shown = shorten(name_or_path)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):  # such as a name too long, or with a null character
        is_folder, is_file = False, False
    if name_or_path and is_folder:
        raise PlanError(f"model {shown} is a folder; give the config.json or TOML in it")
    if not is_file:
        raise PlanError(_explain_unknown(name_or_path))
    if path.suffix not in FILES:
        raise PlanError(f"model file {shown} must end in .json (Hugging Face config) or .toml")


def _explain_unknown(name: str) -> str:
    shown = shorten(name)
    if name.endswith(FILES):
        return f"model file {shown} does not exist, or is no regular file"
    nearest = nearest_names(name[:100], list_models())
    known = f"nearest: {', '.join(nearest)}" if nearest else f"known: {', '.join(list_models())}"
    return f"unknown model {shown}; {known}; or give a config.json or model TOML"
