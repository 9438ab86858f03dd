"""Megatron-Core's own handler of activations on the host: which tensors leave, and in which order.

Its streams and events are stood in for, as is the attention kernel, which saves what Transformer
Engine's does; tensors lie in the memory of the CPU.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor
from witnesses import megatron_job  # what stands for Apex comes before Megatron-Core

from meshwright.hwprofiles import Attention, OffloadModule, Recompute, load_stack
from meshwright.simulator import (
    ModelSpec,
    PlanError,
    ResolvedPlan,
    TrainingJob,
    load_model,
    simulate,
)
from meshwright.simulator.blocks import BlockShape, BlockTable
from meshwright.simulator.layout import plan_stages
from meshwright.simulator.model import TRANSFORMER_LAYER, OffloadedLayer

from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip

assert megatron_job
TOKENS, WIDTH, HEADS, LAYERS = 1024, 1024, 16, 4
PARTS = (OffloadModule.CORE_ATTN, OffloadModule.ATTN_PROJ)
Log = list[tuple[str, str, int]]


class Core(torch.autograd.Function):
    """Attention that saves queries, keys, values, its output and the numbers of its softmax."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, log: Log) -> Tensor:  # type: ignore[override]
        """Return something as large as attention's output."""
        out, numbers = query + key + value, torch.zeros(HEADS, TOKENS)
        ctx.save_for_backward(query, key, value, out, numbers)
        ctx.log = log
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Read what was saved."""
        saved = ctx.saved_tensors
        assert all(each.numel() for each in saved)
        ctx.log.append(("backward", "core_attn", -1))
        return gradients[0], gradients[0], gradients[0], None


class Projection(torch.autograd.Function):
    """The product behind attention, which saves its input."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, log: Log) -> Tensor:  # type: ignore[override]
        """Return something as large."""
        ctx.save_for_backward(given)
        ctx.log = log
        return given * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Read what was saved."""
        assert ctx.saved_tensors[0].numel()
        ctx.log.append(("backward", "attn_proj", -1))
        return gradients[0] * 2, None


def layer(x: Tensor, parts: tuple[OffloadModule, ...], log: Log) -> Tensor:
    """Run a layer's attention as Attention.forward of Megatron-Core has it."""
    interface = offload.FineGrainedActivationOffloadingInterface
    query, key, value = x * 1, x * 2, x * 3
    has_core, has_projection = (each in parts for each in PARTS)
    with interface(has_core, query, "core_attn") as query:
        context = Core.apply(query, key, value, log)
    if has_core:
        given = [query, key, value]
        context = interface.group_commit(context, name="core_attn", forced_released_tensors=given)
    with interface(has_projection, context, "attn_proj") as context:
        out = Projection.apply(context, log)
    if has_projection:
        out = interface.group_commit(out, name="attn_proj", forced_released_tensors=[context])
    return x + out


@contextmanager
def handled(log: Log) -> Iterator[offload.PipelineOffloadManager]:
    """Let the handler run without a device, and note what it moves."""
    handler = offload.ChunkOffloadHandler
    moves = {name: getattr(handler, name) for name in ("bulk_offload_group", "bulk_reload_group")}

    def noted(name: str, groups: str) -> Any:
        def move(self: Any) -> None:
            group = getattr(self, groups)[-1]
            alike = [each for each in self.offload_groups if each._name == group._name]
            log.append((name, group._name, alike.index(group)))
            moves[name](self)

        return move

    stands = {name: MagicMock() for name in ("Stream", "Event", "stream", "current_stream", "nvtx")}
    extension = "megatron.core.extensions.transformer_engine"
    with (
        patch.multiple(torch.cuda, **stands),
        patch.object(Tensor, "record_stream", lambda *_: None),
        patch.object(Tensor, "is_pinned", lambda *_: False),
        patch.object(offload, "print_offload_summary_table"),
        patch.dict(sys.modules, {extension: SimpleNamespace(cpu_offload=SimpleNamespace())}),
        patch.object(
            handler, "bulk_offload_group", noted("bulk_offload_group", "_groups_to_offload")
        ),
        patch.object(handler, "bulk_reload_group", noted("bulk_reload_group", "_groups_to_reload")),
    ):
        offload.PipelineOffloadManager.OFFLOAD_MGR = None
        manager = offload.PipelineOffloadManager.get_instance()
        manager._cpu_tensor_pool.pin_memory = False
        yield manager
        offload.PipelineOffloadManager.OFFLOAD_MGR = None


