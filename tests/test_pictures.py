"""Pictures of the pages: what a processor rounds is passed over, what they show is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from PIL import Image

from documents.numbers import digest_in, digest_of, save_with_numbers
from documents.pages import ROOT
from documents.pictures import have_close_pixels, look_alike
from meshwright.planner.plots import canvas

SHOWN = sorted((ROOT / "docs/images").rglob("*.png"))
MEMORY_TIME = ROOT / "docs/images/memory_time.png"
POINTS = ((40.0, 1.20), (52.0, 1.05), (70.0, 0.91))
ONE_PIXEL_GIB = 0.045  # of 40 GiB on about 1000 pixels


def draw(
    path: Path,
    *,
    points: tuple[tuple[float, float], ...] = POINTS,
    limit_gib: float | None = 80.0,
    note: str = "best: tp8 pp2 dp4, 0.91 s",
) -> Path:
    """Draw what the pages' pictures are made of: points, a pale thin line and small letters."""
    figure = canvas.new_figure()
    axes = figure.add_subplot(xlim=(38, 82), ylim=(0.8, 1.3))
    axes.scatter(*zip(*points, strict=True), s=14, c=canvas.BLUE)
    if limit_gib:
        axes.axvline(limit_gib, color=canvas.LIGHT_GREY, linewidth=0.5)
    axes.annotate(note, (0.1, 0.1), xycoords="axes fraction", fontsize=canvas.SMALL_POINTS)
    save_with_numbers(figure, path)
    return path


def rounded_otherwise(path: Path, *, num_pixels: int, levels: int) -> Path:
    """Save the picture of the pages with pixels at edges a little lighter or darker."""
    random = np.random.default_rng(1)
    with Image.open(MEMORY_TIME) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.int16).copy()
    is_edge = np.abs(np.diff(pixels.sum(axis=2), axis=1, prepend=0)) > 0
    chosen = random.permutation(np.argwhere(is_edge))[:num_pixels]
    by = random.choice((-levels, levels), (num_pixels, 1))
    pixels[chosen[:, 0], chosen[:, 1]] += by.astype(np.int16)
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path)
    return path


@pytest.mark.parametrize(("num_pixels", "levels"), [(31, 1), (300, 2)])
def test_what_a_processor_rounds_is_passed_over(
    num_pixels: int, levels: int, tmp_path: Path
) -> None:
    other = rounded_otherwise(tmp_path / "a.png", num_pixels=num_pixels, levels=levels)
    assert have_close_pixels(MEMORY_TIME, other)


@pytest.mark.parametrize(("num_pixels", "levels"), [(1, 8), (9_000, 1)])
def test_more_levels_or_more_pixels_are_not(num_pixels: int, levels: int, tmp_path: Path) -> None:
    other = rounded_otherwise(tmp_path / "a.png", num_pixels=num_pixels, levels=levels)
    assert not have_close_pixels(MEMORY_TIME, other)


@pytest.mark.parametrize(
    "change",
    [
        {"points": ((40.0 + ONE_PIXEL_GIB, 1.20), *POINTS[1:])},
        {"points": POINTS[:2]},
        {"limit_gib": None},
        {"limit_gib": 80.0 + 2 * ONE_PIXEL_GIB},
        {"note": "best: tp8 pp2 dp4, 0.97 s"},
        {"note": "best: tp8 pp2 dp4, 0.91 s."},
    ],
    ids=["moved point", "missing point", "missing line", "moved line", "digit", "full stop"],
)
def test_another_picture_differs_in_its_pixels_alone(
    change: dict[str, Any], tmp_path: Path
) -> None:
    first, other = draw(tmp_path / "a.png"), draw(tmp_path / "b.png", **change)
    assert look_alike(first, draw(tmp_path / "c.png"))
    assert not look_alike(first, tmp_path / "none.png")
    assert not have_close_pixels(first, other)


def test_numbers_are_compared_to_digits_that_no_pixel_shows(tmp_path: Path) -> None:
    first = draw(tmp_path / "a.png")
    (x, y), *others = POINTS
    nearby = draw(tmp_path / "b.png", points=((x, y * (1 + 1e-6)), *others))
    assert have_close_pixels(first, nearby)
    assert not look_alike(first, nearby)
    last_bit = draw(tmp_path / "c.png", points=((x, np.nextafter(y, 2.0)), *others))
    assert look_alike(first, last_bit)


def square(size: float) -> PolyCollection:
    return PolyCollection([[(0, 0), (size, 0), (size, size)]])


@pytest.mark.parametrize(
    "drawn",
    [
        lambda axes, value: axes.plot([0, 1], [1, value]),
        lambda axes, value: axes.scatter([0, 1], [1, value]),
        lambda axes, value: axes.bar([0, 1], [1, value]),
        lambda axes, value: axes.barh([0, 1], [1, 2], left=[0, value]),
        lambda axes, value: axes.imshow([[0, 1], [1, value]]),
        lambda axes, value: axes.imshow([[0, 1]], extent=(0, 1, 0, value)),
        lambda axes, value: axes.pcolormesh([0, 1], [0, value], [[1]]),
        lambda axes, value: axes.pcolormesh([0, 1], [0, 1], np.ma.masked_equal([[value]], 0)),
        lambda axes, value: axes.add_collection(square(value), autolim=False),
        lambda axes, value: axes.annotate("best", (value, 0), (0, 0), arrowprops={}),
        lambda axes, value: axes.text(value, 0, "best"),
        lambda axes, value: axes.text(0, 0, f"{value:g} s"),
        lambda axes, value: axes.set_xticks([0, 1], ["0", f"{value:g}"]),
        lambda axes, value: axes.set_xlim(0, value),
        lambda axes, value: axes.legend(axes.plot([0], [0]), [f"{value:g} GiB"]),
    ],
)
def test_every_kind_of_shape_and_text_is_in_the_digest(
    drawn: Callable[[Axes, float], object], tmp_path: Path
) -> None:
    digests = []
    for value in (0.5, 0.5, 0.5001):
        figure = canvas.new_figure()
        drawn(figure.add_subplot(), value)
        canvas.save_figure(figure, tmp_path / "a.png")
        digests.append(digest_of(figure))
    assert digests[0] == digests[1] != digests[2]


def test_the_pictures_of_the_pages_carry_their_numbers() -> None:
    assert SHOWN
    assert [path.name for path in SHOWN if not digest_in(path)] == []
