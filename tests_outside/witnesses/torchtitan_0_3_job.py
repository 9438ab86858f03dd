"""torchtitan's own training job from 0.3 on, one rank of it: its `Trainer`, configured and fed.

Its defaults but for three things. Attention is PyTorch's `scaled_dot_product_attention`, which
keeps what flex attention keeps and, unlike it, runs without a compiler. CUDA graphs are off, for
want of a GPU. The loss is `CrossEntropyLoss`, where configurations of its Llamas wrap that in
chunks; with CHUNKED_LOSS in the environment, it is wrapped here, too.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from meshwright.hwprofiles import Recompute
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.simulator import model as models
from witnesses.torchtitan_parts import (
    PARAMETERS,
    SCHEDULES,
    FlashFunctions,
    QuietMetrics,
    TrainerJob,
    answers,
    local_batch_size,
    rows_answered,
    stage_modules,
    stages_with_shapes,
)

# Without a GPU torchtitan would speak to torch.cuda all the same.
with patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"):
    from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw, register_moe_load_balancing_hook
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.distributed import activation_checkpoint, pipeline_parallel
    from torchtitan.models import deepseek_v3, llama3, qwen3
    from torchtitan.models.common import (
        ComplexRoPE,
        CosSinRoPE,
        Embedding,
        Linear,
        RMSNorm,
        attention,
    )
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.decoder import Decoder, TransformerBlock
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

__all__ = ["answers", "job"]

CHECKPOINTS: dict[Recompute, Callable[[], object]] = {
    Recompute.NONE: lambda: None,
    Recompute.SELECTIVE_OP: activation_checkpoint.SelectiveAC.Config,
    Recompute.FULL: activation_checkpoint.FullAC.Config,
}
# What flash attention is called on tensors of a CPU; the list has its names on GPUs.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
SAVED = activation_checkpoint._get_default_save_ops
activation_checkpoint._get_default_save_ops = lambda: SAVED() | {CPU_ATTENTION}


def job(saved: SavedPlan) -> "TorchtitanJob":
    """Return a rank of the job."""
    return TorchtitanJob(saved)


class TorchtitanJob(TrainerJob):
    """A rank of a job; it must be made on a fake cluster.

    Args:
        saved: Plan, with its job and stack.
    """

    def __init__(self, saved: SavedPlan) -> None:
        with stages_with_shapes(pipeline_parallel, saved, torch.bfloat16):
            super().__init__(saved, Trainer(trainer_config(saved.job, saved.plan)))

    def run_step(self, step: int) -> list[Tensor]:
        """Run one whole training step."""
        is_latent = self.saved.job.transformer.latent is not None
        flash = patch.object(attention, "F", FlashFunctions()) if is_latent else nullcontext()
        with rows_answered(self.num_rows), flash, patch.object(torch, "autocast", Autocast):
            return super().run_step(step)

    def batches(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield a microbatch with the places of its tokens in their documents."""
        shape = (self.saved.plan.microbatch_size, self.saved.job.seq_len)
        while True:
            ids, places, labels = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
            yield {"input": ids, "positions": places}, labels


class Autocast(torch.autocast):
    """Autocast to fp32, too, as of a GPU; of a CPU PyTorch has none."""

    def __init__(self, device_type: str, dtype: torch.dtype | None = None) -> None:
        super().__init__(device_type, dtype)
        self._enabled = True


class Family(NamedTuple):
    """A family of models: its module, its model, and what divides it among ranks."""

    module: ModuleType
    model: type["Decoder"]
    parallelize: Callable[..., nn.Module]


class Made(QuietMetrics):
    """A part of a job that is there already."""

    def build(self, **_: object) -> "Made":
        """Return it."""
        return self


def trainer_config(job: TrainingJob, plan: ResolvedPlan) -> "Trainer.Config":
    """Return torchtitan's configuration of a plan."""
    shards, family = plan.dp_shard or plan.dp, family_of(job.transformer)
    return Trainer.Config(
        model_spec=ModelSpec(
            name=family.module.__name__,
            flavor="meshwright",
            model=model_config(job),
            parallelize_fn=family.parallelize,
            pipelining_fn=pipeline_parallel.pipeline_llm,
            post_optimizer_build_fn=register_moe_load_balancing_hook,
            state_dict_adapter=None,
        ),
        loss=loss_config(job),
        metrics=Made(),
        tokenizer=Made(),
        dataloader=Made(),
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(
            seq_len=job.seq_len,
            local_batch_size=local_batch_size(job, plan),
            global_batch_size=job.global_batch_size,
            mixed_precision_param=PARAMETERS[job.precision],
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=shards,
            data_parallel_replicate_degree=plan.dp // shards,
            tensor_parallel_degree=plan.tp,
            expert_parallel_degree=plan.ep,
            enable_sequence_parallel=plan.sequence_parallel or plan.tp == 1,
            pipeline_parallel_degree=plan.pp,
            pipeline_parallel_schedule=SCHEDULES[plan.schedule],
            pipeline_parallel_microbatch_size=plan.microbatch_size,
            module_fqns_per_model_part=stage_modules(plan, "lm_head") if plan.pp > 1 else None,
        ),
        activation_checkpoint=CHECKPOINTS[plan.recompute](),
        debug=DebugConfig(seed=0),
    )


