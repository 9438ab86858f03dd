"""torchtitan's own training job, one rank of it: its `Trainer`, configured and fed."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from meshwright.hwprofiles import Recompute
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import ParallelPlan, TrainingJob
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

__all__ = ["answers", "job"]

# Without a GPU torchtitan would speak to torch.cuda all the same.
with patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"):
    from torchtitan import train
    from torchtitan.config import JobConfig
    from torchtitan.distributed import pipeline_parallel
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.models.llama3.infra import parallelize
    from torchtitan.protocols import train_spec

NAME = "meshwright"
# What flash attention is called on tensors of a CPU; the list has its names on GPUs.
parallelize._op_sac_save_list.add(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
)
CHECKPOINTS = {
    Recompute.NONE: ("none", "op"),
    Recompute.SELECTIVE_OP: ("selective", "op"),
    Recompute.FULL: ("full", "op"),
}


def job(saved: SavedPlan) -> "TorchtitanJob":
    """Return a rank of the job."""
    return TorchtitanJob(saved)


class TorchtitanJob(TrainerJob):
    """A rank of a job; it must be made on a fake cluster.

    Args:
        saved: Which job.
    """

    def __init__(self, saved: SavedPlan) -> None:
        job, plan = saved.job, saved.plan
        spec = replace(
            get_train_spec(),
            model_args={NAME: model_args(job)},
            build_tokenizer_fn=None,
            build_dataloader_fn=lambda **_: None,
            build_metrics_processor_fn=QuietMetrics,
            state_dict_adapter=None,
        )
        stage_type = torch.bfloat16 if plan.dp > 1 else torch.float32
        with (
            patch.dict(train_spec._extra_train_specs, {NAME: spec}),
            stages_with_shapes(pipeline_parallel, saved, stage_type),
        ):
            super().__init__(saved, train.Trainer(job_config(job, plan)))

    def batches(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield what a rank is fed: in a pipeline, all microbatches of a step at once."""
        job, plan = self.saved.job, self.saved.plan
        shape = (local_batch_size(job, plan), job.seq_len)
        while True:
            ids, labels = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
            yield {"input": ids}, labels


def model_args(job: TrainingJob) -> TransformerModelArgs:
    """Return the arguments of torchtitan's Llama for a job's model."""
    model = job.transformer
    return TransformerModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_layers,
        n_heads=model.num_heads,
        n_kv_heads=model.num_kv_heads,
        vocab_size=model.vocab_size,
        # Rounded up to itself: 8 / 3 of the width, torchtitan's own choice, is less.
        multiple_of=model.ffn_hidden_size,
    )


def job_config(job: TrainingJob, plan: ParallelPlan) -> JobConfig:
    """Return torchtitan's configuration of a plan."""
    config = JobConfig()
    config.model.name = config.model.flavor = NAME
    config.debug.seed = 0
    config.training.seq_len = job.seq_len
    config.training.local_batch_size = local_batch_size(job, plan)
    config.training.global_batch_size = job.global_batch_size
    config.training.mixed_precision_param = PARAMETERS[job.precision]
    parallelism = config.parallelism
    shards = plan.dp_shard or plan.dp
    parallelism.data_parallel_shard_degree = shards
    parallelism.data_parallel_replicate_degree = plan.dp // shards
    parallelism.tensor_parallel_degree = plan.tp
    parallelism.pipeline_parallel_degree = plan.pp
    parallelism.pipeline_parallel_schedule = SCHEDULES[plan.schedule]
    parallelism.pipeline_parallel_microbatch_size = plan.microbatch_size
    parallelism.module_fqns_per_model_part = stage_modules(plan, "output") if plan.pp > 1 else None
    mode, option = CHECKPOINTS[plan.recompute]
    config.activation_checkpoint.mode = mode
    config.activation_checkpoint.selective_ac_option = option
    return config
