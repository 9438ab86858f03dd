"""The proof of a search, over whole spaces: exact memory, valid bounds, the true optimum."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from meshwright.hwprofiles import (
    GIBI,
    Allocator,
    Attention,
    ContextParallel,
    CudaGraphs,
    Dispatcher,
    ExpertOverlap,
    Kernels,
    Offload,
    OffloadModule,
    Precision,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    StackProfile,
    StageSplit,
    load_cluster,
    load_stack,
    with_facts,
)
from meshwright.planner import SpaceLimits, enumerate_space
from meshwright.planner.bounds.bounds import StepBounds
from meshwright.planner.footprint import (
    device_bytes_column,
    host_bytes_column,
    least_state_bytes,
    peak_bytes,
)
from meshwright.planner.footprint.least import least_bytes
from meshwright.planner.footprint.pass_table import max_weighted_sums
from meshwright.planner.search import search
from meshwright.planner.space import PASSES, SWITCHES
from meshwright.planner.space.shapes import ShapeTable
from meshwright.simulator import CostModel, ModelSpec, PlanError, TrainingJob, load_model, simulate
from meshwright.simulator.blocks import BlockTable
from meshwright.simulator.engine import steady, work
from meshwright.simulator.model import AnyModel, Experts, LatentAttention, parse_any_model
from meshwright.simulator.model.huggingface import read_config


class Case(NamedTuple):
    """A whole space small enough to simulate."""

    model: AnyModel
    cluster: str
    stack: str
    num_gpus: int
    batch: int
    memory_limit_bytes: int | None = None
    precision: Precision = Precision.BF16
    limits: SpaceLimits = SpaceLimits()
    changes: tuple[tuple[str, object], ...] = ()
    frees_switches: bool = False
    imbalance: float = 1.0


def spec(name: str, **sizes: object) -> ModelSpec:
    return ModelSpec.model_validate({"name": name, "vocab_size": 50257, "seq_len": 512, **sizes})


UNEVEN = spec("uneven", num_layers=7, hidden_size=512, num_heads=8)
BETWEEN = spec("between", num_layers=10, hidden_size=768, num_heads=12)
GROUPED = spec(
    "grouped",
    num_layers=8,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=4,
    ffn_hidden_size=2816,
    gated_mlp=True,
    tied_embeddings=False,
    positions="rotary",
    norm="rmsnorm",
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    dropout=False,
)
LONG = GROUPED.model_copy(update={"name": "long", "seq_len": 4096})
CHAIN = parse_any_model(
    {
        "name": "chain",
        "kind": "chain",
        "linear": [
            {"inputs": 512, "outputs": 1024, "bias": True, "activation": True},
            {"inputs": 1024, "outputs": 256},
            {"inputs": 256, "outputs": 256, "count": 4, "activation": True},
        ],
    },
    origin="test",
)
ROUTED = GROUPED.model_copy(
    update={
        "name": "routed",
        "num_layers": 4,
        "experts": Experts(
            num_experts=4, experts_per_token=2, hidden_size=1024, shared_hidden_size=512
        ),
    }
)
QWEN = parse_any_model(
    read_config(
        {
            "model_type": "qwen2_moe",
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "max_position_embeddings": 512,
            "moe_intermediate_size": 1024,
            "num_attention_heads": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "shared_expert_intermediate_size": 512,
            "vocab_size": 50257,
        },
        path=Path("qwen/config.json"),
    ),
    origin="qwen",
)
# One dense layer before those with experts: stages of two kinds.
PART_ROUTED = ROUTED.model_copy(
    update={"experts": ROUTED.experts.model_copy(update={"first_dense_layers": 1})}
)
GATED = PART_ROUTED.model_copy(
    update={"experts": PART_ROUTED.experts.model_copy(update={"shared_gate": True})}
)
DEEP_ROUTED = PART_ROUTED.model_copy(update={"num_layers": 7})
# As DeepSeek-V3 has them.
LATENT = PART_ROUTED.model_copy(
    update={
        "num_kv_heads": PART_ROUTED.num_heads,
        "latent": LatentAttention(
            query_rank=96, kv_rank=64, plain_head_dim=48, rotary_head_dim=16, value_head_dim=32
        ),
        "experts": PART_ROUTED.experts.model_copy(
            update={"scores": "sigmoid", "routing_bias": True}
        ),
    }
)
# Chunks, of which the last is filled up, and sinks beside experts with biases, in a dense layer no
# positions: four kinds of layers.
MIXED = PART_ROUTED.model_copy(
    update={
        "window": 192,
        "chunked_window": True,
        "layer_pattern": "FWWF",
        "rotary_layers": "windowed",
        "attention_sinks": True,
        "experts": PART_ROUTED.experts.model_copy(
            update={
                "scores": "softmax of chosen",
                "bias": True,
                "activation": "clamped",
                "shared_hidden_size": 0,
                "first_dense_layers": 2,
            }
        ),
    }
)
# As torchtitan has Llama 4: experts in every other layer, positions in two of three.
IN_TURN = ROUTED.model_copy(
    update={
        "window": ROUTED.seq_len,
        "chunked_window": True,
        "layer_pattern": "FWW",
        "rotary_layers": "windowed",
        "experts": ROUTED.experts.model_copy(
            update={
                "experts_per_token": 1,
                "scores": "sigmoid",
                "weighs_inputs": True,
                "layer_step": 2,
            }
        ),
    }
)
WIDE = spec("wide", num_layers=4, hidden_size=4096, num_heads=32, vocab_size=250_000)


def facts_of(stack: StackProfile) -> tuple[tuple[str, object], ...]:
    return tuple((name, getattr(stack, name)) for name in stack.model_fields)


_, HALF = with_facts(
    load_cluster("dgx-h100"), load_stack("torchtitan@0.2"), ["parameter_precision=bf16"]
)
_, NARROW = with_facts(
    load_cluster("dgx-h100"), load_stack("torchtitan@0.2"), ["fp8.gathers_parameters=true"]
)
SMALL = spec("small", num_layers=4, hidden_size=512, num_heads=8, tied_embeddings=False)
FEW = SpaceLimits(
    recompute=(Recompute.NONE,), sequence_parallel=(False,), max_tp=2, max_microbatch_size=2
)
# Microbatches of few sizes: cases beside those of gpt2 and uneven layers are about other things.
ONE_SIZE = SpaceLimits(max_microbatch_size=1)
TWO_SIZES = SpaceLimits(max_microbatch_size=2)
FEW_CUT = {"recompute": (Recompute.NONE, Recompute.SELECTIVE), "max_microbatch_size": 1}
# Each switch that a stack offers, in small spaces of which every layout is simulated.
SWITCHED = {
    f"switches of {stack}": Case(
        SMALL,
        cluster,
        stack,
        num_gpus,
        batch,
        limits=FEW,
        frees_switches=True,
        # Also what has no shards, which torchtitan would compute in fp32: its bounds are sharp.
        changes=(("casts_shards_alone", False),) if stack == "torchtitan" else (),
    )
    for stack, cluster, num_gpus, batch in (
        ("torchtitan", "dgx-h100", 8, 16),
        ("fsdp", "a100-4xhdr200", 8, 16),
        ("ddp", "a100-4xhdr200", 8, 32),
        ("deepspeed", "dgx-a100", 8, 16),
        ("megatron-core", "dgx-a100", 8, 16),
    )
}

CASES = {
    **SWITCHED,
    "weights of 16 bits": Case(
        SMALL,
        "dgx-h100",
        "torchtitan",
        4,
        16,
        limits=SpaceLimits(recompute=(Recompute.NONE,), max_tp=2, max_microbatch_size=2),
        changes=facts_of(HALF),
    ),
    "weights gathered in 8 bits": Case(
        GROUPED,
        "dgx-h100",
        "torchtitan",
        4,
        32,
        precision=Precision.FP8,
        limits=SpaceLimits(recompute=(Recompute.NONE,), max_tp=2, max_microbatch_size=4),
        changes=facts_of(NARROW),
    ),
    "tokens move in pieces": Case(
        GROUPED,
        "dgx-h100",
        "torchtitan",
        4,
        32,
        limits=SpaceLimits(recompute=(Recompute.NONE,), max_microbatch_size=4),
        changes=(("tp_in_pieces", True),),
    ),
    "some layers run again": Case(
        GROUPED,
        "dgx-h100",
        "megatron-core",
        4,
        8,
        6 * GIBI,
        limits=SpaceLimits(
            max_recompute_layers=3, recompute=(Recompute.FULL,), max_tp=2, max_microbatch_size=2
        ),
    ),
    "layers run again together": Case(
        PART_ROUTED,
        "dgx-h100",
        "megatron-core",
        4,
        8,
        limits=SpaceLimits(
            recompute_layers=(1, 2),
            recompute_method=(RecomputeMethod.UNIFORM,),
            recompute=(Recompute.FULL,),
            max_microbatch_size=1,
        ),
    ),
    "every other layer runs again": Case(
        GROUPED,
        "dgx-h100",
        "torchtitan@0.2",
        4,
        8,
        limits=SpaceLimits(
            recompute_layers=(None, 2, 3),
            recompute_method=(RecomputeMethod.EVERY,),
            recompute=(Recompute.FULL,),
            max_tp=2,
            max_microbatch_size=2,
        ),
        changes=(("casts_shards_alone", False),),  # as above
    ),
    "parts of layers run again": Case(
        ROUTED,
        "dgx-h100",
        "megatron-core",
        4,
        8,
        limits=SpaceLimits(
            recompute_modules=((), (RecomputeModule.MOE_ACT, RecomputeModule.LAYERNORM)),
            recompute=(Recompute.NONE, Recompute.SELECTIVE),
            max_microbatch_size=1,
            max_tp=1,
        ),
    ),
    "first layers wait on the host": Case(
        GROUPED,
        "dgx-h100",
        "megatron-core-2026",
        4,
        8,
        limits=SpaceLimits(
            offload_layers=(None, 1, 3),
            zero_stage=(0, 1, 3),
            recompute=(Recompute.NONE, Recompute.FULL),
            max_tp=2,
            max_microbatch_size=2,
        ),
    ),
    "parts of layers wait on the host": Case(
        PART_ROUTED.model_copy(update={"prediction_layers": 1}),
        "dgx-h100",
        "megatron-core-2026",
        4,
        8,
        limits=SpaceLimits(
            offload_modules=((), tuple(OffloadModule)[1:], (OffloadModule.CORE_ATTN,)),
            recompute_modules=((), (RecomputeModule.MOE_ACT, RecomputeModule.LAYERNORM)),
            recompute=(Recompute.NONE, Recompute.SELECTIVE),
            max_pp=2,
            max_tp=2,
            max_microbatch_size=1,
        ),
    ),
    "outputs run again in 8 bits": Case(
        LATENT,
        "dgx-b200",
        "megatron-core-2026",
        8,
        16,
        precision=Precision.MXFP8,
        limits=SpaceLimits(
            recompute=(Recompute.SELECTIVE,),
            recompute_modules=((), (RecomputeModule.MOE_ACT, RecomputeModule.LAYERNORM)),
            max_microbatch_size=1,
            max_pp=2,
        ),
    ),
    "moments in every format": Case(
        UNEVEN,
        "dgx-a100",
        "megatron-core",
        4,
        8,
        limits=SpaceLimits(
            moment_precision=(None, Precision.FP32, Precision.BF16, Precision.FP8),
            gradient_precision=(None, Precision.BF16),
            recompute=(Recompute.NONE,),
            max_microbatch_size=1,
            max_tp=1,
            max_pp=2,
        ),
        frees_switches=True,
    ),
    "instances of the distributed optimizer": Case(
        PART_ROUTED,
        "dgx-h100",
        "megatron-core",
        16,
        16,
        limits=SpaceLimits(
            dp_shard=(None, 1, 2, 4),
            recompute=(Recompute.NONE,),
            max_microbatch_size=1,
            max_tp=2,
            max_pp=2,
        ),
        frees_switches=True,
    ),
    "a layer that predicts further": Case(
        PART_ROUTED.model_copy(update={"prediction_layers": 1}),
        "dgx-h100",
        "megatron-core",
        4,
        8,
        limits=SpaceLimits(max_microbatch_size=1, max_tp=2),
    ),
    "predictions and loss alone on a stage": Case(
        GROUPED.model_copy(update={"num_layers": 6, "prediction_layers": 1}),
        "dgx-h100",
        "megatron-core",
        6,
        12,
        limits=SpaceLimits(max_microbatch_size=1, stages=(StageSplit.ENDS,)),
    ),
    "microbatches in larger groups": Case(
        GROUPED,
        "dgx-h100",
        "megatron-core",
        4,
        24,
        limits=SpaceLimits(
            microbatch_group_size=(None, 3, 5, 6),
            recompute=(Recompute.NONE,),
            sequence_parallel=(False,),
            max_microbatch_size=1,
        ),
    ),
    "optimizers on the host": Case(
        SMALL,
        "dgx-a100",
        "deepspeed",
        8,
        16,
        limits=SpaceLimits(
            offload=tuple(Offload), max_tp=2, max_microbatch_size=2, recompute=(Recompute.NONE,)
        ),
        frees_switches=True,
    ),
    "a rank with its optimizer on the host": Case(
        SMALL,
        "dgx-a100",
        "deepspeed",
        1,
        16,
        limits=SpaceLimits(offload=tuple(Offload)),
        frees_switches=True,
    ),
    "shards on the host": Case(
        GROUPED,
        "dgx-a100",
        "fsdp",
        4,
        16,
        limits=SpaceLimits(
            offload=(Offload.NONE, Offload.PARAMETERS), max_microbatch_size=4, max_tp=1
        ),
        frees_switches=True,
    ),
    "shards on hosts in a pipeline": Case(
        GROUPED,
        "dgx-h100",
        "torchtitan",
        8,
        128,
        limits=SpaceLimits(
            offload=(Offload.NONE, Offload.PARAMETERS),
            recompute=(Recompute.NONE,),
            max_tp=1,
            pp=(1, 2),
            microbatch_size=(8,),
            schedule=("1f1b", "interleaved"),
            reduce_precision=(None,),
        ),
        frees_switches=True,
        changes=(("casts_shards_alone", False),),  # as above
    ),
    "gpt2 on one node": Case(load_model("gpt2"), "dgx-a100", "megatron-core", 8, 16),
    "gpt2 on a partial node": Case(
        load_model("gpt2"), "dgx-a100", "megatron-lm-2022", 6, 12, limits=TWO_SIZES
    ),
    "shares that are no whole numbers": Case(UNEVEN, "dgx-a100", "megatron-core", 6, 12),
    "uneven layers, blocking messages": Case(UNEVEN, "dgx-a100-40", "megatron-lm-2021", 16, 32),
    "greedy stages, host cost": Case(UNEVEN, "jean-zay-a100", "megatron-deepspeed-2022", 16, 32),
    "shared network cards": Case(
        GROUPED, "a100-4xhdr200", "megatron-core", 16, 16, limits=ONE_SIZE
    ),
    "fp16 on V100": Case(
        GROUPED, "dgx-1v", "megatron-lm-2022", 8, 16, precision=Precision.FP16, limits=ONE_SIZE
    ),
    "fp32": Case(
        UNEVEN, "dgx-a100", "megatron-lm-2022", 8, 16, precision=Precision.FP32, limits=ONE_SIZE
    ),
    "copies of weights with scales": Case(
        GROUPED, "dgx-b300", "megatron-core", 16, 16, precision=Precision.MXFP8, limits=ONE_SIZE
    ),
    "fp8 with sharded parameters": Case(
        GROUPED,
        "dgx-h100",
        "torchtitan-2024-12",
        8,
        16,
        precision=Precision.FP8,
        limits=SpaceLimits(max_pp=2, microbatch_size=(4, 8)),
    ),
    "large vocabulary, tight memory": Case(
        WIDE, "dgx-a100", "megatron-core", 16, 32, 12 * GIBI, limits=ONE_SIZE
    ),
    "tight memory, no sharding": Case(WIDE, "dgx-a100-40", "megatron-lm-2021", 8, 16, 30 * GIBI),
    "embedding and head count as layers": Case(
        BETWEEN,
        "dgx-h100",
        "megatron-core",
        12,
        24,
        limits=SpaceLimits(max_tp=2, max_microbatch_size=1),
    ),
    "sharded parameters in a pipeline": Case(
        GROUPED,
        "dgx-h100",
        "torchtitan",
        16,
        16,
        limits=SpaceLimits(max_microbatch_size=1, max_pp=4),
        changes=(("casts_shards_alone", False),),  # as above
    ),
    "one rank is not wrapped": Case(
        GROUPED,
        "dgx-a100",
        "torchtitan@0.2",
        4,
        8,
        precision=Precision.FP32,
        limits=SpaceLimits(max_microbatch_size=1, max_pp=2),
    ),
    "whole gradients between microbatches": Case(
        # With few words gradients decide the peak, not logits.
        GROUPED.model_copy(update={"vocab_size": 512}),
        "dgx-h100",
        "torchtitan",
        8,
        32,
        limits=SpaceLimits(max_pp=2, max_microbatch_size=2),
        changes=(("reduces_each_microbatch", False),),
    ),
    "sharded parameters without overlap": Case(UNEVEN, "dgx-a100", "fsdp", 16, 64),
    "layers split a module at a time": Case(
        GROUPED, "a100-4xhdr200", "fsdp", 8, 16, limits=TWO_SIZES
    ),
    "owners broadcast": Case(
        UNEVEN, "dgx-a100", "zero-broadcast", 16, 64, precision=Precision.FP16
    ),
    "sharded gradients": Case(UNEVEN, "jean-zay-a100", "deepspeed", 16, 64, limits=TWO_SIZES),
    "eager layers and their buffer": Case(
        GROUPED,
        "dgx-a100",
        "megatron-core",
        8,
        16,
        limits=ONE_SIZE,
        changes=(("kernels", Kernels.EAGER), ("attention", Attention.UNFUSED)),
    ),
    "many small buckets": Case(UNEVEN, "a100-4xhdr200", "ddp", 16, 64),
    "pinned axes": Case(
        load_model("gpt2"),
        "dgx-a100",
        "megatron-core",
        16,
        32,
        limits=SpaceLimits(pp=(4,), max_tp=4, max_microbatch_size=4),
    ),
    "blocks of several kinds": Case(
        load_model("resnet50"), "dgx-a100", "deepspeed", 4, 32, limits=SpaceLimits(max_pp=4)
    ),
    "a chain": Case(CHAIN, "dgx-a100", "megatron-core", 4, 32),
    "experts in some layers": Case(
        GATED,
        "dgx-h100",
        "megatron-core-graphs",
        4,
        8,
        precision=Precision.FP8,
        limits=ONE_SIZE,
    ),
    "exchanges beside another microbatch": Case(
        ROUTED,
        "a100-4xhdr200",
        "megatron-core",
        8,
        16,
        limits=SpaceLimits(
            expert_overlap=(None, ExpertOverlap.MICROBATCHES, ExpertOverlap.DELAYED_WEIGHTS),
            max_microbatch_size=1,
            max_tp=2,
            sequence_parallel=(True, False),
            recompute=(Recompute.NONE,),
            gradient_precision=(None,),
        ),
        frees_switches=True,
    ),
    "layers in CUDA graphs": Case(
        UNEVEN,
        "dgx-h100",
        "megatron-core",
        4,
        8,
        limits=SpaceLimits(max_microbatch_size=1, gradient_precision=(None,)),
        changes=(("cuda_graphs", CudaGraphs.LAYERS),),
        frees_switches=True,
    ),
    "a step in one CUDA graph, in expandable segments": Case(
        UNEVEN,
        "dgx-h100",
        "megatron-core",
        4,
        8,
        limits=SpaceLimits(max_microbatch_size=1, moment_precision=(None, Precision.BF16)),
        changes=(
            ("cuda_graphs", CudaGraphs.WHOLE_STEP),
            ("allocator", Allocator.EXPANDABLE),
        ),
    ),
    "experts with a capacity in CUDA graphs": Case(
        ROUTED,
        "dgx-h100",
        "megatron-core",
        8,
        16,
        limits=SpaceLimits(max_microbatch_size=2, max_tp=2, gradient_precision=(None,)),
        changes=(("cuda_graphs", CudaGraphs.LAYERS), ("expert_capacity", 1.3)),
        imbalance=1.5,
    ),
    "pairs of stages of two kinds": Case(
        DEEP_ROUTED,
        "dgx-h100",
        "megatron-core",
        8,
        24,
        limits=SpaceLimits(
            expert_overlap=(None, ExpertOverlap.MICROBATCHES),
            max_microbatch_size=1,
            pp=(2, 4),
            max_tp=1,
            zero_stage=(1,),
            recompute=(Recompute.NONE, Recompute.SELECTIVE),
            gradient_precision=(None,),
        ),
        frees_switches=True,
    ),
    "experts divided among nodes": Case(
        ROUTED,
        "a100-4xhdr200",
        "megatron-core",
        8,
        16,
        limits=SpaceLimits(
            max_microbatch_size=1,
            max_pp=2,
            sequence_parallel=(True,),
            recompute=(Recompute.NONE,),
            dispatcher=(None, Dispatcher.HYBRIDEP),
        ),
        imbalance=1.5,
    ),
    "latents and routing biases": Case(
        LATENT,
        "a100-4xhdr200",
        "megatron-core",
        8,
        16,
        limits=SpaceLimits(
            max_microbatch_size=1,
            max_pp=2,
            max_tp=2,
            cp=(1, 4),
            cp_type=(ContextParallel.HYBRID_RING, None),
            recompute=(Recompute.NONE,),
            gradient_precision=(None,),
        ),
    ),
    "layers of four kinds": Case(
        MIXED,
        "a100-4xhdr200",
        "megatron-core",
        8,
        16,
        limits=SpaceLimits(
            max_microbatch_size=1,
            max_pp=2,
            sequence_parallel=(True,),
            recompute=(Recompute.NONE,),
            cp_type=(ContextParallel.ALL_TO_ALL,),
        ),
    ),
    "experts in sharded units": Case(
        PART_ROUTED,
        "dgx-h100",
        "torchtitan",
        4,
        16,
        limits=SpaceLimits(max_pp=2, max_tp=1, max_microbatch_size=2),
        changes=(("casts_shards_alone", False),),
        imbalance=1.5,
    ),
    "experts of transformers in sharded units": Case(
        QWEN,
        "a100-4xhdr200",
        "fsdp",
        8,
        16,
        limits=SpaceLimits(max_tp=1, max_pp=1, max_microbatch_size=2),
        imbalance=1.5,
    ),
    "latents and layers of two kinds in sharded units": Case(
        LATENT,
        "dgx-h100",
        "fsdp",
        4,
        8,
        limits=SpaceLimits(max_tp=1, max_pp=1, max_microbatch_size=1),
    ),
    "experts on a mesh of their own": Case(
        LATENT,
        "dgx-h100",
        "torchtitan-2026-08",
        4,
        16,
        limits=SpaceLimits(max_pp=2, max_tp=1, max_microbatch_size=1),
    ),
    "layers of four kinds in sharded units": Case(
        IN_TURN,
        "dgx-h100",
        "torchtitan@0.2",
        4,
        32,
        limits=SpaceLimits(max_pp=2, max_tp=1, max_microbatch_size=1),
        changes=(("casts_shards_alone", False),),
    ),
    "experts cut along their widths": Case(
        ROUTED,
        "dgx-h100",
        "torchtitan",
        8,
        256,
        limits=SpaceLimits(
            ep=(2, 4),
            max_tp=1,
            max_pp=1,
            microbatch_size=(16, 32),
            reduce_precision=(None,),
        ),
    ),
    "experts filled up over shards that do not divide them": Case(
        ROUTED.model_copy(update={"experts": ROUTED.experts.model_copy(update={"num_experts": 8})}),
        "dgx-h100",
        "torchtitan@0.2",
        12,
        768,
        limits=SpaceLimits(max_pp=2, max_tp=1, microbatch_size=(32, 64), reduce_precision=(None,)),
        changes=(("casts_shards_alone", False),),
        imbalance=1.5,
    ),
    "experts of transformers filled up": Case(
        QWEN,
        "a100-4xhdr200",
        "fsdp",
        24,
        768,
        limits=SpaceLimits(max_tp=1, max_pp=1, microbatch_size=(16, 32), reduce_precision=(None,)),
    ),
    "context parallel in a ring": Case(
        SMALL, "dgx-h100", "megatron-core", 8, 8, limits=SpaceLimits(**FEW_CUT, max_cp=4)
    ),
    "tokens swapped for heads between nodes": Case(
        SMALL,
        "a100-4xhdr200",
        "megatron-core",
        16,
        8,
        limits=SpaceLimits(**FEW_CUT, cp=(2, 4)),
        changes=(("context_parallel", (ContextParallel.ALL_TO_ALL, ContextParallel.RING)),),
    ),
    "rings of swaps of every size": Case(
        SMALL,
        "a100-4xhdr200",
        "megatron-core",
        16,
        8,
        limits=SpaceLimits(**FEW_CUT, cp=(4, 8), cp_type=(ContextParallel.HYBRID_RING, None)),
    ),
    "windows among gathered tokens": Case(
        SMALL.model_copy(update={"window": 96, "layer_pattern": "WF"}),
        "dgx-h100",
        "megatron-core",
        8,
        8,
        limits=SpaceLimits(**FEW_CUT, cp=(2, 4)),
        changes=(("context_parallel", (ContextParallel.ALL_GATHER,)),),
    ),
    "context parallel with sharded parameters": Case(
        SMALL,
        "dgx-h100",
        "torchtitan@0.2",
        8,
        32,
        limits=SpaceLimits(**FEW_CUT, cp=(2,)),
        changes=(("casts_shards_alone", False),),
    ),
    "flat units that stay waiting": Case(
        LONG,
        "a100-4xhdr200",
        "megatron-core",
        8,
        16,
        limits=SpaceLimits(max_pp=1, max_microbatch_size=1, zero_stage=(3,)),
    ),
    "experts in flat units": Case(
        PART_ROUTED,
        "a100-4xhdr200",
        "megatron-core",
        8,
        16,
        limits=SpaceLimits(
            zero_stage=(3,),
            max_microbatch_size=1,
            max_pp=1,
            sequence_parallel=(True,),
            recompute=(Recompute.NONE, Recompute.FULL),
        ),
    ),
    "flat units in 8 bits": Case(
        LONG,
        "dgx-h100",
        "megatron-core",
        8,
        16,
        precision=Precision.FP8,
        limits=SpaceLimits(
            zero_stage=(3,),
            max_microbatch_size=1,
            max_pp=1,
            recompute=(Recompute.NONE, Recompute.FULL),
        ),
    ),
    "flat units in 8 bits that predict further": Case(
        PART_ROUTED.model_copy(update={"prediction_layers": 1}),
        "dgx-b300",
        "megatron-core",
        8,
        16,
        precision=Precision.MXFP8,
        limits=SpaceLimits(
            zero_stage=(3,),
            max_microbatch_size=1,
            max_pp=1,
            sequence_parallel=(True,),
            recompute=(Recompute.NONE, Recompute.FULL),
        ),
        changes=(("ends_gather_ahead", False),),
    ),
    "flat units in 8 bits whose experts are divided": Case(
        PART_ROUTED,
        "dgx-h100",
        "megatron-core",
        8,
        16,
        precision=Precision.FP8,
        limits=SpaceLimits(
            zero_stage=(3,),
            dp_shard=(None, 2),
            max_microbatch_size=1,
            max_pp=1,
            max_tp=2,
            recompute=(Recompute.NONE,),
        ),
        frees_switches=True,
    ),
    "experts run one after the other": Case(
        PART_ROUTED,
        "dgx-h100",
        "megatron-core",
        8,
        16,
        limits=SpaceLimits(
            recompute=(Recompute.NONE,), max_pp=2, max_tp=2, max_microbatch_size=2, max_cp=1
        ),
        changes=(("grouped_experts", False),),
    ),
    "sets of flat units with double buffers": Case(
        LONG,
        "dgx-a100",
        "megatron-core",
        8,
        32,
        limits=SpaceLimits(
            zero_stage=(3,),
            max_microbatch_size=1,
            max_pp=1,
            dp_shard=(None, 2, 4),
            recompute=(Recompute.NONE,),
        ),
        changes=(("doubles_unit_buffers", True),),
        frees_switches=True,
    ),
    "many microbatches": Case(
        UNEVEN,
        "dgx-a100",
        "megatron-core",
        4,
        96,
        limits=SpaceLimits(max_microbatch_size=8, max_tp=2),
    ),
}


def job_of(case: Case) -> TrainingJob:
    return TrainingJob(
        model=case.model,
        global_batch_size=case.batch,
        seq_len=case.model.seq_len,
        precision=case.precision,
        imbalance=case.imbalance,
    )


ALWAYS_SPLIT = "whole-sequences"  # of torchtitan


def stack_of(case: Case) -> StackProfile:
    """Return the stack of a case; torchtitan's tp also without sequence parallelism.

    It has one of them alone, but bounds and memory are to hold for both.
    """
    stack = load_stack(case.stack)
    refused = {name: rule for name, rule in stack.refused.items() if name != ALWAYS_SPLIT}
    return stack.model_copy(update={"refused": refused, **dict(case.changes)})


def limits_of(case: Case) -> SpaceLimits:
    """Return the limits of a case; the stack's habits where it does not free the switches."""
    stack = load_stack(case.stack)
    every = case.limits.pinned(any_layout=True)
    if case.frees_switches:
        return every
    switches = [name for name in SWITCHES if name not in PASSES]
    habits = {"stages": (stack.stage_split,), **dict.fromkeys(switches, (None,))}
    if isinstance(case.model, ModelSpec):
        habits["attention"] = (stack.attention,)
    return every.pinned(**habits)


