"""Plans that a framework's options cannot express, from the tables of exporters and importers.

A limit is one set of conditions on a plan and its job, evaluated for one plan and for columns.
"""

from ast import expr
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple, cast

from meshwright.hwprofiles import (
    OTHERWISE,
    UNSET,
    FieldEntry,
    FrameworkProfile,
    FrameworkTable,
    StackProfile,
    Strategy,
    all_hold,
    in_parentheses,
    parsed,
)
from meshwright.simulator.layout import (
    PLAN_FIELDS,
    Facts,
    Gap,
    Numbers,
    PlanField,
    TrainingJob,
    is_fact,
)
from meshwright.simulator.model import ModelSpec

NOT_PLANNED = ("parameter_server",)  # a field of stacks that no framework launches
WORDS_AT_ONCE = 8  # words of a list in a condition, as conditions are limited in length
# Model fields that change nothing that a framework configures.
LABELS = {"name", "title", "source", "seq_len", "scored_fraction", "spelling", "head_dim"}


class _Limit(NamedTuple):
    """A limit of a table of options: conditions that all plans beyond it satisfy."""

    field: str
    texts: tuple[str, ...]
    allowed: tuple[object, ...]
    why: str = ""
    reason: str = ""


def framework_gaps(
    framework: FrameworkProfile, version: str, stack: StackProfile, job: TrainingJob
) -> Iterator[Gap]:
    """Yield the plans of *job* on *stack* that a version of *framework* cannot express.

    Only limits that depend on the layout; `framework_refusal` covers those that do not.
    """
    yield from (gap for gap in all_gaps(framework, version, stack, job) if gap.names)


def all_gaps(
    framework: FrameworkProfile, version: str, stack: StackProfile, job: TrainingJob
) -> Iterator[Gap]:
    """Yield the same and limits that no layout avoids, in the order of the table."""
    yield from (gap for gap, _ in _gaps(framework, version, Facts(job, stack)))


def framework_refusal(
    framework: FrameworkProfile, version: str, stack: StackProfile, job: TrainingJob
) -> str | None:
    """Return the reason *framework* cannot run *job* in any layout, or None when it can."""
    if stack.strategy is not Strategy.MESH:
        return (
            f"stack={stack.name} trains with a strategy of its own; allowed: stacks with "
            f"strategy {Strategy.MESH}"
        )
    if not isinstance(job.model, ModelSpec):
        return f"model {job.model.name} is no transformer; allowed here: one"
    facts = Facts(job, stack)
    tables = [table for table, _ in chosen_tables(framework, version, stack)]
    gaps = [*_gaps(framework, version, facts)]
    of_all = [(gap, table) for gap, table in gaps if table is not None]
    refused = [gap for gap, _ in gaps if not gap.names]
    # Another engine of the framework may still run the job: only limits of all tables refuse it.
    if all(any(table is each for _, each in of_all) for table in tables):
        refused += [gap for gap, _ in of_all]
    if not refused:
        return None
    return refusal_text(refused[0], facts.value(refused[0].field), framework.name)


def refusal_text(gap: Gap, value: object, framework: str) -> str:
    """Return the one-line refusal of *value* of the field of *gap* by a framework."""
    known = ", ".join(map(_word, gap.allowed)) + in_parentheses(gap.why)
    if gap.reason.startswith("model="):
        return f"{gap.reason}, which cannot be expressed for {framework}; allowed: {known}"
    of_model = gap.facts.job.model.name if gap.field.startswith("model.") else ""
    name = f"{gap.field.removeprefix('model.')} of model {of_model}" if of_model else gap.field
    return f"{name}={_word(value)} cannot be expressed for {framework}; allowed: {known}"


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none of its own" if value is None or value == UNSET else str(value)


def chosen_tables(
    framework: FrameworkProfile, version: str, stack: StackProfile
) -> list[tuple[FrameworkTable, tuple[str, ...]]]:
    """Return the tables for plans of *stack*, each with the conditions under which it is used."""
    tables = framework.tables_of(version)
    for table in tables:
        if any(fnmatchcase(stack.name, each) for each in table.launches):
            return [(table, ())]
    chosen: list[tuple[FrameworkTable, tuple[str, ...]]] = []
    others: tuple[str, ...] = ()
    for table in tables:
        own = (table.when,) if table.when else ()
        chosen.append((table, (*others, *own)))
        others = (*others, *(f"not ({text})" for text in own))  # the first table that fits is used
    return chosen


