"""Expert layers of each framework's own code, against the graph's: every byte and FLOP.

Routing is balanced: by torchtitan's and Megatron-Core's own switches, and because nothing of what
transformers keeps depends on it.  On a rank without data a grouped product counts its padding, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from block_graph import as_measured
from block_witness import Given, Measured, count_pass
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict
from torchtitan.models.deepseek_v3.model import model as deepseek
from torchtitan.models.llama3.model import model as llama
from torchtitan.models.moe import utils
from torchtitan.models.moe.moe import MoE, MoEArgs
from torchtitan.models.qwen3.model import args as qwen3_args
from torchtitan.models.qwen3.model import model as qwen3
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer
from witnesses import megatron_job
from witnesses.boundary import modules_converted, values_answered

from meshwright.hwprofiles import Attention, Kernels, Precision, load_stack
from meshwright.simulator import ParallelPlan, TrainingJob
from meshwright.simulator.blocks import BlockShape, Ending, walk
from meshwright.simulator.layout import Mesh, Stage
from meshwright.simulator.model import EXPERT_LAYER, BlockRun, Experts, LatentAttention, ModelSpec
from meshwright.simulator.replication import reduced_parts, replication_of
from meshwright.validate.counting import RankOracle, fake_cluster
from meshwright.validate.programs.megatron import default_dtype

from megatron.core import parallel_state  # isort: skip  (after the witness, which stands for Apex)
from megatron.core.distributed import (  # isort: skip
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.transformer.moe import moe_utils, token_dispatcher  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip

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
# Qwen3's heads: wider together than tokens, with norms.
HEADS = SPEC.model_copy(
    update={
        "head_dim": 64,
        "qk_norm": "head",
        "experts": SPEC.experts.model_copy(update={"casts_shares": True}),
    }
)
SHARING = SPEC.model_copy(update={"experts": SHARED})
# Heads of one width: attention of a CPU knows no other.
LATENT = SHARING.model_copy(
    update={
        "num_kv_heads": 8,
        "latent": LatentAttention(
            query_rank=96, kv_rank=64, plain_head_dim=24, rotary_head_dim=8, value_head_dim=32
        ),
    }
)
ROWS = NUM_SEQUENCES * TOKENS * 2
Run = Callable[[Tensor], Tensor]


def derived(model: ModelSpec, stack: str, tp: int = 1, ep: int = 1, etp: int = 1) -> Measured:
    """Return what the graph says of an expert layer."""
    profile = load_stack(stack).model_copy(update={"kernels": Kernels.EAGER})
    job = TrainingJob(
        model=model, global_batch_size=NUM_SEQUENCES, seq_len=TOKENS, precision=Precision.BF16
    )
    attention = Attention.UNFUSED if profile.megatron_layers else Attention.FLASH
    plan = ParallelPlan(
        tp=tp,
        dp=max(1, ep * etp // tp),
        ep=ep,
        etp=etp,
        sequence_parallel=tp > 1,
        microbatch_size=NUM_SEQUENCES,
        stages=(2,),
        attention=attention,
    )
    shape = BlockShape.of(job, plan, profile)
    return as_measured(walk(shape, EXPERT_LAYER, ending=Ending(keeps_gradients=True)))


def counts(x: Tensor, bins: int, **_: object) -> Tensor:
    """Return how many elements are in each bin: a histogram of whole numbers, as on a GPU."""
    return x.new_empty(bins)


def counted(make: Callable[[], Run], first: int, second: int) -> Measured:
    """Return what a layer does with tokens in the order of its framework."""
    with fake_cluster(0, 1), patch.object(torch, "histc", counts):
        with default_dtype(torch.bfloat16):
            layer = make()
        return count_pass(layer, [Given((first, second, SPEC.hidden_size))], RankOracle({}))


def transformers_layer(model: ModelSpec) -> Run:
    """Return a layer of Mixtral, or of Qwen3-MoE, with grouped products."""
    experts = model.experts
    assert experts is not None
    heads = {"num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads}
    sizes = {"hidden_size": model.hidden_size, "num_experts_per_tok": experts.experts_per_token}
    if model.qk_norm == "none":
        sizes |= {"intermediate_size": experts.hidden_size}
        config = MixtralConfig(**heads, **sizes, num_local_experts=experts.num_experts)
    else:
        sizes |= {"head_dim": model.head_dim, "moe_intermediate_size": experts.hidden_size}
        config = Qwen3MoeConfig(
            **heads, **sizes, num_experts=experts.num_experts, norm_topk_prob=True
        )
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    make = MixtralDecoderLayer if model.qk_norm == "none" else Qwen3MoeDecoderLayer
    layer = make(config, 0)
    angles = torch.empty(NUM_SEQUENCES, TOKENS, model.head_dim)
    return lambda x: layer(x, position_embeddings=(angles, angles), attention_mask=None)


@pytest.mark.parametrize("model", [SPEC, HEADS], ids=["mixtral", "qwen3"])
def test_an_expert_layer_of_transformers_is_byte_exact(model: ModelSpec) -> None:
    found = counted(lambda: transformers_layer(model), NUM_SEQUENCES, TOKENS)
    assert derived(model, "fsdp") == found


def moe_args(experts: Experts) -> MoEArgs:
    """Return torchtitan's arguments of experts."""
    return MoEArgs(
        num_experts=experts.num_experts,
        num_shared_experts=experts.shared_hidden_size // experts.hidden_size,
        score_func=experts.scores,
        route_norm=True,
        score_before_experts=False,
        top_k=experts.experts_per_token,
        load_balance_coeff=None,
        _debug_force_load_balance=True,
    )


