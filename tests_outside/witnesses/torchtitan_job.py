"""torchtitan's own training job, one rank of it: its `Trainer`, configured and fed."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor.experimental._attention import set_rotate_method

from meshwright.hwprofiles import ContextParallel, Precision, Recompute, RecomputeMethod
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import TrainingJob
from meshwright.simulator.model import Experts, ModelSpec
from witnesses import torchtitan_parts
from witnesses.torchtitan_parts import (
    PARAMETERS,
    SCHEDULES,
    FlashFunctions,
    QuietMetrics,
    TrainerJob,
    local_batch_size,
    rows_answered,
    stage_modules,
    stages_with_shapes,
)

# Without a GPU torchtitan would speak to torch.cuda all the same.
with patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"):
    from torchtitan import train
    from torchtitan.components.quantization import float8
    from torchtitan.config import JobConfig
    from torchtitan.distributed import activation_checkpoint, pipeline_parallel
    from torchtitan.models import attention, deepseek_v3, llama3, llama4, qwen3
    from torchtitan.models.deepseek_v3.model import args as latent_arguments
    from torchtitan.models.llama3.infra import parallelize
    from torchtitan.models.llama4.model import args as llama4_arguments
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.moe import utils as moe_utils
    from torchtitan.protocols import BaseModelArgs, train_spec

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
ROTATIONS = {ContextParallel.ALL_GATHER: "allgather", ContextParallel.RING: "alltoall"}


@contextmanager
def answers() -> Iterator[None]:
    """Let the job run, also where a kernel of Triton's or a histogram of a GPU's is asked for."""
    with (
        torchtitan_parts.answers(),
        patch.object(moe_utils, "generate_permute_indices", places),
        patch.object(torch, "histc", counts),
        patch.object(latent_arguments, "has_cuda_capability", lambda *_: True),
        patch.object(llama4_arguments, "has_cuda_capability", lambda *_: True),
        patch.object(float8, "has_cuda_capability", lambda *_: True),
    ):
        yield


def places(_: object, experts: int, _ranks: int, most: int, _align: int) -> tuple[Tensor, ...]:
    """Return places of rows, and rows and ends of experts, as a kernel of Triton makes them."""
    made = (torch.empty(size, dtype=torch.int32) for size in (most, experts, experts))
    return tuple(made)


def counts(x: Tensor, bins: int, **_: object) -> Tensor:
    """Return a histogram of whole numbers, as on a GPU."""
    return x.new_empty(bins)


def flash_attention(*, asked: bool) -> AbstractContextManager[object]:
    """Let torchtitan attend by flash attention of a GPU where it is *asked* for."""
    return patch.object(attention, "F", FlashFunctions()) if asked else nullcontext()


def job(saved: SavedPlan) -> "TorchtitanJob":
    """Return a rank of the job."""
    return TorchtitanJob(saved)


class TorchtitanJob(TrainerJob):
    """A rank of a job; it must be made on a fake cluster.

    Args:
        saved: Plan, with its job and stack.
    """

    def __init__(self, saved: SavedPlan) -> None:
        job, plan = saved.job, saved.plan
        spec = replace(
            family_of(job.transformer).get_train_spec(),
            model_args={NAME: model_args(job)},
            pipelining_fn=pipeline_parallel.pipeline_llm,  # that of its models which have one
            build_tokenizer_fn=None,
            build_dataloader_fn=lambda **_: None,
            build_metrics_processor_fn=QuietMetrics,
            state_dict_adapter=None,
        )
        is_half = saved.stack.parameter_precision is Precision.BF16
        stage_type = torch.bfloat16 if plan.dp > 1 or is_half else torch.float32
        with (
            patch.dict(train_spec._extra_train_specs, {NAME: spec}),
            # It counts the layers of all jobs of a process.
            patch.object(activation_checkpoint, "_layer_sac_count", 0),
            stages_with_shapes(pipeline_parallel, saved, stage_type),
        ):
            super().__init__(saved, train.Trainer(job_config(saved)))

    def run_step(self, step: int) -> list[Tensor]:
        """Run one whole training step."""
        plan = self.saved.plan
        # Training leaves PyTorch's own way, whatever the configuration says: validation alone of
        # torchtitan 0.2.2 reads context_parallel_rotate_method (components/validate.py).
        set_rotate_method(ROTATIONS[plan.cp_type or ContextParallel.ALL_GATHER])
        of_gpus = plan.cp > 1 or self.saved.job.transformer.latent is not None
        with rows_answered(self.num_rows), flash_attention(asked=of_gpus):
            return super().run_step(step)

    @property
    def unpriced_flops(self) -> int:
        """FLOPs of a step's rows that only fill up, and of sums of a token's rows by their weights.

        A product of rows without data cannot skip the former; the latter are priced as traffic.
        """
        job, plan = self.saved.job, self.saved.plan
        experts, width = job.transformer.experts, job.transformer.hidden_size
        if experts is None:
            return 0
        filling = 8 * experts.num_experts // plan.ep * 3 * experts.hidden_size
        is_summed = not experts.weighs_inputs
        chosen = plan.microbatch_size * job.seq_len // plan.cp * experts.experts_per_token
        layers = [layer for part in self._trainer.model_parts for layer in part.layers.values()]
        passes = sum(
            3 + isinstance(layer, CheckpointWrapper) for layer in layers if layer.moe_enabled
        )
        return 2 * (filling + chosen * is_summed) * width * passes * plan.num_microbatches(job)

    def batches(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield the batches of a rank: in a pipeline, all microbatches of a step at once."""
        job, plan = self.saved.job, self.saved.plan
        shape = (local_batch_size(job, plan), job.seq_len)
        while True:
            ids, labels = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
            yield {"input": ids}, labels


