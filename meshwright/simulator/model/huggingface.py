"""Read the config.json of a Hugging Face checkpoint into a `ModelSpec`.

The meaning of each key follows the configuration classes of the transformers
library (BertConfig, BloomConfig, GPT2Config, LlamaConfig, MistralConfig, OPTConfig, Qwen2Config;
those with experts are in `expert_configs`).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from meshwright.hwprofiles import shown_path
from meshwright.simulator.errors import PlanError
from meshwright.simulator.model.described import shorten
from meshwright.simulator.model.expert_configs import (
    DEEPSEEK_KEYS,
    MIXTRAL_KEYS,
    QWEN2_MOE_KEYS,
    deepseek_layers,
    deepseek_v3_layers,
    mixtral_experts,
    qwen2_experts,
)
from meshwright.simulator.model.spec import ModelSpec, parse_model

# Keys that any config.json may carry and that change neither shapes nor training cost.
_HARMLESS_KEYS = """
    architectures bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder label2id
    layer_norm_epsilon layer_norm_eps length_penalty max_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix problem_type
    repetition_penalty return_dict return_dict_in_generate rms_norm_eps sep_token_id
    suppress_tokens task_specific_params temperature tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p unk_token_id use_cache
    """
HARMLESS_KEYS = frozenset(_HARMLESS_KEYS.split())

# BLOOM models were trained on sequences of this length (arXiv 2211.05100, Table 3).
BLOOM_SEQ_LEN = 2048
# OPT's learned positions start at this index (OPTLearnedPositionalEmbedding).
OPT_POSITION_OFFSET = 2


def read_config(config: Mapping[str, object], *, path: Path) -> ModelSpec:
    """Return the model that a Hugging Face configuration describes.

    The model is named for its folder if the file is called config.json, else for the file.

    Args:
        config: The JSON object.
        path: Where it came from, for the name and for errors.

    Raises:
        PlanError: If the architecture, or a key that may change it, is not supported.

    >>> config = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
    ...           "n_embd": 768, "n_layer": 12, "n_head": 12}
    >>> read_config(config, path=Path("gpt2/config.json")).ffn_hidden_size
    3072
    """
    origin = shown_path(path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        shown = shorten(model_type) if "model_type" in config else "(missing)"
        supported = ", ".join(sorted(ARCHITECTURES))
        raise PlanError(f"{origin}: model_type={shown} is not supported; supported: {supported}")
    architecture = ARCHITECTURES[model_type]
    _refuse_unknown_keys(config, architecture, origin=origin)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    fields = architecture.read(Reader(config, origin))
    given = {key: value for key, value in fields.items() if value is not None}
    source = f"Hugging Face {path.name}, model_type {model_type}"
    return parse_model({**given, "name": name or path.stem, "source": source}, origin=origin)


class Reader:
    """Typed access to a configuration, with errors that name file, key and value."""

    def __init__(self, config: Mapping[str, object], origin: str) -> None:
        self._config = config
        self._origin = origin

    def size(self, *keys: str) -> int:
        """Return a positive integer that must be there, under any of its names."""
        size = self.optional_size(*keys)
        if size is None:
            raise PlanError(f"{self._origin}: {' or '.join(keys)} is missing")
        return size

    def optional_size(self, *keys: str) -> int | None:
        """Return a positive integer, or None where it is absent or null."""
        found: dict[str, int] = {}
        for key in keys:
            value = self._config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                self.refuse(key, "must be an integer of at least 1")
            for other, size in found.items():
                if value != size:
                    self.refuse(key, f"disagrees with {other}={size}")
            found[key] = value
        return next(iter(found.values()), None)

    def count(self, key: str, *, default: int) -> int:
        """Return an integer of at least 0, or *default* where it is absent or null."""
        value = self._config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.refuse(key, "must be an integer of at least 0")
        return value

    def refuse_listed(self, key: str) -> None:
        """Raise for a list that holds anything."""
        if self._config.get(key) not in (None, []):
            self.refuse(key, "is not supported; it must be empty")

    def switch(self, key: str, *, default: bool) -> bool:
        """Return a boolean, or what the configuration class assumes where it is absent."""
        value = self._config.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return value

    def text(self, key: str, *, default: str) -> str:
        """Return a word, or what the configuration class assumes where it is absent."""
        value = self._config.get(key, default)
        if not isinstance(value, str):
            self.refuse(key, "must be a text")
        return value

    def is_all(self, key: str, word: str) -> bool:
        """Return whether a list, where there is one, holds nothing but *word*."""
        values = self._config.get(key)
        return values is None or (isinstance(values, list) and all(v == word for v in values))

    def dropout(self, *keys: str, default: float) -> bool:
        """Return whether any of these dropout probabilities is above zero."""
        found = {key: self._config.get(key, default) for key in keys}
        for key, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                self.refuse(key, "must be a probability, at least 0 and below 1")
        return any(found.values())

    def original_positions(self) -> int | None:
        """Return the positions a model was trained on before its rotary scaling, if it says so."""
        for key in ("rope_scaling", "rope_parameters"):
            scaling = self._config.get(key)
            if scaling is None:
                continue
            if not isinstance(scaling, dict):
                self.refuse(key, "must be an object or null")
            inner = Reader(scaling, f"{self._origin}: {key}")
            return inner.optional_size("original_max_position_embeddings")
        return None

    def refuse(self, key: str, rule: str) -> NoReturn:
        """Raise the error for one value."""
        raise PlanError(f"{self._origin}: {key}={shorten(self._config.get(key))} {rule}")


class _Architecture(NamedTuple):
    """How to read one model_type, and the keys it may carry."""

    read: Callable[[Reader], dict[str, object]]
    keys: frozenset[str]


def _read_gpt2(reader: Reader) -> dict[str, object]:
    return {
        "num_layers": reader.size("n_layer", "num_hidden_layers"),
        "hidden_size": reader.size("n_embd", "hidden_size"),
        "num_heads": reader.size("n_head", "num_attention_heads"),
        "ffn_hidden_size": reader.optional_size("n_inner"),
        "vocab_size": reader.size("vocab_size"),
        "seq_len": reader.size("n_positions", "max_position_embeddings"),
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
        "dropout": reader.dropout("resid_pdrop", "embd_pdrop", "attn_pdrop", default=0.1),
    }


def _read_bloom(reader: Reader) -> dict[str, object]:
    return {
        "num_layers": reader.size("n_layer", "num_hidden_layers"),
        "hidden_size": reader.size("n_embed", "hidden_size"),
        "num_heads": reader.size("n_head", "num_attention_heads"),
        "ffn_hidden_size": reader.optional_size("n_inner"),
        "vocab_size": reader.size("vocab_size"),
        "seq_len": reader.optional_size("seq_length") or BLOOM_SEQ_LEN,
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
        "positions": "alibi",
        "embedding_norm": True,
        "dropout": reader.dropout("hidden_dropout", "attention_dropout", default=0.0),
    }


def _read_llama(reader: Reader) -> dict[str, object]:
    attention_bias = reader.switch("attention_bias", default=False)
    return {
        **_read_gated_decoder(reader),
        "num_kv_heads": reader.optional_size("num_key_value_heads"),
        "attention_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": reader.switch("mlp_bias", default=False),
    }


def _read_mistral(reader: Reader) -> dict[str, object]:
    decoder = _read_gated_decoder(reader)
    # Attention here counts every earlier token, which is exact up to the length of the window.
    window = reader.optional_size("sliding_window") or reader.size("max_position_embeddings")
    return {
        **decoder,
        "num_kv_heads": reader.size("num_key_value_heads"),
        "seq_len": min(window, reader.size("max_position_embeddings")),
    }


def _read_qwen2(reader: Reader) -> dict[str, object]:
    if not reader.is_all("layer_types", "full_attention"):
        reader.refuse("layer_types", "is not supported; each must be 'full_attention'")
    return {
        **_read_gated_decoder(reader),
        "num_kv_heads": reader.size("num_key_value_heads"),
        "attention_bias": True,
    }


def _read_deepseek_v2(reader: Reader) -> dict[str, object]:
    return {**_read_gated_decoder(reader, has_heads=False), **deepseek_layers(reader)}


def _read_deepseek_v3(reader: Reader) -> dict[str, object]:
    return {**_read_gated_decoder(reader, has_heads=False), **deepseek_v3_layers(reader)}


def _read_gated_decoder(reader: Reader, *, has_heads: bool = True) -> dict[str, object]:
    """Return what Llama and its successors share: rotary positions, RMS norms, a gated MLP."""
    hidden_size = reader.size("hidden_size")
    num_heads = reader.size("num_attention_heads")
    head_dim = reader.optional_size("head_dim")
    if has_heads and head_dim is not None and head_dim * num_heads != hidden_size:
        reader.refuse("head_dim", f"times {num_heads} heads must equal hidden_size={hidden_size}")
    max_positions = reader.size("max_position_embeddings")
    return {
        "num_layers": reader.size("num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "ffn_hidden_size": reader.size("intermediate_size"),
        "vocab_size": reader.size("vocab_size"),
        "seq_len": reader.original_positions() or max_positions,
        "max_positions": max_positions,
        "gated_mlp": True,
        "tied_embeddings": reader.switch("tie_word_embeddings", default=False),
        "positions": "rotary",
        "norm": "rmsnorm",
        "attention_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "dropout": reader.dropout("attention_dropout", default=0.0),
    }


def _read_opt(reader: Reader) -> dict[str, object]:
    hidden_size = reader.size("hidden_size")
    if reader.optional_size("word_embed_proj_dim") not in {None, hidden_size}:
        reader.refuse("word_embed_proj_dim", f"must equal hidden_size={hidden_size}")
    for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if not reader.switch(key, default=True):
            reader.refuse(key, "is not supported; it must be true")
    if reader.switch("_remove_final_layer_norm", default=False):
        reader.refuse("_remove_final_layer_norm", "is not supported; it must be false")
    if reader.dropout("layerdrop", default=0.0):
        reader.refuse("layerdrop", "is not supported; it must be 0")
    seq_len = reader.size("max_position_embeddings")
    has_bias = reader.switch("enable_bias", default=True)
    return {
        "num_layers": reader.size("num_hidden_layers"),
        "hidden_size": hidden_size,
        "num_heads": reader.size("num_attention_heads"),
        "ffn_hidden_size": reader.size("ffn_dim"),
        "vocab_size": reader.size("vocab_size"),
        "seq_len": seq_len,
        "max_positions": seq_len + OPT_POSITION_OFFSET,
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
        "fused_qkv": False,
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": has_bias,
        "dropout": reader.dropout("dropout", default=0.1)
        or reader.dropout("attention_dropout", "activation_dropout", default=0.0),
    }


def _read_bert(reader: Reader) -> dict[str, object]:
    if reader.switch("is_decoder", default=False):
        reader.refuse("is_decoder", "is not supported for BERT; it must be false")
    if reader.text("position_embedding_type", default="absolute") != "absolute":
        reader.refuse("position_embedding_type", "is not supported; it must be 'absolute'")
    return {
        "num_layers": reader.size("num_hidden_layers"),
        "hidden_size": reader.size("hidden_size"),
        "num_heads": reader.size("num_attention_heads"),
        "ffn_hidden_size": reader.size("intermediate_size"),
        "vocab_size": reader.size("vocab_size"),
        "seq_len": reader.size("max_position_embeddings"),
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
        "embedding_norm": True,
        "causal": False,
        "token_types": reader.size("type_vocab_size"),
        "mlm_head": True,
        "dropout": reader.dropout(
            "hidden_dropout_prob", "attention_probs_dropout_prob", default=0.1
        ),
    }


_GPT2_KEYS = """
    activation_function attn_pdrop embd_pdrop hidden_size max_position_embeddings n_ctx n_embd
    n_head n_inner n_layer n_positions num_attention_heads num_hidden_layers
    reorder_and_upcast_attn resid_pdrop scale_attn_by_inverse_layer_idx scale_attn_weights
    summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj tie_word_embeddings vocab_size
    """
_BLOOM_KEYS = """
    attention_dropout attention_softmax_in_fp32 bias_dropout_fusion hidden_dropout hidden_size
    masked_softmax_fusion n_embed n_head n_inner n_layer num_attention_heads num_hidden_layers
    offset_alibi pretraining_tp seq_length skip_bias_add skip_bias_add_qkv slow_but_exact
    tie_word_embeddings vocab_size
    """
_LLAMA_KEYS = """
    attention_bias attention_dropout head_dim hidden_act hidden_size intermediate_size
    max_position_embeddings mlp_bias num_attention_heads num_hidden_layers num_key_value_heads
    pretraining_tp rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size
    """

_MISTRAL_KEYS = """
    attention_dropout head_dim hidden_act hidden_size intermediate_size max_position_embeddings
    num_attention_heads num_hidden_layers num_key_value_heads rope_parameters rope_theta
    sliding_window tie_word_embeddings vocab_size
    """
# The window of Qwen2 counts only with use_sliding_window, which is not among the keys.
_QWEN2_KEYS = f"{_MISTRAL_KEYS} layer_types max_window_layers rope_scaling"
_OPT_KEYS = """
    activation_dropout activation_function attention_dropout do_layer_norm_before dropout
    enable_bias ffn_dim hidden_size init_std layer_norm_elementwise_affine layerdrop
    max_position_embeddings num_attention_heads num_hidden_layers tie_word_embeddings vocab_size
    word_embed_proj_dim
    """
_BERT_KEYS = """
    attention_probs_dropout_prob classifier_dropout directionality hidden_act hidden_dropout_prob
    hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
    pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
    pooler_type position_embedding_type tie_word_embeddings type_vocab_size vocab_size
    """

ARCHITECTURES = {
    "bert": _Architecture(_read_bert, frozenset(_BERT_KEYS.split())),
    "bloom": _Architecture(_read_bloom, frozenset(_BLOOM_KEYS.split())),
    "deepseek_v2": _Architecture(_read_deepseek_v2, frozenset(DEEPSEEK_KEYS.split())),
    "deepseek_v3": _Architecture(_read_deepseek_v3, frozenset(DEEPSEEK_KEYS.split())),
    "gpt2": _Architecture(_read_gpt2, frozenset(_GPT2_KEYS.split())),
    "kimi_k2": _Architecture(_read_deepseek_v3, frozenset(DEEPSEEK_KEYS.split())),
    "llama": _Architecture(_read_llama, frozenset(_LLAMA_KEYS.split())),
    "mistral": _Architecture(_read_mistral, frozenset(_MISTRAL_KEYS.split())),
    "mixtral": _Architecture(
        lambda reader: {**_read_mistral(reader), **mixtral_experts(reader)},
        frozenset(f"{_MISTRAL_KEYS} {MIXTRAL_KEYS}".split()),
    ),
    "opt": _Architecture(_read_opt, frozenset(_OPT_KEYS.split())),
    "qwen2": _Architecture(_read_qwen2, frozenset(_QWEN2_KEYS.split())),
    "qwen2_moe": _Architecture(
        lambda reader: {**_read_qwen2(reader), **qwen2_experts(reader)},
        frozenset(f"{_QWEN2_KEYS} {QWEN2_MOE_KEYS}".split()),
    ),
}


def _refuse_unknown_keys(
    config: Mapping[str, object], architecture: _Architecture, *, origin: str
) -> None:
    """Raise for a key that might change the architecture, unless it switches nothing on."""
    for key, value in config.items():
        known = key in architecture.keys or key in HARMLESS_KEYS or key.startswith("_")
        switches_nothing_on = value is None or value is False or value in ({}, [])
        if not known and not switches_nothing_on:
            raise PlanError(
                f"{origin}: {shorten(key)}={shorten(value)} is not supported for "
                f"model_type={config['model_type']}; "
                f"supported keys: {', '.join(sorted(architecture.keys))}"
            )
