"""The program of the Megatron stacks: a rank's virtual stages, pipeline, buffers, optimizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.hwprofiles import Precision, StackProfile
from meshwright.simulator import PlanError
from meshwright.simulator.blocks import num_rope_caches
from meshwright.simulator.layout import gradient_bytes, rank_stages
from meshwright.simulator.model import in_engine_order, shares_embedding
from meshwright.simulator.schedules import Action, Phase
from meshwright.validate.programs.contract import ProgramRequest, refuse_offload, token_batch
from meshwright.validate.programs.experts import refuse_routing, update_routing_biases
from meshwright.validate.programs.layers import Ends, LayerOptions, VirtualStage
from meshwright.validate.programs.megatron.buffers import (
    BucketRule,
    DataParallelGroup,
    StageBuffers,
    all_reduce_tied_embedding,
    all_reduce_unsplit_gradients,
)
from meshwright.validate.programs.megatron.groups import MegatronGroups, megatron_groups
from meshwright.validate.programs.megatron.loss import vocabulary_loss
from meshwright.validate.programs.megatron.messages import (
    ActivationMessages,
    PipelineMessages,
    stage_streams,
)
from meshwright.validate.programs.megatron.optimizer import ShardedAdam
from meshwright.validate.programs.megatron.parts import ExpertSetting, MegatronParts
from meshwright.validate.programs.megatron.pipeline import PipelineRank, StageInput
from meshwright.validate.programs.megatron.tensor_parallel import DeferredSink
from meshwright.validate.programs.megatron.variables import (
    InterleavedVariables,
    ScheduleVariables,
)
from meshwright.validate.programs.megatron.weights import fill_weights, weight_parts
from meshwright.validate.ranks import ByteKind

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new parameters *dtype* for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class MegatronProgram:
    """One rank of a Megatron plan.

    Args:
        request: Job, plan, stack and rank to build.
    """

    settling_steps = 1

    def __init__(self, request: ProgramRequest) -> None:
        check_megatron(request)
        self.request = request
        plan, job, stack = request.plan, request.job, request.stack
        self._groups = megatron_groups(request)
        if request.initialise:  # tensor-parallel ranks drop the same of what they all hold
            torch.manual_seed(request.rank // plan.tp)
        self.stages, self.buffers, self.of_experts = _virtual_stages(request, self._groups)
        for each in (*self.buffers, *self.of_experts):
            each.dummy_gradients = self.buffers[0].dummy_gradients
        self.adam = ShardedAdam(
            [each for each in (self.buffers, self.of_experts) if each],
            self._groups.norm,
            request.device,
            is_joint=stack.joint_gradient_norm,
        )
        index = self._groups.pipeline.index
        actions = plan.schedule_of(stack.pipeline_runtime).rank_actions(
            index, plan.pp, request.num_microbatches, plan.num_virtual_stages
        )
        self._last_backward = {
            action.virtual_stage: action.microbatch
            for action in actions
            if action.phase is Phase.BACKWARD
        }
        shares = rank_stages(job.model, plan, index)
        self.messages = PipelineMessages(self._groups.pipeline)
        stage_messages = _stage_messages(request, self._groups, self.messages)
        self.pipeline = PipelineRank(
            actions,
            self.stages,
            shares,
            stage_messages,
            self._loss,
            _variables(request, actions, index, stage_messages),
        )
        self.reports = any(each.has_head for each in shares) and self._groups.tp.rank == 0
        self._unsplit = _unsplit_weights(self.stages, request)
        self._table = _tied_embedding(self.stages, request)

    @property
    def groups(self) -> Mapping[tuple[int, ...], str]:
        """Axis of each process group, by its ranks."""
        return self._groups.names

    def run_step(self, step: int) -> list[Tensor]:
        """Run a whole training step; return the losses of its microbatches."""
        for buffers in (*self.buffers, *self.of_experts):
            buffers.start_step()
        losses = self.pipeline.run(partial(self._microbatch, step), self._before_backward)
        self.messages.flush()
        self._sum_gradients()
        self.adam.step()
        return losses if self.reports else []

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a microbatch."""
        kernel = self.request.stack.loss
        loss = vocabulary_loss(logits, targets.t().contiguous(), self._groups.tp, kernel=kernel)
        self.stages[-1].free_mtp_logits()
        return loss

    def _sum_gradients(self) -> None:
        """Sum gradients that the last backward pass has left unsummed.

        Megatron-Core reduces over data ranks, then sums over tensor ranks, then over both ends
        (`finalize_model_grads`, core r0.8). Before, tensor ranks came first, and the distributed
        optimizer scattered last (`reduce_model_grads` of Megatron-LM 3.0, 2022).
        """
        is_core = self.request.stack.overlap_gradient_reduce
        scatters_last = self.buffers[0].shards and not is_core
        if not is_core:
            all_reduce_unsplit_gradients(self.buffers, self._unsplit, self._groups.tp)
        if scatters_last:
            self._all_reduce_embedding()
        for buffers in (*self.buffers, *self.of_experts):
            buffers.finish()
        if is_core:
            all_reduce_unsplit_gradients(self.buffers, self._unsplit, self._groups.tp)
        if not scatters_last:
            self._all_reduce_embedding()
        update_routing_biases(self.stages, self._groups.stage)

    def _all_reduce_embedding(self) -> None:
        if self._table is not None and self._groups.ends is not None:
            all_reduce_tied_embedding(self.buffers, self._table, self._groups.ends)

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield weights, gradients, dummy gradients and optimizer states."""
        for buffers in (*self.buffers, *self.of_experts):
            for bucket in buffers.buckets:
                yield bucket.weights, ByteKind.PARAMETERS
                yield bucket.gradients, ByteKind.GRADIENTS
        for each in self.buffers[0].dummy_gradients.values():
            yield each, ByteKind.ACTIVATIONS
        yield from self.adam.persistent_tensors()

    def _before_backward(self, virtual_stage: int, microbatch: int) -> None:
        is_last = self._last_backward[virtual_stage] == microbatch
        for buffers in (self.buffers, self.of_experts):
            if buffers:
                buffers[virtual_stage].last_pass = is_last

    def _microbatch(self, step: int, index: int) -> StageInput:
        request = self.request
        size = request.plan.microbatch_size
        # Fake tensors have no values: any ids do.
        if not request.initialise:
            num_tokens = request.job.seq_len // request.plan.cp
            ids = torch.zeros(size, num_tokens, dtype=torch.long, device=request.device)
            return StageInput(tokens=ids, targets=ids)
        per_replica, cp = request.plan.num_microbatches(request.job) * size, self._groups.cp
        first = self._groups.dp.rank // cp.size * per_replica + index * size
        sequences = range(first, first + size)
        tokens, targets = token_batch(request.job, step, sequences, request.device)
        return StageInput(tokens=cp.own_tokens(tokens), targets=cp.own_tokens(targets))


def _variables(
    request: ProgramRequest, actions: Sequence[Action], index: int, messages: ActivationMessages
) -> ScheduleVariables | None:
    """Return the variables of the stack's schedules, if they keep p2p buffers alive."""
    plan = request.plan
    if not request.stack.holds_messages or plan.pp == 1:
        return None
    if plan.num_virtual_stages == 1:
        return ScheduleVariables(messages.buffer)
    place = (index, plan.pp)
    return InterleavedVariables(messages.buffer, actions, place, plan.num_virtual_stages)


