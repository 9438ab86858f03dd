"""Parameter counts against published figures, closed forms, and the sum over tp ranks."""

import csv
from math import prod
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.simulator.errors import PlanError
from meshwright.simulator.model.catalogue import list_models, load_model
from meshwright.simulator.model.parameters import (
    count_parameters,
    local_shape,
    padded_vocab_size,
    parameter_tensors,
    parameters_by_kind,
)
from meshwright.simulator.model.spec import ModelSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "model_parameters.csv"
ROWS = list(csv.DictReader(GOLDEN.read_text(encoding="utf-8").splitlines()))

layers = st.integers(1, 200)
heads = st.integers(1, 64)
head_dims = st.integers(1, 256)
vocabularies = st.integers(1, 300_000)
lengths = st.integers(1, 10_000)


def gpt(**changes: object) -> ModelSpec:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 8, "vocab_size": 96, "seq_len": 16}
    return ModelSpec.model_validate({"name": "gpt", **sizes, **changes})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_count_agrees_with_the_published_figure(row: dict[str, str]) -> None:
    count = count_parameters(load_model(row["name"]))
    published, rel_tol = int(row["parameters"]), float(row["rel_tol"])
    assert abs(count - published) <= rel_tol * published, f"{count:,}"


def test_every_built_in_model_has_a_golden_row() -> None:
    assert sorted(row["name"] for row in ROWS) == list(list_models())


@given(num_layers=layers, a=heads, d=head_dims, v=vocabularies, s=lengths)
def test_gpt_count_is_the_closed_form(num_layers: int, a: int, d: int, v: int, s: int) -> None:
    h = a * d
    model = gpt(num_layers=num_layers, hidden_size=h, num_heads=a, vocab_size=v, seq_len=s)
    # Narayanan et al. 2021, equation 2, expanded; the 2 h of the final norm are not in it.
    assert count_parameters(model) == 12 * num_layers * h**2 + 13 * num_layers * h + (v + s + 2) * h


@given(num_layers=layers, groups=st.integers(1, 8), kv=heads, d=head_dims, v=vocabularies)
def test_llama_count_is_the_closed_form(
    num_layers: int, groups: int, kv: int, d: int, v: int
) -> None:
    h, f = groups * kv * d, 3 * groups * kv * d + 1
    model = gpt(
        num_layers=num_layers, hidden_size=h, num_heads=groups * kv, num_kv_heads=kv,
        ffn_hidden_size=f, vocab_size=v, positions="rotary", norm="rmsnorm", gated_mlp=True,
        tied_embeddings=False, attention_bias=False, output_bias=False, mlp_bias=False,
    )  # fmt: skip
    layer = 2 * h * h + 2 * h * kv * d + 3 * h * f + 2 * h
    assert count_parameters(model) == num_layers * layer + 2 * v * h + h


