"""Dense families that differ from Llama's by an option or two: OLMo 3, Granite, Ministral, ...

Keys that change no size and are not modelled become warnings (CHANGING_NO_SIZE of `reader`).
"""

from meshwright.simulator.model.huggingface.llama import (
    LLAMA_FAMILIES,
    LLAMA_KEYS,
    MISTRAL_KEYS,
    OLMO2_KEYS,
    check_whole_heads,
    gated_decoder,
    read_llama,
    read_mistral,
    read_olmo2,
    tied_outside,
    windows,
)
from meshwright.simulator.model.huggingface.reader import (
    MAX_TOKENS,
    Architecture,
    Reader,
    numbers,
    period,
)

Fields = dict[str, object]

# Defaults of the configuration classes.
OLMO3_PATTERN = "WWWF"
SMOLLM3_INTERVAL = 4
MINISTRAL3_ROTARY = {"original_max_position_embeddings": 16_384, "llama_4_scaling_beta": 0.1}
SEED_DROPOUT = 0.1
NEMOTRON_ROTARY_FRACTION = 0.5


def _read_olmo3(reader: Reader) -> Fields:
    """Return the fields of OLMo 3: layers of OLMo 2, three of four with sliding windows."""
    pattern = reader.layer_pattern(usual=OLMO3_PATTERN)
    return {**read_olmo2(reader), **windows(reader.optional_size("sliding_window"), pattern)}


def _read_exaone4(reader: Reader) -> Fields:
    """Return the fields of EXAONE 4, where layers without a window have no RoPE."""
    window = reader.optional_size("sliding_window")
    pattern = reader.layer_pattern(usual="") or _exaone4_pattern(reader)
    is_mixed = window is not None and "F" in pattern
    return {
        **gated_decoder(reader),
        **windows(window, pattern),
        "num_kv_heads": reader.size("num_key_value_heads"),
        "qk_norm": "head",
        "norm_places": "after",
        "rotary_layers": "windowed" if is_mixed else "all",
    }


def _exaone4_pattern(reader: Reader) -> str:
    """Return the pattern of windows without ``layer_types``: all but every n-th layer."""
    if not reader.has("sliding_window"):
        return "F"
    return "W" * (reader.size("sliding_window_pattern") - 1) + "F"


def _read_smollm3(reader: Reader) -> Fields:
    """Return the fields of SmolLM3: full attention, and no RoPE in every fourth layer (NoPE).

    Layers with RoPE get a window longer than any sequence, as only windows distinguish layers in
    a `ModelSpec`.
    """
    if reader.switch("use_sliding_window", default=False):
        reader.refuse("use_sliding_window", "is not supported; it must be false")
    interval = reader.optional_size("no_rope_layer_interval") or SMOLLM3_INTERVAL
    pattern = "W" * (interval - 1) + "F"
    has_rope = numbers(reader, "no_rope_layers")  # despite its name 1 is a layer with RoPE
    if has_rope:
        pattern = period(reader, "no_rope_layers", ["FW"[each != 0] for each in has_rope])
    if reader.layer_pattern(usual="F") != "F":
        reader.refuse("layer_types", "is not supported; each must be 'full_attention'")
    mixed = {**windows(MAX_TOKENS, pattern), "rotary_layers": "windowed"}
    if "W" not in pattern:
        reader.refuse("no_rope_layers", "is not supported; some layers must have positions")
    return {
        **read_llama(reader),
        **(mixed if "F" in pattern else {}),
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
    }


def _read_seed_oss(reader: Reader) -> Fields:
    return {
        **read_llama(reader),
        "attention_bias": reader.switch("attention_bias", default=True),
        "output_bias": reader.switch("attention_out_bias", default=False),
        "dropout": reader.dropout("attention_dropout", "residual_dropout", default=SEED_DROPOUT),
    }


def _read_ernie(reader: Reader) -> Fields:
    """Return the fields of ERNIE 4.5, in which all linear layers have a bias, or none."""
    has_bias = reader.switch("use_bias", default=False)
    return {
        **gated_decoder(reader),
        "num_kv_heads": reader.optional_size("num_key_value_heads"),
        "tied_embeddings": reader.switch("tie_word_embeddings", default=True),
        "attention_bias": has_bias,
        "output_bias": has_bias,
        "mlp_bias": has_bias,
    }


def read_hunyuan(reader: Reader) -> Fields:
    """Return the fields of Hunyuan's layers, with query and key norms behind RoPE."""
    if not reader.switch("use_qk_norm", default=True):
        reader.refuse("use_qk_norm", "is not supported; it must be true")
    if reader.switch("use_cla", default=False):
        reader.refuse("use_cla", "is not supported; it must be false")
    return {**read_llama(reader), "qk_norm": "head"}


def read_granite(reader: Reader) -> Fields:
    """Return the fields of Granite's layers: those of Llama, with scaled embeddings."""
    for key in ("attention_multiplier", "logits_scaling", "residual_multiplier"):
        reader.number(key, default=1.0)
    multiplier = reader.number("embedding_multiplier", default=1.0)
    return {**read_llama(reader), "scaled_embeddings": multiplier != 1.0}


