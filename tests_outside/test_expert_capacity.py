"""Rows that experts with a capacity take, as Megatron-Core's own functions have them."""

from fractions import Fraction

import pytest
import torch
from witnesses import megatron_job

from meshwright.simulator.blocks.parts.routed_dims import ExpertMesh

from megatron.core.transformer.moe.moe_utils import (  # isort: skip  (after what stands for Apex)
    apply_router_token_dropping,
    get_capacity,
)


@pytest.mark.parametrize("factor", ["1", "1.25", "0.7", "3/2"])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(4096, 128, 8), (1000, 7, 3), (5, 4, 2)])
def test_experts_take_as_many_rows_as_get_capacity_says(
    factor: str, tokens: int, experts: int, chosen: int
) -> None:
    rows = tokens * chosen
    taken = ExpertMesh(capacity=Fraction(factor)).rows_taken(rows, experts)
    assert taken == experts * get_capacity(rows, experts, float(Fraction(factor)))


def test_what_drops_tokens_keeps_a_mask_for_backward() -> None:
    tokens, experts, chosen = 64, 8, 2
    assert megatron_job
    shares = torch.rand(tokens, experts, requires_grad=True)
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        left, _ = apply_router_token_dropping(
            shares, shares > 0.5, chosen, 1.0, pad_to_capacity=True
        )
    assert left.shape == shares.shape
    # topk keeps its numbers, too, until its values, which nobody reads, are gone.
    mask = kept[-1]
    assert (mask.shape, mask.dtype) == (shares.shape, torch.bool)
    assert int(mask.sum()) == ExpertMesh(capacity=Fraction(1)).rows_taken(128, experts)