def check_megatron(request: ProgramRequest) -> None:
    """Raise PlanError for what this program does not express."""
    plan, model = request.plan, request.job.transformer
    if model.num_kv_heads % plan.tp:
        raise PlanError(
            f"num_kv_heads={model.num_kv_heads} and tp={plan.tp}: the program does not copy "
            "key-value heads; tp must divide them"
        )
    if request.job.precision not in DTYPES:
        raise PlanError(
            f"precision={request.job.precision} has no program; allowed: {', '.join(DTYPES)}"
        )
    refuse_offload(plan)
    _refuse_experts(request)
    if model.activation == "gelu":
        raise PlanError(f"activation=gelu of {model.name} has no PyTorch program")
    if model.mlm_head or model.token_types or model.positions == "alibi":
        raise PlanError(
            f"{model.name} has no program; allowed: models in the style of GPT and Llama"
        )


def _refuse_experts(request: ProgramRequest) -> None:
    """Raise PlanError for experts that the program does not write."""
    plan = request.plan
    if plan.ep > 1 and not plan.zero_stage and plan.dp_cp > 1:
        raise PlanError(f"zero_stage=0 with ep={plan.ep} has no PyTorch program; allowed: 1")
    if request.job.transformer.experts is not None and not request.stack.grouped_experts:
        raise PlanError("grouped_experts=false has no PyTorch program; allowed: true")
    refuse_routing(request.job, plan)


