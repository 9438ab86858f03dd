"""Parsing of a Hugging Face checkpoint's config.json: one module for each group of families.

The meaning of each key follows the configuration classes of the transformers library.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from meshwright.hwprofiles import shown_path
from meshwright.simulator.errors import PlanError, shorten
from meshwright.simulator.model.huggingface.reader import (
    CHANGING_NO_SIZE,
    CHANGING_NOTHING,
    MAX_TOKENS,
    NOT_MODELLED,
    PREDICTION_KEYS,
    Architecture,
    Reader,
    completed,
)

__all__ = ["MAX_TOKENS", "PREDICTION_KEYS", "architectures", "read_config"]


@cache
def architectures() -> Mapping[str, Architecture]:
    """Return the readers of configurations by ``model_type``, imported only when one is read."""
    from meshwright.simulator.model.huggingface.dense import DENSE_FAMILIES  # noqa: PLC0415
    from meshwright.simulator.model.huggingface.experts import EXPERT_FAMILIES  # noqa: PLC0415
    from meshwright.simulator.model.huggingface.gemma import GEMMA_FAMILIES  # noqa: PLC0415
    from meshwright.simulator.model.huggingface.gpt import GPT_FAMILIES  # noqa: PLC0415
    from meshwright.simulator.model.huggingface.llama import LLAMA_FAMILIES  # noqa: PLC0415
    from meshwright.simulator.model.huggingface.mixed import MIXED_FAMILIES  # noqa: PLC0415
    from meshwright.simulator.model.huggingface.parallel import PARALLEL_FAMILIES  # noqa: PLC0415
    from meshwright.simulator.model.huggingface.routed import ROUTED_FAMILIES  # noqa: PLC0415

    return {
        **GPT_FAMILIES,
        **LLAMA_FAMILIES,
        **GEMMA_FAMILIES,
        **PARALLEL_FAMILIES,
        **EXPERT_FAMILIES,
        **MIXED_FAMILIES,
        **DENSE_FAMILIES,
        **ROUTED_FAMILIES,
    }


def read_config(config: Mapping[str, object], *, path: Path) -> dict[str, object]:
    """Return the fields of the transformer that a Hugging Face configuration describes.

    The model is named for its folder if the file is called config.json, else for the file.

    Args:
        config: The JSON object.
        path: Its file, for the model's name and for errors.

    Raises:
        PlanError: If the architecture, or a key that may change it, is not supported.

    >>> config = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
    ...           "n_embd": 768, "n_layer": 12, "n_head": 12}
    >>> read_config(config, path=Path("gpt2/config.json"))["num_heads"]
    12
    """
    origin = shown_path(path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in architectures():
        shown = shorten(model_type) if "model_type" in config else "(missing)"
        raise PlanError(f"{origin}: model_type={shown} is not supported{_why_not(config)}")
    architecture = architectures()[model_type]
    reader = Reader(config, origin)
    reader.refuse_unknown_keys(architecture)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    fields = architecture.read(reader.with_defaults(architecture))
    given = {key: value for key, value in fields.items() if value is not None}
    source = f"Hugging Face {path.name}, model_type {model_type}"
    return {**given, "left_out": _left_out(config), "name": name or path.stem, "source": source}


def _why_not(config: Mapping[str, object]) -> str:
    """Return the end of a refusal: the unmodelled feature, if a key shows it, and valid types."""
    inner = config.get("text_config")
    # Multimodal checkpoints keep their language model's configuration in text_config.
    inner_type = inner.get("model_type") if isinstance(inner, Mapping) else None
    if isinstance(inner_type, str) and inner_type in architectures():
        return f"; its text_config, of model_type {inner_type!r}, is, as a file of its own"
    given = {**(inner if isinstance(inner, Mapping) else {}), **config}
    reasons = (
        f": {key}={shorten(given[key])} is of {what}"
        for key, what in NOT_MODELLED.items()
        if given.get(key) not in (None, 0, False)
    )
    return f"{next(reasons, '')}; supported: {', '.join(sorted(architectures()))}"


def _left_out(config: Mapping[str, object]) -> str:
    """Return warnings for keys that change no size and are not modelled."""
    given: dict[str, object] = {}
    for each in (config.get("text_config"), config):
        if isinstance(each, Mapping):
            architecture = architectures().get(str(each.get("model_type")))
            outer = completed(each, architecture) if architecture else each
            rotary = outer.get("rope_parameters")
            given |= {**(rotary if isinstance(rotary, Mapping) else {}), **outer}
    return "; ".join(
        f"{key}={shorten(given[key])} {what}"
        for key, what in CHANGING_NO_SIZE.items()
        if given.get(key) and given[key] != CHANGING_NOTHING.get(key)
    )
