"""The placement algebra against NumPy emulations of what the ranks of one mesh axis hold and send.

All tensors are integers, so every comparison is exact.
"""

from fractions import Fraction
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import CollectiveOp, LossKernel
from meshwright.simulator.errors import PlanError
from meshwright.simulator.graph import (
    PARTIAL,
    Backward,
    Block,
    Dim,
    Lowering,
    Phase,
    Tape,
    Transfer,
    WeightGradients,
    columns,
    row,
)
from meshwright.simulator.layout import Axis
from meshwright.simulator.layout.placement import (
    MatmulSignature,
    Partial,
    Placement,
    Redistribution,
    Replicate,
    Split,
    dual,
    local_shape,
    matmul_signatures,
    redistribute,
    zero_communication,
)

Tensor = npt.NDArray[np.int64]
Parts = list[Tensor]  # what each rank of the axis holds

PLACEMENTS: tuple[Placement, ...] = (Split(0), Split(1), Replicate(), Partial())
CHANGES = [(source, target) for source, target in product(PLACEMENTS, repeat=2) if source != target]
RELAXED = settings(deadline=None, max_examples=30)  # shared machines stall now and then
NUM_RANKS = st.integers(2, 4)
MULTIPLES = st.tuples(*[st.integers(1, 3)] * 3)
SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(1, 10**12)
WORLD_SIZES = st.integers(1, 10**4)


def random_tensor(rng: np.random.Generator, *shape: int) -> Tensor:
    return rng.integers(-9, 10, shape)


def scatter(
    tensor: Tensor, placement: Placement, num_ranks: int, rng: np.random.Generator
) -> Parts:
    match placement:
        case Split(dim):
            return np.split(tensor, num_ranks, axis=dim)
        case Replicate():
            return [tensor.copy() for _ in range(num_ranks)]
        case Partial():
            summands = [random_tensor(rng, *tensor.shape) for _ in range(num_ranks - 1)]
            return [tensor - sum(summands, start=np.zeros_like(tensor)), *summands]


class ReplicasDifferError(AssertionError):
    pass


def assemble(parts: Parts, placement: Placement) -> Tensor:
    """Return the tensor the ranks hold together."""
    match placement:
        case Split(dim):
            return np.concatenate(parts, axis=dim)
        case Replicate():
            if not all(np.array_equal(one, other) for one, other in pairwise(parts)):
                raise ReplicasDifferError
            return parts[0]
        case Partial():
            return sum(parts, start=np.zeros_like(parts[0]))