def _read_arcee(reader: Reader) -> Fields:
    if reader.text("hidden_act", default="relu2") != "relu2":
        reader.refuse("hidden_act", "is not supported; it must be 'relu2'")
    check_whole_heads(reader)
    return {**read_llama(reader), "gated_mlp": False, "activation": "squared relu"}


def _read_nemotron(reader: Reader) -> Fields:
    """Return the fields of Nemotron: LayerNorm, squared ReLU, partial RoPE."""
    return {
        **_read_arcee(reader),
        "norm": "layernorm",
        "rotary_fraction": reader.rotary_fraction(default=NEMOTRON_ROTARY_FRACTION),
        "spelling": "glm4_moe",  # applies partial RoPE by the same operators
    }


def _read_ministral3(reader: Reader) -> Fields:
    return {
        **read_mistral(reader),
        "seq_len": reader.original_positions() or reader.size("max_position_embeddings"),
    }


def _read_mistral3(reader: Reader) -> Fields:
    """Return the fields of a multimodal model's language model; images are not modelled.

    ``tie_word_embeddings`` stands outside of ``text_config``, if anywhere.
    """
    kind = reader.inside("text_config").text("model_type", default="mistral")
    if kind not in _MISTRAL3_TEXTS:
        reader.inside("text_config").refuse(
            "model_type", f"is not supported; supported: {', '.join(_MISTRAL3_TEXTS)}"
        )
    architecture = _MISTRAL3_TEXTS[kind]
    fields = architecture.read(reader.nested("text_config", architecture))
    return {**fields, **tied_outside(reader)}


_MINISTRAL3 = Architecture(
    _read_ministral3,
    frozenset(f"{MISTRAL_KEYS} rope_scaling".split()),
    {"head_dim": 128, "rope_parameters": MINISTRAL3_ROTARY},
)
_MISTRAL3_TEXTS = {"ministral3": _MINISTRAL3, "mistral": LLAMA_FAMILIES["mistral"]}
_MISTRAL3_KEYS = """
    image_token_id image_token_index multimodal_projector_bias projector_hidden_act
    spatial_merge_size text_config tie_word_embeddings vision_config vision_feature_layer
    """
_SMOLLM3_KEYS = f"""
    {LLAMA_KEYS} layer_types max_window_layers no_rope_layer_interval no_rope_layers
    sliding_window use_sliding_window
    """
_SEED_KEYS = f"{LLAMA_KEYS} attention_out_bias residual_dropout"
_ERNIE_KEYS = """
    auto_map head_dim hidden_act hidden_size intermediate_size max_position_embeddings
    num_attention_heads num_hidden_layers num_key_value_heads rope_parameters rope_scaling
    rope_theta tie_word_embeddings use_bias vocab_size
    """
# Keys of Llama, and those of the authors' own code, which transformers ignores.
HUNYUAN_KEYS = f"""
    {LLAMA_KEYS} attention_head_dim auto_map cla_share_factor class_num eod_token_id im_end_id
    im_newline_id im_start_id image_token_id mask_init_id norm_type org_vocab_size pool_type
    text_end_id text_start_id use_cla use_qk_norm use_rotary_pos_emb
    """
GRANITE_KEYS = f"""
    {LLAMA_KEYS} attention_multiplier embedding_multiplier logits_scaling residual_multiplier
    """
_EXAONE4_KEYS = f"{MISTRAL_KEYS} layer_types rope_scaling sliding_window_pattern"

DENSE_FAMILIES = {
    "arcee": Architecture(_read_arcee, frozenset(LLAMA_KEYS.split())),
    "ernie4_5": Architecture(
        _read_ernie, frozenset(_ERNIE_KEYS.split()), {"head_dim": 128, "num_key_value_heads": 2}
    ),
    "exaone4": Architecture(
        _read_exaone4,
        frozenset(_EXAONE4_KEYS.split()),
        {"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "granite": Architecture(read_granite, frozenset(GRANITE_KEYS.split())),
    "hunyuan_v1_dense": Architecture(read_hunyuan, frozenset(HUNYUAN_KEYS.split())),
    "ministral3": _MINISTRAL3,
    "mistral3": Architecture(_read_mistral3, frozenset(_MISTRAL3_KEYS.split())),
    "nemotron": Architecture(
        _read_nemotron, frozenset(f"{LLAMA_KEYS} norm_eps partial_rotary_factor".split())
    ),
    "olmo3": Architecture(
        _read_olmo3,
        frozenset(f"{OLMO2_KEYS} layer_types sliding_window".split()),
        {"sliding_window": 4096},
    ),
    "seed_oss": Architecture(
        _read_seed_oss, frozenset(_SEED_KEYS.split()), {"head_dim": 128, "num_key_value_heads": 8}
    ),
    "smollm3": Architecture(
        _read_smollm3, frozenset(_SMOLLM3_KEYS.split()), {"num_key_value_heads": 4}
    ),
}
