"""Memory of the fullest rank as products: how many, times how large."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.hwprofiles import format_bytes
from meshwright.simulator import BuiltStep, CostModel, StepResult
from meshwright.simulator.memory import block_bytes
from meshwright.simulator.model import BlockKind
from meshwright.simulator.replication import sum_parameters


class MemoryTerm(NamedTuple):
    """Part of the memory of the fullest rank, and the product that makes it.

    ``factors`` is empty where it is no product.
    """

    name: str
    size_bytes: int
    factors: str = ""


def memory_products(
    step: StepResult, built: BuiltStep | None, costs: CostModel
) -> tuple[MemoryTerm, ...]:
    """Return the live bytes of the fullest rank at its peak, as products that add up to them.

    Activations are passes in flight, whose backward is still to come, times what a block keeps of
    each; what else counts as one is held for messages and outputs.

    Args:
        step: The simulated step.
        built: What it was made from; None where ranks are no mesh.
        costs: Of which the sizes of blocks are.
    """
    stage = step.memory.worst_stage
    count = 0
    if built is not None:
        # States are so many bytes of each parameter of the rank.
        count = sum_parameters(built.setting.shape, built.setting.rank_stages(stage.stage))
    terms = [
        MemoryTerm(name.removesuffix("_bytes").replace("_", " "), size, _bytes_of_each(size, count))
        for name, size in stage.by_name.items()
    ]
    activations = () if built is None else tuple(_activation_terms(step, built, costs))
    rest = stage.activations_bytes - sum(term.size_bytes for term in activations)
    # With recomputation inside kept units a pass's own levels say what is saved, not its blocks.
    if rest < 0:
        activations, rest = (), stage.activations_bytes
    others = (
        MemoryTerm("other activations" if activations else "activations", rest),
        MemoryTerm("buffers", stage.buffers_bytes),
    )
    return tuple(term for term in (*terms, *activations, *others) if term.size_bytes)


def _bytes_of_each(size_bytes: int, count: int) -> str:
    return f"{count:,} x {size_bytes / count:.4g} B" if count and size_bytes else ""


def _activation_terms(step: StepResult, built: BuiltStep, costs: CostModel) -> Iterator[MemoryTerm]:
    """Yield the activations of each kind of block and virtual stage, for the passes in flight.

    Virtual stages that keep the same are one term.
    """
    pp_rank = step.memory.worst_stage.stage
    in_flight = passes_in_flight(step, pp_rank)
    stages = built.setting.rank_stages(pp_rank)
    kinds = (kind for stage in stages for kind, _ in stage.passes)
    # Bytes of the blocks as costs have them, so that kernels decide what is saved.
    blocks = block_bytes(costs.blocks, built.setting.shape, others=kinds)
    alike: dict[tuple[BlockKind, int, int], list[int]] = {}
    for number, stage in enumerate(stages):
        for kind, count in stage.passes:
            alike.setdefault((kind, count, in_flight[number]), []).append(number)
    for (kind, count, passes), numbers in alike.items():
        saved = blocks[kind].saved
        size = len(numbers) * passes * count * saved
        if size:
            suffix = _stages_text(numbers) if len(in_flight) > 1 else ""
            several = f"{len(numbers)} x " if len(numbers) > 1 else ""
            blocks_text = f"{count} {kind}s" if count > 1 else kind
            factors = f"{several}{passes} in flight x {blocks_text} x {format_bytes(saved)}"
            yield MemoryTerm(f"{kind} activations{suffix}", size, factors)


def _stages_text(numbers: Sequence[int]) -> str:
    """Return the numbers of virtual stages as text.

    >>> _stages_text([3]), _stages_text([0, 1, 2, 5])
    (' of stage 3', ' of stages 0-2, 5')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f" of stage{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"


def passes_in_flight(step: StepResult, pp_rank: int) -> list[int]:
    """Return the passes of each virtual stage whose activations are live at the peak.

    The pass of that instant is among them, but for a forward pass beside a backward pass, which
    keeps what this frees.
    """
    assert step.times is not None  # a mesh has times
    rank, peak_ps = step.times.ranks[pp_rank], step.memory.by_stage[pp_rank].peak_time_ps
    counts = [0] * step.plan.num_virtual_stages
    for index, ((phase, virtual_stage, _), start_ps, end_ps) in enumerate(rank.passes()):
        is_kept = start_ps <= peak_ps
        if index in rank.pairs:
            is_kept = rank.ends_ps[index + 1] <= peak_ps
        # A forward pass keeps its activations until its backward pass has ended.
        if phase.direction > 0 and is_kept:
            counts[virtual_stage] += 1
        elif phase.direction < 0 and end_ps <= peak_ps:
            counts[virtual_stage] -= 1
    return counts
