"""Fused kernels against PyTorch's own operators: values, gradients, FLOPs, sizes, bytes kept."""

from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from meshwright.validate.counting.fake_cluster import fake_cluster  # noqa: E402
from meshwright.validate.counting.oracle import RankOracle  # noqa: E402
from meshwright.validate.programs.experts.activations import (  # noqa: E402
    ClampedSwiglu,
    WeighedQuickGeglu,
)
from meshwright.validate.programs.fused import (  # noqa: E402
    BiasDropoutAdd,
    CausalSoftmax,
    FusedAttention,
    PackedSwiglu,
    RmsNorm,
    Rotary,
    Scores,
    Swiglu,
    UnweightedRmsNorm,
    accumulate_weight_gradient,
)

TOKENS, BATCH, HEADS, GROUPS, HEAD_WIDTH = 6, 2, 4, 2, 8
CAUSAL = True
BENT = Scores(CAUSAL), Scores(CAUSAL, 3), Scores(CAUSAL, 3, 0.5), Scores(not CAUSAL, 0, 0.5)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, requires_grad=True)


def assert_alike(got: Tensor, wanted: Tensor, leaves: Sequence[Tensor]) -> None:
    torch.testing.assert_close(got, wanted, atol=2e-6, rtol=1e-5)
    incoming = leaf(*wanted.shape, seed=7).detach()
    gradients = torch.autograd.grad(got, leaves, incoming)
    for gradient, true in zip(
        gradients, torch.autograd.grad(wanted, leaves, incoming), strict=True
    ):
        torch.testing.assert_close(gradient, true, atol=1e-5, rtol=1e-5)