def torchtitan_layer(experts: Experts) -> Run:
    """Return a layer of torchtitan's Llama with torchtitan's experts in the place of its MLP."""
    width, heads = SPEC.hidden_size, {"n_heads": SPEC.num_heads, "n_kv_heads": SPEC.num_kv_heads}
    sizes = llama.TransformerModelArgs(dim=width, max_seq_len=TOKENS, **heads)
    layer = llama.TransformerBlock(0, sizes)
    args = moe_args(experts)
    layer.feed_forward = MoE(args, dim=width, hidden_dim=experts.hidden_size)
    angles = torch.empty(TOKENS, SPEC.head_dim // 2, dtype=torch.complex64)
    return lambda x: layer(x, angles, None)


def qwen3_layer(experts: Experts) -> Run:
    """Return a layer of torchtitan's Qwen3."""
    sizes = qwen3_args.Qwen3ModelArgs(
        dim=HEADS.hidden_size,
        n_heads=HEADS.num_heads,
        n_kv_heads=HEADS.num_kv_heads,
        head_dim=HEADS.head_dim,
        max_seq_len=TOKENS,
        moe_enabled=True,
        moe_inter_dim=experts.hidden_size,
        moe_args=moe_args(experts),
    )
    layer = qwen3.TransformerBlock(0, sizes)
    table = torch.empty(TOKENS, 2 * HEADS.head_dim, dtype=torch.float32)
    return lambda x: layer(x, table, None)


def deepseek_layer(experts: Experts) -> Run:
    """Return a layer of torchtitan's DeepSeek-V3."""
    latent = LATENT.latent
    assert latent is not None
    args = deepseek.DeepSeekV3ModelArgs(
        dim=LATENT.hidden_size,
        n_heads=LATENT.num_heads,
        n_dense_layers=0,
        moe_inter_dim=experts.hidden_size,
        moe_args=moe_args(experts),
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.plain_head_dim,
        qk_rope_head_dim=latent.rotary_head_dim,
        v_head_dim=latent.value_head_dim,
        max_seq_len=TOKENS,
    )
    args.moe_impl = "standard"  # its configuration sets it
    layer = deepseek.TransformerBlock(0, args)
    angles = torch.empty(TOKENS, latent.rotary_head_dim // 2, dtype=torch.complex64)
    return lambda x: layer(x, angles, None)


def places(_: object, experts: int, _ranks: int, most: int, _align: int) -> tuple[Tensor, ...]:
    """Return places of rows, and rows and ends of experts, as a kernel of Triton makes them."""
    made = (torch.empty(size, dtype=torch.int32) for size in (most, experts, experts))
    return tuple(made)


@pytest.mark.parametrize(
    ("make", "model"),
    [
        (torchtitan_layer, SPEC),
        (torchtitan_layer, SHARING),
        (qwen3_layer, HEADS),
        (deepseek_layer, LATENT),
    ],
    ids=["softmax", "sigmoid, shared", "qwen3", "latent attention"],
)
def test_an_expert_layer_of_torchtitan_is_byte_exact(
    make: Callable[[Experts], Run], model: ModelSpec
) -> None:
    experts = model.experts
    assert experts is not None
    with patch.object(utils, "generate_permute_indices", places):
        found = counted(lambda: make(experts), NUM_SEQUENCES, TOKENS)
    padding = 2 * 8 * experts.num_experts * 3 * SPEC.hidden_size * experts.hidden_size
    assert derived(model, "torchtitan") == replace(
        found,
        forward_flops=found.forward_flops - padding,
        backward_flops=found.backward_flops - 2 * padding,
    )


@contextmanager
def dispatched(tp: int) -> Iterator[None]:
    """Let Megatron-Core sort tokens by expert: ROWS of all ranks, equally many each."""
    rows = ROWS // tp

    def value(_mode: object, _operator: object, tensor: Tensor) -> float | int | bool:
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else rows // 8

    answers = {
        torch.ops.aten._local_scalar_dense.default: value,
        torch.ops.aten.masked_select.default: lambda _mode, _operator, x, _mask: x.new_empty(rows),
    }
    stream = SimpleNamespace(
        wait_stream=lambda _: None, record_event=lambda: SimpleNamespace(synchronize=lambda: None)
    )
    with (
        values_answered(),
        modules_converted(),
        megatron_job.answers(),
        patch.dict(op_implementations_dict, answers),
        patch.object(moe_utils, "te_general_gemm", None, create=True),
        patch.object(torch.cuda, "current_stream", lambda: stream),
        patch.object(torch.cuda, "stream", lambda _: nullcontext()),
        patch.object(torch.cuda, "Stream", lambda *_, **__: stream),
        patch.object(
            token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream, create=True
        ),
    ):
        yield


def balance(dispatcher: token_dispatcher.MoEAlltoAllTokenDispatcher, rows: int, etp: int) -> None:
    """Answer what *dispatcher* asks of a rank's *rows* that have no data: experts get as many."""
    num, ep = dispatcher.num_experts, dispatcher.ep_size
    order = SimpleNamespace(tolist=lambda: list(range(etp * num)))
    dispatcher.sort_input_by_local_experts = order
    dispatcher.restore_output_by_local_experts = order
    preprocess = dispatcher.preprocess

    def balanced(routing_map: Tensor) -> object:
        preprocess(routing_map)
        dispatcher.output_splits_tp = None  # all ranks send equally many
        if ep > 1:
            dispatcher.input_splits = dispatcher.output_splits = [rows // ep] * ep
        return SimpleNamespace(tolist=lambda: [etp * ep * rows // num] * (num // ep))

    dispatcher.preprocess = balanced


def megatron_module(
    model: ModelSpec, experts: Experts, tp: int, ep: int, etp: int
) -> TransformerLayer:
    """Return a layer of Megatron-Core's local spec on one of a few ranks."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tp,
        1,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    job = TrainingJob(model=model, global_batch_size=NUM_SEQUENCES, seq_len=TOKENS)
    plan = ParallelPlan(tp=tp, sequence_parallel=tp > 1, stages=(2,))
    config = megatron_job.transformer_config(job, plan)
    config = replace(
        config,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        moe_ffn_hidden_size=experts.hidden_size,
        num_moe_experts=experts.num_experts,
        moe_router_topk=experts.experts_per_token,
        moe_router_score_function=experts.scores,
        moe_router_topk_scaling_factor=2.5 if experts.scores == "sigmoid" else None,
        moe_shared_expert_intermediate_size=experts.shared_hidden_size or None,
        moe_token_dispatcher_type="alltoall",
        moe_router_force_load_balancing=True,
        moe_router_load_balancing_type="none",
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts.num_experts,
        moe_grouped_gemm=False,
        normalization="RMSNorm" if model.norm == "rmsnorm" else None,
        qk_layernorm=model.qk_norm == "head",
    )
    return TransformerLayer(config, spec.submodules, layer_number=1)


def megatron_layer(model: ModelSpec, experts: Experts, tp: int, ep: int, etp: int) -> Run:
    """Return a pass through such a layer."""
    layer = megatron_module(model, experts, tp, ep, etp)
    dispatcher = layer.mlp.token_dispatcher
    balance(dispatcher, ROWS // tp, etp)
    turned = torch.empty(TOKENS, 1, 1, model.rotary_dim)

    def run(x: Tensor) -> Tensor:
        out = layer(x, None, rotary_pos_emb=turned)[0]
        # It remembers a layer's last pass, which is not of this one.
        names = [name for name, each in vars(dispatcher).items() if isinstance(each, Tensor)]
        for name in names:
            setattr(dispatcher, name, None)
        return out

    return run


def centered(model: ModelSpec) -> ModelSpec:
    """Return *model* with the norm that Apex has: PyTorch's does not go with split tokens."""
    return model.model_copy(update={"norm": "layernorm"})


@pytest.mark.parametrize(
    ("model", "tp", "ep", "etp"),
    [
        (SPEC, 1, 1, 1),
        (SHARING, 1, 1, 1),
        (HEADS, 1, 1, 1),
        (centered(SPEC), 2, 1, 2),
        (centered(SHARING), 2, 1, 2),
        (SPEC, 1, 4, 1),
        (centered(SHARING), 2, 4, 1),
        (centered(SPEC), 2, 2, 2),
        (centered(SPEC), 2, 8, 1),
    ],
)
def test_an_expert_layer_of_megatrons_local_spec_is_byte_exact(
    model: ModelSpec, tp: int, ep: int, etp: int
) -> None:
    experts = model.experts
    assert experts is not None
    groups = {(0, 1): "tp", tuple(range(0, etp * ep, etp)): "ep"}
    if etp > 1 < ep:
        groups[tuple(range(etp * ep))] = "etp-ep"
    with fake_cluster(0, max(tp, ep * etp)), dispatched(tp):
        with default_dtype(torch.bfloat16):
            layer = megatron_layer(model, experts, tp, ep, etp)
        given = Given((TOKENS // tp, NUM_SEQUENCES, SPEC.hidden_size))
        found = count_pass(layer, [given], RankOracle(groups))
    # Attention keeps a buffer of scores and a number to scale them by: see test_layers.py.
    buffer = 2 * NUM_SEQUENCES * SPEC.num_heads // tp * TOKENS**2
    # Exchanges between the ranks of an expert, of which there is one, note how many rows they send.
    noted = 24 * (etp > 1 == ep)
    lasting = buffer + 4 + noted
    # Without shared experts the forward pass is fullest in attention, before they do.
    early = 0 if experts.shared_hidden_size else noted
    assert derived(model, "megatron-core", tp=tp, ep=ep, etp=etp) == replace(
        found,
        saved_bytes=found.saved_bytes - lasting,
        forward_peak_bytes=found.forward_peak_bytes - lasting + early,
        backward_peak_bytes=found.backward_peak_bytes - lasting,
        left_bytes=found.left_bytes - buffer - noted,
    )


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 4, 1), (2, 2, 2), (2, 4, 1)])
def test_megatron_reduces_experts_in_buckets_over_the_ranks_that_hold_them(
    tp: int, ep: int, etp: int
) -> None:
    """A stage behind the first, so that each kind of weights has one bucket."""
    model = centered(SPEC)
    experts = model.experts
    assert experts is not None
    ranks = 8
    with fake_cluster(0, ranks), dispatched(tp):
        with default_dtype(torch.bfloat16):
            layer = megatron_module(model, experts, tp, ep, etp)
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
        found = DistributedDataParallel(layer.config, settings, layer, disable_bucketing=True)
        counted = [
            [(each.numel_unpadded, buffer.data_parallel_world_size) for each in buffer.buckets]
            for buffer in (*found.buffers, *found.expert_parallel_buffers)
        ]
    plan = ParallelPlan(
        tp=tp, dp=ranks // tp, ep=ep, etp=etp, zero_stage=1, sequence_parallel=tp > 1, stages=(2,)
    )
    stack = load_stack("megatron-core")
    shape = BlockShape.of(
        TrainingJob(model=model, global_batch_size=8, seq_len=TOKENS), plan, stack
    )
    replication = replication_of(plan, stack, Mesh.of(plan))
    assert replication.experts is not None
    stage = Stage((BlockRun(EXPERT_LAYER, 1),), has_embedding=False, has_head=False)
    (part,) = reduced_parts(shape, stage, replication)
    ours = [
        [(size, replication.dp_cp) for size in part.buckets],
        [(size, replication.experts.dp_cp) for size in part.expert_buckets],
    ]
    assert counted == ours
