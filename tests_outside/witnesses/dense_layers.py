"""Dense layers of frameworks' own models, and their arguments beside tokens."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.models.qwen3.model.model import TransformerBlock
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from meshwright.simulator.model import ModelSpec


class DenseLayer(NamedTuple):
    """A layer, and its arguments beside tokens, by place and by name."""

    module: nn.Module
    arguments: tuple[object, ...] = ()
    named: dict[str, object] = {}  # noqa: RUF012 - nobody writes to it

    def __call__(self, x: Tensor) -> Tensor:
        """Return the tokens *x* after the layer."""
        out: Tensor = self.module(x, *self.arguments, **self.named)
        return out


def torchtitan_llama(model: ModelSpec, tokens: int, _sequences: int) -> DenseLayer:
    """Return a layer of torchtitan's Llama."""
    width = model.hidden_size
    layer = llama3.TransformerBlock(
        0,
        llama3.TransformerModelArgs(
            dim=width, n_heads=model.num_heads, n_kv_heads=model.num_kv_heads, max_seq_len=tokens
        ),
    )
    # It takes two thirds of the width that it is given.
    layer.feed_forward = llama3.FeedForward(width, model.ffn_hidden_size * 3 // 2, 1, None)
    # freqs_cis: a complex number for each pair of a head's elements.
    angles = torch.empty(tokens, model.head_dim // 2, dtype=torch.complex64)
    return DenseLayer(layer, (angles, None))


def torchtitan_qwen3(model: ModelSpec, tokens: int, _sequences: int) -> DenseLayer:
    """Return a layer of torchtitan's Qwen3."""
    sizes = Qwen3ModelArgs(
        dim=model.hidden_size,
        n_heads=model.num_heads,
        n_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        hidden_dim=model.ffn_hidden_size,
    )
    table = torch.empty(tokens, 2 * model.head_dim, dtype=torch.float32)
    return DenseLayer(TransformerBlock(0, sizes), (table, None))


def transformers_llama(model: ModelSpec, tokens: int, sequences: int) -> DenseLayer:
    """Return a layer of transformers' Llama."""
    config = LlamaConfig(
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
    )
    config._attn_implementation = "sdpa"
    angles = torch.empty(sequences, tokens, model.head_dim)
    return DenseLayer(LlamaDecoderLayer(config, 0), named={"position_embeddings": (angles, angles)})


def transformers_gpt2(model: ModelSpec, _tokens: int, _sequences: int) -> DenseLayer:
    """Return a layer of transformers' GPT-2."""
    config = GPT2Config(n_embd=model.hidden_size, n_head=model.num_heads, attn_pdrop=0.0)
    config._attn_implementation = "sdpa"
    return DenseLayer(GPT2Block(config, 0))