def _gaps(
    framework: FrameworkProfile, version: str, facts: Facts
) -> Iterator[tuple[Gap, FrameworkTable | None]]:
    """Yield gaps, each with its table if it holds for all plans of that."""
    for table, conditions in chosen_tables(framework, version, facts.stack):
        for limit in _limits(table, facts):
            of_plan = _parts(limit.texts, facts)
            chosen = _parts(conditions, facts)
            if of_plan is not None and chosen is not None:
                gap = Gap(
                    field=limit.field,
                    reason=limit.reason or " and ".join(limit.texts),
                    parts=(*chosen, *of_plan),
                    facts=facts,
                    allowed=limit.allowed,
                    why=limit.why,
                )
                yield gap, None if of_plan else table


def _parts(texts: Iterable[str], facts: Facts) -> tuple[expr, ...] | None:
    """Return the parts of conditions on the plan; None if the parts on the job do not hold."""
    parts: list[expr] = []
    for text in texts:
        of_job, of_plan = parsed(text).about(is_fact)
        if not all_hold(of_job, Numbers(lambda _: 0, facts)):
            return None
        parts += of_plan
    return tuple(parts)


def _limits(table: FrameworkTable, facts: Facts) -> Iterator[_Limit]:
    """Yield all limits of a table."""
    model = facts.job.model
    if table.model_facts and isinstance(model, ModelSpec):
        yield from _model_limits(model, table.model_facts)
    for rule in table.refused.values():
        yield _Limit(rule.field, (rule.when,), rule.allowed, rule.words(), rule.reason)
    for name, field in PLAN_FIELDS.items():
        if name not in table.spoken and name not in NOT_PLANNED:
            # A field that the table does not mention cannot be exported: only its default is safe.
            text = f"{name} != {field.code(field.default)}"
            yield _Limit(name, (text,), (field.default,))
    for name, entry in table.fields.items():
        yield from _entry_limits(name, entry)


def _model_limits(model: ModelSpec, configurable: tuple[str, ...]) -> Iterator[_Limit]:
    """Yield the model fields that a framework cannot configure and that are not the defaults."""
    known = {"positions", *configurable}
    usual: dict[str, object] = {}
    if "head_dim" not in known:
        usual["head_dim"] = model.hidden_size // model.num_heads
    usual["positions"] = "rotary" if model.positions == "rotary" else "learned"
    declared = type(model).model_fields.items()
    usual |= {name: each.default for name, each in declared if name not in LABELS | known}
    for name, expected in usual.items():
        value = getattr(model, name)
        if value != expected:
            is_plain = isinstance(value, str | int | float | bool | None)
            text = f"{name}={value}" if is_plain else name
            yield _Limit("model", (), (expected,), reason=f"model={model.name} has {text}")


def _entry_limits(name: str, entry: FieldEntry) -> Iterator[_Limit]:
    field = PLAN_FIELDS.get(name)
    axis = None if field is None else field.declaration.acts_on
    # A field whose axis has degree 1 has no effect, and neither has one that is left at None.
    around = tuple(text for text in (entry.when, axis and f"{axis} > 1") if text)
    is_given = (f"{name} != None",) if field is not None and field.is_optional else ()
    if entry.same_as:
        texts = (f"{name} != {entry.same_as}", *is_given, *around)
        yield _Limit(name, texts, (f"that of {entry.same_as}",), entry.why)
    others: tuple[str, ...] = ()
    for word, condition in entry.always.items():
        own = () if condition == OTHERWISE else (condition,)
        is_set = is_given if word != UNSET else ()
        texts = (*own, *others, f"{name} != {literal(field, word)}", *is_set, *around)
        yield _Limit(name, texts, (_shown(word),), entry.why)
        others = (*others, *(f"not ({text})" for text in own))
    if entry.allowed:
        words = [literal(field, each) for each in entry.allowed]
        pieces = (words[at : at + WORDS_AT_ONCE] for at in range(0, len(words), WORDS_AT_ONCE))
        texts = tuple(f"{name} not in [{', '.join(piece)}]" for piece in pieces)
        yield _Limit(name, (*texts, *around), tuple(map(_shown, entry.allowed)), entry.why)


def literal(field: PlanField | None, word: object) -> str:
    """Return a value of a table as a literal of conditions."""
    text = str(word).lower() if isinstance(word, bool) else str(word)
    if text == UNSET:
        return "None"
    if text in ("true", "false"):
        return text.capitalize()
    is_number = field is None or field.kind is int
    return text if is_number and text.isdecimal() else repr(text)


def _shown(word: object) -> object:
    return {"true": True, "false": False}.get(cast("str", word), word)
