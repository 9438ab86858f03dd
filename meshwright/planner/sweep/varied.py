"""Variations of a sweep: options and facts by name, each with its values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from meshwright.hwprofiles import fact_keys, shown, suggestion
from meshwright.planner.options import (
    SWEPT,
    JobOptions,
    Option,
    OptionGroup,
    option_name,
    read_value,
)
from meshwright.simulator import PlanError

JOB = OptionGroup.of(JobOptions)
OF_JOB = {each.name for each in fields(JobOptions)}
PLAN = Option("plan", "plan", str)
OPTIONS: Mapping[str, Option] = {
    each.name: each for each in (*JOB.options, *SWEPT.options, PLAN) if each.kind is not list
}
# Of the result, the same for all cells: days and money are told of each whatever is varied.
NOT_VARIED = {"top": "each cell has its best layout", "json": "it says where the result goes"}
NOT_VARIED |= dict.fromkeys(("tokens", "price"), "it is told of all cells")
NOT_VARIED |= {"set": "name the fact itself, as device.memory_bandwidth", "out": NOT_VARIED["json"]}
MOST_CELLS = 10_000


class Value(NamedTuple):
    """Value of a variation: as it is shown, and as an option takes it."""

    text: str
    content: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """An option or a fact that is varied.

    Args:
        name: An option without its dashes, as ``global-batch``, or the key of a fact.
        key: What an option sets; empty of a fact.
        values: In the order given.
    """

    name: str
    key: str
    values: tuple[Value, ...]

    @property
    def is_fact(self) -> bool:
        """True for a fact of cluster, device or stack."""
        return not self.key

    @property
    def is_of_job(self) -> bool:
        """True for an option of the job, not of the layout."""
        return self.key in OF_JOB

    @property
    def column(self) -> str:
        """Its name in tables: that of the field which an option sets, or the key of the fact."""
        return COLUMNS.get(self.key, self.key) or self.name


# Names of job options in files, where they are those of a result.
COLUMNS = {"gpus": "num_gpus", "global_batch": "global_batch_size"}


def read_words(words: Sequence[str]) -> tuple[Variation, ...]:
    """Return the variations of texts ``NAME=A,B``; semicolons part values that have commas.

    Raises:
        PlanError: If a name is unknown or given twice, or a value is none of it.

    >>> [(each.name, [value.content for value in each.values])
    ...  for each in read_words(["gpus=8,16", "device.memory_bandwidth=2 TB/s, 3 TB/s"])]
    [('gpus', [8, 16]), ('device.memory_bandwidth', ['2 TB/s', '3 TB/s'])]
    """
    given: list[tuple[str, Sequence[object]]] = []
    for word in words:
        name, sign, text = word.partition("=")
        values = [each.strip() for each in text.split(";" if ";" in text else ",")]
        if not (sign and name.strip() and all(values)):
            raise PlanError(f"--vary {shown(word)} is not NAME=VALUE,VALUE, as gpus=64,128")
        given.append((name, values))
    return variations(given)


def variations(given: Sequence[tuple[str, Sequence[object]]]) -> tuple[Variation, ...]:
    """Return the variations of names and values; raises as `read_words`."""
    varied = tuple(_variation(name, values) for name, values in given)
    if not varied:
        raise PlanError("--vary is missing; it is required, as --vary gpus=64,128,256")
    names = [each.key or each.name for each in varied]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise PlanError(f"--vary {varied[number].name} is given more than once; allowed: once")
    return varied


def _variation(name: str, values: Sequence[object]) -> Variation:
    plain = name.strip().removeprefix("--")
    option = OPTIONS.get(plain.replace("-", "_"))
    if option is None:
        _check_fact(plain)
    parsed = [Value(text_of(each), _content(plain, option, text_of(each))) for each in values]
    if not parsed:
        raise PlanError(f"--vary {plain} has no value; allowed: one or more")
    contents = [each.content for each in parsed]
    for number, each in enumerate(parsed):
        # By content: 8 and +8 are one value.
        if each.content in contents[:number]:
            raise PlanError(f"--vary {plain} has {shown(each.text)} twice; allowed: once")
    shown_name = plain if option is None else option_name(option.name)[2:]
    return Variation(name=shown_name, key=option.key if option else "", values=tuple(parsed))


def _check_fact(name: str) -> None:
    """Raise PlanError unless *name* may be the key of a fact."""
    if name in NOT_VARIED:
        raise PlanError(f"--vary {name} is not offered: {NOT_VARIED[name]}")
    facts = fact_keys()
    if not any(name == each or name.startswith(f"{each}.") for each in facts):
        options = [option_name(each)[2:] for each in OPTIONS]
        raise PlanError(f"--vary {shown(name)} is unknown; {suggestion(name, [*options, *facts])}")


def _content(name: str, option: Option | None, text: str) -> object:
    if option is None:
        return text
    try:
        return read_value(option, text)
    except PlanError as error:
        raise PlanError(f"--vary {name}: {error}") from None


def text_of(value: object) -> str:
    """Return a value of Python as an option is written."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value).strip()


def read_options(given: Mapping[str, object]) -> tuple[JobOptions, dict[str, object], str | None]:
    """Return options of Python by their names: of the job, of the layout, and the plan file.

    Raises:
        PlanError: If there is no option of a name, or a value is none of it.
    """
    job: dict[str, object] = {}
    fields_given: dict[str, object] = {}
    for name, option, value in _known(given):
        target = job if name in OF_JOB else fields_given
        target[option.key] = value
    plan = fields_given.pop("plan", None)
    job_options = JOB.build({each.key: job.get(each.key) for each in JOB.options})
    assert isinstance(job_options, JobOptions)
    return job_options, fields_given, None if plan is None else str(plan)


def _known(given: Mapping[str, object]) -> Iterator[tuple[str, Option, object]]:
    """Yield each option that is given, with its value."""
    (facts,) = (each for each in JOB.options if each.kind is list)
    for name, value in given.items():
        if value is None:
            continue
        if name == facts.name:
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise PlanError(f"set={shown(value)} is no list; allowed: a list of KEY=VALUE")
            yield name, facts, [str(each) for each in value]
        elif name not in OPTIONS:
            raise PlanError(f"{name} is no option of a sweep; {suggestion(name, OPTIONS)}")
        else:
            yield name, OPTIONS[name], read_value(OPTIONS[name], text_of(value))
