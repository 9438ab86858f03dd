"""Tests of the formats that are only read: nanotron, llm-foundry, MaxText and NeMo.

Files lie in ``golden/imports``; what they stand for is worked out by hand.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import pytest

from meshwright.planner.formats import resolved
from meshwright.planner.importing import Imported, import_source, read_source
from meshwright.simulator import ModelSpec, PlanError, count_parameters

FOLDER = Path(__file__).parents[1] / "golden" / "imports"
CLUSTER = {"cluster": "dgx-h100"}


class Case(NamedTuple):
    """A file, what options say beside it, its model and what it says of a plan."""

    given: Mapping[str, object]
    stack: str | None
    model: str
    said: Mapping[str, object]


CASES = {
    # A layer costs 243.3 M multiplications a token, the head 525.3 M: 34.16 layers in all, and a
    # stage ends with the layer that is past 8.54, 17.08 or 25.62 of them.
    "nanotron-3d.yaml": Case(
        {},
        "megatron-core",
        "llama3-8b",
        {
            "tp": 4,
            "pp": 4,
            "dp": 2,
            "world_size": 32,
            "global_batch_size": 64,
            "microbatch_size": 2,
            "seq_len": 4096,
            "sequence_parallel": True,
            "schedule": "1f1b",
            "stages": (9, 9, 8, 6),
            "recompute": "full",
            "zero_stage": 1,
            "gradient_precision": "fp32",
            "stack.gradient_bucket_parameters": 52_428_800,
            "stack.vocabulary_multiple": 1,
        },
    ),
    # The head is 8.36 layers of 24: the first stage ends past 16.18.
    "nanotron-qwen2.yaml": Case(
        {},
        "megatron-core",
        "qwen2-0.5b",
        {
            "tp": 2,
            "pp": 2,
            "dp": 4,
            "global_batch_size": 32,
            "sequence_parallel": False,
            "schedule": "gpipe",
            "stages": (17, 7),
            "recompute": "none",
            "zero_stage": 0,
            "stack.tp_overlap_fraction": 0.0,
            "stack.vocabulary_multiple": 8,
        },
    ),
    # 512 sequences are 8 a rank, fewer than the file's microbatch.
    "llm-foundry-mpt-7b.yaml": Case(
        {"world_size": 64},
        None,
        "mpt",
        {
            "dp": 64,
            "global_batch_size": 512,
            "microbatch_size": 8,
            "seq_len": 2048,
            "precision": "bf16",
            "reduce_precision": "bf16",
            "zero_stage": 3,
            "reshard_after_forward": False,
            "recompute": "full",
            "attention": "flash",
            "stack.recompute_stops_early": "false",
            "stack.loss": "flash-attn",
            "stack.allocator_fraction": 0.0,
        },
    ),
    "llm-foundry-llama3-8b.yaml": Case(
        {"world_size": 16, "microbatch_size": 2},
        None,
        "llama3-8b",
        {
            "dp": 16,
            "microbatch_size": 2,
            "seq_len": 4096,
            "reduce_precision": "fp32",
            "reshard_after_forward": True,
            "stack.recompute_stops_early": "true",
            "stack.kernels": "eager",
            "stack.loss": "eager",
        },
    ),
    # 4 slices of 8 devices; 2 sequences a device, twice.
    "maxtext-llama3-8b.yml": Case(
        {"world_size": 32},
        "fsdp",
        "llama3-8b",
        {
            "dp": 32,
            "dp_shard": 8,
            "zero_stage": 3,
            "global_batch_size": 128,
            "microbatch_size": 2,
            "seq_len": 8192,
            "recompute": "full",
            "gradient_precision": "fp32",
        },
    ),
    # 2 x 4 x 4 devices with a sequence each; of the 16 of a replica 8 microbatches of 2.
    "maxtext-pipeline.yml": Case(
        {},
        "megatron-core",
        "llama2-13b",
        {
            "tp": 4,
            "sequence_parallel": True,
            "pp": 4,
            "dp": 2,
            "world_size": 32,
            "zero_stage": 1,
            "schedule": "gpipe",
            "stages": (10, 10, 10, 10),
            "global_batch_size": 32,
            "microbatch_size": 2,
            "gradient_precision": "bf16",
            "sync_each_microbatch": False,
        },
    ),
    # 400 MiB of bf16.
    "nemo-gpt3-20b.yaml": Case(
        {},
        None,
        "nemo-gpt",
        {
            "tp": 4,
            "pp": 4,
            "dp": 8,
            "num_virtual_stages": 11,
            "schedule": "interleaved",
            "zero_stage": 1,
            "sequence_parallel": True,
            "recompute": "selective",
            "attention": "flash",
            "seq_len": 2048,
            "gradient_precision": "bf16",
            "stack.gradient_bucket_parameters": 209_715_200,
            "stack.overlap_gradient_reduce": True,
            "stack.fused_gradient_accumulation": True,
            "stack.tp_in_pieces": "true",
            "stack.loss": "in-place",
        },
    ),
    "nemo-mixtral-8x7b.yaml": Case(
        {},
        None,
        "mixtral-8x7b",
        {
            "pp": 4,
            "dp": 16,
            "ep": 8,
            "etp": 1,
            "sequence_parallel": False,
            "recompute": "none",
            "gradient_precision": "fp32",
            "stack.overlap_parameter_gather": "false",
            "stack.grouped_experts": "true",
            "stack.loss": "compiled",
        },
    ),
}
PARAMETERS = {
    # Words, and in each layer 12 d^2 of weights, 9 d of biases and 4 d of norms; 2 d of the last.
    "llm-foundry-mpt-7b.yaml": 50368 * 4096 + 32 * (12 * 4096**2 + 13 * 4096) + 2 * 4096,
    # The same, with positions.
    "nemo-gpt3-20b.yaml": (50257 + 2048) * 6144 + 44 * (12 * 6144**2 + 13 * 6144) + 2 * 6144,
}


def imported(
    file: str, *, instead: tuple[str, str] = ("", ""), given: Mapping[str, object] | None = None
) -> Imported:
    """Return what a file says, with one of its texts in the place of another."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    assert instead[0] in text
    case = CASES[file]
    source = read_source(FOLDER / file, text.replace(*instead, 1), None, {})
    beside = {**CLUSTER, **(case.given if given is None else given)}
    return import_source(source, beside, None, case.stack)


