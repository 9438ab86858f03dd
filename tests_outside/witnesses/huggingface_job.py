"""Models of transformers, dense or with experts, one rank, under Accelerate or by itself.

Accelerate has DDP and FSDP2, which reduces gradients in the format of parameters. transformers
shards models with experts itself, too, as its `DistributedConfig` says, and reduces in fp32.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    masking_utils,
)
from transformers.distributed import DistributedConfig

from meshwright.hwprofiles import Precision, Recompute
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import ModelSpec, TrainingJob
from meshwright.validate.programs.megatron import default_dtype
from meshwright.validate.programs.pytorch.optimizer import trained_tensors
from meshwright.validate.ranks import ByteKind
from witnesses.boundary import addresses_answered
from witnesses.groups import groups_of
from witnesses.torchtitan_job import counts
from witnesses.torchtitan_parts import rows_answered

BLOCKS = {
    GPT2LMHeadModel: "GPT2Block",
    LlamaForCausalLM: "LlamaDecoderLayer",
    MixtralForCausalLM: "MixtralDecoderLayer",
    Qwen3MoeForCausalLM: "Qwen3MoeDecoderLayer",
    DeepseekV3ForCausalLM: "DeepseekV3DecoderLayer",
}


@contextmanager
def answers() -> Iterator[None]:
    """Let the job run: Accelerate asks the environment who it is.

    That a row of tokens is one sequence shows only in their positions, which have no values here;
    attention would get a mask else.
    """
    world = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    here = {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "ACCELERATE_TORCH_DEVICE": "cpu"}
    with (
        patch.dict(os.environ, world | here | {"OMP_NUM_THREADS": "1"}),
        patch.object(masking_utils, "find_packed_sequence_indices", lambda *_: None),
        patch.object(torch, "histc", counts),
        addresses_answered(),
    ):
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        PartialState._reset_state()
        yield


def job(saved: SavedPlan) -> "HuggingFaceJob | DistributedJob":
    """Return a rank of the job."""
    by_itself = saved.job.transformer.experts and saved.plan.reduce_precision is Precision.FP32
    return DistributedJob(saved) if by_itself else HuggingFaceJob(saved)


@contextmanager
def experts_answered(saved: SavedPlan) -> Iterator[None]:
    """Let the experts of a job, if it has any, have rows as on a GPU, as many of each."""
    job, plan = saved.job, saved.plan
    experts = job.transformer.experts
    chosen = 0 if experts is None else experts.experts_per_token
    rows = plan.microbatch_size * job.seq_len * chosen // plan.ep
    with rows_answered(rows), patch.object(torch, "histc", counts):
        yield


class HuggingFaceJob:
    """A rank of a job; it must be made on a fake cluster.

    Args:
        saved: Plan, with its job and stack.
    """

    def __init__(self, saved: SavedPlan) -> None:
        self._saved = saved
        job, plan, weights = saved.job, saved.plan, saved.stack.parameter_precision
        with default_dtype(torch.float32 if weights is None else torch.bfloat16):
            model = language_model(job)
        if plan.recompute is Recompute.FULL:
            model.gradient_checkpointing_enable()
        self._accelerator = Accelerator(
            cpu=True,
            mixed_precision="bf16" if is_mixed(saved) else "no",
            gradient_accumulation_steps=plan.num_microbatches(job),
        )
        if plan.zero_stage == 3:  # with GPUs the argument fsdp_plugin does it
            self._accelerator.state.distributed_type = DistributedType.FSDP
            self._accelerator.state.fsdp_plugin = sharding(model, saved)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self._model, self._optimizer = self._accelerator.prepare(model, optimizer)

    @property
    def groups(self) -> Mapping[tuple[int, ...], str]:
        """Axis of each process group, by its global ranks."""
        return groups_of(self._saved.plan, dist.get_rank())

    def run_step(self, _step: int) -> list[Tensor]:
        """Run one whole training step."""
        job, plan = self._saved.job, self._saved.plan
        for _ in range(plan.num_microbatches(job)):
            ids = torch.zeros((plan.microbatch_size, job.seq_len), dtype=torch.long)
            with self._accelerator.accumulate(self._model), experts_answered(self._saved):
                loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss
                self._accelerator.backward(loss)
                if self._accelerator.sync_gradients:
                    self._accelerator.clip_grad_norm_(self._model.parameters(), 1.0)
                self._optimizer.step()
                self._optimizer.zero_grad()
        return []

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield weights, gradients, states, and the buffers of the model."""
        for buffer in self._model.buffers():
            yield buffer, ByteKind.ACTIVATIONS
        for parameter in self._model.parameters():
            yield parameter, ByteKind.PARAMETERS
            if parameter.grad is not None:
                yield parameter.grad, ByteKind.GRADIENTS
            for state in self._optimizer.optimizer.state.get(parameter, {}).values():
                yield state, ByteKind.OPTIMIZER


