"""Layers that predict tokens beyond the next: their counts, their place, and what refuses them."""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from meshwright.hwprofiles import (
    ExpertOverlap,
    Recompute,
    RecomputeMethod,
    StageSplit,
    load_cluster,
    load_stack,
)
from meshwright.simulator import PlanError, ResolvedPlan, TrainingJob, simulate
from meshwright.simulator.account import message_traffic
from meshwright.simulator.blocks import (
    BlockShape,
    BlockTable,
    Collective,
    model_flops,
    num_rope_caches,
    walk,
)
from meshwright.simulator.layout import (
    Axis,
    head_cost_layers,
    model_stages,
    resolve_stages,
    stack_refusal,
)
from meshwright.simulator.model import (
    EMBEDDING,
    HEAD,
    PREDICTIONS,
    ModelSpec,
    count_active_parameters,
    count_parameters,
    load_model,
    parameter_tensors,
    parse_model,
    shares_embedding,
    with_layers,
    with_mtp_layers,
)

STACK = load_stack("megatron-core")
DEEPSEEK, GLM = load_model("deepseek-v3"), load_model("glm4.5")
OVERLAP = ExpertOverlap.MICROBATCHES
PLAN = ResolvedPlan(tp=2, pp=2, dp=8, ep=8, sequence_parallel=True, stages=(46, 46), zero_stage=1)


def predicting(number: int = 1) -> TrainingJob:
    model = with_mtp_layers(GLM, number)
    return TrainingJob(model=model, global_batch_size=64, seq_len=4096)


def test_they_are_a_layer_of_the_last_kind_a_product_and_three_norms() -> None:
    """DeepSeek's README_WEIGHTS.md: 11.5 B of its own, beside table and output matrix."""
    assert isinstance(DEEPSEEK, ModelSpec)
    width = DEEPSEEK.hidden_size
    layer = count_parameters(DEEPSEEK) - count_parameters(with_layers(DEEPSEEK, 60))
    with_one = with_mtp_layers(DEEPSEEK, 1)
    own = count_parameters(with_one) - count_parameters(DEEPSEEK)
    assert own == layer + 2 * width**2 + 3 * width
    assert own == pytest.approx(11.5e9, rel=0.01)
    assert count_parameters(DEEPSEEK) == 671_026_419_200
    # 2.4 B with table and output matrix.
    passed = count_active_parameters(with_one) - count_active_parameters(DEEPSEEK)
    assert passed + 2 * width * DEEPSEEK.vocab_size == pytest.approx(2.4e9, rel=0.06)


@pytest.mark.parametrize("kind", [PREDICTIONS, HEAD])
def test_they_and_the_head_are_written_with_as_many_weights_as_they_have(kind: str) -> None:
    shape = BlockShape.of(predicting(2), PLAN, STACK)
    block = walk(shape, kind).tape.block
    rows = shape.local_vocab_size * shape.model.hidden_size
    assert sum(int(each.numel) for each in block.weights) == shape.parameters[kind]
    assert shape.tied_embedding_parameters == rows
    tensors = parameter_tensors(shape.model, vocab_size=2 * shape.local_vocab_size)
    own = [each for each in tensors if each.block == kind]
    assert sum(prod(shape.local_shape(each)) for each in own) == shape.parameters[kind]


def test_model_flops_count_a_product_a_layer_and_logits_more() -> None:
    job = predicting()
    model, tokens = job.transformer, job.tokens_per_step
    deeper = replace(job, model=with_layers(with_mtp_layers(model, 0), model.num_layers + 1))
    ends = 2 * model.hidden_size * (2 * model.hidden_size + model.vocab_size)
    assert model_flops(job) == model_flops(deeper) + 3 * tokens * ends


def test_rules_of_stages_count_them_with_the_head() -> None:
    job = predicting()
    plain = with_mtp_layers(job.model, 0)
    assert head_cost_layers(job.transformer, 4096) > head_cost_layers(plain, 4096) + 1
    last = [resolve_stages(each, 4096, 8, StageSplit.BALANCED)[-1] for each in (job.model, plain)]
    assert last == [8, 10]


