"""From options to what a search may vary, with pins that could never be met refused at once."""

from math import prod
from typing import TypeVar

from meshwright.hwprofiles import Recompute, StackProfile, StageSplit
from meshwright.planner.cli.request import Setting, default_attention
from meshwright.planner.options import LayoutOptions, LimitOptions, check_counts, option_name
from meshwright.planner.space import SpaceLimits, tp_divides
from meshwright.simulator import ParallelPlan, PlanError, TrainingJob, get_schedule, parse_stages
from meshwright.simulator.costs import peak_flops_per_s
from meshwright.simulator.layout import stack_refusal

V = TypeVar("V")


def read_limits(setting: Setting, layout: LayoutOptions, limits: LimitOptions) -> SpaceLimits:
    """Return what a search may vary: each option of *layout* pins its axis.

    Raises:
        PlanError: If pins contradict each other, the model or the number of devices.
    """
    check_counts(layout)
    check_counts(limits)
    check_pins(setting, layout, limits)
    return SpaceLimits(
        tp=_pin(layout.tp),
        pp=_pin(layout.pp),
        dp=_pin(layout.dp),
        num_virtual_stages=_pin(layout.vpp),
        microbatch_size=_pin(layout.micro_batch),
        zero_stage=_pin(layout.zero),
        sequence_parallel=_pin(layout.sequence_parallel),
        recompute=_pin(layout.recompute),
        schedule=None if layout.schedule is None else (get_schedule(layout.schedule).name,),
        max_tp=limits.max_tp,
        max_pp=limits.max_pp,
        max_dp=limits.max_dp,
        max_virtual_stages=limits.max_vpp,
        max_microbatch_size=limits.max_micro_batch,
        attention=layout.attention or default_attention(setting.cluster, setting.stack),
        stages=_stage_rule(layout.stages),
    )


def _pin(value: V | None) -> tuple[V, ...] | None:
    return None if value is None else (value,)


def _stage_rule(text: str | None) -> StageSplit | None:
    rule = None if text is None else parse_stages(text)
    if isinstance(rule, tuple):
        raise PlanError(
            f"--stages {text} fixes one number of stages, which a search varies; "
            f"allowed: {', '.join(StageSplit)}"
        )
    return rule


def check_pins(setting: Setting, layout: LayoutOptions, limits: LimitOptions) -> None:
    """Raise PlanError when no layout at all could have the pinned values."""
    for field in ("tp", "pp", "dp", "vpp", "micro_batch"):
        value, most = getattr(layout, field), getattr(limits, f"max_{field}")
        if value is not None and most is not None and value > most:
            names = f"{option_name(field)} {value} and {option_name(f'max_{field}')} {most}"
            raise PlanError(f"{names} contradict each other")
    _check_degrees(setting, layout)
    _check_division(setting.job, layout)
    peak_flops_per_s(setting.cluster.device, setting.job.precision)
    refusal = stack_refusal(setting.job, _probe(layout, setting.stack), setting.stack)
    if refusal is not None:
        raise PlanError(refusal)


def _check_degrees(setting: Setting, layout: LayoutOptions) -> None:
    degrees = {name: getattr(layout, name) or 1 for name in ("tp", "pp", "dp")}
    product = prod(degrees.values())
    num_gpus = setting.world_size
    is_complete = None not in (layout.tp, layout.pp, layout.dp)
    if num_gpus % product or (is_complete and product != num_gpus):
        text = " x ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)
        word = "is not" if is_complete else "is not a multiple of"
        raise PlanError(f"gpus={num_gpus} {word} {text} = {product}")


def _check_division(job: TrainingJob, layout: LayoutOptions) -> None:
    model = job.model
    tp, dp = layout.tp or 1, layout.dp or 1
    num_stages = (layout.pp or 1) * (layout.vpp or 1)
    if not tp_divides(model, tp):
        raise PlanError(
            f"num_heads={model.num_heads}, num_kv_heads={model.num_kv_heads} or "
            f"ffn_hidden_size={model.ffn_hidden_size} of {model.name} cannot be split by tp={tp}"
        )
    if num_stages > model.num_layers:
        raise PlanError(f"{num_stages} stages are more than the {model.num_layers} layers")
    if job.global_batch_size % (dp * (layout.micro_batch or 1)):
        raise PlanError(
            f"global_batch_size={job.global_batch_size} is not divisible by dp={dp} x "
            f"microbatch_size={layout.micro_batch or 1}"
        )
    if layout.schedule is not None and layout.vpp is not None:
        schedule = get_schedule(layout.schedule)
        if schedule.interleaves != (layout.vpp > 1):
            raise PlanError(
                f"--vpp {layout.vpp} and --schedule {schedule.name} contradict each other"
            )


def _probe(layout: LayoutOptions, stack: StackProfile) -> ParallelPlan:
    """Return a plan with the pinned switches, to ask a stack whether it offers them."""
    return ParallelPlan(
        tp=layout.tp or 1 + stack.tensor_parallel,
        dp=layout.dp or 2,
        zero_stage=stack.zero_stage if layout.zero is None else layout.zero,
        sequence_parallel=bool(layout.sequence_parallel),
        recompute=layout.recompute or Recompute.NONE,
        attention=layout.attention or stack.attention,
        schedule=get_schedule(layout.schedule or stack.schedules[0]).name,
        stages=(1,),
    )
