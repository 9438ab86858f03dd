"""An expert layer of Megatron-Core's local spec on one of a few ranks without data."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict
from torch.nn import functional

from meshwright.hwprofiles import RecomputeModule
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.simulator.model import Experts, ModelSpec
from witnesses import megatron_config, megatron_job
from witnesses.boundary import modules_converted, values_answered
from witnesses.expert_layers import NUM_SEQUENCES, TOKENS, Run

from megatron.core import parallel_state  # isort: skip  (after the witness, which stands for Apex)
from megatron.core.activations import quick_gelu  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.transformer.moe import moe_utils, token_dispatcher  # isort: skip
from megatron.core.transformer.torch_norm import L2Norm  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer  # isort: skip


Modules = tuple[RecomputeModule, ...]


def fused_norm(_: torch.nn.Module, x: Tensor) -> Tensor:
    """Return the RMS norm without weights in one kernel, as Megatron-Core compiles it."""
    return functional.rms_norm(x, x.shape[-1:])


def rows_of(model: ModelSpec) -> int:
    """Return the rows that all experts of a layer get."""
    assert model.experts is not None
    return NUM_SEQUENCES * TOKENS * model.experts.experts_per_token


@contextmanager
def dispatched(model: ModelSpec, tp: int) -> Iterator[None]:
    """Let Megatron-Core sort tokens by expert: rows of all ranks, equally many each."""
    rows = rows_of(model) // tp

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
        patch.object(L2Norm, "_norm", fused_norm),
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


def facts(model: ModelSpec, experts: Experts) -> dict[str, object]:
    """Return the fields of Megatron-Core's configuration for gpt-oss and Llama 4."""
    config_fields: dict[str, object] = {
        "moe_apply_probs_on_input": experts.weighs_inputs,
        "add_bias_linear": experts.bias,
        "add_qkv_bias": model.attention_bias,
    }
    if model.attention_sinks:
        config_fields["softmax_type"] = "learnable"
    if experts.activation == "clamped":
        config_fields |= {"activation_func": quick_gelu, "activation_func_clamp_value": 7.0}
        config_fields["glu_linear_offset"] = 1.0
    if experts.scores == "sigmoid" and not experts.weighs_inputs:
        config_fields["moe_router_topk_scaling_factor"] = 2.5
    return config_fields


def megatron_module(
    model: ModelSpec,
    tp: int,
    ep: int,
    etp: int,
    *,
    rotary: bool = True,
    modules: Modules = (),
) -> TransformerLayer:
    """Return a layer of Megatron-Core's local spec on one of a few ranks."""
    experts = model.experts
    assert experts is not None
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tp,
        1,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    job = TrainingJob(model=model, global_batch_size=NUM_SEQUENCES, seq_len=TOKENS)
    plan = ResolvedPlan(tp=tp, sequence_parallel=tp > 1, stages=(2,))
    config = megatron_config.transformer_config(job, plan)
    config = replace(
        config,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        moe_ffn_hidden_size=experts.hidden_size,
        num_moe_experts=experts.num_experts,
        moe_router_topk=experts.experts_per_token,
        moe_router_score_function=experts.scores.removesuffix(" of chosen"),
        moe_shared_expert_intermediate_size=experts.shared_hidden_size or None,
        moe_shared_expert_gate=experts.shared_gate,
        moe_token_dispatcher_type="alltoall",
        moe_router_force_load_balancing=True,
        moe_router_load_balancing_type="none",
        gradient_accumulation_fusion=False,
        no_rope_freq=None if rotary else [1] * model.num_layers,
        recompute_granularity="selective" if modules else None,
        recompute_modules=[str(each) for each in modules] or None,
        **facts(model, experts),
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts.num_experts,
        moe_grouped_gemm=False,
        normalization="RMSNorm" if model.norm == "rmsnorm" else None,
        qk_layernorm=model.qk_norm == "head",
        qk_l2_norm=model.qk_norm == "unweighted",
    )
    return TransformerLayer(config, spec.submodules, layer_number=1)


def cut(x: Tensor, size: int) -> Tensor:
    """Return ``[tokens, batch, ..]`` in chunks of a *size*, zeros behind the last tokens."""
    short = -len(x) % size
    if short:
        x = torch.cat([x, x.new_zeros(short, *x.shape[1:])])
    x = x.reshape(-1, size, *x.shape[1:]).transpose(0, 1)
    return x.reshape(size, -1, *x.shape[3:]).contiguous()


def attend_in_chunks(attention: torch.nn.Module, size: int) -> None:
    """Let Megatron-Core's *attention* see chunks of a *size* as sequences.

    In the order in which NVIDIA's Llama 4 does it, whose module this stands for: ahead of positions
    queries, keys and values are cut, behind its core what comes out is put in order.
    """
    projected, core = attention.get_query_key_value_tensors, attention.core_attention.forward

    def chunks(*given: object, **how: object) -> list[Tensor]:
        parts = [*projected(*given, **how)]
        for index, each in enumerate(parts):
            parts[index] = cut(each, size)
            del each
        return parts

    def joined(query: Tensor, *given: object, **how: object) -> Tensor:
        out = core(query, *given, **how)
        out = out.reshape(size, -1, NUM_SEQUENCES, out.shape[-1]).transpose(0, 1)
        return out.reshape(-1, *out.shape[2:])[:TOKENS]

    attention.get_query_key_value_tensors = chunks
    attention.core_attention.forward = joined


def megatron_layer(
    model: ModelSpec,
    tp: int,
    ep: int,
    etp: int,
    *,
    rotary: bool = True,
    modules: Modules = (),
) -> Run:
    """Return a pass through such a layer."""
    layer = megatron_module(model, tp, ep, etp, rotary=rotary, modules=modules)
    dispatcher = layer.mlp.token_dispatcher
    balance(dispatcher, rows_of(model) // tp, etp)
    chunk = TOKENS
    if rotary and model.chunked_window and model.window < TOKENS:
        chunk = model.window
        attend_in_chunks(layer.self_attention, chunk)
    rotary_embedding = torch.empty(chunk, 1, 1, model.rotary_dim)
    put_together = dispatcher.combine_postprocess

    def forget() -> None:
        """Let it forget a layer's last pass, which is not of this one."""
        names = [name for name, each in vars(dispatcher).items() if isinstance(each, Tensor)]
        for name in names:
            setattr(dispatcher, name, None)

    def last(x: Tensor) -> Tensor:
        out = put_together(x)
        forget()
        return out

    if RecomputeModule.MOE in modules:  # a pass of its own begins in backward
        dispatcher.combine_postprocess = last

    def run(x: Tensor) -> Tensor:
        out = layer(x, None, rotary_pos_emb=rotary_embedding)[0]
        forget()
        return out

    return run
