"""Resolution of user options to a complete plan, with the defaults of job, cluster and stack.

Library, command line, files, search, export and import all call `resolve`: nothing else sets
defaults, so that the same options mean the same plan everywhere.
"""

from dataclasses import field as dataclass_field
from dataclasses import fields, make_dataclass
from typing import TYPE_CHECKING, cast

from meshwright.hwprofiles import Cluster, StackProfile, StageSplit
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.defaults import PartialPlan, UserOptions, implied_recompute
from meshwright.simulator.layout.fields import written
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.layout.plan import PLAN_FIELDS, PlanFields, ResolvedPlan
from meshwright.simulator.layout.refusals import model_refusal
from meshwright.simulator.layout.splits import parse_stages
from meshwright.simulator.layout.stages import resolve_stages
from meshwright.simulator.schedules import get_schedule


class _Partial:
    """User options of a parallel plan; a field that is not given is None.

    `resolve` completes it for a job, a cluster and a stack.  Values are those of `ResolvedPlan`, or
    texts as on the command line: ``recompute="full"``, ``stages="balanced"``.
    """

    __slots__ = ()

    @property
    def said(self) -> dict[str, object]:
        """The fields that were given."""
        values = {name: getattr(self, name) for name in PLAN_FIELDS}
        return {name: value for name, value in values.items() if value is not None}

    def __repr__(self) -> str:
        """Return the given fields."""
        said = (f"{name}={written(value)}" for name, value in self.said.items())
        return f"ParallelPlan({', '.join(said)})"


# At run time all fields default to None; type checkers see the types of `PlanFields`.
if TYPE_CHECKING:

    class ParallelPlan(PlanFields):  # noqa: D101  (below)
        said: dict[str, object]

else:
    ParallelPlan = make_dataclass(
        "ParallelPlan",
        [
            (each.name, object, dataclass_field(default=None, metadata=each.metadata))
            for each in fields(PlanFields)
        ],
        bases=(_Partial,),
        namespace={"__doc__": _Partial.__doc__, "__module__": __name__},
        frozen=True,
        kw_only=True,
        slots=True,
        repr=False,
    )


def resolve(
    job: TrainingJob,
    cluster: Cluster | None,
    stack: StackProfile,
    plan: ParallelPlan | ResolvedPlan | UserOptions,
    *,
    num_gpus: int | None = None,
) -> ResolvedPlan:
    """Return *plan* with all fields resolved for *job*, *cluster* and *stack*.

    Args:
        job: Training job.
        cluster: Cluster of the run; may be None if attention and ``cp_inner`` are given.
        stack: Software stack, whose defaults fill in fields.
        plan: User options, or the fields of a file or a search by name; only the latter may have
            a value that does not apply to the model.
        num_gpus: Devices of the run, which decide ``dp`` where it is not given.

    Raises:
        PlanError: If options contradict each other, the model or the number of devices.

    >>> from meshwright.hwprofiles import load_cluster, load_stack
    >>> from meshwright.simulator.model import load_model
    >>> job = TrainingJob(model=load_model("llama3-8b"), global_batch_size=64, seq_len=8192)
    >>> stack = load_stack("megatron-core")
    >>> plan = resolve(job, load_cluster("dgx-h100"), stack, ParallelPlan(tp=4), num_gpus=16)
    >>> plan.dp, plan.zero_stage, str(plan.attention), str(plan.gradient_precision)
    (4, 1, 'flash', 'fp32')
    """
    is_users = isinstance(plan, _Partial)
    if isinstance(plan, _Partial):
        given: UserOptions = plan.said
    elif isinstance(plan, ResolvedPlan):
        given = {name: getattr(plan, name) for name in PLAN_FIELDS if getattr(plan, name) != ()}
    else:
        given = cast("UserOptions", plan)
    options = {name: value for name, value in given.items() if value is not None}
    # Files and searches have all fields: only a user means one that does not apply to the model.
    for name, value in options.items() if is_users else ():
        refusal = model_refusal(PLAN_FIELDS[name], value, job.model)
        if refusal is not None:
            raise PlanError(refusal)
    partial = PartialPlan(job, cluster, stack, num_gpus, options, {})
    for name, field in PLAN_FIELDS.items():
        partial.resolved[name] = partial.value(field)
    return ResolvedPlan.of(partial.resolved)