def _layer_options(request: ProgramRequest, dropout: float) -> LayerOptions:
    plan = request.plan
    return LayerOptions(
        attention=plan.attention,
        recompute=plan.recompute,
        dropout=dropout,
        num_microbatches=request.num_microbatches,
    )


def _virtual_stages(
    request: ProgramRequest, groups: MegatronGroups
) -> tuple[list[VirtualStage], list[StageBuffers], list[StageBuffers]]:
    """Return the rank's virtual stages, their buffers, and those of experts that have their own."""
    plan, model = request.plan, request.job.transformer
    index = groups.pipeline.index
    dropout = request.dropout if model.dropout else 0.0
    options = _layer_options(request, dropout)
    precision, size = request.job.precision, request.vocab_size
    kept_bytes, _ = gradient_bytes(request.stack, precision, plan.gradient_formats)
    stack = request.stack.model_copy(update={"gradient_bytes": kept_bytes})
    stages, all_buffers = [], []
    of_experts: list[StageBuffers] = []
    for virtual_stage, share in enumerate(rank_stages(model, plan, index)):
        # Virtual stages are dealt to the pipeline ranks round-robin.
        first = sum(plan.stages[: index + virtual_stage * plan.pp])
        # The buffers behind them are made of the stage's weights, hence after it.
        sink, own = DeferredSink(), DeferredSink()
        setting = ExpertSetting(groups.experts, request.routing, own)
        parts = MegatronParts(
            groups.tp, sink, vocab_size=size, dropout=dropout, cp=groups.cp, experts=setting
        )
        parts.loss, parts.copies_operands = stack.loss, stack.transformer_engine
        with default_dtype(DTYPES[precision]), request.device:
            layers = range(first, first + share.num_layers)
            angles = request.num_rope_elements * num_rope_caches(model, [share])
            ends = Ends(share.has_embedding, share.has_head, share.has_predictions, angles)
            stage = VirtualStage(model, layers, options, parts, ends)
        if request.initialise:
            fill_weights(stage, model, groups.tp, size, groups.experts)
        buffers = _stage_buffers(stage, stack, request, groups)
        sink.target = own.target = buffers[0]
        if groups.edp is not None:
            own.target = buffers[1]
            of_experts.append(buffers[1])
        stages.append(stage)
        all_buffers.append(buffers[0])
    return stages, all_buffers, of_experts


