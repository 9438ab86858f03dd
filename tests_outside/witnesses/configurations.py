"""Configurations of frameworks, as their own classes read them, and the fields of a plan in them.

DeepSpeed, Accelerate, transformers and torchtitan; a figure has the name of the plan's field, or of
that of its job, its stack or its model.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from contextlib import chdir, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from deepspeed.launcher import runner
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.run import get_args_parser
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from meshwright.planner.reports import SavedPlan
from meshwright.planner.shell import Launch, find_launches, read_commands
from witnesses import torchtitan_job, torchtitan_parts

from torchtitan.config import ConfigManager, JobConfig  # isort: skip  (after its witness)
from torchtitan.distributed import ParallelDims, pipeline_parallel  # isort: skip
from torchtitan.protocols.train_spec import BaseModelArgs, get_train_spec  # isort: skip

FORMATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
MIXED = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
# Whether layers are gathered again, and shards lie on all ranks, not on those of a node.
STRATEGIES = {
    ShardingStrategy.FULL_SHARD: (True, True),
    ShardingStrategy.SHARD_GRAD_OP: (False, True),
    ShardingStrategy.HYBRID_SHARD: (True, False),
    ShardingStrategy._HYBRID_SHARD_ZERO2: (False, False),
}
DEVICES = 8  # of a node of the cluster
Figures = dict[str, object]


class Case(NamedTuple):
    """A file, and the plan that it is."""

    path: Path
    saved: SavedPlan

    @property
    def launch(self) -> Launch:
        """Its command: of words the shell's, which ``test_shell`` holds to bash."""
        text = self.path.read_text()
        (launch,) = find_launches(read_commands(text, file=self.path, defines={}))
        return launch


def ours(saved: SavedPlan, name: str) -> object:
    """Return a field of a plan, its job, its stack or its model."""
    if name == "num_microbatches":
        return saved.plan.num_microbatches(saved.job)
    parts = (saved.plan, saved.job, saved.stack, saved.job.transformer)
    return next(getattr(each, name) for each in parts if hasattr(each, name))


# DeepSpeed


def engine_figures(document: object, ranks: int) -> Figures:
    """Return the figures that DeepSpeed reads in a JSON, or in a dictionary of its keys."""
    world = {"get_rank": lambda: 0, "get_world_size": lambda *_: ranks}
    with patch.multiple("deepspeed.runtime.config.dist", **world):
        read = DeepSpeedConfig(document)
    fp16, bf16 = (each.enabled for each in (read.float16_config, read.bfloat16_config))
    engine = SimpleNamespace(_config=read, fp16_enabled=lambda: fp16, bfloat16_enabled=lambda: bf16)
    weights, gradients = DeepSpeedEngine.get_data_types(engine)
    zero = read.zero_config
    hosts = [
        "none" if each is None else str(getattr(each.device, "value", each.device))
        for each in (zero.offload_optimizer, zero.offload_param)
    ]
    hosted = {"none none": "none", "cpu none": "optimizer", "cpu cpu": "parameters"}
    return {
        "global_batch_size": read.train_batch_size,
        "microbatch_size": read.train_micro_batch_size_per_gpu,
        "num_microbatches": read.gradient_accumulation_steps,
        "zero_stage": zero.stage,
        "precision": FORMATS[weights],
        "gradient_precision": FORMATS[gradients],
        "reduce_precision": FORMATS[DeepSpeedEngine.communication_data_type.fget(engine)],
        "offload": hosted[" ".join(hosts)],
        "gradient_bucket_parameters": zero.reduce_bucket_size,
        "overlap_gradient_reduce": zero.overlap_comm,
        "dp": ranks,
    }


def filled(path: Path, arguments: TrainingArguments, hidden_size: int) -> dict[str, object]:
    """Return a JSON as transformers, and Accelerate for it, fill it in."""
    config = HfTrainerDeepSpeedConfig(str(path))
    config.trainer_config_process(arguments)
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    plugin.set_mixed_precision(arguments.mixed_precision)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=hidden_size))
    config.trainer_config_finalize(arguments, model, 100)
    figures: dict[str, object] = config.config
    return figures


def of_deepspeed(case: Case) -> Figures:
    """Return the figures that DeepSpeed reads; ``auto`` is filled in by transformers."""
    job, plan = case.saved.job, case.saved.plan
    if '"auto"' not in case.path.read_text():
        return engine_figures(str(case.path), plan.dp)
    arguments = TrainingArguments(
        per_device_train_batch_size=plan.microbatch_size,
        gradient_accumulation_steps=plan.num_microbatches(job),
        use_cpu=True,
        **{name: job.precision == name for name in ("bf16", "fp16")},
    )
    with patch.object(TrainingArguments, "world_size", plan.dp):
        document = filled(case.path, arguments, job.transformer.hidden_size)
    return engine_figures(document, plan.dp)


