"""Bounded, strict reading of files that users and other programs wrote; errors are one line.

A file is read only if it is a regular one of a plausible size. JSON and TOML with a key
that stands twice, a number of too many digits or one that is not finite are refused here, so
that no later code has to check for them.
"""

import csv
import gzip
import io
import json
import re
import stat
import tomllib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from meshwright.hwprofiles.complaints import ProfileError, shown, shown_path

Items = list[tuple[str, object]]
GZIP_MAGIC = b"\x1f\x8b"
MOST_DIGITS = 30
# Traces compress to a tenth or a thirtieth; a ratio of a thousand is a decompression bomb.
MOST_UNPACKED, UNPACKED_AT_ONCE = 300, 10_000_000
MOST_DEPTH = 50  # of tables in tables; Python's own limit is near a thousand
# Time to parse a dotted key grows with the cube of its dots: a line of a million takes hours.
_DEEP_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){50}""")


class Line(NamedTuple):
    """A row of a CSV table: its line number in the file, and its cells by column."""

    number: int
    cells: dict[str, str]


class FileKind(NamedTuple):
    """A kind of file and its limits.

    Args:
        title: Its name in messages, such as "plan file".
        most_bytes: Largest size that is read, after decompression.
        error: Exception that is raised.
        is_packed: Whether it may be gzipped.
        is_exact: Whether its JSON may hold no key twice and no number that is not finite.
    """

    title: str
    most_bytes: int
    error: type[ValueError] = ProfileError
    is_packed: bool = False
    is_exact: bool = True

    def read_text(self, path: Path) -> str:
        """Return the text of the file, without its byte order mark.

        Raises:
            ValueError: As `error`, naming the file, if it is none of this kind.
        """
        return self.decoded(self._content(path), shown_path(path))

    def read_json(self, path: Path) -> object:
        """Return the document of a JSON file; raises as `read_text`."""
        return self.parse_json(self.read_text(path), shown_path(path))

    def parse_json(
        self, text: str, file: str, table: Callable[[Items], object] | None = None
    ) -> object:
        """Return the document of a JSON text of *file*; raises as `read_text`.

        Args:
            text: The JSON text.
            file: Name of its file, for errors.
            table: Hook that builds an object of its pairs, and then decides on repeated names.
        """
        try:
            if not self.is_exact:
                return json.loads(text)
            document = json.loads(text, object_pairs_hook=table or _unique)
            mistake = _mistaken_number(document)
        except json.JSONDecodeError as error:
            place = f"line {error.lineno} column {error.colno}"
            raise self.error(f"{file}: not valid JSON: {error.msg} ({place})") from None
        except RecursionError:
            raise self.error(f"{file}: not valid JSON: nested too deeply") from None
        except ValueError as error:
            raise self.error(f"{file}: not valid JSON: {_short_limit(error)}") from None
        if mistake is not None:
            raise self.error(f"{file}: {mistake}")
        return document

    def read_toml(self, path: Path) -> dict[str, object]:
        """Return the document of a TOML file; raises as `read_text`."""
        return self.parse_toml(self._content(path), shown_path(path))

    def parse_toml(self, content: bytes, file: str) -> dict[str, object]:
        """Return the document of a TOML text of *file*; raises as `read_text`."""
        document = self.load_toml(self.decoded(content, file), file)
        try:
            mistake = _mistaken_number(document)
        except RecursionError:
            raise self.error(f"{file}: not valid TOML: nested too deeply") from None
        if mistake is not None:
            raise self.error(f"{file}: {mistake}")
        return document

    def load_toml(self, text: str, file: str) -> dict[str, object]:
        """Return the document of a TOML text, its numbers unchecked; raises as `read_text`."""
        try:
            is_deep = any(line.count(".") >= MOST_DEPTH for line in text.split("\n"))
            if is_deep and _DEEP_KEY.search(text):
                raise RecursionError
            return tomllib.loads(text)
        except RecursionError:
            raise self.error(f"{file}: not valid TOML: nested too deeply") from None
        except ValueError as error:
            raise self.error(f"{file}: not valid TOML: {_short_limit(error)}") from None

    def parse_table(self, text: str, file: str) -> tuple[Sequence[str], Iterator[Line]]:
        """Return the columns of a CSV text of *file* and its lines; raises as `read_text`."""
        reader = csv.DictReader(text.splitlines(), strict=True)
        try:
            return reader.fieldnames or (), self._lines(reader, file)
        except csv.Error as error:
            raise self.error(f"{file}: line {reader.line_num}: {error}") from None

    def _lines(self, reader: "csv.DictReader[str]", file: str) -> Iterator[Line]:
        try:
            for cells in reader:
                if None in cells or None in cells.values():  # too many cells, or too few
                    count = len(reader.fieldnames or ())
                    raise self.error(f"{file}: line {reader.line_num}: allowed: {count} cells")
                yield Line(reader.line_num, cells)
        except csv.Error as error:
            raise self.error(f"{file}: line {reader.line_num}: {error}") from None

    def _content(self, path: Path) -> bytes:
        file = shown_path(path)
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a FIFO or a device may never end
                raise self.error(f"{file}: cannot be read: no regular file; allowed: {self._a}")
            with path.open("rb") as stream:
                content = stream.read(self.most_bytes + 1)  # one more: too large
            if self.is_packed and content.startswith(GZIP_MAGIC):
                content = self._unpacked(content, file)
        except FileNotFoundError:
            raise self.error(f"{file}: no such file; allowed: {self._a}") from None
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise self.error(f"{file}: not a whole gzip file; allowed: {self._a}") from None
        except OSError as error:
            raise self.error(f"{file}: cannot be read: {error.strerror}") from None
        except self.error:
            raise
        except ValueError as error:  # a null character in the path
            raise self.error(f"{file}: cannot be read: {error}") from None
        return content

    def _unpacked(self, packed: bytes, file: str) -> bytes:
        """Return the decompressed content, cut off one chunk beyond `most_bytes`."""
        parts, size = [], 0
        stream = io.BytesIO(packed)
        with gzip.open(stream) as unpacked:
            while size <= self.most_bytes and (part := unpacked.read(UNPACKED_AT_ONCE)):
                parts.append(part)
                size += len(part)
                if size > max(UNPACKED_AT_ONCE // 2, MOST_UNPACKED * stream.tell()):
                    limit = f"{MOST_UNPACKED} times its size"
                    raise self.error(f"{file}: unpacks to more than {limit}; allowed: {self._a}")
        return b"".join(parts)

    def decoded(self, content: bytes, file: str) -> str:
        """Return *content* of a *file* decoded from UTF-8; raises as `read_text`."""
        if len(content) > self.most_bytes:
            limit = f"at most {self.most_bytes:,} bytes"
            raise self.error(f"{file}: too large for {self._a}; allowed: {limit}")
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise self.error(f"{file}: line {line}: not UTF-8; allowed: {self._a}") from None

    @property
    def _a(self) -> str:
        return f"a {self.title}"


def _unique(pairs: Items) -> dict[str, object]:
    document = dict(pairs)
    # json keeps the last of equal keys, and says nothing.
    if len(document) < len(pairs):
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(repeated)} appears twice")
    return document


def _short_limit(error: ValueError) -> str:
    """Return the message of *error*; Python's on its limit of digits is replaced by ours."""
    words = " ".join(str(error).split())
    is_limit = "integer string conversion" in words
    return f"a number of too many digits; allowed: {MOST_DIGITS}" if is_limit else words


def _mistaken_number(document: object) -> str | None:
    """Return the error of the first wrong number of *document*, with its key, or None.

    Raises:
        RecursionError: If tables are nested too deeply.
    """
    remaining = [("", document)]
    # Level by level, so that the loop itself bounds the depth.
    for _ in range(MOST_DEPTH):
        inner: list[tuple[str, object]] = []
        for key, value in remaining:
            if isinstance(value, float) and not isfinite(value):
                return f"{key}: {value} is not allowed; it must be a finite number"
            if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
                return f"{key}: {shown(value)} is too long; allowed: at most {MOST_DIGITS} digits"
            if isinstance(value, dict):
                inner += [(f"{key}.{name}".lstrip("."), each) for name, each in value.items()]
            elif isinstance(value, list):
                inner += [(key, each) for each in value]
        if not inner:
            return None
        remaining = inner
    raise RecursionError
