"""Small modules and functions, one or more for each kind of operator that a block is made of.

What each keeps is said where it is not what one would expect. Sizes are small and all different,
so that a byte too many cannot hide behind another one too few.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F  # noqa: N812
from block_witness import Given, Measured, Run, measure_module
from torch import Tensor, nn

from meshwright.hwprofiles import Attention, Recompute
from meshwright.simulator import load_model
from meshwright.validate.programs.fused import (
    BiasDropoutAdd,
    CausalSoftmax,
    FusedAttention,
    PackedSwiglu,
    RmsNorm,
    Rotary,
    Scores,
    Swiglu,
)
from meshwright.validate.programs.layers import LayerOptions
from meshwright.validate.programs.layers.transformer import AttentionCore

BATCH, TOKENS, HEADS, GROUPS, HEAD = 2, 24, 4, 2, 8
WIDTH, WIDE = HEADS * HEAD, 72
WORDS, PLACES = 56, 40
CHANNELS, SIDE = 12, 10
PROBABILITY = 0.1

FP32, BF16 = torch.float32, torch.bfloat16
ACTIVATION = Given((BATCH, TOKENS, WIDTH))
STREAM = Given((BATCH, TOKENS, WIDTH), FP32)
SPLIT = Given((BATCH, TOKENS, HEADS, HEAD))
GROUPED = Given((BATCH, TOKENS, GROUPS, HEAD))
SCORES = Given((BATCH * HEADS, TOKENS, TOKENS))
IDS = Given((BATCH, TOKENS), torch.long)
IMAGES = Given((BATCH, CHANNELS, SIDE, SIDE), FP32)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCase:
    """A module, what goes into it, and how it runs; see `measure_module`."""

    make: Callable[[], Run]
    given: tuple[Given, ...] = (ACTIVATION,)
    dtype: torch.dtype = BF16
    keeps_gradients: bool = True
    casts: bool = False

    def measure(self) -> Measured:
        """Return what PyTorch does."""
        return measure_module(
            self.make,
            *self.given,
            dtype=self.dtype,
            keeps_gradients=self.keeps_gradients,
            casts=self.casts,
        )


class Norm(nn.Module):
    """RMS norm in one kernel; `nn.RMSNorm` is one on GPUs, and eight on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        return RmsNorm.apply(values, self.weight, 1e-5)


class Added(nn.Module):
    """Bias, dropout and addition in one kernel: a mask is all that it keeps."""

    def __init__(self, dropout: float, *, bias: bool) -> None:
        super().__init__()
        self.dropout = dropout
        self.bias = nn.Parameter(torch.empty(WIDTH)) if bias else None

    def forward(self, update: Tensor, stream: Tensor) -> Tensor:
        return BiasDropoutAdd.apply(update, self.bias, stream, self.dropout)


