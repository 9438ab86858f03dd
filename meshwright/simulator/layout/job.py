"""What is trained in a step: the model, its batch and its number format."""

from dataclasses import dataclass

from meshwright.hwprofiles import Precision
from meshwright.simulator.errors import PlanError
from meshwright.simulator.model import AnyModel, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """One training step to lay out: the model, its batch and its number format.

    Args:
        model: Architecture that is trained.
        global_batch_size: Sequences of one optimizer step, over all ranks.
        seq_len: Tokens of a sequence.
        precision: Number format of parameters and activations.
    """

    model: AnyModel
    global_batch_size: int
    seq_len: int
    precision: Precision = Precision.BF16

    def __post_init__(self) -> None:
        """Refuse a batch or a sequence that no run could have."""
        for field, limit in (("global_batch_size", 10**7), ("seq_len", 10**8)):
            value = getattr(self, field)
            if not 1 <= value <= limit:
                raise PlanError(f"{field}={value} is out of range; allowed 1 to {limit}")
        model = self.model
        if not isinstance(model, ModelSpec):
            if self.seq_len != model.seq_len:
                raise PlanError(
                    f"seq_len={self.seq_len} does not go with {model.name}, whose batch counts "
                    f"{model.sample}; allowed: {model.seq_len}"
                )
        elif model.positions == "learned" and self.seq_len > model.max_positions:
            raise PlanError(
                f"seq_len={self.seq_len} is longer than the {model.max_positions} learned "
                f"positions of {model.name}"
            )

    @property
    def transformer(self) -> ModelSpec:
        """The model, where it must be a transformer.

        Raises:
            PlanError: If it is of another kind.
        """
        if not isinstance(self.model, ModelSpec):
            raise PlanError(f"model {self.model.name} is no transformer; allowed here: one")
        return self.model

    @property
    def batch_text(self) -> str:
        """What an optimizer step consumes, in words."""
        if isinstance(self.model, ModelSpec):
            return f"{self.global_batch_size:,} x {self.seq_len:,} {self.model.sample}"
        return f"{self.global_batch_size:,} {self.model.sample}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens, or samples of a model that has none, that one optimizer step consumes."""
        return self.global_batch_size * self.seq_len
