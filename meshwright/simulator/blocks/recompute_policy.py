"""Which products of a layer selective recomputation per operator keeps: torchtitan's policy.

torchtitan's ``selective_ac_option = "op"`` (torchtitan/parallelisms/parallelize_llama.py, commit
6b03ffa of 2024-12-26) keeps what the operators of a list give out: attention, what is
reduce-scattered, and products but for every second one, counted through the layer.  All else
runs again, gathers and all-reduces too, up to the last tensor that backward reads.  The list has
``aten.mm`` alone: PyTorch runs a product with a bias as ``addmm``, so that always runs again.
torchao adds the bias of an fp8 product afterwards (torchao/float8/float8_linear.py, commit
eab345c of 2024-12-20).
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.simulator.model import ModelSpec


class LayerProduct(NamedTuple):
    """A linear product ``[tokens, inputs] x [inputs, outputs]``, and whether its output is kept."""

    name: str
    inputs: int
    outputs: int
    is_kept: bool


def layer_products(
    model: ModelSpec, *, tp: int = 1, is_fp8: bool = False
) -> tuple[LayerProduct, ...]:
    """Return the linear products of a layer on one rank, in the order in which they run.

    Args:
        model: Whose layer.
        tp: Ranks that share it.
        is_fp8: Whether they multiply in 8 bits.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> [each.name for each in layer_products(load_model("llama3-8b")) if each.is_kept]
    ['queries', 'values', 'mlp gate', 'mlp out']
    >>> [each.name for each in layer_products(load_model("gpt2")) if each.is_kept]
    []
    """
    products = []
    num_listed = 0
    for name, inputs, outputs, is_biased in _sizes(model, tp):
        is_listed = is_fp8 or not is_biased
        num_listed += is_listed
        is_kept = is_listed and num_listed % 2 == 1
        products.append(LayerProduct(name, inputs, outputs, is_kept))
    return tuple(products)


def _sizes(model: ModelSpec, tp: int) -> Iterator[tuple[str, int, int, bool]]:
    hidden, width, ffn = model.hidden_size, model.hidden_size // tp, model.ffn_hidden_size // tp
    kv_width = max(1, model.num_kv_heads // tp) * model.head_dim
    yield "queries", hidden, width, model.attention_bias
    yield "keys", hidden, kv_width, model.attention_bias
    yield "values", hidden, kv_width, model.attention_bias
    yield "attention output", width, hidden, model.output_bias
    if model.gated_mlp:
        yield "mlp gate", hidden, ffn, model.mlp_bias
    yield "mlp in", hidden, ffn, model.mlp_bias
    yield "mlp out", ffn, hidden, model.mlp_bias


def repeated_products(
    model: ModelSpec, *, tp: int = 1, is_fp8: bool = False
) -> tuple[LayerProduct, ...]:
    """Return the products that run again before a layer's backward; arguments as above.

    The last one gives nothing that backward reads, unless dropout behind it has a mask.

    >>> from meshwright.simulator.model.catalogue import load_model
    >>> [each.name for each in repeated_products(load_model("llama3-8b"))]
    ['keys', 'attention output', 'mlp in']
    """
    products = layer_products(model, tp=tp, is_fp8=is_fp8)
    reached = products if model.dropout else products[:-1]
    return tuple(each for each in reached if not each.is_kept)
