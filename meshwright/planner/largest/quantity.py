"""Quantities that may grow until memory is full: steps, limits, and ranges with one layout."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, gcd

from meshwright.simulator import ModelSpec, PlanError, TrainingJob
from meshwright.simulator.layout import Quantity, head_cost_layers
from meshwright.simulator.model import MAX_LAYERS, with_layers

MOST_TOKENS = 10**8
MOST_SEQUENCES = 10**7
# Lengths are tried in steps of so many tokens, or of its common divisor with the job's length.
USUAL_STEP_TOKENS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Largest:
    """The largest value that fits.

    Args:
        quantity: The quantity.
        value: The value; None where not even the smallest one fits.
        next_value: The next possible value, which does not fit; None where there is none.
        why: Text of the reason why the next value does not fit.
    """

    quantity: Quantity
    value: int | None
    next_value: int | None
    why: str

    def __str__(self) -> str:
        """Return the value in a line, with the reason.

        >>> print(Largest(quantity=Quantity.SEQ_LEN, value=8192, next_value=9216, why="it is full"))
        seq_len=8,192; it is full
        """
        name = self.quantity.field
        return f"no {name} fits" if self.value is None else f"{name}={self.value:,}; {self.why}"


def step_tokens(job: TrainingJob) -> int:
    """Return the step in which lengths of sequences are tried.

    >>> from meshwright.simulator import load_model
    >>> job = TrainingJob(model=load_model("llama3-8b"), global_batch_size=1, seq_len=640)
    >>> step_tokens(job)
    128
    """
    return gcd(job.seq_len, USUAL_STEP_TOKENS)


def microbatch_ranges(most: int) -> list[tuple[int, int]]:
    """Return the ranges of microbatch sizes in which a layout's tensors are the same.

    For a single sequence PyTorch returns views of tensors that it copies for more
    (`Tape.copy_tokens`).

    >>> microbatch_ranges(9)
    [(2, 9), (1, 1)]
    """
    return [(2, most), (1, 1)] if most > 1 else [(1, 1)]


def most_tokens(job: TrainingJob) -> tuple[int, str]:
    """Return the longest sequence that the model takes, and the reason.

    Raises:
        PlanError: If its batch is not of token sequences.
    """
    model = job.model
    if not isinstance(model, ModelSpec):
        raise PlanError(
            f"--max {Quantity.SEQ_LEN} does not go with {model.name}, whose batch counts "
            f"{model.sample}; allowed: {Quantity.MICRO_BATCH}, {Quantity.GLOBAL_BATCH}"
        )
    if model.positions == "learned":
        return model.max_positions, f"{model.name} has {model.max_positions:,} learned positions"
    return MOST_TOKENS, f"longer sequences than {MOST_TOKENS:,} tokens are not looked at"


def deeper_job(job: TrainingJob, num_layers: int) -> TrainingJob:
    """Return *job* with a model of the same shape and so many layers."""
    return replace(job, model=with_layers(job.transformer, num_layers))


def most_layers(job: TrainingJob) -> tuple[int, str]:
    """Return the most layers that a model can have, and the reason.

    Raises:
        PlanError: If the model lists its layers one by one.
    """
    model = job.model
    if not isinstance(model, ModelSpec):
        raise PlanError(
            f"--max {Quantity.LAYERS} does not go with {model.name}, which lists its layers; "
            f"allowed: {Quantity.MICRO_BATCH}, {Quantity.GLOBAL_BATCH}"
        )
    return MAX_LAYERS, f"models have at most {MAX_LAYERS:,} layers"


def least_layers(model: ModelSpec) -> int:
    """Return the fewest layers of which the last is of the kind that deeper models have more of."""
    return 1 if model.experts is None else model.experts.first_dense_layers + 1


def stretches(job: TrainingJob) -> list[tuple[int, int]]:
    """Return the ranges of sequence lengths between which layouts change, the longest first.

    Within a range the tensors of a layout are the same, each as long or longer the longer the
    sequence is, and are allocated and freed in the same order, so that its peak only grows. Between
    ranges `split_layers` gives stages other layers: it adds the head's cost, in layers, to whole
    numbers and compares, so that its result depends on that cost rounded up alone, which falls with
    the length. And sequences get longer than an attention window, for which stacks have layouts of
    their own.
    """
    most, _ = most_tokens(job)
    model = job.transformer
    starts = {1, most + 1}
    if 0 < model.window < most:
        starts.add(model.window + 1)
    starts.update(_steps_down(lambda length: ceil(head_cost_layers(model, length)), most))
    return [(first, end - 1) for first, end in reversed(list(pairwise(sorted(starts))))]


def _steps_down(height: Callable[[int], int], last: int) -> Iterator[int]:
    """Yield the numbers up to *last* at which *height*, which never rises, is lower than before."""
    place = 1
    while height(place) > height(last):
        low, high, current = place, last, height(place)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if height(middle) == current else (low, middle)
        place = high
        yield place
