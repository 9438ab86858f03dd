"""Operators of a training step: shapes, FLOPs and bytes, without times."""

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

# Kernels forward and backward: embedding (index, add, dropout), copy; the final norm's are among
# those of the head.
KERNELS = {EMBEDDING: (3, 3), COPY: (1, 0), COPY_OF_STREAMS: (1, 0), FINAL_NORM: (0, 0)}
# Kernels of a head beside its GEMMs: norm, cast, max, subtract, exp, sum, divide and their
# gradients; BERT's has a dense layer, activation, pooler, tanh and classifier more.
HEAD_KERNELS = 8
MLM_KERNELS = 5
# Kernels of an MTP layer beside its transformer layer: embedding, three norms, concatenation, and
# rolling of ids (MultiTokenPredictionLayer of core 0.16).
PREDICTION_KERNELS = 14


class Gemm(NamedTuple):
    """A batched matrix product ``[m, k] x [k, n]``; one multiply-add counts 2 FLOPs.

    ``is_attention`` marks the GEMMs of core attention, which have no weights; ``in_eight_bits``
    ones have fp8 inputs and a 16-bit output.

    A grouped GEMM has *batch* experts with a weight each: ``rows`` names the size that is an
    expert's tokens, and ``weight_bytes`` is the traffic of the weights or their gradients.

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
    """A convolution: the implicit GEMM ``[pixels, inputs x taps] x [inputs x taps, outputs]``.

    No im2col: its traffic are the *moved* elements of its three tensors.

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

    Context-parallel *ranks* have equally many operations, in as many steps.  A sliding *window*
    skips what is outside of its band, the triangle of all tokens but so many; of ranks with
    gathered tokens the first have fewer operations, and the others wait for the one in the middle.
    Forward is two GEMMs of ``s x s x d``; backward recomputes the scores and runs four more, 2.5
    times the forward (Dao 2023, arXiv 2307.08691, section 4.1).  *value_dim*, if not the head dim
    of queries and keys, is in one GEMM forward and two backward.

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
        """True for sliding-window attention to tokens gathered over context-parallel ranks."""
        return self.window > 0 and self.ranks > 1

    @property
    def flops(self) -> int:
        """Operations without the masked half, of the rank with most."""
        return self.flops_of(self.ranks - 1)

    def flops_of(self, rank: int) -> int:
        """Operations without the masked half, of one of the *ranks*."""
        wide, deep = self.head_dim, self.value_dim or self.head_dim
        halves = (3 * wide + 2 * deep if self.backward else wide + deep) * (2 - self.causal)
        if self.has_shared_window:
            # Each rank has an early and a late chunk of the tokens, so that causal work is
            # balanced.
            rows = self.seq_len // (2 * self.ranks)
            starts = rank * rows, (2 * self.ranks - 1 - rank) * rows
            seen = sum(_twice_seen(start, rows, self.window) for start in starts)
            return halves * self.batch_heads * seen
        # A sliding window leaves out a triangle of side ``seq_len - window``.
        skipped = self.seq_len - self.window if self.window else 0
        return halves * self.batch_heads * (self.seq_len**2 - skipped**2) // self.ranks


def _twice_seen(start: int, rows: int, window: int) -> int:
    """Return twice the number of unmasked scores of *rows* from *start* on, with a *window*.

    >>> _twice_seen(0, 8, 2), 8**2 - 6**2, _twice_seen(8, 8, 2)
    (28, 28, 32)
    """
    if 0 < start >= window - 1:
        return 2 * rows * window
    end = start + rows
    return end**2 - start**2 - max(end - window, 0) ** 2


class MemoryBound(NamedTuple):
    """Memory-bound kernels: *size_bytes* read and written.

    *strided* elements are handled one by one, which may take longer than the bytes.
    """

    name: str
    size_bytes: int
    strided: int = 0


class KernelLaunches(NamedTuple):
    """Launch gaps of kernels, in which the device is idle."""

    name: str
    num_kernels: int


def end_launches(kind: BlockKind, model: ModelSpec) -> tuple[KernelLaunches, ...]:
    """Return the kernel launches of a head, forward or backward, or of MTP layers.

    A head has a loss of the next token, and one of each MTP layer.
    """
    number = model.prediction_layers
    if kind == PREDICTIONS:
        return (KernelLaunches("prediction", PREDICTION_KERNELS),) * number
    if kind in LAYERS:
        return ()
    mlm = (KernelLaunches("mlm", MLM_KERNELS),) * model.mlm_head
    return (*(KernelLaunches("head", HEAD_KERNELS),) * (1 + number), *mlm)


class HostPasses(NamedTuple):
    """Host (CPU) time of passes through a layer, for part of which the device waits.

    *experts* are the rank's local experts, ``casts`` the cast kernels of single experts.
    """

    name: str
    num_passes: int
    experts: int = 0
    casts: int = 0


class Collective(NamedTuple):
    """A collective over *axis*; ``size_bytes`` is the larger of a rank's two buffers.

    ``overlapped_with`` is the GEMM that may overlap it.
    """

    name: str
    op: CollectiveOp
    size_bytes: int
    axis: MeshAxis
    overlapped_with: Gemm | None = None

    @property
    def collectives(self) -> tuple[tuple[CollectiveOp, int, int], ...]:
        """Operation, size in bytes and number of calls."""
        return ((self.op, self.size_bytes, 1),)


class RingMessages(NamedTuple):
    """Messages to the next rank on the ring of *axis*, in *steps* of attention that overlap them.

    ``beside_bytes`` are a second message at the same time; ``op`` is the collective or p2p.
    """

    name: str
    op: CollectiveOp
    size_bytes: int
    axis: MeshAxis
    steps: int
    beside_bytes: int = 0
    overlapped_with: FlashAttention | None = None

    @property
    def collectives(self) -> tuple[tuple[CollectiveOp, int, int], ...]:
        """Operation, size in bytes and number of the messages of each size."""
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
    """Operators of one microbatch in one block: an embedding, a layer or a head.

    ``recompute`` runs before ``backward``.
    """

    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    recompute: tuple[Operator, ...] = ()


class ExpertOperators(NamedTuple):
    """Operators between dispatch and combine, the all-to-alls of expert parallelism.

    ``backward`` is the experts' dgrad, ``weights`` their wgrad, which may be delayed, as may
    ``other_weights``, the wgrad of linear layers before dispatch.
    """

    forward: tuple[Operator, ...] = ()
    backward: tuple[Operator, ...] = ()
    weights: tuple[Operator, ...] = ()
    other_weights: tuple[Operator, ...] = ()


def is_expert_all_to_all(operator: Operator) -> bool:
    """Return True for expert parallelism's all-to-all: dispatch or combine."""
    if not isinstance(operator, Collective):
        return False
    return (operator.op, operator.axis) == (CollectiveOp.ALL_TO_ALL, ExpertAxis.EP)


def sum_flops(operators: tuple[Operator, ...]) -> int:
    """Return the FLOPs of all matrix products among *operators*."""
    products = Gemm | ImplicitGemm | FlashAttention
    return sum(item.flops for item in operators if isinstance(item, products))