def test_their_tensor_parallel_calls_are_those_of_a_layer_a_look_up_and_a_product() -> None:
    """Gathered: what the product reads, in backward again, what it makes, and that's gradient."""
    job = predicting()
    shape, table = BlockShape.of(job, PLAN, STACK), BlockTable()
    plain = BlockShape.of(replace(job, model=GLM), PLAN, STACK)

    def calls(shape: BlockShape, kind: str) -> int:
        found = table.operators(shape, kind)
        every = (*found.forward, *found.backward)
        return sum(isinstance(each, Collective) and each.axis is Axis.TP for each in every)

    kind = job.transformer.layer_runs[-1].kind
    around_product, logits = 5, calls(plain, HEAD)
    layer, table_calls = calls(plain, kind), calls(plain, EMBEDDING)
    assert calls(shape, HEAD) == 2 * logits
    assert calls(shape, PREDICTIONS) == layer + table_calls + around_product


@pytest.mark.parametrize(("number", "num_tables"), [(1, 0), (2, 1)])
def test_the_gradient_of_their_table_waits_for_its_last_use(number: int, num_tables: int) -> None:
    """While another of them runs again; of one alone it is made when that is over."""

    def backward(vocab_size: int) -> int:
        job = predicting(number)
        model = job.transformer.model_copy(update={"vocab_size": vocab_size})
        plan = replace(PLAN, recompute=Recompute.FULL)
        shape = BlockShape.of(replace(job, model=model), plan, STACK)
        return BlockTable().memory(shape, PREDICTIONS).backward

    rows = (151_552 - 75_776) // PLAN.tp
    assert backward(151_552) - backward(75_776) == num_tables * 2 * rows * GLM.hidden_size


def test_stages_behind_them_keep_angles_of_all_streams() -> None:
    stages = model_stages(predicting(2).transformer, (92, 0, 0, 0), 1)
    found = [num_rope_caches(predicting(2).transformer, [each]) for each in stages]
    assert found == [1, 1, 3, 3]


def test_a_head_of_all_streams_keeps_the_buffer_that_tokens_are_gathered_into() -> None:
    whole, split = (
        BlockTable().memory(BlockShape.of(predicting(), plan, STACK), HEAD)
        for plan in (replace(PLAN, sequence_parallel=False), PLAN)
    )
    assert (whole.buffer, split.buffer) == (0, 2 * 4096 * GLM.hidden_size)


