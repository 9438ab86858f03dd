"""Blocks of statements: in order, in a subshell, or several of which one runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.planner.shell.language import (
    State,
    Unknown,
    merged,
)
from meshwright.planner.shell.running.interpreter import Command, Flow, Interpreter, Status

if TYPE_CHECKING:
    from tree_sitter import Node

Block = Sequence["Node"]


NO_STATEMENTS = frozenset(
    {"comment", "heredoc_body", "heredoc_end", "heredoc_start", "do_group", "else_clause"}
)


def run_all(shell: Interpreter, nodes: Block) -> Status:
    """Run statements one after the other; return whether the last succeeds."""
    status: Status = True
    for number_, each in enumerate(nodes):
        if not each.is_named or each.type in NO_STATEMENTS:
            continue
        follows = nodes[number_ + 1].type if number_ + 1 < len(nodes) else ""
        status = run_in_subshell(shell, each) if follows == "&" else shell.run(shell, each)
    return status


def run_in_subshell(shell: Interpreter, node: "Node", nodes: Block | None = None) -> Status:
    """Run a statement, or several, whose changes to variables are lost."""
    outer, shell.state = shell.state, shell.state.copy()
    try:
        return shell.run(shell, node) if nodes is None else run_all(shell, nodes)
    except Flow:
        return True
    finally:
        shell.state = outer


def fork(shell: Interpreter, cause: Unknown, branches: Sequence[Callable[[], None]]) -> None:
    """Run branches of which it is not known which one runs; go on with what they have in common.

    A branch that ends the script, or leaves a loop or function, is not gone on with.
    """
    before, outer = shell.state, shell.commands
    ends: list[State] = []
    ran: list[list[Command]] = []
    flow: Flow | None = None
    for branch in branches:
        shell.state, shell.commands = before.copy(), []
        try:
            branch()
        except Flow as end:
            flow = end
            if end.kind != "exit":
                shell.frame.left.append((end.kind, shell.state, cause))
        else:
            ends.append(shell.state)
        ran.append(shell.commands)
    shell.commands = outer
    if all(_words(each) == _words(ran[0]) for each in ran):
        outer += ran[0]
    else:
        outer += [_doubtful(each, cause) for commands in ran for each in commands]
    if not ends:
        shell.state = before
        raise flow or Flow("exit")
    shell.spend(0, steps=len(before.variables) // 10)
    shell.state = merged(ends, cause, shell.unknowns, shell.told)


def _words(commands: Sequence[Command]) -> list[tuple[list[str], dict[str, str]]]:
    """Return what makes a command the same in two branches."""
    return [
        (
            [word.text for word in each.words],
            {name: word.text for name, word in each.environment.items()},
        )
        for each in commands
    ]


def _doubtful(command: Command, cause: Unknown) -> Command:
    return command if command.unknown else replace(command, unknown=cause.message)
