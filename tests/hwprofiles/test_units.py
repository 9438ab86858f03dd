"""Quantities with units: exact in, short out, and nothing guessed."""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hwprofiles import (
    GIBI,
    ProfileError,
    format_bandwidth,
    format_bytes,
    format_flops_per_s,
    format_time,
    parse_bandwidth,
    parse_bytes,
    parse_flops_per_s,
    parse_price,
    parse_time,
    to_ps,
)

DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
BYTES = {f"{prefix}B": scale for prefix, scale in (DECIMAL | BINARY).items()}
BANDWIDTHS = {f"{prefix}B/s": Fraction(scale) for prefix, scale in DECIMAL.items()}
BANDWIDTHS |= {f"{prefix}b/s": Fraction(DECIMAL[prefix], 8) for prefix in "MGT"}
TIMES = {unit: Fraction(1, 1000**n) for n, unit in enumerate(("s", "ms", "us", "ns", "ps"))}
RATES = {f"{prefix}FLOP/s": 1000**n for prefix, n in zip("MGTP", (2, 3, 4, 5), strict=True)}
RATES["FLOP/s"] = 1
PARSERS: dict[str, tuple[Callable[[str], float], set[str]]] = {
    "bytes": (parse_bytes, set(BYTES)),
    "bandwidth": (parse_bandwidth, set(BANDWIDTHS)),
    "time": (parse_time, set(TIMES)),
    "flops": (parse_flops_per_s, set(RATES)),
    "price": (parse_price, {"USD/GPU-hour"}),
}
ALL_UNITS = set().union(*(units for _, units in PARSERS.values()))
decimals = st.decimals(min_value=0, max_value=10**6, places=4, allow_nan=False)


@given(number=st.integers(0, 10**6), unit=st.sampled_from(sorted(BYTES)))
def test_sizes_are_exact(number: int, unit: str) -> None:
    assert parse_bytes(f"{number} {unit}") == number * BYTES[unit]


@given(number=decimals, unit=st.sampled_from(sorted(BANDWIDTHS)))
def test_bandwidths_are_the_nearest_float(number: float, unit: str) -> None:
    expected = Fraction(number) * BANDWIDTHS[unit]
    assert parse_bandwidth(f"{number:f} {unit}") == float(expected)
    assert parse_bandwidth(f"{number:f} {unit} per direction") == float(expected)
    assert parse_bandwidth(f"{number:f} {unit} bidirectional") == float(expected / 2)


@given(number=decimals, unit=st.sampled_from(sorted(TIMES)))
def test_times_are_the_nearest_float(number: float, unit: str) -> None:
    assert parse_time(f"{number:f}{unit}") == float(Fraction(number) * TIMES[unit])


@given(number=decimals, unit=st.sampled_from(sorted(RATES)))
def test_rates_are_the_nearest_float(number: float, unit: str) -> None:
    assert parse_flops_per_s(f"  {number:f}  {unit} ") == float(Fraction(number) * RATES[unit])


@given(size=st.integers(0, 2**50))
def test_a_formatted_size_reads_back_within_its_four_digits(size: int) -> None:
    # Half of the fourth digit is up to 5e-4, and reading rounds to whole bytes on top.
    assert abs(parse_bytes(format_bytes(size)) - size) <= 5e-4 * size + 0.5


# From 1e-9 up: below the smallest unit the four digits are those of scientific notation, also read.
@given(value=st.floats(1e-9, 1e18))
def test_formatted_rates_and_times_read_back_within_their_four_digits(value: float) -> None:
    assert parse_bandwidth(format_bandwidth(value)) == pytest.approx(value, rel=6e-4)
    assert parse_flops_per_s(format_flops_per_s(value)) == pytest.approx(value, rel=6e-4)
    assert parse_time(format_time(value)) == pytest.approx(value, rel=6e-4)


@pytest.mark.parametrize("kind", sorted(PARSERS))
@given(data=st.data(), number=st.integers(0, 1000))
def test_a_unit_of_another_quantity_is_refused(kind: str, data: st.DataObject, number: int) -> None:
    parse, units = PARSERS[kind]
    unit = data.draw(st.sampled_from(sorted(ALL_UNITS - units)))
    with pytest.raises(ProfileError, match=r"wrong unit .* allowed: a number and one of"):
        parse(f"{number} {unit}")
    with pytest.raises(ProfileError, match="has no unit"):
        parse(str(number))


@pytest.mark.parametrize("kind", sorted(PARSERS))
@given(number=st.integers(1, 1000))
def test_a_negative_quantity_is_refused(kind: str, number: int) -> None:
    parse, units = PARSERS[kind]
    with pytest.raises(ProfileError, match="is negative; allowed: 0 or more"):
        parse(f"-{number} {min(units)}")


@pytest.mark.parametrize("kind", sorted(PARSERS))
@given(text=st.text(max_size=40))
def test_any_text_gives_a_finite_number_or_one_line(kind: str, text: str) -> None:
    parse, _ = PARSERS[kind]
    try:
        value = parse(text)
    except ProfileError as error:
        message = str(error)
    else:
        message = "none"
        assert math.isfinite(value)
        assert value >= 0
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1e999 GB/s", "out of range"),
        ("1e9999 GB/s", "not a number with a unit"),
        ("9" * 5000 + " GB/s", "not a number with a unit"),
        ("nan GB/s", "not a number with a unit"),
        ("5 GB/s each way", "not a number with a unit"),
        ("5 gb/s", "wrong unit 'gb/s'"),
        ("", "not a number with a unit"),
        ("\u0665 GB/s", "not a number with a unit"),
        ("5\n\nGB", "wrong unit 'GB'"),
    ],
)
def test_odd_bandwidths_are_refused(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as caught:
        parse_bandwidth(text)
    assert len(str(caught.value).splitlines()) == 1


def test_a_direction_can_be_demanded_or_refused() -> None:
    assert parse_bandwidth("600 GB/s bidirectional", directed=True) == 300e9
    with pytest.raises(ProfileError, match="does not say its direction"):
        parse_bandwidth("600 GB/s", directed=True)
    with pytest.raises(ProfileError, match="names a direction"):
        parse_bandwidth("2 TB/s bidirectional", directed=False)
    with pytest.raises(ProfileError, match="names a direction"):
        parse_time("2 s per direction")


def test_no_rounding_hides_in_the_usual_figures() -> None:
    assert parse_bytes("80 GiB") == 80 * GIBI
    assert parse_bandwidth("2.039 TB/s") == 2.039e12
    assert parse_bandwidth("200 Gb/s per direction") == 25e9
    assert parse_time("24 us") == 24e-6
    assert parse_price("2.5 USD/GPU-hour") == 2.5


@given(time_ps=st.integers(0, 10**14))
def test_picoseconds_survive_a_trip_through_seconds(time_ps: int) -> None:
    assert to_ps(time_ps / 10**12) == time_ps  # up to 100 s a double has the digits


def test_half_picoseconds_round_to_even() -> None:
    assert [to_ps(n * 0.5e-12) for n in (1, 3, 5, 7)] == [0, 2, 2, 4]


def test_large_numbers_print_without_an_exponent() -> None:
    assert format_bytes(2**50) == "1048576 GiB"
    assert format_time(123456.0) == "123456 s"
    assert format_bytes(0) == "0 B"
