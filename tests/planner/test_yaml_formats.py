"""Tests of the formats that are only read: nanotron, llm-foundry, MaxText and NeMo.

Files lie in ``golden/imports``, their plans beside them in ``import_plans.toml``.
"""

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import pytest

from meshwright.planner.formats import resolved
from meshwright.planner.importing import Imported, import_source, read_source
from meshwright.planner.importing.plans import MOST_LINES
from meshwright.simulator import ModelSpec, PlanError, count_parameters

FOLDER = Path(__file__).parents[1] / "golden" / "imports"


NANOTRON, QWEN = "nanotron-3d.yaml", "nanotron-qwen2.yaml"
MPT, LLAMA = "llm-foundry-mpt-7b.yaml", "llm-foundry-llama3-8b.yaml"
SHARDS, PIPELINE = "maxtext-llama3-8b.yaml", "maxtext-pipeline.yaml"
NEMO, MIXTRAL = "nemo-gpt3-20b.yaml", "nemo-mixtral-8x7b.yaml"
GIVEN: dict[str, dict[str, object]] = {
    MPT: {"world_size": 64},
    LLAMA: {"world_size": 16, "microbatch_size": 2},
    SHARDS: {"world_size": 32},
}
# What files say of a stack, by hand; the rest of their plans is beside those of other files.
STACKS: dict[str, dict[str, object]] = {
    # 100 MiB of bf16.
    NANOTRON: {"gradient_bucket_parameters": 52_428_800, "vocabulary_multiple": 16},
    QWEN: {"tp_overlap_fraction": 0.0, "vocabulary_multiple": 8},
    MPT: {"recompute_stops_early": "false", "loss": "flash-attn", "allocator": "expandable"},
    LLAMA: {"recompute_stops_early": "true", "loss": "eager", "kernels": "eager"},
    # 400 MiB of bf16.
    NEMO: {
        "gradient_bucket_parameters": 209_715_200,
        "overlap_gradient_reduce": True,
        "overlap_parameter_gather": "true",
        "fused_gradient_accumulation": True,
        "tp_in_pieces": "true",
        "transformer_engine": "true",
        "loss": "in-place",
    },
    MIXTRAL: {
        "overlap_gradient_reduce": True,
        "overlap_parameter_gather": "false",
        "fused_gradient_accumulation": False,
        "grouped_experts": "true",
        "loss": "compiled",
    },
}
PARAMETERS = {
    # Words, and in each layer 12 d^2 of weights, 9 d of biases and 4 d of norms; 2 d of the last.
    MPT: 50432 * 4096 + 32 * (12 * 4096**2 + 13 * 4096) + 2 * 4096,
    # The same, with positions.
    NEMO: (50257 + 2048) * 6144 + 44 * (12 * 6144**2 + 13 * 6144) + 2 * 6144,
}


