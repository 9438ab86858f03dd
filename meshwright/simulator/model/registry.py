"""Registry of model kinds, and parsing of a model by its ``kind``."""

from collections.abc import Mapping
from typing import TypeAlias

from meshwright.simulator.errors import PlanError, shorten
from meshwright.simulator.model.chain import ChainModel
from meshwright.simulator.model.described import parse
from meshwright.simulator.model.huggingface import PREDICTION_KEYS
from meshwright.simulator.model.images import ImageModel
from meshwright.simulator.model.spec import ModelSpec

AnyModel: TypeAlias = ModelSpec | ImageModel | ChainModel

TRANSFORMER = "transformer"
KINDS: dict[str, type[AnyModel]] = {
    TRANSFORMER: ModelSpec,
    "images": ImageModel,
    "chain": ChainModel,
}


def parse_any_model(data: Mapping[str, object], *, origin: str) -> AnyModel:
    """Return the model described by the mapping of a file, of the class of its ``kind``.

    Raises:
        PlanError: If there is no such kind, or a key is missing, unknown or out of range.

    >>> parse_any_model({"kind": "image"}, origin="a.toml")
    Traceback (most recent call last):
    meshwright.simulator.errors.PlanError: a.toml: kind='image'; allowed: transformer, images, chain
    """
    kind = data.get("kind", TRANSFORMER)
    if not isinstance(kind, str) or kind not in KINDS:
        raise PlanError(f"{origin}: kind={shorten(kind)}; allowed: {', '.join(KINDS)}")
    if kind == TRANSFORMER:
        data = {key: value for key, value in data.items() if key != "kind"}
    return parse(KINDS[kind], data, origin=origin)


def built_in_model(data: Mapping[str, object], *, origin: str) -> AnyModel:  # noqa: ARG001
    """Return the model that a file of this package describes, unchecked."""
    return KINDS[str(data.get("kind", TRANSFORMER))].trusted(data)


def with_mtp_layers(model: AnyModel, number: int) -> AnyModel:
    """Return *model* with *number* MTP layers.

    Raises:
        PlanError: If it is no transformer, or cannot have MTP layers.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> with_mtp_layers(load_model("glm4.5"), 1).prediction_layers
    1
    """
    if not isinstance(model, ModelSpec):
        if not number:
            return model
        raise PlanError(f"prediction_layers={number} does not go with {model.name}; allowed: 0")
    if number == model.prediction_layers:
        return model
    # The warning that the checkpoint's MTP layers are not trained no longer applies.
    notes = [each for each in model.left_out.split("; ") if not each.startswith(PREDICTION_KEYS)]
    changed = {"prediction_layers": number, "left_out": "; ".join(notes)}
    return parse(ModelSpec, {**model.model_dump(), **changed}, origin=model.name)
