"""Expansion of words: quotes, variables, arithmetic, and what a command between ``$(`` prints."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshwright.hwprofiles import shown
from meshwright.planner.shell.interpreter import Flow, Interpreter
from meshwright.planner.shell.parameters import PARAMETER, Parameter, calculated, operated
from meshwright.planner.shell.words import (
    FILE_STRIDE,
    MARKS,
    WHITE,
    Field,
    Fragment,
    Kind,
    Text,
    Unknowns,
    field_of,
    joined,
    split,
    written,
)
from meshwright.simulator import PlanError

if TYPE_CHECKING:
    from tree_sitter import Node

SPECIAL = frozenset(
    {
        "string",
        "raw_string",
        "ansi_c_string",
        "translated_string",
        "simple_expansion",
        "expansion",
        "command_substitution",
        "arithmetic_expansion",
        "process_substitution",
    }
)
DOLLAR = r"|\$([A-Za-z_][A-Za-z_0-9]*|[0-9@*#?!$-])"
ESCAPES = {
    "word": r"\\(\n|.)" + DOLLAR,
    "default": r"\\(\n|.)" + DOLLAR,
    "double": r'\\([\n$`"\\])' + DOLLAR,
    "here": r"\\([\n$`\\])" + DOLLAR,
    "raw": r"\\(\n)" + DOLLAR,
}
BRACES = re.compile(r"(?:|.*[^$])\{([^{}\s]*,[^{}\s]*|\w+\.\.[^{}\s]+)\}.*")
PLACEHOLDER = re.compile(r"(?<!<)<\w[^<>]*>")  # VOCAB=<Specify path>
BAD = re.compile("[\0\ud800-\udfff\U000f0000-\U000ffffd]")
MOST_BYTES = 250_000


def text_of_file(characters: str, number: int) -> Text:
    """Return the text of a file, the *number*-th that is read, with the line of each character.

    Raises:
        PlanError: If it has characters that no script has.
    """
    if BAD.search(characters):
        raise PlanError("the script has characters that no text has")
    characters = characters.replace("\r\n", "\n")
    places: list[int] = []
    for line, each in enumerate(characters.split("\n"), 1):
        places.extend([number * FILE_STRIDE + line] * (len(each) + 1))
    return Text(characters, tuple(places[:-1]))


def parse(source: Text, unknowns: Unknowns) -> "Node":
    """Return the tree of a script; a byte in it is a character of the script.

    Raises:
        PlanError: If a part of it is not bash, or not the bash that the grammar knows.
    """
    import tree_sitter_bash  # noqa: PLC0415 - only import needs it
    from tree_sitter import Language, Parser  # noqa: PLC0415

    if len(source.characters) > MOST_BYTES:
        raise unknowns.refusal(source.place, f"a script has at most {MOST_BYTES:,} characters")
    parser = Parser(Language(tree_sitter_bash.language()))
    # One byte a character, so that offsets in the tree are those in the text.
    data = bytes(re.sub(r"[^\0-\x7f]", ".", source.characters), "ascii")
    root = parser.parse(data).root_node
    if root.has_error:
        # The grammar has no continuation before an empty line; bash ends the command there.
        again = parser.parse(re.sub(rb"\\(?=\n[ \t]*(\n|$))", b" ", data)).root_node
        root = root if again.has_error else again
    if root.has_error:
        at = _first_error(root).start_byte
        place = source.places[min(at, len(source.places) - 1)] if source.places else 0
        line = source.characters[data.rfind(b"\n", 0, at) + 1 :].partition("\n")[0]
        text = MARKS.sub("$...", line).strip()
        gap = PLACEHOLDER.search(text)
        if gap is not None:
            raise unknowns.refusal(place, f"{shown(gap[0])} is to be filled in")
        raise unknowns.refusal(place, f"this is not read as bash: {shown(text)}")
    return root


def _first_error(node: "Node") -> "Node":
    while not (node.is_error or node.is_missing):
        inner = next((each for each in node.children if each.has_error or each.is_missing), None)
        if inner is None:
            return node
        node = inner
    # What lacks its end, most often; the error begins before it.
    opening = {"if", "for", "while", "until", "case", "{", "(", "((", "$(", "${", "`", '"'}
    return next((each for each in node.children if each.type in opening), node)


def specials(node: "Node", start: int, stop: int) -> list["Node"]:
    """Return the parts of a range that are expanded or quoted, the outermost of each."""
    nodes: list[Node] = []
    children = node.children
    first = bisect_right(children, start, key=lambda each: each.end_byte)
    last = bisect_left(children, stop, key=lambda each: each.start_byte)
    for each in children[first:last]:
        if each.type in SPECIAL and each.start_byte >= start and each.end_byte <= stop:
            nodes.append(each)
        else:
            nodes += specials(each, start, stop)
    return nodes


def fragments(shell: Interpreter, node: "Node", start: int, stop: int, mode: str) -> list[Fragment]:
    """Return the parts of the word from *start* to *stop* within a node, expanded.

    The mode is ``word``; ``double`` between quotes; ``here`` in a here-document; ``raw`` in
    arithmetic; ``default`` in ``${X:-...}`` that is not quoted.
    """
    parts: list[Fragment] = []
    at = start
    for each in specials(node, start, stop):
        literal = shell.frame.source.part(at, _begin(shell, each))
        bare = literal.characters.rstrip("\\")
        if mode == "here" and (len(literal.characters) - len(bare)) % 2:
            continue  # the grammar expands what a backslash keeps
        if each.type == "string" and literal.characters.endswith("$"):
            literal = literal.part(0, len(literal.characters) - 1)
        parts += _literal(shell, literal, mode)
        parts += _expanded(shell, each, is_quoted=mode in {"double", "here"})
        at = each.end_byte
    parts += _literal(shell, shell.frame.source.part(at, stop), mode)
    count = sum(len(each.text.characters) for each in parts)
    shell.spend(shell.place_at(start), characters=count)
    return parts


def _literal(shell: Interpreter, text: Text, mode: str) -> list[Fragment]:
    """Return the parts of what is neither quoted nor an expansion, by the grammar.

    The grammar takes the second ``$`` of ``$A/$B/c`` for a character: it is expanded here.
    """
    bare = {"word": Kind.LITERAL, "raw": Kind.LITERAL, "default": Kind.SPLIT}.get(mode, Kind.QUOTED)
    parts: list[Fragment] = []
    at = 0
    for each in re.finditer(ESCAPES[mode], text.characters):
        parts.append(Fragment(text.part(at, each.start()), bare))
        if each[2]:
            kind = Kind.QUOTED if bare is Kind.QUOTED else Kind.SPLIT
            parts += operated(shell, Parameter(each[2]), "", list, text.places[each.start()], kind)
        elif each[1] != "\n":
            parts.append(Fragment(text.part(*each.span(1)), Kind.QUOTED))
        at = each.end()
    parts.append(Fragment(text.part(at, len(text.characters)), bare))
    return [each for each in parts if each.text.characters or each.begins]


def _begin(shell: Interpreter, node: "Node") -> int:
    """Return the start of an expansion: the grammar counts spaces before it as part of it."""
    if node.children and not node.children[0].is_named:
        return node.children[0].end_byte - len(node.children[0].type)
    return node.end_byte - len(shell.text(node).lstrip())


def _expanded(shell: Interpreter, node: "Node", *, is_quoted: bool) -> list[Fragment]:
    kind, start = Kind.QUOTED if is_quoted else Kind.SPLIT, _begin(shell, node)
    text = shell.frame.source.part(start, node.end_byte)
    characters, place = text.characters, shell.place_at(start)
    if node.type == "string":
        return _quoted(shell, node)
    if node.type == "expansion":
        return _expansion(shell, node, kind)
    if node.type == "simple_expansion":
        return operated(shell, Parameter(characters[1:]), "", list, place, kind)
    if node.type == "raw_string":
        return [Fragment(text.part(1, len(characters) - 1), Kind.QUOTED)]
    if node.type == "command_substitution":
        text = substitution(shell, node)
    elif node.type == "arithmetic_expansion":
        width = 2 if characters.startswith("$((") else 1  # `$[1 + 1]` is the old form
        value = number(shell, node, start + 1 + width, node.end_byte - width)
        text = written(str(value), place)
    else:
        text = shell.unread(place, characters)
    return [Fragment(text, kind)]


def _quoted(shell: Interpreter, node: "Node") -> list[Fragment]:
    parts = fragments(shell, node, _begin(shell, node) + 1, node.end_byte - 1, "double")
    if parts or specials(node, node.start_byte, node.end_byte):
        return parts  # of "$@" without arguments no word is left
    return [Fragment(Text(), Kind.QUOTED)]


def _expansion(shell: Interpreter, node: "Node", kind: Kind) -> list[Fragment]:
    """Return the value of ``${...}``; ``${!X}``, ``${X:1:2}``, ``${X/a/b}`` are not read."""
    start, stop = _begin(shell, node) + 2, node.end_byte - 1
    place, characters = shell.place_at(start), shell.frame.source.characters
    inner = characters[start:stop]
    if re.fullmatch(r"[#@*?$!-]", inner):
        return operated(shell, Parameter(inner), "", list, place, kind)
    match = PARAMETER.match(characters, start, stop)
    if match is None:
        unread = shell.unread(place, f"${{{inner}}}", is_open=True)
        return [Fragment(unread, Kind.SPLIT if "@" in inner else kind)]  # or several words
    index: int | str = 0
    if match["index"] in {"@", "*"}:
        index = match["index"]
    elif match["index"] is not None:
        index = number(shell, node, *match.span("index"))
    parameter = Parameter(match["name"], index, bool(match["length"]))
    operator = match["operator"]

    def word() -> list[Fragment]:
        mode = "double" if kind is Kind.QUOTED else "default"
        mode = "word" if operator[:1] in {"#", "%"} else mode
        return fragments(shell, node, match.end(), stop, mode)

    return operated(shell, parameter, operator, word, place, kind)


def number(shell: Interpreter, node: "Node", start: int, stop: int) -> int | str:
    """Return the value of an expression in a range, or the mark of what it depends on."""
    text = field_of(fragments(shell, node, start, stop, "raw")).text
    return calculated(shell, text.characters, shell.place_at(start))


def word_groups(shell: Interpreter, nodes: Sequence["Node"]) -> list[list["Node"]]:
    """Return the parts of each word: those without a space between them."""
    groups: list[list[Node]] = []
    for each in nodes:
        before = groups[-1][-1].end_byte if groups else each.start_byte
        gap = shell.frame.source.characters[before : each.start_byte].replace("\\\n", "")
        if groups and not gap:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def fields(shell: Interpreter, parent: "Node", nodes: Sequence["Node"]) -> list[Field]:
    """Return the words that the parts of a command stand for, expanded and split.

    Lists in braces are not read: of ``a{b,c}`` the words are not known.
    """
    words: list[Field] = []
    for group in word_groups(shell, nodes):
        start, stop = group[0].start_byte, group[-1].end_byte
        parts = fragments(shell, parent, start, stop, "word")
        shell.spend(shell.place(group[0]), steps=len(parts) // 2)
        bare = ((e.text.characters if e.kind is Kind.LITERAL else "_") for e in parts)
        # Braces make several words of one before anything else is expanded.
        if BRACES.fullmatch("".join(bare)):
            text = shell.frame.source.characters[start:stop]
            parts = [Fragment(shell.unread(shell.place(group[0]), text, is_open=True), Kind.SPLIT)]
        words += divided(shell, parts)
    return words


def divided(shell: Interpreter, parts: list[Fragment]) -> list[Field]:
    """Return the words that the parts of one make, where ``IFS`` is the usual one."""
    separators = shell.state.variables.get("IFS")
    # Scripts set IFS for one `read`; splitting by another is not evaluated.
    if separators is not None and joined(separators.texts).characters != WHITE:
        place = next((each.text.place for each in parts if each.kind is Kind.SPLIT), None)
        if place is not None:
            raise shell.refusal(place, "words that are split by another IFS are not read")
    return split(parts)


def single(shell: Interpreter, node: "Node") -> Field:
    """Return a word that is not split: a value, a pattern, the side of a comparison."""
    if node.type in SPECIAL:
        return field_of(_expanded(shell, node, is_quoted=False))
    return field_of(fragments(shell, node, node.start_byte, node.end_byte, "word"))


def substitution(shell: Interpreter, node: "Node") -> Text:
    """Return the output of commands, where they are such as ``echo`` and ``dirname``."""
    place, text = shell.place(node), shell.text(node).lstrip()
    not_run = shell.unread(place, text, "is not executed here")
    if text.startswith("`") and "\\" in text:
        return not_run  # within back quotes a backslash has another meaning
    outer_state, outer_output, outer_commands = shell.state, shell.output, shell.commands
    # A substitution is a subshell: its changes to variables are lost.
    shell.state, shell.output, shell.commands = shell.state.copy(), [], []
    is_known = text.startswith(("`", "$("))
    try:
        for each in node.named_children:
            if each.type != "comment":
                shell.run(shell, each)
    except Flow as flow:
        is_known = flow.kind == "exit"
    printed, ran = shell.output, shell.commands
    shell.state, shell.output, shell.commands = outer_state, outer_output, outer_commands
    if ran or not is_known:
        return not_run
    whole = shell.join(printed or [Text()], place)
    return whole.part(0, len(whole.characters.rstrip("\n")))
