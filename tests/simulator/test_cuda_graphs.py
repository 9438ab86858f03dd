"""CUDA graphs, expert capacity and the allocator: switches of a stack that combine."""

from dataclasses import replace

import pytest

from meshwright.hwprofiles import (
    Allocator,
    CudaGraphImpl,
    CudaGraphs,
    Precision,
    StackProfile,
    list_releases,
    load_cluster,
    load_stack,
)
from meshwright.simulator import ResolvedPlan, StepResult, TrainingJob, load_model
from meshwright.simulator import simulate as simulated
from meshwright.simulator.blocks import BlockShape, BlockTable, HostPasses
from meshwright.simulator.costs import issue_ps
from meshwright.simulator.costs.host import host_wait_s
from meshwright.simulator.layout import Stage, stack_refusal
from meshwright.simulator.memory import BlockMemory, block_bytes, pass_workspace_bytes
from meshwright.simulator.model import (
    EMBEDDING,
    EXPERT_LAYER,
    HEAD,
    TRANSFORMER_LAYER,
    BlockRun,
)

CORE, CLUSTER = load_stack("megatron-core"), load_cluster("dgx-h100")
LLAMA, QWEN = load_model("llama3-8b"), load_model("qwen3-30b-a3b")
NONE, LAYERS, WHOLE = CudaGraphs.NONE, CudaGraphs.LAYERS, CudaGraphs.WHOLE_STEP


def switched(**facts: object) -> StackProfile:
    return CORE.model_copy(update=facts)


@pytest.mark.parametrize(
    ("graphs", "capacity", "waits_us", "issues_us"),
    [
        # A pass waits 150 us and 50 an expert of 16; the host starts it in 1,200 and 130 each.
        (NONE, None, 950, 3280),
        (NONE, 1.0, 150, 3280),
        (LAYERS, None, 0, 2080),
        (LAYERS, 1.5, 0, 0),
        (WHOLE, None, 0, 0),
        (WHOLE, 1.0, 0, 0),
    ],
)
def test_the_host_does_what_no_graph_has_captured(
    graphs: CudaGraphs, capacity: float | None, waits_us: float, issues_us: float
) -> None:
    passes = HostPasses("host", 1, experts=16)
    stack = switched(cuda_graphs=graphs, expert_capacity=capacity)
    assert host_wait_s(passes, stack) * 1e6 == pytest.approx(waits_us)
    assert issue_ps([passes], stack, CLUSTER) == issues_us * 10**6


def test_a_graph_of_a_layer_has_an_input_and_a_mask_of_its_own() -> None:
    """Beside what it keeps: a byte for each pair of 1,024 tokens, and a whole layer's output."""
    hidden = 1024 * LLAMA.hidden_size * 2
    sizes = {}
    for graphs, impl in (
        (NONE, "transformer_engine"),
        (LAYERS, "transformer_engine"),
        (
            LAYERS,
            "local",
        ),
    ):
        stack = switched(cuda_graphs=graphs, cuda_graph_impl=CudaGraphImpl(impl))
        job = TrainingJob(model=LLAMA, global_batch_size=1, seq_len=1024)
        shape = BlockShape.of(job, ResolvedPlan(stages=(32,)), stack)
        sizes[graphs, impl] = block_bytes(BlockTable(), shape)
    without, theirs, local = sizes.values()
    layer = TRANSFORMER_LAYER
    assert theirs[layer].saved - without[layer].saved == 1024 * 1024 + hidden
    assert theirs[layer].buffer - without[layer].buffer == hidden
    assert theirs[HEAD] == without[HEAD]
    assert local == without


def test_a_graph_that_leaves_experts_out_hands_on_what_the_layer_keeps() -> None:
    job = TrainingJob(model=QWEN, global_batch_size=1, seq_len=1024)
    saved = [
        block_bytes(
            BlockTable(), BlockShape.of(job, ResolvedPlan(stages=(48,)), switched(**facts))
        )[EXPERT_LAYER].saved
        for facts in (
            {},
            {"cuda_graphs": LAYERS},
            {"expert_capacity": 1.0},
            {"cuda_graphs": LAYERS, "expert_capacity": 1.0},
        )
    ]
    assert saved[1] - saved[0] == 1024 * 1024
    assert saved[3] - saved[2] == 1024 * 1024 + 1024 * QWEN.hidden_size * 2


