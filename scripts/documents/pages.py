"""Pages and their regions: what a page shows of the program, found and replaced as text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
MARKED = re.compile(r"<!-- made by: (?P<name>.*?) -->(?P<text>.*?)<!-- end -->", re.DOTALL)
MARKS = re.compile(r"<!-- (?:made by: .*?|end) -->")
PICTURE = re.compile(r"!\[[^\]]*\]\((?P<target>[^)\s]+\.png)\)")
PROMPT = "$ meshwright "


class DocumentError(ValueError):
    """A page, a region or a command that cannot be made as it is written."""


class Kind(StrEnum):
    """What makes a region."""

    SESSION = "session"
    MADE = "made"
    PICTURE = "picture"


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A part of a page that the program makes.

    Args:
        kind: What makes it.
        name: Of a session its words after ``meshwright``, of a made region its function, of a
            picture its path beside the page.
        text: What stands there; of a picture nothing.
        start: Where the text begins on the page.
    """

    kind: Kind
    name: str
    text: str
    start: int

    @property
    def label(self) -> str:
        """Kind and name."""
        return f"{self.kind} {self.name}"

    def replaced(self, page: str, text: str) -> str:
        """Return *page*, on which this region was found, with *text* in its place."""
        return page[: self.start] + text + page[self.start + len(self.text) :]


def page_names() -> tuple[str, ...]:
    """Return the pages, relative to the root of the repository."""
    return ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


def read_page(name: str) -> str:
    """Return the text of a page."""
    return (ROOT / name).read_text(encoding="utf-8")


def regions_of(page: str) -> tuple[Region, ...]:
    """Return the regions of a page in their order.

    Raises:
        DocumentError: If a mark has no partner, or two regions of a page have one name.

    >>> page = "It takes <!-- made by: days -->34 days<!-- end -->."
    >>> [(each.label, each.text) for each in regions_of(page)]
    [('made days', '34 days')]
    """
    found = [*_sessions(page), *_marked(page), *_pictures(page)]
    labels = [region.label for region in found]
    for label in labels:
        if labels.count(label) > 1:
            raise DocumentError(f"{label!r} stands more than once on a page")
    return tuple(sorted(found, key=lambda region: region.start))


def fences(page: str, language: str = "") -> Iterator[str]:
    """Yield what stands in the fenced blocks of a language."""
    for match in FENCE.finditer(page):
        if match["language"] == language:
            yield match["body"]


def commands_of(page: str) -> tuple[str, ...]:
    """Return every line of a page that is typed: sessions, and lines of blocks without output.

    >>> commands_of(chr(10).join(["```", "$ meshwright models", "gpt2", "```"]))
    ('meshwright models',)
    """
    blocks = (block.splitlines() for block in fences(page))
    typed = (block[:1] if block[0].startswith(PROMPT) else block for block in blocks if block)
    return tuple(line.removeprefix("$ ") for lines in typed for line in lines)


def _sessions(page: str) -> Iterator[Region]:
    for match in FENCE.finditer(page):
        first, _, output = match["body"].partition("\n")
        if not match["language"] and first.startswith(PROMPT):
            start = match.start("body") + len(first) + 1
            name = first.removeprefix(PROMPT)
            yield Region(kind=Kind.SESSION, name=name, text=output, start=start)


def _marked(page: str) -> Iterator[Region]:
    matches = list(MARKED.finditer(page))
    marks = [match.group() for match in MARKS.finditer(page)]
    if len(marks) != 2 * len(matches) or any(MARKS.search(match["text"]) for match in matches):
        raise DocumentError(f"marks do not pair up: {', '.join(marks)}")
    for match in matches:
        is_inline = not match["text"].startswith("\n")
        line = page[page.rfind("\n", 0, match.start()) + 1 : match.start()]
        if is_inline and not line.strip():
            # Markdown would take the whole line as HTML.
            raise DocumentError(f"{match['name']!r}: a line of text must not begin with a mark")
        start = match.start("text")
        yield Region(kind=Kind.MADE, name=match["name"], text=match["text"], start=start)


def _pictures(page: str) -> Iterator[Region]:
    for match in PICTURE.finditer(page):
        start = match.end("target")
        yield Region(kind=Kind.PICTURE, name=match["target"], text="", start=start)