def loss_config(job: TrainingJob) -> "BaseLoss.Config":
    """Return the configuration of the loss."""
    whole = CrossEntropyLoss.Config(global_vocab_size=job.transformer.vocab_size)
    is_chunked = "CHUNKED_LOSS" in os.environ
    return ChunkedLossWrapper.Config(loss_fn=whole) if is_chunked else whole


def family_of(model: "models.ModelSpec") -> Family:
    """Return the family of torchtitan's models that a model is of."""
    if model.latent is not None:
        return Family(deepseek_v3, deepseek_v3.DeepSeekV3Model, deepseek_v3.parallelize_deepseekv3)
    if model.qk_norm == "head":
        return Family(qwen3, qwen3.Qwen3Model, qwen3.parallelize_qwen3)
    return Family(llama3, llama3.Llama3Model, llama3.parallelize_llama)


def model_config(job: TrainingJob) -> "Decoder.Config":
    """Return torchtitan's configuration of a job's model."""
    model, family = job.transformer, family_of(job.transformer)
    width, rows = model.hidden_size, model.vocab_size
    layers = {llama3: llama_layers, qwen3: qwen3_layers, deepseek_v3: deepseek_layers}
    attention = ScaledDotProductAttention.Config()
    with patch.object(family.module, "get_attention_config", lambda _: attention):
        made = layers[family.module](model)
    for each in made:
        if each.moe is not None:
            each.moe.router._debug_force_load_balance = True
            each.moe.load_balance_coeff = 1e-3 if model.experts.routing_bias else None
    return family.model.Config(
        dim=width,
        vocab_size=rows,
        tok_embeddings=Embedding.Config(
            num_embeddings=rows, embedding_dim=width, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=width, out_features=rows, param_init=llama3._output_linear_init(width)
        ),
        layers=made,
    )


def llama_layers(model: "models.ModelSpec") -> list["TransformerBlock.Config"]:
    """Return the layers of torchtitan's Llama."""
    return llama3._build_llama3_layers(
        n_layers=model.num_layers,
        dim=model.hidden_size,
        n_heads=model.num_heads,
        n_kv_heads=model.num_kv_heads,
        hidden_dim=model.ffn_hidden_size,
        rope=ComplexRoPE.Config(
            dim=model.head_dim, max_seq_len=131072, theta=500000, scaling="llama"
        ),
        attn_backend="sdpa",
    )


def qwen3_layers(model: "models.ModelSpec") -> list["TransformerBlock.Config"]:
    """Return the layers of torchtitan's Qwen3, with experts in all of them or in none."""
    sizes = {
        "n_layers": model.num_layers,
        "dim": model.hidden_size,
        "n_heads": model.num_heads,
        "n_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "attn_backend": "sdpa",
        "rope": CosSinRoPE.Config(dim=model.head_dim, max_seq_len=40960, theta=1000000.0),
    }
    if model.experts is None:
        return qwen3._build_qwen3_layers(**sizes, hidden_dim=model.ffn_hidden_size)
    return qwen3._build_qwen3_moe_layers(
        **sizes,
        moe_hidden_dim=model.experts.hidden_size,
        num_experts=model.experts.num_experts,
        top_k=model.experts.experts_per_token,
        moe_comm_backend="standard",
    )


def deepseek_layers(model: "models.ModelSpec") -> list["TransformerBlock.Config"]:
    """Return the layers of torchtitan's DeepSeek-V3."""
    experts, latent = model.experts, model.latent
    has_groups = experts.num_groups > 1
    return deepseek_v3._build_dsv3_layers(
        n_layers=model.num_layers,
        n_dense_layers=experts.first_dense_layers,
        dim=model.hidden_size,
        n_heads=model.num_heads,
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.plain_head_dim,
        qk_rope_head_dim=latent.rotary_head_dim,
        v_head_dim=latent.value_head_dim,
        mscale=1.0,
        dense_hidden_dim=model.ffn_hidden_size,
        moe_hidden_dim=experts.hidden_size,
        num_experts=experts.num_experts,
        num_shared_experts=experts.shared_hidden_size // experts.hidden_size,
        router_top_k=experts.experts_per_token,
        router_score_func=experts.scores,
        router_num_expert_groups=experts.num_groups if has_groups else None,
        router_num_limited_groups=experts.groups_per_token if has_groups else None,
        router_route_norm=True,
        attn_backend="sdpa",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=latent.rotary_head_dim, max_seq_len=16384, theta=10000.0),
    )
