"""From options to what is asked for: job, cluster, stack and plan, every default resolved."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, cast

from meshwright.hwprofiles import (
    Cluster,
    ContextParallel,
    Recompute,
    RecomputeModule,
    StackProfile,
    load_cluster,
    load_stack,
    shown,
    suggestion,
    with_facts,
)
from meshwright.planner.cli.servers import resolve_servers
from meshwright.planner.options import (
    Given,
    JobOptions,
    MoneyOptions,
    check_counts,
    check_given,
    option_name,
    read_memory_limit,
    read_price,
    read_tokens,
)
from meshwright.planner.reports import Budget, SavedPlan, read_plan
from meshwright.planner.search import MAX_PASSES
from meshwright.simulator import (
    ModelSpec,
    ParallelPlan,
    PlanError,
    TrainingJob,
    get_schedule,
    load_model,
    parse_stages,
    resolve_stages,
)
from meshwright.simulator.layout import (
    AXES,
    PLAN_FIELDS,
    check_predictions,
    default_attention,
    default_precision,
    model_refusal,
    near_multiples,
    num_predictions,
    prediction_place,
    usual_inner,
)
from meshwright.simulator.memory import usable_bytes
from meshwright.simulator.model import AnyModel, with_predictions

DEFAULT_STACK = "megatron-core"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is trained, on what, with what software, within what memory.

    ``num_gpus`` is None where only a plan file says it; ``saved`` is that file's content.
    """

    job: TrainingJob
    cluster: Cluster
    stack: StackProfile
    num_gpus: int | None
    memory_limit_bytes: int | None
    saved: SavedPlan | None = None

    @property
    def world_size(self) -> int:
        """Devices asked for, or those of the plan file."""
        if self.num_gpus is not None:
            return self.num_gpus
        assert self.saved is not None  # without a plan file --gpus is required
        return self.saved.plan.world_size


def read_setting(options: JobOptions, plan_file: str | None = None) -> Setting:
    """Return what *options* describe; what they leave open comes from the plan file.

    Raises:
        PlanError: If a model, job or number is at fault, or missing.
        ProfileError: If the cluster or the stack is at fault.
    """
    check_counts(options)
    memory_limit_bytes = read_memory_limit(options.memory_limit)
    saved = None if plan_file is None else read_plan(Path(plan_file))
    _check_complete(options, saved)
    cluster = saved.cluster if saved and options.cluster is None else _cluster(options)
    stack = saved.stack if saved and options.stack is None else _stack(options)
    cluster, stack = with_facts(cluster, stack, options.set or ())
    usable_bytes(cluster, memory_limit_bytes)  # refuses a limit beyond the device
    return Setting(
        job=_job(options, saved, cluster, stack),
        cluster=cluster,
        stack=stack,
        num_gpus=options.gpus,
        memory_limit_bytes=memory_limit_bytes,
        saved=saved,
    )


def _check_complete(options: JobOptions, saved: SavedPlan | None) -> None:
    if saved is not None:
        return
    if options.model is None:
        raise PlanError("MODEL is missing; allowed: a built-in name, a config.json or a model TOML")
    for field in ("cluster", "gpus", "global_batch"):
        if getattr(options, field) is None:
            raise PlanError(f"{option_name(field)} is missing; it is required")


def _cluster(options: JobOptions) -> Cluster:
    return load_cluster(options.cluster or "")


def _stack(options: JobOptions) -> StackProfile:
    return load_stack(DEFAULT_STACK if options.stack is None else options.stack)


def _job(
    options: JobOptions, saved: SavedPlan | None, cluster: Cluster, stack: StackProfile
) -> TrainingJob:
    old = saved.job if saved else None
    model = old.model if old and options.model is None else load_model(options.model or "")
    if options.seq_len is not None and not isinstance(model, ModelSpec):
        raise PlanError(
            f"--seq-len {options.seq_len} does not go with {model.name}, whose batch counts "
            f"{model.sample}; allowed: leave it out"
        )
    if options.prediction_layers is not None:
        model = with_predictions(model, options.prediction_layers)
    keeps_length = old is not None and old.model == model
    precision = old.precision if old else default_precision(cluster.device, stack)
    batch = options.global_batch or (old.global_batch_size if old else 0)
    return TrainingJob(
        model=model,
        global_batch_size=batch,
        seq_len=options.seq_len or (old.seq_len if old and keeps_length else model.seq_len),
        precision=options.precision or precision,
        imbalance=_imbalance(options, old, model),
    )


def _imbalance(options: JobOptions, old: TrainingJob | None, model: AnyModel) -> float:
    """Return the hottest expert's load: as given, or that of a plan file of the same model."""
    if options.imbalance is not None:
        return options.imbalance
    return old.imbalance if old is not None and old.model == model else 1.0


