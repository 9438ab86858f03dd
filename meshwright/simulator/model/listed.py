"""What models that list their layers have in common: kinds by name, and samples for tokens."""

from typing import ClassVar, Generic, Protocol, TypeVar

from meshwright.simulator.model.described import Model
from meshwright.simulator.model.kinds import BlockKind, BlockRun, join_runs


class LayerKind(Protocol):
    """A kind of layer: all that tells it from others."""

    @property
    def name(self) -> BlockKind:
        """What it is called."""


K = TypeVar("K", bound=LayerKind)


class ListedModel(Model, Generic[K]):
    """A model whose layers differ, and whose sample is a sequence of length 1."""

    tied_embeddings: ClassVar[bool] = False
    seq_len: ClassVar[int] = 1

    @property
    def layers(self) -> tuple[K, ...]:
        """The kind of each layer, in the order in which they run."""
        raise NotImplementedError

    def layer(self, name: BlockKind) -> K:
        """Return the kind of layer of a name."""
        return next(kind for kind in self.layers if kind.name == name)

    @property
    def layer_runs(self) -> tuple[BlockRun, ...]:
        """The layers as runs of equal ones."""
        return join_runs([BlockRun(kind.name, 1) for kind in self.layers])