class Brute(NamedTuple):
    """Every layout of a space that its stack can run, simulated."""

    device_bytes: dict[int, int]
    step_ps: dict[int, int]
    bounds_ps: dict[int, int]
    evaluated_bytes: dict[int, int]
    spare_bytes: dict[int, int]
    """What the live bytes are above the least that passes keep, or states take."""
    host_bytes: dict[int, int]
    evaluated_host_bytes: dict[int, int]


@cache
def brute_force(name: str) -> Brute:
    return brute_force_of(CASES[name])


def brute_force_of(case: Case) -> Brute:
    job, cluster, stack = job_of(case), load_cluster(case.cluster), stack_of(case)
    space = enumerate_space(job, stack, case.num_gpus, limits_of(case))
    table = ShapeTable.of(space)
    costs = CostModel(cluster, stack, case.num_gpus)
    needs = device_bytes_column(space, cluster, peak_bytes(space, table, BlockTable()))
    passes = least_bytes(space, table, BlockTable(), np.arange(len(space)))
    runnable = [index for index in range(len(space)) if _runs(space.plan(index), job, stack)]
    hosts = host_bytes_column(space, table, cluster, BlockTable(), np.array(runnable, np.int64))
    bounds = StepBounds(space, table, costs).lower_bounds_ps(np.array(runnable, np.int64))
    results = {
        index: simulate(job, space.plan(index), cluster, stack, costs=costs) for index in runnable
    }
    return Brute(
        {index: result.memory.device_bytes for index, result in results.items()},
        {index: result.step_ps for index, result in results.items()},
        dict(zip(runnable, bounds.tolist(), strict=True)),
        {index: int(needs[index]) for index in runnable},
        {
            index: each.memory.peak_bytes
            - max(int(passes[index]), least_state_bytes(job, stack, each.plan, case.num_gpus))
            for index, each in results.items()
        },
        {index: each.memory.host_bytes for index, each in results.items()},
        {index: int(hosts[index]) for index in runnable},
    )


