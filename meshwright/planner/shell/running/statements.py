"""Statements of the shell: lists, branches, loops, functions; both branches where none is known."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from meshwright.planner.shell.language import (
    MARKS,
    Function,
    Text,
    Unknown,
    field_of,
    is_match,
    pieces_of,
)
from meshwright.planner.shell.running.assignments import assign, run_declaration
from meshwright.planner.shell.running.blocks import Block, fork, run_all, run_in_subshell
from meshwright.planner.shell.running.commands import run_command
from meshwright.planner.shell.running.conditions import both, either, negated, tested
from meshwright.planner.shell.running.expansion import fields, fragments, number, single
from meshwright.planner.shell.running.interpreter import Flow, Interpreter, Status

if TYPE_CHECKING:
    from tree_sitter import Node

MOST_ROUNDS = 1_000  # of a loop


def run_statement(shell: Interpreter, node: "Node") -> Status:
    """Run a statement, executing nothing; return whether it succeeds."""
    place = shell.place(node)
    shell.spend(place)
    run = STATEMENTS.get(node.type)
    if run is None:
        raise shell.unknowns.refusal(place, f"{node.type.replace('_', ' ')} is not read")
    shell.budget.depth += 1
    if shell.budget.depth > 80:
        raise shell.unknowns.refusal(place, "statements nest too deeply")
    try:
        return run(shell, node)
    finally:
        shell.budget.depth -= 1


def _program(shell: Interpreter, node: "Node") -> Status:
    return run_all(shell, node.children)


def _subshell(shell: Interpreter, node: "Node") -> Status:
    return run_in_subshell(shell, node, node.children)


def _pipeline(shell: Interpreter, node: "Node") -> Status:
    status: Status = True
    inner = [each for each in node.named_children if each.type != "comment"]
    printed = shell.output
    for place, each in enumerate(inner):
        if printed is not None:
            shell.output = []
        status = run_in_subshell(shell, each)
        if printed is not None and place < len(inner) - 1 and shell.output:
            # What a filter makes of it is not known.
            shell.output = []
    if printed is not None:
        printed.append(_filtered(shell, node))
        shell.output = printed
    return status


def _filtered(shell: Interpreter, node: "Node") -> Text:
    place = shell.place(node)
    text = shell.frame.source.part(node.start_byte, node.end_byte).characters
    shown = f"$({' '.join(shell.unknowns.shown(text).split())[:40]})"
    where = shell.unknowns.where(place)
    return shell.mark(place, Unknown(shown, f"{shown} at {where} is not executed here"))


def _list(shell: Interpreter, node: "Node") -> Status:
    left, operator, right = node.children[0], node.children[1].type, node.children[-1]
    status = run_statement(shell, left)
    if isinstance(status, str) and shell.decision(status).is_usual:
        status = True
    if status is (operator == "&&"):
        return run_statement(shell, right)
    if isinstance(status, bool):
        return status
    second: list[Status] = []
    cause = shell.decision(status)
    fork(shell, cause, [lambda: second.append(run_statement(shell, right)), lambda: None])
    join = both if operator == "&&" else either
    return join(status, second[0] if second else status)


def _if(shell: Interpreter, node: "Node") -> Status:
    """Run the branch whose condition holds, or all where that is not known."""
    clauses: list[tuple[Block, Block]] = []
    otherwise: Block = ()
    children = list(node.children)
    at = next(index for index, each in enumerate(children) if each.type == "then")
    stop = next(
        (
            index
            for index, each in enumerate(children)
            if each.type in {"elif_clause", "else_clause", "fi"}
        ),
        len(children),
    )
    clauses.append((children[1:at], children[at + 1 : stop]))
    for each in children[stop:]:
        if each.type == "elif_clause":
            then = next(i for i, inner in enumerate(each.children) if inner.type == "then")
            clauses.append((each.children[1:then], each.children[then + 1 :]))
        elif each.type == "else_clause":
            otherwise = each.children[1:]
    return _choose(shell, clauses, otherwise)


def _choose(shell: Interpreter, clauses: Sequence[tuple[Block, Block]], otherwise: Block) -> Status:
    if not clauses:
        return run_all(shell, otherwise)
    (condition, body), *rest = clauses
    status = run_all(shell, condition)
    if isinstance(status, bool):
        return run_all(shell, body) if status else _choose(shell, rest, otherwise)
    cause = shell.decision(status)
    fork(
        shell,
        cause,
        [lambda: _ignore(run_all(shell, body)), lambda: _ignore(_choose(shell, rest, otherwise))],
    )
    return status


def _ignore(status: Status) -> None:
    del status


def _case(shell: Interpreter, node: "Node") -> Status:
    value = node.child_by_field_name("value")
    assert value is not None
    text = single(shell, value).text
    items = [each for each in node.children if each.type == "case_item"]
    mark = MARKS.search(text.characters)
    if mark is not None:
        branches = [_branch(shell, _body(each)) for each in items]
        if not any(_patterns(shell, each)[-1:] == ["*"] for each in items):
            branches.append(lambda: None)
        fork(shell, shell.decision(mark[0]), branches)
        return mark[0]
    for each in items:
        for pattern in _patterns(shell, each):
            unknown = MARKS.search(pattern)
            if unknown is not None:
                raise shell.unknowns.refusal(shell.place(each), shell.decision(unknown[0]).message)
            pieces = pieces_of(pattern)
            shell.spend(shell.place(each), steps=1 + len(text.characters) * len(pieces) // 100)
            if is_match(text.characters, pieces):
                if any(end.type in {";&", ";;&"} for end in each.children):
                    raise shell.unknowns.refusal(shell.place(each), "`;&` is not read")
                return run_all(shell, _body(each))
    return True


def _branch(shell: Interpreter, body: Block) -> Callable[[], None]:
    return lambda: _ignore(run_all(shell, body))


def _patterns(shell: Interpreter, item: "Node") -> list[str]:
    end = next(each for each in item.children if each.type == ")")
    nodes = [each for each in item.children if each.start_byte < end.start_byte]
    found, start = [], nodes[0].end_byte if nodes[0].type == "(" else item.start_byte
    for stop in [*(each.start_byte for each in nodes if each.type == "|"), end.start_byte]:
        text = shell.frame.source.part(start, stop).characters
        blank = len(text) - len(text.lstrip())
        width = len(text.strip().encode())
        parts = fragments(shell, item, start + blank, start + blank + width, "word")
        found.append(field_of(parts).pattern)
        start = stop + 1
    return found


def _body(item: "Node") -> Block:
    at = next(index for index, each in enumerate(item.children) if each.type == ")")
    return [each for each in item.children[at + 1 :] if each.type not in {";;", ";&", ";;&"}]


def _function(shell: Interpreter, node: "Node") -> Status:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    assert name is not None
    assert body is not None
    text = shell.frame.source.part(name.start_byte, name.end_byte).characters
    shell.state.functions[text] = Function(body, shell.frame.source)
    return True


def _compound(shell: Interpreter, node: "Node") -> Status:
    if node.children[0].type != "((":
        return run_all(shell, node.children)
    value = number(shell, node, node.start_byte + 2, node.end_byte - 2)
    return value if isinstance(value, str) else value != 0


def _negated(shell: Interpreter, node: "Node") -> Status:
    return negated(run_statement(shell, node.children[-1]))


def _assignment(shell: Interpreter, node: "Node") -> Status:
    assign(shell, node)
    return True


def _assignments(shell: Interpreter, node: "Node") -> Status:
    for each in node.named_children:
        assign(shell, each)
    return True


def _body_of_loop(node: "Node") -> Block:
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
    _rejoin(shell, {"continue"})
    return goes_on


def _rejoin(shell: Interpreter, kinds: set[str]) -> None:
    """Merge the states of branches that left early, of which it is not known whether they ran."""
    kept = [each for each in shell.frame.left if each[0] not in kinds]
    for kind, state, cause in shell.frame.left:
        if kind in kinds:
            shell.merge(state, cause)
    shell.frame.left[:] = kept


def _for(shell: Interpreter, node: "Node") -> Status:
    if node.children[0].type == "select":
        raise shell.unknowns.refusal(shell.place(node), "`select` is not read")
    name_node = node.child_by_field_name("variable")
    assert name_node is not None
    name = shell.frame.source.part(name_node.start_byte, name_node.end_byte).characters
    values = [
        each
        for each in node.children
        if each.is_named and name_node.end_byte <= each.start_byte and each.type != "do_group"
    ]
    if any(each.type == "in" for each in node.children):
        words = [each.text for each in fields(shell, node, values)]
    else:
        words = list(shell.state.arguments)
    body, place = _body_of_loop(node), shell.place(node)
    for word in words:
        shell.spend(place)
        shell.assign(name, word, place)
        first = shell.unknowns.first(word.characters)
        if first is None:
            if not _round(shell, body):
                break
        else:
            _uncertain_rounds(shell, first, body)
    _rejoin(shell, {"break"})
    return True


def _uncertain_rounds(
    shell: Interpreter, cause: Unknown, body: Block, check: Callable[[], object] = lambda: None
) -> None:
    """Run a loop of which it is not known how often it runs, until nothing changes."""
    for _ in range(10):
        before = shell.state.copy()

        def once() -> None:
            _round(shell, body)
            check()

        fork(shell, cause, [once, lambda: None])
        if shell.state.same(before):
            return
    raise shell.unknowns.refusal(0, f"a loop does not settle: {cause.message}")


def _while(shell: Interpreter, node: "Node") -> Status:
    is_until = node.children[0].type == "until"
    body, place = _body_of_loop(node), shell.place(node)
    end = next(i for i, each in enumerate(node.children) if each.type == "do_group")
    condition = node.children[1:end]

    def holds() -> Status:
        status = run_all(shell, condition)
        return negated(status) if is_until else status

    return _loop(shell, holds, lambda: None, body, place)


def _loop(
    shell: Interpreter,
    holds: Callable[[], Status],
    update: Callable[[], object],
    body: Block,
    place: int,
) -> Status:
    for _ in range(MOST_ROUNDS):
        status = holds()
        if isinstance(status, str):
            _uncertain_rounds(shell, shell.decision(status), body, update)
            break
        before = shell.state.copy()
        shell.spend(place, steps=1 + len(before.variables) // 20)
        if not status or not _round(shell, body):
            break
        update()
        if shell.state.same(before):
            break  # it goes on so for ever
    else:
        raise shell.unknowns.refusal(place, f"a loop runs over {MOST_ROUNDS:,} times")
    _rejoin(shell, {"break"})
    return True


def _counting_for(shell: Interpreter, node: "Node") -> Status:
    opening = next(each for each in node.children if each.type == "((")
    closing = next(each for each in node.children if each.type == "))")
    borders = [
        each.start_byte
        for each in node.children
        if each.type == ";" and each.start_byte < closing.start_byte
    ]
    starts = [opening.end_byte, *(each + 1 for each in borders)]
    spans = list(zip(starts, [*borders, closing.start_byte], strict=True))
    if len(spans) != 3:
        raise shell.unknowns.refusal(shell.place(node), "this loop is not read")
    number(shell, node, *spans[0])

    def holds() -> Status:
        text = shell.frame.source.part(*spans[1]).characters
        value = number(shell, node, *spans[1]) if text.strip() else 1
        return value if isinstance(value, str) else value != 0

    body, place = _body_of_loop(node), shell.place(node)
    return _loop(shell, holds, lambda: number(shell, node, *spans[2]), body, place)


STATEMENTS: Mapping[str, Callable[[Interpreter, "Node"], Status]] = {
    "program": _program,
    "list": _list,
    "pipeline": _pipeline,
    "command": run_command,
    "redirected_statement": run_command,
    "declaration_command": run_declaration,
    "unset_command": run_command,
    "variable_assignment": _assignment,
    "variable_assignments": _assignments,
    "if_statement": _if,
    "case_statement": _case,
    "for_statement": _for,
    "c_style_for_statement": _counting_for,
    "while_statement": _while,
    "function_definition": _function,
    "compound_statement": _compound,
    "subshell": _subshell,
    "negated_command": _negated,
    "test_command": tested,
}
