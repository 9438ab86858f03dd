"""The table of docs/plan.md: every field of a plan, as it is declared."""

from documents.tables import table
from meshwright.planner.space import PASSES
from meshwright.simulator.layout import AXES, PLAN_FIELDS, SERVER_FIELDS, Axis, PlanField

FIELD_HEAD = ("in JSON and Python", "option", "usual", "searched", "what it is")
AXIS_HEAD = ("axis", "what it is", "neighbours are apart by", "offered by stacks with")


def _option(field: PlanField) -> str:
    name = field.option.replace("_", "-")
    return f"`--{name}`, `--no-{name}`" if field.kind is bool else f"`--{name}`"


def _row(field: PlanField) -> tuple[str, ...]:
    declaration = field.declaration
    searched = "yes" if declaration.heading else ""
    if field.name in PASSES or declaration.is_asked:
        searched = "if asked"
    if declaration.is_limited:
        searched += f", to `--max-{field.option.replace('_', '-')}`"
    usual = "" if field.default in (None, ()) else f"{field.default}"
    return f"`{field.name}`", _option(field), usual, searched, declaration.help


def plan_fields() -> str:
    """Return the fields of a plan and of its parameter servers, in the order of a plan file."""
    rows = []
    for field in PLAN_FIELDS.values():
        if field.name == "parameter_server":
            rows += [_row(each) for each in SERVER_FIELDS.values()]
        else:
            rows.append(_row(field))
    return table(FIELD_HEAD, rows)


def axes() -> str:
    """Return the axes of the mesh, fastest first."""
    rows, faster = [], "1"
    for axis in Axis:
        offered = AXES[axis].offered_by
        rows.append(
            (f"`{axis}`", f"{AXES[axis].title} degree", faster, f"`{offered}`" if offered else "")
        )
        faster = axis.value if faster == "1" else f"{faster} x {axis}"
    return table(AXIS_HEAD, rows)
