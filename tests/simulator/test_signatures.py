"""Every signature against NumPy: what ranks compute from their parts is the operator's output.

For each kind of operator all combinations of placements are tried, so the listed signatures are
not only right but complete.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from meshwright.hwprofiles import Precision, load_cluster
from meshwright.simulator.blocks.operators import MemoryBound, sum_flops
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Split,
    matmul_signatures,
    shard_shape,
)
from meshwright.simulator.matmul.boxing import DeviceMesh
from meshwright.simulator.matmul.chains import legal_runs, local_run
from meshwright.simulator.matmul.signatures import (
    Linearity,
    LocalShapes,
    PlacedOperator,
    Reduction,
    Signature,
    attention,
    elementwise,
    embedding,
    input_placements,
    layer_norm,
    local_shapes,
    local_work,
    matmul,
    mesh_signatures,
    out_placements,
    reduction,
    softmax,
)

Tensor = npt.NDArray[np.float64]
Function = Callable[..., Tensor]


class Case(NamedTuple):
    name: str
    operator: PlacedOperator
    compute: Function
    is_lookup: bool = False


def soft(x: Tensor, axis: int) -> Tensor:
    exponents = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(exponents / exponents.sum(axis=axis, keepdims=True))


def normalize(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True))
    return np.asarray(centred / deviation * weight + bias)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = np.einsum("bqhd,bkhd->bhqk", q, k)
    return np.asarray(np.einsum("bhqk,bkhd->bqhd", soft(scores, 3), v))


def look_up(ids: Tensor, table: Tensor, first_id: int = 0) -> Tensor:
    """Return rows of a slice of the table that starts at *first_id*; zeros for other ids."""
    if not np.array_equal(ids, np.round(ids)):
        raise ValueError("ids are whole")
    local = ids.astype(int) - first_id
    is_here = (local >= 0) & (local < len(table))
    return np.where(is_here[:, None], table[np.where(is_here, local, 0)], 0.0)


def cases(n: int) -> list[Case]:
    """Return every kind of operator with dims that n x n ranks divide, none of them equal."""
    a, b, c, d = 2 * n * n, 3 * n * n, 5 * n * n, 4 * n * n
    joint, each = Linearity.JOINT, Linearity.EACH
    return [
        Case("matmul", matmul((a, b), (b, c)), lambda x, y: x @ y),
        Case("exp", elementwise((a, b)), np.exp),
        Case("scale", elementwise((a, b), linearity=joint), lambda x: -3 * x),
        Case("scale 1d", elementwise((a,), linearity=each), lambda x: -3 * x),
        Case("maximum", elementwise((a, b), num_inputs=2), np.maximum),
        Case("add", elementwise((a, b), num_inputs=2, linearity=joint), np.add),
        Case("multiply", elementwise((a, b), num_inputs=2, linearity=each), np.multiply),
        Case(
            "multiply three",
            elementwise((a, b), num_inputs=3, linearity=each),
            lambda x, y, z: x * y * z,
        ),
        Case("sum rows", reduction((a, b), 0, op=Reduction.SUM), lambda x: x.sum(axis=0)),
        Case("sum 3d", reduction((a, b, c), 1, op=Reduction.SUM), lambda x: x.sum(axis=1)),
        Case("max columns", reduction((a, b), 1, op=Reduction.MAX), lambda x: x.max(axis=1)),
        Case("max 3d", reduction((a, b, c), 0, op=Reduction.MAX), lambda x: x.max(axis=0)),
        Case("softmax rows", softmax((a, b), 0), lambda x: soft(x, 0)),
        Case("softmax 3d", softmax((a, b, c), 2), lambda x: soft(x, 2)),
        Case("layer norm", layer_norm((a, b)), normalize),
        Case("layer norm 3d", layer_norm((a, b, c)), normalize),
        Case("embedding", embedding(c, vocab_size=a, hidden_size=b), look_up, is_lookup=True),
        Case("attention", attention(a, b, num_heads=d, head_dim=n * n), attend),
    ]


CASES = cases(2)
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def random_inputs(case: Case, seed: int = 1) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    inputs = [rng.normal(size=shape) for shape in case.operator.inputs]
    if case.is_lookup:
        vocab_size = case.operator.inputs[1][0]
        inputs[0] = rng.integers(0, vocab_size, inputs[0].shape).astype(float)
    return inputs


def scatter(tensor: Tensor, placement: Placement, n: int, rng: np.random.Generator) -> list[Tensor]:
    match placement:
        case Split(dim):
            return np.split(tensor, n, axis=dim)
        case Replicate():
            return [tensor] * n
        case Partial():
            summands = [rng.normal(size=tensor.shape) for _ in range(n - 1)]
            return [tensor - sum(summands, np.zeros_like(tensor)), *summands]


def assemble(parts: list[Tensor], placement: Placement) -> Tensor | None:
    """Return the tensor that the ranks hold together; None where replicas differ."""
    match placement:
        case Split(dim):
            return np.concatenate(parts, axis=dim)
        case Replicate():
            same = all(np.allclose(one, other) for one, other in pairwise(parts))
            return parts[0] if same else None
        case Partial():
            return sum(parts, np.zeros_like(parts[0]))


def run_rank(case: Case, parts: list[Tensor], first_id: int) -> Tensor:
    if case.is_lookup:
        ids, table = parts
        return look_up(ids, table, first_id)
    return case.compute(*parts)


def run_ranks(case: Case, placements: Placements, n: int, rng: np.random.Generator) -> list[Tensor]:
    """Return what each rank of one axis computes from its own parts."""
    tensors = random_inputs(case)
    held = [scatter(t, p, n, rng) for t, p in zip(tensors, placements, strict=True)]
    first_ids = [0] * n
    if case.is_lookup and placements[1] == Split(0):
        first_ids = [rank * len(held[1][0]) for rank in range(n)]
    return [run_rank(case, [part[r] for part in held], first_ids[r]) for r in range(n)]


def spots(num_dims: int) -> list[Placement]:
    return [Replicate(), Partial(), *(Split(dim) for dim in range(num_dims))]


def working_combinations(case: Case, n: int) -> Iterator[tuple[Placements, Placement]]:
    """Yield input and output placements under which the parts give the operator's output."""
    rng = np.random.default_rng(7)
    expected = case.compute(*random_inputs(case))
    for placements in product(*(spots(len(shape)) for shape in case.operator.inputs)):
        try:
            outs = run_ranks(case, placements, n, rng)
        except (ValueError, IndexError):
            continue  # the parts do not fit each other
        for out in spots(expected.ndim):
            together = assemble(outs, out) if all(o.ndim == expected.ndim for o in outs) else None
            if together is None or together.shape != expected.shape:
                continue
            if np.allclose(together, expected):
                yield placements, out


