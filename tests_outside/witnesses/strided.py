"""Elements that PyTorch makes one by one: of slices, or beside numbers that are repeated."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ATEN = torch.ops.aten
# Operators that PyTorch runs as one kernel over the elements of what they make.
POINTWISE = {
    *(ATEN.add, ATEN.sub, ATEN.mul, ATEN.neg, ATEN.where, ATEN.logical_and, ATEN.logical_and_),
    *(ATEN.clamp, ATEN.clamp_max, ATEN.clamp_min, ATEN.ge, ATEN.le, ATEN.cos, ATEN.sin),
}


class StridedElements(TorchDispatchMode):
    """Adds up what such kernels make while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        operator: Any,
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = operator(*args, **(kwargs or {}))
        if operator.overloadpacket in POINTWISE:
            read = [each for each in tree_leaves(args) if isinstance(each, Tensor) and each.dim()]
            if any(each.shape != made.shape or not each.is_contiguous() for each in read):
                self.count += made.numel()
        return made
