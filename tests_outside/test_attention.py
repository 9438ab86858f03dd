"""Attention of the programs against transformers': values, and gradients of all that it takes."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

from meshwright.hwprofiles import Attention, Recompute
from meshwright.simulator import ModelSpec
from meshwright.validate.programs.layers import AttentionCore, LayerOptions
from meshwright.validate.programs.layers.pointwise import NORM_EPSILON, UnweightedNorm

BATCH, TOKENS, HEADS, GROUPS, WIDTH, CAP = 2, 12, 4, 2, 8, 0.5
BATCH_FIRST = 1
MODEL = ModelSpec(
    name="wide heads",
    num_layers=1,
    hidden_size=HEADS * WIDTH,
    num_heads=HEADS,
    num_kv_heads=GROUPS,
    vocab_size=64,
    seq_len=TOKENS,
)
SINKS = MODEL.model_copy(update={"attention_sinks": True})
CAPPED = MODEL.model_copy(update={"attention_softcap": CAP})
FLASH, SCORES = Attention.FLASH, Attention.UNFUSED


def hidden_beyond(window: int) -> Tensor:
    """Return what transformers adds to scores of causal attention to a window, 0 for all."""
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(1 - (window or TOKENS))
    return torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~seen, float("-inf"))


def attended(core: AttentionCore, given: tuple[Tensor, ...], window: int) -> Tensor:
    """Return what transformers makes of queries, keys and values, with heads first."""
    of_gpt_oss = core.sinks is not None
    code = modeling_gpt_oss if of_gpt_oss else modeling_gemma2
    facts = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=core.sinks, training=True)
    by_heads = (each.transpose(1, 2) for each in given)
    more = {} if of_gpt_oss else {"softcap": CAP}
    how = cast("nn.Module", facts), *by_heads, hidden_beyond(window)
    out: Tensor = code.eager_attention_forward(*how, scaling=WIDTH**-0.5, **more)[0]
    return out


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("model", "kernel"), [(SINKS, FLASH), (SINKS, SCORES), (CAPPED, FLASH)])
def test_sinks_and_caps_are_those_of_transformers(
    model: ModelSpec, kernel: Attention, window: int
) -> None:
    options = LayerOptions(attention=kernel, recompute=Recompute.NONE, dropout=0.0)
    torch.manual_seed(0)
    core = AttentionCore(model, options, BATCH_FIRST, window)
    for each in core.parameters():
        nn.init.normal_(each)
    shapes = (BATCH, TOKENS, HEADS, WIDTH), *((BATCH, TOKENS, GROUPS, WIDTH),) * 2
    given = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    found, wanted = core(*given), attended(core, given, window)
    torch.testing.assert_close(found, wanted)
    leaves, incoming = [*given, *core.parameters()], torch.randn_like(wanted)
    slopes = [torch.autograd.grad(each, leaves, incoming) for each in (found, wanted)]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)  # fp32, sums in other orders


def test_norms_without_weights_are_those_of_llama_4() -> None:
    values = torch.randn(3, 4, WIDTH)
    wanted = Llama4TextL2Norm(NORM_EPSILON)(values)
    torch.testing.assert_close(UnweightedNorm()(values), wanted)
