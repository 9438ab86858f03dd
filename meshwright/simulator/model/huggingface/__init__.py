"""Read the config.json of a Hugging Face checkpoint: a module for families that are alike.

The meaning of each key follows the configuration classes of the transformers library.
"""

from collections.abc import Mapping
from pathlib import Path

from meshwright.hwprofiles import shown_path
from meshwright.simulator.errors import PlanError, shorten
from meshwright.simulator.model.huggingface.experts import EXPERT_FAMILIES
from meshwright.simulator.model.huggingface.gemma import GEMMA_FAMILIES
from meshwright.simulator.model.huggingface.gpt import GPT_FAMILIES
from meshwright.simulator.model.huggingface.llama import LLAMA_FAMILIES
from meshwright.simulator.model.huggingface.mixed import MIXED_FAMILIES
from meshwright.simulator.model.huggingface.parallel import PARALLEL_FAMILIES
from meshwright.simulator.model.huggingface.reader import CHANGING_NO_SIZE, PREDICTION_KEYS, Reader

__all__ = ["ARCHITECTURES", "PREDICTION_KEYS", "read_config"]

ARCHITECTURES = {
    **GPT_FAMILIES,
    **LLAMA_FAMILIES,
    **GEMMA_FAMILIES,
    **PARALLEL_FAMILIES,
    **EXPERT_FAMILIES,
    **MIXED_FAMILIES,
}


def read_config(config: Mapping[str, object], *, path: Path) -> dict[str, object]:
    """Return the fields of the transformer that a Hugging Face configuration describes.

    The model is named for its folder if the file is called config.json, else for the file.

    Args:
        config: The JSON object.
        path: Where it came from, for the name and for errors.

    Raises:
        PlanError: If the architecture, or a key that may change it, is not supported.

    >>> config = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
    ...           "n_embd": 768, "n_layer": 12, "n_head": 12}
    >>> read_config(config, path=Path("gpt2/config.json"))["num_heads"]
    12
    """
    origin = shown_path(path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        shown = shorten(model_type) if "model_type" in config else "(missing)"
        supported = ", ".join(sorted(ARCHITECTURES))
        raise PlanError(f"{origin}: model_type={shown} is not supported; supported: {supported}")
    architecture = ARCHITECTURES[model_type]
    reader = Reader(config, origin)
    reader.refuse_unknown_keys(architecture)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    fields = architecture.read(reader)
    given = {key: value for key, value in fields.items() if value is not None}
    source = f"Hugging Face {path.name}, model_type {model_type}"
    return {**given, "left_out": _left_out(config), "name": name or path.stem, "source": source}


def _left_out(config: Mapping[str, object]) -> str:
    """Return what keys of a configuration ask for that changes no size and is not modelled."""
    inner = config.get("text_config")
    given = {**(inner if isinstance(inner, Mapping) else {}), **config}
    return "; ".join(
        f"{key}={shorten(given[key])} {what}"
        for key, what in CHANGING_NO_SIZE.items()
        if given.get(key)
    )
