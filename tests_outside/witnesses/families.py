"""Families of dense models: small layers of transformers, and the models that we read."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CONFIG_MAPPING, PreTrainedConfig

from meshwright.simulator.model import ModelSpec, parse_model
from meshwright.simulator.model.huggingface import read_config

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 1024}
PLAIN = {"num_attention_heads": 4}
WIDE = {**GROUPED, "head_dim": 128}
NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
# The first layer has no experts.
LLAMA4 = {**WIDE, "intermediate_size_mlp": 1024, "interleave_moe_layer_step": 2}


class Family(NamedTuple):
    """A model_type, its class of layers, and sizes of a small layer of it."""

    model_type: str
    layer: str
    sizes: dict[str, object]
    number: int = 0  # of the layer


LAYERS = {
    "qwen2": Family("qwen2", "Qwen2DecoderLayer", GROUPED),
    "qwen3": Family("qwen3", "Qwen3DecoderLayer", WIDE),
    "mistral": Family("mistral", "MistralDecoderLayer", WIDE),
    "gemma": Family("gemma", "GemmaDecoderLayer", WIDE),
    # PyTorch's own kernels do not cap scores; flash-attn's does as it goes.
    "gemma2": Family("gemma2", "Gemma2DecoderLayer", {**WIDE, "attn_logit_softcapping": None}),
    "gemma3": Family("gemma3_text", "Gemma3DecoderLayer", WIDE),
    "olmo2": Family("olmo2", "Olmo2DecoderLayer", GROUPED),
    "phi3": Family("phi3", "Phi3DecoderLayer", GROUPED),
    "glm4": Family("glm4", "Glm4DecoderLayer", {**GROUPED, "head_dim": 96}),
    "gpt_neox": Family("gpt_neox", "GPTNeoXLayer", {**PLAIN, "intermediate_size": 1024}),
    "gpt_neox in turn": Family(
        "gpt_neox",
        "GPTNeoXLayer",
        {**PLAIN, "intermediate_size": 256, "use_parallel_residual": False},
    ),
    "exaone4": Family("exaone4", "Exaone4DecoderLayer", GROUPED),
    "olmo3": Family("olmo3", "Olmo3DecoderLayer", GROUPED),
    "seed_oss": Family("seed_oss", "SeedOssDecoderLayer", {**WIDE, **NO_DROPOUT}),
    "smollm3": Family("smollm3", "SmolLM3DecoderLayer", GROUPED),
    "smollm3 without positions": Family("smollm3", "SmolLM3DecoderLayer", GROUPED, 3),
    "llama4": Family("llama4_text", "Llama4TextDecoderLayer", {**LLAMA4, "use_qk_norm": False}),
    "llama4 with norms": Family("llama4_text", "Llama4TextDecoderLayer", LLAMA4),
    "falcon": Family("falcon", "FalconDecoderLayer", {**PLAIN, "ffn_hidden_size": 1024}),
    "falcon groups": Family(
        "falcon",
        "FalconDecoderLayer",
        {**PLAIN, "ffn_hidden_size": 1024, "num_kv_heads": 2, "new_decoder_architecture": True},
    ),
}
SMALL = {"hidden_size": 384, "num_hidden_layers": 4, "vocab_size": 512, "pad_token_id": None}


def spec_of(config: PreTrainedConfig) -> ModelSpec:
    """Return the model that we read of a configuration as transformers writes it."""
    return read_file(json.loads(config.to_json_string(use_diff=False)))


def read_file(written: Mapping[str, object]) -> ModelSpec:
    """Return the model that we read of a configuration file."""
    return parse_model(read_config(written, path=Path("small/config.json")), origin="config")


class Layer(nn.Module):
    """A layer of transformers without a window, which asks PyTorch for grouped heads.

    flash-attn's kernels take fewer heads of keys than of queries, and a window, as they are;
    PyTorch's have to be told of the first, which Falcon leaves to flash-attn.
    """

    def __init__(self, family: Family, tokens: int, num_sequences: int) -> None:
        super().__init__()
        config = CONFIG_MAPPING[family.model_type](**{**SMALL, **family.sizes})
        config._attn_implementation = "sdpa"
        name = family.model_type.removesuffix("_text")
        module = import_module(f"transformers.models.{name}.modeling_{name}")
        self.layer = getattr(module, family.layer)(config, family.number)
        self.spec = spec_of(config)
        has_positions = (
            self.spec.rotary_layers == "all" or self.spec.layer_pattern[family.number] == "W"
        )
        rotary_layers = "all" if has_positions else "windowed"
        fields = {"window": 0, "layer_pattern": "F", "rotary_layers": rotary_layers}
        self.spec = self.spec.model_copy(update=fields)
        self.angles = torch.empty(num_sequences, tokens, self.spec.rotary_dim)
        self.turns: object = (self.angles, self.angles)
        if name == "llama4":
            half = self.spec.rotary_dim // 2
            self.turns = torch.empty(num_sequences, tokens, half, dtype=torch.complex64)
        self.given = {"attention_mask": None}
        if name == "falcon":
            self.given["alibi"] = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens after the layer."""
        with patch.object(functional, "scaled_dot_product_attention", _grouped_attention):
            out = self.layer(x, position_embeddings=self.turns, **self.given)
        return out[0] if isinstance(out, tuple) else out


_attention = functional.scaled_dot_product_attention


def _grouped_attention(query: Tensor, key: Tensor, value: Tensor, **given: object) -> Tensor:
    given["enable_gqa"] = query.shape[1] != key.shape[1]
    return _attention(query, key, value, **given)
