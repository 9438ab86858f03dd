"""What each field of a plan is where it is not said, and how what was said of it is read."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from math import prod
from typing import Any, NamedTuple, TypeAlias, cast

from meshwright.hwprofiles import (
    Cluster,
    ContextParallel,
    Recompute,
    StackProfile,
    StageSplit,
    Strategy,
    shown,
    suggestion,
)
from meshwright.simulator.errors import PlanError
from meshwright.simulator.layout.axes import AXES, Axis, near_multiples
from meshwright.simulator.layout.capabilities import HABITS, Facts, Numbers, stack_gaps
from meshwright.simulator.layout.fields import ParameterServer, PlanField
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.layout.mesh import usual_inner
from meshwright.simulator.layout.plan import PLAN_FIELDS
from meshwright.simulator.layout.refusals import default_attention
from meshwright.simulator.layout.splits import (
    check_predictions,
    num_predictions,
    parse_stages,
    prediction_place,
)
from meshwright.simulator.layout.stages import resolve_stages
from meshwright.simulator.schedules import get_schedule

Said: TypeAlias = Mapping[str, object]
"""Fields of a plan that somebody said, by name; what nobody said is not there."""


class Draft(NamedTuple):
    """A plan that is being completed.

    ``known`` has the fields that are complete, in the order of `PLAN_FIELDS`; a cluster of None is
    one that nothing depends on, since what would is said.
    """

    job: TrainingJob
    cluster: Cluster | None
    stack: StackProfile
    num_gpus: int | None
    said: Said
    known: dict[str, object]

    def number(self, name: str) -> int:
        """Return a field that is known by now."""
        return cast("int", self.known[name])

    def code(self, name: str) -> int:
        """Return a field that is known by now as the number of a column."""
        return PLAN_FIELDS[name].code(self.known[name])

    def usual(self, field: PlanField) -> object:
        """Return what a field is where it is not said."""
        if field.name in HABITS:
            return field.value(Numbers(self.code, Facts(self.job, self.stack)).habit(field.name))
        rule = USUAL.get(field.name)
        return field.default if rule is None else rule(self)

    def value(self, field: PlanField) -> object:
        """Return a field as it was said, else what is usual."""
        if field.name not in self.said:
            return self.usual(field)
        read = READERS.get(field.name)
        said = self.said[field.name]
        return read(self, said) if read else _read(field, said)


def implied_recompute(said: Said) -> Recompute:
    """Return what backward computes again: named parts are a selection, layers are in full."""
    if "recompute_layers" in said:
        return Recompute.FULL
    return Recompute.SELECTIVE if "recompute_modules" in said else Recompute.NONE


def _read(field: PlanField, value: object) -> object:
    """Return a value that was said, a word as the choice that it names.

    Raises:
        PlanError: If it is none of a field's choices.
    """
    if not issubclass(field.kind, StrEnum) or isinstance(value, field.kind):
        return value
    known = [str(each) for each in field.kind]
    if value not in known:
        raise PlanError(f"{field.name}={shown(value)} is unknown; {suggestion(str(value), known)}")
    return field.kind(value)


def read_modules(text: str, name: str = "recompute_modules") -> tuple[object, ...]:
    """Return the parts of a layer that a list of a field names, each once, in the field's order.

    Raises:
        PlanError: If it names what is none.

    >>> [str(each) for each in read_modules("mlp, core_attn")]
    ['core_attn', 'mlp']
    """
    words, members = [word.strip() for word in text.split(",")], PLAN_FIELDS[name].members
    for word in words:
        if word not in members:
            raise PlanError(f"{name}={shown(word)} is unknown; {suggestion(word, members)}")
    return tuple(each for each in PLAN_FIELDS[name].declaration.members if each in words)


def _read_dp(draft: Draft, value: object) -> int:
    dp = cast("int", value)
    product, text = _others(draft)
    if draft.num_gpus is not None and product * dp != draft.num_gpus:
        raise PlanError(f"gpus={draft.num_gpus} is not {text} x dp={dp} = {product * dp}")
    return dp


def _usual_dp(draft: Draft) -> int:
    """Return what the other axes leave of the devices; 1 where nobody says how many there are."""
    if draft.num_gpus is None:
        return 1
    product, text = _others(draft)
    if draft.num_gpus % product:
        raise PlanError(
            f"gpus={draft.num_gpus} is not a multiple of {text} = {product}; "
            f"{near_multiples(draft.num_gpus, product)}"
        )
    return draft.num_gpus // product


def _others(draft: Draft) -> tuple[int, str]:
    """Return the ranks along all axes but the data-parallel one, and how they are told."""
    degrees: dict[Axis, int] = {
        axis: cast("int", draft.known.get(axis, draft.said.get(axis, 1)))
        for axis, known in AXES.items()
        if not known.takes_rest
    }
    told = {axis: each for axis, each in degrees.items() if each > 1 or not AXES[axis].is_rare}
    text = " x ".join(f"{axis}={degree}" for axis, degree in told.items())
    return prod(degrees.values()), text


def _usual_cp_inner(draft: Draft) -> int | None:
    """Return the ranks that swap tokens for heads in a ring of such groups: those of a node."""
    cp = draft.number("cp")
    is_nested = draft.known["cp_type"] is ContextParallel.RING_OF_SWAPS
    if cp == 1 or not is_nested or draft.cluster is None:
        return None
    node_size = draft.cluster.devices_per_node
    return usual_inner(draft.job, draft.stack, draft.number("tp"), cp, node_size)


def _usual_sequence_parallel(draft: Draft) -> bool:
    """Return True if activations are split along the tp axis: where the stack does, or must."""
    if draft.stack.splits_sequences and draft.number("tp") > 1:
        return True
    known = {**draft.known, "sequence_parallel": False}
    number = draft._replace(known=known).code
    return any(
        gap.lacks(number)
        for gap in stack_gaps(draft.stack, draft.job)
        if gap.field == "sequence_parallel" and True in gap.allowed and gap.fields <= known.keys()
    )


def _usual_attention(draft: Draft) -> object:
    if draft.cluster is None:
        return draft.stack.attention
    return default_attention(draft.cluster.device, draft.job, draft.stack)


def _usual_virtual_stages(draft: Draft) -> int:
    """Return the virtual stages of a rank: those of listed stages, else one."""
    listed, pp = draft.said.get("stages", ()), draft.number("pp")
    if isinstance(listed, str):
        rule = parse_stages(listed)
        listed = () if isinstance(rule, StageSplit) else rule
    count = len(cast("tuple[int, ...]", listed))
    return count // pp if count > pp > 1 and count % pp == 0 else 1


def _usual_schedule(draft: Draft) -> str:
    return "interleaved" if draft.number("num_virtual_stages") > 1 else "1f1b"


def _read_stages(draft: Draft, value: object) -> tuple[int, ...]:
    job = draft.job
    num_stages = draft.number("pp") * draft.number("num_virtual_stages")
    if isinstance(value, str) and value not in list(StageSplit):
        check_predictions(value, job.prediction_layers)
    wanted = parse_stages(value) if isinstance(value, str) else cast("tuple[int, ...]", value)
    return resolve_stages(job.model, job.seq_len, num_stages, wanted)


def _usual_stages(draft: Draft) -> tuple[int, ...]:
    return _read_stages(draft, draft.stack.stage_split)


def _read_prediction_stage(draft: Draft, value: object) -> object:
    return _place_of_predictions(draft, cast("int | None", value))


def _usual_prediction_stage(draft: Draft) -> object:
    return _place_of_predictions(draft, None)


def _place_of_predictions(draft: Draft, said: int | None) -> object:
    """Return the stage of layers that predict further tokens: that of a layout, if it says one."""
    text = draft.said.get("stages", "")
    if isinstance(text, str) and num_predictions(text):
        return prediction_place(text, said)
    return said


def _read_servers(draft: Draft, value: object) -> ParameterServer | None:
    """Return the servers that are asked for; on all workers where these leave no host.

    Raises:
        PlanError: If a value is at fault, or the stack has no servers.
    """
    stack = draft.stack
    said = dict(cast("Said", value)) if isinstance(value, Mapping) else None
    if stack.strategy is not Strategy.PARAMETER_SERVER:
        for name, each in (said or {"servers": getattr(value, "servers", None)}).items():
            raise PlanError(
                f"{name}={each} is not offered by stack {stack.name}; allowed: with a stack of "
                f"strategy {Strategy.PARAMETER_SERVER}"
            )
        return None
    if said is None:
        return cast("ParameterServer", value)
    if "servers" in said and said["servers"] != "all":
        number = str(said["servers"])
        if not (number.isdecimal() and len(number) <= 30):
            raise PlanError(
                f"servers={shown(said['servers'])} is no number; allowed: a whole number or all"
            )
        said["servers"] = int(number)
    usual = ParameterServer(servers="all" if _free_hosts(draft) == 0 else 1)
    return replace(usual, **cast("dict[str, Any]", said))


def _usual_servers(draft: Draft) -> ParameterServer | None:
    has_servers = draft.stack.strategy is Strategy.PARAMETER_SERVER
    return _read_servers(draft, {}) if has_servers else None


def _free_hosts(draft: Draft) -> int | None:
    """Return the nodes that workers leave, None where the cluster has no end."""
    cluster = draft.cluster
    if cluster is None or cluster.num_nodes is None:
        return None
    return cluster.num_nodes - -(-draft.number("dp") // cluster.devices_per_node)


def _reader_of_modules(name: str) -> Callable[[Draft, object], object]:
    return lambda _, value: read_modules(value, name) if isinstance(value, str) else value


def _read_schedule(_draft: Draft, value: object) -> str:
    return get_schedule(str(value)).name


# What a field is where it is not said, but for its declared default and what stacks do.
USUAL: dict[str, Callable[[Draft], object]] = {
    "dp": _usual_dp,
    "cp_inner": _usual_cp_inner,
    "zero_stage": lambda draft: draft.stack.zero_stage,
    "num_virtual_stages": _usual_virtual_stages,
    "sequence_parallel": _usual_sequence_parallel,
    "recompute": lambda draft: implied_recompute(draft.said),
    "attention": _usual_attention,
    "schedule": _usual_schedule,
    "stages": _usual_stages,
    "prediction_stage": _usual_prediction_stage,
    "parameter_server": _usual_servers,
}
# How what was said is read, where it is more than a word or a number.
READERS: dict[str, Callable[[Draft, object], object]] = {
    "dp": _read_dp,
    **{name: _reader_of_modules(name) for name in ("recompute_modules", "offload_modules")},
    "schedule": _read_schedule,
    "stages": _read_stages,
    "prediction_stage": _read_prediction_stage,
    "parameter_server": _read_servers,
}
