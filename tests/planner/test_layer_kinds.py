"""Models whose layers differ, in a step and in a search: by counts of kinds, not of layers.

The kinds are made of a transformer's layer: some layers in one block, which may hand on more than
it gets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import pytest

from meshwright.hwprofiles import load_cluster, load_stack
from meshwright.planner import SpaceLimits, enumerate_space
from meshwright.planner.bounds.bounds import StepBounds
from meshwright.planner.footprint.footprint import device_bytes_column, peak_bytes
from meshwright.planner.search import search
from meshwright.planner.space.shapes import ShapeTable
from meshwright.simulator import (
    CostModel,
    ModelSpec,
    ResolvedPlan,
    StepResult,
    TrainingJob,
    simulate,
)
from meshwright.simulator.account import message_traffic
from meshwright.simulator.blocks import BlockOperators, BlockShape, BlockTable, BorderGradients
from meshwright.simulator.graph import BlockMemory
from meshwright.simulator.layout import rank_stages, stack_refusal
from meshwright.simulator.model import BlockRun, ParameterTensor
from meshwright.simulator.model.tensors import LAYER_TENSORS

CLUSTER = load_cluster("dgx-a100")


class Made(NamedTuple):
    """A kind: of how many layers, and how many times as much it gets and hands on."""

    layers: int
    received: int = 1
    sent: int = 1


MADE = {
    "layer": Made(1),
    "pair": Made(2),
    "widening": Made(1, 1, 3),
    "wide": Made(3, 3, 3),
    "narrowing": Made(1, 3, 1),
}


class Mixed(ModelSpec):
    """A model whose layers differ."""

    runs: tuple[BlockRun, ...]

    @property
    def layer_runs(self) -> tuple[BlockRun, ...]:
        return self.runs


def mixed(*runs: tuple[str, int]) -> Mixed:
    return Mixed(
        name="mixed",
        num_layers=sum(count for _, count in runs),
        hidden_size=512,
        num_heads=8,
        vocab_size=50257,
        seq_len=512,
        runs=tuple(BlockRun(*run) for run in runs),
    )


PAIRS = mixed(("layer", 1), ("pair", 2), ("layer", 2), ("pair", 1))  # nine layers in six
NINE = mixed(("layer", 9))
WIDENED = mixed(("layer", 2), ("widening", 1), ("wide", 3), ("narrowing", 1), ("pair", 1))


class TensorsOf(Protocol):
    def __call__(self, model: ModelSpec) -> list[ParameterTensor]: ...


def apart(
    table: BlockTable, shapes: Sequence[BlockShape], kind: str
) -> Iterator[tuple[BlockOperators, list[int], list[int]]]:
    """Yield what each shape runs by itself, as `BlockTable.columns` yields it."""
    for place, shape in enumerate(shapes):
        yield table.operators(shape, kind), [0], [place]


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tables know the kinds: several layers' operators, tensors and kept bytes."""
    operators, memory = BlockTable.operators, BlockTable.memory
    of_layer = LAYER_TENSORS["layer"]

    def repeated(table: BlockTable, shape: BlockShape, kind: str) -> BlockOperators:
        count = MADE[kind].layers if kind in MADE else 1
        known = operators(table, shape, "layer" if kind in MADE else kind)
        return BlockOperators(
            forward=known.forward * count,
            backward=known.backward * count,
            recompute=known.recompute * count,
        )

    def kept(
        table: BlockTable, shape: BlockShape, kind: str, *ending: BorderGradients
    ) -> BlockMemory:
        if kind not in MADE:
            return memory(table, shape, kind, *ending)
        made, known = MADE[kind], memory(table, shape, "layer", *ending)
        return known._replace(
            saved=made.layers * known.saved,
            # Its first layer's gradients come when the other layers have freed theirs.
            arrival=known.arrival - (made.layers - 1) * known.saved,
            received=made.received * known.received,
            sent=made.sent * known.sent,
        )

    def tensors_of(kind: str) -> TensorsOf:
        return lambda model: [
            each._replace(block=kind) for _ in range(MADE[kind].layers) for each in of_layer(model)
        ]

    monkeypatch.setattr(BlockTable, "operators", repeated)
    monkeypatch.setattr(BlockTable, "columns", apart)
    monkeypatch.setattr(BlockTable, "memory", kept)
    monkeypatch.setattr(BlockTable, "prepare", lambda *of_table: None)
    monkeypatch.setattr(BlockTable, "saved_tensors", lambda *args, repeats=True: ())
    for kind in MADE:
        monkeypatch.setitem(LAYER_TENSORS, kind, tensors_of(kind))