@pytest.mark.parametrize("file", CASES)
def test_a_file_says_the_plan_that_is_worked_out_by_hand(file: str) -> None:
    found, case = imported(file), CASES[file]
    model = found.model if isinstance(found.model, str) else found.model.name
    assert model == case.model
    said = {name: found.values[name] for name in case.said}
    assert said == dict(case.said)


@pytest.mark.parametrize(("file", "number"), PARAMETERS.items())
def test_a_model_of_no_name_has_the_parameters_of_its_sizes(file: str, number: int) -> None:
    model = imported(file).model
    assert isinstance(model, ModelSpec)
    assert count_parameters(model) == number


NANOTRON, QWEN = "nanotron-3d.yaml", "nanotron-qwen2.yaml"
MPT, LLAMA = "llm-foundry-mpt-7b.yaml", "llm-foundry-llama3-8b.yaml"
SHARDS, PIPELINE = "maxtext-llama3-8b.yml", "maxtext-pipeline.yml"
NEMO, MIXTRAL = "nemo-gpt3-20b.yaml", "nemo-mixtral-8x7b.yaml"


@pytest.mark.parametrize(
    ("file", "old", "new", "why"),
    [
        (NANOTRON, "lr_decay_style", "lr_decay_stylee", "nearest: optimizer.learning_rate_sche"),
        (NANOTRON, "  dp: 2", "  dp: 2\n  expert_parallel_size: 2", "expert_parallel_size=2"),
        (NANOTRON, "in_fp32: true", "in_fp32: false", "accumulate_grad_in_fp32=false"),
        (NANOTRON, "name: adamW", "name: sgd", "optimizer_factory.name=sgd"),
        (NANOTRON, "is_llama_config", "is_mamba_config", "is_mamba_config"),
        (NANOTRON, "stable\n", "stable\n  sequence_length: 8192\n", "sequence_length=8192"),
        (QWEN, "      return_positions: false\n", "", "return_positions=true"),
        (QWEN, "dp: 4", "dp: 4, context_parallel_size: 2", "allowed: llama3_ring_attention"),
        (MPT, "decoupled_adamw", "decoupled_lionw", "optimizer.name=decoupled_lionw"),
        (MPT, "PURE", "FULL", "allowed: DEFAULT, PURE"),
        (MPT, "    alibi: true", "    alibi: true\n    rope: true", "one of them must be true"),
        (MPT, "l: 0", "l: ${save_interval}\nsave_interval: ${eval_interval}", "back to itself"),
        (MPT, "split: train\n    max_seq_len: $", "split: train\n    max_seq_len: 1 # $", "=1 of"),
        (LLAMA, "  init_device", "  peft_config: {peft_type: LORA}\n  init_device", "few weights"),
        (LLAMA, "meta-llama/", "someone/", "someone/Meta-Llama-3-8B"),
        (LLAMA, "fsdp_config: {", "profiler: {", "fsdp_config of llm-foundry is missing"),
        (SHARDS, "tensor_parallelism: 1", "fsdp_transpose_parallelism: 2", "allowed: 1"),
        (SHARDS, '"full"', '"minimal"', "remat_policy=minimal"),
        (SHARDS, "num_slices: 4\nici_fsdp_parallelism: 8\n", "", "--dp-shard"),
        (SHARDS, '"base.yml"', '"mine.yml"', "base_config=mine.yml"),
        (SHARDS, "steps: 30", "base_emb_dim: 64", "stands beside model_name=llama3-8b"),
        (PIPELINE, "pipeline_stage: 10", "pipeline_stage: 5", "one stage a rank"),
        (NEMO, "micro_batch_size: 2", "micro_batch_size: ${divide:8,4}", "divide:8,4"),
        (NEMO, "amp_O2: true", "amp_O2: false", "megatron_amp_O2=false"),
        (NEMO, "- _self_", "- _self_\n- base_model", "defaults=base_model"),
        (NEMO, "type: GPT2BPETokenizer", "type: mine", "--model"),
        (MIXTRAL, "apply_rope_fusion: true\n", "apply_rope_fusion: false\n", "apply_rope_fusion"),
    ],
)
def test_what_no_plan_says_is_refused_by_name(file: str, old: str, new: str, why: str) -> None:
    with pytest.raises(PlanError) as caught:
        imported(file, instead=(old, new))
    assert why in str(caught.value)


