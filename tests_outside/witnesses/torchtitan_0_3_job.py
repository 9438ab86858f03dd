"""torchtitan's own training job from 0.3 on, one rank of it: its `Trainer`, configured and fed.

Its defaults but for three things. Attention is PyTorch's `scaled_dot_product_attention`, which
keeps what flex attention keeps and, unlike it, runs without a compiler. CUDA graphs are off, for
want of a GPU. The loss is `CrossEntropyLoss`, where configurations of its Llamas wrap that in
chunks; with CHUNKED_LOSS in the environment, it is wrapped here, too.
"""

import os
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from meshwright.hwprofiles import Recompute
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import ResolvedPlan, TrainingJob
from witnesses.torchtitan_parts import (
    PARAMETERS,
    SCHEDULES,
    QuietMetrics,
    TrainerJob,
    answers,
    local_batch_size,
    stage_modules,
    stages_with_shapes,
)

# Without a GPU torchtitan would speak to torch.cuda all the same.
with patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"):
    from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.distributed import activation_checkpoint, pipeline_parallel
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
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
        saved: Which job.
    """

    def __init__(self, saved: SavedPlan) -> None:
        with stages_with_shapes(pipeline_parallel, saved, torch.bfloat16):
            super().__init__(saved, Trainer(trainer_config(saved.job, saved.plan)))

    def batches(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield a microbatch with the places of its tokens in their documents."""
        shape = (self.saved.plan.microbatch_size, self.saved.job.seq_len)
        while True:
            ids, places, labels = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
            yield {"input": ids, "positions": places}, labels


class Made(QuietMetrics):
    """A part of a job that is there already."""

    def build(self, **_: object) -> "Made":
        """Return it."""
        return self


def trainer_config(job: TrainingJob, plan: ResolvedPlan) -> "Trainer.Config":
    """Return torchtitan's configuration of a plan."""
    shards = plan.dp_shard or plan.dp
    return Trainer.Config(
        model_spec=ModelSpec(
            name="llama3",
            flavor="meshwright",
            model=model_config(job),
            parallelize_fn=llama3.parallelize_llama,
            pipelining_fn=pipeline_parallel.pipeline_llm,
            post_optimizer_build_fn=None,
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


def model_config(job: TrainingJob) -> "llama3.Llama3Model.Config":
    """Return torchtitan's Llama of a job's model."""
    model = job.transformer
    width, rows = model.hidden_size, model.vocab_size
    attention = ScaledDotProductAttention.Config()
    with patch.object(llama3, "get_attention_config", lambda _: attention):
        layers = llama3._build_llama3_layers(
            n_layers=model.num_layers,
            dim=width,
            n_heads=model.num_heads,
            n_kv_heads=model.num_kv_heads,
            hidden_dim=model.ffn_hidden_size,
            rope=ComplexRoPE.Config(
                dim=model.head_dim, max_seq_len=131072, theta=500000, scaling="llama"
            ),
            attn_backend="sdpa",
        )
    return llama3.Llama3Model.Config(
        dim=width,
        vocab_size=rows,
        tok_embeddings=Embedding.Config(
            num_embeddings=rows, embedding_dim=width, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=width, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=width, out_features=rows, param_init=llama3._output_linear_init(width)
        ),
        layers=layers,
    )