def family_of(model: ModelSpec) -> ModuleType:
    """Return the family of torchtitan's models that a model is of."""
    if model.latent is not None:
        return deepseek_v3
    if model.experts is None:
        return llama3
    return llama4 if model.experts.weighs_inputs else qwen3


def model_args(job: TrainingJob) -> BaseModelArgs:
    """Return the arguments of torchtitan's Llama, or of its models with experts."""
    model = job.transformer
    if model.latent is not None:
        return latent_args(model)
    sizes = {
        "dim": model.hidden_size,
        "n_layers": model.num_layers,
        "n_heads": model.num_heads,
        "n_kv_heads": model.num_kv_heads,
        "vocab_size": model.vocab_size,
    }
    if model.experts is not None and model.experts.weighs_inputs:
        return llama4.TransformerModelArgs(
            **sizes,
            multiple_of=model.experts.hidden_size,  # to which it rounds all widths up
            every_n_layers_nope=None if model.rotary_layers == "all" else len(model.layer_pattern),
            interleave_moe_layer_step=model.experts.layer_step,
            moe_args=moe_args(model.experts),
        )
    if model.experts is not None:
        return qwen3.Qwen3ModelArgs(
            **sizes,
            head_dim=model.head_dim,
            qk_norm=model.qk_norm == "head",
            moe_enabled=True,
            moe_inter_dim=model.experts.hidden_size,
            moe_args=moe_args(model.experts),
        )
    return llama3.TransformerModelArgs(
        **sizes,
        # Rounded up to itself: 8 / 3 of the width, torchtitan's own choice, is less.
        multiple_of=model.ffn_hidden_size,
    )


def latent_args(model: ModelSpec) -> deepseek_v3.DeepSeekV3ModelArgs:
    """Return the arguments of torchtitan's DeepSeek-V3."""
    latent, experts = model.latent, model.experts
    return deepseek_v3.DeepSeekV3ModelArgs(
        dim=model.hidden_size,
        n_layers=model.num_layers,
        n_dense_layers=experts.first_dense_layers,
        inter_dim=model.ffn_hidden_size,
        n_heads=model.num_heads,
        vocab_size=model.vocab_size,
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.plain_head_dim,
        qk_rope_head_dim=latent.rotary_head_dim,
        v_head_dim=latent.value_head_dim,
        moe_inter_dim=experts.hidden_size,
        moe_args=moe_args(experts),
    )


def moe_args(experts: Experts) -> MoEArgs:
    """Return torchtitan's arguments of experts."""
    return MoEArgs(
        num_experts=experts.num_experts,
        num_shared_experts=experts.shared_hidden_size // experts.hidden_size,
        score_func=experts.scores,
        route_norm=not experts.weighs_inputs,
        score_before_experts=experts.weighs_inputs,
        top_k=experts.experts_per_token,
        load_balance_coeff=1e-3 if experts.routing_bias else None,
        num_expert_groups=experts.num_groups if experts.num_groups > 1 else None,
        num_limited_groups=experts.groups_per_token if experts.num_groups > 1 else None,
        _debug_force_load_balance=True,
    )


def say_float8(config: JobConfig, saved: SavedPlan) -> None:
    """Set the 8-bit recipe of linear layers, but for the head's, where there is one."""
    recipe = saved.stack.fp8
    if saved.job.precision is not Precision.FP8 or recipe is None:
        return
    config.model.converters = ["quantize.linear.float8"]
    float8_settings = config.quantize.linear.float8
    float8_settings.filter_fqns = ["output"]
    float8_settings.enable_fsdp_float8_all_gather = recipe.gathers_parameters
    float8_settings.precompute_float8_dynamic_scale_for_fsdp = recipe.precomputes_scales


def job_config(saved: SavedPlan) -> JobConfig:
    """Return torchtitan's configuration of a plan."""
    config, job, plan = JobConfig(), saved.job, saved.plan
    config.model.name = config.model.flavor = NAME
    config.debug.seed = 0
    config.debug.moe_force_load_balance = True
    config.training.seq_len = job.seq_len
    config.training.local_batch_size = local_batch_size(job, plan)
    config.training.global_batch_size = job.global_batch_size
    config.training.mixed_precision_param = PARAMETERS[job.precision.storage]
    say_float8(config, saved)
    config.training.dtype = PARAMETERS[saved.stack.parameter_precision or Precision.FP32]
    parallelism = config.parallelism
    shards = plan.dp_shard or plan.dp
    parallelism.data_parallel_shard_degree = shards
    parallelism.data_parallel_replicate_degree = plan.dp // shards
    parallelism.tensor_parallel_degree = plan.tp
    parallelism.context_parallel_degree = plan.cp
    way = plan.cp_type or ContextParallel.ALL_GATHER
    parallelism.context_parallel_rotate_method = ROTATIONS[way]
    parallelism.expert_parallel_degree = plan.ep
    parallelism.pipeline_parallel_degree = plan.pp
    parallelism.pipeline_parallel_schedule = SCHEDULES[plan.schedule]
    parallelism.pipeline_parallel_microbatch_size = plan.microbatch_size
    parallelism.module_fqns_per_model_part = stage_modules(plan, "output") if plan.pp > 1 else None
    mode, option = CHECKPOINTS[plan.recompute]
    if plan.recompute_method is RecomputeMethod.EVERY:
        mode, option = "selective", str(plan.recompute_layers)
    config.activation_checkpoint.mode = mode
    config.activation_checkpoint.selective_ac_option = option
    return config
