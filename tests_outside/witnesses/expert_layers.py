"""Small expert layers: their sizes, our derivation of them, and counts of a framework's own."""

from collections.abc import Callable
from unittest.mock import patch

import torch
from block_graph import as_measured
from block_witness import Given, Measured, count_pass
from torch import Tensor

from meshwright.hwprofiles import (
    Attention,
    Kernels,
    Precision,
    Recompute,
    RecomputeModule,
    load_stack,
)
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.simulator.blocks import BlockShape, BorderGradients, walk
from meshwright.simulator.model import EXPERT_LAYER, BlockKind, Experts, LatentAttention, ModelSpec
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.programs.megatron import default_dtype

NUM_SEQUENCES, TOKENS = 2, 1024
SPEC = ModelSpec(
    name="small",
    num_layers=2,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=512,
    seq_len=TOKENS,
    gated_mlp=True,
    tied_embeddings=False,
    positions="rotary",
    norm="rmsnorm",
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    dropout=False,
    experts=Experts(num_experts=8, experts_per_token=2, hidden_size=384),
)
SHARED = Experts(
    num_experts=8,
    experts_per_token=2,
    hidden_size=384,
    shared_hidden_size=384,
    scores="sigmoid",
)
# Qwen2-MoE's: a gate weighs what shared experts make.
GATED = SPEC.model_copy(
    update={
        "attention_bias": True,
        "experts": SPEC.experts.model_copy(
            update={"shared_hidden_size": 512, "shared_gate": True, "casts_shares": True}
        ),
    }
)
# Qwen3's heads: wider together than tokens, with norms.
HEADS = SPEC.model_copy(
    update={
        "head_dim": 64,
        "qk_norm": "head",
        "experts": SPEC.experts.model_copy(update={"casts_shares": True}),
    }
)
# As Megatron-LM's tests have them: no gates, in experts, shared ones and MLPs.
PLAIN = SPEC.model_copy(
    update={
        "gated_mlp": False,
        "positions": "learned",
        "norm": "layernorm",
        "experts": SPEC.experts.model_copy(update={"activation": "gelu"}),
    }
)
PLAIN_SHARING = PLAIN.model_copy(
    update={"experts": SHARED.model_copy(update={"activation": "gelu", "shared_hidden_size": 128})}
)
NEMOTRON = SPEC.model_copy(
    update={
        "gated_mlp": False,
        "activation": "squared relu",
        "experts": SHARED.model_copy(update={"activation": "squared relu"}),
    }
)
SHARING = SPEC.model_copy(update={"experts": SHARED})
# Of gpt-oss: sinks, experts with biases and bounds, and windows, here of all tokens.
OSS = SPEC.model_copy(
    update={
        "head_dim": 64,
        "attention_bias": True,
        "output_bias": True,
        "window": TOKENS,
        "layer_pattern": "WF",
        "attention_sinks": True,
        "spelling": "gpt_oss",
        "experts": Experts(
            num_experts=8,
            experts_per_token=2,
            hidden_size=384,
            scores="softmax of chosen",
            bias=True,
            activation="clamped",
            casts_shares=True,
        ),
    }
)
# Of Llama 4: layers with positions attend in chunks, here of all tokens.
LLAMA4 = SPEC.model_copy(
    update={
        "window": TOKENS,
        "chunked_window": True,
        "layer_pattern": "WF",
        "rotary_layers": "windowed",
        "spelling": "llama4",
        "experts": Experts(
            num_experts=8,
            experts_per_token=1,
            hidden_size=384,
            shared_hidden_size=384,
            scores="sigmoid",
            weighs_inputs=True,
        ),
    }
)
WEIGHING = SPEC.model_copy(update={"experts": LLAMA4.experts})
# The same in several chunks, of which the last is filled up or not.
CHUNKED = LLAMA4.model_copy(update={"window": TOKENS // 4, "qk_norm": "unweighted"})
FILLED = LLAMA4.model_copy(update={"window": 384})
SCOUT = LLAMA4.model_copy(update={"qk_norm": "unweighted"})
# Heads of one width: attention of a CPU knows no other.
LATENT = SHARING.model_copy(
    update={
        "num_kv_heads": 8,
        "latent": LatentAttention(
            query_rank=96, kv_rank=64, plain_head_dim=24, rotary_head_dim=8, value_head_dim=32
        ),
    }
)
Run = Callable[[Tensor], Tensor]


def derived(  # noqa: PLR0913 -- what a layer is, and what its ranks are
    model: ModelSpec,
    stack: str,
    tp: int = 1,
    ep: int = 1,
    etp: int = 1,
    *,
    kind: BlockKind = EXPERT_LAYER,
    modules: tuple[RecomputeModule, ...] = (),
    recompute: Recompute | None = None,
) -> Measured:
    """Return the graph's derivation of an expert layer, of which *modules* are recomputed."""
    profile = load_stack(stack).model_copy(update={"kernels": Kernels.EAGER})
    job = TrainingJob(
        model=model, global_batch_size=NUM_SEQUENCES, seq_len=TOKENS, precision=Precision.BF16
    )
    attention = Attention.UNFUSED if profile.megatron_layers else Attention.FLASH
    plan = ResolvedPlan(
        tp=tp,
        dp=max(1, ep * etp // tp),
        ep=ep,
        etp=etp,
        sequence_parallel=tp > 1,
        microbatch_size=NUM_SEQUENCES,
        stages=(2,),
        attention=attention,
        recompute=recompute or (Recompute.SELECTIVE if modules else Recompute.NONE),
        recompute_modules=modules,
    )
    shape = BlockShape.of(job, plan, profile)
    return as_measured(walk(shape, kind, ending=BorderGradients(keeps_gradients=True)))


def counts(x: Tensor, bins: int, **_: object) -> Tensor:
    """Return a histogram of whole numbers, as on a GPU."""
    return x.new_empty(bins)


def counted(make: Callable[[], Run], first: int, second: int) -> Measured:
    """Return the counts of a layer on tokens in the order of its framework."""
    with fake_cluster(0, 1), patch.object(torch, "histc", counts):
        with default_dtype(torch.bfloat16):
            layer = make()
        return count_pass(layer, [Given((first, second, SPEC.hidden_size))], RankOracle({}))


def module_of(run: Run) -> torch.nn.Module:
    """Return the one layer that *run* passes through."""
    cells = [each.cell_contents for each in run.__closure__]
    (layer,) = (each for each in cells if isinstance(each, torch.nn.Module))
    return layer
