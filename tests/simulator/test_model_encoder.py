"""Encoders: BERT's parameters, attention without a mask, and the head with a dense layer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwright.hwprofiles import Attention, load_stack
from meshwright.simulator.blocks import (
    BlockOperators,
    BlockShape,
    BlockTable,
    FlashAttention,
    MemoryBound,
    Operator,
    model_flops,
    sum_flops,
)
from meshwright.simulator.layout.plan import ResolvedPlan, TrainingJob
from meshwright.simulator.model import parameters_by_kind
from meshwright.simulator.model.catalogue import load_model
from meshwright.simulator.model.parameters import (
    count_parameters,
    parameter_tensors,
)
from meshwright.simulator.model.spec import ModelSpec

BERT = load_model("bert-large")
TABLE = BlockTable()
TOKENS, H, VOCABULARY = 4 * 32, 64, 256
POOLER = 2 * H * H  # bytes of its matrix
KERNELS = st.sampled_from(Attention)


def encoder(**changes: object) -> ModelSpec:
    sizes = {"num_layers": 3, "hidden_size": H, "num_heads": 8, "vocab_size": VOCABULARY}
    switches = {"causal": False, "token_types": 2, "mlm_head": True, "embedding_norm": True}
    return ModelSpec.model_validate(
        {"name": "encoder", "seq_len": 32, **sizes, **switches, **changes}
    )


def shape_of(model: ModelSpec, attention: Attention = Attention.FLASH, tp: int = 1) -> BlockShape:
    job = TrainingJob(model=model, global_batch_size=4, seq_len=model.seq_len)
    plan = ResolvedPlan(
        tp=tp, microbatch_size=4, attention=attention, stages=(model.num_layers,)
    )  # fmt: skip
    return BlockShape.of(job, plan, load_stack("megatron-core"))


def operators_of(model: ModelSpec, kind: str) -> BlockOperators:
    return TABLE.operators(shape_of(model), kind)


def traffic(operators: tuple[Operator, ...]) -> int:
    return sum(each.size_bytes for each in operators if isinstance(each, MemoryBound))


def saved(model: ModelSpec, kind: str) -> int:
    return TABLE.memory(shape_of(model), kind).saved


def test_bert_large_without_its_pre_training_heads_is_the_published_encoder() -> None:
    h, v = 1024, 30522
    masked_words = (h * h + h) + 2 * h + v  # dense layer, norm, bias of the logits
    next_sentence = 2 * h + 2
    assert count_parameters(BERT) - masked_words - next_sentence == 335_141_888


def test_bert_head_has_a_norm_of_its_own_and_no_final_norm() -> None:
    head = {t.name: (t.shape, t.tp_dim) for t in parameter_tensors(BERT) if t.block == "head"}
    assert head == {
        "pooler.weight": ((1024, 1024), None),
        "pooler.bias": ((1024,), None),
        "next_sentence.weight": ((2, 1024), None),
        "next_sentence.bias": ((2,), None),
        "mlm_dense.weight": ((1024, 1024), None),
        "mlm_dense.bias": ((1024,), None),
        "mlm_norm.weight": ((1024,), None),
        "mlm_norm.bias": ((1024,), None),
        "output.bias": ((30522,), 0),
    }
    whole, half = (parameters_by_kind(BERT, tp=tp, vocab_size=30720)["head"] for tp in (1, 2))
    assert whole - half == 30720 // 2


@given(batch_heads=st.integers(1, 64), seq_len=st.integers(1, 4096), dim=st.integers(1, 256))
def test_attention_without_a_mask_costs_both_halves(
    batch_heads: int, seq_len: int, dim: int
) -> None:
    for backward in (False, True):
        causal, full = (
            FlashAttention("a", batch_heads, seq_len, dim, backward, causal=causal)
            for causal in (True, False)
        )
        assert full.flops == 2 * causal.flops
    products = 2 * batch_heads * 2 * seq_len**2 * dim  # scores and values, 2 FLOPs each
    assert FlashAttention("a", batch_heads, seq_len, dim, causal=False).flops == products


@pytest.mark.parametrize("attention", Attention)
@given(num_layers=st.integers(1, 9), a=st.integers(1, 8), s=st.integers(1, 64))
def test_forward_products_of_an_encoder_are_a_third_of_its_model_flops(
    attention: Attention, num_layers: int, a: int, s: int
) -> None:
    # The vocabulary needs no padding, so both count the same; attention is full in both.
    model = encoder(num_layers=num_layers, num_heads=a, hidden_size=8 * a, seq_len=s)
    shape = shape_of(model, attention)
    layer, head = (TABLE.operators(shape, kind).forward for kind in ("layer", "head"))
    job = TrainingJob(model=model, global_batch_size=4, seq_len=s)
    assert 3 * (num_layers * sum_flops(layer) + sum_flops(head)) == model_flops(job)


def test_softmax_without_a_mask_reads_every_score() -> None:
    shapes = [shape_of(encoder(causal=causal), Attention.UNFUSED) for causal in (True, False)]
    causal, full = (traffic(TABLE.operators(shape, "layer").forward) for shape in shapes)
    assert full - causal == 4 * 8 * 32**2  # of two bytes a score half


def test_a_masked_language_head_adds_a_dense_layer_its_activation_and_the_pooler() -> None:
    plain, bert = (operators_of(encoder(mlm_head=mlm), "head") for mlm in (False, True))
    assert sum_flops(bert.forward) - sum_flops(plain.forward) == 2 * TOKENS * H * H
    assert sum_flops(bert.backward) - sum_flops(plain.backward) == 4 * TOKENS * H * H
    assert traffic(bert.forward) - traffic(plain.forward) == POOLER + 2 * 2 * TOKENS * H
    # The activation's gradient moves three values; biases of the dense layer and of logits.
    more = 2 * POOLER + 2 * TOKENS * ((3 + 1) * H + VOCABULARY)
    assert traffic(bert.backward) - traffic(plain.backward) == more


@pytest.mark.parametrize("mlm_head", [False, True])
def test_only_scored_positions_reach_the_head(mlm_head: bool) -> None:  # noqa: FBT001
    whole, part = models = [
        encoder(scored_fraction=fraction, mlm_head=mlm_head) for fraction in (1.0, 0.125)
    ]
    heads = [operators_of(model, "head") for model in models]
    for number, passes in enumerate(zip(*((h.forward, h.backward) for h in heads), strict=True)):
        assert 8 * sum_flops(passes[1]) == sum_flops(passes[0])
        pooler = (number + 1) * POOLER * mlm_head  # first tokens, of all sequences
        assert 8 * (traffic(passes[1]) - pooler) == traffic(passes[0]) - pooler
    assert 8 * saved(part, "head") == saved(whole, "head")
    assert operators_of(part, "layer") == operators_of(whole, "layer")
    jobs = [TrainingJob(model=model, global_batch_size=4, seq_len=32) for model in models]
    width = VOCABULARY + H * mlm_head
    assert model_flops(jobs[0]) - model_flops(jobs[1]) == 6 * H * width * TOKENS * 7 // 8


def test_a_scored_fraction_outside_its_range_is_refused() -> None:
    for fraction in (0.0, 1.1):
        with pytest.raises(ValidationError, match="scored_fraction"):
            encoder(scored_fraction=fraction)


def test_each_part_of_an_encoder_keeps_more_than_a_decoder_does() -> None:
    value = TOKENS * H * 2
    plain, bert = (saved(encoder(mlm_head=mlm), "head") for mlm in (False, True))
    assert bert - plain == 2 * value
    none, two = (encoder(token_types=types) for types in (0, 2))
    without, added = (traffic(operators_of(each, "embedding").forward) for each in (none, two))
    assert added - without == 2 * value
    # PyTorch's look-up keeps the numbers of rows, in int64.
    assert saved(two, "embedding") - saved(none, "embedding") == TOKENS * 8
