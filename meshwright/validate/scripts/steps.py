"""Steps of a script, and the kinds of its tensors."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from meshwright.validate.counting import RankOracle, tensors_in
from meshwright.validate.ranks import ByteKind


class StepsCounted(BaseException):
    """The steps that were asked for are counted.

    No `Exception`, so that no script catches it.
    """


class ScriptSteps:
    """Follows the optimizers of a script, and ends it after a number of steps.

    A step ends where the first optimizer that stepped has stepped again.  An optimizer in another
    (``ZeroRedundancyOptimizer``) is a part of it.

    Args:
        oracle: Counts; begun afresh at each step's end but the last.
        num_steps: After which the script ends.
        progress: Is told how many have been made.
    """

    def __init__(self, oracle: RankOracle, num_steps: int, progress: Callable[[int], None]) -> None:
        self.num_done = 0
        self._oracle, self._num_steps, self._progress = oracle, num_steps, progress
        self._first: weakref.ref[Optimizer] | None = None
        self._running: list[Optimizer] = []
        # No weak references to parameters: PyTorch swaps none that has one.
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the script that runs inside."""
        with ExitStack() as stack:
            for handle in (
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
                modules.register_module_parameter_registration_hook(self._registered),
            ):
                stack.callback(handle.remove)
            yield

    def _registered(self, module: nn.Module, _name: str, _parameter: object) -> None:
        self._modules.add(module)

    def _registered_parameters(self) -> Iterator[Tensor]:
        for module in self._modules:
            yield from (each for each in module._parameters.values() if each is not None)  # noqa: SLF001 - ``parameters()`` visits each many times

    def _before(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        self._running.append(optimizer)
        self._optimizers.add(optimizer)
        for parameter in (*self._registered_parameters(), *_parameters(optimizer)):
            for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
                self._mark(gradient, ByteKind.GRADIENTS)

    def _after(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        self._running.remove(optimizer)
        # An inner optimizer has stepped (that of ZeroRedundancyOptimizer).
        if self._running:
            return
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            self._end_step()

    def _end_step(self) -> None:
        self._mark_kept()
        self.num_done += 1
        self._progress(self.num_done)
        if self.num_done >= self._num_steps:
            raise StepsCounted
        self._oracle.start_step()

    def _mark_kept(self) -> None:
        """Mark parameters and optimizer states.

        Weights that an optimizer has, and no module, are its states: a copy in fp32 beside those
        that compute.
        """
        for optimizer in self._optimizers:
            for states in optimizer.state.values():
                for state in tensors_in(states):
                    self._mark(state, ByteKind.OPTIMIZER)
            for parameter in _parameters(optimizer):
                self._mark(parameter, ByteKind.OPTIMIZER)
        for parameter in self._registered_parameters():
            self._mark(parameter, ByteKind.PARAMETERS)

    def _mark(self, tensor: object, kind: ByteKind) -> None:
        """Mark a tensor that has memory now: what is gathered for a while has none."""
        for local in tensors_in(tensor):
            if local.untyped_storage().nbytes():
                self._oracle.mark(local, kind)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
