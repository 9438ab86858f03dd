"""Run the action list of a pipeline rank: receive, pass forward or backward, send."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from meshwright.simulator.schedules import Action, Phase
from meshwright.validate.programs.fused import AutogradFunction, Context


class _Sent(AutogradFunction):
    """Hand a stage's output over; keep nothing of it, and receive its gradient in backward."""

    @staticmethod
    def forward(
        ctx: Context,
        output: Tensor,
        hand_over: Callable[[Tensor], None],
        fetch_gradient: Callable[[], Tensor],
    ) -> Tensor:
        hand_over(output.detach())
        ctx.fetch_gradient = fetch_gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Context, _gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.fetch_gradient(), None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class StageInput:
    """What the first stage reads of a microbatch, and what the last compares with."""

    tokens: Tensor
    targets: Tensor


class PipelineRank:
    """The virtual stages of one rank and their action list.

    Args:
        actions: What the rank does, in order.
        stages: Its virtual stages, in model order.
        first_and_last: For each, whether it is the model's first, and its last.
        send: Sends a message to the next (1) or the previous (-1) rank.
        receive: Receives one from there.
        loss: From logits and targets.
        batch: Tokens and targets of a microbatch.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        stages: Sequence[nn.Module],
        first_and_last: Sequence[tuple[bool, bool]],
        send: Callable[[Tensor, int], None],
        receive: Callable[[int], Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.actions, self.stages, self.first_and_last = actions, stages, first_and_last
        self.send, self.receive, self.loss = send, receive, loss
        self._open: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._losses: dict[int, Tensor] = {}
        self.num_microbatches = len({action.microbatch for action in actions})

    def run(
        self,
        batch: Callable[[int], StageInput],
        before_backward: Callable[[int, int], None],
    ) -> list[Tensor]:
        """Run every action; return the losses in order of microbatches, if any."""
        self._losses = {}
        for action in self.actions:
            if action.phase is Phase.FORWARD:
                self._forward(action, batch)
            else:
                before_backward(action.virtual_stage, action.microbatch)
                self._backward(action)
        return [self._losses[index] for index in sorted(self._losses)]

    def _forward(self, action: Action, batch: Callable[[int], StageInput]) -> None:
        is_first, is_last = self.first_and_last[action.virtual_stage]
        read = batch(action.microbatch) if is_first or is_last else None
        if is_first:
            assert read is not None
            inputs = read.tokens
        else:
            inputs = self.receive(-1).requires_grad_()
        # Megatron recomputes all of what it does not keep, also an operator that ends it.
        with set_checkpoint_early_stop(False):
            output = self.stages[action.virtual_stage](inputs)
        if is_last:
            assert read is not None
            loss = self.loss(output, read.targets)
            self._losses[action.microbatch] = loss.detach()
            root = loss / self.num_microbatches
        else:
            root = _Sent.apply(output, lambda value: self.send(value, 1), lambda: self.receive(1))
        self._open[action.virtual_stage, action.microbatch] = (inputs, root)

    def _backward(self, action: Action) -> None:
        inputs, root = self._open.pop((action.virtual_stage, action.microbatch))
        root.backward()
        if not self.first_and_last[action.virtual_stage][0]:
            gradient = inputs.grad
            assert gradient is not None
            self.send(gradient, -1)