def attention_inputs(seq_dim: int, groups: int = GROUPS) -> tuple[Tensor, Tensor, Tensor]:
    outer = (TOKENS, BATCH) if seq_dim == 0 else (BATCH, TOKENS)
    return (
        leaf(*outer, HEADS, HEAD_WIDTH),
        leaf(*outer, groups, HEAD_WIDTH, seed=1),
        leaf(*outer, groups, HEAD_WIDTH, seed=2),
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("groups", [1, GROUPS, HEADS])
def test_flash_attention_is_attention(seq_dim: int, groups: int, *, causal: bool) -> None:
    query, key, value = attention_inputs(seq_dim, groups)
    order = (1, 2, 0, 3) if seq_dim == 0 else (0, 2, 1, 3)
    back = (2, 0, 1, 3) if seq_dim == 0 else (0, 2, 1, 3)
    wanted = F.scaled_dot_product_attention(
        query.permute(order),
        *(each.permute(order).repeat_interleave(HEADS // groups, 1) for each in (key, value)),
        is_causal=causal,
    ).permute(back)
    got = FusedAttention.apply(seq_dim, Scores(causal), query, key, value)
    assert_alike(got, wanted, [query, key, value])


@pytest.mark.parametrize("window", [1, 3, TOKENS])
def test_windows_hide_what_lies_before_them(window: int) -> None:
    query, key, value = attention_inputs(1, HEADS)
    by_heads = (each.transpose(1, 2) for each in (query, key, value))
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(1 - window)
    wanted = F.scaled_dot_product_attention(*by_heads, attn_mask=seen).transpose(1, 2)
    got = FusedAttention.apply(1, Scores(CAUSAL, window), query, key, value)
    assert_alike(got, wanted, [query, key, value])
    scores = leaf(3, TOKENS, TOKENS)
    hidden = scores.masked_fill(~seen, float("-inf"))
    assert_alike(
        CausalSoftmax.apply(scores, 0.5, CAUSAL, window), torch.softmax(0.5 * hidden, -1), [scores]
    )


@pytest.mark.parametrize("seq_dim", [0, 1])
@pytest.mark.parametrize("scores", BENT)
@pytest.mark.parametrize("num_sinks", [0, HEADS])
def test_scores_are_bounded_and_share_rows_with_sinks(
    seq_dim: int, scores: Scores, num_sinks: int
) -> None:
    query, key, value = attention_inputs(seq_dim)
    sinks = [leaf(num_sinks, seed=3)] if num_sinks else []
    order, back = ((1, 2, 0, 3), (2, 0, 1, 3)) if seq_dim == 0 else ((0, 2, 1, 3),) * 2
    q, k, v = (each.permute(order) for each in (query, key, value))
    k, v = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (k, v))
    columns = q @ k.transpose(2, 3) / HEAD_WIDTH**0.5
    if scores.softcap:
        columns = torch.tanh(columns / scores.softcap) * scores.softcap
    if scores.causal:
        seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        seen = seen.triu(1 - (scores.window or TOKENS))
        columns = columns.masked_fill(~seen, float("-inf"))
    beside = [each.view(1, -1, 1, 1).expand(BATCH, -1, TOKENS, 1) for each in sinks]
    shares = torch.softmax(torch.cat([columns, *beside], -1), -1)[..., :TOKENS]
    got = FusedAttention.apply(seq_dim, scores, query, key, value, *sinks)
    assert_alike(got, (shares @ v).permute(back), [query, key, value, *sinks])


def test_flash_attention_takes_views_of_a_packed_projection() -> None:
    packed = leaf(TOKENS, BATCH, HEADS, 3, HEAD_WIDTH)
    query, key, value = packed.unbind(3)
    whole = [each.contiguous() for each in (query, key, value)]
    got = FusedAttention.apply(0, Scores(CAUSAL), query, key, value)
    assert_alike(got, FusedAttention.apply(0, Scores(CAUSAL), *whole), [packed])


def test_flash_attention_counts_two_products_forward_and_five_backward() -> None:
    query, key, value = attention_inputs(0)
    counter = FlopCounterMode(display=False)
    product = 2 * BATCH * HEADS * TOKENS * TOKENS * HEAD_WIDTH  # the whole square, not half of it
    with counter:
        out = FusedAttention.apply(0, Scores(CAUSAL), query, key, value)
        assert counter.get_total_flops() == 2 * product
        out.sum().backward()
    assert counter.get_total_flops() == 7 * product


@pytest.mark.parametrize("causal", [True, False])
def test_causal_softmax_is_softmax_of_masked_scores(*, causal: bool) -> None:
    scores = leaf(3, TOKENS, TOKENS)
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1) if causal else 0
    assert_alike(
        CausalSoftmax.apply(scores, 0.5, causal), torch.softmax(0.5 * scores + mask, -1), [scores]
    )


def test_rms_norm_is_rms_norm() -> None:
    values, weight = leaf(3, 4, 8), leaf(8)
    wanted = F.rms_norm(values, (8,), weight, 1e-5)
    assert_alike(RmsNorm.apply(values, weight, 1e-5), wanted, [values, weight])


def test_unweighted_norms_are_rms_norms_with_weights_of_one() -> None:
    values = leaf(3, 4, 8)
    wanted = F.rms_norm(values, (8,), None, 1e-5)
    assert_alike(UnweightedRmsNorm.apply(values, 1e-5), wanted, [values])


def test_both_gated_activations_are_silu_times_value() -> None:
    gate, value = leaf(3, 8), leaf(3, 8, seed=1)
    wanted = F.silu(gate) * value
    assert_alike(Swiglu.apply(gate, value), wanted, [gate, value])
    packed = torch.cat([gate, value], -1)
    assert_alike(PackedSwiglu.apply(packed), F.silu(gate) * value, [gate, value])


def test_the_activation_of_gpt_oss_bounds_gate_and_value_and_adds_one() -> None:
    """As GptOssExperts of transformers 5.23 writes it."""

    def wanted(gate: Tensor, value: Tensor) -> Tensor:
        return (value + 1) * (gate * torch.sigmoid(gate * 1.702))

    far, weights = (8 * leaf(TOKENS, 16)).detach().requires_grad_(), leaf(TOKENS, seed=1)
    gate, value = far.chunk(2, dim=-1)
    gate, value = gate.clamp(max=7), value.clamp(-7, 7)
    assert (gate == 7).any()
    assert (value.abs() == 7).any()
    assert_alike(ClampedSwiglu.apply(far), wanted(gate, value), [far])
    near = leaf(TOKENS, 16)
    got = WeighedQuickGeglu.apply(near, weights)
    whole = wanted(*near.chunk(2, dim=-1)) * weights.unsqueeze(-1)
    assert_alike(got, whole, [near, weights])


@pytest.mark.parametrize("seq_dim", [0, 1])
def test_rotary_turns_pairs_by_position_times_frequency(seq_dim: int) -> None:
    shape = (TOKENS, BATCH) if seq_dim == 0 else (BATCH, TOKENS)
    values = leaf(*shape, HEADS, HEAD_WIDTH)
    half = HEAD_WIDTH // 2
    angle = torch.arange(TOKENS)[:, None] * 100.0 ** -(torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angle), angle)
    turn = turn.view((TOKENS, 1, 1, half) if seq_dim == 0 else (1, TOKENS, 1, half))
    turned = torch.complex(values[..., :half], values[..., half:]) * turn
    wanted = torch.cat([turned.real, turned.imag], -1)
    assert_alike(Rotary.apply(values, seq_dim, 100.0, (0,), values.shape[-1]), wanted, [values])


@pytest.mark.parametrize("has_bias", [True, False])
def test_bias_dropout_add_without_dropout_adds(*, has_bias: bool) -> None:
    values, residual = leaf(3, 4, 8), leaf(3, 4, 8, seed=1)
    bias = leaf(8) if has_bias else None
    leaves = [values, residual, *([] if bias is None else [bias])]
    wanted = residual + values + (0 if bias is None else bias)
    assert_alike(BiasDropoutAdd.apply(values, bias, residual, 0.0), wanted, leaves)