@EVERY_CASE
def test_the_signatures_are_all_combinations_that_work(case: Case) -> None:
    listed = {(each.inputs, each.out) for each in case.operator.signatures}
    assert len(listed) == len(case.operator.signatures)
    assert set(working_combinations(case, 2)) == listed


@pytest.mark.parametrize("case", cases(3)[:-1], ids=lambda case: case.name)
def test_signatures_hold_on_three_ranks(case: Case) -> None:
    rng, expected = np.random.default_rng(3), case.compute(*random_inputs(case))
    for signature in case.operator.signatures:
        together = assemble(run_ranks(case, signature.inputs, 3, rng), signature.out)
        assert together is not None
        np.testing.assert_allclose(together, expected)


@EVERY_CASE
def test_each_case_has_the_shapes_it_says(case: Case) -> None:
    inputs = random_inputs(case)
    assert tuple(each.shape for each in inputs) == case.operator.inputs
    assert case.compute(*inputs).shape == case.operator.out


@EVERY_CASE
def test_local_shapes_are_what_the_ranks_hold_and_compute(case: Case) -> None:
    rng = np.random.default_rng(5)
    for signature in case.operator.signatures:
        shapes = local_shapes(case.operator, (signature,), (2,))
        outs = run_ranks(case, signature.inputs, 2, rng)
        assert {out.shape for out in outs} == {shapes.out}
        for tensor, placement, local in zip(
            random_inputs(case), signature.inputs, shapes.inputs, strict=True
        ):
            assert {part.shape for part in scatter(tensor, placement, 2, rng)} == {local}


def run_grid(case: Case, signatures: tuple[Signature, ...], n: int) -> list[list[Tensor]]:
    """Return what each rank of an n x n mesh computes; the second axis cuts what the first left."""
    rng = np.random.default_rng(11)
    grids = []
    for index, tensor in enumerate(random_inputs(case)):
        first, second = input_placements(signatures, index)
        grids.append([scatter(part, second, n, rng) for part in scatter(tensor, first, n, rng)])
    rows = [[[grid[i][j] for grid in grids] for j in range(n)] for i in range(n)]
    return [
        [
            run_rank(case, parts, first_id(case, signatures, (i, j), n))
            for j, parts in enumerate(row)
        ]
        for i, row in enumerate(rows)
    ]


def first_id(case: Case, signatures: tuple[Signature, ...], rank: tuple[int, int], n: int) -> int:
    """Return the first row that a rank of an n x n mesh holds of a lookup table."""
    if not case.is_lookup:
        return 0
    splits = [each == Split(0) for each in input_placements(signatures, 1)]
    number = 0
    for is_split, position in zip(splits, rank, strict=True):
        number = number * n + position if is_split else number
    return number * local_shapes(case.operator, signatures, (n, n)).inputs[1][0]


