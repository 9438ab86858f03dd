"""A framework that trains: the table of its words, the files that it reads, how it is started."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshwright.planner.export.launch import Starter
from meshwright.planner.export.table import Facts, Keys, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What is to be written of a plan.

    Args:
        keys: What the framework is told.
        facts: What the plan says.
        remarks: Lines that stand at the head of a file.
        start: The words that start the framework's program, without the launcher's own.
        version: Of the framework.
    """

    keys: Keys
    facts: Facts
    remarks: list[str]
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """What is known of a framework; a module of this folder each.

    Args:
        name: As ``--to`` and ``--from`` have it.
        source: Which release, or revision, the words are of.
        versions: Those that can be asked for, the usual one first.
        releases: The source of a version where each has its own.
        write_table: Correspondences for a version and what a plan says.
        read_table: Correspondences for the keys of a file.
        files: Text of each file of an export, by its name.
        command: Words that start its program, a line of a script each.
        starter: What starts it.
        is_script: Whether an export is a script that starts the job.
        read: From the text of a file to keys; None where nothing is read.
        stack: Name of the stack that a plan from such a file is of.
        suffixes: Of files that it reads.
        harmless: Patterns of keys that leave a layout as it is.
    """

    name: str
    source: str
    versions: tuple[str, ...] = ()
    releases: Mapping[str, str] = field(default_factory=dict)
    write_table: Callable[[str, Facts], tuple[Row, ...]]
    read_table: Callable[[Keys], tuple[Row, ...]]
    files: Callable[[Export], Mapping[str, str]]
    command: Callable[[Export], tuple[str, ...]]
    starter: Starter = Starter.TORCHRUN
    is_script: Callable[[str], bool] = lambda _: False
    read: Callable[[str], Keys] | None = None
    stack: Callable[[Keys], str]
    suffixes: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
