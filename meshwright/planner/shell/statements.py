"""Statements of the shell: lists, branches, loops, functions; both branches where none is known."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from meshwright.planner.shell.builtin_commands import assign, run_declaration
from meshwright.planner.shell.commands import run_command
from meshwright.planner.shell.conditions import both, either, negated, tested
from meshwright.planner.shell.expansion import fields, fragments, number, single
from meshwright.planner.shell.interpreter import (
    Command,
    Flow,
    Function,
    Interpreter,
    State,
    Status,
)
from meshwright.planner.shell.words import MARKS, Field, Unknown, field_of

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_ROUNDS = 1_000  # of a loop
NO_STATEMENTS = frozenset({"comment", "heredoc_body", "heredoc_end", "heredoc_start"})
Block = Sequence["Node"]


def run_statement(shell: Interpreter, node: "Node") -> Status:
    """Run a statement, executing nothing; return whether it succeeds."""
    place = shell.place(node)
    shell.spend(place)
    run = STATEMENTS.get(node.type)
    if run is None:
        raise shell.refusal(place, f"{node.type.replace('_', ' ')} is not read")
    return run(shell, node)


def run_all(shell: Interpreter, nodes: Block) -> Status:
    """Run statements one after the other; return whether the last succeeds."""
    status: Status = True
    for at, each in enumerate(nodes):
        if each.is_named and each.type not in NO_STATEMENTS:
            # A command in the background runs in a subshell.
            is_parallel = at + 1 < len(nodes) and nodes[at + 1].type == "&"
            status = _run_in_subshell(shell, [each]) if is_parallel else shell.run(shell, each)
    return status


def _run_in_subshell(shell: Interpreter, nodes: Block) -> Status:
    """Run statements whose changes to variables are lost."""
    saved_state, shell.state = shell.state, shell.state.copy()
    try:
        return run_all(shell, nodes)
    except Flow:
        return True
    finally:
        shell.state = saved_state


def fork(shell: Interpreter, cause: Unknown, branches: Sequence[Callable[[], object]]) -> None:
    """Run branches of which it is not known which one runs; go on with what they have in common.

    A branch that ends the script, or leaves a loop or function, is not gone on with.
    """
    before, saved_commands = shell.state, shell.commands
    ends: list[State] = []
    ran: list[list[Command]] = []
    flow = Flow("exit")
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
    shell.state, shell.commands = before, saved_commands
    # A command that all branches run, runs in any case.
    words = [[_words(each) for each in some] for some in ran]
    if all(each == words[0] for each in words):
        saved_commands += ran[0]
    else:
        reason = cause.message
        saved_commands += [
            replace(each, unknown=each.unknown or reason) for some in ran for each in some
        ]
    if not ends:
        raise flow
    shell.spend(0, steps=len(before.variables) // 10)
    shell.merge(ends, cause)


def _words(command: Command) -> tuple[list[str], dict[str, str]]:
    """Return the words and variables by which commands of two branches are the same."""
    environment = {name: word.text for name, word in command.environment.items()}
    return [each.text for each in command.words], environment


def _rejoin(shell: Interpreter, kind: str) -> None:
    """Merge the states of branches that left early, of which it is not known whether they ran."""
    early_ends = shell.frame.left
    for each in [each for each in early_ends if each[0] == kind]:
        early_ends.remove(each)
        shell.merge([shell.state, each[1]], each[2])


def _pipeline(shell: Interpreter, node: "Node") -> Status:
    """Run the commands of a pipe, each in a subshell; what it prints is not known."""
    status: Status = True
    printed, shell.output = shell.output, None if shell.output is None else []
    for each in node.named_children:
        status = _run_in_subshell(shell, [each])
    shell.output = printed
    if printed is not None:
        text = f"$({shell.text(node)})"
        printed.append(shell.unread(shell.place(node), text, "is not executed here"))
    return status


def _list(shell: Interpreter, node: "Node") -> Status:
    left, sign, right = node.children[0], node.children[1].type, node.children[-1]
    status = run_statement(shell, left)
    # `mkdir x && torchrun ...` counts on its first command.
    if isinstance(status, str) and shell.unknowns.meaning(status).is_usual:
        status = True
    if status is (sign == "&&"):
        return run_statement(shell, right)
    if isinstance(status, bool):
        return status
    second: list[Status] = []
    cause = shell.unknowns.meaning(status)
    fork(shell, cause, [lambda: second.append(run_statement(shell, right)), lambda: None])
    return (both if sign == "&&" else either)(status, second[0] if second else status)


def _if(shell: Interpreter, node: "Node") -> Status:
    """Run the branch whose condition holds, or all where that is not known."""
    parts: list[Node] = []
    for each in node.children:
        parts += each.children if each.type in {"elif_clause", "else_clause"} else [each]
    return _choose(shell, parts)


def _choose(shell: Interpreter, parts: Block) -> Status:
    """Run a branch; *parts* begins with its ``if``, ``elif`` or ``else``, or with ``fi``."""
    kinds = [each.type for each in parts]
    end = next(
        at
        for at, kind in enumerate(kinds)
        if kind in {"elif", "else", "fi"} and (at or kind == "fi")
    )
    if kinds[0] in {"else", "fi"}:
        return run_all(shell, parts[1:end])
    then = kinds.index("then")
    status = run_all(shell, parts[1:then])
    body, rest = (
        partial(run_all, shell, parts[then + 1 : end]),
        partial(_choose, shell, parts[end:]),
    )
    if isinstance(status, bool):
        return body() if status else rest()
    fork(shell, shell.unknowns.meaning(status), [body, rest])
    return status


def _case(shell: Interpreter, node: "Node") -> Status:
    value = node.child_by_field_name("value")
    assert value is not None
    text, place = single(shell, value).text.characters, shell.place(node)
    mark = MARKS.search(text)
    bodies: list[Callable[[], object]] = []
    for item in (each for each in node.children if each.type == "case_item"):
        if any(each.type in {";&", ";;&"} for each in item.children):
            raise shell.refusal(shell.place(item), "`;&` is not read")
        end = next(at for at, each in enumerate(item.children) if each.type == ")")
        body = partial(run_all, shell, item.children[end + 1 :])
        patterns = list(_patterns(shell, item, item.children[: end + 1]))
        bodies.append(body)
        if mark is None and any(shell.matched(each.parts, text, place) for each in patterns):
            return body()
        # Nothing behind `*)` is reached.
        if patterns[-1].text.characters == "*":
            break
    else:
        bodies.append(lambda: None)
    if mark is None:
        return True
    fork(shell, shell.unknowns.meaning(mark[0]), bodies)
    return mark[0]


def _patterns(shell: Interpreter, item: "Node", nodes: Block) -> Iterator[Field]:
    """Yield the patterns of a case between ``|`` and before ``)``."""
    start = nodes[0].end_byte if nodes[0].type == "(" else item.start_byte
    for border in (each for each in nodes if each.type in {"|", ")"}):
        text = shell.frame.source.characters[start : border.start_byte]
        first = start + len(text) - len(text.lstrip())
        pattern = field_of(fragments(shell, item, first, first + len(text.strip()), "word"))
        unknown = shell.unknowns.first(pattern.text.characters)
        if unknown is not None:
            raise shell.refusal(shell.place(item), unknown.message)
        yield pattern
        start = border.end_byte


def _function(shell: Interpreter, node: "Node") -> Status:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    assert name is not None
    assert body is not None
    shell.state.functions[shell.text(name)] = Function(body, shell.frame.source)
    return True


def _compound(shell: Interpreter, node: "Node") -> Status:
    if node.children[0].type != "((":
        return run_all(shell, node.children)
    return _is_not_zero(shell, node, node.start_byte + 2, node.end_byte - 2)


def _is_not_zero(shell: Interpreter, node: "Node", start: int, stop: int) -> Status:
    value = number(shell, node, start, stop)
    return value if isinstance(value, str) else value != 0


def _assignments(shell: Interpreter, node: "Node") -> Status:
    for each in [node] if node.type == "variable_assignment" else node.named_children:
        assign(shell, each)
    return True


def _body(node: "Node") -> Block:
    body = node.child_by_field_name("body") or node.children[-1]
    return body.children[1:-1]


def _round(shell: Interpreter, body: Block) -> bool:
    """Run the body of a loop once; return whether it goes on."""
    goes_on = True
    try:
        run_all(shell, body)
    except Flow as flow:
        if flow.kind not in {"break", "continue"}:
            raise
        if flow.levels > 1:
            raise Flow(flow.kind, flow.levels - 1) from None
        goes_on = flow.kind == "continue"
    _rejoin(shell, "continue")
    return goes_on


def _for(shell: Interpreter, node: "Node") -> Status:
    place = shell.place(node)
    name = node.child_by_field_name("variable")
    assert name is not None
    if node.children[0].type == "select":
        raise shell.refusal(place, "`select` is not read")
    kinds = [each.type for each in node.children]
    words = list(shell.state.arguments)
    if "in" in kinds:
        values = [each for each in node.children[kinds.index("in") :] if each.is_named]
        words = [each.text for each in fields(shell, node, values[:-1])]
    for word in words:
        shell.spend(place)
        shell.assign(shell.text(name), word, place)
        first = shell.unknowns.first(word.characters)
        if first is not None:
            _uncertain_rounds(shell, first, partial(_round, shell, _body(node)))
        elif not _round(shell, _body(node)):
            break
    _rejoin(shell, "break")
    return True


def _uncertain_rounds(shell: Interpreter, cause: Unknown, once: Callable[[], object]) -> None:
    """Run a loop of which it is not known how often it runs, until nothing changes."""
    # States settle in a few rounds: a variable that once differs stays uncertain.
    for _ in range(10):
        before = shell.state.copy()
        fork(shell, cause, [once, lambda: None])
        if shell.state == before:
            return
    raise shell.refusal(0, f"a loop does not settle: {cause.message}")


def _while(shell: Interpreter, node: "Node") -> Status:
    end = next(at for at, each in enumerate(node.children) if each.type == "do_group")
    condition = partial(run_all, shell, node.children[1:end])
    if node.children[0].type == "until":
        return _loop(shell, node, lambda: negated(condition()), lambda: None)
    return _loop(shell, node, condition, lambda: None)


def _loop(
    shell: Interpreter, node: "Node", holds: Callable[[], Status], update: Callable[[], object]
) -> Status:
    """Run a loop while a condition holds, with what is done after each round."""
    place = shell.place(node)

    def once() -> bool:
        goes_on = _round(shell, _body(node))
        if goes_on:
            update()
        return goes_on

    for _ in range(MOST_ROUNDS):
        status = holds()
        if isinstance(status, str):
            _uncertain_rounds(shell, shell.unknowns.meaning(status), lambda: (once(), holds()))
            break
        before = shell.state.copy()
        shell.spend(place, steps=1 + len(before.variables) // 20)
        if not status or not once() or shell.state == before:
            break  # the same again: it goes on so for ever
    else:
        raise shell.refusal(place, f"a loop runs over {MOST_ROUNDS:,} times")
    _rejoin(shell, "break")
    return True


def _counting_for(shell: Interpreter, node: "Node") -> Status:
    """Run ``for ((i = 0; i < 4; i++))``."""
    borders = [each for each in node.children if each.type in {"((", ";", "))"}][:4]
    if [each.type for each in borders] != ["((", ";", ";", "))"]:
        raise shell.refusal(shell.place(node), "this loop is not read")
    first, second, third = (
        partial(_is_not_zero, shell, node, left.end_byte, right.start_byte)
        for left, right in pairwise(borders)
    )
    first()
    text = shell.frame.source.characters[borders[1].end_byte : borders[2].start_byte]
    return _loop(shell, node, second if text.strip() else lambda: True, third)


STATEMENTS: Mapping[str, Callable[[Interpreter, "Node"], Status]] = {
    "program": lambda shell, node: run_all(shell, node.children),
    "list": _list,
    "pipeline": _pipeline,
    "command": run_command,
    "redirected_statement": run_command,
    "declaration_command": run_declaration,
    "unset_command": run_command,
    "variable_assignment": _assignments,
    "variable_assignments": _assignments,
    "if_statement": _if,
    "case_statement": _case,
    "for_statement": _for,
    "c_style_for_statement": _counting_for,
    "while_statement": _while,
    "function_definition": _function,
    "compound_statement": _compound,
    "subshell": lambda shell, node: _run_in_subshell(shell, node.children),
    "negated_command": lambda shell, node: negated(run_statement(shell, node.children[-1])),
    "test_command": tested,
}
