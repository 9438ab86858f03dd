"""From options to what is asked for: job, cluster, stack and plan, every default resolved."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from meshwright.hwprofiles import (
    Attention,
    Cluster,
    Offload,
    Precision,
    Recompute,
    StackProfile,
    load_cluster,
    load_stack,
)
from meshwright.planner.cli.servers import resolve_servers
from meshwright.planner.options import (
    JobOptions,
    LayoutOptions,
    MoneyOptions,
    ReplicaOptions,
    check_counts,
    option_name,
    read_memory_limit,
    read_price,
    read_tokens,
)
from meshwright.planner.reports import Budget, SavedPlan, read_plan
from meshwright.planner.search import MAX_PASSES
from meshwright.simulator import (
    ParallelPlan,
    PlanError,
    TrainingJob,
    get_schedule,
    load_model,
    parse_stages,
    resolve_stages,
)

DEFAULT_STACK = "megatron-core"
# Published 16-bit training runs used fp16 before this year, bf16 from it on.
FIRST_BF16_DATE = "2022"
V = TypeVar("V")


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


def default_precision(cluster: Cluster, stack: StackProfile) -> Precision:
    """Return bf16 where device and stack have it and it was usual, else fp16, else fp32."""
    usual = [Precision.FP16, Precision.FP32]
    if stack.date >= FIRST_BF16_DATE:
        usual.insert(0, Precision.BF16)
    offered = cluster.device.peak_flops_per_s.keys() & set(stack.precisions)
    return next((each for each in usual if each in offered), usual[0])


def default_attention(cluster: Cluster, stack: StackProfile) -> Attention:
    """Return the stack's kernel; unfused where the device lacks its flash kernel."""
    flash, unfused = Attention.FLASH, Attention.UNFUSED
    lacks_kernel = stack.flash_kernel not in cluster.device.flash
    if stack.attention is flash and lacks_kernel and unfused in stack.attention_kernels:
        return unfused
    return stack.attention


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
    keeps_length = old is not None and old.model == model
    precision = old.precision if old else default_precision(cluster, stack)
    batch = options.global_batch or (old.global_batch_size if old else 0)
    return TrainingJob(
        model=model,
        global_batch_size=batch,
        seq_len=options.seq_len or (old.seq_len if old and keeps_length else model.seq_len),
        precision=options.precision or precision,
    )


def resolve_plan(
    setting: Setting, layout: LayoutOptions, replicas: ReplicaOptions | None = None
) -> ParallelPlan:
    """Return the plan of *layout* and *replicas*, completed from plan file and stack defaults.

    Raises:
        PlanError: If options contradict each other, the model or the number of devices.
    """
    check_counts(layout)
    old = setting.saved.plan if setting.saved else None
    tp = layout.tp or (old.tp if old else 1)
    pp = layout.pp or (old.pp if old else 1)
    vpp = layout.vpp or (old.num_virtual_stages if old else 1)
    stack = setting.stack
    usual = default_attention(setting.cluster, stack)
    sequence_parallel = old.sequence_parallel if old else False
    if layout.sequence_parallel is not None:
        sequence_parallel = layout.sequence_parallel
    zero_stage = old.zero_stage if old else stack.zero_stage
    replicas = replicas or ReplicaOptions()
    dp = _dp(setting, layout, tp, pp)
    plan = ParallelPlan(
        tp=tp,
        pp=pp,
        dp=dp,
        num_virtual_stages=vpp,
        microbatch_size=layout.micro_batch or (old.microbatch_size if old else 1),
        zero_stage=zero_stage if layout.zero is None else layout.zero,
        sequence_parallel=sequence_parallel,
        recompute=layout.recompute or (old.recompute if old else Recompute.NONE),
        attention=layout.attention or (old.attention if old else usual),
        schedule=_schedule(layout, old, vpp),
        stages=_stages(setting, layout, pp * vpp),
        parameter_server=resolve_servers(replicas, stack, old),
        dp_shard=_dp_shard(replicas, old, dp),
        reshard_after_forward=_reshards(replicas, old),
        gradient_precision=replicas.gradient_precision or (old.gradient_precision if old else None),
        reduce_precision=replicas.reduce_precision or (old.reduce_precision if old else None),
        sync_each_microbatch=_syncs(replicas, old),
        offload=replicas.offload or (old.offload if old else Offload.NONE),
        find_unused=_finds_unused(replicas, old),
    )
    _check_passes(setting.job, plan)
    return plan