def imported(
    file: str, *, instead: tuple[str, str] = ("", ""), given: Mapping[str, object] | None = None
) -> Imported:
    """Return what a file says, with one of its texts in the place of another."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    assert instead[0] in text
    source = read_source(FOLDER / file, text.replace(*instead, 1), None, {})
    beside = {"cluster": "dgx-h100", **(GIVEN.get(file, {}) if given is None else given)}
    is_asked = source.framework.name in {"nanotron", "maxtext"}
    return import_source(source, beside, None, "megatron-core" if is_asked else None)


@pytest.mark.parametrize(("file", "facts"), STACKS.items())
def test_a_file_says_what_its_software_does(file: str, facts: Mapping[str, object]) -> None:
    values = imported(file).values
    assert {name: values[f"stack.{name}"] for name in facts} == facts


@pytest.mark.parametrize(("file", "number"), PARAMETERS.items())
def test_a_model_of_no_name_has_the_parameters_of_its_sizes(file: str, number: int) -> None:
    model = imported(file).model
    assert isinstance(model, ModelSpec)
    assert count_parameters(model) == number


STAGE = (
    "data_stages: [{{name: a, start_training_step: 1, {}data: {{dataset: {{dataset_folder: x}}}}}}]"
    "\ngeneral:"
)


@pytest.mark.parametrize(
    ("file", "old", "new", "why"),
    [
        (NANOTRON, "lr_decay_style", "lr_decay_stylee", "nearest: optimizer.learning_rate_sche"),
        (NANOTRON, "  dp: 2", "  dp: 2\n  expert_parallel_size: 2", "expert_parallel_size=2"),
        (NANOTRON, "in_fp32: true", "in_fp32: false", "accumulate_grad_in_fp32=false"),
        (NANOTRON, "adam_beta1: 0.9", "name: sgd", "optimizer_factory.name=sgd"),
        (NANOTRON, "is_llama_config", "is_mamba_config", "is_mamba_config"),
        (NANOTRON, "general:", STAGE.format("sequence_length: 8192, "), "sequence_length=8192"),
        (QWEN, "general:", STAGE.format(""), "return_positions=true"),
        (QWEN, "dp: 4", "dp: 4, context_parallel_size: 2", "allowed: llama3_ring_attention"),
        (MPT, "decoupled_adamw", "decoupled_lionw", "optimizer.name=decoupled_lionw"),
        (MPT, "PURE", "FULL", "allowed: DEFAULT, PURE"),
        (MPT, "    alibi: true", "    alibi: true\n    rope: true", "one of them must be true"),
        (MPT, "l: 0", "l: ${save_interval}\nsave_interval: ${eval_interval}", "back to itself"),
        (MPT, "split: train", "max_seq_len: 1", "train_loader.dataset.max_seq_len=1"),
        (LLAMA, "  init_device", "  peft_config: {peft_type: LORA}\n  init_device", "few weights"),
        (LLAMA, "meta-llama/", "someone/", "someone/Meta-Llama-3-8B"),
        (LLAMA, "fsdp_config: {", "profiler: {", "fsdp_config of llm-foundry is missing"),
        (SHARDS, "steps: 30", "ici_fsdp_transpose_parallelism: 2", "allowed: 1"),
        (SHARDS, "steps: 30", "remat_policy: minimal", "remat_policy=minimal"),
        (SHARDS, "num_slices: 4\n", "", "--dp-shard"),
        (SHARDS, "steps: 30", "base_config: mine.yml", "base_config=mine.yml"),
        (SHARDS, "steps: 30", "base_emb_dim: 64", "stands beside model_name=llama3-8b"),
        (PIPELINE, "pipeline_stage: 10", "pipeline_stage: 5", "one stage a rank"),
        (NEMO, "micro_batch_size: 2", "micro_batch_size: ${divide:8,4}", "divide:8,4"),
        (NEMO, "amp_O2: true", "amp_O2: false", "megatron_amp_O2=false"),
        (NEMO, "trainer:", "defaults: [_self_, base]\ntrainer:", "defaults=base"),
        (NEMO, "type: GPT2BPETokenizer", "type: mine", "--model"),
        (MIXTRAL, "apply_rope_fusion: true", "apply_rope_fusion: false", "apply_rope_fusion"),
        (MIXTRAL, "dispatcher_type: alltoall", "dispatcher_type: flex", "allowed: alltoall"),
    ],
)
def test_what_no_plan_says_is_refused_by_name(file: str, old: str, new: str, why: str) -> None:
    with pytest.raises(PlanError) as caught:
        imported(file, instead=(old, new))
    assert why in str(caught.value)


def test_a_microbatch_that_a_run_finds_out_is_asked_for() -> None:
    with pytest.raises(PlanError, match=r"--micro-batch \(device_train_microbatch_size is auto\)"):
        imported(LLAMA, given={"world_size": 16})


def test_a_microbatch_is_no_larger_than_what_a_rank_has() -> None:
    found = imported(MPT, instead=("microbatch_size: 4", "microbatch_size: 99"))
    assert found.values["microbatch_size"] == 8


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


def test_a_file_of_unknown_keys_is_refused_at_once() -> None:
    text = "base_config: base.yml\n" + "".join(f"unknown_{each}: {each}\n" for each in range(3_000))
    begun = perf_counter()
    source = read_source(FOLDER / "a.yaml", text, None, {})
    with pytest.raises(PlanError) as caught:
        import_source(source, {}, None, None)
    assert perf_counter() - begun < 3
    assert str(caught.value).count("may change the plan") == MOST_LINES
    assert str(caught.value).endswith("and 2,951 lines like these")  # that of what is missing, too