def test_both_ends_of_a_pipeline_share_the_table() -> None:
    assert shares_embedding(predicting().model)
    assert not shares_embedding(GLM)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt2", "positions='learned' does not go with prediction_layers=1; allowed: 'rotary'"),
        ("gemma3-27b", "norm_places='both' does not go with prediction_layers=1"),
        ("resnet50", "prediction_layers=1 does not go with resnet50; allowed: 0"),
    ],
)
def test_models_that_cannot_have_them_are_refused(name: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        with_mtp_layers(load_model(name), 1)


def test_a_configuration_that_is_asked_for_them_warns_no_more() -> None:
    said = "num_nextn_predict_layers=1 predict tokens beyond the next, which is left out"
    others = "router_jitter_noise=0.1 moves tokens before they are routed, which is not modelled"
    told = {**DEEPSEEK.model_dump(), "left_out": f"{said}; {others}"}
    model = with_mtp_layers(parse_model(told, origin="test"), 1)
    assert isinstance(model, ModelSpec)
    assert model.left_out == others


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recompute": Recompute.FULL, "recompute_layers": 1}, "recompute_layers=1"),
        (
            {
                "recompute": Recompute.FULL,
                "recompute_layers": 2,
                "recompute_method": RecomputeMethod.UNIFORM,
            },
            "recompute_layers=2",
        ),
    ],
)
def test_plans_that_megatron_core_has_not_with_them_are_refused(
    changes: dict[str, object], said: str
) -> None:
    plan = replace(PLAN, **changes)  # type: ignore[arg-type]  # fields of a plan
    assert said in (stack_refusal(predicting(), plan, STACK) or "")
    assert stack_refusal(replace(predicting(), model=GLM), plan, STACK) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prediction_stage": 0}, "allowed: 1 to 2, leave it out"),
        ({"stages": (31, 31, 30, 0), "prediction_stage": 1}, "allowed: 2 to 2, leave it out"),
        ({"prediction_stage": 3}, "is not behind all layers"),
        ({"num_virtual_stages": 2, "stages": (92, *[0] * 7), "prediction_stage": 4}, "5 to 6"),
    ],
)
def test_they_stand_where_megatron_core_lets_them(changes: dict[str, Any], said: str) -> None:
    """Of several stages of the first rank on none, where it would leave their table at zero."""
    usual = {"pp": 4, "dp": 4, "ep": 4, "stages": (46, 46, 0, 0), "prediction_stage": 2}
    plan = replace(PLAN, **usual)
    assert stack_refusal(predicting(), plan, STACK) is None
    first = replace(plan, stages=(92, 0, 0, 0), prediction_stage=0)
    assert stack_refusal(predicting(), first, STACK) is None
    said_of_none = stack_refusal(replace(predicting(), model=GLM), plan, STACK) or ""
    assert "prediction_stage=2 does not go with glm4.5, which predicts none" in said_of_none
    assert said in (stack_refusal(predicting(), replace(plan, **changes), STACK) or "")


def test_all_streams_travel_behind_them_with_their_sizes_ahead() -> None:
    plan = replace(PLAN, pp=4, dp=4, ep=4, stages=(46, 46, 0, 0), prediction_stage=2)
    job = predicting(2)
    counts = job.global_batch_size // plan.dp
    whole = job.seq_len * job.transformer.hidden_size * 2 // plan.tp
    for pp_rank, sizes in enumerate(((whole,), (whole, whole), (3 * whole, whole), (3 * whole,))):
        sent, received = message_traffic(job, plan, STACK, pp_rank)
        found = Counter({each.size_bytes: each.num_calls for each in sent})
        assert found == Counter(sizes * counts) + Counter({24: counts * len(sizes)})
        assert received == sent


@pytest.mark.parametrize(("number", "changes"), [(2, {}), (1, {"pp": 1, "stages": (92,)})])
def test_one_of_them_in_a_pipeline_is_beside_another_microbatch(
    number: int, changes: dict[str, object]
) -> None:
    """So Megatron-Core's TransformerConfig has it."""
    beside = replace(PLAN, tp=1, sequence_parallel=False, expert_overlap=OVERLAP, etp=1)
    plan = replace(beside, **changes)  # type: ignore[arg-type]  # fields of a plan
    said = "expert_overlap=microbatches is not offered by stack megatron-core@0.18 for glm4.5"
    assert said in (stack_refusal(predicting(number), plan, STACK) or "")
    in_pipeline = replace(
        beside, num_virtual_stages=2, schedule="interleaved", stages=(23, 23, 23, 23)
    )
    job = predicting(1)
    assert stack_refusal(job, in_pipeline, STACK) is None
    taken = [
        simulate(job, each, load_cluster("dgx-h100"), STACK).exposed_comm_s
        for each in (in_pipeline, replace(in_pipeline, expert_overlap=None))
    ]
    assert taken[0] < taken[1]


@pytest.mark.parametrize("name", ["torchtitan@0.2", "fsdp", "ddp", "megatron-lm-2022"])
def test_other_stacks_refuse_them_by_name(name: str) -> None:
    llama = with_mtp_layers(load_model("llama3-8b"), 1)
    job = TrainingJob(model=llama, global_batch_size=8, seq_len=4096)
    plan = ResolvedPlan(dp=8, zero_stage=load_stack(name).zero_stage, stages=(32,))
    said = "prediction_layers of llama3-8b is not offered"
    assert said in (stack_refusal(job, plan, load_stack(name)) or "")