@pytest.mark.parametrize("gated_mlp", [False, True])
@given(tp=st.sampled_from([1, 2, 4, 8]), groups=st.integers(1, 4))
def test_tp_ranks_together_hold_each_split_tensor_once(
    tp: int,
    groups: int,
    gated_mlp: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    model = gpt(
        num_heads=8 * groups, num_kv_heads=8, hidden_size=48 * groups, ffn_hidden_size=40,
        gated_mlp=gated_mlp, tied_embeddings=False,
    )  # fmt: skip
    for tensor in parameter_tensors(model):
        num_parts = 1 if tensor.tp_dim is None else tp
        assert num_parts * prod(local_shape(model, tensor, tp=tp)) == prod(tensor.shape)


@given(tp=st.sampled_from([2, 4, 8, 16]), kv=st.sampled_from([1, 2, 4, 8, 16]))
def test_ranks_beyond_the_kv_heads_keep_one_whole_kv_head(tp: int, kv: int) -> None:
    model = gpt(num_heads=16, num_kv_heads=kv)
    h, kv_copies = model.hidden_size, max(1, tp // kv)
    split = [t for t in parameter_tensors(model) if t.name == "qkv.weight"]
    total = tp * prod(local_shape(model, split[0], tp=tp))
    assert total == h * (h + kv_copies * 2 * model.kv_hidden_size)


@given(tp=st.integers(1, 64))
def test_padded_vocabulary_is_the_next_multiple_of_128_tp(tp: int) -> None:
    model = load_model("gpt2")
    padded = padded_vocab_size(model, tp, 128)
    assert padded % (128 * tp) == 0
    assert 0 <= padded - model.vocab_size < 128 * tp
    table = parameter_tensors(model, vocab_size=padded)[0]
    assert local_shape(model, table, tp=tp) == (padded // tp, 768)


@given(tp=st.integers(1, 64))
def test_the_first_rank_of_a_table_that_is_not_padded_holds_what_dtensor_gives_it(tp: int) -> None:
    """Pieces as `torch.chunk` cuts them: the first one is never smaller than another."""
    model = load_model("gpt2")
    assert padded_vocab_size(model, tp, 1) == model.vocab_size
    rows, width = local_shape(model, parameter_tensors(model)[0], tp=tp)
    assert ((rows - 1) * tp < model.vocab_size <= rows * tp, width) == (True, 768)


def test_blocks_add_up_to_the_whole_model() -> None:
    for name in list_models():
        model = load_model(name)
        counts = parameters_by_kind(model)
        layers = sum(count * counts[kind] for kind, count in model.layer_runs)
        # Biases of routing are no parameters of a step.
        biases = {"deepseek-v3": 58 * 256, "kimi-k2": 60 * 384, "glm4.5": 89 * 160}.get(name, 0)
        assert counts["embedding"] + layers + counts["head"] + biases == count_parameters(model)


def test_a_tied_output_matrix_is_listed_in_the_embedding_only() -> None:
    words = [t.name for t in parameter_tensors(gpt()) if t.shape == (96, 64)]
    assert words == ["word_embedding.weight"]
    untied = [t.block for t in parameter_tensors(gpt(tied_embeddings=False)) if t.shape == (96, 64)]
    assert untied == ["embedding", "head"]


def test_layer_shapes_and_split_dims_follow_megatron() -> None:
    tensors = parameter_tensors(gpt(num_kv_heads=2))
    shown = {t.name: (t.shape, t.tp_dim) for t in tensors if t.block == "layer"}
    assert shown == {
        "attention_norm.weight": ((64,), None),
        "attention_norm.bias": ((64,), None),
        "qkv.weight": ((96, 64), 0),
        "qkv.bias": ((96,), 0),
        "attention_output.weight": ((64, 64), 1),
        "attention_output.bias": ((64,), None),
        "mlp_norm.weight": ((64,), None),
        "mlp_norm.bias": ((64,), None),
        "mlp_in.weight": ((256, 64), 0),
        "mlp_in.bias": ((256,), 0),
        "mlp_out.weight": ((64, 256), 1),
        "mlp_out.bias": ((64,), None),
    }


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 3, "num_heads=8 is not divisible by tp=3"),
        ({}, 0, "tp=0 must be >= 1"),
        ({"ffn_hidden_size": 30}, 4, "ffn_hidden_size=30 is not divisible by tp=4"),
        (
            {"num_heads": 12, "hidden_size": 96, "num_kv_heads": 4},
            6,
            "num_kv_heads=4 is neither divisible by tp=6 nor divides it",
        ),
    ],
)
def test_a_split_that_does_not_divide_is_refused(
    changes: dict[str, object], tp: int, message: str
) -> None:
    with pytest.raises(PlanError) as refusal:
        parameters_by_kind(gpt(**changes), tp=tp)
    assert str(refusal.value) == message


@given(tp=st.integers(1, 40), a=st.integers(1, 40), kv=st.integers(1, 40))
def test_a_layer_splits_exactly_where_heads_and_kv_heads_allow(tp: int, a: int, kv: int) -> None:
    assume(a % kv == 0)
    model = gpt(num_heads=a, num_kv_heads=kv, hidden_size=4 * a, ffn_hidden_size=tp)
    padded = padded_vocab_size(model, tp, 128)
    if a % tp == 0 and (kv % tp == 0 or tp % kv == 0):
        assert parameters_by_kind(model, tp=tp, vocab_size=padded)["layer"] >= 1
    else:
        with pytest.raises(PlanError, match="num_"):
            parameters_by_kind(model, tp=tp, vocab_size=padded)
