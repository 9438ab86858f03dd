"""Tables of angles that stages of frameworks' models have, against their shapes in that code."""

import pytest

from meshwright.hwprofiles import load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob, load_model
from meshwright.simulator.blocks import BlockShape, rope_cache_bytes

TOKENS = 8192


@pytest.mark.parametrize(
    ("model", "stack", "of_a_token"),
    [
        (
            "llama3-8b",
            "torchtitan@0.2",
            64 * 8,
        ),  # complex numbers in fp32 for pairs of a head of 128
        ("qwen3-8b", "torchtitan@0.2", 2 * 128 * 4),  # cosines and sines in fp32
        ("deepseek-v3", "torchtitan@0.2", 32 * 8),
        ("llama3-8b", "torchtitan-2026-08", 0),  # each layer has one of its own
        ("llama3-8b", "megatron-core", 128 * 4),  # angles in fp32, each twice
        ("deepseek-v3", "megatron-core", 0),
        ("llama3-8b", "fsdp", 2 * 128 * 2),  # in bf16
        ("llama3-8b", "ddp", 2 * 128 * 4),  # in fp32, under autocast
        ("bloom-176b", "megatron-core", 0),
    ],
)
def test_a_stage_has_angles_of_all_positions(model: str, stack: str, of_a_token: int) -> None:
    job = TrainingJob(model=load_model(model), global_batch_size=1, seq_len=TOKENS)
    shape = BlockShape.of(job, ResolvedPlan(), load_stack(stack))
    assert rope_cache_bytes(shape) == of_a_token * TOKENS


@pytest.mark.parametrize(("stack", "share"), [("torchtitan@0.2", 1), ("megatron-core", 4)])
def test_of_cut_sequences_megatron_keeps_a_ranks_angles(stack: str, share: int) -> None:
    job = TrainingJob(model=load_model("llama3-8b"), global_batch_size=1, seq_len=TOKENS)
    shape = BlockShape.of(job, ResolvedPlan(cp=4), load_stack(stack))
    assert rope_cache_bytes(shape) == 128 * 4 * TOKENS // share
