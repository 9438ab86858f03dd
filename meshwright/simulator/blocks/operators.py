"""The operators a training step is made of: shapes, FLOPs and bytes, without times."""

from typing import Literal, NamedTuple

from meshwright.hwprofiles import CollectiveOp
from meshwright.simulator.layout import ExpertAxis, MeshAxis
from meshwright.simulator.model import (
    COPY,
    COPY_OF_STREAMS,
    EMBEDDING,
    FINAL_NORM,
    LAYERS,
    PREDICTIONS,
    BlockKind,
    ModelSpec,
)

# Kernels forward and backward: of an embedding index, add, dropout; of a copy that alone; a norm
# ahead of a head is among those of the head.
KERNELS = {EMBEDDING: (3, 3), COPY: (1, 0), COPY_OF_STREAMS: (1, 0), FINAL_NORM: (0, 0)}
# Kernels of a head beside its products: norm, cast, maximum, subtract, exponent, sum, divide and
# their gradients; BERT's has a dense layer, activation, pooler, tanh and classifier more.
HEAD_KERNELS = 8
MLM_KERNELS = 5
# Of each layer that predicts a further token beside it: embedding, three norms, two that put
# tokens side by side, and those that shift numbers (MultiTokenPredictionLayer of core 0.16).
PREDICTION_KERNELS = 14


class Gemm(NamedTuple):
    """A batched matrix product ``[m, k] x [k, n]``; one multiply-add counts 2 FLOPs.

    ``is_attention`` marks the products of the attention core, which hold no weights; those
    ``in_eight_bits`` have two inputs of one byte an element and an output of two.

    A product of experts has *batch* weights of its own: ``rows`` names the size that is the rows of
    an expert, and ``weight_bytes`` is the traffic of these weights, or of their kept gradients.

    >>> Gemm("qkv", m=2048, n=4608, k=12288).flops
    231928233984
    """

    name: str
    m: int
    n: int
    k: int
    batch: int = 1
    is_attention: bool = False
    in_eight_bits: bool = False
    rows: Literal["", "m", "k"] = ""
    weight_bytes: int = 0

    @property
    def flops(self) -> int:
        """Operations of the product."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def num_elements(self) -> int:
        """Elements of both inputs and of the output."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    @property
    def num_outputs(self) -> int:
        """Elements of the output."""
        return self.batch * self.m * self.n


class ImplicitGemm(NamedTuple):
    """A convolution: the product ``[pixels, inputs x taps] x [inputs x taps, outputs]``.

    No window is laid out in memory: its traffic are the *moved* elements of its three tensors.

    >>> ImplicitGemm("3 x 3", pixels=56**2, inputs=64, outputs=64, taps=9, moved=438_272).flops
    231211008
    """

    name: str
    pixels: int
    inputs: int
    outputs: int
    taps: int
    moved: int

    @property
    def flops(self) -> int:
        """Operations of the product."""
        return 2 * self.pixels * self.inputs * self.outputs * self.taps


class FlashAttention(NamedTuple):
    """One fused attention call over *batch_heads* heads; a causal one skips the masked half.

    Of *ranks* that share its rows each has as many operations, and runs them in as many steps.
    One with a *window* skips what is outside of its band, too: the triangle of all tokens but so
    many; of ranks that gathered the tokens, those of the first ones have fewer operations, and the
    others wait for the one in the middle.  Forward is two products of ``s x s x d``; backward
    recomputes the scores and makes four more, 2.5 times the forward (Dao 2023, arXiv 2307.08691,
    section 4.1).  Values of *value_dim*, if they are not as wide as queries and keys, are in one
    product forward and two backward.

    >>> FlashAttention("band", 1, 8, 1, window=2).flops, 2 * (8**2 - 6**2)
    (56, 56)
    >>> two = FlashAttention("band", 1, 8, 1, window=2, ranks=2)
    >>> two.flops_of(0) + two.flops_of(1), two.flops
    (56, 32)
    """

    name: str
    batch_heads: int
    seq_len: int
    head_dim: int
    backward: bool = False
    causal: bool = True
    window: int = 0
    ranks: int = 1
    value_dim: int = 0

    @property
    def has_shared_window(self) -> bool:
        """Whether it is attention to a window of gathered tokens."""
        return self.window > 0 and self.ranks > 1

    @property
    def flops(self) -> int:
        """Operations with the masked half left out, of a rank that has most."""
        return self.flops_of(self.ranks - 1)

    def flops_of(self, rank: int) -> int:
        """Operations with the masked half left out, of one of the *ranks*."""
        wide, deep = self.head_dim, self.value_dim or self.head_dim
        halves = (3 * wide + 2 * deep if self.backward else wide + deep) * (2 - self.causal)
        if self.has_shared_window:
            rows = self.seq_len // (2 * self.ranks)
            starts = rank * rows, (2 * self.ranks - 1 - rank) * rows
            seen = sum(_twice_seen(start, rows, self.window) for start in starts)
            return halves * self.batch_heads * seen
        skipped = self.seq_len - self.window if self.window else 0
        return halves * self.batch_heads * (self.seq_len**2 - skipped**2) // self.ranks


