"""The PyTorch programs of plans: DistributedDataParallel, FSDP2, torchtitan's composition."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined] # documented, not declared
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import set_checkpoint_early_stop

from meshwright.hwprofiles import MEBI, Offload, Precision
from meshwright.simulator import PlanError
from meshwright.simulator.blocks import BlockShape, layer_code_of
from meshwright.simulator.graph import RotaryFormula
from meshwright.simulator.layout import (
    chosen_formats,
    is_unwrapped,
    reshards_units,
    syncs_by_default,
)
from meshwright.validate.programs.contract import ProgramRequest, refuse_offload, token_batch
from meshwright.validate.programs.experts import RoutedGroup, refuse_routing, update_routing_biases
from meshwright.validate.programs.layers import VirtualStage
from meshwright.validate.programs.pytorch.fully_sharded import (
    ExpertShards,
    mixed_precision,
    shard_stage,
    views_returned,
)
from meshwright.validate.programs.pytorch.layout import (
    RankLayout,
    build_stage,
    make_layout,
    stage_indices,
)
from meshwright.validate.programs.pytorch.loss import LossOfMicrobatch, loss_context
from meshwright.validate.programs.pytorch.optimizer import (
    ExpertNorms,
    clip_gradients,
    clip_gradients_by_axis,
    local_gradients,
    make_optimizer,
    summed_gradients,
    trained_tensors,
)
from meshwright.validate.programs.pytorch.parts import Embedding, Head, plain_parts, tie_embeddings
from meshwright.validate.programs.pytorch.precision import DTYPES, autocast
from meshwright.validate.programs.pytorch.runner import Runner, microbatch_loop, pipeline
from meshwright.validate.programs.pytorch.tensor_parallel import split_over_tensor_ranks
from meshwright.validate.ranks import ByteKind

GRADIENT_BYTES = 4
COMPRESSION = {Precision.BF16: bf16_compress_hook, Precision.FP16: fp16_compress_hook}


def build_ddp(request: ProgramRequest) -> "DdpProgram":
    """Return the program of a stack that keeps the whole model on every rank.

    Raises:
        PlanError: If PyTorch cannot express the request.
    """
    refuse_unsupported(request)
    return DdpProgram(request)


def build_fully_sharded(request: ProgramRequest) -> "FullyShardedProgram":
    """Return the program of a stack that shards by FSDP2, with tensor parallelism and pipeline.

    Raises:
        PlanError: If PyTorch cannot express the request.
    """
    refuse_unsupported(request)
    return FullyShardedProgram(request)


def refuse_unsupported(request: ProgramRequest) -> None:
    """Raise PlanError for what the PyTorch programs cannot express, by its name."""
    model, plan = request.job.transformer, request.plan
    refuse_offload(plan, Offload.PARAMETERS)
    formats = f"allowed: {', '.join(DTYPES)}"
    is_unweighted = model.qk_norm == "unweighted"
    places = ("rotary",) if is_unweighted else ("learned", "rotary")
    of_places = f"{', '.join(places)}{' with qk_norm=unweighted' * is_unweighted}"
    refusals = [
        (request.job.precision not in DTYPES, "precision", f"{request.job.precision}; {formats}"),
        (
            plan.find_unused and not request.initialise,
            "find_unused",
            "True on tensors without values; allowed: False, or --backend gloo",
        ),
        (model.positions not in places, "positions", f"{model.positions}; allowed: {of_places}"),
        (model.mlm_head, "mlm_head", "True; allowed: False"),
        (model.token_types > 0, "token_types", f"{model.token_types}; allowed: 0"),
        (model.embedding_norm, "embedding_norm", "True; allowed: False"),
        (model.qk_norm == "head" and plan.tp > 1, "qk_norm=head and tp", f"{plan.tp}; allowed: 1"),
        (
            model.num_kv_heads % plan.tp > 0,
            "tp",
            f"{plan.tp}; allowed: a divisor of num_kv_heads={model.num_kv_heads}",
        ),
        (
            plan.schedule == "1f1b" and request.num_microbatches < plan.pp,
            "num_microbatches",
            f"{request.num_microbatches}; allowed: schedule=1f1b needs pp={plan.pp} or more",
        ),
    ]
    if model.experts is not None:
        refuse_routing(request.job, plan)
    for is_refused, name, text in refusals:
        if is_refused:
            raise PlanError(f"{model.name} has no PyTorch program with {name}={text}")


class DdpProgram:
    """A whole model on every rank; gradients are averaged in buckets under the last backward.

    Gradients that are views of the buckets are zeroed, others freed, as by default. Loss scaling of
    fp16 is left out; it multiplies one number.

    Args:
        request: Job and plan to build; its process group is that of all ranks.
    """

    settling_steps = 2  # the second rebuilds buckets in the order in which gradients came

    def __init__(self, request: ProgramRequest) -> None:
        self._request = request
        self._layout = make_layout(request)
        device = request.device
        stage = _whole_stage(request, 0, device, self._layout)
        if request.job.transformer.tied_embeddings:
            tie_embeddings(stage)
        if request.stack.broadcasts_buffers and request.job.transformer.positions == "rotary":
            # Those of transformers have them as buffers; the layers here make their own.
            width = request.job.transformer.rotary_dim // 2
            for name in ("frequencies", "first_frequencies"):
                stage.register_buffer(name, torch.zeros(width, device=device), persistent=False)
        bucket_bytes = request.stack.gradient_bucket_parameters * GRADIENT_BYTES
        self._model = DistributedDataParallel(
            stage,
            device_ids=[device] if device.type == "cuda" else None,
            # None keeps the first bucket of 1 MiB, which any number of our own would drop.
            bucket_cap_mb=None if bucket_bytes == 25 * MEBI else bucket_bytes / MEBI,
            gradient_as_bucket_view=request.stack.gradient_as_bucket_view,
            find_unused_parameters=request.plan.find_unused,
        )
        hook = _compression(request)
        if hook is not None:
            self._model.register_comm_hook(None, hook)
        self._optimizer = make_optimizer(self._model.parameters())
        self._loss = LossOfMicrobatch(request.num_microbatches)

    @property
    def groups(self) -> Mapping[tuple[int, ...], str]:
        """Axis of each process group, by its global ranks."""
        return self._layout.groups

    def run_step(self, step: int) -> list[Tensor]:
        """Run one whole training step and return the loss of each microbatch."""
        # Gradients that are views of buckets stay: freed ones would be made outside of them.
        self._optimizer.zero_grad(set_to_none=not self._request.stack.gradient_as_bucket_view)
        tokens, targets = _batch(self._request, self._layout, step)
        count = self._request.num_microbatches
        batches = list(zip(tokens.chunk(count), targets.chunk(count), strict=True))
        with nullcontext() if self._request.plan.sync_each_microbatch else self._model.no_sync():
            for batch in batches[:-1]:
                self._pass(*batch)
        self._pass(*batches[-1])
        clip_gradients(local_gradients(self._model.parameters()), [], None)
        self._optimizer.step()
        return self._loss.take()

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield weights, gradients and the optimizer's states."""
        return trained_tensors(self._model.parameters(), self._optimizer)

    def _pass(self, tokens: Tensor, targets: Tensor) -> None:
        with autocast(self._request.job.precision, self._request.device.type):
            loss = self._loss(self._model(tokens), targets)
        loss.backward()