class Draft(NamedTuple):
    """A plan that is being completed: what was given, and what is known of it so far."""

    setting: Setting
    given: Given
    known: dict[str, object]

    @property
    def saved(self) -> ParallelPlan | None:
        """The plan of the plan file, if there is one."""
        return self.setting.saved.plan if self.setting.saved else None

    def number(self, name: str) -> int:
        """Return a field that is known by now."""
        return cast("int", self.known[name])

    def value(self, name: str, default: object) -> object:
        """Return a field as it is given, else as the plan file has it, else *default*."""
        usual = getattr(self.saved, name) if self.saved else default
        return self.given.get(name, usual)


def resolve_plan(setting: Setting, given: Given) -> ParallelPlan:
    """Return the plan of the options in *given*, completed from plan file and stack defaults.

    Raises:
        PlanError: If options contradict each other, the model or the number of devices.
    """
    check_fields(setting.job, given)
    draft = Draft(setting, given, {})
    for name, field in PLAN_FIELDS.items():
        resolve = RESOLVERS.get(name)
        draft.known[name] = resolve(draft) if resolve else draft.value(name, field.default)
    plan = ParallelPlan.of(draft.known)
    _check_passes(setting.job, plan)
    return plan


def check_fields(job: TrainingJob, given: Given) -> None:
    """Raise PlanError when a field that was given is out of range or says nothing of the model."""
    check_given(given)
    for name, field in PLAN_FIELDS.items():
        refusal = model_refusal(field, given[name], job.model) if name in given else None
        if refusal is not None:
            raise PlanError(refusal)


def _dp(draft: Draft) -> int:
    """Return the data-parallel degree: as given, or what the other axes leave of the devices."""
    setting, given = draft.setting, draft.given.get("dp")
    if setting.num_gpus is None and given is not None:
        return cast("int", given)
    num_gpus = setting.world_size
    others = {axis: draft.number(axis) for axis, known in AXES.items() if not known.takes_rest}
    product = prod(others.values())
    told = {axis: degree for axis, degree in others.items() if degree > 1 or not AXES[axis].is_rare}
    text = " x ".join(f"{axis}={degree}" for axis, degree in told.items())
    if given is None:
        if num_gpus % product:
            raise PlanError(
                f"gpus={num_gpus} is not a multiple of {text} = {product}; "
                f"{near_multiples(num_gpus, product)}"
            )
        return num_gpus // product
    dp = cast("int", given)
    if product * dp != num_gpus:
        raise PlanError(f"gpus={num_gpus} is not {text} x dp={dp} = {product * dp}")
    return dp


def _dp_shard(draft: Draft) -> int | None:
    """Return the ranks that share a set of shards, None where all do."""
    wanted = cast("int | None", draft.value("dp_shard", None))
    return None if wanted == draft.known["dp"] else wanted


def _cp_inner(draft: Draft) -> int | None:
    """Return the ranks that swap tokens for heads in a ring of swaps: as many as a node has."""
    given = cast("int | None", draft.given.get("cp_inner"))
    if draft.known["cp_type"] is not ContextParallel.RING_OF_SWAPS or given is not None:
        return given
    saved, cp = draft.saved, draft.number("cp")
    if cp == 1:
        return None
    if saved is not None and saved.cp_inner is not None and cp % saved.cp_inner == 0:
        return saved.cp_inner
    setting = draft.setting
    node_size = setting.cluster.devices_per_node
    return usual_inner(setting.job, setting.stack, draft.number("tp"), cp, node_size)