def _twice_seen(start: int, rows: int, window: int) -> int:
    """Return twice the scores of *rows* from *start* on, of which each sees a *window*.

    >>> _twice_seen(0, 8, 2), 8**2 - 6**2, _twice_seen(8, 8, 2)
    (28, 28, 32)
    """
    if 0 < start >= window - 1:
        return 2 * rows * window
    end = start + rows
    return end**2 - start**2 - max(end - window, 0) ** 2


class MemoryBound(NamedTuple):
    """Kernels whose time is their traffic: *size_bytes* read and written.

    Of *strided* ones it is at least that of as many elements, made one by one.
    """

    name: str
    size_bytes: int
    strided: int = 0


class KernelLaunches(NamedTuple):
    """Start and tail of kernels, in which the device does no useful work."""

    name: str
    num_kernels: int


def end_launches(kind: BlockKind, model: ModelSpec) -> tuple[KernelLaunches, ...]:
    """Return the starts of a head's kernels, forward or backward, or of those ahead of layers.

    A head has a loss of the next token, and of each further one that is predicted.
    """
    number = model.prediction_layers
    if kind == PREDICTIONS:
        return (KernelLaunches("prediction", PREDICTION_KERNELS),) * number
    if kind in LAYERS:
        return ()
    mlm = (KernelLaunches("mlm", MLM_KERNELS),) * model.mlm_head
    return (*(KernelLaunches("head", HEAD_KERNELS),) * (1 + number), *mlm)


class HostPasses(NamedTuple):
    """Host time of passes through a layer, some of which the device waits for.

    *experts* are the rank's, ``casts`` the kernels that cast rows of one by themselves.
    """

    name: str
    num_passes: int
    experts: int = 0
    casts: int = 0


class Collective(NamedTuple):
    """A collective over *axis*; ``size_bytes`` is the larger of a rank's two buffers.

    ``hides_under`` is the product that may run at the same time.
    """

    name: str
    op: CollectiveOp
    size_bytes: int
    axis: MeshAxis
    hides_under: Gemm | None = None

    @property
    def collectives(self) -> tuple[tuple[CollectiveOp, int, int], ...]:
        """The operation, the size and how often it runs."""
        return ((self.op, self.size_bytes, 1),)


class RingMessages(NamedTuple):
    """Messages to the next rank on the ring of *axis*, in *steps* of attention that may hide them.

    ``beside_bytes`` go at the same time in a message of their own; ``op`` is what carries them.
    """

    name: str
    op: CollectiveOp
    size_bytes: int
    axis: MeshAxis
    steps: int
    beside_bytes: int = 0
    hides_under: FlashAttention | None = None

    @property
    def collectives(self) -> tuple[tuple[CollectiveOp, int, int], ...]:
        """The operation, the size and the number of the messages of one size."""
        sizes = filter(None, (self.size_bytes, self.beside_bytes))
        return tuple((self.op, size, self.steps) for size in sizes if self.steps)


Operator = (
    Gemm
    | ImplicitGemm
    | FlashAttention
    | MemoryBound
    | KernelLaunches
    | HostPasses
    | Collective
    | RingMessages
)


class BlockOperators(NamedTuple):
    """What one microbatch runs in one block: an embedding, a layer or a head.

    ``recompute`` runs in backward before ``backward``.
    """

    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    recompute: tuple[Operator, ...] = ()


class ExpertOperators(NamedTuple):
    """What of `BlockOperators` runs between an exchange with ranks of experts and the one back.

    ``backward`` makes gradients of inputs, ``weights`` those of experts' weights, which may run
    later, as may ``other_weights`` of products before the exchange.
    """

    forward: tuple[Operator, ...] = ()
    backward: tuple[Operator, ...] = ()
    weights: tuple[Operator, ...] = ()
    other_weights: tuple[Operator, ...] = ()


def is_exchange(operator: Operator) -> bool:
    """Return whether tokens go to the ranks of experts, or back."""
    if not isinstance(operator, Collective):
        return False
    return (operator.op, operator.axis) == (CollectiveOp.ALL_TO_ALL, ExpertAxis.EP)


def sum_flops(operators: tuple[Operator, ...]) -> int:
    """Return the FLOPs of all matrix products among *operators*."""
    products = Gemm | ImplicitGemm | FlashAttention
    return sum(item.flops for item in operators if isinstance(item, products))