@EVERY_CASE
def test_a_signature_on_each_axis_is_a_signature_of_the_mesh(case: Case) -> None:
    expected = case.compute(*random_inputs(case))
    for signatures in mesh_signatures(case.operator, 2):
        first, second = out_placements(signatures)
        rows = [assemble(row, second) for row in run_grid(case, signatures, 2)]
        assert all(row is not None for row in rows)
        together = assemble([row for row in rows if row is not None], first)
        assert together is not None
        np.testing.assert_allclose(together, expected, rtol=1e-6, atol=1e-9)


def test_the_names_of_the_matmul_signatures_match_their_placements() -> None:
    named = {each.name: (*each.inputs, each.out) for each in matmul((4, 5), (5, 8)).signatures}
    s0, s1, r, p = Split(0), Split(1), Replicate(), Partial()
    assert named == {
        "data parallel": (s0, r, s0),
        "model parallel (column)": (r, s1, s1),
        "contraction split": (s1, s0, p),
        "partial A": (p, r, p),
        "partial B": (r, p, p),
        "replicated": (r, r, r),
    }
    assert len(named) == len(matmul_signatures())


def test_the_textbook_matmul_gives_two_2x8_and_two_4x4_halves() -> None:
    product_ = matmul((4, 5), (5, 8))
    data, model, contraction = ((each,) for each in product_.signatures[:3])
    assert local_shapes(product_, data, (2,)) == LocalShapes(((2, 5), (5, 8)), (2, 8))
    assert local_shapes(product_, model, (2,)) == LocalShapes(((4, 5), (5, 4)), (4, 4))
    with pytest.raises(PlanError, match=r"dim 1 of shape \(4, 5\) is not divisible"):
        local_shapes(product_, contraction, (2,))


def test_two_axes_may_split_the_same_dim() -> None:
    assert shard_shape((12, 6), (Split(0), Split(0)), (2, 3)) == (2, 6)
    assert shard_shape((12, 6), (Split(0), Split(1)), (4, 3)) == (3, 2)
    with pytest.raises(PlanError, match="not divisible by num_ranks=4"):
        shard_shape((12, 6), (Split(0), Split(0)), (2, 4))
    with pytest.raises(ValueError, match="longer"):
        shard_shape((12, 6), (Split(0),), (2, 2))


def test_work_of_a_rank_is_what_its_tensors_say() -> None:
    product_ = matmul((4, 6), (6, 8))
    runs = legal_runs(product_, DeviceMesh((2,), load_cluster("dgx-a100")), Precision.FP32)
    assert [run.flops for run in runs] == [192, 192, 192, 384, 384, 384]
    table = embedding(6, vocab_size=1000, hidden_size=4)
    whole = LocalShapes(table.inputs, table.out)
    assert local_work(table, whole, 2) == (MemoryBound("embedding", 12 + 2 * 48),)
    norm = layer_norm((6, 4))
    whole = LocalShapes(norm.inputs, norm.out)
    assert local_work(norm, whole, 2) == (MemoryBound("layer norm", 2 * (24 + 4 + 4 + 24)),)


@pytest.mark.parametrize(("number", "share"), [(0, 4), (1, 4), (2, 4), (3, 1), (4, 1), (5, 1)])
def test_attention_shares_its_products_by_sequences_heads_and_queries(
    number: int, share: int
) -> None:
    core = attention(4, 16, num_heads=8, head_dim=8)
    shapes = local_shapes(core, (core.signatures[number],), (4,))
    whole = 2 * 2 * 4 * 8 * 16 * 16 * 8  # two products of sequences x heads x tokens^2 x width
    if core.signatures[number].name == "value columns split":
        assert sum_flops(local_work(core, shapes, 2)) == whole // 2 + whole // 8
    else:
        assert sum_flops(local_work(core, shapes, 2)) == whole // share


def test_a_run_on_two_axes_costs_what_its_local_product_costs() -> None:
    mesh = DeviceMesh((2, 4), load_cluster("dgx-a100"))
    alone = DeviceMesh((1,), mesh.cluster)
    big, small = matmul((2048, 4096), (4096, 8192)), matmul((1024, 4096), (4096, 2048))
    choice = (big.signatures[0], big.signatures[1])
    split = local_run(big, choice, mesh, Precision.BF16)
    assert split.shapes == LocalShapes(((1024, 4096), (4096, 2048)), (1024, 2048))
    assert split.name == "data parallel / model parallel (column)"
    assert split.costs == local_run(small, small.signatures[-1:], alone, Precision.BF16).costs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: matmul((4, 5), (6, 8)),
            "matmul of shapes (4, 5) and (6, 8): inner sizes 5 and 6 differ",
        ),
        (lambda: softmax((4, 8), 2), "dim 2 of shape (4, 8) does not exist; allowed 0 to 1"),
        (
            lambda: reduction((4,), -1, op=Reduction.SUM),
            "dim -1 of shape (4,) does not exist; allowed 0 to 0",
        ),
    ],
)
def test_an_impossible_operator_is_refused_with_one_line(
    make: Callable[[], PlacedOperator], message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert str(caught.value) == message
