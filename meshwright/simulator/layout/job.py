"""The training job of a step: the model, its batch and its number format."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from inspect import getattr_static, isclass
from typing import cast, get_args, get_origin

from meshwright.hwprofiles import Precision, ProfileError, StackProfile, shown, suggestion
from meshwright.records import Record
from meshwright.simulator.errors import PlanError
from meshwright.simulator.model import AnyModel, Experts, ModelSpec, load_model

# Records whose facts conditions may name.
TABLES: dict[str, tuple[type, ...]] = {"model": get_args(AnyModel), "stack": (StackProfile,)}


class Quantity(StrEnum):
    """Quantities of a job or a plan that `largest` increases until memory is full."""

    SEQ_LEN = "seq-len"
    MICRO_BATCH = "micro-batch"
    GLOBAL_BATCH = "global-batch"
    LAYERS = "layers"

    @property
    def field(self) -> str:
        """Its name in a job or a plan."""
        names = {
            Quantity.MICRO_BATCH: "microbatch_size",
            Quantity.GLOBAL_BATCH: "global_batch_size",
            Quantity.LAYERS: "num_layers",
        }
        return names.get(self, "seq_len")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """One training step to lay out: the model, its batch and its number format.

    Args:
        model: Architecture that is trained, or the name of a built-in one.
        global_batch_size: Sequences of one optimizer step, over all ranks.
        seq_len: Tokens of a sequence; by default as the model is trained.
        precision: Number format of parameters and activations.
        imbalance: Load of the hottest routed expert over the mean; 1 is balanced routing.
    """

    model: AnyModel
    global_batch_size: int
    seq_len: int = cast("int", None)  # that of the model: `__post_init__`
    precision: Precision = Precision.BF16
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a batch or a sequence length out of range."""
        # The record is frozen: defaults that depend on the model bypass __setattr__.
        if isinstance(self.model, str):
            object.__setattr__(self, "model", load_model(self.model))
        if self.seq_len is None:
            object.__setattr__(self, "seq_len", self.model.seq_len)
        for field, limit in (("global_batch_size", 10**7), ("seq_len", 10**8)):
            value = getattr(self, field)
            if not 1 <= value <= limit:
                raise PlanError(f"{field}={value} is out of range; allowed 1 to {limit}")
        self._check_imbalance()
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

    def _check_imbalance(self) -> None:
        """Refuse a load of the hottest expert below the mean, or above that of all tokens."""
        experts = self.experts
        if experts is None:
            if self.imbalance != 1:
                raise PlanError(
                    f"imbalance={self.imbalance:g} does not go with {self.model.name}, which has "
                    "no experts; allowed: 1"
                )
            return
        # At most every token goes to the hottest expert, whose mean load is top-k over experts.
        most = experts.num_experts / experts.experts_per_token
        if not 1 <= self.imbalance <= most:
            raise PlanError(
                f"imbalance={self.imbalance:g} is out of range; allowed 1 to {most:g}, where each "
                f"token goes to the hottest of the {experts.num_experts} experts"
            )

    @property
    def experts(self) -> Experts | None:
        """Routed experts of the model, if it has any."""
        return self.model.experts

    @property
    def prediction_layers(self) -> int:
        """MTP layers of the model (multi-token prediction)."""
        return self.model.prediction_layers if isinstance(self.model, ModelSpec) else 0

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
        """Batch of an optimizer step, for people."""
        if isinstance(self.model, ModelSpec):
            return f"{self.global_batch_size:,} x {self.seq_len:,} {self.model.sample}"
        return f"{self.global_batch_size:,} {self.model.sample}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens, or samples of a model that has none, that one optimizer step consumes."""
        return self.global_batch_size * self.seq_len


def check_fact(root: str, path: list[str]) -> None:
    """Raise ProfileError unless *path* names a declared field or property of table *root*."""
    kinds = TABLES[root]
    for place, word in enumerate(path):
        known = {name: inner for kind in kinds for name, inner in _facts_of(kind).items()}
        if word not in known:
            name = ".".join((root, *path))
            names = [".".join((root, *path[:place], each)) for each in known]
            raise ProfileError(f"{shown(name)} is no field or fact; {suggestion(name, names)}")
        kinds = known[word]


@cache
def _facts_of(kind: type) -> Mapping[str, tuple[type, ...]]:
    """Return the fields and properties of a record, and the members of an enumeration.

    Values are the types in which the next name of a path is looked up: of records, or of a list's
    members.
    """
    if issubclass(kind, StrEnum):
        return {str(each): () for each in kind}
    found: dict[str, tuple[type, ...]] = {
        name: () for name in dir(kind) if isinstance(getattr_static(kind, name), property)
    }
    for name, field in getattr(kind, "model_fields", {}).items():
        inner = (field.annotation, *get_args(field.annotation))
        wanted = StrEnum if get_origin(field.annotation) is tuple else Record
        found[name] = tuple(each for each in inner if isclass(each) and issubclass(each, wanted))
    return found