class DistributedJob:
    """A rank of a job that transformers divides by itself; it must be made on a fake cluster.

    As its Trainer does with a model that is divided already, gradients are clipped by Accelerate,
    mesh by mesh.

    Args:
        saved: Plan, with its job and stack.
    """

    def __init__(self, saved: SavedPlan) -> None:
        self._saved = saved
        plan = saved.plan
        config = DistributedConfig(
            fsdp_size=plan.num_shards,
            dp_replicate_size=plan.dp // plan.num_shards,
            ep_size=plan.ep,
            fsdp_mixed_precision=saved.job.precision is Precision.BF16,
        )
        config, _, meshes = PreTrainedModel.prepare_distribute_model(config)
        model = language_model(saved.job)
        if plan.recompute is Recompute.FULL:
            model.gradient_checkpointing_enable()
        self._model = PreTrainedModel.maybe_distribute_model(model, config, meshes)
        groups: dict[object, list[nn.Parameter]] = {}
        for each in self._model.parameters():
            # One fused operator takes the DTensors of one mesh alone.
            groups.setdefault(each.device_mesh, []).append(each)
        chosen = [{"params": group} for group in groups.values()]
        self._optimizer = torch.optim.AdamW(chosen, lr=1e-3, fused=True)
        self._accelerator = Accelerator(cpu=True)

    @property
    def groups(self) -> Mapping[tuple[int, ...], str]:
        """Axis of each process group, by its global ranks."""
        return groups_of(self._saved.plan, dist.get_rank())

    def run_step(self, _step: int) -> list[Tensor]:
        """Run one whole training step."""
        job, plan = self._saved.job, self._saved.plan
        for _ in range(plan.num_microbatches(job)):
            ids = torch.zeros((plan.microbatch_size, job.seq_len), dtype=torch.long)
            with experts_answered(self._saved):
                self._model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        self._accelerator._clip_grad_norm_dtensor_aware([*self._model.parameters()], 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return []

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield weights, gradients, states, and the buffers of the model."""
        for buffer in self._model.buffers():
            yield buffer, ByteKind.ACTIVATIONS
        yield from trained_tensors(self._model.parameters(), self._optimizer)


def is_mixed(saved: SavedPlan) -> bool:
    """Return True if fp32 weights multiply in bf16."""
    return saved.job.precision is Precision.BF16 and saved.stack.parameter_precision is None


def sharding(model: PreTrainedModel, saved: SavedPlan) -> FullyShardedDataParallelPlugin:
    """Return Accelerate's FSDP2 with a unit a block."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[BLOCKS[type(model)]],
        cpu_ram_efficient_loading=False,
    )
    if is_mixed(saved):
        plugin.set_mixed_precision("bf16")
    return plugin


def language_model(job: TrainingJob) -> PreTrainedModel:
    """Return the model of transformers that a job trains."""
    model = job.transformer
    if model.positions == "learned":
        return gpt2(model)
    sizes = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "max_position_embeddings": job.seq_len,
        "tie_word_embeddings": model.tied_embeddings,
    }
    if model.latent is not None:
        return deepseek(model, sizes)
    if model.experts is None:
        return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=model.ffn_hidden_size))
    sizes["num_experts_per_tok"] = model.experts.experts_per_token
    return qwen3(model, sizes) if model.qk_norm == "head" else mixtral(model, sizes)


def gpt2(model: ModelSpec) -> GPT2LMHeadModel:
    """Return GPT-2 of the sizes of *model*."""
    dropout = 0.1 if model.dropout else 0.0
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=model.vocab_size,
            n_positions=model.max_positions,
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_heads,
            n_inner=model.ffn_hidden_size,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=0.0,  # a CPU's flash attention has none; a GPU's keeps no mask of it
            tie_word_embeddings=model.tied_embeddings,
        )
    )


def qwen3(model: ModelSpec, sizes: dict[str, object]) -> Qwen3MoeForCausalLM:
    """Return Qwen3 with the experts of *model*, of *sizes* that others have, too."""
    config = Qwen3MoeConfig(
        **sizes,
        head_dim=model.head_dim,
        moe_intermediate_size=model.experts.hidden_size,
        num_experts=model.experts.num_experts,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    return Qwen3MoeForCausalLM(config)


def mixtral(model: ModelSpec, sizes: dict[str, object]) -> MixtralForCausalLM:
    """Return Mixtral with the experts of *model*, of *sizes* that others have, too."""
    config = MixtralConfig(
        **sizes,
        intermediate_size=model.experts.hidden_size,
        num_local_experts=model.experts.num_experts,
        experts_implementation="grouped_mm",
    )
    config._experts_implementation = "grouped_mm"
    return MixtralForCausalLM(config)


def deepseek(model: ModelSpec, sizes: dict[str, object]) -> PreTrainedModel:
    """Return DeepSeek-V2 or V3, as *model* scores experts, of *sizes* that others have, too."""
    config = deepseek_config(model, sizes)
    config._experts_implementation = "grouped_mm"
    is_second = isinstance(config, DeepseekV2Config)
    return DeepseekV2ForCausalLM(config) if is_second else DeepseekV3ForCausalLM(config)


def deepseek_config(
    model: ModelSpec, sizes: dict[str, object]
) -> DeepseekV2Config | DeepseekV3Config:
    """Return the configuration of V3, or of V2 where scores are a softmax."""
    experts, latent = model.experts, model.latent
    assert experts is not None
    assert latent is not None
    sizes = {
        "intermediate_size": model.ffn_hidden_size,
        "moe_intermediate_size": experts.hidden_size,
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "n_shared_experts": experts.shared_hidden_size // experts.hidden_size,
        "n_group": experts.num_groups,
        "topk_group": experts.groups_per_token,
        "first_k_dense_replace": experts.first_dense_layers,
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.plain_head_dim,
        "qk_rope_head_dim": latent.rotary_head_dim,
        "v_head_dim": latent.value_head_dim,
    } | sizes
    if experts.scores == "sigmoid":
        return DeepseekV3Config(**sizes)
    method = "group_limited_greedy" if experts.num_groups > 1 else "greedy"
    return DeepseekV2Config(**sizes, topk_method=method)
