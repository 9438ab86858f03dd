"""Job, cluster, stack and plan of a command's options, every default resolved."""

from pathlib import Path
from typing import Any, NamedTuple, cast

from meshwright.hwprofiles import (
    DEFAULT_STACK,
    Cluster,
    StackProfile,
    load_cluster,
    load_stack,
    with_facts,
)
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
from meshwright.simulator import (
    ModelSpec,
    ParallelPlan,
    PlanError,
    ResolvedPlan,
    TrainingJob,
    load_model,
)
from meshwright.simulator.layout import (
    PLAN_FIELDS,
    SERVER_FIELDS,
    default_precision,
    minimal_options,
    overridden,
    resolve,
)
from meshwright.simulator.memory import usable_bytes
from meshwright.simulator.model import AnyModel, with_mtp_layers


class Setting(NamedTuple):
    """Job, cluster, stack and memory limit of a command.

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


def read_setting(
    options: JobOptions, plan_file: str | None = None, *, model: AnyModel | str | None = None
) -> Setting:
    """Return the setting of *options*; what they leave open comes from the plan file.

    Args:
        options: Of the command.
        plan_file: Of ``--plan``.
        model: That is trained, or its name; by default that of the options.

    Raises:
        PlanError: If a model, job or number is at fault, or missing.
        ProfileError: If the cluster or the stack is at fault.
    """
    check_counts(options)
    memory_limit_bytes = read_memory_limit(options.memory_limit)
    saved = None if plan_file is None else read_plan(Path(plan_file))
    model = options.model if model is None else model
    if isinstance(model, str):
        model = load_model(model)
    _check_complete(options, saved, model)
    cluster = saved.cluster if saved and options.cluster is None else _cluster(options)
    stack = saved.stack if saved and options.stack is None else _stack(options)
    # After the plan file is read: --set changes facts of whichever cluster and stack these are.
    cluster, stack = with_facts(cluster, stack, options.set or ())
    usable_bytes(cluster, memory_limit_bytes)  # refuses a limit beyond the device
    return Setting(
        job=_job(options, saved, cluster, stack, model),
        cluster=cluster,
        stack=stack,
        num_gpus=options.gpus,
        memory_limit_bytes=memory_limit_bytes,
        saved=saved,
    )


def _check_complete(options: JobOptions, saved: SavedPlan | None, model: AnyModel | None) -> None:
    if saved is not None:
        return
    if model is None:
        raise PlanError("MODEL is missing; allowed: a built-in name, a config.json or a model TOML")
    for field in ("cluster", "gpus", "global_batch"):
        if getattr(options, field) is None:
            raise PlanError(f"{option_name(field)} is missing; it is required")


def _cluster(options: JobOptions) -> Cluster:
    return load_cluster(options.cluster or "")


def _stack(options: JobOptions) -> StackProfile:
    return load_stack(DEFAULT_STACK if options.stack is None else options.stack)


def _job(
    options: JobOptions,
    saved: SavedPlan | None,
    cluster: Cluster,
    stack: StackProfile,
    model: AnyModel | None,
) -> TrainingJob:
    saved_job = saved.job if saved else None
    model = saved_job.model if model is None and saved_job else model
    assert model is not None  # _check_complete
    if options.seq_len is not None and not isinstance(model, ModelSpec):
        raise PlanError(
            f"--seq-len {options.seq_len} does not go with {model.name}, whose batch counts "
            f"{model.sample}; allowed: leave it out"
        )
    if options.prediction_layers is not None:
        # MTP layers are the model's: the job that is saved keeps them.
        model = with_mtp_layers(model, options.prediction_layers)
    # Another model has its own sequence length.
    keeps_length = saved_job is not None and saved_job.model == model
    precision = saved_job.precision if saved_job else default_precision(cluster.device, stack)
    batch = options.global_batch or (saved_job.global_batch_size if saved_job else 0)
    return TrainingJob(
        model=model,
        global_batch_size=batch,
        seq_len=options.seq_len
        or (saved_job.seq_len if saved_job and keeps_length else model.seq_len),
        precision=options.precision or precision,
        imbalance=_imbalance(options, saved_job, model),
    )


def _imbalance(options: JobOptions, saved_job: TrainingJob | None, model: AnyModel) -> float:
    """Return the hottest expert's load: as given, or that of a plan file of the same model."""
    if options.imbalance is not None:
        return options.imbalance
    return saved_job.imbalance if saved_job is not None and saved_job.model == model else 1.0


def resolve_plan(setting: Setting, given: Given) -> ResolvedPlan:
    """Return the plan of the options in *given*, completed by the plan file and the stack.

    Raises:
        PlanError: If options contradict each other, the model or the number of devices.
    """
    check_given(given)
    plan_values, num_gpus = plan_words(given), setting.num_gpus
    saved = setting.saved
    if saved is not None:
        base = minimal_options(saved.job, saved.cluster, saved.stack, saved.plan)
        keeps_model = saved.job.model == setting.job.model
        # With --dp and without --gpus the degrees decide the world size.
        if num_gpus is None and "dp" not in plan_values:
            num_gpus = saved.plan.world_size
        plan_values = overridden(base, plan_values, saved.plan, keeps_model=keeps_model)
    plan = ParallelPlan(**cast("Any", plan_values))
    return resolve(setting.job, setting.cluster, setting.stack, plan, num_gpus=num_gpus)


def plan_words(given: Given) -> dict[str, object]:
    """Return the fields of a plan among user options; those of its servers are one record."""
    values = {name: value for name, value in given.items() if name in PLAN_FIELDS}
    servers = {name: given[name] for name in SERVER_FIELDS if name in given}
    return {**values, "parameter_server": servers} if servers else values


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
