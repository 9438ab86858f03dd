"""Derived fields of a transformer: defaults of omitted sizes, and its layers by kind."""

from collections.abc import Mapping
from functools import cache
from itertools import cycle, islice

from meshwright.simulator.model.kinds import (
    EXPERT_LAYER,
    TRANSFORMER_LAYER,
    WINDOWED_EXPERT_LAYER,
    WINDOWED_LAYER,
    BlockRun,
    join_runs,
)
from meshwright.simulator.model.parts import Experts

FUSED_QKV = ("phi3", "gpt_neox", "falcon", "falcon-groups")  # one product in transformers' code
# Layer kinds of a pattern's letter, with an MLP and with experts.
KINDS_BY_LETTER = {
    "W": (WINDOWED_LAYER, WINDOWED_EXPERT_LAYER),
    "F": (TRANSFORMER_LAYER, EXPERT_LAYER),
}


@cache
def mixed_runs(pattern: str, experts: Experts | None, num_layers: int) -> tuple[BlockRun, ...]:
    """Return the layers of a repeated window *pattern*, with *experts* where those have layers.

    >>> mixed_runs("WWF", None, 4)[1:]
    (BlockRun(kind='layer', num_blocks=1), BlockRun(kind='windowed layer', num_blocks=1))
    """
    letters = islice(cycle(pattern), num_layers)
    kinds = (
        KINDS_BY_LETTER[letter][experts is not None and experts.has_layer(number)]
        for number, letter in enumerate(letters)
    )
    return join_runs([BlockRun(kind, 1) for kind in kinds])


def derived_sizes(data: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults of a transformer's omitted fields that depend on given ones.

    ``head_dim`` is ``hidden_size / num_heads``, ``num_kv_heads`` equals ``num_heads``,
    ``ffn_hidden_size`` is four times ``hidden_size`` (it must be given for a gated MLP, unless all
    layers have experts), ``max_positions`` equals ``seq_len``, and ``fused_qkv``, one linear layer
    for queries, keys and values in transformers, holds for decoders without rotary positions and
    for some values of ``spelling``.
    """
    derived = {
        "num_kv_heads": data.get("num_heads"),
        "max_positions": data.get("seq_len"),
        "layer_pattern": "W" if data.get("window") else None,
        "fused_qkv": _has_fused_qkv(data),
    }
    hidden_size, num_heads = data.get("hidden_size"), data.get("num_heads")
    # Types are tested here since this runs before validation.
    if isinstance(hidden_size, int) and data.get("gated_mlp") is not True:
        derived["ffn_hidden_size"] = 4 * hidden_size
    if isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0:
        width, rest = divmod(hidden_size, num_heads)
        # Heads of latent attention have widths of their own.
        derived["head_dim"] = None if rest and data.get("latent") is None else width
    derived["ffn_hidden_size"] = derived.get("ffn_hidden_size") or _only_width(data)
    return {key: value for key, value in derived.items() if value is not None}


def _has_fused_qkv(data: Mapping[str, object]) -> bool:
    """Return True if transformers has one linear layer for queries, keys and values."""
    is_rotary, is_decoder = data.get("positions") == "rotary", data.get("causal") is not False
    return (not is_rotary and is_decoder) or data.get("spelling") in FUSED_QKV


def _only_width(data: Mapping[str, object]) -> object:
    """Return the width of experts where all layers have them, so that no MLP gives one."""
    given = data.get("experts")
    experts = given.model_dump(exclude_defaults=True) if isinstance(given, Experts) else given
    if not isinstance(experts, Mapping) or {"first_dense_layers", "layer_step"} & {*experts}:
        return None
    return experts.get("hidden_size")
