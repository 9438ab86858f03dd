"""Exported plans in the hands of the frameworks' own parsers, field by field."""

import json
import os
import re
import shlex
import tomllib
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils.launch import prepare_multi_gpu_env
from deepspeed.runtime import constants
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from torch.distributed.run import get_args_parser
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssPreTrainedModel
from witnesses import megatron_config, torchtitan_job

from meshwright.hwprofiles import Dispatcher, load_framework
from meshwright.planner.export import export_plan, get_framework, registry
from meshwright.planner.reports import SavedPlan
from meshwright.planner.tables import Keys
from meshwright.simulator import ModelSpec
from meshwright.validate.cli import plan_of_options

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip  (after Apex)
from megatron.core.optimizer import OptimizerConfig  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.pipeline_parallel_layer_layout import (  # isort: skip
    PipelineParallelLayerLayout,
)
from torchtitan.config import ConfigManager  # isort: skip  (after its witness)

RECORDED = Path(__file__).parent / "data"
# Variables of the environment that PyTorch's library asks for by name.
LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"
VARIABLES = {*re.findall(r"PYTORCH_[A-Z_]+", LIBRARY.read_text(encoding="latin-1"))}
LLAMA = "llama3-8b --global-batch 64 --seq-len 4096"
TITAN = f"{LLAMA} --stack torchtitan@0.2 --set kernels=eager --gpus"
TITAN_PLANS = (
    f"{TITAN} 8",
    f"{TITAN} 16 --dp-shard 8 --recompute full",
    f"{TITAN} 16 --tp 8 --sequence-parallel --micro-batch 4",
    f"{TITAN} 16 --recompute selective-op --precision fp32",
    f"{TITAN} 64 --tp 2 --pp 4 --sequence-parallel",
    f"{TITAN} 16 --pp 2 --vpp 2 --stages 7,9,8,8",
    f"{TITAN} 8 --pp 4 --schedule gpipe --micro-batch 2",
    f"{TITAN} 64 --ep 8".replace("llama3-8b", "qwen3-30b-a3b"),
    f"{TITAN} 8 --recompute-layers 2 --recompute-method every",
    f"{TITAN} 8 --set parameter_precision=bf16",
)
FORMATS = "dtype", "mixed_precision_param", "mixed_precision_reduce"
CORE_PLANS = (
    f"{LLAMA} --gpus 64 --tp 4 --pp 4",
    f"{LLAMA} --gpus 64 --tp 8 --sequence-parallel --recompute full",
    f"{LLAMA} --gpus 32 --pp 4 --vpp 2 --recompute selective",
    f"{LLAMA} --gpus 16 --pp 2 --vpp 2 --stages 7,9,8,8",
    f"{LLAMA} --gpus 16 --zero 0 --micro-batch 2",
    f"{LLAMA} --gpus 16 --zero 3 --tp 2 --sequence-parallel",
    f"{LLAMA} --gpus 8 --pp 4 --stages 7,9,9,7",
    f"{LLAMA} --gpus 8 --pp 4 --stages Et*9|(t*9|)*2t*5mL --prediction-layers 1",
)
# What Transformer Engine alone does, which needs a GPU.
OF_GPUS = ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "tp_comm_overlap")
ROUTED = "qwen3-30b-a3b --global-batch 64 --seq-len 4096 --gpus 16"
MIXED = "mixtral-8x7b --global-batch 64 --seq-len 4096 --gpus 16"
EXPERT_PLANS = (
    f"{MIXED} --ep 8",
    f"{MIXED} --tp 2 --sequence-parallel --ep 4 --etp 1 --dispatcher deepep",
    f"{ROUTED} --ep 8 --dispatcher hybridep --expert-overlap delayed-weights",
)
SPEED = "gpt2 --stack deepspeed --global-batch 64 --gpus 8"
SPEED_PLANS = (
    f"{SPEED} --zero 0 --precision fp16",
    f"{SPEED} --zero 1 --micro-batch 4",
    f"{SPEED} --zero 2 --recompute full",
    f"{SPEED} --zero 3",
    f"{SPEED} --zero 2 --offload optimizer",
    f"{SPEED} --zero 1 --precision bf16 --reduce-precision fp32",
)
FSDP = f"{LLAMA} --stack fsdp --gpus 16"
RUN_PLANS = (
    "gpt2 --global-batch 64 --stack ddp --gpus 8",
    "gpt2 --global-batch 64 --stack ddp --gpus 4 --find-unused",
    "gpt2 --global-batch 64 --stack ddp --gpus 2 --recompute full --micro-batch 4",
    "gpt2 --global-batch 64 --stack fsdp --gpus 8 --precision fp16",
    "gpt2 --global-batch 64 --stack fsdp --gpus 16 --dp-shard 8",
    f"{FSDP} --recompute full",
)
ACCELERATE_PLANS = (
    "gpt2 --global-batch 64 --stack ddp --gpus 8",
    f"{FSDP} --recompute full",
    f"{FSDP} --no-reshard-after-forward --precision fp16",
    f"{FSDP} --micro-batch 4 --offload parameters",
    f"{FSDP} --dp-shard 8",
    f"{FSDP} --tp 2",
    f"{FSDP} --tp 4 --dp-shard 2",
    # No key of Accelerate reaches overlap_comm, which is off but with stage 3.
    f"{SPEED} --zero 2 --offload optimizer --micro-batch 2 --set overlap_gradient_reduce=false",
    f"{SPEED} --zero 3 --precision fp16",
)