# Accelerate


def of_accelerate(case: Case) -> Figures:
    """Return the figures that Accelerate's launcher gives its plugins."""
    words = ["--config_file", case.path.name]
    if case.path.suffix == ".sh":
        words = [each.text for each in case.launch.launcher_words["accelerate"]]
    # A free port, and any other node; and no configuration of whoever runs this.
    words += ["--main_process_port", "0", "--main_process_ip", "localhost", "train.py"]
    with chdir(case.path.parent), patch("accelerate.commands.launch.default_config_file", ""):
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert arguments.dynamo_backend.lower() == "no"
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        _, world = prepare_deepspeed_cmd_env(arguments)
    else:
        world = prepare_multi_gpu_env(arguments)
    # Before training, and on GPUs alone.
    world |= dict.fromkeys(("FSDP_SYNC_MODULE_STATES", "FSDP_CPU_RAM_EFFICIENT_LOADING"), "false")
    mixed, ranks = world["ACCELERATE_MIXED_PRECISION"], arguments.num_processes
    figures = {"world_size": ranks, "precision": MIXED[mixed]}
    with patch.dict(os.environ, world):
        if arguments.use_deepspeed:
            return figures | engine_figures(launched_engine(case, mixed, ranks), ranks)
        if arguments.use_fsdp:
            return figures | shard_figures(FullyShardedDataParallelPlugin(), mixed, ranks)
    assert arguments.multi_gpu
    return {**figures, "zero_stage": 0, "offload": "none"}


def launched_engine(case: Case, mixed: str, ranks: int) -> dict[str, object]:
    """Return the keys that Accelerate hands DeepSpeed; the script says its data's batch."""
    plugin, plan = DeepSpeedPlugin(), case.saved.plan
    plugin.set_mixed_precision(mixed)
    steps = plugin.gradient_accumulation_steps
    steps = plan.num_microbatches(case.saved.job) if steps == "auto" else steps
    return plugin.deepspeed_config | {
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "train_batch_size": plan.microbatch_size * steps * ranks,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 1.0,
    }


def shard_figures(plugin: FullyShardedDataParallelPlugin, mixed: str, ranks: int) -> Figures:
    """Return the figures of Accelerate's sharding, and its ranks by the environment."""
    gathers, is_whole = plugin.reshard_after_forward, True
    if plugin.fsdp_version == 1:
        strategy = plugin.sharding_strategy or gathers
        gathers, is_whole = STRATEGIES[strategy]
        assert plugin.backward_prefetch is not None  # else nothing is gathered ahead
        assert not plugin.forward_prefetch
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    if mixed != "no":  # as AcceleratorState has it
        plugin.set_mixed_precision(mixed)
    policy, offload = plugin.mixed_precision_policy, plugin.cpu_offload
    is_hosted = getattr(offload, "offload_params", hasattr(offload, "pin_memory"))
    axes = ParallelismConfig()
    degrees = axes.dp_replicate_size, axes.dp_shard_size, axes.tp_size, axes.cp_size
    replicas, shards, tp, cp = degrees if set(degrees) != {1} else (1, ranks, 1, 1)
    if not is_whole:
        replicas, shards = ranks // DEVICES, DEVICES
    assert cp == 1
    return {
        "zero_stage": 3,
        "reshard_after_forward": gathers,
        "recompute": "full" if plugin.activation_checkpointing else "none",
        "offload": "parameters" if is_hosted else "none",
        "reduce_precision": FORMATS[policy.reduce_dtype if policy else torch.float32],
        "tp": tp,
        "dp": replicas * shards,
        "dp_shard": shards,
    }


# transformers


def ranks_of(launch: Launch) -> int:
    """Return the number of ranks that a launcher's own parser starts."""
    words = [each.text for each in launch.launcher_words[launch.launcher]]
    if launch.launcher == "deepspeed":
        return int(runner.parse_args([*words, launch.program.text]).num_gpus)
    read = get_args_parser().parse_args([*words, launch.program.text])
    return int(read.nnodes.rpartition(":")[2]) * int(read.nproc_per_node)


