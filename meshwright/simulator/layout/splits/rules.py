"""Rules that split layers over pipeline stages."""

from functools import cache

from meshwright.hwprofiles import StageSplit
from meshwright.simulator.errors import PlanError


@cache
def split_layers(
    num_layers: int, num_stages: int, rule: StageSplit, *, head_cost: float = 0.0
) -> tuple[int, ...]:
    """Return the layers of each stage in model order.

    ``even`` gives every stage the same number and places a remainder where the stage stays
    cheapest; ``balanced`` minimises the costliest stage with the head counted as *head_cost*
    layers on the last one; ``ends`` shares out layers, embedding and head, a remainder from the
    front (`generate_llm_fqn_per_model_part`, torchtitan/distributed/pipeline_parallel.py of
    0.2.2); ``greedy`` fills stages with ``ceil(L / n)`` layers from the front
    (DeepSpeed's split: 78 layers on 12 stages are 11 stages of 7 and one of 1).

    Raises:
        PlanError: If there are more stages than layers.

    >>> split_layers(7, 3, StageSplit.EVEN)
    (2, 2, 3)
    >>> split_layers(32, 4, StageSplit.ENDS)
    (8, 9, 8, 7)
    >>> split_layers(78, 12, StageSplit.GREEDY)
    (7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 1)
    """
    if num_stages > num_layers:
        raise PlanError(f"{num_stages} stages are more than the model's {num_layers} layers")
    match rule:
        case StageSplit.GREEDY:
            return _fill_from_front(num_layers, num_stages)
        case StageSplit.ENDS:
            return _with_ends(num_layers, num_stages)
        case StageSplit.EVEN:
            floor = num_layers // num_stages
        case StageSplit.BALANCED:
            floor = 1
    return _level(num_layers, [floor] * num_stages, head_cost)


def _fill_from_front(num_layers: int, num_stages: int) -> tuple[int, ...]:
    most = -(-num_layers // num_stages)
    counts: list[int] = []
    left = num_layers
    for stage in range(num_stages):
        # Each later stage needs at least one layer.
        later = num_stages - stage - 1
        counts.append(min(most, left - later))
        left -= counts[-1]
    return tuple(counts)


def _with_ends(num_layers: int, num_stages: int) -> tuple[int, ...]:
    if num_stages == 1:
        return (num_layers,)
    # Embedding and head count as a layer each on the outer stages.
    share, rest = divmod(num_layers + 2, num_stages)
    counts = [share + (stage < rest) for stage in range(num_stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def _level(num_layers: int, counts: list[int], head_cost: float) -> tuple[int, ...]:
    """Return *counts* with the remaining layers added one by one to the cheapest stage.

    Among equals the later stage wins: it keeps fewer microbatches in flight, so the layer
    costs less memory there.
    """
    costs = [float(count) for count in counts]
    costs[-1] += head_cost
    for _ in range(num_layers - sum(counts)):
        stage = min(range(len(counts)), key=lambda index: (costs[index], -index))
        counts[stage] += 1
        costs[stage] += 1.0
    return tuple(counts)
