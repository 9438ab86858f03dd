"""Memory of a pipeline rank: model states, and bytes that a pass adds."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Self

from meshwright.hwprofiles import Precision, StackProfile
from meshwright.simulator.blocks import BlockShape
from meshwright.simulator.graph import BlockMemory, chosen, largest
from meshwright.simulator.graph import Size as Bytes
from meshwright.simulator.layout import (
    STACK_FORMATS,
    Formats,
    Stage,
    gradient_bytes,
    main_gradient_bytes,
    optimizer_bytes,
)
from meshwright.simulator.memory.block_bytes import (
    NOTHING_SENT,
    SentBytes,
    Size,
    captures_whole_layers,
    kept_output_bytes,
    pass_workspace_bytes,
    stage_messages,
)
from meshwright.simulator.memory.held_messages import PipelinePosition
from meshwright.simulator.model import BlockKind
from meshwright.simulator.schedules import Action


class Shards(NamedTuple):
    """Number of data-parallel ranks over which each kind of state is sharded."""

    parameters: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, dp: int, zero_stage: int, *, reduces_each_microbatch: bool = True) -> "Shards":
        """Return the shards of a ZeRO stage (Rajbhandari et al. 2020, arXiv 1910.02054, section 5).

        Gradients that are only reduced after the last microbatch are whole until then.
        """
        return cls(
            parameters=dp if zero_stage >= 3 else 1,
            gradients=dp if zero_stage >= 2 and reduces_each_microbatch else 1,
            optimizer=dp if zero_stage >= 1 else 1,
        )


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a parameter: weight, gradient, optimizer states, update, weight as a shard.

    ``bucket`` is the gradient once more, in a bucket beside it.
    """

    parameter: int
    gradient: int
    optimizer: int
    update_temporary: int
    sharded_parameter: int = 2
    gathered_parameter: int = 2
    bucket: int = 0

    @classmethod
    def of(
        cls,
        stack: StackProfile,
        precision: Precision,
        formats: Formats = STACK_FORMATS,
        moments: Precision | None = None,
    ) -> "StateBytes":
        """Return the bytes of *stack*; fp32 needs no master copy: weight, gradient, two moments.

        Args:
            stack: Software.
            precision: Number format of the training.
            formats: Gradient formats that a plan asks for.
            moments: Number format of Adam's moments that a plan asks for.
        """
        kept_bytes, _ = gradient_bytes(stack, precision, formats)
        # Without gradient_as_bucket_view DDP has each gradient twice.
        bucket_bytes = 0 if stack.gradient_as_bucket_view else kept_bytes
        if precision is Precision.FP32:
            # Adam's two moments, in fp32 as the weight is
            return cls(4, kept_bytes, 8, 0, 4, 4, bucket_bytes)
        optimizer, temporary = optimizer_bytes(stack, precision, moments)
        return cls(
            stack.parameter_bytes,
            kept_bytes,
            optimizer,
            temporary + main_gradient_bytes(stack, precision, formats, moments),
            stack.sharded_parameter_bytes,
            precision.num_bytes,
            bucket_bytes,
        )


