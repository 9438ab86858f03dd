"""The best chain of placements against trying every combination of signatures."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import Precision, load_cluster
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Split,
    shard_shape,
)
from meshwright.simulator.matmul.boxing import DeviceMesh, TensorSize, boxing
from meshwright.simulator.matmul.chains import Chain, LocalRun, best_chain, legal_runs
from meshwright.simulator.matmul.signatures import (
    Linearity,
    PlacedOperator,
    Reduction,
    attention,
    elementwise,
    embedding,
    input_placements,
    layer_norm,
    matmul,
    out_placements,
    reduction,
    softmax,
)

S0, S1, R, P = Split(0), Split(1), Replicate(), Partial()
SPOTS: tuple[Placement, ...] = (R, P, S0, S1)
CLUSTERS = {name: load_cluster(name) for name in ("dgx-a100", "jean-zay-a100")}
HALF = Precision.BF16


class Found(NamedTuple):
    time_ps: int
    sent_bytes: Fraction
    numbers: tuple[int, ...]


def brute_force(
    operators: Sequence[PlacedOperator], mesh: DeviceMesh, source: Placements, target: Placements
) -> Found:
    """Return the best of all combinations of legal signatures, each costed as a whole."""
    choices = [legal_runs(operator, mesh, HALF) for operator in operators]
    known: dict[tuple[tuple[int, ...], Placements, Placements], tuple[int, Fraction]] = {}

    def move(shape: tuple[int, ...], before: Placements, after: Placements) -> tuple[int, Fraction]:
        key = (shape, before, after)
        if key not in known:
            change = boxing(TensorSize(shape, 2), before, after, mesh)
            known[key] = change.time_ps, change.sent_bytes
        return known[key]

    def judge(runs: tuple[LocalRun, ...]) -> Found:
        here, time_ps, sent_bytes = source, 0, Fraction(0)
        for run in runs:
            moved_ps, moved_bytes = move(
                run.operator.inputs[0], here, input_placements(run.signatures, 0)
            )
            time_ps += moved_ps + run.time_ps
            sent_bytes += moved_bytes
            here = out_placements(run.signatures)
        moved_ps, moved_bytes = move(operators[-1].out, here, target)
        numbers = tuple(run.number for run in runs)
        return Found(time_ps + moved_ps, sent_bytes + moved_bytes, numbers)

    return min(judge(runs) for runs in product(*choices))


def found(chain: Chain) -> Found:
    numbers = tuple(step.run.number for step in chain.steps)
    return Found(chain.time_ps, chain.sent_bytes, numbers)


SIZES = st.sampled_from([4, 5, 12, 96, 1024, 12288])


@st.composite
def chains(draw: st.DrawFn, most: int) -> list[PlacedOperator]:
    """Draw operators in a row, from a matrix to a matrix."""
    shape = (draw(SIZES), draw(SIZES))
    operators: list[PlacedOperator] = []
    for _ in range(draw(st.integers(1, most))):
        made = [
            matmul(shape, (shape[1], draw(SIZES))),
            elementwise(shape),
            elementwise(shape, linearity=Linearity.JOINT),
            elementwise(shape, num_inputs=2, linearity=draw(st.sampled_from(Linearity))),
            softmax(shape, draw(st.integers(0, 1))),
            layer_norm(shape),
        ]
        # Matmuls as often as all others together: they have the most signatures.
        operators.append(made[max(0, draw(st.integers(-4, 5)))])
        shape = operators[-1].out[0], operators[-1].out[1]
    return operators


def divides(shape: tuple[int, ...], placements: Placements, sizes: tuple[int, ...]) -> bool:
    try:
        shard_shape(shape, placements, sizes)
    except PlanError:
        return False
    return True


def draw_ends(
    data: st.DataObject, operators: list[PlacedOperator], sizes: tuple[int, ...]
) -> tuple[Placements, Placements]:
    everywhere = list(product(SPOTS, repeat=len(sizes)))
    first, last = operators[0].inputs[0], operators[-1].out
    starts = [each for each in everywhere if divides(first, each, sizes)]
    ends = [each for each in everywhere if divides(last, each, sizes)]
    return data.draw(st.sampled_from(starts)), data.draw(st.sampled_from(ends))


@settings(deadline=None, max_examples=80)
@given(
    operators=chains(4),
    num_ranks=st.integers(2, 4),
    name=st.sampled_from(sorted(CLUSTERS)),
    data=st.data(),
)
def test_the_chain_is_the_best_of_all_combinations(
    operators: list[PlacedOperator], num_ranks: int, name: str, data: st.DataObject
) -> None:
    mesh = DeviceMesh((num_ranks,), CLUSTERS[name])
    source, target = draw_ends(data, operators, mesh.sizes)
    chain = best_chain(operators, mesh, HALF, source=source, target=target)
    assert found(chain) == brute_force(operators, mesh, source, target)


@settings(deadline=None, max_examples=20)
@given(
    operators=chains(2),
    sizes=st.sampled_from([(2, 2), (2, 3), (4, 2), (2, 8)]),
    data=st.data(),
)
def test_it_is_the_best_of_all_combinations_on_two_axes(
    operators: list[PlacedOperator], sizes: tuple[int, ...], data: st.DataObject
) -> None:
    mesh = DeviceMesh(sizes, CLUSTERS["dgx-a100"])
    source, target = draw_ends(data, operators, sizes)
    chain = best_chain(operators, mesh, HALF, source=source, target=target)
    assert found(chain) == brute_force(operators, mesh, source, target)


@settings(deadline=None, max_examples=25)
@given(operators=chains(4), num_ranks=st.integers(2, 4))
def test_the_steps_of_a_chain_follow_each_other(
    operators: list[PlacedOperator], num_ranks: int
) -> None:
    mesh = DeviceMesh((num_ranks,), CLUSTERS["dgx-a100"])
    chain = best_chain(operators, mesh, HALF, source=(R,), target=(R,))
    here: Placements = (R,)
    for operator, (change, run) in zip(operators, chain.steps, strict=True):
        wanted = input_placements(run.signatures, 0)
        assert change == boxing(TensorSize(operator.inputs[0], 2), here, wanted, mesh)
        here = out_placements(run.signatures)
    assert chain.last_boxing == boxing(TensorSize(operators[-1].out, 2), here, (R,), mesh)
    assert chain.time_ps == chain.compute_ps + chain.boxing_ps


def test_a_large_mlp_becomes_the_column_and_row_pair_of_tensor_parallelism() -> None:
    # Tokens that no ranks divide leave only the weights to split: Shoeybi 2019, figure 3a.
    first, second = matmul((2047, 12288), (12288, 49152)), matmul((2047, 49152), (49152, 12288))
    operators = [first, elementwise(first.out), second]
    mesh = DeviceMesh((8,), CLUSTERS["dgx-a100"])
    chain = best_chain(operators, mesh, HALF, source=(R,), target=(R,))
    names = [step.run.name for step in chain.steps]
    assert names == ["model parallel (column)", "split dim 1", "contraction split"]
    assert [each.op_names for each in chain.boxings] == [(), (), (), ("all_reduce",)]
    assert chain.sent_bytes == Fraction(2 * 7, 8) * 2047 * 12288 * 2
    assert chain.flops == 2 * 2 * 2047 * 12288 * 49152 // 8


def test_every_kind_of_operator_fits_into_a_chain() -> None:
    heads = attention(8, 64, num_heads=8, head_dim=64)
    total = reduction(heads.out, 3, op=Reduction.SUM)
    mesh = DeviceMesh((2, 2), CLUSTERS["dgx-a100"])
    chain = best_chain([heads, total], mesh, HALF, source=(R, R), target=(S0, S0))
    assert [step.run.name for step in chain.steps] == [
        "data parallel / data parallel",
        "split dim 0 / split dim 0",
    ]
    assert chain.sent_bytes == 0
    table = embedding(64, vocab_size=512, hidden_size=128)
    words = best_chain([table, layer_norm(table.out)], mesh, HALF, source=(S0, R), target=(S0, R))
    assert words.steps[0].run.shapes.inputs[0][0] in {16, 32}


def test_ties_go_to_the_first_signature() -> None:
    mesh = DeviceMesh((1,), CLUSTERS["dgx-a100"])
    operators = [matmul((4, 5), (5, 8)), matmul((4, 8), (8, 3))]
    chain = best_chain(operators, mesh, HALF, source=(R,), target=(R,))
    assert [step.run.number for step in chain.steps] == [0, 0]


def test_impossible_chains_are_refused_with_one_line() -> None:
    mesh = DeviceMesh((2,), CLUSTERS["dgx-a100"])
    first, second = matmul((4, 5), (5, 8)), matmul((4, 6), (6, 2))
    with pytest.raises(PlanError, match=r"^a chain has no operators; allowed: one or more$"):
        best_chain([], mesh, HALF, source=(R,), target=(R,))
    message = r"^matmul takes shape \(4, 6\); matmul before it gives \(4, 8\)$"
    with pytest.raises(PlanError, match=message):
        best_chain([first, second], mesh, HALF, source=(R,), target=(R,))
    with pytest.raises(PlanError, match=r"^dim 1 of shape \(4, 5\) is not divisible"):
        best_chain([first], mesh, HALF, source=(S1,), target=(R,))
    third = matmul((4, 8), (8, 3))
    with pytest.raises(PlanError, match=r"^dim 1 of shape \(4, 3\) is not divisible"):
        best_chain([first, third], mesh, HALF, source=(R,), target=(S1,))