class Positioned(nn.Module):
    """Looked-up words and learned positions, whose numbers PyTorch keeps, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(PLACES, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))


class Bottleneck(nn.Module):
    """The block of ResNet-50 (He et al. 2015, arXiv 1512.03385), as torchvision writes it."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.middle, self.last = (
            convolved(inputs, inner, 1),
            convolved(inner, inner, 3, stride),
            convolved(inner, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.projection = None if same else convolved(inputs, outputs, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, values: Tensor) -> Tensor:
        out = self.relu(self.first(values))
        out = self.relu(self.middle(out))
        out = self.last(out)
        out += values if self.projection is None else self.projection(values)
        return self.relu(out)


def convolved(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution without bias and the norm after it."""
    return nn.Sequential(convolution(inputs, outputs, kernel, stride), nn.BatchNorm2d(outputs))


def convolution(
    inputs: int, outputs: int, kernel: int, stride: int = 1, *, bias: bool = False
) -> nn.Conv2d:
    """Return a convolution padded so that stride 1 keeps the size."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)


def small_resnet() -> nn.Sequential:
    """Return stem, three blocks and head of a residual network."""
    return nn.Sequential(
        convolved(CHANNELS, 16, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        Bottleneck(16, 8, 32, 1),
        Bottleneck(32, 8, 32, 1),
        Bottleneck(32, 16, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def dropped(values: Tensor) -> Tensor:
    """Return *values* after dropout as on a GPU: on a CPU `nn.Dropout` keeps a mask of values."""
    return torch.native_dropout(values, PROBABILITY, train=True)[0]


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention in PyTorch's own flash kernel, of keys and values with fewer heads or not.

    Nothing is repeated for the heads of a group, and the output lies as the queries did, tokens
    before heads: the transpose after it is a view.
    """
    heads_first = (each.transpose(1, 2) for each in (query, key, value))
    is_grouped = key.shape[2] < query.shape[2]
    out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=is_grouped)
    return out.transpose(1, 2)


def of_quarters(parts: Iterable[Tensor]) -> Tensor:
    """Return SwiGLU of SwiGLUs of four parts."""
    first, second, third, fourth = parts
    return Swiglu.apply(Swiglu.apply(first, second), Swiglu.apply(third, fourth))


def sliced(x: Tensor) -> Iterator[Tensor]:
    """Yield quarters of *x* by indices: the gradient of each is as large as *x*."""
    step = WIDTH // 4
    return (x[..., place : place + step] for place in range(0, WIDTH, step))


def fused_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention in the programs' own kernel: inputs, output and a number a row are kept."""
    causal = True
    return FusedAttention.apply(1, Scores(causal), query, key, value)


def softmax(scores: Tensor) -> Tensor:
    """Return probabilities of masked scores: they are all that is kept, the scores are not."""
    causal = True
    return CausalSoftmax.apply(scores, 1.0, causal)


def unfused(seq_dim: int, *, drops: bool = False) -> AttentionCore:
    """Return attention with its scores in memory."""
    options = LayerOptions(
        attention=Attention.UNFUSED,
        recompute=Recompute.NONE,
        dropout=PROBABILITY if drops else 0.0,
    )
    core = AttentionCore(load_model("gpt2"), options, seq_dim)
    core.scale = 1 / sqrt(HEAD)
    return core


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return PyTorch's own loss in fp32.

    It keeps the logarithms of all probabilities, the targets, and the sum of their weights: one
    number, which is 4 bytes. The logits themselves go once they are cast. Backward holds what it
    kept beside two gradients as large: that of the logarithms, zero but for one a token, too.
    """
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def linears(count: int, *, bias: bool = False) -> nn.Sequential:
    """Return linear layers: the output of each is kept as the input of the next, the last not."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(count)))


def multilayer_perceptron() -> nn.Sequential:
    """Return layers whose activations, in place, are all that is kept: each twice, counted once."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDE),
        nn.ReLU(inplace=True),
        nn.Linear(WIDE, WIDE),
        nn.ReLU(inplace=True),
        nn.Linear(WIDE, WIDTH),
    )


def _heads(first: int, second: int, *, groups: int = HEADS) -> tuple[Given, ...]:
    """Return queries, keys and values whose first two dims are tokens and batch, or batch first."""
    return tuple(Given((first, second, each, HEAD)) for each in (HEADS, groups, groups))


MODULES: dict[str, ModuleCase] = {
    "linear": ModuleCase(make=lambda: nn.Linear(WIDTH, WIDE, bias=False)),
    "linear with bias": ModuleCase(make=lambda: nn.Linear(WIDTH, WIDE)),
    "linear, gradients added": ModuleCase(
        make=lambda: nn.Linear(WIDTH, WIDE), keeps_gradients=False
    ),
    # Under autocast the copies of weights are kept, the fp32 input is not.
    "linear cast": ModuleCase(
        make=lambda: nn.Linear(WIDTH, WIDE, bias=False), given=(STREAM,), dtype=FP32, casts=True
    ),
    "linear with bias, cast, gradients added": ModuleCase(
        make=lambda: nn.Linear(WIDTH, WIDE),
        given=(STREAM,),
        dtype=FP32,
        casts=True,
        keeps_gradients=False,
    ),
    "layer norm": ModuleCase(make=lambda: nn.LayerNorm(WIDTH)),
    "layer norm in fp32": ModuleCase(make=lambda: nn.LayerNorm(WIDTH), given=(STREAM,), dtype=FP32),
    "rms norm": ModuleCase(make=Norm),
    "dropout": ModuleCase(make=lambda: dropped),
    # The dropped values die only after the sum: it holds two values a token more than one kernel.
    "residual with dropout": ModuleCase(
        make=lambda: lambda update, stream: stream + dropped(update),
        given=(ACTIVATION, ACTIVATION),
    ),
    # Both inputs get the very gradient that arrives: not a byte is made or kept.
    "residual": ModuleCase(
        make=lambda: lambda update, stream: stream + update, given=(ACTIVATION, ACTIVATION)
    ),
    # Into a stream in fp32 the gradient of the update is cast, which is a tensor of its own.
    "residual of two widths": ModuleCase(
        make=lambda: lambda update, stream: stream + update, given=(ACTIVATION, STREAM)
    ),
    "fused residual with bias and dropout": ModuleCase(
        make=lambda: Added(PROBABILITY, bias=True), given=(ACTIVATION, ACTIVATION)
    ),
    "fused residual with bias": ModuleCase(
        make=lambda: Added(0.0, bias=True), given=(ACTIVATION, ACTIVATION)
    ),
    "fused residual with dropout": ModuleCase(
        make=lambda: Added(PROBABILITY, bias=False), given=(ACTIVATION, ACTIVATION)
    ),
    "gelu": ModuleCase(make=nn.GELU),
    "swiglu": ModuleCase(make=lambda: Swiglu.apply, given=(ACTIVATION, ACTIVATION)),
    "packed swiglu": ModuleCase(make=lambda: PackedSwiglu.apply),
    "a product cut into views": ModuleCase(make=lambda: lambda x: of_quarters(x.chunk(4, -1))),
    "a product cut by slices": ModuleCase(make=lambda: lambda x: of_quarters(sliced(x))),
    # Turning back takes the angles alone, which come from the place of a token.
    "rotary": ModuleCase(
        make=lambda: lambda x: Rotary.apply(x, 1, 1e4, (0,), x.shape[-1]), given=(SPLIT,)
    ),
    "flash": ModuleCase(
        make=lambda: fused_attention,
        given=(SPLIT, SPLIT, SPLIT),
    ),
    "flash of groups": ModuleCase(
        make=lambda: fused_attention,
        given=(SPLIT, GROUPED, GROUPED),
    ),
    "flash of PyTorch": ModuleCase(make=lambda: attend, given=(SPLIT, SPLIT, SPLIT)),
    "flash of PyTorch of groups": ModuleCase(make=lambda: attend, given=(SPLIT, GROUPED, GROUPED)),
    "softmax": ModuleCase(make=lambda: softmax, given=(SCORES,)),
    # Tokens first, queries, keys and values are read where they lie: batch and heads are one dim.
    "unfused attention": ModuleCase(make=lambda: unfused(0), given=_heads(TOKENS, BATCH)),
    "unfused attention with dropout": ModuleCase(
        make=lambda: unfused(0, drops=True), given=_heads(TOKENS, BATCH)
    ),
    # Repeated keys and values are copies, which are kept; what they were made of is not.
    "unfused attention of groups": ModuleCase(
        make=lambda: unfused(0), given=_heads(TOKENS, BATCH, groups=GROUPS)
    ),
    "unfused attention, batch first, one sequence": ModuleCase(
        make=lambda: unfused(1), given=_heads(1, TOKENS)
    ),
    # Several sequences and heads are no one dim of such a tensor: all three are copied.
    "unfused attention, batch first": ModuleCase(
        make=lambda: unfused(1), given=_heads(BATCH, TOKENS)
    ),
    "unfused attention of groups, batch first": ModuleCase(
        make=lambda: unfused(1), given=_heads(BATCH, TOKENS, groups=GROUPS)
    ),
    "embedding": ModuleCase(make=lambda: nn.Embedding(WORDS, WIDTH), given=(IDS,)),
    "embedding and positions": ModuleCase(make=Positioned, given=(IDS,)),
    "loss": ModuleCase(make=lambda: token_losses, given=(Given((BATCH, TOKENS, WORDS)), IDS)),
    "loss in fp32": ModuleCase(
        make=lambda: token_losses, given=(Given((BATCH, TOKENS, WORDS), FP32), IDS)
    ),
    # Its output is kept, which is its input's storage.
    "relu in place": ModuleCase(make=lambda: nn.ReLU(inplace=True)),
    "relu": ModuleCase(make=nn.ReLU),
    **{
        f"convolution {kernel} x {kernel}, stride {stride}": ModuleCase(
            make=lambda kernel=kernel, stride=stride: convolution(CHANNELS, 20, kernel, stride),
            given=(IMAGES,),
            dtype=FP32,
        )
        for kernel, stride in ((1, 1), (3, 1), (3, 2), (1, 2), (7, 2))
    },
    "convolution with bias": ModuleCase(
        make=lambda: convolution(CHANNELS, 20, 3, bias=True), given=(IMAGES,), dtype=FP32
    ),
    # Two numbers a channel of this batch; the running ones are there before, and change in place.
    "batch norm": ModuleCase(make=lambda: nn.BatchNorm2d(CHANNELS), given=(IMAGES,), dtype=FP32),
    # It keeps its input, whose shape alone it needs, and the place of each maximum in 8 bytes.
    "max pool": ModuleCase(make=lambda: nn.MaxPool2d(3, 2, 1), given=(IMAGES,)),
    "mean over pixels": ModuleCase(make=lambda: lambda x: x.mean((2, 3)), given=(IMAGES,)),
    "bottleneck": ModuleCase(
        make=lambda: Bottleneck(CHANNELS, 8, CHANNELS, 1), given=(IMAGES,), dtype=FP32
    ),
    "bottleneck, stride 2": ModuleCase(
        make=lambda: Bottleneck(CHANNELS, 8, 32, 2), given=(IMAGES,), dtype=FP32
    ),
    "small resnet": ModuleCase(
        make=small_resnet, given=(Given((BATCH, CHANNELS, 32, 32), FP32),), dtype=FP32
    ),
    "chain of linears": ModuleCase(make=lambda: linears(4)),
    "chain of linears with biases, gradients added": ModuleCase(
        make=lambda: linears(4, bias=True), keeps_gradients=False
    ),
    "chain of linears cast": ModuleCase(
        make=lambda: linears(4), given=(STREAM,), dtype=FP32, casts=True, keeps_gradients=False
    ),
    "multilayer perceptron": ModuleCase(
        make=multilayer_perceptron, given=(STREAM,), dtype=FP32, keeps_gradients=False
    ),
}