def run(parts: tuple[OffloadModule, ...]) -> tuple[Log, int]:
    """Return what a second step moves, and the bytes that it copies to the host."""
    log: Log = []
    with handled(log) as manager:
        for _ in range(2):
            log.clear()
            manager.init_model_chunk_offload_handler(1, None)
            x = torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(LAYERS):
                x = layer(x, parts, log)
            x.sum().backward()
            manager.reset()
        return log, manager.offload_summary_total_bytes


def plan_of(parts: tuple[OffloadModule, ...]) -> tuple[TrainingJob, ResolvedPlan]:
    model = load_model("gpt2")
    assert isinstance(model, ModelSpec)
    sizes = {"num_layers": LAYERS, "hidden_size": WIDTH, "num_heads": HEADS, "dropout": False}
    sizes |= {"positions": "rotary", "ffn_hidden_size": 4 * WIDTH, "num_kv_heads": HEADS}
    job = TrainingJob(model=model.model_copy(update=sizes), global_batch_size=1, seq_len=TOKENS)
    plan = ResolvedPlan(attention=Attention.FLASH, stages=(LAYERS,), offload_modules=parts)
    return job, plan


@pytest.mark.parametrize("parts", [PARTS, PARTS[:1]])
def test_parts_leave_and_come_back_as_megatron_core_moves_them(
    parts: tuple[OffloadModule, ...],
) -> None:
    log, copied = run(parts)
    job, plan = plan_of(parts)
    (stage,) = plan_stages(job.model, plan)
    number, names = stage.offload.number, [str(each) for each in parts]
    leaving = [each for each in log if each[0] == "bulk_offload_group"]
    assert leaving == [("bulk_offload_group", n, at) for at in range(number) for n in names]
    # As soon as backward of a layer's part is over, that of the layer before comes back.
    back, expected = log[len(leaving) :], []
    for at in reversed(range(LAYERS)):
        for name in ("attn_proj", "core_attn"):
            expected.append(("backward", name, -1))
            if at and name in names:
                expected.append(("bulk_reload_group", name, at - 1))
    assert back == expected
    shape = BlockShape.of(job, replace(plan, stages=(LAYERS,)), load_stack("megatron-core-2026"))
    predicted = BlockTable().memory(shape, OffloadedLayer(TRANSFORMER_LAYER)).copied
    assert copied == number * predicted


@pytest.mark.parametrize(
    ("fields", "goes"),
    [
        ({"offload_layers": 3}, True),
        ({"offload_layers": 4}, False),
        ({"offload_layers": 3, "recompute": Recompute.FULL}, False),
        ({"offload_layers": 3, "pp": 2, "stages": (2, 2)}, False),
        ({"offload_modules": PARTS}, True),
        ({"offload_modules": PARTS[1:]}, False),
        ({"offload_modules": PARTS, "offload_layers": 3}, False),
    ],
)
def test_transformer_config_takes_and_refuses_the_same(
    fields: dict[str, Any], *, goes: bool
) -> None:
    job, plan = plan_of(())
    told: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "bf16": True,
        "pipeline_dtype": torch.bfloat16,
        "pipeline_model_parallel_size": fields.get("pp", 1),
        "cpu_offloading": "offload_layers" in fields,
        "cpu_offloading_num_layers": fields.get("offload_layers", 0),
        "fine_grained_activation_offloading": "offload_modules" in fields,
        "offload_modules": [str(each) for each in fields.get("offload_modules", ())],
    }
    if "recompute" in fields:
        full = {"granularity": "full", "method": "uniform", "num_layers": 1}
        told |= {f"recompute_{name}": value for name, value in full.items()}
    with nullcontext() if goes else pytest.raises((ValueError, AssertionError)):
        TransformerConfig(**told)
    with nullcontext() if goes else pytest.raises(PlanError):
        simulate(job, replace(plan, **fields), "dgx-h100", "megatron-core-2026")
