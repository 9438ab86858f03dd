"""What Megatron-Core's interleaved schedule receives after each pass, for passes to come."""

from collections.abc import Sequence

from meshwright.simulator.schedules import Action, Phase

Pass = tuple[int, int]
"""A virtual stage and a microbatch."""


def passes_and_receives(
    actions: Sequence[Action], phase: Phase, pp_rank: int, pp: int, vpp: int
) -> list[tuple[Pass, Pass | None]]:
    """Return the passes of a phase, each with that whose message is received after it, if one is.

    Between neighbours that is the next pass.  What returns from the other end of the pipeline
    comes as soon as that has made it, pp - 1 passes before (`recv_tensor_from_previous_stage` of
    megatron/core/pipeline_parallel/schedules.py, core 0.16).

    >>> order = [Action(Phase.FORWARD, *each) for each in ((0, 0), (0, 1), (1, 0), (1, 1))]
    >>> [received for _, received in passes_and_receives(order, Phase.FORWARD, 0, 2, 2)]
    [None, (1, 0), (1, 1), None]
    """
    passes = [each[1:] for each in actions if each.phase is phase]
    is_forward = phase is Phase.FORWARD
    if pp_rank != (0 if is_forward else pp - 1):
        return [*zip(passes, [*passes[1:], None], strict=True)]
    step = 1 if is_forward else -1
    sources = passes[: max(0, len(passes) - pp)]
    arriving = [
        (virtual_stage + step, microbatch) if 0 <= virtual_stage + step < vpp else None
        for virtual_stage, microbatch in sources
    ]
    none_yet = [None] * (len(passes) - 1 - len(sources))
    return [*zip(passes, [*none_yet, *arriving, None], strict=True)]
