"""Cost of a whole training run: days, GPU hours and money."""

from typing import NamedTuple

from meshwright.simulator import StepResult

SECONDS_PER_HOUR = 3600
HOURS_PER_DAY = 24


class Budget(NamedTuple):
    """Tokens to train on, and the price of a GPU.

    Args:
        tokens: Tokens of the whole run.
        price_usd_per_gpu_hour: Price of one device and hour, or None where none is known.
    """

    tokens: float
    price_usd_per_gpu_hour: float | None = None

    def run(self, result: StepResult) -> "TrainingRun":
        """Return the run at the throughput of *result*, without restarts or stragglers."""
        return training_run(
            self.tokens,
            tokens_per_s=result.tokens_per_s,
            num_gpus=result.plan.world_size,
            price_usd_per_gpu_hour=self.price_usd_per_gpu_hour,
        )


class TrainingRun(NamedTuple):
    """Time, GPU hours and cost of training on *tokens* tokens."""

    tokens: float
    days: float
    gpu_hours: float
    price_usd_per_gpu_hour: float | None
    cost_usd: float | None


def training_run(
    tokens: float, *, tokens_per_s: float, num_gpus: int, price_usd_per_gpu_hour: float | None
) -> TrainingRun:
    """Return time and cost of a run: ``tokens / rate`` hours on every GPU, at a price each.

    Args:
        tokens: Tokens of the whole run.
        tokens_per_s: Throughput over all devices.
        num_gpus: Devices that are paid for.
        price_usd_per_gpu_hour: Price of one device and hour, or None.

    >>> run = training_run(86.4e9, tokens_per_s=1e6, num_gpus=10, price_usd_per_gpu_hour=2.0)
    >>> run.days, run.gpu_hours, run.cost_usd
    (1.0, 240.0, 480.0)
    """
    hours = tokens / tokens_per_s / SECONDS_PER_HOUR
    gpu_hours = hours * num_gpus
    price = price_usd_per_gpu_hour
    return TrainingRun(
        tokens=tokens,
        days=hours / HOURS_PER_DAY,
        gpu_hours=gpu_hours,
        price_usd_per_gpu_hour=price,
        cost_usd=None if price is None else gpu_hours * price,
    )
