"""Megatron-Core's own GPT, buckets, optimizer and schedules, one rank of them."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.hwprofiles import Precision
from meshwright.planner.reports import SavedPlan
from meshwright.simulator.model import padded_vocab_size
from meshwright.simulator.schedules import Phase
from meshwright.validate.counting.accelerator import IdleStream
from meshwright.validate.ranks import ByteKind
from witnesses import apex
from witnesses.boundary import cluster_answered, gpu_answers
from witnesses.groups import groups_of

apex.install()  # before Megatron-Core, which looks for it

from megatron.core import optimizer, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models import backends
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from witnesses import megatron_fsdp  # isort: skip  (after what stands for Apex)
from witnesses.megatron_config import (  # isort: skip
    block_spec,
    embedding_ranks,
    prediction_spec,
    transformer_config,
)


class NoTracker(random.CudaRNGStatesTracker):
    """Random numbers of a GPU that has none: nothing is drawn on tensors without data."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        """Leave the state as it is."""
        return nullcontext()


def random_numbers() -> AbstractContextManager[object]:
    """Let Megatron-Core keep and restore states of random numbers that are not there."""
    return patch.multiple(
        random,
        _CUDA_RNG_STATE_TRACKER=NoTracker(),
        _CUDA_RNG_STATE_TRACKER_INITIALIZED=True,
        _get_all_rng_states=lambda: (None, None, None),
        _set_all_rng_states=lambda *_: None,
    )


def fused_kernels() -> Iterator[AbstractContextManager[object]]:
    """Yield patches for kernels of Apex and Transformer Engine: one pass, no temporaries."""

    def norm(
        _size: int, _flag: Tensor, lists: list[list[Tensor]], *_: object
    ) -> tuple[Tensor, None]:
        return torch.stack(torch._foreach_norm(lists[0])).norm().view(1), None

    def scale(_size: int, _flag: Tensor, lists: list[list[Tensor]], factor: float) -> None:
        for source, target in zip(*lists, strict=True):
            if source is not target:
                target.copy_(source)
            target.mul_(factor)

    yield patch.object(clip_grads, "l2_norm_impl", norm)
    yield patch.object(clip_grads, "multi_tensor_scale_impl", scale)
    yield patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", new=False)
    yield patch.object(optimizer, "Adam", fused_adam)


def fused_adam(*args: object, adam_w_mode: bool, **kwargs: object) -> torch.optim.AdamW:
    """Return the Adam of Apex, which updates in one kernel."""
    return torch.optim.AdamW(*args, fused=True, **kwargs)


def streams() -> AbstractContextManager[object]:
    """Let instances of the distributed optimizer reduce on a stream: there is one, and it waits."""
    stream = IdleStream()
    return patch.multiple(
        torch.cuda,
        Stream=lambda **_: stream,
        default_stream=lambda: stream,
        stream=lambda _: nullcontext(),
    )


def sizes_answered(rank: "MegatronJob") -> AbstractContextManager[object]:
    """Answer the sizes that go ahead of messages which are not all alike: they have no data.

    Passes of a rank receive in the order in which they run.
    """
    communicate_shapes = P2PCommunicator._communicate_shapes
    sizes = rank.message_sizes()

    def answer(
        communicator: P2PCommunicator, forward: object, back: object, *receives: bool
    ) -> list[list[int]]:
        communicate_shapes(communicator, forward, back, *receives)
        return [
            next(each) if is_received else []
            for is_received, each in zip(receives, sizes, strict=True)
        ]

    return patch.object(P2PCommunicator, "_communicate_shapes", answer)


def without_engine() -> Iterator[AbstractContextManager[object]]:
    """Yield patches for Transformer Engine's fp8, which recompute of discarded outputs asks for.

    Megatron-Core asks for it in any case (CheckpointWithoutOutput of core 0.16).
    """
    state = SimpleNamespace(is_fp8_enabled=lambda: False)
    yield patch.object(random, "FP8GlobalStateManager", state, create=True)
    for name in ("activation_recompute_forward", "fp8_autocast"):
        yield patch.object(random, name, lambda **_: nullcontext(), create=True)
    # A copy of storages without data would leave names for both behind.
    yield patch.object(torch.UntypedStorage, "copy_", lambda storage, *_: storage)


@contextmanager
def answers() -> Iterator[None]:
    """Let the job run: there is one GPU, its random numbers, and Apex's kernels.

    Whoever asks Megatron-Core for an RMSNorm changes the norm of all models after it.
    """
    norm = patch.object(backends, "LNImpl", backends.LNImpl)
    with gpu_answers(), random_numbers(), streams(), norm, ExitStack() as stack:
        for kernel in (*fused_kernels(), *without_engine(), *megatron_fsdp.answers()):
            stack.enter_context(kernel)
        yield


def job(saved: SavedPlan) -> "MegatronJob":
    """Return a rank of the job."""
    return MegatronJob(saved)


class MegatronJob:
    """A rank of a job; it must be made on a fake cluster.

    Args:
        saved: Plan, with its job and stack.
    """

    def __init__(self, saved: SavedPlan) -> None:
        self._saved = saved
        MTPLossLoggingHelper.tracker = {}  # of the job before
        job, plan = saved.job, saved.plan
        virtual = plan.num_virtual_stages
        self._config = transformer_config(job, plan)
        tied = job.transformer.tied_embeddings
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            plan.tp,
            plan.pp,
            virtual if virtual > 1 else None,
            context_parallel_size=plan.cp,
            num_distributed_optimizer_instances=plan.dp_cp // plan.num_shards,
            create_gloo_process_groups=False,
            get_embedding_ranks=partial(embedding_ranks, config=self._config, tied=tied),
        )
        self._chunks = [self._chunk(index) for index in range(virtual)]
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=1e-3,
                bf16=job.precision is Precision.BF16,
                params_dtype=self._config.params_dtype,
                use_distributed_optimizer=plan.zero_stage > 0,
                overlap_param_gather=plan.zero_stage > 0,
            ),
            self._chunks,
            use_gloo_process_groups=False,
        )
        self._config.grad_scale_func = self._optimizer.scale_loss
        self._config.finalize_model_grads_func = finalize_model_grads
        self._config.no_sync_func = [chunk.no_sync for chunk in self._chunks]
        if virtual == 1:
            (self._config.no_sync_func,) = self._config.no_sync_func

    @property
    def groups(self) -> Mapping[tuple[int, ...], str]:
        """Axis of each process group, by its global ranks."""
        return groups_of(self._saved.plan, dist.get_rank())

    def run_step(self, _step: int) -> list[Tensor]:
        """Run one whole training step."""
        job, plan = self._saved.job, self._saved.plan
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        with sizes_answered(self):
            get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=[None] * len(self._chunks),
                model=self._chunks,
                num_microbatches=plan.num_microbatches(job),
                seq_length=job.seq_len,
                micro_batch_size=plan.microbatch_size,
                forward_only=False,
            )
        self._optimizer.step()
        return []

    def message_sizes(self) -> list[Iterator[list[int]]]:
        """Return the sizes of a step's messages from before, and from behind, in order."""
        job, plan = self._saved.job, self._saved.plan
        pp_rank, place = parallel_state.get_pipeline_model_parallel_rank(), plan.prediction_stage
        number = 1 + job.transformer.prediction_layers
        tokens = job.seq_len // (plan.tp if plan.sequence_parallel else 1)
        schedule = plan.schedule_of(self._saved.stack.pipeline_runtime)
        size = plan.pp, plan.num_microbatches(job), plan.num_virtual_stages
        found: dict[Phase, list[list[int]]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
        for phase, virtual_stage, _ in schedule.rank_actions(pp_rank, *size):
            border = virtual_stage * plan.pp + pp_rank + (phase is Phase.BACKWARD)
            if 0 < border < plan.num_stages:
                streams = number if place is not None and border > place else 1
                sizes = [streams * tokens, plan.microbatch_size, job.transformer.hidden_size]
                found[phase].append(sizes)
        return [iter(each) for each in found.values()]

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield weights, gradient buffers and the optimizer's states."""
        for chunk in self._chunks:
            yield from ((buffer, ByteKind.ACTIVATIONS) for buffer in chunk.module.buffers())
            yield from ((parameter, ByteKind.PARAMETERS) for parameter in chunk.parameters())
            if isinstance(chunk, megatron_fsdp.Wrapper):
                yield from megatron_fsdp.persistent_tensors(chunk)
                continue
            for buffer in chunk.buffers:
                yield buffer.grad_data, ByteKind.GRADIENTS
                if buffer.param_data is not None:
                    yield buffer.param_data, ByteKind.PARAMETERS
        for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            if part.optimizer is None:  # of a rank without weights
                continue
            masters = (each for group in part.optimizer.param_groups for each in group["params"])
            for master in masters:
                states = part.optimizer.state.get(master, {}).values()
                yield from ((each, ByteKind.OPTIMIZER) for each in (master, *states))

    def _chunk(self, index: int) -> DistributedDataParallel | megatron_fsdp.Wrapper:
        plan = self._saved.plan
        stage = index if plan.num_virtual_stages > 1 else None
        gpt = language_model(self._saved, self._config, stage)
        shards = plan.zero_stage > 0
        if plan.zero_stage == 3:
            return megatron_fsdp.wrap(
                self._config,
                gpt,
                num_distributed_optimizer_instances=plan.dp_cp // plan.num_shards,
                fsdp_double_buffer=self._saved.stack.doubles_unit_buffers,
                suggested_communication_unit_size=self._saved.stack.unit_gather_parameters or None,
            )
        return DistributedDataParallel(
            self._config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=True,
                overlap_param_gather=shards,
                use_distributed_optimizer=shards,
                num_distributed_optimizer_instances=plan.dp_cp // plan.num_shards,
            ),
            gpt,
            disable_bucketing=index > 0,
        )

    def _forward(self, _data: object, chunk: torch.nn.Module) -> tuple[Tensor, object]:
        job, plan = self._saved.job, self._saved.plan
        ids = torch.zeros((plan.microbatch_size, job.seq_len), dtype=torch.long)
        positions = torch.arange(job.seq_len).expand_as(ids)
        losses = chunk(ids, positions, None, labels=ids)
        return losses, lambda output: (output.float().mean(), {})


def language_model(
    saved: SavedPlan, config: TransformerConfig, stage: int | None
) -> torch.nn.Module:
    """Return the model of a virtual *stage*, which has no number where a rank has one stage."""
    job, model = saved.job, saved.job.transformer
    where = {"ignore_virtual": False, "vp_stage": stage}
    gpt = GPTModel(
        config,
        block_spec(config, stage),
        vocab_size=padded_vocab_size(model, saved.plan.tp, saved.stack.vocabulary_multiple),
        max_sequence_length=model.max_positions if model.positions == "learned" else job.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope" if model.positions == "rotary" else "learned_absolute",
        rotary_percent=model.rotary_fraction,
        vp_stage=stage,
        mtp_block_spec=prediction_spec(config, stage),
    )
    return Float16Module(config, gpt) if job.precision is Precision.BF16 else gpt


@contextmanager
def built(saved: SavedPlan, rank: int = 0) -> Iterator[MegatronJob]:
    """Have the job of a rank on a fake cluster for a while, for what runs without it.

    Without Transformer Engine its attention is of the rank's own tokens alone.
    """
    with cluster_answered(rank, saved.plan.world_size), answers():
        yield MegatronJob(saved)
