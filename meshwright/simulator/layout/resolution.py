"""The one resolution: what was said of a plan, completed by the job, the cluster and the stack.

Library, command line, files, search, export and import all come through `resolve`; nothing else
fills in what a plan leaves open.
"""

from dataclasses import field as dataclass_field
from dataclasses import fields, make_dataclass
from typing import TYPE_CHECKING, cast

from meshwright.hwprofiles import Cluster, StackProfile, StageSplit
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.defaults import Draft, Said, implied_recompute
from meshwright.simulator.layout.fields import written
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.layout.plan import PLAN_FIELDS, PlanFields, ResolvedPlan
from meshwright.simulator.layout.refusals import model_refusal
from meshwright.simulator.layout.splits import parse_stages
from meshwright.simulator.layout.stages import resolve_stages
from meshwright.simulator.schedules import get_schedule


class _Partial:
    """What was said of a plan; a field is None until it is said.

    `resolve` gives the plan that it means for a job, on a cluster, with a stack.  Values are those
    of `ResolvedPlan`, or as the command line has them: ``recompute="full"``, ``stages="balanced"``.
    """

    __slots__ = ()

    @property
    def said(self) -> dict[str, object]:
        """The fields that were said."""
        values = {name: getattr(self, name) for name in PLAN_FIELDS}
        return {name: value for name, value in values.items() if value is not None}

    def __repr__(self) -> str:
        """Return what was said."""
        said = (f"{name}={written(value)}" for name, value in self.said.items())
        return f"ParallelPlan({', '.join(said)})"


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
    plan: ParallelPlan | ResolvedPlan | Said,
    *,
    num_gpus: int | None = None,
) -> ResolvedPlan:
    """Return *plan* with every field, as *stack* trains *job* on *cluster*.

    Args:
        job: What is trained.
        cluster: On what; None where attention and ``cp_inner`` are said.
        stack: With what software; its habits are the defaults.
        plan: What was said: a user's, or the fields of a file or of a search by name, which may
            have a value where the model has nothing that it says.
        num_gpus: Devices of the run, which decide ``dp`` where it is not said.

    Raises:
        PlanError: If what was said contradicts itself, the model or the number of devices.

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
        words: Said = plan.said
    elif isinstance(plan, ResolvedPlan):
        words = {name: getattr(plan, name) for name in PLAN_FIELDS if getattr(plan, name) != ()}
    else:
        words = cast("Said", plan)
    said = {name: value for name, value in words.items() if value is not None}
    for name, value in said.items() if is_users else ():
        refusal = model_refusal(PLAN_FIELDS[name], value, job.model)
        if refusal is not None:
            raise PlanError(refusal)
    draft = Draft(job, cluster, stack, num_gpus, said, {})
    for name, field in PLAN_FIELDS.items():
        draft.known[name] = draft.value(field)
    return ResolvedPlan.of(draft.known)


def said_of(
    job: TrainingJob, cluster: Cluster | None, stack: StackProfile, plan: ResolvedPlan
) -> dict[str, object]:
    """Return the fewest fields that have to be said for `resolve` to give *plan*.

    The number of devices is that of the plan.
    """
    values = {name: getattr(plan, name) for name in PLAN_FIELDS}
    draft = Draft(job, cluster, stack, plan.world_size, {}, {})
    said: dict[str, object] = {}
    for name, value in values.items():
        try:
            is_usual = draft._replace(said=said).usual(PLAN_FIELDS[name]) == value
        except PlanError:  # of stages that no rule gives
            is_usual = False
        if not is_usual and value is not None:
            said[name] = value
        draft.known[name] = value
    return said


def without_defaults(job: TrainingJob, stack: StackProfile, plan: ResolvedPlan) -> ResolvedPlan:
    """Return *plan* with None where it does what *stack* does anyway, of fields that may be None.

    So tables and pages show what a plan departs in.
    """
    said = said_of(job, None, stack, plan)
    departures = {
        name: said.get(name) if each.is_optional and name != "cp_inner" else getattr(plan, name)
        for name, each in PLAN_FIELDS.items()
    }
    return ResolvedPlan.of(departures)


def overridden(
    base: Said, given: Said, resolved: ResolvedPlan, *, keeps_model: bool
) -> dict[str, object]:
    """Return what *base* says of a plan, and *given* where it says something else.

    What goes with a field that is given is no longer said: stages of another number, a schedule
    that does not fit, parts of another mode of recomputation, groups of other ranks.

    Args:
        base: Of a plan file.
        given: Besides.
        resolved: The plan of the file.
        keeps_model: Whether the model is still the file's.
    """
    kept = {name: value for name, value in base.items() if name not in given}
    listed = parse_stages(str(given["stages"])) if isinstance(given.get("stages"), str) else ()
    if isinstance(listed, tuple) and listed:
        kept.pop("num_virtual_stages", None)
    said = {**kept, **given}
    pp, vpp = (cast("int", said.get(name, 1)) for name in ("pp", "num_virtual_stages"))
    if "stages" in given or not keeps_model or pp * vpp != resolved.num_stages:
        dropped = {"stages", "prediction_stage"}
        said = {name: each for name, each in said.items() if name in given or name not in dropped}
    if get_schedule(resolved.schedule).interleaves != (vpp > 1) and "schedule" not in given:
        said.pop("schedule", None)
    if _recompute_of(said, given) != said.get("recompute", implied_recompute(said)):
        parts = ("recompute", "recompute_modules", "recompute_layers", "recompute_method")
        said = {name: each for name, each in said.items() if name in given or name not in parts}
    inner = cast("int", said.get("cp_inner", 1))
    cp = cast("int", said.get("cp", 1))
    if "cp_inner" not in given and ("cp_type" in given or cp == 1 or cp % inner):
        said.pop("cp_inner", None)
    return said


def _recompute_of(said: Said, given: Said) -> object:
    """Return the mode of recomputation that *given* asks for, or that of all that is *said*."""
    asked = {"recompute_modules", "recompute_layers"} & given.keys()
    if "recompute" in given or asked:
        return given.get("recompute", implied_recompute(given))
    return said.get("recompute", implied_recompute(said))


def stages_rule(job: TrainingJob, plan: ResolvedPlan, stack: StackProfile) -> StageSplit | None:
    """Return the rule that gives the stages of *plan*; None if it is the stack's, or none does."""
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
