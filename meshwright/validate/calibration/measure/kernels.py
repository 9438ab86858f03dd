"""The calls that are timed: one function a case, its tensors made before the clock starts."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle
from typing import cast

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.hwprofiles import MEBI, Precision
from meshwright.validate.calibration.rows import BenchmarkCase, CaseGroup, tensor_bytes
from meshwright.validate.device import SavedAttention, flash_backward, flash_forward

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
}
# Calls take turns over copies of their tensors, so that no cache holds what a step's would not.
FOOTPRINT_BYTES = {"cpu": 64 * MEBI, "cuda": 256 * MEBI}
MAX_COPIES = 64
DROPOUT = 0.1
Call = Callable[[], object]
Tensors = tuple[torch.Tensor, ...]


def make_call(case: BenchmarkCase, device: torch.device) -> Call:
    """Return a function that runs *case* once."""
    return _MAKERS[case.group](case, device)


def _turns(case: BenchmarkCase, tensors: Tensors) -> Iterator[Tensors]:
    footprint_bytes = FOOTPRINT_BYTES[tensors[0].device.type]
    copies = min(MAX_COPIES, max(1, footprint_bytes // max(1, tensor_bytes(case))))
    return cycle([tensors, *(tuple(each.clone() for each in tensors) for _ in range(copies - 1))])


def _random(case: BenchmarkCase, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=DTYPES[case.precision])


def _product(case: BenchmarkCase, device: torch.device) -> Call:
    """Return the GEMM of a linear layer: weights are [outputs, inputs]."""
    m, n, k, batch = case.sizes
    left: tuple[int, ...] = (m, k)
    right: tuple[int, ...] = (k, n)
    out: tuple[int, ...] = (m, n)
    if case.op == "batched":
        left, right, out = (batch, *left), (batch, *right), (batch, *out)
    elif case.op == "forward":
        right = (n, k)
    elif case.op == "wgrad":
        left = (k, m)
    turns = _turns(case, (_random(case, device, *left), _random(case, device, *right)))
    # Allocated once: the allocator's time is not the GEMM's.
    result = torch.empty(out, device=device, dtype=DTYPES[case.precision])

    def run() -> torch.Tensor:
        one, other = next(turns)
        one = one.t() if case.op == "wgrad" else one
        other = other.t() if case.op == "forward" else other
        return torch.matmul(one, other, out=result)

    return run


def _attention(case: BenchmarkCase, device: torch.device) -> Call:
    query, key, value = (_random(case, device, 1, *case.sizes) for _ in range(3))
    way, _, library = case.op.partition(" ")
    if device.type == "cuda" and not library:
        return _flash(way, query, key, value)

    def forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if library else nullcontext():
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    if way == "forward":
        return forward
    inputs = (query, key, value)
    for tensor in inputs:
        tensor.requires_grad_()
    out = forward()
    gradient = torch.randn_like(out)
    # The graph is kept: the same backward pass is timed many times.
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _flash(way: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Call:
    """Return FlashAttention-2 by name: SDPA may dispatch to another kernel."""
    if way == "forward":
        return lambda: flash_forward(query, key, value, causal=True)
    out, log_sum_exp = flash_forward(query, key, value, causal=True)
    attended = SavedAttention(query, key, value, out, log_sum_exp)
    gradient = torch.randn_like(out)
    return lambda: flash_backward(gradient, attended, causal=True)


def _element_wise(case: BenchmarkCase, device: torch.device) -> Call:
    width = case.sizes[1]
    inputs = (_random(case, device, *case.sizes), _random(case, device, *case.sizes))
    turns = _turns(case, inputs)
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "add": torch.add,
        "norm": lambda x, _: functional.layer_norm(x, (width,)),
        "gelu": lambda x, _: functional.gelu(x, approximate="tanh"),
        "silu": lambda x, _: functional.silu(x),
        "softmax": lambda x, _: functional.softmax(x, dim=-1),
        "dropout": lambda x, _: functional.dropout(x, DROPOUT, training=True),
    }
    call = calls[case.op]
    return lambda: call(*next(turns))


def _optimizer(case: BenchmarkCase, device: torch.device) -> Call:
    parameter = torch.nn.Parameter(_random(case, device, case.sizes[0]))
    parameter.grad = _random(case, device, case.sizes[0])
    fused = case.op == "adamw fused"
    optimizer = torch.optim.AdamW([parameter], fused=fused, foreach=not fused)
    return cast("Call", optimizer.step)


def _copy(case: BenchmarkCase, device: torch.device) -> Call:
    size = case.sizes[0]
    host = torch.device("cpu")
    start, end = {
        "on device": (device, device),
        "host to device": (host, device),
        "device to host": (device, host),
    }[case.op]
    # Only pinned host memory is copied asynchronously.
    source = torch.zeros(size, dtype=torch.uint8, device=start, pin_memory=start != device)
    target = torch.zeros(size, dtype=torch.uint8, device=end, pin_memory=end != device)
    if start != end:
        return lambda: target.copy_(source, non_blocking=True)
    turns = _turns(case, (source, target))

    def run() -> torch.Tensor:
        one, other = next(turns)
        return other.copy_(one)

    return run


def _launch(case: BenchmarkCase, device: torch.device) -> Call:
    one = _random(case, device, *case.sizes)
    return lambda: one.add_(1)


_MAKERS: dict[CaseGroup, Callable[[BenchmarkCase, torch.device], Call]] = {
    CaseGroup.GEMM: _product,
    CaseGroup.ATTENTION: _attention,
    CaseGroup.MEMORY: _element_wise,
    CaseGroup.OPTIMIZER: _optimizer,
    CaseGroup.COPY: _copy,
    CaseGroup.LAUNCH: _launch,
}
