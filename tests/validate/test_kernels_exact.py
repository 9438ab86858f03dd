"""Eager and compiled layers: what PyTorch's operators keep, and what its partitioner does."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F  # noqa: N812
from block_graph import (
    CAST,
    MEGATRON,
    PYTORCH,
    Build,
    GraphCase,
    attended,
    one,
    two,
)
from block_modules import (
    ACTIVATION,
    BF16,
    FP32,
    GROUPS,
    HEAD,
    HEADS,
    SPLIT,
    STREAM,
    TOKENS,
    WIDE,
    WIDTH,
    ModuleCase,
    _heads,
    dropped,
)
from block_witness import Given
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode

from meshwright.hwprofiles import Kernels
from meshwright.simulator.graph import (
    Activation,
    Block,
    Dim,
    Lowering,
    activation,
    norm,
    residual,
    rotary,
    whole_product,
)

TRANSFORMERS = replace(PYTORCH, kernels=Kernels.EAGER, uses_transformers_ops=True)
TORCHTITAN = replace(PYTORCH, kernels=Kernels.EAGER)
LOCAL = replace(MEGATRON, kernels=Kernels.EAGER)
COMPILED = replace(PYTORCH, kernels=Kernels.COMPILED)
COMPILED_CAST = replace(CAST, kernels=Kernels.COMPILED)
HALF = WIDTH // 2


class SpelledNorm(nn.Module):
    """RMS norm as transformers write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        dtype = values.dtype
        values = values.to(FP32)
        variance = values.pow(2).mean(-1, keepdim=True)
        values = values * torch.rsqrt(variance + 1e-6)
        return self.weight * values.to(dtype)


def spelled_gelu(x: Tensor) -> Tensor:
    """Return GELU as transformers write it."""
    scale = math.sqrt(2 / math.pi)
    return 0.5 * x * (1.0 + torch.tanh(scale * (x + 0.044715 * torch.pow(x, 3.0))))


def squared_relu(x: Tensor) -> Tensor:
    """Return the square of ReLU as transformers write it."""
    return torch.square(F.relu(x))


SQUARED = one(
    lambda block, x, dims: activation(
        block, x, parts=(dims.wide,), last=dims.hidden, kind=Activation.SQUARED_RELU
    )
)


def offset_swiglu(packed: Tensor) -> Tensor:
    """Return SwiGLU as Megatron-Core writes it."""

    def gated(x: Tensor) -> Tensor:
        gate, up = torch.chunk(x, 2, dim=-1)
        return F.silu(gate) * (up + 0.0)

    return gated(packed)


class BiasDropoutAdd(nn.Module):
    """Bias, dropout and addition, each an operator, all named until the last is done."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(WIDTH))

    def forward(self, update: Tensor, stream: Tensor) -> Tensor:
        biased = update + self.bias
        out = dropped(biased)
        return stream + out  # the names of all three live until it returns


def complex_rotary() -> Callable[[Tensor, Tensor], Tensor]:
    """Return what turns two tensors as torchtitan does, and adds them."""
    angles = torch.empty(1, TOKENS, 1, HEAD // 2, dtype=torch.complex64)

    def turned(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        one, other = (torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) for x in (query, key))
        out, last = (torch.view_as_real(x * angles).flatten(3) for x in (one, other))
        return out.type_as(query), last.type_as(key)

    return lambda query, key: torch.add(*turned(query, key))


def pair(block: Block) -> list[object]:
    """Write the rotation of queries and keys, and their sum."""
    tokens, batch = Dim("tokens", TOKENS), Dim("batch", 2)
    widths = [Dim(name, HEADS * HEAD, HEAD) for name in ("queries", "keys")]
    given = [block.tensor(each.name, tokens, batch, each) for each in widths]
    with block.module(*given):
        query, key = rotary(block, *given)
        residual(block, query, key, bias=False, drops=False)
    return given


def spelled_rotary() -> Callable[[Tensor], Tensor]:
    """Return what turns a tensor as transformers do."""
    cosines = sines = torch.empty(1, dtype=BF16)

    def halves(x: Tensor) -> Tensor:
        one, other = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        return torch.cat((-other, one), dim=-1)

    return lambda x: (x * cosines) + (halves(x) * sines)


class InPlaceSoftmax(torch.autograd.Function):
    """What the kernel of Apex makes: probabilities, and over their gradient that of the scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        probabilities = torch.empty_like(scores)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(ctx.saved_tensors[0])


