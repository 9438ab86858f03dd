"""The pictures below docs/images: which command draws each, and whether two look alike."""

import shlex
from functools import cache
from pathlib import Path

import matplotlib as mpl
import numpy as np
from PIL import Image

from documents.makers.gallery import sections
from documents.numbers import digest_in, save_with_numbers
from documents.pages import DocumentError, commands_of, read_page
from documents.terminal import out_folder, pictures_with_numbers, run, scratch_folder, terminal
from meshwright import simulate
from meshwright.planner.plots import plot_timeline
from meshwright.validate.cli import plan_of_options

MATMUL = "matmul 4x5 5x8 --devices 2 --precision fp32"  # as docs/placements.md names it
GALLERY = "docs/gallery.md"
DRAWING = "meshwright search ", "meshwright sweep "
# An edge that crosses a pixel covers whole 256ths of it (Agg): what a processor rounds otherwise
# moves an edge by one of them, in one direction or both, so a pixel by a level or two of 255. 31 of
# 900,000 pixels did so from one processor to another. What is drawn differs by more than a hundred
# levels from its paper, the palest by 19, and fills more pixels.
FEW_LEVELS = 3
FEW_PIXELS_FRACTION = 1e-3


def draw(page_name: str, target: str) -> Path:
    """Return a picture of a page, drawn anew.

    Args:
        page_name: The page.
        target: What the page links to; the name of the file says what it shows.

    Raises:
        DocumentError: If no command draws it.
    """
    name = Path(target).name
    if page_name == GALLERY:
        return _left_by_out(name) or _timeline(target)
    if name == "matmul.png":
        return _matmul() / name
    for command in commands_of(read_page(page_name)):
        if command.startswith(DRAWING) and (out := out_folder(command)):
            shell = terminal(page_name)
            shell.output(command)
            return shell.folder / out / name
    raise DocumentError(f"{page_name}: no command draws {target}")


def look_alike(first: Path, second: Path) -> bool:
    """Return whether two pictures show the same, whatever the bytes of their files.

    Their numbers are the same, their pixels but for what a processor rounds.
    """
    if not (first.is_file() and second.is_file()):
        return False
    return digest_in(first) == digest_in(second) and have_close_pixels(first, second)


def have_close_pixels(first: Path, second: Path) -> bool:
    """Return whether pixels of two pictures differ by no more than `FEW_LEVELS`, and few do."""
    with Image.open(first) as left, Image.open(second) as right:
        one, other = (np.asarray(each.convert("RGB"), dtype=np.int16) for each in (left, right))
    if one.shape != other.shape:
        return False
    levels = np.abs(one - other).max(axis=2)
    return bool(levels.max() <= FEW_LEVELS and np.mean(levels > 0) <= FEW_PIXELS_FRACTION)


def drawn_with() -> str:
    """Return what a difference may come from besides the numbers."""
    return f"matplotlib {mpl.__version__}, FreeType {mpl.ft2font.__freetype_version__}"


_scratch = cache(scratch_folder)


@cache
def _matmul() -> Path:
    with pictures_with_numbers():
        run([*MATMUL.split(), "--out", "matmul"], _scratch())
    return _scratch() / "matmul"


def _left_by_out(name: str) -> Path | None:
    """Return a picture of the gallery, FOLDER-NAME.png, that a command with --out FOLDER leaves."""
    for command in commands_of(read_page(GALLERY)):
        out = out_folder(command)
        if out and name.startswith(f"{out}-"):
            shell = terminal(GALLERY)
            shell.output(command)
            return shell.folder / out / name.removeprefix(f"{out}-")
    return None


def _timeline(target: str) -> Path:
    """Draw the timeline of a strategy alone: ``--out`` draws three pictures, at thrice the time."""
    for section in sections(read_page(GALLERY)):
        if section.picture == target:
            words = shlex.split(section.command)[1:]
            at = words.index("--cluster")
            options = shlex.join([*words[:at], *words[at + 2 :]])
            saved = plan_of_options(options, words[at + 1])
            step = simulate(saved.job, saved.plan, saved.cluster, saved.stack)
            path = _scratch() / Path(target).name
            save_with_numbers(plot_timeline(step), path)
            return path
    raise DocumentError(f"{GALLERY}: no command draws {target}")
