"""Models that torchtitan has in code, by name and flavor."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias, cast

from meshwright.hwprofiles import Profile
from meshwright.planner.tables import Facts, FileValues, Keys, Roles
from meshwright.records import Field
from meshwright.simulator import ModelSpec, PlanError, load_model
from meshwright.simulator.model import parse_model

DEGREE, LENGTH = "parallelism.pipeline_parallel_degree", "training.seq_len"
FOLDER = Path(__file__).resolve().parents[1] / "data" / "flavors"
# What all of its transformers have.
LIKE_LLAMA: Mapping[str, object] = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "gated_mlp": True,
    "tied_embeddings": False,
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "dropout": False,
}
Size: TypeAlias = bool | int | str
Sizes: TypeAlias = dict[str, Size | dict[str, Size]]


class _Models(Profile):
    """Flavors of one model: sizes by name, under those that all of them have."""

    has_pipelines: bool = True
    usual: Sizes = Field({})
    flavors: dict[str, Sizes]

    def sizes(self, flavor: str) -> dict[str, object]:
        """Return the sizes of a flavor, over those of the flavor that it is like."""
        values: dict[str, object] = {**self.flavors[flavor]}
        like = values.pop("like", None)
        return {**(self.usual if like is None else self.sizes(str(like))), **values}


class _Config(Profile):
    """Configuration of 0.3: its flavor, which is as in 0.2, and keys that are no defaults."""

    flavor: str
    keys: dict[str, Size]


class Flavors(Profile):
    """Flavors by model, reasons why other models are in no plan, and configurations of Llama 3."""

    source: str
    refused: dict[str, str]
    models: dict[str, _Models]
    configs: dict[str, _Config]


@cache
def load_flavors() -> Flavors:
    """Return the flavors of torchtitan's models.

    >>> sorted(load_flavors().models)
    ['deepseek_v3', 'llama3', 'llama4', 'qwen3']
    """
    return Flavors.trusted(tomllib.loads((FOLDER / "torchtitan.toml").read_text(encoding="utf-8")))


def flavor_model(name: str, flavor: str, seq_len: int) -> ModelSpec:
    """Return the model of a flavor that `load_flavors` has, for sequences of *seq_len* tokens.

    >>> flavor_model("qwen3", "4B", 4096).head_dim
    128
    """
    sizes = load_flavors().models[name].sizes(flavor)
    # Its attention mask is checked apart (`_check_sizes`).
    sizes.pop("attention", None)
    if "built_in" in sizes:
        # Sizes of built-in models stand in their own files.
        return cast("ModelSpec", load_model(str(sizes["built_in"])))
    named = {"name": f"{name}-{flavor}", "seq_len": seq_len, "source": load_flavors().source}
    return parse_model({**LIKE_LLAMA, **sizes, **named}, origin="model.flavor of torchtitan")


def read_flavor(roles: Roles, keys: Keys, facts: Facts, words: FileValues) -> Keys:
    """Return the model of a flavor; what is left out is as in JobConfig's Model."""
    of_name, of_flavor = roles["name"], roles["flavor"]
    if not keys.keys() & {of_name, of_flavor}:
        return {}
    name = words.word(keys, of_name, "llama3")
    flavor = words.word(keys, of_flavor, "debugmodel")
    models, refused = load_flavors().models, load_flavors().refused
    if name in refused:
        raise PlanError(
            f"{of_name}={name} of torchtitan is in no plan: {refused[name]}; "
            f"allowed: {', '.join(models)}"
        )
    if name not in models:
        raise words.unknown(of_name, name, models)
    if flavor not in models[name].flavors:
        raise words.unknown(of_flavor, flavor, models[name].flavors)
    if not models[name].has_pipelines and words.whole(keys, DEGREE, 1) > 1:
        raise words.unknown(DEGREE, keys[DEGREE], (f"1 with {name}",))
    _check_sizes(models[name].sizes(flavor), roles, keys, facts)
    return {"model": flavor_model(name, flavor, words.whole(keys, LENGTH, 2048))}


def _check_sizes(sizes: Mapping[str, object], roles: Roles, keys: Keys, facts: Facts) -> None:
    """Raise PlanError where a flavor's vocabulary or attention mask is not known."""
    flavor, tokenizer = roles["flavor"], roles["tokenizer"]
    # Up to 0.1 the tokenizer's file decides the vocabulary.
    if keys.get(tokenizer) and "built_in" not in sizes:
        raise PlanError(
            f"{tokenizer}={keys[tokenizer]} of torchtitan says the vocabulary of such a flavor "
            "up to 0.1, and the file does not; allowed: model.hf_assets_path, since 0.2"
        )
    if "attention" in sizes and facts.get("attention") is None:
        raise PlanError(
            f"{flavor}={keys[flavor]} of torchtitan has {sizes['attention']}, masked by documents, "
            "which is in no plan; --attention flash takes it for causal flash attention"
        )


def read_config(roles: Roles, keys: Keys, _: Facts, words: FileValues) -> Keys:
    """Return the model of a configuration of 0.3: ``llama3_8b``."""
    module, config = keys.get(roles["module"]), keys.get(roles["config"])
    if module != "llama3":
        raise words.unknown(roles["module"], module, ("llama3",))
    configs = load_flavors().configs
    if str(config) not in configs:
        raise words.unknown(roles["config"], config, configs)
    length = words.whole(keys, LENGTH, 2048)
    return {"model": flavor_model("llama3", configs[str(config)].flavor, length)}