def local_attention(groups: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention as Megatron-Core's local spec writes it; its buffer is there before."""
    buffer, repeats = torch.empty(2 * HEADS, TOKENS, TOKENS, dtype=BF16), HEADS // groups

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        q, k, v = (x.flatten(1, 2).transpose(0, 1) for x in (query, key, value))
        scores = torch.baddbmm(buffer, q, k.transpose(1, 2), beta=0.0, alpha=0.5)
        weights = dropped(InPlaceSoftmax.apply(scores))
        values = torch.bmm(weights, v)
        context = values.transpose(0, 1)
        del values
        context = context.contiguous()
        return context.view(query.shape)

    return attend


class Eager(NamedTuple):
    """What PyTorch runs, and how it is written down."""

    module: ModuleCase
    build: Build
    lowering: Lowering
    width: int = 2


EAGER: dict[str, Eager] = {
    "rms norm of transformers": Eager(
        ModuleCase(make=SpelledNorm),
        one(lambda block, x, _: norm(block, x, "norm", centers=False)),
        TRANSFORMERS,
    ),
    "the same in fp32": Eager(
        ModuleCase(make=SpelledNorm, given=(STREAM,), dtype=FP32),
        one(lambda block, x, _: norm(block, x, "norm", centers=False)),
        TRANSFORMERS,
        4,
    ),
    "gelu of transformers": Eager(
        ModuleCase(make=lambda: spelled_gelu),
        one(lambda block, x, dims: activation(block, x, parts=(dims.wide,), last=dims.hidden)),
        TRANSFORMERS,
    ),
    "the same under autocast": Eager(
        ModuleCase(make=lambda: spelled_gelu, casts=True),
        one(lambda block, x, dims: activation(block, x, parts=(dims.wide,), last=dims.hidden)),
        replace(TRANSFORMERS, casts=True),
    ),
    "squared relu of transformers": Eager(
        ModuleCase(make=lambda: squared_relu), SQUARED, TRANSFORMERS
    ),
    "squared relu under autocast": Eager(
        ModuleCase(make=lambda: squared_relu, casts=True),
        SQUARED,
        replace(TRANSFORMERS, casts=True),
    ),
    "swiglu": Eager(
        ModuleCase(make=lambda: lambda x, y: F.silu(x) * y, given=(ACTIVATION, ACTIVATION)),
        two(lambda block, x, y: activation(block, x, y, parts=x.dims[:2], last=x.dims[-1])),
        TORCHTITAN,
    ),
    "swiglu of Megatron-Core": Eager(
        ModuleCase(make=lambda: offset_swiglu),
        one(
            lambda block, x, _: activation(
                block, x, parts=(Dim("gate", HALF), Dim("up", HALF)), last=Dim("half", HALF)
            )
        ),
        LOCAL,
    ),
    "bias, dropout and addition": Eager(
        ModuleCase(make=BiasDropoutAdd, given=(ACTIVATION, ACTIVATION)),
        two(lambda block, x, y: residual(block, x, y, bias=True, drops=True)),
        LOCAL,
    ),
    "complex rotary": Eager(
        ModuleCase(make=complex_rotary, given=(SPLIT, SPLIT)), pair, TORCHTITAN
    ),
    **{
        f"attention of Megatron-Core, {groups} groups": Eager(
            ModuleCase(
                make=lambda groups=groups: local_attention(groups),
                given=_heads(TOKENS, 2, groups=groups),
            ),
            attended(unfused=True, drops=True, groups=groups),
            LOCAL,
        )
        for groups in (GROUPS, HEADS)
    },
    "rotary by halves": Eager(
        ModuleCase(make=spelled_rotary, given=(SPLIT,)),
        one(lambda block, x, _: rotary(block, x)),
        TRANSFORMERS,
    ),
}


@pytest.mark.parametrize("name", EAGER)
def test_an_eager_operator_is_byte_exact(name: str) -> None:
    case = EAGER[name]
    derived = GraphCase(build=case.build, lowering=case.lowering, width=case.width).derive()
    assert derived == case.module.measure()


def kept_bytes(function: Callable[..., Tensor], *given: Given, casts: bool = False) -> int:
    """Return what the graph of forward hands to that of backward, weights left out.

    Args:
        function: Its arguments are tensors; those of one or two dims are weights.
        given: What they are.
        casts: It runs under autocast to bf16.
    """
    kept: dict[object, int] = {}

    def compiler(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        def run(arguments: list[Tensor]) -> object:
            weights = {x.untyped_storage()._cdata for x in arguments if x.dim() < 3}
            made = graph(*arguments)
            for each in made[1:]:
                storage = each.untyped_storage()
                if storage._cdata not in weights:
                    kept[storage._cdata] = storage.nbytes()
            return made

        run._boxed_call = True
        return run

    def run(*arguments: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            return function(*arguments)

    with FakeTensorMode():
        arguments = [torch.empty(x.shape, dtype=x.dtype, requires_grad=True) for x in given]
        aot_function(
            run,
            fw_compiler=compiler,
            bw_compiler=lambda graph, _: make_boxed_func(graph),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )(*arguments)
    return sum(kept.values())


def gated_mlp(
    update: Tensor, stream: Tensor, scale: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """Return an MLP and what is added before and behind it."""
    stream = stream + update
    x = F.rms_norm(stream, (WIDTH,), scale, 1e-5)
    return stream + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def write_mlp(block: Block, update: Tensor, stream: Tensor) -> None:
    """Write the same."""
    wide = [Dim(name, WIDE) for name in ("gate", "up")]
    stream = residual(block, update, stream, bias=False, drops=False)
    x = norm(block, stream, "norm", centers=False)
    inner = [whole_product(block, x, each, each.name) for each in wide]
    x = activation(block, *inner, parts=tuple(wide), last=Dim("inner", WIDE))
    x = whole_product(block, x, stream.dims[-1], "down")
    residual(block, x, stream, bias=False, drops=False)


class Compiled(NamedTuple):
    """What torch.compile divides, and how it is written down."""

    function: Callable[..., Tensor]
    given: tuple[Given, ...]
    build: Build
    casts: bool = False
    width: int = 2


VECTOR, VECTOR_FP32 = Given((WIDTH,)), Given((WIDTH,), FP32)
WIDENING, NARROWING = (WIDE, WIDTH), (WIDTH, WIDE)
COMPILED_CASES: dict[str, Compiled] = {
    "rms norm": Compiled(
        lambda x, weight: F.rms_norm(x, (WIDTH,), weight, 1e-5),
        (ACTIVATION, VECTOR),
        one(lambda block, x, _: norm(block, x, "norm", centers=False)),
    ),
    # On a CPU the statistics of 16-bit tokens are in 16 bits.
    "layer norm in fp32": Compiled(
        lambda x, weight, bias: F.layer_norm(x, (WIDTH,), weight, bias),
        (STREAM, VECTOR_FP32, VECTOR_FP32),
        one(lambda block, x, _: norm(block, x, "norm", centers=True)),
        width=4,
    ),
    "gelu": Compiled(
        spelled_gelu,
        (ACTIVATION,),
        one(lambda block, x, dims: activation(block, x, parts=(dims.wide,), last=dims.hidden)),
    ),
    "swiglu": Compiled(
        lambda x, y: F.silu(x) * y,
        (ACTIVATION, ACTIVATION),
        two(lambda block, x, y: activation(block, x, y, parts=x.dims[:2], last=x.dims[-1])),
    ),
    "swiglu of Megatron-Core": Compiled(
        offset_swiglu,
        (ACTIVATION,),
        one(
            lambda block, x, _: activation(
                block, x, parts=(Dim("gate", HALF), Dim("up", HALF)), last=Dim("half", HALF)
            )
        ),
    ),
    "rotary by halves": Compiled(
        lambda x: spelled_rotary()(x),  # noqa: PLW0108 - its angles, too, have no data
        (SPLIT,),
        one(lambda block, x, _: rotary(block, x)),
    ),
    "mlp": Compiled(
        gated_mlp,
        (ACTIVATION, ACTIVATION, VECTOR, *map(Given, (WIDENING, WIDENING, NARROWING))),
        two(write_mlp),
    ),
    # Both read one copy of the tokens in 16 bits; of update and sum, in 32, the first is kept.
    "mlp under autocast": Compiled(
        gated_mlp,
        (
            ACTIVATION,
            STREAM,
            VECTOR_FP32,
            *(Given(each, FP32) for each in (WIDENING, WIDENING, NARROWING)),
        ),
        two(write_mlp, width=4),
        casts=True,
    ),
}


@pytest.mark.parametrize("name", COMPILED_CASES)
def test_compiled_operators_keep_what_the_partitioner_keeps(name: str) -> None:
    case = COMPILED_CASES[name]
    lowering = COMPILED_CAST if case.casts else COMPILED
    derived = GraphCase(build=case.build, lowering=lowering, width=case.width).derive()
    assert derived.saved_bytes == kept_bytes(case.function, *case.given, casts=case.casts)
