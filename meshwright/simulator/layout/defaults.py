"""Defaults of plan fields, and parsing of the values that users give."""

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
from meshwright.simulator.layout.capabilities import STACK_DEFAULTS, Facts, Numbers, stack_gaps
from meshwright.simulator.layout.fields import ParameterServer, PlanField
from meshwright.simulator.layout.job import TrainingJob
from meshwright.simulator.layout.mesh import default_inner
from meshwright.simulator.layout.plan import PLAN_FIELDS
from meshwright.simulator.layout.refusals import default_attention
from meshwright.simulator.layout.splits import (
    check_mtp_layers,
    count_mtp_layers,
    layout_mtp_stage,
    parse_stages,
)
from meshwright.simulator.layout.stages import resolve_stages
from meshwright.simulator.schedules import get_schedule

UserOptions: TypeAlias = Mapping[str, object]
"""User options: plan fields that were given, by name; fields left to defaults are absent."""


class PartialPlan(NamedTuple):
    """A plan in the course of its resolution.

    ``resolved`` has the fields so far, in the order of `PLAN_FIELDS`.  The cluster may be None if
    no default depends on it.
    """

    job: TrainingJob
    cluster: Cluster | None
    stack: StackProfile
    num_gpus: int | None
    options: UserOptions
    resolved: dict[str, object]

    def number(self, name: str) -> int:
        """Return the value of a field that is already resolved."""
        return cast("int", self.resolved[name])

    def code(self, name: str) -> int:
        """Return the number, as of a column, of a field that is already resolved."""
        return PLAN_FIELDS[name].code(self.resolved[name])

    def default(self, field: PlanField) -> object:
        """Return the default of a field: the stack's, a rule's, else the declared one."""
        if field.name in STACK_DEFAULTS:
            numbers = Numbers(self.code, Facts(self.job, self.stack))
            return field.value(numbers.stack_default(field.name))
        rule = DEFAULTS.get(field.name)
        return field.default if rule is None else rule(self)

    def value(self, field: PlanField) -> object:
        """Return the value of a field that the user gave, else its default."""
        if field.name not in self.options:
            return self.default(field)
        read = READERS.get(field.name)
        option = self.options[field.name]
        return read(self, option) if read else _read(field, option)


def implied_recompute(options: UserOptions) -> Recompute:
    """Return the recomputation that options imply: full of layers, selective of modules."""
    if "recompute_layers" in options:
        return Recompute.FULL
    return Recompute.SELECTIVE if "recompute_modules" in options else Recompute.NONE


def _read(field: PlanField, value: object) -> object:
    """Return a user's value, a word converted to the enumeration member that it names.

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
    """Parse a list of modules, such as ``mlp,core_attn``, into the order of the field's members.

    Raises:
        PlanError: If a word is no member of the field.

    >>> [str(each) for each in read_modules("mlp, core_attn")]
    ['core_attn', 'mlp']
    """
    words, members = [word.strip() for word in text.split(",")], PLAN_FIELDS[name].members
    for word in words:
        if word not in members:
            raise PlanError(f"{name}={shown(word)} is unknown; {suggestion(word, members)}")
    return tuple(each for each in PLAN_FIELDS[name].declaration.members if each in words)


def _read_dp(partial: PartialPlan, value: object) -> int:
    dp = cast("int", value)
    product, text = _others(partial)
    if partial.num_gpus is not None and product * dp != partial.num_gpus:
        raise PlanError(f"gpus={partial.num_gpus} is not {text} x dp={dp} = {product * dp}")
    return dp


def _default_dp(partial: PartialPlan) -> int:
    """Return the devices over the product of the other degrees; 1 without a number of devices."""
    if partial.num_gpus is None:
        return 1
    product, text = _others(partial)
    if partial.num_gpus % product:
        raise PlanError(
            f"gpus={partial.num_gpus} is not a multiple of {text} = {product}; "
            f"{near_multiples(partial.num_gpus, product)}"
        )
    return partial.num_gpus // product


def _others(partial: PartialPlan) -> tuple[int, str]:
    """Return the product of all degrees but the data-parallel one, and its text for errors."""
    degrees: dict[Axis, int] = {
        axis: cast("int", partial.resolved.get(axis, partial.options.get(axis, 1)))
        for axis, declaration in AXES.items()
        if not declaration.takes_rest
    }
    shown = {axis: each for axis, each in degrees.items() if each > 1 or not AXES[axis].is_rare}
    text = " x ".join(f"{axis}={degree}" for axis, degree in shown.items())
    return prod(degrees.values()), text


def _default_cp_inner(partial: PartialPlan) -> int | None:
    """Return the Ulysses group of hybrid context parallelism: all-to-alls stay within a node."""
    cp = partial.number("cp")
    is_hybrid = partial.resolved["cp_type"] is ContextParallel.HYBRID_RING
    if cp == 1 or not is_hybrid or partial.cluster is None:
        return None
    node_size = partial.cluster.devices_per_node
    return default_inner(partial.job, partial.stack, partial.number("tp"), cp, node_size)


def _default_sequence_parallel(partial: PartialPlan) -> bool:
    """Return True if the stack's default with tp, or a rule of it, is sequence parallelism."""
    if partial.stack.splits_sequences and partial.number("tp") > 1:
        return True
    # Some stacks refuse certain plans without it, such as experts with tp: then it is on.
    resolved = {**partial.resolved, "sequence_parallel": False}
    number = partial._replace(resolved=resolved).code
    return any(
        gap.lacks(number)
        for gap in stack_gaps(partial.stack, partial.job)
        if gap.field == "sequence_parallel"
        and True in gap.allowed
        and gap.fields <= resolved.keys()
    )


