"""Run the action list of a pipeline rank: receive, pass forward or backward, send."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from meshwright.simulator.layout import Stage
from meshwright.simulator.schedules import Action, Phase
from meshwright.validate.programs.fused import AutogradFunction, Context
from meshwright.validate.programs.megatron.messages import ActivationMessages
from meshwright.validate.programs.megatron.variables import ScheduleVariables


class _Sent(AutogradFunction):
    """Send a stage's output; keep nothing of it, and receive its gradient in backward."""

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
    """Tokens that the first stage reads of a microbatch, and targets of the last one."""

    tokens: Tensor
    targets: Tensor


class PipelineRank:
    """The virtual stages of one rank and their action list.

    Args:
        actions: Actions of the rank, in order.
        stages: Its virtual stages, in model order.
        shares: Layers and ends of the model in each of them.
        messages: Sends to the next (1) or the previous (-1) rank, and receives from there.
        loss: From logits and targets.
        variables: Schedule variables that keep p2p buffers alive; None if none outlives its pass.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        stages: Sequence[nn.Module],
        shares: Sequence[Stage],
        messages: ActivationMessages,
        loss: Callable[[Tensor, Tensor], Tensor],
        variables: ScheduleVariables | None = None,
    ) -> None:
        self.actions, self.stages, self.shares = actions, stages, shares
        self.send, self.receive, self.buffer = messages.send, messages.receive, messages.buffer
        self.loss = loss
        self.variables = variables
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
        if self.variables is not None:
            self.variables.end_step()
        return [self._losses[index] for index in sorted(self._losses)]

    def _forward(self, action: Action, batch: Callable[[int], StageInput]) -> None:
        share = self.shares[action.virtual_stage]
        is_last, reads = share.has_head, share.has_embedding or share.has_predictions
        read = batch(action.microbatch) if reads or is_last else None
        if share.has_embedding:
            assert read is not None
            inputs = read.tokens
        else:
            inputs = self._received(action, -1).requires_grad_()
        if self.variables is not None:
            self.variables.begin_forward(action[1:], inputs)
        mtp_inputs = () if read is None else (read.tokens, read.targets)
        # Megatron recomputes all of what it does not keep, also an operator that ends it.
        with set_checkpoint_early_stop(False):
            output = self.stages[action.virtual_stage](inputs, *mtp_inputs)
        if is_last:
            assert read is not None
            loss = self.loss(output, read.targets)
            self._losses[action.microbatch] = loss.detach()
            root, sent = loss / self.num_microbatches, None
            del output  # the loss is made in Megatron-Core's model, where logits are a local name
        else:
            sent = output.detach()
            root = _Sent.apply(
                output,
                lambda value: self.send(value, 1),
                lambda: self._received(action._replace(phase=Phase.BACKWARD), 1),
            )
        if self.variables is not None:
            self.variables.end_forward(action[1:], sent, root)
        self._open[action.virtual_stage, action.microbatch] = (inputs, root)

    def _backward(self, action: Action) -> None:
        inputs, root = self._open.pop((action.virtual_stage, action.microbatch))
        if self.variables is not None:
            self.variables.begin_backward(action[1:], root)
        root.backward()
        if self.variables is not None:
            self.variables.end_backward(action[1:], inputs.grad)
        if not self.shares[action.virtual_stage].has_embedding:
            gradient = inputs.grad
            assert gradient is not None
            self.send(gradient, -1)

    def _received(self, action: Action, distance: int) -> Tensor:
        """Return the message that a pass begins with."""
        if self.variables is None:
            buffer = self.buffer(action.phase, action.virtual_stage)
        else:
            buffer = self.variables.take(action.phase, action[1:])
        value = self.receive(distance, buffer)
        if action.phase is Phase.BACKWARD and self.variables is not None:
            self.variables.receive_gradient(value)
        return value