def minimal_options(
    job: TrainingJob, cluster: Cluster | None, stack: StackProfile, plan: ResolvedPlan
) -> dict[str, object]:
    """Return the fewest options from which `resolve` gives *plan*.

    The number of devices is that of the plan.
    """
    values = {name: getattr(plan, name) for name in PLAN_FIELDS}
    partial = PartialPlan(job, cluster, stack, plan.world_size, {}, {})
    said: dict[str, object] = {}
    for name, value in values.items():
        try:
            is_default = partial._replace(options=said).default(PLAN_FIELDS[name]) == value
        except PlanError:  # the rule for stages fails, as with more stages than layers
            is_default = False
        if not is_default and value is not None:
            said[name] = value
        partial.resolved[name] = value  # later defaults depend on it
    return said


def without_defaults(job: TrainingJob, stack: StackProfile, plan: ResolvedPlan) -> ResolvedPlan:
    """Return *plan* with optional fields set to None where they equal the defaults of *stack*.

    Tables and pages then show only departures from defaults.
    """
    said = minimal_options(job, None, stack, plan)
    departures = {
        name: said.get(name) if each.is_optional and name != "cp_inner" else getattr(plan, name)
        for name, each in PLAN_FIELDS.items()
    }
    return ResolvedPlan.of(departures)


def overridden(
    base: UserOptions, given: UserOptions, resolved: ResolvedPlan, *, keeps_model: bool
) -> dict[str, object]:
    """Return the options of *base* overridden by *given*.

    Options of *base* that depended on an overridden one are dropped: lists of stages, the schedule,
    modules or layers to recompute, ``cp_inner``.

    Args:
        base: Options of a plan file.
        given: Options of the command line.
        resolved: The file's plan.
        keeps_model: Whether the model is the file's.
    """
    kept = {name: value for name, value in base.items() if name not in given}
    # A list of stages implies the number of virtual stages.
    listed = parse_stages(str(given["stages"])) if isinstance(given.get("stages"), str) else ()
    if isinstance(listed, tuple) and listed:
        kept.pop("num_virtual_stages", None)
    said = {**kept, **given}
    pp, vpp = (cast("int", said.get(name, 1)) for name in ("pp", "num_virtual_stages"))
    # Layer counts fit one model and one number of stages.
    if "stages" in given or not keeps_model or pp * vpp != resolved.num_stages:
        dropped = {"stages", "prediction_stage"}
        said = {name: each for name, each in said.items() if name in given or name not in dropped}
    # 1F1B has no virtual stages, and interleaving needs several.
    if get_schedule(resolved.schedule).interleaves != (vpp > 1) and "schedule" not in given:
        said.pop("schedule", None)
    if _recompute_of(said, given) != said.get("recompute", implied_recompute(said)):
        parts = ("recompute", "recompute_modules", "recompute_layers", "recompute_method")
        said = {name: each for name, each in said.items() if name in given or name not in parts}
    inner = cast("int", said.get("cp_inner", 1))
    cp = cast("int", said.get("cp", 1))
    # An inner group divides cp, and belongs to one cp_type.
    if "cp_inner" not in given and ("cp_type" in given or cp == 1 or cp % inner):
        said.pop("cp_inner", None)
    return said


def _recompute_of(said: UserOptions, given: UserOptions) -> object:
    """Return the recomputation that *given* asks for, else that of all options *said*."""
    asked = {"recompute_modules", "recompute_layers"} & given.keys()
    if "recompute" in given or asked:
        return given.get("recompute", implied_recompute(given))
    return said.get("recompute", implied_recompute(said))


def stages_rule(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> StageSplit | None:
    """Return the rule that gives the stages of *plan*; None if the stack's does, or no rule."""
    if not plan.stages:
        return None
    own = stack.stage_split
    rules = (
        rule
        for rule in (own, *StageSplit)
        if resolve_stages(job.model, job.seq_len, plan.num_stages, rule) == plan.stages
    )
    rule = next(rules, own)
    return None if rule is own else rule
