"""Whole layers of frameworks, divided by PyTorch's min-cut partitioner: what forward hands over.

Under torch.compile a layer is one graph; `kernels = "compiled"` keeps what that partitioner does.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from test_layers import HEADS, NUM_SEQUENCES, PLANS, with_facts
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten
from witnesses.dense_layers import (
    DenseLayer,
    torchtitan_llama,
    torchtitan_qwen3,
    transformers_gpt2,
    transformers_llama,
)

from meshwright.hwprofiles import Kernels, Precision, load_stack
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.model import TRANSFORMER_LAYER, ModelSpec
from meshwright.validate.programs.megatron import default_dtype
from meshwright.validate.programs.pytorch import autocast

MakeLayer = Callable[[ModelSpec, int, int], DenseLayer]
STATISTICS = 4  # of two layer norms: a mean and a deviation of each token


class Divided(NamedTuple):
    """A layer that torch.compile divides, and the stack that runs it so."""

    make: MakeLayer
    stack: str
    plan: str = "ddp llama"
    facts: dict[str, object] = {}  # noqa: RUF012 - nobody writes to it


def storages(tensors: Sequence[object]) -> dict[int, int]:
    """Return the bytes of the storages of *tensors*, each once."""
    found = (each.untyped_storage() for each in tensors if isinstance(each, Tensor))
    return {each._cdata: each.nbytes() for each in found}


def kept_bytes(layer: DenseLayer, x: Tensor, precision: Precision) -> int:
    """Return what the graph of a layer's forward hands to that of its backward.

    Weights, and angles that all layers share, are there in any case.
    """
    names, weights = zip(*layer.module.named_parameters(), strict=True)
    rest, spec = tree_flatten((layer.arguments, layer.named))
    places = [place for place, each in enumerate(rest) if isinstance(each, Tensor)]
    kept: dict[int, int] = {}

    def run(x: Tensor, *given: Tensor) -> Tensor:
        own = [*rest]
        for place, each in zip(places, given[len(names) :], strict=True):
            own[place] = each
        arguments, named = tree_unflatten(own, spec)
        with autocast(precision, "cpu"):
            values = dict(zip(names, given, strict=False))
            out: Tensor = functional_call(layer.module, values, (x, *arguments), named)
        return out

    def compiler(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        def forward(arguments: list[Tensor]) -> object:
            made = graph(*arguments)
            there = storages(arguments[1:])
            kept.update({key: size for key, size in storages(made[1:]).items() if key not in there})
            return made

        forward._boxed_call = True
        return forward

    aot_function(
        run,
        fw_compiler=compiler,
        bw_compiler=lambda graph, _: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )(x, *weights, *(rest[place] for place in places))
    return sum(kept.values())


CASES = {
    "Llama of torchtitan": Divided(torchtitan_llama, "torchtitan@0.2"),
    "Qwen3 of torchtitan": Divided(torchtitan_qwen3, "torchtitan@0.2", facts=HEADS),
    "Llama of transformers": Divided(transformers_llama, "fsdp"),
    "Llama of transformers under autocast": Divided(transformers_llama, "ddp"),
    "GPT-2 of transformers": Divided(transformers_gpt2, "fsdp", "ddp gpt"),
    "GPT-2 of transformers under autocast": Divided(transformers_gpt2, "ddp", "ddp gpt"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_layer_keeps_what_the_partitioner_keeps(name: str) -> None:
    make, stack, plan_name, facts = CASES[name]
    saved = with_facts(PLANS[plan_name].saved(), facts)
    model, tokens = saved.job.transformer, saved.job.seq_len
    profile = load_stack(stack).model_copy(update={"kernels": Kernels.COMPILED})
    plan = replace(saved.plan, microbatch_size=NUM_SEQUENCES)
    shape = BlockShape.of(saved.job, plan, profile)
    dtype = torch.float32 if profile.autocast else torch.bfloat16
    with FakeTensorMode():
        with default_dtype(dtype):
            layer = make(model, tokens, NUM_SEQUENCES)
        sizes = NUM_SEQUENCES, tokens, model.hidden_size
        x = torch.empty(sizes, dtype=dtype, requires_grad=True)
        counted = kept_bytes(layer, x, Precision.BF16 if profile.autocast else Precision.FP32)
    if model.norm == "layernorm" and not profile.autocast:
        # Of tokens in 16 bits a CPU has statistics in 16 bits, a GPU in 32.
        counted += STATISTICS * NUM_SEQUENCES * tokens * dtype.itemsize
    assert BlockTable().memory(shape, TRANSFORMER_LAYER).saved == counted
