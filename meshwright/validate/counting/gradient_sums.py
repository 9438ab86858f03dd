"""Which sums of gradients autograd makes in place when nobody looks on.

Where the gradients of two uses of a tensor meet, the second is added to the first in place, if
nothing else holds that one.  A dispatch mode, or a tensor that is a subclass, makes it out of
place: a third tensor, which only counting has made (torch/csrc/autograd/input_buffer.cpp,
`can_accumulate_inplace`, and ATen/TensorSubclassLikeUtils.h).
"""

import torch

_SUM = torch.ops.aten.add.Tensor
_NO_TASK = -1


class GradientSums:
    """Tells the operators apart by which autograd adds up gradients."""

    def __init__(self) -> None:
        self._wrapped: object = None

    def wrap(self, operator: object) -> None:
        """Note that the next *operator* is that of a wrapper, which adds out of place."""
        self._wrapped = operator

    def is_in_place(self, operator: object) -> bool:
        """Return whether *operator*, which now runs, would not need a tensor of its own.

        Its operands are live before it, and the sum takes the place of one of them after it.
        """
        is_wrapped, self._wrapped = operator is self._wrapped, None
        return operator is _SUM and not is_wrapped and _runs_backward()


def _runs_backward() -> bool:
    """Return whether this thread runs a backward pass, and not a forward pass within it."""
    task: int = torch._C._current_graph_task_id()  # noqa: SLF001 - there is no public way to ask
    return task != _NO_TASK and not torch.is_grad_enabled()