def keys_of(saved: SavedPlan, name: str, version: str | None = None) -> Keys:
    return registry.keys_of(saved, get_framework(name), registry.facts_of(saved), version)[0]


@pytest.mark.parametrize("words", TITAN_PLANS)
def test_torchtitan_reads_the_plan(words: str, tmp_path: Path) -> None:
    saved = plan_of_options(words, "dgx-h100")
    file = tmp_path / "train.toml"
    file.write_text(export_plan(saved, get_framework("torchtitan")).files["train.toml"])
    read = ConfigManager().parse_args(["--job.config_file", str(file)])
    told = torchtitan_job.job_config(saved)
    if saved.plan.pp == 1:  # the witness says its default of it
        told.parallelism.pipeline_parallel_microbatch_size = 1
    assert read.parallelism == told.parallelism
    if told.activation_checkpoint.mode != "selective":  # else it is not looked at
        told.activation_checkpoint.selective_ac_option = "2"
    assert read.activation_checkpoint == told.activation_checkpoint
    flavor = ("llama3", "8B") if saved.plan.ep == 1 else ("qwen3", "30B-A3B")
    assert (read.model.name, read.model.flavor) == flavor
    for name in ("seq_len", "local_batch_size", "global_batch_size", *FORMATS):
        assert getattr(read.training, name) == getattr(told.training, name)
    assert read.training.enable_cpu_offload is read.compile.enable is False


def test_torchtitan_refuses_a_misspelt_key(tmp_path: Path) -> None:
    saved = plan_of_options(TITAN_PLANS[5], "dgx-h100")
    text = export_plan(saved, get_framework("torchtitan")).files["train.toml"]
    file = tmp_path / "train.toml"
    for section, table in tomllib.loads(text).items():
        for key in table:
            file.write_text(text.replace(f"\n{key} = ", f"\n{key}x = "))
            with pytest.raises((ValueError, SystemExit, TypeError)):
                ConfigManager().parse_args(["--job.config_file", str(file)])
            assert section