def _runs(plan: object, job: TrainingJob, stack: object) -> bool:
    from meshwright.simulator.layout import stack_refusal

    return stack_refusal(job, plan, stack) is None  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_evaluator_knows_every_layouts_memory_exactly(name: str) -> None:
    brute = brute_force(name)
    assert brute.evaluated_bytes == brute.device_bytes
    assert brute.evaluated_host_bytes == brute.host_bytes


@pytest.mark.parametrize("name", CASES)
def test_no_layout_needs_less_than_its_passes_in_flight_keep_or_its_states_take(name: str) -> None:
    brute = brute_force(name)
    assert all(0 <= spare < brute.device_bytes[i] for i, spare in brute.spare_bytes.items())


# What layouts need beyond the least known of them, of the memory of half of them at most.
KNOWN = {
    "blocks of several kinds": 0.02,
    "layers of four kinds": 0.03,
    "experts on a mesh of their own": 0.15,
    "exchanges beside another microbatch": 0.03,
    "sharded parameters in a pipeline": 0.08,
    "gpt2 on one node": 0.03,
}


@pytest.mark.parametrize("name", KNOWN)
def test_most_of_what_layouts_need_is_known_before_their_passes_are_walked(name: str) -> None:
    brute = brute_force(name)
    shares = sorted(spare / brute.device_bytes[i] for i, spare in brute.spare_bytes.items())
    assert shares[len(shares) // 2] < KNOWN[name]


@pytest.mark.parametrize("name", CASES)
def test_no_bound_exceeds_the_simulated_time(name: str) -> None:
    brute = brute_force(name)
    above = [i for i, bound in brute.bounds_ps.items() if bound > brute.step_ps[i]]
    assert above == []


@pytest.mark.parametrize("name", CASES)
def test_bounds_are_sharp_enough_to_be_useful(name: str) -> None:
    """A bound of nothing would pass the test above: half of the layouts are within 6 %."""
    brute = brute_force(name)
    gaps = sorted(brute.step_ps[i] / bound - 1 for i, bound in brute.bounds_ps.items())
    assert gaps[len(gaps) // 2] < 0.06


@pytest.mark.parametrize("name", CASES)
def test_the_search_finds_what_brute_force_finds(name: str) -> None:
    case, brute = CASES[name], brute_force(name)
    cluster, stack = load_cluster(case.cluster), stack_of(case)
    found = search(
        job_of(case),
        cluster,
        stack,
        case.num_gpus,
        limits=limits_of(case),
        memory_limit_bytes=case.memory_limit_bytes,
    )
    limit = case.memory_limit_bytes or cluster.device.usable_bytes
    fitting = {i: t for i, t in brute.step_ps.items() if brute.device_bytes[i] <= limit}
    assert found.optimal
    assert found.feasible == len(fitting)
    assert found.simulated < found.feasible or found.feasible <= len(found.plans)
    assert found.plans[0].step_ps == min(fitting.values())
    # The search knows the peaks of what it reports; a walk over the ranks finds the same.
    for memory in (step.memory for step in found.plans):
        assert memory.peak_bytes == memory.worst_stage.peak_bytes
    assert found.space_size == found.feasible + sum(found.rejections.values())
    for point in found.frontier:
        within = [t for i, t in fitting.items() if brute.device_bytes[i] <= point.device_bytes]
        assert point.step_ps * (1 - point.bound_gap_fraction) <= min(within) + 1
        assert not point.proven or point.step_ps == min(within)
    # The curve goes down to the least memory of all, but for a level of 5 %.
    least = min(brute.device_bytes[i] for i in fitting)
    assert found.num_below == 0
    assert found.frontier[0].device_bytes * 0.95 < least + 1


def test_memory_is_exact_where_floats_no_longer_are() -> None:
    sizes = np.array([[2**53 + 1, 3], [5, 2**52 + 1], [1, 1]])
    counts = np.array([[1, 0], [1, 2]])
    starts = np.array([0])
    assert max_weighted_sums(sizes, counts, starts).tolist() == [[2**53 + 7], [2**53 + 7], [3]]
    assert max_weighted_sums(sizes[2:], counts, np.array([0, 1])).tolist() == [[1, 3]]


@pytest.mark.parametrize("name", [name for name in CASES if " on the host" in name])
def test_what_hosts_have_no_room_for_is_not_found(name: str) -> None:
    case, brute = CASES[name], brute_force(name)
    cluster, stack = load_cluster(case.cluster), stack_of(case)
    have = max(brute.host_bytes.values()) - 1
    small = cluster.model_copy(update={"host_memory_capacity_bytes": have})
    found = search(job_of(case), small, stack, case.num_gpus, limits=limits_of(case))
    fitting = [
        step_ps
        for index, step_ps in brute.step_ps.items()
        if brute.device_bytes[index] <= cluster.device.usable_bytes
        and brute.host_bytes[index] <= have
    ]
    assert found.feasible == len(fitting) < len(brute.step_ps)
    assert found.rejections["needs more memory than a host has"] > 0
    assert found.plans[0].step_ps == min(fitting)
    silent = cluster.model_copy(update={"host_link": None})
    with pytest.raises(PlanError, match="says nothing of its hosts"):
        search(job_of(case), silent, stack, case.num_gpus, limits=limits_of(case))


@pytest.mark.parametrize("name", SWITCHED)
def test_the_rough_bound_of_a_family_holds_whatever_the_switches(name: str) -> None:
    case, brute = CASES[name], brute_force(name)
    job, stack = job_of(case), stack_of(case)
    space = enumerate_space(job, stack, case.num_gpus, limits_of(case))
    costs = CostModel(load_cluster(case.cluster), stack, case.num_gpus)
    indices = np.array(list(brute.step_ps), np.int64)
    rough = StepBounds(space, ShapeTable.of(space), costs).rough_bounds_ps(indices)
    assert all(rough <= np.array(list(brute.bounds_ps.values())))
    assert 0.5 < np.median(rough / np.array(list(brute.step_ps.values()))) <= 1


def test_bounds_share_what_is_known_of_their_costs_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of other jobs with such costs are as with their own; those of one are priced once."""
    cluster, stack = load_cluster("dgx-h100"), load_stack("torchtitan")
    limits = SpaceLimits(recompute=(Recompute.NONE,), max_microbatch_size=2)
    shared = CostModel(cluster, stack, 8)

    def bounds_ps(model: ModelSpec, costs: CostModel) -> list[list[int]]:
        job = TrainingJob(model=model, global_batch_size=16, seq_len=512)
        space = enumerate_space(job, stack, 8, limits)
        bounds, every = StepBounds(space, ShapeTable.of(space), costs), np.arange(len(space))
        return [find(every).tolist() for find in (bounds.rough_bounds_ps, bounds.lower_bounds_ps)]

    models = SMALL, SMALL.model_copy(update={"vocab_size": 32000}), GROUPED
    found = [bounds_ps(model, shared) for model in models]
    assert found == [bounds_ps(model, CostModel(cluster, stack, 8)) for model in models]
    assert found[0] != found[1]
    monkeypatch.delattr(CostModel, "operator_cost")
    monkeypatch.delattr(CostModel, "collective")
    assert [bounds_ps(model, shared) for model in models] == found


@pytest.mark.parametrize(("frees", "least"), [(True, 0.5), (False, 0.35)])
def test_no_bound_exceeds_a_step_that_waits_for_its_network(*, frees: bool, least: float) -> None:
    """Nothing but the port is busy all the time, so a gather too many would show.

    Units that stay are gathered once, and computation waits for each: a larger share is no port's.
    """
    case = CASES["sharded parameters in a pipeline"]
    case = case._replace(num_gpus=32, batch=64)  # its replicas are on two nodes
    cluster, job = load_cluster("a100-4xhdr200"), job_of(case)
    stack = stack_of(case).model_copy(update={"reshards_in_pipelines": frees})
    slow = cluster.inter_node.bandwidth_bytes_per_s / 50
    network = cluster.inter_node.model_copy(update={"bandwidth_bytes_per_s": slow})
    cluster = cluster.model_copy(update={"inter_node": network})
    once = (Recompute.NONE,)
    limits = SpaceLimits(tp=(1,), pp=(2,), zero_stage=(3,), microbatch_size=(1,), recompute=once)
    limits = limits_of(case._replace(limits=limits))
    space = enumerate_space(job, stack, case.num_gpus, limits)
    costs = CostModel(cluster, stack, case.num_gpus)
    runnable = [index for index in range(len(space)) if _runs(space.plan(index), job, stack)]
    bounds = StepBounds(space, ShapeTable.of(space), costs)
    found = zip(runnable, bounds.lower_bounds_ps(np.array(runnable, np.int64)), strict=True)
    shares = [
        int(bound) / simulate(job, space.plan(index), cluster, stack, costs=costs).step_ps
        for index, bound in found
    ]
    assert shares
    assert least < min(shares) <= max(shares) <= 1


PLAIN = SpaceLimits(
    **dict.fromkeys(("tp", "microbatch_size"), (1,)), recompute=(Recompute.NONE,), zero_stage=(1,)
)
# Layouts that wait for one thing alone, and what their bounds are of their times at least.
WAITING = {
    "gathers and reductions": (
        Case(GROUPED, "dgx-a100", "megatron-core", 16, 32, limits=PLAIN.pinned(pp=(1,))),
        1.0,
    ),
    "sums of tensor-parallel ranks before a reduction": (
        Case(
            GROUPED,
            "dgx-a100",
            "megatron-lm-2022",
            8,
            16,
            limits=PLAIN.pinned(tp=(2,), pp=(1,), sequence_parallel=(True,)),
        ),
        1.0,
    ),
    "messages of stages that fill a node": (
        Case(
            GROUPED,
            "dgx-a100",
            "megatron-core",
            16,
            32,
            limits=PLAIN.pinned(pp=(2,), num_virtual_stages=(4,)),
        ),
        0.98,
    ),
    # Of unequal virtual stages, through which fewer microbatches go than there are ranks.
    "a middle stage": (
        Case(
            GROUPED.model_copy(update={"num_layers": 18}),
            "dgx-h100",
            "torchtitan",
            4,
            3,
            limits=PLAIN.pinned(pp=(4,), num_virtual_stages=(3,), zero_stage=None),
            changes=(("casts_shards_alone", False),),  # as above
        ),
        0.99,
    ),
}


@pytest.mark.parametrize("name", WAITING)
def test_bounds_count_all_that_layouts_wait_for(name: str) -> None:
    case, least = WAITING[name]
    brute = brute_force_of(case)
    assert brute.step_ps
    for index, step_ps in brute.step_ps.items():
        assert least * step_ps <= brute.bounds_ps[index] <= step_ps


def test_of_passes_beside_each_other_one_frees_what_the_other_keeps() -> None:
    """Sequences are so long that what is kept for passes in flight is most of the memory."""
    sizes = {"num_layers": 16, "seq_len": 8192, "vocab_size": 512}
    limits = SpaceLimits(
        **dict.fromkeys(("tp", "cp", "microbatch_size", "zero_stage"), (1,)),
        **dict.fromkeys(("pp", "num_virtual_stages"), (2,)),
        expert_overlap=(ExpertOverlap.MICROBATCHES,),
        recompute=(Recompute.NONE,),
        gradient_precision=(None,),
    )
    model = ROUTED.model_copy(update=sizes)
    case = Case(model, "dgx-h100", "megatron-core", 4, 24, limits=limits, frees_switches=True)
    brute = brute_force_of(case)
    assert brute.spare_bytes
    # With one pass more in flight all would need less than that.
    assert all(0 < spare < 0.3 * brute.device_bytes[i] for i, spare in brute.spare_bytes.items())


def test_layouts_too_long_to_simulate_stay_in_the_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the optimum out of reach the search finds the next and admits the gap."""
    from meshwright.planner.search import finalists

    case, brute = CASES["many microbatches"], brute_force("many microbatches")
    stack = load_stack(case.stack)
    found_with = {"limits": limits_of(case)}
    whole = search(job_of(case), load_cluster(case.cluster), stack, case.num_gpus, **found_with)
    fastest = whole.plans[0]

    def is_fastest(_runs: finalists.Runs, index: int) -> bool:
        return brute.step_ps[index] == fastest.step_ps

    with monkeypatch.context() as patch:
        patch.setattr(finalists.Runs, "is_too_long", is_fastest)
        cut = search(job_of(case), load_cluster(case.cluster), stack, case.num_gpus, **found_with)
    assert cut.feasible == whole.feasible
    assert cut.plans[0].step_ps > fastest.step_ps
    assert not cut.optimal
    assert 0 < cut.bound_gap_fraction < 0.5
    # The gap covers the optimum that was not simulated.
    assert cut.plans[0].step_ps * (1 - cut.bound_gap_fraction) <= fastest.step_ps * (1 + 1e-12)
    assert min(brute.step_ps.values()) == fastest.step_ps
    for module in (finalists, work):
        monkeypatch.setattr(module, "MAX_PASSES", 0)
    # Of those with many microbatches fewer are run, and that is enough.
    long = search(job_of(case), load_cluster(case.cluster), stack, case.num_gpus, **found_with)
    assert long.plans[0].step_ps > fastest.step_ps
    monkeypatch.setattr(steady, "TRIED", ())
    with pytest.raises(PlanError, match="too many to simulate"):
        search(job_of(case), load_cluster(case.cluster), stack, case.num_gpus, **found_with)


def test_the_cases_cover_what_can_go_wrong() -> None:
    assert len(CASES) >= 10
    assert len({case.cluster for case in CASES.values()}) >= 6
    generations = {"megatron-lm-2021", "megatron-lm-2022", "megatron-core"}
    assert {case.stack for case in CASES.values()} > generations
    assert any(len(brute_force(name).step_ps) > 500 for name in CASES)
