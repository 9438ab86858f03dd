"""Expert layers of Megatron-Core's local spec, against the graph's: every byte, FLOP and call.

Routing is balanced by Megatron-Core's own switch.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from block_graph import MEGATRON, GraphCase
from block_witness import Given, count_pass
from witnesses.boundary import objects_shared
from witnesses.expert_layers import (
    CHUNKED,
    FILLED,
    GATED,
    HEADS,
    LLAMA4,
    NEMOTRON,
    NUM_SEQUENCES,
    OSS,
    PLAIN,
    PLAIN_SHARING,
    SCOUT,
    SHARING,
    SPEC,
    TOKENS,
    derived,
)
from witnesses.megatron_experts import dispatched, megatron_layer, megatron_module

from meshwright.hwprofiles import RecomputeModule, load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.blocks.parts import chunk_tokens
from meshwright.simulator.blocks.parts.feed_forward import gated
from meshwright.simulator.graph import Block, Dim, Tensor
from meshwright.simulator.layout import Mesh, Stage
from meshwright.simulator.model import (
    EXPERT_LAYER,
    WINDOWED_EXPERT_LAYER,
    BlockKind,
    BlockRun,
    ModelSpec,
)
from meshwright.simulator.replication import reduced_parts, replication_of
from meshwright.simulator.replication.flat_units import flat_walk
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.programs.megatron import default_dtype

from witnesses import megatron_fsdp  # isort: skip  (after what stands for Apex)

from megatron.core import parallel_state  # isort: skip
from megatron.core.distributed import (  # isort: skip
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.transformer.mlp import MLP  # isort: skip


def centered(model: ModelSpec) -> ModelSpec:
    """Return *model* with the norm that Apex has: PyTorch's does not go with split tokens."""
    return model.model_copy(update={"norm": "layernorm"})


@pytest.mark.parametrize(
    ("model", "tp", "ep", "etp", "kind"),
    [
        (SPEC, 1, 1, 1, EXPERT_LAYER),
        (SHARING, 1, 1, 1, EXPERT_LAYER),
        (HEADS, 1, 1, 1, EXPERT_LAYER),
        (centered(SPEC), 2, 1, 2, EXPERT_LAYER),
        (centered(SHARING), 2, 1, 2, EXPERT_LAYER),
        (SPEC, 1, 4, 1, EXPERT_LAYER),
        (centered(SHARING), 2, 4, 1, EXPERT_LAYER),
        (centered(SPEC), 2, 2, 2, EXPERT_LAYER),
        (centered(SPEC), 2, 8, 1, EXPERT_LAYER),
        # Its local spec adds biases of experts in place, which autograd refuses without ep.
        (OSS, 1, 4, 1, EXPERT_LAYER),
        (centered(OSS), 2, 4, 1, WINDOWED_EXPERT_LAYER),
        (LLAMA4, 1, 1, 1, WINDOWED_EXPERT_LAYER),
        (LLAMA4, 1, 1, 1, EXPERT_LAYER),
        (centered(LLAMA4), 2, 4, 1, EXPERT_LAYER),
        (PLAIN, 1, 1, 1, EXPERT_LAYER),
        (PLAIN, 2, 4, 1, EXPERT_LAYER),
        (PLAIN, 2, 2, 2, EXPERT_LAYER),
        (PLAIN_SHARING, 2, 4, 1, EXPERT_LAYER),
        (NEMOTRON, 1, 4, 1, EXPERT_LAYER),
        (SCOUT, 1, 1, 1, WINDOWED_EXPERT_LAYER),
        (SCOUT, 1, 1, 1, EXPERT_LAYER),
        (CHUNKED, 1, 1, 1, WINDOWED_EXPERT_LAYER),
        (centered(CHUNKED), 2, 4, 1, WINDOWED_EXPERT_LAYER),
        (FILLED, 1, 1, 1, WINDOWED_EXPERT_LAYER),
        (GATED, 1, 1, 1, EXPERT_LAYER),
        (centered(GATED), 2, 4, 1, EXPERT_LAYER),
    ],
)
def test_an_expert_layer_of_megatrons_local_spec_is_byte_exact(
    model: ModelSpec, tp: int, ep: int, etp: int, kind: BlockKind
) -> None:
    """Layers that see all have no positions in Llama 4, others have."""
    assert_exact(model, (tp, ep, etp), kind)


