"""Which files are tried: those of a repository, or of a folder, that match the names of a table."""

import io
import re
import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from examining.imports import Answers

LOG = re.compile(r"(?:&>>?|2>&1 *\| *tee(?: -a)?) *[^\s\"]+")
BLANK = re.compile(r"(?<=[=\"])<[A-Za-z][^<>\n]*>")
TABLE = Path(__file__).with_name("corpus.toml")


class NoCorpusError(Exception):
    """A repository is not where it was said to be."""


class Collection(NamedTuple):
    """Files of one repository that are of one kind."""

    title: str
    repository: str
    files: tuple[str, ...]
    beside: tuple[str, ...] = ()  # what they read
    apart: tuple[str, ...] = ()  # what is not tried
    revision: str = "HEAD"
    given: Mapping[str, str] = MappingProxyType({})  # options of the import, whatever a file says

    def names(self, folder: Path) -> Iterator[str]:
        """Yield the names of its files in a folder, in order."""
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and _is_one(name, self.files) and not _is_one(name, self.apart):
                yield name


def read_table() -> tuple[list[Collection], Answers]:
    """Return the collections, and what a person answers."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    made = [
        Collection(**{k: tuple(v) if isinstance(v, list) else v for k, v in each.items()})
        for each in table["collections"]
    ]
    return made, Answers(table["answers"], table["variables"], table["models"])


def laid_out(repository: Path, collection: Collection, target: Path) -> str:
    """Copy the files of a collection to *target*, and return the commit that they are of.

    Raises:
        NoCorpusError: If there is no such revision, or none of the files.
    """
    patterns = (*collection.files, *collection.beside)
    if (repository / "HEAD").is_file() or (repository / ".git").exists():
        commit = _git(repository, "rev-parse", "--short=12", collection.revision + "^{commit}")
        present = _git(repository, "ls-tree", "-r", "--name-only", collection.revision).decode()
        names = [each for each in present.splitlines() if _is_one(each, patterns)]
        packed = _git(repository, "archive", collection.revision, "--", *names)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(target, filter="data")
        return commit.decode().strip()
    for path in repository.rglob("*"):
        name = path.relative_to(repository).as_posix()
        if path.is_file() and _is_one(name, patterns):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / name)
    return "of a folder"


def filled_in(folder: Path, *, is_run: bool) -> None:
    """Write a word where a script has a blank that its user must fill: ``DATA=<path to data>``.

    Of scripts that are run here what is said goes to no file: its folder may be of other machines.
    """
    for path in folder.rglob("*.sh"):
        text = BLANK.sub("given", path.read_text(encoding="utf-8", errors="surrogateescape"))
        text = LOG.sub("", text) if is_run else text
        path.write_text(text, encoding="utf-8", errors="surrogateescape")


def _is_one(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, each) for each in patterns)


def _git(repository: Path, *words: str) -> bytes:
    done = subprocess.run(  # noqa: S603  (git, with names from our own table)
        ["git", "-C", str(repository), *words],  # noqa: S607
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise NoCorpusError(f"{repository}: {done.stderr.decode().strip().splitlines()[0]}")
    return done.stdout


def repositories_of(words: list[str]) -> Mapping[str, Path]:
    """Return where repositories are, of words NAME=PATH.

    Raises:
        NoCorpusError: If one is not so, or unknown.
    """
    known = {each.repository for each in read_table()[0]}
    found: dict[str, Path] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or name not in known:
            names = ", ".join(sorted(known))
            raise NoCorpusError(f"--repository {word} is no NAME=PATH; names: {names}")
        found[name] = Path(path)
    return found
