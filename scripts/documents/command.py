"""``scripts/refresh``: rewrite what the pages show of the program, or say what would change."""

import argparse
import difflib
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import documents
from documents.pages import ROOT, DocumentError, Kind, Region, page_names, read_page, regions_of
from documents.pictures import draw, look_alike
from documents.registry import MAKERS, SLOW, Place, maker
from documents.terminal import PROGRAM, terminal

USER_MISTAKE, WOULD_CHANGE = 2, 1


@dataclass(slots=True)
class Outcome:
    """What became of the pages of a run.

    Args:
        texts: Pages whose text changed, by name.
        pictures: Pictures that changed, where they were drawn, by where they belong.
    """

    texts: dict[str, str] = field(default_factory=dict)
    pictures: dict[Path, Path] = field(default_factory=dict)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: The words after ``scripts/refresh``.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stderr)
    try:
        names = _chosen_pages(options.files)
        if options.list:
            return _list(names)
        outcome = Outcome()
        for name in names:
            with_slow = bool(options.slow or options.files)
            _refresh(name, outcome, with_slow=with_slow, writes=not options.check)
    except DocumentError as error:
        sys.stderr.write(f"error: {error}\n")
        return USER_MISTAKE
    if not options.check:
        return 0
    sys.stdout.writelines(_differences(outcome))
    return WOULD_CHANGE if outcome.texts or outcome.pictures else 0


def remade(page_name: str, page: str, region: Region) -> str:
    """Return the text of a region of *page*, made anew; of a picture there is none."""
    if region.kind is Kind.MADE:
        return maker(region.name)(Place(page=page, text=region.text))
    return terminal(page_name).output(PROGRAM + region.name)


def in_order(regions: Sequence[Region]) -> list[Region]:
    """Return regions as they are made: sessions as typed, then the others as registered."""
    known = list(MAKERS)

    def place(region: Region) -> int:
        if region.kind is not Kind.MADE:
            return -1
        maker(region.name)
        return known.index(region.name)

    return sorted(regions, key=place)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/refresh",
        description=documents.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="pages [all, without slow regions]"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is stale")
    parser.add_argument("--list", action="store_true", help="name every region and make none")
    parser.add_argument("--slow", action="store_true", help="make slow regions of all pages, too")
    return parser


def _chosen_pages(files: Sequence[str]) -> tuple[str, ...]:
    known = page_names()
    chosen = []
    for file in files:
        path = Path(file).resolve()
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else file
        if name not in known:
            near = difflib.get_close_matches(name, known, cutoff=0.3) or known
            raise DocumentError(f"unknown page {file!r}; nearest: {', '.join(near)}")
        chosen.append(name)
    return tuple(chosen) or known


def _list(names: Sequence[str]) -> int:
    for name in names:
        sys.stdout.write(f"{name}\n")
        for region in regions_of(read_page(name)):
            slow = SLOW.get(region.name) if region.kind is Kind.MADE else None
            sys.stdout.write(f"  {region.label}{f' (slow: {slow})' if slow else ''}\n")
    return 0


def _refresh(name: str, outcome: Outcome, *, with_slow: bool, writes: bool) -> None:
    """Make the regions of a page; a page is written after each, so that a stopped run keeps it."""
    before = page = read_page(name)
    for label in [region.label for region in in_order(regions_of(page))]:
        (region,) = (each for each in regions_of(page) if each.label == label)
        if region.kind is Kind.MADE and region.name in SLOW and not with_slow:
            _tell(name, region, f"skipped, slow: {SLOW[region.name]}")
        elif region.kind is Kind.PICTURE:
            changed = _picture(name, region, outcome, writes=writes)
            _tell(name, region, "changed" if changed else "same")
        else:
            text = remade(name, page, region)
            _tell(name, region, "same" if text == region.text else "changed")
            page = region.replaced(page, text)
            if writes and text != region.text:
                (ROOT / name).write_text(page, encoding="utf-8", newline="\n")
    if page != before:
        outcome.texts[name] = page


def _picture(name: str, region: Region, outcome: Outcome, *, writes: bool) -> bool:
    """Draw a picture; write it if it looks different, and return whether it does."""
    path, drawn = (ROOT / name).parent / region.name, draw(name, region.name)
    if look_alike(path, drawn):
        return False
    outcome.pictures[path] = drawn
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(drawn, path)
    return True


def _tell(name: str, region: Region, what: str) -> None:
    sys.stderr.write(f"{name}: {region.label[:70]}: {what}\n")
    sys.stderr.flush()


def _differences(outcome: Outcome) -> Iterator[str]:
    for name, page in outcome.texts.items():
        old, new = (text.splitlines(keepends=True) for text in (read_page(name), page))
        yield from difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    for path in outcome.pictures:
        yield f"{path.relative_to(ROOT)} looks different\n"
