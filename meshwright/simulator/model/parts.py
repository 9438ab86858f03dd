"""Variants of transformer parts: routed experts (MoE), and multi-head latent attention (MLA)."""

from typing import Literal

from meshwright.records import Field, model_validator, rare
from meshwright.simulator.model.described import MAX_LAYERS, MAX_WIDTH, Fields, ProductSize

MAX_EXPERTS = 16_384


class Experts(Fields):
    """Routed experts (MoE) instead of the MLP: sizes and options of a layer's experts.

    ``hidden_size`` is the width of one expert, ``shared_hidden_size`` that of all shared ones
    together, through which every token goes; with ``shared_gate`` a product with one output weighs
    what they make.  With ``casts_shares`` transformers weighs what experts make in the format of
    tokens, as it does of Qwen's, and else in fp32.  ``routing_bias`` is a number an expert that
    routing learns without a gradient (DeepSeek-V3, arXiv 2412.19437, 2.1.2).  A token's experts
    come from ``groups_per_token`` of ``num_groups`` groups.  The first ``first_dense_layers`` have
    an MLP; of the others each ``layer_step``-th, counted from the model's first, has experts.

    With ``scores = "softmax of chosen"`` the softmax is over a token's own experts (gpt-oss), with
    ``weighs_inputs`` a share weighs what its expert reads, not what it makes (Llama 4).  With
    ``bias`` the router and both products of an expert have one; the ``"clamped"`` activation bounds
    gate and value, adds 1 to the value and opens by ``g sigmoid(1.702 g)`` (gpt-oss).  Experts by
    ``"gelu"`` or ``"squared relu"`` have no gate, nor have shared ones and MLPs beside them.

    >>> Experts(num_experts=8, experts_per_token=2, hidden_size=14336).shared_hidden_size
    0
    """

    num_experts: int = Field(ge=1, le=MAX_EXPERTS)
    experts_per_token: int = Field(ge=1, le=MAX_EXPERTS)
    hidden_size: int = Field(ge=1, le=MAX_WIDTH)
    shared_hidden_size: int = Field(default=0, ge=0, le=MAX_WIDTH)
    shared_gate: bool = False
    scores: Literal["softmax", "sigmoid", "softmax of chosen"] = "softmax"
    routing_bias: bool = False
    casts_shares: bool = rare(usual=False)
    bias: bool = rare(usual=False)
    activation: Literal["silu", "clamped", "gelu", "squared relu"] = rare("silu")
    weighs_inputs: bool = rare(usual=False)
    num_groups: int = Field(default=1, ge=1, le=MAX_EXPERTS)
    groups_per_token: int = Field(default=1, ge=1, le=MAX_EXPERTS)
    first_dense_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    layer_step: int = Field(default=1, ge=1, le=MAX_LAYERS)

    @property
    def gated(self) -> bool:
        """Whether experts are gated, as SwiGLU is."""
        return self.activation in {"silu", "clamped"}

    @property
    def num_parts(self) -> int:
        """Outputs of an expert's first linear layer over its width: 2 with a gate."""
        return 1 + self.gated

    @property
    def routed_in_full(self) -> bool:
        """Whether transformers runs the router in fp32, as DeepSeek's and GLM-4.5's code does.

        With softmax scores only DeepSeek-V2 has shared experts without a gate.
        """
        return self.scores == "sigmoid" or bool(self.shared_hidden_size and not self.shared_gate)

    @property
    def leaves_shares(self) -> bool:
        """Whether transformers does not normalise the top-k scores to 1 (DeepSeek-V2)."""
        return self.routed_in_full and self.scores == "softmax"

    def has_layer(self, number: int) -> bool:
        """Return True if layer *number*, from 0, has experts."""
        return number >= self.first_dense_layers and (number + 1) % self.layer_step == 0

    @model_validator(mode="after")
    def _check_fields_agree(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} are more than the "
                f"{self.num_experts} experts"
            )
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_experts={self.num_experts} is not divisible by num_groups={self.num_groups}"
            )
        if self.groups_per_token > self.num_groups:
            raise ValueError(
                f"groups_per_token={self.groups_per_token} are more than the "
                f"{self.num_groups} groups"
            )
        if self.weighs_inputs and self.experts_per_token > 1:
            raise ValueError(
                f"weighs_inputs=true goes with one expert a token; "
                f"experts_per_token={self.experts_per_token}"
            )
        if self.shared_gate and not self.shared_hidden_size:
            raise ValueError("shared_gate=true needs a shared_hidden_size")


class LatentAttention(Fields):
    """Widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1).

    Keys and values of all heads are projected from a latent of ``kv_rank``, queries from one of
    ``query_rank``, or from the tokens where it is 0.  A head's queries and keys have
    ``plain_head_dim`` dims without and ``rotary_head_dim`` with RoPE; the keys' RoPE dims are
    shared by all heads.

    >>> LatentAttention(kv_rank=512, plain_head_dim=128, rotary_head_dim=64, value_head_dim=128)\
.query_head_dim
    192
    """

    query_rank: int = Field(default=0, ge=0, le=MAX_WIDTH)
    kv_rank: int = Field(ge=1, le=MAX_WIDTH)
    plain_head_dim: int = Field(ge=1, le=MAX_WIDTH)
    rotary_head_dim: int = Field(ge=1, le=MAX_WIDTH)
    value_head_dim: int = Field(ge=1, le=MAX_WIDTH)

    @property
    def query_head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.plain_head_dim + self.rotary_head_dim


def product_sizes(
    head_dim: int, hidden_size: int, ffn_hidden_size: int, experts: Experts | None, tp: int
) -> tuple[ProductSize, ...]:
    """Return the GEMM dims of a transformer on one of *tp* ranks."""
    widths = {"hidden_size": hidden_size, "ffn_hidden_size": ffn_hidden_size}
    if experts is not None:
        widths["experts.hidden_size"] = experts.hidden_size
    return (
        ProductSize("head dim", head_dim, is_linear=False),
        *(ProductSize(f"{name} / tp", size // tp) for name, size in widths.items()),
    )