def _default_attention(partial: PartialPlan) -> object:
    if partial.cluster is None:
        return partial.stack.attention
    return default_attention(partial.cluster.device, partial.job, partial.stack)


def _default_virtual_stages(partial: PartialPlan) -> int:
    """Return the virtual stages of a rank: from the number of listed stages, else one."""
    listed, pp = partial.options.get("stages", ()), partial.number("pp")
    if isinstance(listed, str):
        rule = parse_stages(listed)
        listed = () if isinstance(rule, StageSplit) else rule
    count = len(cast("tuple[int, ...]", listed))
    # Other counts are refused by `check_stages`.
    return count // pp if count > pp > 1 and count % pp == 0 else 1


def _default_schedule(partial: PartialPlan) -> str:
    return "interleaved" if partial.number("num_virtual_stages") > 1 else "1f1b"


def _read_stages(partial: PartialPlan, value: object) -> tuple[int, ...]:
    job = partial.job
    num_stages = partial.number("pp") * partial.number("num_virtual_stages")
    if isinstance(value, str) and value not in list(StageSplit):
        check_mtp_layers(value, job.prediction_layers)
    wanted = parse_stages(value) if isinstance(value, str) else cast("tuple[int, ...]", value)
    return resolve_stages(job.model, job.seq_len, num_stages, wanted)


def _default_stages(partial: PartialPlan) -> tuple[int, ...]:
    return _read_stages(partial, partial.stack.stage_split)


def _read_prediction_stage(partial: PartialPlan, value: object) -> object:
    return _mtp_stage(partial, cast("int | None", value))


def _default_prediction_stage(partial: PartialPlan) -> object:
    return _mtp_stage(partial, None)


def _mtp_stage(partial: PartialPlan, chosen: int | None) -> object:
    """Return the virtual stage of MTP layers: that of a layout's text, if it places them."""
    text = partial.options.get("stages", "")
    if isinstance(text, str) and count_mtp_layers(text):
        return layout_mtp_stage(text, chosen)
    return chosen


def _read_servers(partial: PartialPlan, value: object) -> ParameterServer | None:
    """Return the parameter servers; on all workers where these leave no host of the cluster.

    Raises:
        PlanError: If a value is invalid, or the stack has no servers.
    """
    stack = partial.stack
    options = dict(cast("UserOptions", value)) if isinstance(value, Mapping) else None
    if stack.strategy is not Strategy.PARAMETER_SERVER:
        for name, each in (options or {"servers": getattr(value, "servers", None)}).items():
            raise PlanError(
                f"{name}={each} is not offered by stack {stack.name}; allowed: with a stack of "
                f"strategy {Strategy.PARAMETER_SERVER}"
            )
        return None
    if options is None:
        return cast("ParameterServer", value)
    if "servers" in options and options["servers"] != "all":
        number = str(options["servers"])
        # int() refuses thousands of digits with an error of its own.
        if not (number.isdecimal() and len(number) <= 30):
            raise PlanError(
                f"servers={shown(options['servers'])} is no number; allowed: a whole number or all"
            )
        options["servers"] = int(number)
    default = ParameterServer(servers="all" if _free_hosts(partial) == 0 else 1)
    return replace(default, **cast("dict[str, Any]", options))


def _default_servers(partial: PartialPlan) -> ParameterServer | None:
    has_servers = partial.stack.strategy is Strategy.PARAMETER_SERVER
    return _read_servers(partial, {}) if has_servers else None


def _free_hosts(partial: PartialPlan) -> int | None:
    """Return the nodes without workers, None where the cluster has no limit."""
    cluster = partial.cluster
    if cluster is None or cluster.num_nodes is None:
        return None
    return cluster.num_nodes - -(-partial.number("dp") // cluster.devices_per_node)


def _reader_of_modules(name: str) -> Callable[[PartialPlan, object], object]:
    return lambda _, value: read_modules(value, name) if isinstance(value, str) else value


def _read_schedule(_draft: PartialPlan, value: object) -> str:
    return get_schedule(str(value)).name


# Defaults that depend on other fields, the job or the cluster; others are declared, or the stack's.
DEFAULTS: dict[str, Callable[[PartialPlan], object]] = {
    "dp": _default_dp,
    "cp_inner": _default_cp_inner,
    "zero_stage": lambda partial: partial.stack.zero_stage,
    "num_virtual_stages": _default_virtual_stages,
    "sequence_parallel": _default_sequence_parallel,
    "recompute": lambda partial: implied_recompute(partial.options),
    "attention": _default_attention,
    "schedule": _default_schedule,
    "stages": _default_stages,
    "prediction_stage": _default_prediction_stage,
    "parameter_server": _default_servers,
}
# Parsers of fields whose values are more than a word or a number.
READERS: dict[str, Callable[[PartialPlan, object], object]] = {
    "dp": _read_dp,
    **{name: _reader_of_modules(name) for name in ("recompute_modules", "offload_modules")},
    "schedule": _read_schedule,
    "stages": _read_stages,
    "prediction_stage": _read_prediction_stage,
    "parameter_server": _read_servers,
}
