"""Layer code of model families (QKV split, RMS norm, RoPE), and the RoPE caches it needs.

Families differ in saved and temporary tensors, not in parameters or GEMMs (transformers 5,
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
from meshwright.simulator.layout import Stage, receives_mtp_states
from meshwright.simulator.model import AnyModel, ModelSpec

INDEX_BYTES = 8
ANGLE_BYTES = 4  # of an element of a head: cosine or sine


class Packing(StrEnum):
    """Split of a fused qkv output into queries, keys and values: NONE without a fused GEMM.

    COPIES copies keys and values alone, REPEATED all three, keys and values once for each head.
    CONTIGUOUS makes all three contiguous (FusedQKVLinear of torchtitan 0.3).
    """

    NONE = "none"
    CHUNKS = "chunks"
    SLICES = "slices"
    COPIES = "copies"
    REPEATED = "repeated"
    CONTIGUOUS = "contiguous"


class Spelling(NamedTuple):
    """Layer code of a model family.

    Args:
        norm: Formula of RMS norm.
        rotary: Formula of RoPE.
        packing: Split of a fused qkv output.
        fuses_mlp: Gate and up projection are one GEMM.
        names_attention: A local variable keeps attention's output until the layer returns.
        norms_first: In a parallel layer all norms come first, in variables until the layer
            returns; attention's output is added in place.
    """

    norm: NormFormula = NormFormula.LLAMA
    rotary: RotaryFormula = RotaryFormula.LLAMA
    packing: Packing = Packing.NONE
    fuses_mlp: bool = False
    norms_first: bool = False
    names_attention: bool = False

    @property
    def fuses_qkv(self) -> bool:
        """True where queries, keys and values are one GEMM."""
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


def layer_code_of(shape: BlockShape) -> Spelling:
    """Return the layer code of a stack: that of the family in transformers, or the usual one.

    With compiled or fused kernels, only fused GEMMs are left of it.
    """
    stack, model = shape.stack, shape.model
    is_eager = stack.kernels is Kernels.EAGER
    if not stack.transformers_layers:
        if fuses_qkv(shape) and not stack.megatron_layers:
            halves = model.qk_norm == "head"  # Qwen3
            formula = RotaryFormula.INDEXED_COS_SIN if halves else RotaryFormula.INDEXED_COMPLEX
            return Spelling(rotary=formula, packing=Packing.CONTIGUOUS)
        is_qwen3 = model.qk_norm == "head" and not fuses_qkv(shape)
        has_table = is_qwen3 and stack.kernels is not Kernels.FUSED
        formula = RotaryFormula.TABLE if has_table else RotaryFormula.LLAMA
        return Spelling(rotary=formula, fuses_mlp=stack.megatron_layers)
    layer_code = SPELLINGS[model.spelling]
    if not fuses_qkv(shape):
        layer_code = layer_code._replace(packing=Packing.NONE)
    if is_eager:
        return layer_code
    packing = Packing.CHUNKS if layer_code.fuses_qkv else Packing.NONE
    return Spelling(packing=packing, fuses_mlp=layer_code.fuses_mlp)


def latent_rotary(shape: BlockShape) -> RotaryFormula:
    """Return the RoPE formula of latent attention; in transformers DeepSeek-V2's is complex.

    Softmax router scores tell DeepSeek-V2 from V3.
    """
    model = shape.model
    if not shape.stack.transformers_layers:
        return layer_code_of(shape).rotary
    is_second = model.experts is not None and model.experts.scores == "softmax"
    return RotaryFormula.CAST_COMPLEX if is_second else RotaryFormula.NEIGHBOURS


def layer_rope_cache_bytes(shape: BlockShape) -> int:
    """Return the bytes of a layer's own RoPE cache, if it has one.

    It has a complex number in fp32 for each token and pair of a head, or a cosine and a sine
    (`RoPE` of torchtitan 0.3, models/common/rope.py).
    """
    if not isinstance(shape.trained, ModelSpec) or shape.model.positions != "rotary":
        return 0
    formula, latent = layer_code_of(shape).rotary, shape.model.latent
    width = shape.model.head_dim if latent is None else latent.rotary_head_dim
    repeats = {RotaryFormula.INDEXED_COMPLEX: 1, RotaryFormula.INDEXED_COS_SIN: 2}.get(formula, 0)
    return shape.seq_len * width * ANGLE_BYTES * repeats


def rope_cache_bytes(shape: BlockShape) -> int:
    """Return the bytes of the RoPE cache that the layers of a stage share, if they do.

    It is ``freqs_cis`` or ``rope_cache`` of torchtitan 0.2 for all positions (models/{llama3,
    deepseek_v3,qwen3}/model), also under context parallelism; cosines and sines in the
    activations' dtype, or complex numbers, of transformers; or the angles, each twice, that
    Megatron-Core's RotaryEmbedding caches for a rank's tokens (core/models/common/embeddings, core
    0.16), whose latent attention has its own.  DataParallel's replicas have none.
    """
    model, stack = shape.trained, shape.stack
    if (
        not isinstance(model, ModelSpec)
        or model.positions != "rotary"
        or layer_rope_cache_bytes(shape)
    ):
        return 0
    if stack.strategy is not Strategy.MESH:
        return 0
    latent, formula = model.latent, layer_code_of(shape).rotary
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


def num_rope_caches(model: AnyModel, stages: Iterable[Stage]) -> int:
    """Return the number of RoPE caches on *stages*, in sequences: one each, more behind MTP layers.

    A stage that receives the concatenated MTP hidden states takes them for one long sequence
    (`get_rotary_seq_len` of Megatron-Core's RotaryEmbedding).
    """
    mtp_layers = model.prediction_layers if isinstance(model, ModelSpec) else 0
    return sum(1 + mtp_layers * receives_mtp_states(model, stage) for stage in stages)


def heads_apart(block: Block, x: Tensor, packing: Packing, *parts: Dim) -> list[Tensor]:
    """Return queries, keys and values of a fused qkv output."""
    if packing is Packing.CONTIGUOUS:
        views = cut(block, x, *parts)
        return [copy(block, each, f"{each.name} apart", copies_back=False) for each in views]
    if packing not in {Packing.COPIES, Packing.REPEATED}:
        return cut(block, x, *parts, by_slices=packing is Packing.SLICES)
    block.argument(x)
    (query,) = cut(block, x, parts[0])
    keys_values = [_indexed(block, x, part) for part in parts[1:]]
    if packing is Packing.COPIES:
        return [query, *keys_values]
    query = copy(block, query, "queries apart", copies_back=False)
    repeated = [copy(block, each, f"{each.name} of heads", like=query) for each in keys_values]
    block.hold(*keys_values)
    return [query, *repeated]


def _indexed(block: Block, x: Tensor, part: Dim) -> Tensor:
    """Return *part* of *x* by advanced indexing: a copy, with a gradient as large as *x*."""
    out = x.like(part.name, dims=(*x.dims[:-1], part), at={})
    index = x.like(f"{part.name} index", dims=(), at={}, width=INDEX_BYTES)
    moved = block.traffic(out, out)
    return block.add([x], [out, index], [Gradient(x, (index,), (moved,))], moved)
