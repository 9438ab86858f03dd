"""The numbers that a picture shows, kept in its file: pixels are compared with a tolerance."""

import struct
import zlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

if TYPE_CHECKING:  # most commands of pages draw nothing
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

KEY = "numbers"  # of the text chunk of a PNG file
HEADER_BYTES = 33  # signature and IHDR, after which chunks of text may stand
# Of the largest number of an artist. A float64 has 15, of which a sum by other instructions may
# change the last ones; a picture of 1200 pixels shows 4.
DIGITS = 9
# What artists of matplotlib are drawn from; each has some of them.
NUMBERS = (
    *("get_xydata", "get_offsets", "get_coordinates", "get_array", "get_extent", "get_paths"),
    *("get_unitless_position", "xy", "get_width", "get_height", "get_xlim", "get_ylim"),
)


def digest_of(figure: "Figure") -> str:
    """Return a digest of all texts and numbers from which a drawn *figure* is made."""
    digest = sha256()
    for artist in figure.findobj():
        digest.update(f"{type(artist).__name__}\n".encode())
        if hasattr(artist, "get_text"):
            digest.update(f"{artist.get_text()}\n".encode())
        for values in _numbers_of(artist):
            digest.update(rounded(values).tobytes())
    return digest.hexdigest()


def rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return *values* as whole numbers of the last of `DIGITS` digits of the largest.

    >>> rounded(np.array([1.0, 1 / 3, 1e-17])).tolist()
    [100000000.0, 33333333.0, 0.0]
    """
    finite = np.abs(values[np.isfinite(values)])
    # Four digits of the largest say where the point stands: 10 less a rounding error is 10, too.
    exponent = int(f"{finite.max(initial=0.0):.3e}".partition("e")[2])
    scaled = np.rint(values * 10.0 ** (DIGITS - 1 - exponent)) + 0.0  # -0.0 becomes 0.0
    scaled[np.isnan(scaled)] = np.nan  # of one sign
    return scaled


def save_with_numbers(figure: "Figure", path: Path) -> None:
    """Write *figure* as PNG with the digest of its numbers in a chunk of text."""
    from meshwright.planner.plots.canvas import save_figure  # noqa: PLC0415 - imports matplotlib

    save_figure(figure, path)
    text = b"tEXt" + f"{KEY}\0{digest_of(figure)}".encode("latin-1")
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    picture = path.read_bytes()
    path.write_bytes(picture[:HEADER_BYTES] + chunk + picture[HEADER_BYTES:])


def digest_in(path: Path) -> str:
    """Return the digest in the file of a picture; empty if it has none."""
    with Image.open(path) as image:
        return str(image.info.get(KEY, ""))


def _numbers_of(artist: "Artist") -> Iterator[NDArray[np.float64]]:
    """Yield what an artist is drawn from, without what is there in other words."""
    for name in NUMBERS:
        if name == "get_paths" and hasattr(artist, "get_coordinates"):
            continue  # a path for each cell of a mesh
        found = getattr(artist, name, None)
        values = found() if callable(found) else found
        if name == "get_paths" and values is not None:
            values = [path.vertices for path in values]
            values = np.concatenate(values) if values else None
        if values is not None:
            yield np.atleast_1d(np.ma.filled(np.ma.asarray(values, dtype=np.float64), np.nan))
