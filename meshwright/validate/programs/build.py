"""Registry of the reference programs, by stack."""

from collections.abc import Callable

from meshwright.hwprofiles import Kernels, LayerFact, StackProfile, suggestion
from meshwright.simulator import ModelSpec, PlanError, ResolvedPlan, TrainingJob
from meshwright.simulator.layout import searched_zero_stages
from meshwright.validate.programs.contract import ProgramRequest, RankProgram
from meshwright.validate.programs.megatron import MegatronProgram
from meshwright.validate.programs.pytorch import build_ddp, build_fully_sharded
from meshwright.validate.programs.strategies import build_data_parallel_module, build_servers

PROGRAMS: dict[str, Callable[[ProgramRequest], RankProgram]] = {
    "dataparallel@1.6": build_data_parallel_module,
    "ddp@2.13": build_ddp,
    "fsdp@2.13": build_fully_sharded,
    "megatron-core@0.9": MegatronProgram,
    "megatron-core@0.12": MegatronProgram,
    "megatron-core@0.16": MegatronProgram,
    "megatron-core@0.18": MegatronProgram,
    "megatron-lm@2021": MegatronProgram,
    "megatron-lm@2022": MegatronProgram,
    "parameter-server@2014": build_servers,
    "torchtitan@2024-12": build_fully_sharded,
    "torchtitan@0.2": build_fully_sharded,
}
# Fields of a plan that no program runs.
WITHOUT_PROGRAM = (
    *("recompute_modules", "recompute_layers", "expert_overlap", "moment_precision"),
    *("offload_layers", "offload_modules"),
)

QWEN = (LayerFact.ROUTED_EXPERTS, LayerFact.HEAD_NORM, LayerFact.HEAD_DIM)
DEEPSEEK = (*QWEN, LayerFact.LATENT_ATTENTION)
PLAIN = (
    LayerFact.HEAD_NORM,
    LayerFact.WIDTH_NORM,
    LayerFact.UNWEIGHTED_NORM,
    LayerFact.HEAD_DIM,
    LayerFact.NORM_PLACES,
    LayerFact.PARALLEL_MLP,
    LayerFact.ACTIVATION,
    LayerFact.ROTARY_FRACTION,
    LayerFact.ATTENTION_SOFTCAP,
    LayerFact.LOGIT_SOFTCAP,
    LayerFact.SCALED_EMBEDDINGS,
    LayerFact.WINDOW,
    LayerFact.ROTARY_LAYERS,
)
# Layers beyond those of GPT and Llama that the programs of a stack have.
MEGATRON = (
    *DEEPSEEK,
    LayerFact.EXPERT_BIAS,
    LayerFact.EXPERT_ACTIVATION,
    LayerFact.EXPERT_GELU,
    LayerFact.EXPERT_SQUARED_RELU,
    LayerFact.WEIGHED_INPUTS,
    LayerFact.PREDICTION_LAYERS,
    LayerFact.ACTIVATION,
    LayerFact.ROTARY_FRACTION,
    LayerFact.WINDOW,
    LayerFact.CHUNKED_WINDOW,
    LayerFact.ROTARY_LAYERS,
    LayerFact.ATTENTION_SINKS,
    LayerFact.UNWEIGHTED_NORM,
)
WRITTEN: dict[str, tuple[LayerFact, ...]] = {
    "ddp@2.13": (*PLAIN, LayerFact.LATENT_ATTENTION),
    "fsdp@2.13": (
        LayerFact.LATENT_ATTENTION,
        LayerFact.ROUTED_EXPERTS,
        LayerFact.ATTENTION_SINKS,
        LayerFact.EXPERT_BIAS,
        LayerFact.EXPERT_ACTIVATION,
        *PLAIN,
    ),
    **dict.fromkeys(("megatron-core@0.12", "megatron-core@0.16", "megatron-core@0.18"), MEGATRON),
    "megatron-core@0.9": DEEPSEEK,
    "torchtitan@2024-12": (),
    "torchtitan@0.2": DEEPSEEK,
}

# PyTorch's attention by name takes none of the first three there; the others are not tried.
NOT_ON_GPUS = {
    LayerFact.WINDOW,
    LayerFact.ATTENTION_SOFTCAP,
    LayerFact.ATTENTION_SINKS,
    LayerFact.CHUNKED_WINDOW,
    LayerFact.LATENT_ATTENTION,
}


def build_program(request: ProgramRequest) -> RankProgram:
    """Return one rank's reference program of a plan.

    Raises:
        PlanError: If the stack has no program, or it cannot express the plan.
    """
    check_program(request.stack, request.plan)
    check_layers(request.job, request.stack)
    refused = NOT_ON_GPUS.intersection(_facts(request.job))
    if refused and request.device.type == "cuda":
        raise PlanError(
            f"{min(refused)} of {request.job.model.name} has no PyTorch program on GPUs; "
            "allowed: --backend fake, or gloo"
        )
    return PROGRAMS[request.stack.release or request.stack.name](request)


def check_program(stack: StackProfile, plan: ResolvedPlan | None = None) -> None:
    """Raise PlanError if *stack* or *plan* has no reference program.

    Programs have fused kernels; compiled ones keep as many bytes, unless with autocast.
    """
    if (stack.release or stack.name) not in PROGRAMS:
        known = suggestion(stack.name, PROGRAMS)
        raise PlanError(f"stack {stack.name} has no PyTorch program; {known}")
    for name in WITHOUT_PROGRAM:
        value = None if plan is None else getattr(plan, name)
        if value not in (None, ()):
            setting = f"{name}={','.join(value) if isinstance(value, tuple) else value}"
            raise PlanError(f"{setting} has no PyTorch program; allowed: leave it out")
    if stack.parameter_precision is not None:
        setting = f"parameter_precision={stack.parameter_precision} has no PyTorch program"
        raise PlanError(f"{setting}; allowed: leave it out")
    wraps_alone = stack.is_fully_sharded and plan is not None and plan.dp_cp == 1
    if plan is not None and not wraps_alone and plan.zero_stage not in searched_zero_stages(stack):
        known = ", ".join(map(str, searched_zero_stages(stack)))
        setting = f"zero_stage={plan.zero_stage} has no PyTorch program on stack {stack.name}"
        raise PlanError(f"{setting}; allowed: {known}")
    if plan is not None and plan.tp > 1 and stack.tp_plan:
        raise PlanError(
            f"tp={plan.tp} has no PyTorch program on stack {stack.name}; allowed: 1, or "
            "`meshwright count` on what `export --to accelerate` starts"
        )
    runs_otherwise = stack.autocast and stack.kernels is Kernels.COMPILED
    if stack.kernels is Kernels.EAGER or runs_otherwise:
        raise PlanError(
            f"kernels = {stack.kernels} has no PyTorch program on stack {stack.name}; "
            f"allowed: {Kernels.FUSED}"
        )


def check_layers(job: TrainingJob, stack: StackProfile) -> None:
    """Raise PlanError if no program of *stack* has the layers of a job's model."""
    unknown = [
        fact for fact in _facts(job) if fact not in WRITTEN.get(stack.release or stack.name, ())
    ]
    if unknown:
        raise PlanError(
            f"{unknown[0]} of {job.model.name} has no PyTorch program; "
            "allowed: models with layers as those of GPT and Llama"
        )


def _facts(job: TrainingJob) -> tuple[LayerFact, ...]:
    return job.model.layer_facts(job.seq_len) if isinstance(job.model, ModelSpec) else ()
