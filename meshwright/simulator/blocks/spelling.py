"""How families of transformers write a layer, where stacks run each of its operators as it stands.

What differs are tensors that live and are kept, not parameters or products (transformers 5,
`modeling_*.py` of each family).
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from meshwright.hwprofiles import Kernels, Strategy
from meshwright.simulator.blocks.shape import BlockShape, fuses_qkv
from meshwright.simulator.graph import (
    Block,
    Dim,
    Gradient,
    NormFormula,
    RotaryFormula,
    Tensor,
    copy,
    cut,
)
from meshwright.simulator.layout import Stage, receives_streams
from meshwright.simulator.model import AnyModel, ModelSpec

INDEX_BYTES = 8
ANGLE_BYTES = 4  # of an element of a head: cosine or sine


class Packing(StrEnum):
    """How one product of queries, keys and values is cut apart: NONE where there are three.

    COPIES are of keys and values alone, REPEATED ones of all, with keys and values for each head.
    CONTIGUOUS makes each of the three one stretch of its own (FusedQKVLinear of torchtitan 0.3).
    """

    NONE = "none"
    CHUNKS = "chunks"
    SLICES = "slices"
    COPIES = "copies"
    REPEATED = "repeated"
    CONTIGUOUS = "contiguous"


class Spelling(NamedTuple):
    """How a family writes a layer.

    Args:
        norm: Formula of RMS norm.
        rotary: Formula of rotary positions.
        packing: How queries, keys and values come apart.
        fuses_mlp: A gate and what it opens are one product.
        names_attention: What attention makes has a name until the layer returns.
        norms_first: Of an MLP beside attention all norms come first, and have names until the layer
            returns; what attention makes is added in place.
    """

    norm: NormFormula = NormFormula.LLAMA
    rotary: RotaryFormula = RotaryFormula.LLAMA
    packing: Packing = Packing.NONE
    fuses_mlp: bool = False
    norms_first: bool = False
    names_attention: bool = False

    @property
    def fuses_qkv(self) -> bool:
        """Whether queries, keys and values are one product."""
        return self.packing is not Packing.NONE


SPELLINGS = {
    "llama": Spelling(),
    "gemma": Spelling(norm=NormFormula.GEMMA),
    "olmo2": Spelling(norm=NormFormula.OLMO2),
    "phi3": Spelling(rotary=RotaryFormula.PHI3, packing=Packing.SLICES, fuses_mlp=True),
    "glm4": Spelling(rotary=RotaryFormula.GLM4, fuses_mlp=True),
    "glm4_moe": Spelling(rotary=RotaryFormula.NEOX),
    "gpt_oss": Spelling(norm=NormFormula.OLMO2, rotary=RotaryFormula.HALVES),
    "llama4": Spelling(norm=NormFormula.LLAMA4, rotary=RotaryFormula.COMPLEX, names_attention=True),
    "gpt_neox": Spelling(rotary=RotaryFormula.NEOX, packing=Packing.CHUNKS),
    "falcon": Spelling(packing=Packing.COPIES, norms_first=True),
    "falcon-groups": Spelling(packing=Packing.REPEATED, norms_first=True),
}


def spelling_of(shape: BlockShape) -> Spelling:
    """Return how a stack writes layers: as their family does in transformers, or as most do.

    Where kernels are not as they stand, all that is left of it are fused products.
    """
    stack, model = shape.stack, shape.model
    is_eager = stack.kernels is Kernels.EAGER
    if not stack.transformers_layers:
        if fuses_qkv(shape) and not stack.megatron_layers:
            halves = model.qk_norm == "head"  # Qwen3
            turned = RotaryFormula.INDEXED_COS_SIN if halves else RotaryFormula.INDEXED_COMPLEX
            return Spelling(rotary=turned, packing=Packing.CONTIGUOUS)
        is_qwen3 = model.qk_norm == "head" and not fuses_qkv(shape)
        has_table = is_qwen3 and stack.kernels is not Kernels.FUSED
        turned = RotaryFormula.TABLE if has_table else RotaryFormula.LLAMA
        return Spelling(rotary=turned, fuses_mlp=stack.megatron_layers)
    found = SPELLINGS[model.spelling]
    if not fuses_qkv(shape):
        found = found._replace(packing=Packing.NONE)
    if is_eager:
        return found
    packing = Packing.CHUNKS if found.fuses_qkv else Packing.NONE
    return Spelling(packing=packing, fuses_mlp=found.fuses_mlp)


def latent_rotary(shape: BlockShape) -> RotaryFormula:
    """Return how heads of latent attention turn; of transformers DeepSeek-V2's by complex numbers.

    Of both families this one alone has scores by a softmax.
    """
    model = shape.model
    if not shape.stack.transformers_layers:
        return spelling_of(shape).rotary
    is_second = model.experts is not None and model.experts.scores == "softmax"
    return RotaryFormula.CAST_COMPLEX if is_second else RotaryFormula.NEIGHBOURS


def layer_table_bytes(shape: BlockShape) -> int:
    """Return the bytes of the table of angles that a layer has of its own, if it has one.

    A complex number in fp32 for each token and each pair of a head, or a cosine and a sine of each
    half (`RoPE` of torchtitan 0.3, models/common/rope.py).
    """
    if not isinstance(shape.trained, ModelSpec) or shape.model.positions != "rotary":
        return 0
    formula, latent = spelling_of(shape).rotary, shape.model.latent
    width = shape.model.head_dim if latent is None else latent.rotary_head_dim
    repeats = {RotaryFormula.INDEXED_COMPLEX: 1, RotaryFormula.INDEXED_COS_SIN: 2}.get(formula, 0)
    return shape.seq_len * width * ANGLE_BYTES * repeats


def angle_table_bytes(shape: BlockShape) -> int:
    """Return the bytes of the table of angles that layers of a stage read, if they share one.

    Of a sequence's positions that is ``freqs_cis`` or ``rope_cache`` of torchtitan 0.2 (models/
    {llama3,deepseek_v3,qwen3}/model), also of sequences that are cut; cosines and sines in the
    activations' format, or complex numbers, of transformers; the angles, each twice, that
    RotaryEmbedding of Megatron-Core caches for a chunk (core/models/common/embeddings, core 0.16),
    whose latent attention has its own.  Replicas in one process are of no framework's layers.
    """
    model, stack = shape.trained, shape.stack
    if not isinstance(model, ModelSpec) or model.positions != "rotary" or layer_table_bytes(shape):
        return 0
    if stack.strategy is not Strategy.MESH:
        return 0
    latent, formula = model.latent, spelling_of(shape).rotary
    width = model.rotary_dim if latent is None else latent.rotary_head_dim
    if stack.megatron_layers:
        return 0 if latent else shape.seq_len // shape.cp * width * ANGLE_BYTES
    if not stack.transformers_layers:
        repeats = 2 if latent is None and model.qk_norm == "head" else 1
        return shape.seq_len * width * ANGLE_BYTES * repeats
    if latent is not None:
        formula = latent_rotary(shape)
    if formula in {RotaryFormula.COMPLEX, RotaryFormula.CAST_COMPLEX}:
        return shape.seq_len * width * ANGLE_BYTES
    number = width if formula is RotaryFormula.HALVES else 2 * width
    element = ANGLE_BYTES if shape.casts_weights else shape.element_bytes
    return shape.seq_len * number * element


def num_angle_tables(model: AnyModel, stages: Iterable[Stage]) -> int:
    """Return how many tables of a sequence's angles *stages* have: one each, or as many tokens'.

    Behind layers that predict further tokens a stage takes the tokens of all streams for those of
    one sequence (`get_rotary_seq_len` of Megatron-Core's RotaryEmbedding).
    """
    further = model.prediction_layers if isinstance(model, ModelSpec) else 0
    return sum(1 + further * receives_streams(model, stage) for stage in stages)


def heads_apart(block: Block, x: Tensor, packing: Packing, *parts: Dim) -> list[Tensor]:
    """Return queries, keys and values of their common product."""
    if packing is Packing.CONTIGUOUS:
        found = cut(block, x, *parts)
        return [copy(block, each, f"{each.name} apart", copies_back=False) for each in found]
    if packing not in {Packing.COPIES, Packing.REPEATED}:
        return cut(block, x, *parts, by_slices=packing is Packing.SLICES)
    block.argument(x)
    (query,) = cut(block, x, parts[0])
    pairs = [_picked(block, x, part) for part in parts[1:]]
    if packing is Packing.COPIES:
        return [query, *pairs]
    query = copy(block, query, "queries apart", copies_back=False)
    repeated = [copy(block, each, f"{each.name} of heads", like=query) for each in pairs]
    block.hold(*pairs)
    return [query, *repeated]


def _picked(block: Block, x: Tensor, part: Dim) -> Tensor:
    """Return the last *part* of *x* by an index: a copy, whose gradient is as large as *x*."""
    out = x.like(part.name, dims=(*x.dims[:-1], part), at={})
    index = x.like(f"{part.name} index", dims=(), at={}, width=INDEX_BYTES)
    moved = block.traffic(out, out)
    return block.add([x], [out, index], [Gradient(x, (index,), (moved,))], moved)