class WireBytes:
    """Carries tensors between ranks and counts what each of them sends."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.sent_bytes = [0] * num_ranks

    def send(self, tensor: Tensor, *, source: int) -> Tensor:
        self.sent_bytes[source] += tensor.nbytes
        return tensor.copy()

    def ring_reduce_scatter(self, parts: Parts, dim: int) -> Parts:
        n = self.num_ranks
        chunks = [[c.copy() for c in np.split(part, n, axis=dim)] for part in parts]
        for step in range(1, n):  # the chunk meant for rank c starts at rank c + 1
            moving = [(r, (r - step) % n) for r in range(n)]
            arriving = [(r, c, self.send(chunks[r][c], source=r)) for r, c in moving]
            for r, c, chunk in arriving:
                chunks[(r + 1) % n][c] += chunk
        return [chunks[r][r] for r in range(n)]

    def ring_all_gather(self, parts: Parts, dim: int) -> Parts:
        n = self.num_ranks
        have = [{r: parts[r]} for r in range(n)]
        for step in range(n - 1):
            moving = [(r, (r - step) % n) for r in range(n)]
            arriving = [(r, c, self.send(have[r][c], source=r)) for r, c in moving]
            for r, c, chunk in arriving:
                have[(r + 1) % n][c] = chunk
        return [np.concatenate([have[r][c] for c in range(n)], axis=dim) for r in range(n)]

    def direct_all_to_all(self, parts: Parts, *, split_dim: int, join_dim: int) -> Parts:
        n = self.num_ranks
        blocks = [np.split(part, n, axis=split_dim) for part in parts]
        received = [
            [blocks[s][r] if s == r else self.send(blocks[s][r], source=s) for s in range(n)]
            for r in range(n)
        ]
        return [np.concatenate(row, axis=join_dim) for row in received]

    def change(self, parts: Parts, change: Redistribution | None) -> Parts:
        if change is None:
            return parts
        match change.op, change.source, change.target:
            case CollectiveOp.ALL_REDUCE, Partial(), Replicate():
                return self.ring_all_gather(self.ring_reduce_scatter(parts, 0), 0)
            case CollectiveOp.REDUCE_SCATTER, Partial(), Split(dim):
                return self.ring_reduce_scatter(parts, dim)
            case CollectiveOp.ALL_GATHER, Split(dim), Replicate():
                return self.ring_all_gather(parts, dim)
            case CollectiveOp.ALL_TO_ALL, Split(dim), Split(other):
                return self.direct_all_to_all(parts, split_dim=other, join_dim=dim)
            case None, _, _:
                return self.change_locally(parts, change.source, change.target)
            case _:
                raise AssertionError(change)

    def change_locally(self, parts: Parts, source: Placement, target: Placement) -> Parts:
        n = self.num_ranks
        match source, target:
            case Replicate(), Split(dim):
                return [np.split(part, n, axis=dim)[r] for r, part in enumerate(parts)]
            case Replicate(), Partial():
                return [part if r == 0 else np.zeros_like(part) for r, part in enumerate(parts)]
            case Split(dim), Partial():
                zeros = [np.zeros_like(part) for part in parts]
                rows = [[*zeros[:r], part, *zeros[r + 1 :]] for r, part in enumerate(parts)]
                return [np.concatenate(row, axis=dim) for row in rows]
            case _:
                raise AssertionError((source, target))


# --- placements -------------------------------------------------------------------------------


def test_placements_are_values_with_a_short_repr() -> None:
    assert repr((Split(0), Split(1), Replicate(), Partial())) == "(S(0), S(1), R, P)"
    assert len({Split(0), Split(0), Split(1), Replicate(), Replicate(), Partial()}) == 4
    with pytest.raises(ValueError, match="dim must be >= 0, got -1"):
        Split(-1)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_gradient_of_a_gradient_lies_like_the_tensor(placement: Placement) -> None:
    assert dual(dual(placement)) == placement


@RELAXED
@given(num_ranks=WORLD_SIZES, rows=st.integers(1, 99), columns=st.integers(1, 99))
def test_a_split_divides_one_dim_and_the_other_placements_none(
    num_ranks: int, rows: int, columns: int
) -> None:
    shape = (rows * num_ranks, columns)
    assert local_shape(shape, Split(0), num_ranks=num_ranks) == (rows, columns)
    assert local_shape(shape, Replicate(), num_ranks=num_ranks) == shape
    assert local_shape(shape, Partial(), num_ranks=num_ranks) == shape


@pytest.mark.parametrize(
    ("shape", "placement", "num_ranks", "message"),
    [
        ((4, 5), Split(2), 2, "placement S(2) needs a dim 2; shape (4, 5) has 2"),
        ((4, 5), Split(1), 3, "dim 1 of shape (4, 5) is not divisible by num_ranks=3; nearest: 1"),
        ((4, 5), Split(1), 2, "dim 1 of shape (4, 5) is not divisible by num_ranks=2; nearest: 1"),
        ((12,), Split(0), 5, "dim 0 of shape (12,) is not divisible by num_ranks=5; nearest: 4"),
        ((12,), Split(0), 11, "dim 0 of shape (12,) is not divisible by num_ranks=11; nearest: 12"),
        ((12,), Split(0), 99, "dim 0 of shape (12,) is not divisible by num_ranks=99; nearest: 12"),
        ((4, 5), Replicate(), 0, "num_ranks must be >= 1, got 0"),
    ],
)
def test_an_impossible_placement_is_refused_with_one_line(
    shape: tuple[int, ...], placement: Placement, num_ranks: int, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        local_shape(shape, placement, num_ranks=num_ranks)
    assert str(caught.value) == message


# --- redistributions --------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_staying_in_place_is_no_redistribution(placement: Placement) -> None:
    assert redistribute(placement, placement) is None


@pytest.mark.parametrize(("source", "target"), CHANGES)
@RELAXED
@given(num_ranks=NUM_RANKS, multiples=MULTIPLES, seed=SEEDS)
def test_a_redistribution_keeps_the_tensor_and_sends_the_bytes_it_says(
    source: Placement, target: Placement, num_ranks: int, multiples: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tensor = random_tensor(rng, *(num_ranks * size for size in multiples))
    change = redistribute(source, target)
    assert change is not None
    wire = WireBytes(num_ranks)
    before = scatter(tensor, source, num_ranks, rng)
    after = wire.change(before, change)
    assert np.array_equal(assemble(after, target), tensor)
    expected_shape = local_shape(tensor.shape, target, num_ranks=num_ranks)
    assert [part.shape for part in after] == [expected_shape] * num_ranks
    assert wire.sent_bytes == [change.sent_bytes(tensor.nbytes, num_ranks)] * num_ranks
    larger_bytes = max(before[0].nbytes, after[0].nbytes)
    assert change.buffer_bytes(tensor.nbytes, num_ranks) == larger_bytes


@RELAXED
@given(size_bytes=SIZES, num_ranks=WORLD_SIZES)
def test_an_all_reduce_sends_what_a_reduce_scatter_and_an_all_gather_send(
    size_bytes: int, num_ranks: int
) -> None:
    all_reduce, reduce_scatter, all_gather = (
        redistribute(Partial(), Replicate()),
        redistribute(Partial(), Split(0)),
        redistribute(Split(0), Replicate()),
    )
    assert all_reduce is not None
    assert reduce_scatter is not None
    assert all_gather is not None
    sent_bytes = all_reduce.sent_bytes(size_bytes, num_ranks)
    assert sent_bytes == Fraction(2 * (num_ranks - 1) * size_bytes, num_ranks)
    assert sent_bytes == reduce_scatter.sent_bytes(size_bytes, num_ranks) + all_gather.sent_bytes(
        size_bytes, num_ranks
    )


@pytest.mark.parametrize(("source", "target"), CHANGES)
@RELAXED
@given(size_bytes=SIZES, num_ranks=WORLD_SIZES)
def test_backward_of_a_redistribution_sends_as_much_as_forward(
    source: Placement, target: Placement, size_bytes: int, num_ranks: int
) -> None:
    # The adjoint of a linear map that moves data moves as much of it the other way. From R to P
    # and from P to R are their own adjoints under dual().
    forward, backward = redistribute(source, target), redistribute(dual(target), dual(source))
    assert forward is not None
    assert backward is not None
    sent_bytes = forward.sent_bytes(size_bytes, num_ranks)
    assert backward.sent_bytes(size_bytes, num_ranks) == sent_bytes


@pytest.mark.parametrize(("source", "target"), CHANGES)
def test_one_rank_sends_nothing_and_no_rank_is_an_error(
    source: Placement, target: Placement
) -> None:
    change = redistribute(source, target)
    assert change is not None
    assert change.sent_bytes(1000, 1) == 0
    with pytest.raises(PlanError, match=r"^num_ranks must be >= 1, got 0$"):
        change.sent_bytes(1000, 0)


# --- matmul -----------------------------------------------------------------------------------


def computes_the_product(signature: MatmulSignature, num_ranks: int, *sizes: int) -> bool:
    """Say whether local products, put together by the out placement, are the global one."""
    rng = np.random.default_rng(sum(sizes))
    m, k, n = sizes
    a, b = random_tensor(rng, m, k), random_tensor(rng, k, n)
    a_parts = scatter(a, signature.a, num_ranks, rng)
    b_parts = scatter(b, signature.b, num_ranks, rng)
    if a_parts[0].shape[1] != b_parts[0].shape[0]:
        return False
    out_parts = [x @ y for x, y in zip(a_parts, b_parts, strict=True)]
    try:
        return np.array_equal(assemble(out_parts, signature.out), a @ b)
    except ReplicasDifferError:
        return False


@pytest.mark.parametrize("signature", matmul_signatures())
@RELAXED
@given(num_ranks=NUM_RANKS, multiples=MULTIPLES)
def test_each_signature_computes_the_matmul_without_communication(
    signature: MatmulSignature, num_ranks: int, multiples: tuple[int, ...]
) -> None:
    assert computes_the_product(signature, num_ranks, *(num_ranks * size for size in multiples))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_no_other_signature_computes_the_matmul(num_ranks: int) -> None:
    every = [MatmulSignature(*placements) for placements in product(PLACEMENTS, repeat=3)]
    sizes = 2 * num_ranks, 3 * num_ranks, 5 * num_ranks
    legal = {each for each in every if computes_the_product(each, num_ranks, *sizes)}
    assert legal == set(matmul_signatures())
    assert len(matmul_signatures()) == 6


@pytest.mark.parametrize("signature", matmul_signatures())
def test_the_gradients_of_a_signature_are_signatures_and_lie_in_the_dual(
    signature: MatmulSignature,
) -> None:
    def transposed(placement: Placement) -> Placement:
        return Split(1 - placement.dim) if isinstance(placement, Split) else placement

    a, b, gradient = signature.a, signature.b, dual(signature.out)
    assert MatmulSignature(gradient, transposed(b), dual(a)) in matmul_signatures()  # dA = dC B^T
    assert MatmulSignature(transposed(a), gradient, dual(b)) in matmul_signatures()  # dB = A^T dC


def test_the_textbook_4x5_by_5x8_matmul_on_two_devices() -> None:
    data_parallel, model_parallel, contraction = matmul_signatures()[:3]
    assert local_shape((4, 5), data_parallel.a, num_ranks=2) == (2, 5)
    assert local_shape((4, 8), data_parallel.out, num_ranks=2) == (2, 8)
    assert local_shape((5, 8), model_parallel.b, num_ranks=2) == (5, 4)
    assert local_shape((4, 8), model_parallel.out, num_ranks=2) == (4, 4)
    assert local_shape((4, 8), contraction.out, num_ranks=2) == (4, 8)
    with pytest.raises(PlanError, match="dim 0 of shape"):  # 5 is odd
        local_shape((5, 8), contraction.b, num_ranks=2)
    change = redistribute(contraction.out, Replicate())
    assert change is not None
    assert change.sent_bytes(4 * 8 * 4, 2) == 128  # fp32, all_reduce: the whole matrix once


# --- layers -----------------------------------------------------------------------------------


class PairCommunication(NamedTuple):
    """What a column-parallel and a row-parallel product behind it communicate; None where free."""

    forward_in: Redistribution | None = None
    forward_out: Redistribution | None = None
    backward_out: Redistribution | None = None
    backward_in: Redistribution | None = None
    weight_gradient_regather: Redistribution | None = None


MEGATRON = Lowering(
    fuses_products=True,
    fuses_gate=True,
    fuses_redistribute=True,
    fuses_residual=True,
    saves_first=False,
    weight_gradients=WeightGradients.FUSED,
    loss=LossKernel.FUSED,
)


def walked_pair(activations: Placement) -> PairCommunication:
    """Return what the layer graph derives for a pair of products between *activations*."""
    tokens, hidden, ffn = Dim("tokens", 8), Dim("hidden", 8), Dim("ffn", 8)
    dims = {Split(0): tokens, Split(1): hidden, Partial(): PARTIAL}
    outside = {Axis.TP: dims[activations]} if activations in dims else {}
    moves = {
        CollectiveOp.ALL_GATHER: redistribute(activations, Replicate()),
        CollectiveOp.REDUCE_SCATTER: redistribute(Partial(), activations),
        CollectiveOp.ALL_REDUCE: redistribute(Partial(), Replicate()),
    }
    block = Block({Axis.TP: 2}, MEGATRON)
    x = block.tensor("x", tokens, hidden, at=outside)
    (inner,) = columns(block, x, ffn)
    row(block, inner, hidden, "out", outside)
    tape = Tape(block)
    tape.run_forward(x)
    Backward(tape, WeightGradients.FUSED).run()
    first = block.operators[0]
    found: dict[str, Redistribution | None] = {}
    for phase, operator, work in tape.steps:
        if not isinstance(work, Transfer):
            continue
        if phase is Phase.FORWARD:
            name = "forward_in" if operator is first else "forward_out"
        elif operator is not first:
            name = "backward_out"
        else:
            gathers = work.op is CollectiveOp.ALL_GATHER
            name = "weight_gradient_regather" if gathers else "backward_in"
        assert name not in found
        found[name] = moves[work.op]
    return PairCommunication(**found)


def ops(*changes: Redistribution | None) -> list[str]:
    return [change.op.value for change in changes if change is not None and change.op is not None]


def layer_ops(pair: PairCommunication) -> tuple[list[str], list[str]]:
    """Return the collectives of a transformer layer: its attention and its MLP are a pair each."""
    forward = ops(pair.forward_in, pair.forward_out)
    backward = ops(pair.backward_out, pair.weight_gradient_regather, pair.backward_in)
    return 2 * forward, 2 * backward


def test_tensor_parallelism_needs_two_all_reduces_forward_and_two_backward_per_layer() -> None:
    pair = walked_pair(Replicate())
    assert layer_ops(pair) == (["all_reduce"] * 2, ["all_reduce"] * 2)


def test_sequence_parallelism_needs_four_collectives_forward_and_six_backward_per_layer() -> None:
    forward, backward = layer_ops(walked_pair(Split(0)))
    assert forward == ["all_gather", "reduce_scatter"] * 2
    assert backward == ["all_gather", "all_gather", "reduce_scatter"] * 2


@RELAXED
@given(size_bytes=SIZES, num_ranks=WORLD_SIZES)
def test_sequence_parallelism_sends_forward_what_tensor_parallelism_does(
    size_bytes: int, num_ranks: int
) -> None:
    def forward_bytes(activations: Placement) -> Fraction:
        pair = walked_pair(activations)
        changes = [each for each in (pair.forward_in, pair.forward_out) if each is not None]
        return sum((each.sent_bytes(size_bytes, num_ranks) for each in changes), start=Fraction(0))

    assert forward_bytes(Split(0)) == forward_bytes(Replicate())


@pytest.mark.parametrize("activations", PLACEMENTS)
@RELAXED
@given(num_ranks=NUM_RANKS, multiples=MULTIPLES, seed=SEEDS)
def test_a_linear_pair_gives_the_output_and_the_gradients_of_one_device(
    activations: Placement, num_ranks: int, multiples: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens, hidden, ffn = (num_ranks * size for size in multiples)
    x, dy = random_tensor(rng, tokens, hidden), random_tensor(rng, tokens, hidden)
    w1, w2 = random_tensor(rng, hidden, ffn), random_tensor(rng, ffn, hidden)
    # One device: y = (x w1)^2 w2, the square standing in for the activation function.
    dh = (dy @ w2.T) * 2 * (x @ w1)

    pair, wire = walked_pair(activations), WireBytes(num_ranks)
    w1s, w2s = np.split(w1, num_ranks, axis=1), np.split(w2, num_ranks, axis=0)
    saved = scatter(x, activations, num_ranks, rng)
    gathered = wire.change(saved, pair.forward_in)
    if activations == Partial():
        saved = gathered  # a sum takes the place of its parts
    hs = [xr @ w for xr, w in zip(gathered, w1s, strict=True)]
    outs = [h**2 @ w for h, w in zip(hs, w2s, strict=True)]
    y = assemble(wire.change(outs, pair.forward_out), activations)
    assert np.array_equal(y, (x @ w1) ** 2 @ w2)

    dys = wire.change(scatter(dy, activations, num_ranks, rng), pair.backward_out)
    dhs = [(d @ w.T) * 2 * h for d, w, h in zip(dys, w2s, hs, strict=True)]
    dxs = [d @ w.T for d, w in zip(dhs, w1s, strict=True)]
    # Each part of a sum has the whole gradient of the sum.
    at = Replicate() if activations == Partial() else activations
    dx = assemble(wire.change(dxs, pair.backward_in), at)
    assert np.array_equal(dx, dh @ w1.T)
    xs = wire.change(saved, pair.weight_gradient_regather)
    dw1s = [xr.T @ d for xr, d in zip(xs, dhs, strict=True)]
    assert np.array_equal(np.concatenate(dw1s, axis=1), x.T @ dh)
    dw2s = [(h**2).T @ d for h, d in zip(hs, dys, strict=True)]
    assert np.array_equal(np.concatenate(dw2s, axis=0), ((x @ w1) ** 2).T @ dy)


# --- ZeRO -------------------------------------------------------------------------------------


def test_zero_stage_0_all_reduces_and_stage_1_reduce_scatters_and_gathers() -> None:
    plain, sharded = zero_communication(0), zero_communication(1)
    assert plain.gradient == (CollectiveOp.ALL_REDUCE, Partial(), Replicate())
    assert plain.parameters is None
    assert sharded.gradient == (CollectiveOp.REDUCE_SCATTER, Partial(), Split(0))
    assert sharded.parameters == (CollectiveOp.ALL_GATHER, Split(0), Replicate())


@pytest.mark.parametrize("zero_stage", [0, 1])
@RELAXED
@given(num_ranks=NUM_RANKS, multiple=st.integers(1, 9), seed=SEEDS)
def test_either_zero_stage_updates_like_one_device_and_sends_the_same_bytes(
    zero_stage: int, num_ranks: int, multiple: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parameters, gradient = random_tensor(rng, 2, num_ranks * multiple)
    communication, wire = zero_communication(zero_stage), WireBytes(num_ranks)
    gradients = wire.change(scatter(gradient, Partial(), num_ranks, rng), communication.gradient)
    held = scatter(parameters, communication.gradient.target, num_ranks, rng)
    updated = [p - 3 * g for p, g in zip(held, gradients, strict=True)]
    final = assemble(wire.change(updated, communication.parameters), Replicate())
    assert np.array_equal(final, parameters - 3 * gradient)
    assert wire.sent_bytes == [2 * (num_ranks - 1) * multiple * 8] * num_ranks  # int64


@pytest.mark.parametrize(("zero_stage", "nearest"), [(-1, 0), (4, 3), (9, 3)])
def test_another_zero_stage_is_refused_with_the_nearest_one(zero_stage: int, nearest: int) -> None:
    message = f"^zero_stage={zero_stage} is not 0, 1, 2 or 3; nearest: {nearest}$"
    with pytest.raises(PlanError, match=message):
        zero_communication(zero_stage)