def test_bias_dropout_add_drops_and_scales_the_branch_alone() -> None:
    values, bias = torch.full((64, 4, 64), 2.0, requires_grad=True), leaf(64)
    residual = torch.zeros(64, 4, 64, requires_grad=True)
    out = BiasDropoutAdd.apply(values, bias, residual, 0.25)
    stays = out != 0
    torch.testing.assert_close(out, stays * (values + bias) / 0.75)
    assert stays.float().mean().item() == pytest.approx(0.75, abs=0.02)
    out.sum().backward()
    torch.testing.assert_close(values.grad, stays / 0.75)
    torch.testing.assert_close(bias.grad, (stays / 0.75).sum((0, 1)))
    torch.testing.assert_close(residual.grad, torch.ones_like(residual))


def test_weight_gradients_accumulate_in_the_precision_of_the_buffer() -> None:
    buffer = torch.ones(4, 8)
    inputs, gradient = torch.randn(10, 8).bfloat16(), torch.randn(10, 4).bfloat16()
    counter = FlopCounterMode(display=False)
    with counter:
        accumulate_weight_gradient(buffer, inputs, gradient)
    torch.testing.assert_close(buffer, 1 + gradient.float().T @ inputs.float())
    assert counter.get_total_flops() == 2 * 4 * 8 * 10


def kept_bytes_of(dtype: torch.dtype) -> dict[str, int]:
    """Return what each kernel keeps for its backward beside its output, inputs included."""
    shape = (TOKENS, BATCH, HEADS, HEAD_WIDTH)

    def new(*sizes: int) -> Tensor:
        return torch.ones(sizes, dtype=dtype, requires_grad=True)

    runs = {
        "flash": lambda: FusedAttention.apply(
            0, Scores(CAUSAL), new(*shape), new(*shape), new(*shape)
        ),
        "softmax": lambda: CausalSoftmax.apply(new(3, TOKENS, TOKENS), 1.0, CAUSAL),
        "rms": lambda: RmsNorm.apply(new(TOKENS, BATCH, 64), new(64), 1e-5),
        "rotary": lambda: Rotary.apply(new(*shape), 0, 1e4, (0,), shape[-1]),
        "swiglu": lambda: Swiglu.apply(new(TOKENS, 64), new(TOKENS, 64)),
        "packed": lambda: PackedSwiglu.apply(new(TOKENS, 64)),
        "clamped": lambda: ClampedSwiglu.apply(new(TOKENS, 64)),
        "weighed": lambda: WeighedQuickGeglu.apply(new(TOKENS, 64), new(TOKENS)),
        "added": lambda: BiasDropoutAdd.apply(new(2, 3, 64), new(64), new(2, 3, 64), 0.1),
        "added without dropout": lambda: BiasDropoutAdd.apply(
            new(2, 3, 64), None, new(2, 3, 64), 0.0
        ),
    }
    kept = {}
    for name, run in runs.items():
        oracle = RankOracle({})
        with oracle:
            out = run()
            leaves = [node.variable for node, _ in out.grad_fn.next_functions if node is not None]
            held = sum(each.nbytes for each in leaves)  # by the graph, needed or not
            kept[name] = oracle.live_bytes - out.nbytes - held
            out.sum().backward()
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_keep_and_make_the_same_with_and_without_data(dtype: torch.dtype) -> None:
    real = kept_bytes_of(dtype)
    with fake_cluster(0, 1):
        assert kept_bytes_of(dtype) == real
    statistic = 4 * TOKENS * BATCH
    mask = 2 * 3 * 64  # one byte an element
    assert real == {
        "flash": statistic * HEADS,
        "softmax": 0,
        "rms": statistic,
        "rotary": 0,
        "swiglu": 0,
        "packed": 0,
        "clamped": 0,
        "weighed": 0,
        "added": mask,
        "added without dropout": 0,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_kernels_stay_near_fp32(dtype: torch.dtype) -> None:
    query, key, value = attention_inputs(0)
    narrow = [each.detach().to(dtype).requires_grad_() for each in (query, key, value)]
    wanted = FusedAttention.apply(0, Scores(CAUSAL), query, key, value)
    got = FusedAttention.apply(0, Scores(CAUSAL), *narrow)
    torch.testing.assert_close(got.float(), wanted, atol=0.05, rtol=0.05)
    got.sum().backward()
    wanted.sum().backward()
    for low, high in zip(narrow, (query, key, value), strict=True):
        assert low.grad.dtype is dtype
        torch.testing.assert_close(low.grad.float(), high.grad, atol=0.1, rtol=0.05)