def test_a_microbatch_that_a_run_finds_out_is_asked_for() -> None:
    with pytest.raises(PlanError, match=r"--micro-batch \(device_train_microbatch_size is auto\)"):
        imported(LLAMA, given={"world_size": 16})


# Sections whose keys are the user's own, or of what is none of the framework's classes.
OWN_KEYS = (
    "variables.",
    "callbacks.speed_monitor.",
    "tokenizer.kwargs.",
    "exp_manager.checkpoint_callback_params.",
    "model.optim.sched.",
)


@pytest.mark.parametrize("file", CASES)
def test_a_misspelt_key_is_refused_wherever_it_stands(file: str) -> None:
    text = (FOLDER / file).read_text(encoding="utf-8")
    source = read_source(FOLDER / file, text, None, {})
    for key in source.keys:
        keys = {f"{each}x" if each == key else each: said for each, said in source.keys.items()}
        if key.startswith(OWN_KEYS):
            continue
        case, wrong = CASES[file], replace(source, keys=keys)
        with pytest.raises(PlanError):
            import_source(wrong, {**CLUSTER, **case.given}, None, case.stack)


def test_references_to_keys_of_the_file_are_followed_and_others_stay() -> None:
    keys = {
        "a.b": 3,
        "a.c": "${.b}",
        "d": "x-${a.c}-${oc.env:HOME}",
        "e": "${a.missing}",
        "f": ["${a.b}"],
    }
    followed = {"a.c": 3, "d": "x-3-${oc.env:HOME}"}
    assert resolved(keys) == {**keys, **followed}


def test_references_that_grow_without_end_are_refused_at_once() -> None:
    keys: dict[str, object] = {"k0": "lol"}
    keys |= {f"k{number}": f"${{k{number - 1}}} ${{k{number - 1}}}" for number in range(1, 15)}
    keys |= {f"many{number}": "${k14} " for number in range(10_000)}
    begun = perf_counter()
    with pytest.raises(PlanError, match="100000 characters"):
        resolved(keys)
    assert perf_counter() - begun < 1