def step(model: ModelSpec, stack: str, **fields: object) -> StepResult:
    job = TrainingJob(model=model, global_batch_size=16, seq_len=512)
    return simulate(job, ResolvedPlan.of(fields), CLUSTER, load_stack(stack))


@pytest.mark.parametrize(
    ("stack", "fields"),
    [
        ("megatron-core", {"zero_stage": 1}),
        ("megatron-lm-2021", {}),
        ("deepspeed", {"zero_stage": 1}),
    ],
)
@pytest.mark.parametrize(
    ("stages", "same"), [((3, 3), (5, 4)), ((1, 5), (1, 8)), ((0, 2, 4, 0), (0, 3, 6, 0))]
)
def test_a_pair_of_layers_is_two_layers(
    stack: str, fields: dict[str, object], stages: tuple[int, ...], same: tuple[int, ...]
) -> None:
    layout = {"pp": len(stages), "dp": 2, "microbatch_size": 2, **fields}
    of_pairs = step(PAIRS, stack, stages=stages, **layout)
    of_layers = step(NINE, stack, stages=same, **layout)
    for one, other in zip(of_pairs.memory.by_stage, of_layers.memory.by_stage, strict=True):
        assert replace(one, peak_time_ps=0) == replace(other, peak_time_ps=0)
    if stack != "megatron-core":  # whose buckets end between the layers of a pair
        assert of_pairs.step_ps == of_layers.step_ps


def test_a_message_is_that_of_the_block_before_it() -> None:
    job = TrainingJob(model=WIDENED, global_batch_size=16, seq_len=512)
    stack = load_stack("megatron-core")
    plan = ResolvedPlan(pp=4, stages=(2, 2, 3, 1))
    held = [stage.layers for rank in range(4) for stage in rank_stages(WIDENED, plan, rank)]
    assert held == [
        (("layer", 2),),
        (("widening", 1), ("wide", 1)),
        (("wide", 2), ("narrowing", 1)),
        (("pair", 1),),
    ]
    one = 512 * 512 * 2
    for pp_rank, sizes in enumerate(
        [{one: 1}, {one: 1, 3 * one: 1}, {3 * one: 1, one: 1}, {one: 1}]
    ):
        sent, received = message_traffic(job, plan, stack, pp_rank)
        assert sent == received
        assert {each.size_bytes: each.num_calls for each in sent} == {
            size: 16 * count for size, count in sizes.items()
        }


@pytest.mark.parametrize(
    ("stack_name", "num_gpus"), [("megatron-core", 4), ("megatron-lm-2021", 8), ("deepspeed", 8)]
)
def test_a_search_over_stages_that_differ_is_exact(stack_name: str, num_gpus: int) -> None:
    job = TrainingJob(model=WIDENED, global_batch_size=16, seq_len=512)
    stack, limits = load_stack(stack_name), SpaceLimits(tp=(1,))
    space = enumerate_space(job, stack, num_gpus, limits)
    table, costs = ShapeTable.of(space), CostModel(CLUSTER, stack, num_gpus)
    runs = [i for i in range(len(space)) if stack_refusal(job, space.plan(i), stack) is None]
    results = {i: simulate(job, space.plan(i), CLUSTER, stack, costs=costs) for i in runs}
    needs = device_bytes_column(space, CLUSTER, peak_bytes(space, table, costs.blocks))
    assert [int(needs[i]) for i in runs] == [results[i].memory.device_bytes for i in runs]
    bounds = StepBounds(space, table, costs).lower_bounds_ps(np.array(runs, np.int64)).tolist()
    gaps = sorted(results[i].step_ps / bound - 1 for i, bound in zip(runs, bounds, strict=True))
    assert gaps[0] >= 0
    assert gaps[len(gaps) // 2] < 0.1
    found = search(job, CLUSTER, stack, num_gpus, limits=limits)
    assert found.optimal
    assert found.plans[0].step_ps == min(result.step_ps for result in results.values())
    assert {plan.pp for plan in map(space.plan, runs)} >= {1, 2, 4}