def test_the_pool_of_graphs_is_beside_what_ends_of_the_model_need() -> None:
    """In one pool a layer's 30 take the place of a head's 50; in two both are there."""

    nothing = BlockMemory[int](*[0] * len(BlockMemory._fields))

    def block(saved: int, forward: int, backward: int) -> BlockMemory[int]:
        return nothing._replace(saved=saved, forward=forward, backward=backward, holding=backward)

    blocks = {
        EMBEDDING: block(0, 1, 45),
        TRANSFORMER_LAYER: block(10, 20, 30),
        HEAD: block(5, 40, 50),
    }
    stage = Stage((BlockRun(TRANSFORMER_LAYER, 2),), has_embedding=True, has_head=True)
    assert pass_workspace_bytes(blocks, stage) == (40, 50)
    assert pass_workspace_bytes(blocks, stage, has_pools=True) == (40 + 20, 50 + 30)


def step_of(stack: StackProfile, **fields: object) -> StepResult:
    job = TrainingJob(model=LLAMA, global_batch_size=8, seq_len=2048, precision=Precision.BF16)
    plan = ResolvedPlan(tp=2, dp=4, zero_stage=1, stages=(32,))
    return simulated(job, replace(plan, **fields), CLUSTER, stack)


def test_a_whole_step_keeps_its_pool_while_parameters_are_updated() -> None:
    """Of gradients that are kept in bf16 the update makes a copy of its share in fp32."""
    halves = {"gradient_precision": Precision.BF16, "reduce_precision": Precision.BF16}
    peaks = [
        step_of(switched(cuda_graphs=graphs), **halves).memory.peak_bytes
        for graphs in (NONE, WHOLE)
    ]
    (stage,) = step_of(CORE, **halves).memory.by_stage
    num_parameters = stage.parameters_bytes // 2
    assert peaks[1] - peaks[0] == -(-num_parameters // 4) * 4
    same = [step_of(switched(cuda_graphs=graphs)).memory.peak_bytes for graphs in (NONE, WHOLE)]
    assert same[0] == same[1]


def test_expandable_segments_hold_nothing_beyond() -> None:
    fixed, grown = step_of(CORE).memory, step_of(switched(allocator=Allocator.EXPANDABLE)).memory
    assert fixed.peak_bytes == grown.peak_bytes
    workspace = grown.overheads.workspace_bytes
    assert grown.reserved_bytes == grown.peak_bytes + workspace
    (stage,) = fixed.by_stage
    states = stage.parameters_bytes + stage.gradients_bytes + stage.optimizer_states_bytes
    passing = fixed.peak_bytes + workspace - states
    assert fixed.reserved_bytes == int(1.12 * passing + 1.03 * states)


# run_train.sh of torchtitan sets it, from October 2024 on (run_llama_train.sh then).
@pytest.mark.parametrize("name", list_releases("torchtitan"))
def test_torchtitan_starts_with_expandable_segments(name: str) -> None:
    assert load_stack(name).allocator == Allocator.EXPANDABLE


@pytest.mark.parametrize(
    ("facts", "fields", "told"),
    [
        ({"cuda_graphs": LAYERS}, {"recompute": "full"}, "recompute=full"),
        ({"cuda_graphs": WHOLE}, {"recompute": "full"}, None),
        ({"cuda_graphs": LAYERS, "kernels": "eager"}, {}, "go with cuda_graphs=layers; allowed"),
        ({"expert_capacity": 1.5, "kernels": "eager"}, {}, "go with expert_capacity=1.5; allow"),
    ],
)
def test_what_megatron_core_refuses_with_graphs_is_refused(
    facts: dict[str, object], fields: dict[str, object], told: str | None
) -> None:
    job = TrainingJob(model=LLAMA, global_batch_size=8, seq_len=2048)
    plan = replace(ResolvedPlan(dp=8, stages=(32,)), **fields)
    refusal = stack_refusal(job, plan, switched(**facts))
    assert (refusal is None) if told is None else (told in str(refusal))


def test_a_stack_captures_no_more_than_it_offers() -> None:
    facts = load_stack("torchtitan@0.2").model_dump() | {"cuda_graphs": LAYERS}
    with pytest.raises(ValueError, match="cuda_graphs: layers is not in cuda_graph_modes"):
        StackProfile.model_validate(facts)
    facts = CORE.model_dump() | {"cuda_graph_impl": "local"}
    with pytest.raises(ValueError, match="cuda_graph_impl: local says how layers are captured"):
        StackProfile.model_validate(facts)


def test_old_names_are_their_switches() -> None:
    names = {
        "megatron-core-graphs": (LAYERS, None),
        "megatron-core-capacity": (NONE, 1.0),
        "megatron-core-capacity-graphs": (LAYERS, 1.0),
        "megatron-core-fused": (WHOLE, None),
    }
    for name, switches in names.items():
        stack = load_stack(name)
        assert (stack.cuda_graphs, stack.expert_capacity) == switches
    assert load_stack("megatron-core-blackwell").allocator == Allocator.EXPANDABLE
