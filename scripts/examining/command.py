"""The command line of scripts/examples, and the tables that it prints."""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from examining.bash import give_away
from examining.corpus import (
    Collection,
    NoCorpusError,
    filled_in,
    laid_out,
    read_table,
    repositories_of,
)
from examining.imports import Answers
from examining.judgement import Judgement, judged

MISUSE = 2
WIDTH = 60


def read_words(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the script."""
    parser = argparse.ArgumentParser(
        prog="scripts/examples",
        description="Import the frameworks' own examples, and judge each plan by another reader.",
        epilog="Exit status: 1 if a plan says other than its file, 2 if there is nothing to try.",
    )
    parser.add_argument(
        "--repository",
        metavar="NAME=PATH",
        action="append",
        default=[],
        help="a git repository, bare or not, or a folder with the same files; repeatable",
    )
    parser.add_argument("--only", metavar="WORD", default="", help="files with it in their name")
    parser.add_argument("--cluster", default="dgx-h100", help="[dgx-h100]")
    parser.add_argument(
        "--leave-out",
        action="store_true",
        help="try scripts again without the options that are refused (--without)",
    )
    parser.add_argument("--whole", action="store_true", help="show refusals whole")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Judge what there is, print it, and return the exit status."""
    options = read_words(words)
    try:
        return run(options)
    except NoCorpusError as error:
        sys.stderr.write(f"error: {error}\n")
        return MISUSE


def run(options: argparse.Namespace) -> int:
    """Judge what there is, print it, and return the exit status.

    Raises:
        NoCorpusError: If there is nothing to try.
    """
    where = repositories_of(options.repository)
    collections, answers = read_table()
    totals: list[tuple[Collection, str, Counter[str]]] = []
    for each in collections:
        if each.repository in where:
            commit, found = tried(each, where[each.repository], options, answers)
            show(each, found, whole=options.whole)
            totals.append((each, commit, Counter(judgement.outcome for judgement in found)))
    if not totals:
        raise NoCorpusError("--repository is missing; one of NAME=PATH")
    summary(totals)
    return int(any(counts["wrong"] for _, _, counts in totals))


def tried(
    collection: Collection, repository: Path, options: argparse.Namespace, answers: Answers
) -> tuple[str, list[Judgement]]:
    """Judge the files of a collection, and return their commit beside it."""
    with tempfile.TemporaryDirectory(prefix="examples-") as scratch:
        folders = (Path(scratch) / "read", Path(scratch) / "run")
        for folder in folders:
            folder.mkdir()
            commit = laid_out(repository, collection, folder)
            filled_in(folder, is_run=folder.name == "run")
        Path(scratch).chmod(0o755)
        give_away(folders[1])
        given = {"cluster": options.cluster, **collection.given}
        found = [
            judged(name, folders, given, answers, leaves_out=options.leave_out)
            for name in collection.names(folders[0])
            if options.only in name
        ]
    return commit, found


def show(collection: Collection, found: Sequence[Judgement], *, whole: bool) -> None:
    """Print what came of each file."""
    sys.stdout.write(f"\n{collection.title}\n")
    for each in found:
        why = each.why if whole or each.outcome == "wrong" else each.why[:WIDTH]
        sys.stdout.write(f"  {each.outcome:8}{each.name}: {why}\n".rstrip(": \n") + "\n")


def summary(totals: Sequence[tuple[Collection, str, Counter[str]]]) -> None:
    """Print the table of docs/import.md."""
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    sys.stdout.write(f"\n{today}\n\n| files of | commit | files | right | refused | wrong |\n")
    sys.stdout.write("|---|---|---:|---:|---:|---:|\n")
    for each, commit, counts in totals:
        numbers = (counts.total(), counts["right"], counts["refused"], counts["wrong"])
        cells = " | ".join([each.title, commit, *map(str, numbers)])
        sys.stdout.write(f"| {cells} |\n")