@pytest.mark.parametrize(
    ("model", "tp", "ep", "modules"),
    [
        (SPEC, 1, 1, (RecomputeModule.MOE,)),
        (SHARING, 1, 1, (RecomputeModule.SHARED_EXPERTS,)),
        (GATED, 1, 1, (RecomputeModule.SHARED_EXPERTS,)),
        (centered(SHARING), 2, 4, (RecomputeModule.MOE,)),
    ],
)
def test_parts_of_an_expert_layer_that_run_again_are_byte_exact(
    model: ModelSpec, tp: int, ep: int, modules: tuple[RecomputeModule, ...]
) -> None:
    assert_exact(model, (tp, ep, 1), modules=modules)


def assert_exact(
    model: ModelSpec,
    degrees: tuple[int, int, int],
    kind: BlockKind = EXPERT_LAYER,
    modules: tuple[RecomputeModule, ...] = (),
) -> None:
    """Compare a layer on *degrees* of tp, ep and etp, of which *modules* run again."""
    tp, ep, etp = degrees
    experts = model.experts
    assert experts is not None
    groups = {(0, 1): "tp", tuple(range(0, etp * ep, etp)): "ep"}
    if etp > 1 < ep:
        groups[tuple(range(etp * ep))] = "etp-ep"
    with fake_cluster(0, max(tp, ep * etp)), dispatched(model, tp):
        with default_dtype(torch.bfloat16):
            is_turned = model.has_positions(kind)
            layer = megatron_layer(model, tp, ep, etp, rotary=is_turned, modules=modules)
        given = Given((TOKENS // tp, NUM_SEQUENCES, SPEC.hidden_size))
        found = count_pass(layer, [given], RankOracle(groups))
    # Attention keeps a buffer of scores and a number to scale them by: see test_layers.py.
    size = chunk_tokens(model, kind, TOKENS) or TOKENS
    buffer = 2 * NUM_SEQUENCES * -(-TOKENS // size) * SPEC.num_heads // tp * size**2
    # Without its fused kernel softmax keeps no such number.
    scale = 0 if model.attention_sinks else 4
    # Exchanges between the ranks of an expert, of which there is one, note how many rows they send.
    noted = 24 * (etp > 1 == ep)
    lasting = buffer + scale + noted
    # Without shared experts the forward pass is fullest in attention, before they do.
    early = 0 if experts.shared_hidden_size else noted
    assert derived(model, "megatron-core", tp, ep, etp, kind=kind, modules=modules) == replace(
        found,
        saved_bytes=found.saved_bytes - lasting,
        forward_peak_bytes=found.forward_peak_bytes - lasting + early,
        backward_peak_bytes=found.backward_peak_bytes - lasting,
        left_bytes=found.left_bytes - buffer - noted,
    )


def among_context_ranks(cp: int) -> AbstractContextManager[object]:
    """Let Megatron-Core make groups of so many context-parallel ranks.

    Its own attention has no part in them, so that its configuration does not know.
    """
    made = partial(parallel_state.initialize_model_parallel, context_parallel_size=cp)
    return patch.object(parallel_state, "initialize_model_parallel", made)


@pytest.mark.parametrize(
    ("model", "tp", "ep", "etp", "cp"),
    [
        (centered(SPEC), 1, 4, 1, 1),
        (centered(SPEC), 2, 2, 2, 1),
        (centered(SPEC), 2, 4, 1, 1),
        (centered(OSS), 2, 4, 1, 1),
        (centered(SPEC), 1, 4, 1, 2),
        (centered(SPEC), 1, 2, 1, 4),
        (centered(SPEC), 2, 4, 1, 2),
        (centered(SPEC), 2, 2, 2, 2),
    ],
)
def test_megatron_reduces_experts_in_buckets_over_the_ranks_that_hold_them(
    model: ModelSpec, tp: int, ep: int, etp: int, cp: int
) -> None:
    """A stage behind the first, so that each kind of weights has one bucket.

    Weights begin at multiples of 64, which leaves gaps behind the few numbers of sinks and biases.
    """
    experts = model.experts
    assert experts is not None
    ranks = 8
    with fake_cluster(0, ranks), dispatched(model, tp):
        with default_dtype(torch.bfloat16), among_context_ranks(cp):
            layer = megatron_module(model, tp, ep, etp)
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
        found = DistributedDataParallel(layer.config, settings, layer, disable_bucketing=True)
        counted = [
            [
                (sum(weight.numel() for weight in each.params), buffer.data_parallel_world_size)
                for each in buffer.buckets
            ]
            for buffer in (*found.buffers, *found.expert_parallel_buffers)
        ]
    plan = ResolvedPlan(
        tp=tp,
        cp=cp,
        dp=ranks // (tp * cp),
        ep=ep,
        etp=etp,
        zero_stage=1,
        sequence_parallel=tp > 1,
        stages=(2,),
    )
    stack = load_stack("megatron-core")
    shape = BlockShape.of(
        TrainingJob(model=model, global_batch_size=8, seq_len=TOKENS), plan, stack
    )
    replication = replication_of(plan, stack, Mesh.of(plan))
    assert replication.experts is not None
    stage = Stage((BlockRun(EXPERT_LAYER, 1),), has_embedding=False, has_head=False)
    (part,) = reduced_parts(shape, stage, replication)
    ours = [
        [(size, replication.dp_cp) for size in part.buckets],
        [(size, replication.experts.dp_cp) for size in part.expert_buckets],
    ]
    assert counted == ours


@pytest.mark.parametrize(
    ("model", "tp", "ep", "etp"),
    [(centered(SPEC), 1, 4, 1), (centered(SPEC), 2, 2, 2), (centered(GATED), 2, 8, 1)],
)
def test_megatron_fsdp_has_a_flat_bucket_for_the_experts_of_a_layer(
    model: ModelSpec, tp: int, ep: int, etp: int
) -> None:
    """Two layers, of which each has its weights in two buckets, over the ranks that share them."""
    ranks = 8
    with fake_cluster(0, ranks), dispatched(model, tp), objects_shared():
        with default_dtype(torch.bfloat16):
            layers = [megatron_module(model, tp, ep, etp) for _ in range(2)]
        found = megatron_fsdp.wrap(layers[0].config, torch.nn.ModuleList(layers))
        counted = [
            (
                group.model_weight_buffer.bucket_index.size,
                group.is_expert_param,
                group.model_weight_buffer.data_parallel_group.size(),
            )
            for group in found.param_and_grad_buffer.parameter_groups
        ]
    plan = ResolvedPlan(
        tp=tp, dp=ranks // tp, ep=ep, etp=etp, zero_stage=3, sequence_parallel=tp > 1, stages=(2,)
    )
    stack = load_stack("megatron-core")
    shape = BlockShape.of(
        TrainingJob(model=model, global_batch_size=8, seq_len=TOKENS), plan, stack
    )
    stage = Stage((BlockRun(EXPERT_LAYER, 2),), has_embedding=True, has_head=True)
    sharing = ranks // tp, ranks // (ep * etp)
    assert counted == [
        (bucket.size, bucket.is_expert, sharing[bucket.is_expert])
        for unit in flat_walk(shape, stage, ranks // tp).units
        for bucket in unit.buckets
    ]


def test_the_gate_of_shared_experts_is_byte_exact_by_itself() -> None:
    """In a whole layer nothing of it is at the peak; here experts hand over what they are given."""
    tokens, batch, width = TOKENS, NUM_SEQUENCES, SPEC.hidden_size
    with fake_cluster(0, 1), dispatched(GATED, 1):
        with default_dtype(torch.bfloat16):
            shared = megatron_module(GATED, 1, 1, 1).mlp.shared_experts

        def run(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            with patch.object(MLP, "forward", lambda *_: (out, None)):
                return shared(x)

        found = count_pass(run, [Given((tokens, batch, width))] * 2, RankOracle({}))

    def build(block: Block) -> Sequence[Tensor]:
        dims = Dim("tokens", tokens), Dim("batch", batch), Dim("hidden", width)
        x, out = (block.tensor(name, *dims) for name in ("x", "out"))
        with block.module(x, out):
            gated(block, x, out)
        return x, out

    assert GraphCase(build=build, lowering=MEGATRON).derive() == found
