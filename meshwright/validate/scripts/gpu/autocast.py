"""Autocast of a GPU: PyTorch's own casts no tensor that it is told is on the host.

The lists are those of ``torch/autocast_mode.h``, in which each operator is for one of three
formats (https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshwright.validate.scripts.gpu.memories import GPU, ScriptMemories

_KEY = "AutocastCUDA"
_LOWER = (
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linear addbmm "
    "baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
)
_FP32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm "
    "group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist cdist renorm logsumexp prod prod.dim_int cumprod cumsum "
    "sum sum.dim_IntList"
)
_WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)


class GpuCasts:
    """Casts what operators get, as autocast does on a GPU; weights once in each region.

    Args:
        memories: Know which tensors are on the GPU.
    """

    def __init__(self, memories: ScriptMemories) -> None:
        self._memories = memories
        self._cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the weight's identity

    def forget(self) -> None:
        """Drop the casts of weights, as at the end of a region."""
        self._cast.clear()

    def cast(self, value: object, dtype: torch.dtype) -> object:
        """Return *value* as an operator gets it."""
        if not isinstance(value, torch.Tensor) or not self._is_cast(value) or value.dtype == dtype:
            return value
        # PyTorch caches the casts of fp32 leaves that need gradients, no others.
        keeps = value.is_leaf and value.requires_grad and value.dtype is torch.float32
        if not (keeps and dtype is not torch.float32 and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        if id(value) not in self._cast:
            self._cast[id(value)] = value, value.to(dtype)
        return self._cast[id(value)][1]

    def widest(self, values: object) -> torch.dtype:
        """Return the format in which an operator on several tensors runs."""
        tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
        kinds = {each.dtype for each in tensors if self._is_cast(each)}
        return torch.float32 if torch.float32 in kinds else torch.get_autocast_dtype(GPU)

    def _is_cast(self, tensor: torch.Tensor) -> bool:
        is_float = tensor.is_floating_point() and tensor.dtype is not torch.float64
        return is_float and self._memories.is_on_gpu(tensor)


def _casting(
    casts: GpuCasts, name: str, choose: Callable[[object], torch.dtype]
) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with _without_autocast():
            dtype = choose((args, kwargs))
            # The last argument first, as PyTorch's compiler evaluates them: a weight is cast behind
            # its bias, and so its gradient comes before the bias's.
            leaves, structure = tree_flatten((args, kwargs))
            cast = [casts.cast(each, dtype) for each in reversed(leaves)]
            args, kwargs = tree_unflatten(cast[::-1], structure)
            return operator(*args, **kwargs)

    return run


def _softmax(name: str) -> Callable[..., Any]:
    """Return a softmax of 16-bit numbers in fp32, which on a GPU takes no copy of them."""
    fused = getattr(torch.ops.aten, f"_{name}")
    plain = getattr(torch.ops.aten, name).int

    def run(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:  # noqa: ANN401
        with _without_autocast():
            if x.dtype in (torch.float16, torch.bfloat16) and dtype in (None, torch.float32):
                # half_to_float: the conversion is inside the kernel.
                return fused(x, dim, True)  # noqa: FBT003 - the signature is torch's
            return plain(x, dim, dtype)

    return run


def _without_autocast() -> Any:  # noqa: ANN401 - a class made in C
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)  # noqa: SLF001
    return torch._C._ExcludeDispatchKeyGuard(keys)  # noqa: SLF001


@contextmanager
def gpu_autocast(memories: ScriptMemories) -> Iterator[None]:
    """Let ``torch.autocast`` cast what is on a GPU that is not there."""
    casts = GpuCasts(memories)
    library = torch.library.Library("aten", "IMPL")
    clear = torch.clear_autocast_cache

    def forget() -> None:
        casts.forget()
        clear()

    kernels = {
        name: _casting(casts, name, lambda _: torch.get_autocast_dtype(GPU))
        for name in _LOWER.split()
    }
    kernels |= {name: _casting(casts, name, lambda _: torch.float32) for name in _FP32.split()}
    kernels |= {name: _casting(casts, name, casts.widest) for name in _WIDEST.split()}
    kernels |= {f"{name}.int": _softmax(name) for name in ("softmax", "log_softmax")}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for name, kernel in kernels.items():
                library.impl(name, kernel, _KEY, allow_override=True)
        with patch.object(torch, "clear_autocast_cache", forget):
            yield
    finally:
        library._destroy()  # noqa: SLF001 - there is no public way to take back what was put in
