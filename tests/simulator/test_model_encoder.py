"""Encoders: BERT's parameters, attention without a mask, and the head with a dense layer."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.simulator.blocks.layer import layer_operators
from meshwright.simulator.liveness.activations import saved_embedding_bytes, saved_head_bytes
from meshwright.simulator.liveness.ends import head_workspace_bytes
from pydantic import ValidationError

from meshwright.hwprofiles import Attention, load_stack
from meshwright.simulator.blocks.ends import embedding_operators, head_operators
from meshwright.simulator.blocks.model_flops import model_flops
from meshwright.simulator.blocks.operators import FlashAttention, MemoryBound, Operator, sum_flops
from meshwright.simulator.blocks.shape import BlockShape
from meshwright.simulator.layout.plan import ParallelPlan, TrainingJob
from meshwright.simulator.model import parameters_by_kind
from meshwright.simulator.model.catalogue import load_model
from meshwright.simulator.model.parameters import (
    count_parameters,
    parameter_tensors,
)
from meshwright.simulator.model.spec import ModelSpec

BERT = load_model("bert-large")
KERNELS = st.sampled_from(Attention)


def encoder(**changes: object) -> ModelSpec:
    sizes = {"num_layers": 3, "hidden_size": 64, "num_heads": 8, "vocab_size": 256, "seq_len": 32}
    switches = {"causal": False, "token_types": 2, "mlm_head": True, "embedding_norm": True}
    return ModelSpec.model_validate({"name": "encoder", **sizes, **switches, **changes})


def shape_of(model: ModelSpec, attention: Attention = Attention.FLASH, tp: int = 1) -> BlockShape:
    job = TrainingJob(model=model, global_batch_size=4, seq_len=model.seq_len)
    plan = ParallelPlan(
        tp=tp, microbatch_size=4, attention=attention, stages=(model.num_layers,)
    )  # fmt: skip
    return BlockShape.of(job, plan, load_stack("megatron-core"))


def traffic(operators: tuple[Operator, ...], name: str) -> int:
    return sum(o.size_bytes for o in operators if isinstance(o, MemoryBound) and o.name == name)


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
    layer, head = layer_operators(shape).forward, head_operators(shape).forward
    job = TrainingJob(model=model, global_batch_size=4, seq_len=s)
    assert 3 * (num_layers * sum_flops(layer) + sum_flops(head)) == model_flops(job)


def test_softmax_without_a_mask_reads_every_score() -> None:
    causal, full = (
        layer_operators(shape_of(encoder(causal=causal, dropout=False), Attention.UNFUSED)).forward
        for causal in (True, False)
    )
    scores = 4 * 8 * 32**2
    assert traffic(causal, "softmax and dropout") == scores * 3
    assert traffic(full, "softmax and dropout") == scores * 4


def test_a_masked_language_head_adds_a_dense_layer_its_activation_and_the_pooler() -> None:
    plain, bert = (head_operators(shape_of(encoder(mlm_head=mlm))) for mlm in (False, True))
    tokens, h = 4 * 32, 64
    assert sum_flops(bert.forward) - sum_flops(plain.forward) == 2 * tokens * h * h
    assert sum_flops(bert.backward) - sum_flops(plain.backward) == 4 * tokens * h * h
    assert traffic(bert.forward, "pooler") == 2 * h * h
    assert traffic(bert.forward, "mlm activation") == 2 * tokens * h * 2
    assert traffic(bert.backward, "output bias gradient") == tokens * 256 * 2


@pytest.mark.parametrize("mlm_head", [False, True])
def test_only_scored_positions_reach_the_head(mlm_head: bool) -> None:  # noqa: FBT001
    whole, part = (
        encoder(scored_fraction=fraction, mlm_head=mlm_head) for fraction in (1.0, 0.125)
    )
    heads = [head_operators(shape_of(model)) for model in (whole, part)]
    for passes in zip(*((head.forward, head.backward) for head in heads), strict=True):
        assert [8 * sum_flops(passes[1])] == [sum_flops(passes[0])]
    assert 8 * traffic(heads[1].forward, "loss") == traffic(heads[0].forward, "loss")
    assert 8 * saved_head_bytes(shape_of(part)) == saved_head_bytes(shape_of(whole))
    # The backward also holds a weight's gradient, which has no positions.
    forward = [head_workspace_bytes(shape_of(model))[0] for model in (part, whole)]
    assert 8 * forward[0] == forward[1]
    assert layer_operators(shape_of(part)) == layer_operators(shape_of(whole))
    jobs = [TrainingJob(model=model, global_batch_size=4, seq_len=32) for model in (whole, part)]
    width = 256 + 64 * mlm_head
    assert model_flops(jobs[0]) - model_flops(jobs[1]) == 6 * 64 * width * 4 * 32 * 7 // 8


def test_a_scored_fraction_outside_its_range_is_refused() -> None:
    for fraction in (0.0, 1.1):
        with pytest.raises(ValidationError, match="scored_fraction"):
            encoder(scored_fraction=fraction)


def test_each_part_of_an_encoder_keeps_more_than_a_decoder_does() -> None:
    value = 4 * 32 * 64 * 2
    plain, bert = (shape_of(encoder(mlm_head=mlm)) for mlm in (False, True))
    assert saved_head_bytes(bert) - saved_head_bytes(plain) == 2 * value
    none, two = (shape_of(encoder(token_types=types)) for types in (0, 2))
    assert saved_embedding_bytes(two) - saved_embedding_bytes(none) == 4 * 32 * 8
    reads = [traffic(embedding_operators(each).forward, "embedding") for each in (none, two)]
    assert [after - before for before, after in pairwise(reads)] == [2 * value]