def _finds_unused(replicas: ReplicaOptions, old: ParallelPlan | None) -> bool:
    if replicas.find_unused is not None:
        return replicas.find_unused
    return old.find_unused if old else False


def _syncs(replicas: ReplicaOptions, old: ParallelPlan | None) -> bool | None:
    if replicas.sync_each_microbatch is not None:
        return replicas.sync_each_microbatch
    return old.sync_each_microbatch if old else None


def _reshards(replicas: ReplicaOptions, old: ParallelPlan | None) -> bool:
    if replicas.reshard_after_forward is not None:
        return replicas.reshard_after_forward
    return old.reshard_after_forward if old else True


def _dp_shard(replicas: ReplicaOptions, old: ParallelPlan | None, dp: int) -> int | None:
    """Return the ranks that share a set of shards, None where all do."""
    dp_shard = replicas.dp_shard
    if dp_shard is None:
        dp_shard = old.dp_shard if old else None
    return None if dp_shard == dp else dp_shard


def _dp(setting: Setting, layout: LayoutOptions, tp: int, pp: int) -> int:
    """Return the data-parallel degree: as given, or what the devices leave."""
    dp = layout.dp
    if setting.num_gpus is None and dp is not None:
        return dp
    num_gpus = setting.world_size
    if dp is None:
        if num_gpus % (tp * pp):
            raise PlanError(
                f"gpus={num_gpus} is not a multiple of tp={tp} x pp={pp} = {tp * pp}; "
                f"{_near_multiples(num_gpus, tp * pp)}"
            )
        return num_gpus // (tp * pp)
    if tp * pp * dp != num_gpus:
        raise PlanError(f"gpus={num_gpus} is not tp={tp} x pp={pp} x dp={dp} = {tp * pp * dp}")
    return dp


def _near_multiples(number: int, step: int) -> str:
    """Return the multiples of *step* around *number* as a hint.

    >>> _near_multiples(100, 32), _near_multiples(5, 32)
    ('nearest: 96 or 128', 'nearest: 32')
    """
    below = number // step * step
    return f"nearest: {below} or {below + step}" if below else f"nearest: {step}"


def _schedule(layout: LayoutOptions, old: ParallelPlan | None, vpp: int) -> str:
    if layout.schedule is not None:
        return get_schedule(layout.schedule).name
    if old and get_schedule(old.schedule).interleaves == (vpp > 1):
        return old.schedule
    return "interleaved" if vpp > 1 else "1f1b"


def _stages(setting: Setting, layout: LayoutOptions, num_stages: int) -> tuple[int, ...]:
    job, saved = setting.job, setting.saved
    if layout.stages is not None:
        wanted = parse_stages(layout.stages)
    elif saved and len(saved.plan.stages) == num_stages and saved.job.model == job.model:
        wanted = saved.plan.stages
    else:
        wanted = setting.stack.stage_split
    return resolve_stages(job.model, job.seq_len, num_stages, wanted)


def _check_passes(job: TrainingJob, plan: ParallelPlan) -> None:
    num_microbatches = plan.num_microbatches(job)
    if plan.num_stages * num_microbatches > MAX_PASSES:
        raise PlanError(
            f"{plan.num_stages} stages x {num_microbatches} microbatches are too many to simulate; "
            f"allowed: {MAX_PASSES} in all; raise --micro-batch or --dp"
        )


def read_budget(options: MoneyOptions, cluster: Cluster) -> Budget | None:
    """Return the run to price, or None where ``--tokens`` is not given.

    Raises:
        PlanError: If tokens or price are not what they should be.
    """
    tokens, price = read_tokens(options.tokens), read_price(options.price)
    if tokens is None:
        if price is not None:
            raise PlanError("--price needs --tokens: the cost is that of a number of tokens")
        return None
    return Budget(
        tokens=tokens,
        price_usd_per_gpu_hour=cluster.price_usd_per_gpu_hour if price is None else price,
    )