NO_BYTES: Any = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class States(Generic[Size]):
    """Bytes of a rank's model states, or columns of them over many layouts.

    Whatever shows the memory of a rank reads the names of its states here.
    """

    parameters_bytes: Size
    gradients_bytes: Size
    optimizer_states_bytes: Size = NO_BYTES

    @property
    def weights_bytes(self) -> Size:
        """Bytes of weights, with the optimizer states of them."""
        return self.parameters_bytes + self.optimizer_states_bytes

    @property
    def static_bytes(self) -> Size:
        """Bytes that live through the whole step."""
        return self.weights_bytes + self.gradients_bytes

    @property
    def by_name(self) -> dict[str, Any]:
        """Bytes of each state by the name of its field."""
        return {each.name: getattr(self, each.name) for each in fields(States)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStates(States[Size]):
    """States of a rank on its device, and temporary bytes of the optimizer's update."""

    update_temporary_bytes: Size = NO_BYTES

    @staticmethod
    def of(num_parameters: Bytes, state: StateBytes, shards: Shards) -> "RankStates[Bytes]":
        """Return the states of so many parameters, sharded over *shards* padded to equal size.

        A whole weight is in the training's format; a shard may be in fp32, its own master copy.
        """
        # Under ZeRO-3 the fp32 shard may be its own master copy.
        parameter = chosen(shards.parameters == 1, state.parameter, state.sharded_parameter)
        return RankStates.of_share(
            -(-num_parameters // shards.optimizer),
            state,
            -(-num_parameters // shards.parameters) * parameter,
            -(-num_parameters // shards.gradients) * (state.gradient + state.bucket),
        )

    @staticmethod
    def of_share(
        num_parameters: Bytes, state: StateBytes, parameters_bytes: Bytes, gradients_bytes: Bytes
    ) -> "RankStates[Bytes]":
        """Return the states of a rank whose optimizer updates so many parameters."""
        return RankStates(
            parameters_bytes=parameters_bytes,
            gradients_bytes=gradients_bytes,
            optimizer_states_bytes=num_parameters * state.optimizer,
            update_temporary_bytes=num_parameters * state.update_temporary,
        )

    def changed(self, change: Callable[[str, Any], Any]) -> Self:
        """Return these with *change* applied to each one's name and size."""
        sizes = ((each.name, getattr(self, each.name)) for each in fields(RankStates))
        return replace(self, **{name: change(name, size) for name, size in sizes})

    def beside(self, other: "RankStates[Size]") -> Self:
        """Return the sum with *other* states, such as those of weights sharded otherwise."""
        return self.changed(lambda name, size: size + getattr(other, name))

    def staying(self, parameters: Bytes, gradients: Bytes, optimizer: Bytes) -> Self:
        """Return these times 1 where they stay on the device, times 0 where offloaded.

        Temporaries of the update are where the optimizer's states are.
        """
        stays = {"parameters_bytes": parameters, "gradients_bytes": gradients}
        return self.changed(lambda name, size: size * stays.get(name, optimizer))


class PassPeak(NamedTuple, Generic[Size]):
    """Peak of a pass: its workspace, and gradients that are not allocated yet."""

    buffers_bytes: Size
    absent_bytes: Size

    @property
    def total_bytes(self) -> Size:
        """Bytes added to those that count as held."""
        return self.buffers_bytes - self.absent_bytes


# The key of the fullest of some moments, of those alike the first.
PEAK_BYTES = attrgetter("total_bytes")


class PassPeaks(NamedTuple, Generic[Size]):
    """Peaks of the passes of a virtual stage: forward, first and later backward."""

    forward: PassPeak[Size]
    first_backward: PassPeak[Size]
    backward: PassPeak[Size]


class KeptUnits(NamedTuple):
    """FSDP units that PyTorch's pipeline runtimes keep gathered between passes.

    Args:
        whole: Passes that find all its units gathered.
        ahead: Passes that find them in the buffers of a prefetch.
        ahead_bytes: Buffers of the prefetch.
        reduction: Workspace of reducing gradients after the last pass, and gradients freed by it.
    """

    whole: PassPeaks[Bytes]
    ahead: PassPeaks[Bytes]
    ahead_bytes: Bytes
    reduction: PassPeak[Bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualStageMemory:
    """Bytes of one pass through a virtual stage: saved activations and workspaces.

    ``sent`` is what it sends in each microbatch; ``buffer_bytes`` live once a rank, from its first
    pass on.
    ``reallocated_gradients_bytes`` are those of the gradients that the virtual stage's first
    backward pass makes, ``first_backward`` is the fullest instant of that pass; None where it is as
    the others. ``last_backward`` is likewise that of the last one, where it reduces sums of
    gradients, of which ``reduced_gradients_bytes`` are gone then. ``after_forward_bytes`` and
    ``after_backward_bytes`` of gathered weights live while other virtual stages run; the workspaces
    of its own passes include them.  With ``kept_units`` these are the workspaces of passes that
    gather the units themselves.
    """

    saved_bytes: Bytes
    forward_workspace_bytes: Bytes
    backward_workspace_bytes: Bytes
    reallocated_gradients_bytes: Bytes = 0
    first_backward: PassPeak[Bytes] | None = None
    last_backward: PassPeak[Bytes] | None = None
    reduced_gradients_bytes: Bytes = 0
    after_forward_bytes: Bytes = 0
    after_backward_bytes: Bytes = 0
    kept_units: KeptUnits | None = None
    sent: SentBytes = NOTHING_SENT
    buffer_bytes: Bytes = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory(RankStates[int]):
    """Memory of one pipeline rank on its device, and its bytes on the host.

    ``buffers_bytes`` live throughout: p2p buffers, buffers that blocks share, and dummy gradients;
    ``keeps_sent_buffers`` says that sent p2p buffers live until the step ends.
    ``overlapped_bytes`` are added by a forward pass through the first virtual stage and a backward
    pass through the second while they overlap. ``p2p_position`` is the position of a rank whose p2p
    buffers are kept alive as by Megatron-Core.
    """

    virtual_stages: tuple[VirtualStageMemory, ...] = ()
    host_bytes: int = 0
    buffers_bytes: int = 0
    keeps_sent_buffers: bool = False
    overlapped_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    p2p_position: PipelinePosition | None = None

    @property
    def sent(self) -> list[SentBytes]:
        """Bytes that each virtual stage sends in a microbatch."""
        return [stage.sent for stage in self.virtual_stages]

    def growth_bytes(self, period: Iterable[Action]) -> int:
        """Return the bytes by which live memory grows over a *period* of a long step."""
        if not self.keeps_sent_buffers or self.virtual_stages[0].kept_units is None:
            return 0
        # Each backward pass sends one gradient, and its output is no activation any more.
        done = (each.virtual_stage for each in period if each.phase.direction < 0)
        return sum(sum(self.sent[virtual_stage]) for virtual_stage in done)

    @property
    def reshards(self) -> bool:
        """Whether gathered weights are freed after a forward pass but not after a backward one."""
        return any(
            stage.after_forward_bytes < stage.after_backward_bytes for stage in self.virtual_stages
        )


def virtual_stage_memory(
    shape: BlockShape, stage: Stage, blocks: Mapping[BlockKind, BlockMemory[Any]]
) -> VirtualStageMemory:
    """Return the memory of one pass through *stage*, whose *blocks* are of *shape*.

    Sizes of blocks may be columns over shapes with the same software.
    """
    forward, backward = pass_workspace_bytes(
        blocks,
        stage,
        holds_gradient=shape.stack.holds_messages,
        has_pools=captures_whole_layers(shape),
    )
    saved = sum(count * blocks[kind].saved for kind, count in stage.passes)
    sent = stage_messages(blocks, stage)
    # Buffers that blocks share live once, whatever the number of blocks.
    return VirtualStageMemory(
        saved_bytes=saved + kept_output_bytes(shape, sent),
        forward_workspace_bytes=forward,
        backward_workspace_bytes=backward,
        sent=sent,
        buffer_bytes=largest(blocks[kind].buffer for kind, _ in stage.contents),
    )


def with_workspace(stage: VirtualStageMemory, workspace: tuple[int, int]) -> VirtualStageMemory:
    """Return *stage* with a larger forward and backward workspace."""
    return replace(
        stage,
        forward_workspace_bytes=stage.forward_workspace_bytes + workspace[0],
        backward_workspace_bytes=stage.backward_workspace_bytes + workspace[1],
    )


def sharded_workspace_bytes(
    units: list[int], state: StateBytes, shards: Shards, *, reshards: bool = True
) -> tuple[int, int]:
    """Return the forward and backward workspaces of gathered parameters and gradients.

    Gathered parameters of a unit and of the one that follows it (of all units where they are
    kept from forward to backward); in backward also the whole gradient of one unit.
    """
    # Two at a time, as the next unit is gathered while this one computes (ZeRO, FSDP prefetch).
    neighbours = zip(units, [*units[1:], 0], strict=True)
    num_gathered = max(map(sum, neighbours)) if reshards else sum(units)
    gathered = num_gathered * state.gathered_parameter if shards.parameters > 1 else 0
    # Backward reduces a unit's gradient before it makes the next one's.
    gradient = max(units) * state.gradient if shards.gradients > 1 else 0
    return gathered, gathered + gradient


def rank_memory(
    states: RankStates[Bytes], virtual_stages: tuple[VirtualStageMemory, ...] = ()
) -> RankMemory:
    """Return the memory of a rank with *states*.

    Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1: 7.5e9 parameters, 64 ranks: 120, 31.4,
    16.6 and 1.9 GB.

    >>> state = StateBytes(parameter=2, gradient=2, optimizer=12, update_temporary=0)
    >>> shares = [Shards.of(64, zero_stage) for zero_stage in range(4)]
    >>> each = [RankStates.of(7_500_000_000, state, shards) for shards in shares]
    >>> [rank_memory(states).static_bytes for states in each]
    [120000000000, 31406250000, 16640625000, 1875000000]
    """
    sizes: dict[str, Any] = {
        each.name: int(getattr(states, each.name)) for each in fields(RankStates)
    }
    # Passes of a rank share them: the largest virtual stage decides.
    buffers = max((int(each.buffer_bytes) for each in virtual_stages), default=0)
    return RankMemory(**sizes, virtual_stages=virtual_stages, buffers_bytes=buffers)


def with_copies(memory: RankMemory, copies_bytes: int) -> RankMemory:
    """Return *memory* with copies of weights, which are never sharded or offloaded."""
    return replace(memory, parameters_bytes=memory.parameters_bytes + copies_bytes)
