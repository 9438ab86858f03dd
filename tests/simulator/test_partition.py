"""Layers of each stage: exact counts, and the least possible costliest stage."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hwprofiles import StageSplit
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout import head_cost_layers, parse_stages, resolve_stages
from meshwright.simulator.layout.splits import check_mtp_layers, split_layers
from meshwright.simulator.model.catalogue import load_model

RELAXED = settings(deadline=None, max_examples=100)


@st.composite
def layers_and_stages(draw: st.DrawFn, most: int = 200) -> tuple[int, int]:
    num_layers = draw(st.integers(1, most))
    return num_layers, draw(st.integers(1, num_layers))


@pytest.mark.parametrize("rule", StageSplit)
@RELAXED
@given(sizes=layers_and_stages(), head_cost=st.floats(0, 8))
def test_every_layer_has_a_stage_and_every_stage_a_layer(
    rule: StageSplit, sizes: tuple[int, int], head_cost: float
) -> None:
    num_layers, num_stages = sizes
    stages = split_layers(num_layers, num_stages, rule, head_cost=head_cost)
    assert len(stages) == num_stages
    assert sum(stages) == num_layers
    least = 0 if rule is StageSplit.ENDS else 1  # the head alone is a stage there
    assert min(stages[:-1], default=1) >= 1
    assert stages[-1] >= least


@RELAXED
@given(sizes=layers_and_stages(), head_cost=st.floats(0, 8))
def test_even_stages_differ_by_one_layer_at_most(sizes: tuple[int, int], head_cost: float) -> None:
    num_layers, num_stages = sizes
    stages = split_layers(num_layers, num_stages, StageSplit.EVEN)
    assert set(stages) <= {num_layers // num_stages, -(-num_layers // num_stages)}
    if num_layers % num_stages == 0:
        same = split_layers(num_layers, num_stages, StageSplit.EVEN, head_cost=head_cost)
        assert same == stages == (num_layers // num_stages,) * num_stages


@RELAXED
@given(sizes=layers_and_stages(most=10), head_cost=st.floats(0, 8))
def test_balanced_stages_have_the_least_costliest_stage(
    sizes: tuple[int, int], head_cost: float
) -> None:
    num_layers, num_stages = sizes
    stages = split_layers(num_layers, num_stages, StageSplit.BALANCED, head_cost=head_cost)
    best = min(
        max(*counts[:-1], counts[-1] + head_cost) if num_stages > 1 else num_layers + head_cost
        for cuts in combinations(range(1, num_layers), num_stages - 1)
        for counts in [
            [end - begin for begin, end in zip((0, *cuts), (*cuts, num_layers), strict=True)]
        ]
    )
    # Costs are sums of ones and one float: equal but for the order of the additions.
    assert max(*stages[:-1], stages[-1] + head_cost, 0) == pytest.approx(best, rel=1e-12)


def test_published_uneven_splits_come_out() -> None:
    assert split_layers(96, 64, StageSplit.EVEN) == (1,) * 32 + (2,) * 32
    assert split_layers(78, 12, StageSplit.GREEDY) == (7,) * 11 + (1,)
    assert split_layers(70, 12, StageSplit.GREEDY) == (6,) * 11 + (4,)
    assert split_layers(105, 35, StageSplit.EVEN) == (3,) * 35
    # What generate_llm_fqn_per_model_part of torchtitan 0.2.2 lists.
    assert split_layers(32, 4, StageSplit.ENDS) == (8, 9, 8, 7)
    assert split_layers(126, 16, StageSplit.ENDS) == (7, *(8,) * 14, 7)
    assert split_layers(8, 8, StageSplit.ENDS) == (1, 2, 1, 1, 1, 1, 1, 0)
    assert split_layers(5, 1, StageSplit.ENDS) == (5,)


def test_a_costly_head_takes_layers_from_the_last_stage() -> None:
    assert split_layers(12, 4, StageSplit.BALANCED, head_cost=0.0) == (3, 3, 3, 3)
    assert split_layers(13, 4, StageSplit.BALANCED, head_cost=2.0) == (3, 4, 4, 2)
    assert split_layers(13, 4, StageSplit.EVEN, head_cost=0.5) == (3, 3, 4, 3)


def test_the_head_is_counted_in_layers() -> None:
    gpt3 = load_model("gpt3-175b")
    h, s, v = 12288, 2048, gpt3.vocab_size
    assert head_cost_layers(gpt3, s) == 2 * h * v / (24 * h * h + 4 * h * s)
    llama = load_model("llama3-70b")
    h, g, f, v, s = 8192, 1024, 28672, 128256, 8192
    layer = 4 * h * (h + g) + 4 * h * s + 6 * h * f
    assert head_cost_layers(llama, s) == 2 * h * v / layer


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^5 stages are more than the model's 4 layers$"):
        split_layers(4, 5, StageSplit.EVEN)


def test_stages_are_read_as_a_rule_or_as_counts() -> None:
    assert parse_stages("balanced") is StageSplit.BALANCED
    assert parse_stages("3,2,2,1") == (3, 2, 2, 1)
    with pytest.raises(
        PlanError, match=r"^stages='3;2' is neither a rule \(even, ends, balanced, "
    ):
        parse_stages("3;2")
    assert parse_stages("E|t*2,|(t|)*2ttL") == (0, 2, 1, 1, 2)
    assert parse_stages("Et*4|(t*4|)*2tmmL") == (4, 4, 4, 1)
    check_mtp_layers("Et*4|(t*4|)*2tmmL", 2)
    with pytest.raises(PlanError, match="has 2 layers m; allowed: prediction_layers=1"):
        check_mtp_layers("Et*4|(t*4|)*2tmmL", 1)
    model = load_model("gpt2")
    assert resolve_stages(model, 1024, 4, StageSplit.EVEN) == (3, 3, 3, 3)
    assert resolve_stages(model, 1024, 2, [5, 7]) == (5, 7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Etm|m|mL", "has layers m that predict further tokens ahead of layers t or on several"),
        ("Et*3|mtL", "allowed: all m on one stage, behind all t"),
        ("Et*4|t*4", "is no layout; allowed: E, layers t and stages [|] between them, layers m"),
        ("Et|EtL", "is no layout"),
        ("E(t*9999)*9999L", "more than 100,000 letters"),
        ("Et*99999999L", "more than"),
        ("Et4|L", "is no layout"),
    ],
)
def test_layouts_that_cannot_be_are_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        parse_stages(text)
