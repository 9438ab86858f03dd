"""Models by name and by file: what is read, and the one line every mistake gets."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hwprofiles import Attention, load_cluster, load_stack
from meshwright.simulator import ResolvedPlan, TrainingJob, simulate
from meshwright.simulator.errors import PlanError
from meshwright.simulator.model.catalogue import DATA_FOLDER, list_models, load_model, read_models
from meshwright.simulator.model.huggingface import MAX_TOKENS, architectures
from meshwright.simulator.model.kinds import WINDOWED_LAYER
from meshwright.simulator.model.parameters import count_parameters
from meshwright.simulator.model.spec import ModelSpec, parse_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"

TINY = """
name = "tiny"
num_layers = 2
hidden_size = 64
num_heads = 4
vocab_size = 256
seq_len = 32
"""

SMOLLM3_CONFIG: dict[str, object] = {
    "model_type": "smollm3",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
HUNYUAN_CONFIG: dict[str, object] = {
    "model_type": "hunyuan_v1_moe",
    "attention_head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": [3072] * 32,
    "moe_topk": [8] * 32,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32,
    "use_cla": False,
    "use_qk_norm": True,
    "vocab_size": 128167,
}
ERNIE_CONFIG: dict[str, object] = {
    "model_type": "ernie4_5_moe",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 103424,
}
GPT2_CONFIG: dict[str, object] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
# As published; keys that change no size are there, too.
MIXTRAL_CONFIG: dict[str, object] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
DEEPSEEK_CONFIG: dict[str, object] = {
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_scaling": {"original_max_position_embeddings": 4096, "type": "yarn"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
BLOOM_CONFIG: dict[str, object] = {
    "apply_residual_connection_post_layernorm": False,
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "hidden_dropout": 0.0,
    "model_type": "bloom",
    "n_embed": 14336,
    "n_layer": 70,
    "num_attention_heads": 112,
    "pretraining_tp": 4,
    "transformers_version": "4.21.0",
    "use_cache": True,
    "vocab_size": 250880,
}
LLAMA_CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
OPT_CONFIG: dict[str, object] = {
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "prefix": "</s>",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
MISTRAL_CONFIG: dict[str, object] = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN2_CONFIG: dict[str, object] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 4096,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_CONFIG: dict[str, object] = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "max_position_embeddings": 40960,
    "max_window_layers": 64,
    "model_type": "qwen3",
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rope_scaling": {"original_max_position_embeddings": 4096, "rope_type": "yarn"},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# What the released file says; the rest is left to the configuration class.
GEMMA3_CONFIG: dict[str, object] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
NEOX_CONFIG: dict[str, object] = {
    "hidden_act": "gelu_fast",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50432,
}
GPT_OSS_CONFIG: dict[str, object] = {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rope_scaling": {"original_max_position_embeddings": 4096, "rope_type": "yarn"},
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
LLAMA4_CONFIG: dict[str, object] = {
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "for_llm_compression": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 1048576,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_qk_norm": False,
    "vocab_size": 202048,
}
BERT_CONFIG: dict[str, object] = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 30522,
}


def load_config(folder: Path, config: object) -> ModelSpec:
    file = folder / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return load_model(str(file))


def load_toml(folder: Path, text: str) -> ModelSpec:
    file = folder / "model.toml"
    file.write_text(text, encoding="utf-8")
    return load_model(str(file))


def shapes_of(model: ModelSpec) -> dict[str, object]:
    words = {"name", "title", "source", "left_out"}
    return model.model_dump(exclude={*words, "max_positions", "dropout"})


@pytest.mark.parametrize("name", list_models())
def test_built_in_model_has_title_and_source(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.title not in {"", name}
    assert re.search(r"\b20[12][0-9]\b", model.source)


def test_data_folder_holds_the_built_in_models_each_once() -> None:
    names = [name for path in DATA_FOLDER.glob("*.toml") for name in read_models(path)]
    assert sorted(names) == list(list_models())


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (GPT2_CONFIG, "gpt2"), (BLOOM_CONFIG, "bloom-176b"), (LLAMA_CONFIG, "llama3-8b"),
        (OPT_CONFIG, "opt-125m"), (MISTRAL_CONFIG, "mistral-7b"), (QWEN2_CONFIG, "qwen2-0.5b"),
        (BERT_CONFIG, "bert-large"), (QWEN3_CONFIG, "qwen3-32b"), (GEMMA3_CONFIG, "gemma3-27b"),
        (GPT_OSS_CONFIG, "gpt-oss-20b"), (LLAMA4_CONFIG, "llama4-maverick"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_config_json_describes_the_built_in_model(
    tmp_path: Path, config: dict[str, object], name: str
) -> None:
    model = load_config(tmp_path, config)
    assert shapes_of(model) == shapes_of(load_model(name))
    assert count_parameters(model) == count_parameters(load_model(name))
    assert model.dropout == load_model(name).dropout or name == "bloom-176b"
    assert model.name == tmp_path.name


def test_llama4_lists_layers_or_tells_every_how_many(tmp_path: Path) -> None:
    turned = [int((each + 1) % 4 != 0) for each in range(48)]
    kinds = ["chunked_attention" if each else "full_attention" for each in turned]
    lists = {"moe_layers": [*range(1, 48, 2)], "no_rope_layers": turned, "layer_types": kinds}
    told = {**LLAMA4_CONFIG, "interleave_moe_layer_step": 1}
    assert shapes_of(load_config(tmp_path, {**told, **lists})) == shapes_of(
        load_config(tmp_path, LLAMA4_CONFIG)
    )
    both = {"model_type": "llama4", "text_config": LLAMA4_CONFIG, "vision_config": {"size": 1}}
    assert shapes_of(load_config(tmp_path, both)) == shapes_of(load_config(tmp_path, LLAMA4_CONFIG))
    all_turned = load_config(tmp_path, {**LLAMA4_CONFIG, "no_rope_layers": [1] * 48})
    assert (all_turned.rotary_layers, all_turned.layer_pattern) == ("all", "W")


def test_a_key_that_changes_no_size_is_read_and_told(tmp_path: Path) -> None:
    tuned = load_config(tmp_path, LLAMA4_CONFIG).left_out
    assert (
        tuned == "attn_temperature_tuning=True scales queries by their position, which is not "
        "modelled"
    )
    assert "left_out" not in load_config(tmp_path, LLAMA_CONFIG).model_dump()
    ahead = load_config(tmp_path, DEEPSEEK_CONFIG)
    plan = ResolvedPlan(stages=(61,), dp=8, ep=8, attention=Attention.FLASH)
    job = TrainingJob(model=ahead, global_batch_size=8, seq_len=512)
    cluster, stack = load_cluster("dgx-h100"), load_stack("megatron-core")
    said = f"{ahead.name}: num_nextn_predict_layers=1 predict tokens beyond the next, which is left"
    assert simulate(job, plan, cluster, stack).warnings[0].startswith(said)


def test_a_window_may_stand_beside_experts(tmp_path: Path) -> None:
    model = load_config(tmp_path, {**MIXTRAL_CONFIG, "sliding_window": 4096})
    assert (model.window, model.layer_runs) == (4096, (("windowed expert layer", 32),))


def test_mistral_trains_on_no_more_than_its_window(tmp_path: Path) -> None:
    assert load_config(tmp_path, MISTRAL_CONFIG).seq_len == 4096
    assert load_config(tmp_path, {**MISTRAL_CONFIG, "sliding_window": None}).seq_len == 32768
    assert load_config(tmp_path, {**MISTRAL_CONFIG, "sliding_window": 65536}).seq_len == 32768


def test_opt_positions_start_at_two_and_biases_switch_off_together(tmp_path: Path) -> None:
    plain = load_config(tmp_path, OPT_CONFIG)
    assert (plain.seq_len, plain.max_positions) == (2048, 2050)
    bare = load_config(tmp_path, {**OPT_CONFIG, "enable_bias": False})
    assert {bare.attention_bias, bare.output_bias, bare.mlp_bias} == {False}
    assert not load_config(tmp_path, {**OPT_CONFIG, "dropout": 0.0}).dropout


def test_qwen2_may_list_the_kind_of_each_layer(tmp_path: Path) -> None:
    kinds = {"layer_types": ["full_attention"] * 24}
    assert load_config(tmp_path, {**QWEN2_CONFIG, **kinds}).num_layers == 24


def test_windows_and_widths_of_heads_are_read(tmp_path: Path) -> None:
    chosen = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 22}
    model = load_config(tmp_path, {**QWEN2_CONFIG, **chosen})
    assert (model.window, model.layer_runs) == (512, (("layer", 22), ("windowed layer", 2)))
    assert load_config(tmp_path, MISTRAL_CONFIG).layer_runs == (("windowed layer", 32),)
    wide = load_config(tmp_path, {**LLAMA_CONFIG, "head_dim": 256})
    assert (wide.head_dim, wide.query_hidden_size, wide.hidden_size) == (256, 8192, 4096)


def test_dropout_is_read_from_the_config(tmp_path: Path) -> None:
    assert load_config(tmp_path, GPT2_CONFIG).dropout
    none = {"attn_pdrop": 0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    assert not load_config(tmp_path, {**GPT2_CONFIG, **none}).dropout
    assert not load_config(tmp_path, LLAMA_CONFIG).dropout


def test_switches_left_out_take_the_default_of_their_class(tmp_path: Path) -> None:
    names = ("attention_bias", "mlp_bias", "tie_word_embeddings", "num_key_value_heads")
    model = load_config(tmp_path, {k: v for k, v in LLAMA_CONFIG.items() if k not in names})
    assert (model.attention_bias, model.mlp_bias, model.tied_embeddings) == (False, False, False)
    assert model.num_kv_heads == model.num_heads
    assert load_config(tmp_path, GPT2_CONFIG).tied_embeddings


def test_llama_biases_and_tied_embeddings_are_counted(tmp_path: Path) -> None:
    changes = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    plain, changed = (
        count_parameters(load_config(tmp_path, {**LLAMA_CONFIG, **extra}))
        for extra in ({}, changes)
    )
    biases = (4096 + 2 * 1024) + 4096 + 2 * 14336 + 4096
    assert changed - plain == 32 * biases - 128256 * 4096


def test_smollm3_has_layers_without_positions_that_see_all_tokens(tmp_path: Path) -> None:
    model = load_config(tmp_path, SMOLLM3_CONFIG)
    assert count_parameters(model) == 3_075_098_624  # tensors of the checkpoint
    assert [run.num_blocks for run in model.layer_runs] == [3, 1] * 9
    assert [model.has_positions(run.kind) for run in model.layer_runs[:2]] == [True, False]
    assert model.seen_tokens(WINDOWED_LAYER, MAX_TOKENS) == MAX_TOKENS


def test_llama_without_rotary_scaling_trains_on_all_its_positions(tmp_path: Path) -> None:
    model = load_config(tmp_path, {**LLAMA_CONFIG, "rope_scaling": None})
    assert model.seq_len == model.max_positions == 131072


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA_CONFIG, {"model_type": "mamba"},
         "model_type='mamba' is not supported; supported: arcee, bert, bloom, "),
        (LLAMA_CONFIG, {"model_type": "qwen3_next", "linear_num_key_heads": 16},
         "is not supported: linear_num_key_heads=16 is of linear attention; supported: arcee, "),
        (LLAMA_CONFIG, {"model_type": "llava", "text_config": {"model_type": "llama"}},
         "its text_config, of model_type 'llama', is, as a file of its own"),
        (LLAMA_CONFIG, {"model_type": "smollm3", "use_sliding_window": True}, "it must be false"),
        (LLAMA_CONFIG, {"model_type": "granite", "residual_multiplier": "x"}, "must be a number"),
        (HUNYUAN_CONFIG, {"moe_topk": [8, 4]}, "moe_topk=[8, 4] is not supported; it must be one"),
        (HUNYUAN_CONFIG, {"num_shared_expert": [2]}, "num_shared_expert=[2] is not supported; it "),
        (ERNIE_CONFIG, {"moe_layer_end_index": 3}, "moe_layer_end_index=3 is not supported; it mu"),
        (MIXTRAL_CONFIG, {"num_experts_per_tok": 9}, "experts_per_token=9 are more than the 8"),
        (MIXTRAL_CONFIG, {"moe_layer_freq": 2}, "'moe_layer_freq'=2 is not supported"),
        (DEEPSEEK_CONFIG, {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported; it must be 1"),
        (DEEPSEEK_CONFIG, {"attention_bias": True}, "attention_bias=True is not supported"),
        (DEEPSEEK_CONFIG, {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        (DEEPSEEK_CONFIG, {"first_k_dense_replace": -1}, "=-1 must be an integer of at least 0"),
        (LLAMA_CONFIG, {"model_type": ["llama"]}, "model_type=['llama'] is not supported"),
        (LLAMA_CONFIG, {"num_local_experts": 8},
         "'num_local_experts'=8 is not supported for model_type=llama; supported keys: "),
        (LLAMA_CONFIG, {"sliding_window": 4096}, "'sliding_window'=4096 is not supported"),
        (LLAMA_CONFIG, {"quantization_config": {"bits": 4}}, "'quantization_config'={'bits': 4}"),
        (GPT2_CONFIG, {"add_cross_attention": True}, "'add_cross_attention'=True is not"),
        (BLOOM_CONFIG, {"apply_residual_connection_post_layernorm": True}, "=True is not"),
        (LLAMA_CONFIG, {"hidden_size": "4096"}, "hidden_size='4096' must be an integer"),
        (LLAMA_CONFIG, {"hidden_size": 4096.0}, "hidden_size=4096.0 must be an integer"),
        (LLAMA_CONFIG, {"hidden_size": True}, "hidden_size=True must be an integer"),
        (LLAMA_CONFIG, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA_CONFIG, {"num_hidden_layers": -1}, "num_hidden_layers=-1 must be an integer of at"),
        (LLAMA_CONFIG, {"num_hidden_layers": 10**12}, "num_layers=1000000000000: input should be"),
        (LLAMA_CONFIG, {"num_key_value_heads": 5}, "num_kv_heads=5 does not divide num_heads=32"),
        (LLAMA_CONFIG, {"mlp_bias": 1}, "mlp_bias=1 must be true or false"),
        (LLAMA_CONFIG, {"rope_scaling": "llama3"}, "rope_scaling='llama3' must be an object"),
        (LLAMA_CONFIG, {"rope_scaling": {"original_max_position_embeddings": 0}},
         "rope_scaling: original_max_position_embeddings=0 must be"),
        (LLAMA_CONFIG, {"attention_dropout": 2}, "attention_dropout=2 must be a probability"),
        (GPT2_CONFIG, {"attn_pdrop": "0.1"}, "attn_pdrop='0.1' must be a probability"),
        (GPT2_CONFIG, {"attn_pdrop": float("nan")}, "attn_pdrop: nan is not allowed"),
        (GPT2_CONFIG, {"n_head": 7}, "num_heads=7 does not divide hidden_size=768; nearest that"),
        (BLOOM_CONFIG, {"hidden_size": 64}, "hidden_size=64 disagrees with n_embed"),
        (OPT_CONFIG, {"word_embed_proj_dim": 512}, "=512 must equal hidden_size=768"),
        (OPT_CONFIG, {"do_layer_norm_before": False}, "do_layer_norm_before=False is not"),
        (OPT_CONFIG, {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=True is not"),
        (OPT_CONFIG, {"layer_norm_elementwise_affine": False}, "affine=False is not supported"),
        (OPT_CONFIG, {"layerdrop": 0.1}, "layerdrop=0.1 is not supported; it must be 0"),
        (MISTRAL_CONFIG, {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        (QWEN2_CONFIG, {"layer_types": ["sliding_attention"] * 24}, "each must be 'full_attent"),
        (QWEN2_CONFIG, {"layer_types": ["full_attention"]}, "must have one entry a layer"),
        (QWEN2_CONFIG, {"layer_types": ["linear_attention"]}, "each must be of sliding_attention"),
        (GEMMA3_CONFIG, {"text_config": None}, "text_config is missing"),
        (GEMMA3_CONFIG, {"text_config": {"num_experts": 8}}, "'num_experts'=8 is not supported"),
        (GPT_OSS_CONFIG, {"layer_types": ["chunked_attention"] * 24}, "each must be of slid"),
        (GPT_OSS_CONFIG, {"num_experts_per_tok": 2}, "experts_per_token=4 disagrees with num_expe"),
        (LLAMA4_CONFIG, {"moe_layers": [0, 1, 5]}, "moe_layers=[0, 1, 5] is not supported; it mu"),
        (LLAMA4_CONFIG, {"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0] must have one entry a"),
        (LLAMA4_CONFIG, {"no_rope_layers": [1, "0"]}, "must be a list of integers of at least 0"),
        (LLAMA4_CONFIG, {"layer_types": ["full_attention"] * 48}, "with positions attend in chunk"),
        (LLAMA4_CONFIG, {"attention_chunk_size": None}, "attention_chunk_size is missing"),
        (NEOX_CONFIG, {"rotary_pct": 0.3}, "rotary_fraction=0.3 turns 28.8 of head_dim=96; it"),
        (NEOX_CONFIG, {"rotary_pct": -1}, "rotary_pct=-1 must be a number of at least 0"),
        (BERT_CONFIG, {"is_decoder": True}, "is_decoder=True is not supported for BERT"),
        (BERT_CONFIG, {"position_embedding_type": "relative_key"}, "it must be 'absolute'"),
        (BERT_CONFIG, {"position_embedding_type": 1}, "position_embedding_type=1 must be a text"),
        (BERT_CONFIG, {"type_vocab_size": None}, "type_vocab_size is missing"),
    ],
)  # fmt: skip
def test_config_json_at_fault_is_refused(
    tmp_path: Path, base: dict[str, object], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError) as refusal:
        load_config(tmp_path, {**base, **changes})
    text = str(refusal.value)
    assert text.startswith(f"{tmp_path / 'config.json'}: ")
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize("model_type", sorted(architectures()))
def test_config_json_without_sizes_is_refused(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(PlanError, match="is missing"):
        load_config(tmp_path, {"model_type": model_type})


def test_config_json_keys_that_switch_nothing_on_are_accepted(tmp_path: Path) -> None:
    extra = {"sliding_window": None, "is_encoder_decoder": False, "pruned_heads": {}, "_x": 1}
    assert load_config(tmp_path, {**LLAMA_CONFIG, **extra}).num_layers == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n  \"a\": 1,\n}", "not valid JSON: "),
        ("", "not valid JSON: Expecting value (line 1 column 1)"),
        ("[1]", "must hold a JSON object, not [1]"),
        ('{"a": 1, "a": 2}', "not valid JSON: key 'a' appears twice"),
        ("[" * 100_000, "not valid JSON: "),
        ("{\"a\": 1" + "0" * 5000 + "}", "not valid JSON: "),
        ("{}", "model_type=(missing) is not supported"),
    ],
    ids=["comma", "empty", "list", "twice", "deep", "digits", "object"],
)  # fmt: skip
def test_malformed_json_is_refused_with_its_position(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "odd.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError) as refusal:
        load_model(str(file))
    assert str(refusal.value).startswith(str(file))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_toml_defaults_are_those_of_the_document(tmp_path: Path) -> None:
    model = load_toml(tmp_path, TINY)
    section = DOCUMENT.read_text("utf-8").split("## Model files")[1]
    table = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.MULTILINE))
    assert list(table) == [*ModelSpec.model_fields]
    for key, default in table.items():
        value = getattr(model, key)
        if default in {"`true`", "`false`"} or default.startswith('`"'):
            assert json.loads(default.strip("`")) == value
    derived = (model.title, model.num_kv_heads, model.ffn_hidden_size, model.max_positions)
    assert derived == ("tiny", 4, 256, 32)


def test_example_of_the_document_loads(tmp_path: Path) -> None:
    found = re.search(r"```toml\n(.+?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    assert found is not None
    model = load_toml(tmp_path, found[1])
    assert (model.name, model.num_kv_heads, model.head_dim) == ("my-13b", 8, 128)


def test_document_lists_every_built_in_model() -> None:
    section = DOCUMENT.read_text("utf-8").split("## Built-in models")[1].split("Some choices")[0]
    assert sorted(re.findall(r"`([\w.-]+)`", section)) == list(list_models())


@pytest.mark.parametrize(
    ("config", "name"), [(MIXTRAL_CONFIG, "mixtral-8x7b"), (DEEPSEEK_CONFIG, "deepseek-v3")]
)
def test_configs_with_experts_are_the_built_in_models(
    config: dict[str, object], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    named = {"name": name, "title": "", "source": "", "left_out": ""}
    assert load_model(str(path)).model_copy(update=named) == load_model(name).model_copy(
        update=named
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_layer = 3\n" + TINY, "unknown key 'num_layer'; nearest: num_layers"),
        ("zzzzqqqq = 3\n" + TINY, "unknown key 'zzzzqqqq'; "),
        (TINY.replace("num_layers", "num_layer"), "unknown key 'num_layer'; nearest: num_layers"),
        (TINY.replace("num_layers = 2", ""), "num_layers is missing"),
        (TINY.replace("num_layers = 2", "num_layers = 0"), "num_layers=0: input should be"),
        (TINY.replace("= 64", "= '64'"), "hidden_size='64': input should be a valid integer"),
        (TINY.replace("= 64", "= 64.0"), "hidden_size=64.0: input should be a valid integer"),
        (TINY.replace("= 64", "= true"), "hidden_size=True: input should be a valid integer"),
        (TINY.replace("= 4\n", "= 5\n"), "num_heads=5 does not divide hidden_size=64; nearest"),
        (TINY + "num_kv_heads = 3", "num_kv_heads=3 does not divide num_heads=4; nearest that"),
        (TINY + "ffn_hidden_size = 0", "ffn_hidden_size=0: input should be greater than"),
        (TINY + "gated_mlp = true", "ffn_hidden_size is missing; gated_mlp=true has no"),
        (TINY + "max_positions = 16", "seq_len=32 exceeds max_positions=16"),
        (TINY + "positions = 'sinus'", "positions='sinus': input should be 'learned', 'rotary'"),
        (TINY.replace("tiny", r"a\nb"), r"name='a\nb' must be printable"),
        (TINY + "name = 'again'", "not valid TOML: "),
        ("x = ", "not valid TOML: Invalid value (at "),
        ("", "name is missing"),
        ("models = 3", "models=3 must be tables [models.NAME]"),
        ("[models]", "must be tables"),
        ("[models]\na = 3", "[models.'a']: 3 must be a table"),
        ("name = 'x'\n[models.a]", "name must not be given"),
        (f"[models.a]{TINY}", "name must not be given"),
        ("seq_len = 8\n[models.a]\n[models.b]", "[models.'a']: num_layers is missing"),
    ],
)
def test_toml_at_fault_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError) as refusal:
        load_toml(tmp_path, text)
    assert str(refusal.value).startswith(str(tmp_path / "model.toml"))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_toml_with_several_models_is_refused_where_one_is_wanted() -> None:
    with pytest.raises(PlanError, match=r"holds 4 models \(gpt2, gpt2-medium, .*must hold one"):
        load_model(str(DATA_FOLDER / "gpt2.toml"))


def test_toml_with_one_model_table_is_that_model(tmp_path: Path) -> None:
    text = TINY.replace('name = "tiny"', "") + "[models.small]\nnum_layers = 1\n"
    with pytest.raises(PlanError, match="models"):
        load_toml(tmp_path, text.replace("num_layers = 1", "num_layers = 0"))
    model = load_toml(tmp_path, text)
    assert (model.name, model.num_layers) == ("small", 1)


def test_built_in_name_wins_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2").write_text("not a model", encoding="utf-8")
    assert load_model("gpt2").num_layers == 12
    with pytest.raises(PlanError, match=r"must end in \.json"):
        load_model("./gpt2")


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(TINY, encoding="utf-8-sig")
    assert load_model(str(file)).name == "tiny"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gtp3-175b", "unknown model 'gtp3-175b'; nearest: gpt3-175b"),
        ("GPT3-175B", "nearest: gpt3-175b"),
        ("", "unknown model ''; known: bert-large, bloom-176b,"),
        ("qqqq", "unknown model 'qqqq'; known: bert-large, bloom-176b,"),
        ("two\nlines", r"unknown model 'two\nlines'"),
        ("null\0", r"unknown model 'null\x00'"),
        ("x" * 5000, "unknown model 'xxx"),
        ("absent.json", "model file 'absent.json' does not exist"),
        ("nowhere/absent.toml", "model file 'nowhere/absent.toml' does not exist"),
    ],
)
def test_unknown_model_is_refused_with_the_nearest_names(name: str, message: str) -> None:
    with pytest.raises(PlanError) as refusal:
        load_model(name)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is a folder; give the config"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("ending", ["json", "toml"])
def test_binary_file_is_refused(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"weights.{ending}"
    file.write_bytes(b"\x80\x02\xff\xfe")
    with pytest.raises(PlanError, match=r"line 1: not UTF-8"):
        load_model(str(file))


def test_huge_file_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    with file.open("wb") as handle:
        handle.truncate(1_000_001)
    with pytest.raises(PlanError, match="too large for a model file; allowed: at most 1,000,000"):
        load_model(str(file))


def test_file_that_vanishes_or_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(TINY, encoding="utf-8")

    def refuse(*args: object, **kwargs: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PlanError, match="cannot be read: Permission denied"):
        load_model(str(file))


def test_a_model_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        load_model("gpt2").num_layers = 3


def test_file_names_are_shown_on_one_line(tmp_path: Path) -> None:
    file = tmp_path / "two\nlines.toml"
    file.write_text("x = ", encoding="utf-8")
    with pytest.raises(PlanError) as refusal:
        load_model(str(file))
    assert str(refusal.value).isprintable()
    assert r"two\nlines.toml': not valid TOML" in str(refusal.value)


values = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(),
    st.text("ab\n\x00", max_size=300), st.lists(st.integers(), max_size=3),
)  # fmt: skip
keys = st.sampled_from([*ModelSpec.model_fields, "num_layer", "line\nbreak"])


def outcome(data: dict[str, object]) -> ModelSpec | str:
    try:
        return parse_model(data, origin="file")
    except PlanError as refusal:
        return str(refusal)


@given(changes=st.dictionaries(keys, values, max_size=4))
def test_any_mapping_is_a_model_or_a_one_line_refusal(changes: dict[str, object]) -> None:
    tiny = {"name": "tiny", "num_layers": 2, "hidden_size": 64, "num_heads": 4}
    found = outcome({**tiny, "vocab_size": 256, "seq_len": 32, **changes})
    if isinstance(found, str):
        assert found.startswith("file: ")
        assert found.isprintable()
    else:
        if changes.get("head_dim") is None:  # a width of their own need not make up the hidden one
            assert found.head_dim * found.num_heads == found.hidden_size
        assert found.name.isprintable()