@pytest.mark.parametrize("words", CORE_PLANS)
def test_megatron_core_is_told_the_plan(words: str) -> None:
    saved = plan_of_options(words, "dgx-h100")
    plan, keys = saved.plan, keys_of(saved, "megatron-bridge")
    parts = {
        name: {key.partition(".")[2]: value for key, value in keys.items() if key.startswith(name)}
        for name in ("model.", "ddp.", "optimizer.")
    }
    own = {**parts["model."]}
    layout = own.pop("pipeline_model_parallel_layout")
    own.pop("attention_backend")
    for each in OF_GPUS:
        assert hasattr(TransformerConfig, each)
        own.pop(each, None)
    told = megatron_config.transformer_config(saved.job, plan)
    assert own == {name: getattr(told, name) for name in own} | {
        "recompute_num_layers": own["recompute_num_layers"]
    }
    DistributedDataParallelConfig(**parts["ddp."])
    moments = {"use_precision_aware_optimizer": False}  # some recipes switch it on
    assert parts["optimizer."] == {"use_distributed_optimizer": plan.zero_stage > 0} | moments
    if layout is None:
        assert len({*plan.stages}) == 1
        return
    read = PipelineParallelLayerLayout.from_str(layout, plan.pp).layout
    layers = [
        sum(each.name == "decoder" for each in read[index % plan.pp][index // plan.pp])
        for index in range(plan.num_stages)
    ]
    assert tuple(layers) == plan.stages


@pytest.mark.parametrize("words", EXPERT_PLANS)
def test_megatron_core_is_told_of_experts(words: str) -> None:
    saved = plan_of_options(words, "dgx-h100")
    plan, model = saved.plan, saved.job.model
    own = {name.replace("-", "_"): value for name, value in keys_of(saved, "megatron-lm").items()}
    own["num_moe_experts"] = own.pop("num_experts")
    # Transformer Engine, which is asked for the fused permutation, needs a GPU.
    left_out = {"normalization", "moe_permute_fusion"}
    known = {each.name for each in fields(TransformerConfig)}
    assert own["moe_permute_fusion"]
    assert left_out <= known
    known -= left_out
    read = TransformerConfig(**{name: value for name, value in own.items() if name in known})
    assert isinstance(model, ModelSpec)
    experts = model.experts
    assert experts is not None
    told = read.num_moe_experts, read.moe_router_topk, read.moe_ffn_hidden_size
    assert told == (experts.num_experts, experts.experts_per_token, experts.hidden_size)
    ranks = read.expert_model_parallel_size, read.expert_tensor_parallel_size
    assert ranks == (plan.ep, plan.expert_tp)
    assert read.moe_grouped_gemm
    assert read.qk_layernorm == (model.qk_norm == "head")
    assert read.kv_channels == model.head_dim
    way = read.moe_flex_dispatcher_backend if read.moe_token_dispatcher_type == "flex" else None
    usual = Dispatcher.ALL_TO_ALL
    assert (plan.dispatcher or usual) == (way or usual)
    beside = read.overlap_moe_expert_parallel_comm, read.delay_wgrad_compute
    assert beside == ((plan.expert_overlap is not None,) * 2)


@pytest.mark.parametrize("words", SPEED_PLANS)
def test_deepspeed_reads_the_plan(words: str) -> None:
    saved = plan_of_options(words, "dgx-h100")
    plan, job = saved.plan, saved.job
    text = export_plan(saved, get_framework("deepspeed")).files["ds_config.json"]
    document = json.loads(text)
    ranks = {"get_rank": lambda: 0, "get_world_size": lambda *_: plan.dp}
    with patch.multiple("deepspeed.runtime.config.dist", **ranks):
        read = DeepSpeedConfig(document)
    assert read.zero_config.stage == plan.zero_stage
    sizes = read.train_batch_size, read.train_micro_batch_size_per_gpu
    assert sizes == (job.global_batch_size, plan.microbatch_size)
    assert read.gradient_accumulation_steps == plan.num_microbatches(job)
    formats = {"bf16": read.bfloat16_config.enabled, "fp16": read.float16_config.enabled}
    assert formats == {name: name == job.precision for name in formats}
    offloaded = read.zero_config.offload_optimizer
    assert (offloaded is not None and offloaded.device == "cpu") is (plan.offload != "none")
    assert read.zero_config.reduce_bucket_size == 500_000_000


def environment(file: Path) -> Mapping[str, str]:
    """Return what ``accelerate launch`` leaves in the environment for a file's FSDP."""
    words = ["--config_file", str(file), "train.py"]
    arguments = launch_command_parser().parse_args(words)
    config = load_config_from_file(str(file))
    arguments.use_fsdp, arguments.mixed_precision = True, config.mixed_precision
    arguments.num_processes, arguments.num_machines = config.num_processes, 1
    arguments.dynamo_backend = "no"
    arguments.use_parallelism_config = bool(config.parallelism_config)
    for section in (config.fsdp_config, config.parallelism_config):
        for key, value in section.items():
            assert hasattr(arguments, key)  # a misspelt key is none of its options
            setattr(arguments, key, value)
    with patch.dict(os.environ, clear=True):
        return prepare_multi_gpu_env(arguments)


@pytest.mark.parametrize("words", ACCELERATE_PLANS)
def test_accelerate_reads_the_plan(words: str, tmp_path: Path) -> None:
    saved = plan_of_options(words, "dgx-h100")
    plan, file = saved.plan, tmp_path / "accelerate.yaml"
    file.write_text(export_plan(saved, get_framework("accelerate")).files["accelerate.yaml"])
    config = load_config_from_file(str(file))
    assert isinstance(config, ClusterConfig)  # of which unknown keys are none
    precision = {"fp32": "no"}.get(saved.job.precision, str(saved.job.precision))
    assert (config.num_processes, config.mixed_precision) == (plan.world_size, precision)
    if config.distributed_type == "FSDP":
        with patch.dict(os.environ, environment(file)):
            plugin = FullyShardedDataParallelPlugin()
            axes = ParallelismConfig()
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward is (plan.reshard_after_forward is not False)
        assert plugin.activation_checkpointing is (plan.recompute == "full")
        assert bool(getattr(plugin.cpu_offload, "pin_memory", False)) is (
            plan.offload == "parameters"
        )
        if plan.dp_shard != plan.dp:
            replicas = plan.dp // plan.dp_shard
            assert (axes.dp_replicate_size, axes.dp_shard_size) == (replicas, plan.dp_shard)
        assert axes.tp_size == plan.tp
    if config.distributed_type == "DEEPSPEED":
        options = vars(launch_command_parser().parse_args(["train.py"]))
        assert {*config.deepspeed_config} <= {*options}
        assert config.deepspeed_config["zero_stage"] == plan.zero_stage


@pytest.mark.parametrize("words", RUN_PLANS)
def test_torchrun_reads_the_plan(words: str) -> None:
    plan = plan_of_options(words, "dgx-h100").plan
    read = launched(words)
    num_nodes = max(1, plan.world_size // 8)
    assert read.nnodes == ("1:1" if num_nodes == 1 else f"{num_nodes}")
    assert int(read.nproc_per_node) * num_nodes == plan.world_size
    assert (read.training_script, read.training_script_args) == ("train.py", [])
    assert read.standalone is (num_nodes == 1)


def launched(words: str, misspelt: str = "") -> Namespace:
    """Return what torchrun's own parser makes of the script that starts a plan."""
    files = export_plan(plan_of_options(words, "dgx-h100"), get_framework("torchrun")).files
    said = files["run.sh"].replace("$NODE_RANK", "0").replace("${MASTER_PORT:-29500}", "29500")
    options = shlex.split(said.replace("\\\n", " "), comments=True)
    options = options[options.index("torchrun") + 1 :]
    return get_args_parser().parse_args(
        [each.replace(f"{misspelt}=", f"{misspelt}x=") if misspelt else each for each in options]
    )


@pytest.mark.parametrize("option", ["--nproc-per-node", "--nnodes", "--master-addr"])
def test_torchrun_refuses_a_misspelt_option(option: str) -> None:
    with pytest.raises(SystemExit):
        launched(RUN_PLANS[-1], option)


def recorded(name: str) -> set[str]:
    lines = (RECORDED / f"{name}_options.txt").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}


def names_of(prefix: str, kind: type) -> set[str]:
    """Return the fields of a dataclass or of a pydantic model, and those of models in it."""
    found = getattr(kind, "model_fields", {})
    names = {*found} if found else {each.name for each in fields(kind)}
    names |= {each.alias for each in found.values() if each.alias}
    return {f"{prefix}.{name}" for name in names}


def bridge_keys() -> set[str]:
    kinds = {
        "model": TransformerConfig,
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
    }
    known = recorded("megatron_bridge") | {"recipe"}
    return known.union(*(names_of(name, kind) for name, kind in kinds.items()))


def deepspeed_keys() -> set[str]:
    zero = "zero_optimization"
    kinds = {
        zero: DeepSpeedZeroConfig,
        f"{zero}.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        f"{zero}.offload_param": DeepSpeedZeroOffloadParamConfig,
        constants.BFLOAT16: DeepSpeedBF16Config,
        constants.FP16: DeepSpeedFP16Config,
        "tensor_parallel": TPTrainingConfig,
    }
    plain = "TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU GRADIENT_ACCUMULATION_STEPS"
    known = {getattr(constants, name) for name in f"{plain} COMMUNICATION_DATA_TYPE".split()}
    known.add(f"{constants.DATA_TYPES}.{constants.GRAD_ACCUM_DTYPE}")
    return known.union(*(names_of(name, kind) for name, kind in kinds.items()))


def accelerate_keys() -> set[str]:
    options = vars(launch_command_parser().parse_args(["train.py"]))
    sections = ("fsdp_config", "deepspeed_config", "parallelism_config")
    known = {f"{section}.{option}" for section in sections for option in options}
    return known | {each.name for each in fields(ClusterConfig)}


# What each framework knows, and the plans that are tried; torchtitan's own parser refuses, and
# the constants of the script for torchrun are its own.
KNOWN: Mapping[str, tuple[Callable[[], set[str]], tuple[str, ...], str]] = {
    "megatron-lm": (lambda: recorded("megatron_lm"), CORE_PLANS, ""),
    "megatron-bridge": (bridge_keys, CORE_PLANS, ""),
    "torchtitan": (
        lambda: recorded("torchtitan_0_3") | {"activation-checkpoint"},
        # Those that are not refused for 0.3.
        tuple(each for each in TITAN_PLANS if not re.search("qwen3|every", each)),
        "0.3",
    ),
    "deepspeed": (deepspeed_keys, SPEED_PLANS, ""),
    "accelerate": (accelerate_keys, ACCELERATE_PLANS, "fsdp2"),
}
TRIED = [(name, words) for name, (_, plans, _) in KNOWN.items() for words in plans]


@pytest.mark.parametrize(("name", "words"), TRIED)
def test_every_key_is_one_of_the_frameworks_own_and_a_misspelt_one_is_not(
    name: str, words: str
) -> None:
    known, _, version = KNOWN[name]
    keys = keys_of(plan_of_options(words, "dgx-h100"), name, version)
    own = known() | VARIABLES
    assert {*keys} <= own
    assert not {f"{key}x" for key in keys} & own
    choices = {"recipe": "=", "mixed_precision": "=", "activation-checkpoint": ":"}
    for key in {*choices} & {*keys} if name != "accelerate" else ():
        assert f"{key}{choices[key]}{keys[key]}" in own
        assert f"{key}{choices[key]}{keys[key]}x" not in own


def test_attention_with_sinks_is_advised_as_transformers_has_it() -> None:
    lines = load_framework("deepspeed").tables["all"].fields["attention"].script
    (kernel,) = (each.line for each in lines if each.when == "model.attention_sinks")
    assert kernel.split('"')[1] in GptOssPreTrainedModel._compatible_flash_implementations
    assert not GptOssPreTrainedModel._supports_sdpa


def test_accelerate_refuses_a_misspelt_key(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: FSDP\nnum_processess: 8\n")
    with pytest.raises(ValueError, match="unknown keys"):
        load_config_from_file(str(file))