def _stage_buffers(
    stage: VirtualStage, stack: StackProfile, request: ProgramRequest, groups: MegatronGroups
) -> list[StageBuffers]:
    """Return the buffers of a virtual stage, and of experts that other ranks hold than these."""
    plan, model = request.plan, request.job.transformer
    shards = plan.zero_stage > 0 and plan.dp_cp > 1
    parts = list(weight_parts(stage, model, request.vocab_size, groups.experts))
    if stack.transformer_engine:
        parts = in_engine_order(parts, lambda part: part.whole.name.partition(".")[0])
    are_apart = groups.edp is not None
    of_experts, others = (
        [part.parameter for part in parts if (are_apart and part.expert is not None) is wanted]
        for wanted in (True, False)
    )
    has_embedding = stage.embedding is not None

    def buffers_of(
        weights: list[nn.Parameter], dp: DataParallelGroup, far: nn.Parameter | None = None
    ) -> StageBuffers:
        return StageBuffers(
            weights,
            stack,
            dp,
            shards=plan.zero_stage > 0 and dp.size > 1,
            is_duplicate=_duplicates(stage, request, groups),
            rule=BucketRule.of(stack, plan.dp_cp, is_first=has_embedding, far_embedding=far),
        )

    far = _tied_embedding([stage], request) if shards else None
    if stage.predictions is not None:  # a GPTModel has its table ahead of all
        others = list(dict.fromkeys([*_tables(stage, request), *others]))
    buffers = [buffers_of(others, groups.dp, far)]
    if stage.head is not None and model.tied_embeddings and has_embedding:
        buffers[0].shared.update(_tables(stage, request))
    elif stage.losses is not None:
        (matrix,) = _weights_named("output_embedding.weight", stage, request)
        buffers[0].num_products[matrix] = 1 + model.prediction_layers
    if groups.edp is not None:
        buffers.append(buffers_of(of_experts, groups.edp))
    return buffers


def _duplicates(
    stage: VirtualStage, request: ProgramRequest, groups: MegatronGroups
) -> Callable[[nn.Parameter], bool]:
    """Return the test for weights that another rank counts in the gradient norm."""
    model = request.job.transformer
    copies = set()
    for part in weight_parts(stage, model, request.vocab_size):
        if part.whole.tp_dim is None and part.expert is None and groups.tp.rank > 0:
            copies.add(part.parameter)
        if part.whole.name == "word_embedding.weight" and stage.embedding is None:
            copies.add(part.parameter)
    return copies.__contains__


def _unsplit_weights(stages: list[VirtualStage], request: ProgramRequest) -> list[nn.Parameter]:
    """Return the weights that see only a rank's own tokens, or its own heads."""
    names: tuple[str, ...] = ("query_norm.", "key_norm.")
    if request.plan.sequence_parallel:
        names = (
            "norm.",
            "attention_output.bias",
            "mlp_out.bias",
            "router.",
            "shared_gate.",
            "_down.",
        )
    return [
        part.parameter
        for stage in stages
        for part in weight_parts(stage, request.job.transformer, request.vocab_size)
        if part.whole.tp_dim is None and any(name in part.whole.name for name in names)
    ]


def _tied_embedding(stages: list[VirtualStage], request: ProgramRequest) -> nn.Parameter | None:
    """Return the tied embedding that two stages share, on these."""
    if request.plan.pp == 1 or not shares_embedding(request.job.model):
        return None
    tables = [table for stage in stages for table in _tables(stage, request)]
    return tables[0] if tables else None


def _tables(stage: VirtualStage, request: ProgramRequest) -> list[nn.Parameter]:
    """Return the word embedding of *stage*, if it has one."""
    return _weights_named("word_embedding.weight", stage, request)


def _weights_named(name: str, stage: VirtualStage, request: ProgramRequest) -> list[nn.Parameter]:
    """Return the weight of *stage* that is a part of the model's of that *name*, if it has one."""
    return [
        part.parameter
        for part in weight_parts(stage, request.job.transformer, request.vocab_size)
        if part.whole.name == name
    ]


def _stage_messages(
    request: ProgramRequest, groups: MegatronGroups, messages: PipelineMessages
) -> ActivationMessages:
    plan, job = request.plan, request.job
    splits = groups.tp.splits_tokens
    tokens = job.seq_len // plan.cp // (plan.tp if splits else 1)
    in_parts = request.stack.scatter_gather_p2p and plan.tp > 1 and not splits
    like = torch.empty(0, dtype=DTYPES[job.precision], device=request.device)
    shape = (tokens, plan.microbatch_size, job.transformer.hidden_size)
    streams = stage_streams(plan, groups.pipeline.index, 1 + job.transformer.prediction_layers)
    return ActivationMessages(messages, shape, streams, like, groups.tp if in_parts else None)