def _free_hosts(draft: Draft) -> int | None:
    """Return the nodes that workers leave, None where the cluster has no end."""
    cluster, dp = draft.setting.cluster, draft.number("dp")
    num = cluster.num_nodes
    return None if num is None else num - -(-dp // cluster.devices_per_node)


def _schedule(draft: Draft) -> str:
    given, saved = draft.given.get("schedule"), draft.saved
    interleaves = draft.number("num_virtual_stages") > 1
    if given is not None:
        return get_schedule(cast("str", given)).name
    if saved and get_schedule(saved.schedule).interleaves == interleaves:
        return saved.schedule
    return "interleaved" if interleaves else "1f1b"


def _virtual_stages(draft: Draft) -> object:
    """Return the virtual stages of a rank: those of listed stages where no number is given."""
    listed = parse_stages(cast("str", draft.given["stages"])) if "stages" in draft.given else ()
    pp = draft.number("pp")
    is_listed = isinstance(listed, tuple) and len(listed) > pp > 1 and len(listed) % pp == 0
    if "num_virtual_stages" not in draft.given and is_listed:
        return len(listed) // pp
    return draft.value("num_virtual_stages", 1)


def _stages(draft: Draft) -> tuple[int, ...]:
    job, saved = draft.setting.job, draft.setting.saved
    given = cast("str | None", draft.given.get("stages"))
    num_stages = draft.number("pp") * draft.number("num_virtual_stages")
    if given is not None:
        check_predictions(given, job.prediction_layers)
        return resolve_stages(job.model, job.seq_len, num_stages, parse_stages(given))
    if saved and len(saved.plan.stages) == num_stages and saved.job.model == job.model:
        return saved.plan.stages
    return resolve_stages(job.model, job.seq_len, num_stages, draft.setting.stack.stage_split)


def _prediction_stage(draft: Draft) -> object:
    """Return the stage of layers that predict further tokens: a layout's, given, or a file's."""
    name, told, saved = "prediction_stage", draft.given.get("stages", ""), draft.setting.saved
    if num_predictions(str(told)):
        return prediction_place(str(told), draft.given.get(name))
    is_saved = not told and saved is not None and saved.plan.stages == _stages(draft)
    return draft.value(name, None) if is_saved else draft.given.get(name)


def _recompute(draft: Draft) -> object:
    """Return what backward computes again: named parts are a selection, layers are in full."""
    usual = Recompute.SELECTIVE if "recompute_modules" in draft.given else Recompute.NONE
    if "recompute_layers" in draft.given:
        usual = Recompute.FULL
    named = usual is not Recompute.NONE
    return draft.given.get("recompute", usual) if named else draft.value("recompute", usual)


def _recompute_modules(draft: Draft) -> tuple[RecomputeModule, ...]:
    """Return the parts of a layer that are named, each once, in the order of Megatron-Core."""
    given = cast("str | tuple[RecomputeModule, ...] | None", draft.given.get("recompute_modules"))
    if given is not None:
        return read_modules(given) if isinstance(given, str) else given
    return draft.saved.recompute_modules if draft.saved and _keeps_recompute(draft) else ()


def _keeps_recompute(draft: Draft) -> bool:
    """Return whether what backward computes again is that of the plan file."""
    return draft.saved is not None and draft.known["recompute"] is draft.saved.recompute


def _of_layers(name: str) -> Callable[[Draft], object]:
    """Return what gives a field that says which layers are recomputed."""

    def value(draft: Draft) -> object:
        kept = getattr(draft.saved, name) if _keeps_recompute(draft) else None
        return draft.given.get(name, kept)

    return value


def read_modules(text: str) -> tuple[RecomputeModule, ...]:
    """Return the parts of a layer that a list names.

    Raises:
        PlanError: If it names what is none.

    >>> [str(each) for each in read_modules("mlp, core_attn")]
    ['core_attn', 'mlp']
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in list(RecomputeModule):
            raise PlanError(
                f"--recompute-modules {shown(word)} is unknown; "
                f"{suggestion(word, list(RecomputeModule))}"
            )
    return tuple(each for each in RecomputeModule if each in words)


# Fields whose value is not simply the given one, that of the plan file or the field's default.
RESOLVERS: dict[str, Callable[[Draft], object]] = {
    "dp": _dp,
    "zero_stage": lambda draft: draft.value("zero_stage", draft.setting.stack.zero_stage),
    "num_virtual_stages": _virtual_stages,
    "recompute": _recompute,
    "recompute_modules": _recompute_modules,
    "recompute_layers": _of_layers("recompute_layers"),
    "recompute_method": _of_layers("recompute_method"),
    "attention": lambda draft: draft.value(
        "attention", default_attention(draft.setting.cluster.device, draft.setting.stack)
    ),
    "schedule": _schedule,
    "stages": _stages,
    "prediction_stage": _prediction_stage,
    "parameter_server": lambda draft: resolve_servers(
        draft.given, draft.setting.stack, draft.saved, _free_hosts(draft)
    ),
    "dp_shard": _dp_shard,
    "cp_inner": _cp_inner,
}


def _check_passes(job: TrainingJob, plan: ParallelPlan) -> None:
    num_microbatches = plan.num_microbatches(job)
    if plan.num_stages * num_microbatches > MAX_PASSES:
        raise PlanError(
            f"{plan.num_stages} stages x {num_microbatches} microbatches are too many to simulate; "
            f"allowed: {MAX_PASSES} in all; raise --micro-batch or --dp"
        )


def read_budget(options: MoneyOptions, cluster: Cluster | None = None) -> Budget | None:
    """Return the run to price, or None where ``--tokens`` is not given.

    Args:
        options: The run, and what a device costs.
        cluster: Whose price is taken where none is given.

    Raises:
        PlanError: If tokens or price are not what they should be.
    """
    tokens, price = read_tokens(options.tokens), read_price(options.price)
    if tokens is None:
        if price is not None:
            raise PlanError("--price needs --tokens: the cost is that of a number of tokens")
        return None
    if price is None and cluster is not None:
        price = cluster.price_usd_per_gpu_hour
    return Budget(tokens=tokens, price_usd_per_gpu_hour=price)
