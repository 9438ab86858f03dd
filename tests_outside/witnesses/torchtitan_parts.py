"""Parts that jobs of torchtitan share, whichever version it is: shapes, feed and tensors."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Literal, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_impls import op_implementations_dict
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional

from meshwright.hwprofiles import Precision
from meshwright.planner.reports import SavedPlan
from meshwright.simulator import ResolvedPlan, TrainingJob
from meshwright.validate.ranks import ByteKind
from witnesses.groups import groups_of

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
PARAMETERS: dict[Precision, Literal["bfloat16", "float32"]] = {
    Precision.BF16: "bfloat16",
    Precision.FP32: "float32",
}
Batch = tuple[dict[str, Tensor], Tensor]


class Trainer(Protocol):
    """Interface of torchtitan's `Trainer` as jobs use it."""

    device: torch.device
    step: int
    model_parts: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Run one step."""


def answers() -> AbstractContextManager[object]:
    """Return the context in which the job runs."""
    return patch.dict(os.environ, LOCAL_RANK="0")


def rows_answered(rows: int) -> AbstractContextManager[object]:
    """Answer the number of *rows* to and from each rank of experts: as many to all."""

    def answer(_mode: object, _operator: object, tensor: Tensor) -> float | int | bool:
        if tensor.dtype is torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else rows

    return patch.dict(op_implementations_dict, {torch.ops.aten._local_scalar_dense.default: answer})


class FlashFunctions:
    """PyTorch's functions, with the flash attention of a GPU: a ring knows that of a CPU not."""

    def __getattr__(self, name: str) -> object:
        """Return any other function."""
        return getattr(functional, name)

    def scaled_dot_product_attention(
        self, query: Tensor, key: Tensor, value: Tensor, **options: float | bool | None
    ) -> Tensor:
        """Return attention over as many key heads as there are of queries.

        Keys and values of different widths are known to cuDNN's alone.
        """
        how = {name: options[name] for name in ("is_causal", "scale")}
        if query.shape[-1] == value.shape[-1]:
            outputs = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **how)
        else:
            kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
            outputs = kernel(query, key, value, None, compute_log_sumexp=True, **how)
        out: Tensor = outputs[0]
        return out


class TrainerJob:
    """A rank of a job; it must be made on a fake cluster.

    Args:
        saved: Plan, with its job and stack.
        trainer: That runs it.
    """

    def __init__(self, saved: SavedPlan, trainer: Trainer) -> None:
        self.saved, self._trainer = saved, trainer
        trainer.device = torch.device("cpu")

    @property
    def groups(self) -> Mapping[tuple[int, ...], str]:
        """Axis of each process group, by its global ranks."""
        return groups_of(self.saved.plan, dist.get_rank())

    def run_step(self, step: int) -> list[Tensor]:
        """Run one whole training step."""
        self._trainer.step = step + 2  # the first one logs
        self._trainer.train_step(self.batches())
        return []

    @property
    def num_rows(self) -> int:
        """Rows that a rank sends to each rank of experts in a pass."""
        job, plan = self.saved.job, self.saved.plan
        experts, tokens = job.transformer.experts, plan.microbatch_size * job.seq_len // plan.cp
        return 1 if experts is None else tokens * experts.experts_per_token // plan.ep

    def persistent_tensors(self) -> Iterator[tuple[Tensor, ByteKind]]:
        """Yield weights, gradients, states, and the buffers of the model."""
        for part, optimizer in zip(
            self._trainer.model_parts, self._trainer.optimizers, strict=True
        ):
            for buffer in part.buffers():
                yield buffer, ByteKind.ACTIVATIONS
            for parameter in part.parameters():
                yield parameter, ByteKind.PARAMETERS
                if parameter.grad is not None:
                    yield parameter.grad, ByteKind.GRADIENTS
                for state in optimizer.state.get(parameter, {}).values():
                    yield state, ByteKind.OPTIMIZER

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of a rank."""
        raise NotImplementedError


class QuietMetrics:
    """Metrics of a job that logs nothing."""

    def __init__(self, *_: object) -> None:
        self.color = type("", (), {"__getattr__": lambda *_: ""})()
        self.device_memory_monitor = self
        self.device_name = "H100"

    def get_peak_stats(self) -> object:
        """Return no memory: only the log shows it."""
        return type("", (), {"max_reserved_gib": 0, "max_reserved_pct": 0})

    def should_log(self, _step: int) -> bool:
        """Return False: no step is logged."""
        return False


def local_batch_size(job: TrainingJob, plan: ResolvedPlan) -> int:
    """Return the sequences that a rank's `step` takes: all of a pipeline, else a microbatch."""
    size = plan.microbatch_size
    return size * plan.num_microbatches(job) if plan.pp > 1 else size


def stage_modules(plan: ResolvedPlan, head: str) -> list[list[str]]:
    """Return the modules of each stage; the last one is *head*.

    >>> stage_modules(ResolvedPlan(pp=2, stages=(1, 2)), "output")
    [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'output']]
    """
    layers = iter(range(sum(plan.stages)))
    stages = [[f"layers.{next(layers)}" for _ in range(count)] for count in plan.stages]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", head]
    return stages


def stages_with_shapes(
    pipelines: ModuleType, saved: SavedPlan, dtype: torch.dtype
) -> AbstractContextManager[object]:
    """Tell the stages that *pipelines* makes their shapes, which they would ask each other for."""
    job, plan = saved.job, saved.plan
    size, seq_len, width = plan.microbatch_size, job.seq_len, job.transformer.hidden_size

    def example(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    def stage(
        module: nn.Module,
        index: int,
        count: int,
        _device: object,
        group: dist.ProcessGroup,
        **_: object,
    ) -> PipelineStage:
        is_first, is_last = index == 0, index == count - 1
        ids = torch.empty((size, seq_len), dtype=torch.long, device="meta")
        tokens = seq_len // (plan.tp if plan.sequence_parallel else 1)
        hidden = example(size, tokens, width)
        logits = example(size, seq_len, job.transformer.vocab_size // plan.tp)
        return PipelineStage(
            module,
            index,
            count,
            torch.device("cpu"),
            input_args=(ids if is_first else hidden,),
            output_args=(logits if is_last else hidden,),
            group=group,
        )

    return patch.object(pipelines, "PipelineStage", stage)