class FullyShardedProgram:
    """Stages sharded by FSDP2, also over one rank, where it still computes in 16 bit.

    In fp32 one rank has plain weights, where the stack does not wrap it.

    A tied embedding away from its end of a pipeline is a copy; the gradients of both are summed.
    Loss scaling of fp16 is left out.

    Args:
        request: Job and plan to build; its process group is that of all ranks.
    """

    settling_steps = 1

    def __init__(self, request: ProgramRequest) -> None:
        plan, self._request = request.plan, request
        self._layout = make_layout(request)
        indices = stage_indices(plan, self._layout.coordinate("pp"))
        self._stages = {index: _sharded_stage(request, index, self._layout) for index in indices}
        self._parameters = [p for stage in self._stages.values() for p in stage.parameters()]
        self._optimizer = make_optimizer(self._parameters)
        self._loss = LossOfMicrobatch(request.num_microbatches)
        self._run = self._runner()

    @property
    def groups(self) -> Mapping[tuple[int, ...], str]:
        """Axis of each process group, by its global ranks."""
        return self._layout.groups

    def run_step(self, step: int) -> list[Tensor]:
        """Run one whole training step; return the losses where the rank reports them.

        Gradients of the step stay until the next one.
        """
        self._optimizer.zero_grad()
        whole = _batch(self._request, self._layout, step)  # lives as long as the step
        context = self._layout.context
        tokens, targets = whole if context is None else map(context.own_tokens, whole)
        if self._request.stack.sums_tokens and self._layout.batch_group is not None:
            dist.all_reduce(torch.tensor(targets.numel()), group=self._layout.batch_group)
        stops_early = set_checkpoint_early_stop(self._request.stack.recompute_stops_early)
        with loss_context(is_split=self._request.plan.tp > 1), views_returned(), stops_early:
            self._run(tokens, targets)
        table = self._table()
        if table is not None:
            dist.all_reduce(local_gradients([table])[0], group=self._layout.tied_embedding_group)
        self._clip()
        update_routing_biases(self._stages.values(), self._layout.stage_group)
        self._optimizer.step()
        losses = self._loss.take()
        return losses if self._layout.reports else []

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield this rank's shards of weights, gradients and the optimizer's states."""
        return trained_tensors(self._parameters, self._optimizer)

    def _clip(self) -> None:
        counts = [self._counts(each) for each in self._parameters]
        gradients = local_gradients(self._parameters)
        if self._request.stack.norm_by_axis:
            sums = summed_gradients(self._parameters)
            of_experts = ExpertNorms(self._layout.expert_norm_meshes, self._are_of_experts())
            clip_gradients_by_axis(gradients, sums, counts, self._layout.mesh, of_experts)
            return
        shared = [each for each, is_own in zip(gradients, counts, strict=True) if not is_own]
        own = [*compress(gradients, counts)]
        clip_gradients(own, shared, self._layout.norm_group)

    def _runner(self) -> Runner:
        request = self._request
        if request.plan.pp > 1:
            return pipeline(list(self._stages.items()), request, self._layout, self._loss)
        plan = request.plan
        reduces_each = syncs_by_default(request.stack, plan.zero_stage, plan.pp)
        if plan.sync_each_microbatch is not None:
            reduces_each = plan.sync_each_microbatch
        return microbatch_loop(self._stages[0], request, self._loss, reduces_each=reduces_each)

    def _are_of_experts(self) -> list[bool]:
        """Return for each parameter whether it is of experts that other ranks hold than layers."""
        if self._layout.expert_mesh is None:
            return [False] * len(self._parameters)
        named = (name for stage in self._stages.values() for name, _ in stage.named_parameters())
        return [".mlp.experts." in name for name in named]

    def _table(self) -> Tensor | None:
        """Return this rank's copy of an embedding that both ends of a pipeline hold."""
        if self._layout.tied_embedding_group is None:
            return None
        for stage in self._stages.values():
            if isinstance(stage.embedding, Embedding):
                return stage.embedding.words.weight
            if isinstance(stage.head, Head):
                return stage.head.output.weight
        return None

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Return True if this rank counts a gradient in the norm; another rank counts the rest.

        One that tensor parallelism does not split, as the whole one of a table that is, counts on
        its first rank, a table that both ends of a pipeline hold on the first stage.
        """
        if parameter is self._table() and 0 not in self._stages:
            return False
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            return True
        names = gradient.device_mesh.mesh_dim_names or ()
        is_split = "tp" in names and gradient.placements[names.index("tp")].is_shard()
        return is_split or self._layout.coordinate("tp") == 0


def _compression(
    request: ProgramRequest,
) -> Callable[[object, GradBucket], torch.futures.Future[Tensor]] | None:
    """Return the hook that reduces buckets in another format than gradients are kept in."""
    wanted = request.plan.gradient_formats
    chosen = chosen_formats(request.stack, request.job.precision, wanted)
    if chosen.reduced is None or chosen.reduced == chosen.kept:
        return None
    compress = COMPRESSION[chosen.reduced]

    # By its own name PyTorch refuses bfloat16 to all backends but NCCL.
    def hook(_state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return compress(None, bucket)  # type: ignore[arg-type] # None is all ranks

    return hook


def _whole_stage(
    request: ProgramRequest,
    index: int,
    device: torch.device,
    layout: RankLayout,
) -> VirtualStage:
    parts = plain_parts(
        request.job.transformer,
        vocab_size=request.vocab_size,
        dropout=request.dropout,
        fuses_qkv=request.fuses_qkv,
        cp=layout.context,
        experts=RoutedGroup(
            layout.experts, request.routing, of_transformers=request.stack.transformers_layers
        ),
    )
    spelling = layer_code_of(BlockShape.of(request.job, request.plan, request.stack))
    parts.casts_rope_cache = spelling.rotary is RotaryFormula.TABLE
    parts.fuses_gate = spelling.fuses_mlp
    return build_stage(request, index, parts, device)


def _sharded_stage(request: ProgramRequest, index: int, layout: RankLayout) -> VirtualStage:
    plan = request.plan
    # Sharding a layer moves it to its device: whole, one layer at a time is there.
    first = torch.device("cpu") if request.initialise else request.device
    stage = _whole_stage(request, index, first, layout)
    if plan.tp > 1:
        split_over_tensor_ranks(stage, layout.mesh["tp"], sequence_parallel=plan.sequence_parallel)
    if request.job.transformer.tied_embeddings:
        tie_embeddings(stage)
    if _is_unwrapped(request):
        return stage if first == request.device else stage.to(request.device)
    policy = mixed_precision(request.job.precision, request.stack, plan.gradient_formats)
    reshards, experts = reshards_units(plan, request.stack), ExpertShards.of(request, layout)
    if experts is not None:
        experts.shard(stage, policy, request.stack, reshards=reshards)
    shard_stage(
        stage,
        layout.data_mesh,
        policy,
        request.stack,
        reshards=reshards,
        offloads=plan.offload is Offload.PARAMETERS,
    )
    if experts is not None and request.stack.prefetches_units:
        experts.gather_ahead(stage)
    return stage


def _is_unwrapped(request: ProgramRequest) -> bool:
    """Return True if fully_shard is not called, as weights are those of one rank.

    In 16 bits it does, also where the stack would run one device under autocast.
    """
    is_plain = request.job.precision is Precision.FP32
    return is_plain and bool(is_unwrapped(request.stack, request.plan.dp_cp))


def _batch(request: ProgramRequest, layout: RankLayout, step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of the sequences that this rank has a part of."""
    plan, job = request.plan, request.job
    first = layout.dp_rank * (job.global_batch_size // plan.dp)
    sequences = range(first, first + request.num_microbatches * plan.microbatch_size)
    return token_batch(job, step, sequences, request.device)