def of_transformers(case: Case) -> Figures:
    """Return the figures of TrainingArguments in the options of a command."""
    launch, saved = case.launch, case.saved
    # DeepSpeed's JSON is read below, and TF32 is of GPUs; the rest is of run_clm.py.
    aside = argparse.ArgumentParser(allow_abbrev=False)
    aside.add_argument("--deepspeed")
    aside.add_argument("--tf32")
    beside, words = aside.parse_known_args([each.text for each in launch.arguments])
    parser = HfArgumentParser(TrainingArguments)
    read, _ = parser.parse_args_into_dataclasses(
        [*words, "--use_cpu"], return_remaining_strings=True
    )
    ranks = ranks_of(launch)
    micro, steps = read.per_device_train_batch_size, read.gradient_accumulation_steps
    figures = {
        "world_size": ranks,
        "global_batch_size": read.train_batch_size * steps * ranks,
        "microbatch_size": micro,
        "num_microbatches": steps,
        "precision": MIXED[read.mixed_precision],
        "recompute": "full" if read.activation_checkpointing else "none",
        "zero_stage": 0,
    }
    if beside.deepspeed:
        with patch.object(TrainingArguments, "world_size", ranks):
            hidden_size = saved.job.transformer.hidden_size
            document = filled(case.path.parent / beside.deepspeed, read, hidden_size)
        return figures | engine_figures(document, ranks)
    if read.fsdp_plugin_args is None:
        return figures
    plugin = FullyShardedDataParallelPlugin(**read.fsdp_plugin_args)
    shards = shard_figures(plugin, read.mixed_precision, ranks)
    return figures | shards | ({"recompute": "full"} if read.activation_checkpointing else {})


# torchtitan

SCHEDULES = {theirs: name for name, theirs in torchtitan_parts.SCHEDULES.items()}
MODES = {mode: name for name, (mode, _) in torchtitan_job.CHECKPOINTS.items()}


def of_torchtitan(case: Case) -> Figures:
    """Return the figures that torchtitan reads in a TOML."""
    words, ranks = ["--job.config_file", case.path.name], case.saved.plan.world_size
    if case.path.suffix == ".sh":
        words, ranks = [each.text for each in case.launch.arguments], ranks_of(case.launch)
    with chdir(case.path.parent):
        config = ConfigManager().parse_args(words)
    training, checkpoints = config.training, config.activation_checkpoint
    option = checkpoints.selective_ac_option
    is_counted = checkpoints.mode == "selective" and option.isdigit()
    is_compiled = config.compile.enable and "model" in config.compile.components
    weights = FORMATS[getattr(torch, training.mixed_precision_param)]
    quantized = "quantize.linear.float8" in config.model.converters
    args = get_train_spec(config.model.name).model_args[config.model.flavor]
    return {
        **titan_layout(config, ranks, args),
        "seq_len": training.seq_len,
        "precision": "fp8" if quantized else weights,
        "reduce_precision": FORMATS[getattr(torch, training.mixed_precision_reduce)],
        "recompute": "full" if is_counted else MODES[checkpoints.mode],
        "recompute_layers": int(option) if is_counted else None,
        "offload": "parameters" if training.enable_cpu_offload else "none",
        "kernels": "compiled" if is_compiled else "eager",
        "num_layers": args.n_layers,
        "hidden_size": args.dim,
        "num_kv_heads": args.n_kv_heads or args.n_heads,
        "vocab_size": args.vocab_size,
    }


def titan_layout(config: JobConfig, ranks: int, args: BaseModelArgs) -> Figures:
    """Return the figures of torchtitan's layout of a model on its ranks."""
    training, parallelism = config.training, config.parallelism
    degrees = {
        axis: getattr(parallelism, f"{name}_parallel_degree")
        for axis, name in {
            "tp": "tensor",
            "pp": "pipeline",
            "cp": "context",
            "ep": "expert",
        }.items()
    }
    dims = ParallelDims(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        etp=parallelism.expert_tensor_parallel_degree,
        world_size=ranks,
        **degrees,
    )
    dp, is_piped = dims.dp_replicate * dims.dp_shard, dims.pp > 1
    local, total = training.local_batch_size, training.global_batch_size
    gathers = {"always": True, "never": False, "default": not is_piped}
    return {
        **degrees,
        "dp": dp,
        "dp_shard": dims.dp_shard,
        "world_size": ranks,
        "global_batch_size": local * dp if total < 0 else total,
        "microbatch_size": parallelism.pipeline_parallel_microbatch_size if is_piped else local,
        "schedule": SCHEDULES[parallelism.pipeline_parallel_schedule],
        "reshard_after_forward": gathers[parallelism.fsdp_reshard_after_forward],
        **({"stages": layers_of_stages(config, dims, args)} if is_piped else {}),
    }


def layers_of_stages(config: JobConfig, dims: ParallelDims, args: BaseModelArgs) -> tuple[int, ...]:
    """Return the layers of the stages that torchtitan would split a model into."""
    mesh = SimpleNamespace(pp=dims.pp, get_mesh=lambda _: None)
    split = patch.object(pipeline_parallel, "pipeline_module_split", side_effect=StopIteration)
    with split as split_mock, suppress(StopIteration):
        pipeline_parallel.pipeline_llm(None, mesh, config, None, args, None, None)
    parts = split_mock.call_args.args[4]
    return tuple(sum(name.startswith("layers.") for name in names) for names in parts)


WITNESSES: Mapping[str, Callable[[Case], Figures]] = {
    "deepspeed": of_deepspeed,
    "accelerate": of_accelerate,
    "transformers": of_transformers,
    "torchtitan": of_torchtitan,
}
