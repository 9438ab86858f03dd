"""What a rank of PyTorch's pipeline runtimes finds gathered in each pass, and its live bytes then.

Such a runtime keeps the units of a virtual stage gathered from a backward pass to the next pass.
One that has several virtual stages a rank gathers those that come next ahead of their passes, and
frees the others.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from meshwright.simulator.memory.rank import ChunkMemory, KeptUnits, Moment, PassMoments, RankMemory
from meshwright.simulator.memory.sent_messages import held_until_end, held_until_next
from meshwright.simulator.schedules import Action, Phase, next_chunks


class Level(NamedTuple):
    """Live bytes beside the static ones: *activations* stay, *buffers* are a momentary need.

    ``absent`` bytes of gradients that count as static are not there.
    """

    activations: int
    buffers: int
    absent: int = 0

    @property
    def moving_bytes(self) -> int:
        """Live bytes beside the static ones."""
        return self.activations + self.buffers - self.absent


class Kind(IntEnum):
    """A pass: forward, the first backward of its virtual stage, another backward."""

    FORWARD = 0
    FIRST_BACKWARD = 1
    BACKWARD = 2


class Found(IntEnum):
    """What a pass finds of its units: not all of them, all, or all in their gathered buffers."""

    APART = 0
    WHOLE = 1
    AHEAD = 2


class PassState(NamedTuple):
    """A pass of a rank, whatever the sizes.

    Args:
        kind: What it is.
        chunk: Of which virtual stage.
        found: What it finds of that.
        is_last: No backward pass of that follows.
        freed: Virtual stages whose units are freed before it.
        fetched: Virtual stages whose units are gathered ahead of their passes, before it.
    """

    kind: Kind
    chunk: int
    found: Found
    is_last: bool
    freed: tuple[int, ...]
    fetched: tuple[int, ...]


def pass_states(actions: Sequence[Action], num_chunks: int, *, reshards: bool) -> list[PassState]:
    """Return the states of a rank's passes, in order.

    Args:
        actions: What it runs.
        num_chunks: Its virtual stages.
        reshards: Units are freed after a forward pass.
    """
    after = {Phase.FORWARD: Found.APART if reshards else Found.WHOLE, Phase.BACKWARD: Found.WHOLE}
    found, left = [Found.APART] * num_chunks, [len(actions) // (2 * num_chunks)] * num_chunks
    backward = [Kind.FIRST_BACKWARD] * num_chunks
    coming = next_chunks(actions) if num_chunks > 1 else [()] * len(actions)
    gathered: tuple[int, ...] = ()
    states = []
    for (phase, chunk, _), following in zip(actions, coming, strict=True):
        freed = tuple(each for each in gathered if each not in following)
        fetched = tuple(each for each in following if each not in gathered)
        gathered = following
        for each in fetched:
            found[each] = Found.AHEAD
        kind = Kind.FORWARD
        if phase is Phase.BACKWARD:
            kind, backward[chunk] = backward[chunk], Kind.BACKWARD
            left[chunk] -= 1
        is_last = phase is Phase.BACKWARD and not left[chunk]
        states.append(PassState(kind, chunk, found[chunk], is_last, freed, fetched))
        found[chunk] = after[phase]
    return states


def kept_levels(
    memory: RankMemory, actions: Sequence[Action], states: Sequence[PassState]
) -> Iterator[tuple[Level, Level]]:
    """Yield what lives in each pass and after it on a rank whose units are kept between passes.

    Args:
        memory: Its sizes; each virtual stage has ``kept_units``.
        actions: What it runs.
        states: The states of that.
    """
    chunks = [(chunk, kept) for chunk in memory.chunks if (kept := chunk.kept_units) is not None]
    moments = [_moments(chunk, kept) for chunk, kept in chunks]
    saved = memory.message_buffers_bytes
    absent = sum(chunk.late_gradients_bytes for chunk, _ in chunks)
    gathered, elsewhere = [0] * len(chunks), 0
    sent = _sent_bytes(memory, actions, [kept for _, kept in chunks])
    for index, (kind, number, found, is_last, freed, fetched) in enumerate(states):
        for each in freed:
            elsewhere, gathered[each] = elsewhere - gathered[each], 0
        for each in fetched:
            gathered[each] = chunks[each][1].ahead_bytes
            elsewhere += gathered[each]
        elsewhere -= gathered[number]
        chunk, kept = chunks[number]
        if kind is Kind.FORWARD:
            saved += chunk.saved_bytes
        elif kind is Kind.FIRST_BACKWARD:
            absent -= chunk.late_gradients_bytes
        buffers, missing = moments[number][found][kind]
        during = Level(saved + sent[index], elsewhere + buffers, absent + missing)
        needs = goes = 0
        if kind is Kind.FORWARD:
            gathered[number] = chunk.after_forward_bytes
        else:
            saved -= chunk.saved_bytes
            gathered[number] = chunk.after_backward_bytes
            if is_last:
                needs, goes = kept.reduction
        elsewhere += gathered[number]
        yield during, Level(saved + sent[index + 1], elsewhere + needs, absent)
        absent += goes


def _moments(chunk: ChunkMemory, kept: KeptUnits) -> tuple[PassMoments, ...]:
    """Return the fullest instants of passes by what they find."""
    backward = Moment(chunk.backward_workspace_bytes)
    first = chunk.first_backward or backward
    apart = PassMoments(Moment(chunk.forward_workspace_bytes), first, backward)
    return (apart, kept.whole, kept.ahead)


def _sent_bytes(
    memory: RankMemory, actions: Sequence[Action], kept: Sequence[KeptUnits]
) -> list[int]:
    """Return the sent messages that live in each action beside what counts as saved."""
    sent = [units.sent for units in kept]
    return held_until_end(actions, sent) if memory.holds_sent else held_until_next(actions, sent[0])
