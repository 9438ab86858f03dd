"""Quantities with units, and the fields of profiles that hold them.

Unit prefixes are defined only here. A file names a field without its unit and gives a
text with one (``memory_capacity = "80 GiB"``); Python names the unit and gives a number
(``memory_capacity_bytes=...``).

Inside the code everything is in seconds, bytes, FLOPs and their rates. Rates and FLOPs are decimal,
as vendors and nccl-tests print them; binary prefixes are for memory capacity.
"""
# ruff: noqa: PLC0415 (pydantic checks a user's files alone)

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Final

from meshwright.hwprofiles.complaints import (
    LINE_RULE,
    TEXT_RULE,
    ProfileError,
    has_controls,
    shown,
    suggestion,
)
from meshwright.records import (
    AfterValidator,
    Declaration,
    Field,
    Record,
    WrapValidator,
    model_validator,
)

if TYPE_CHECKING:
    from pydantic import ValidationInfo, ValidatorFunctionWrapHandler

FROM_FILE: Final = {"from_file": True}  # the validation context of data read from a file

KILO: Final = 1e3
MEGA: Final = 1e6
GIGA: Final = 1e9
TERA: Final = 1e12
KIBI: Final = 2**10
MEBI: Final = 2**20
GIBI: Final = 2**30
PS_PER_S: Final = 10**12

# Digits are bounded so that no text takes long to parse.
_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)(?P<number>[0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,3})?)"
    r"\s*(?P<unit>[A-Za-z][A-Za-z/-]*)?(?:\s+(?P<direction>per direction|bidirectional))?",
    re.ASCII,
)
_LARGEST = Decimal("1e30")

_BYTE_UNITS: Final = {
    "B": Decimal(1),
    "kB": Decimal("1e3"),
    "MB": Decimal("1e6"),
    "GB": Decimal("1e9"),
    "TB": Decimal("1e12"),
    "KiB": Decimal(2**10),
    "MiB": Decimal(2**20),
    "GiB": Decimal(2**30),
    "TiB": Decimal(2**40),
}
_BANDWIDTH_UNITS: Final = {
    "B/s": Decimal(1),
    "kB/s": Decimal("1e3"),
    "MB/s": Decimal("1e6"),
    "GB/s": Decimal("1e9"),
    "TB/s": Decimal("1e12"),
    "Mb/s": Decimal("1e6") / 8,  # bits
    "Gb/s": Decimal("1e9") / 8,
    "Tb/s": Decimal("1e12") / 8,
}
_TIME_UNITS: Final = {
    "s": Decimal(1),
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
    "ns": Decimal("1e-9"),
    "ps": Decimal("1e-12"),
}
_FLOPS_UNITS: Final = {
    "FLOP/s": Decimal(1),
    "MFLOP/s": Decimal("1e6"),
    "GFLOP/s": Decimal("1e9"),
    "TFLOP/s": Decimal("1e12"),
    "PFLOP/s": Decimal("1e15"),
}
_PRICE_UNITS: Final = {"USD/GPU-hour": Decimal(1)}
_DIRECTIONS: Final = "'per direction' or 'bidirectional'"


def parse_bytes(text: str) -> int:
    """Return a size in bytes, rounded to whole bytes.

    Raises:
        ProfileError: If *text* is not a size, or is negative.

    >>> parse_bytes("80 GiB"), parse_bytes("40 GB")
    (85899345920, 40000000000)
    """
    return round(_parse(text, _BYTE_UNITS))


def parse_bandwidth(text: str, *, directed: bool | None = None) -> float:
    """Return a bandwidth in bytes per second, of one direction where *text* names directions.

    ``GB/s`` is 1e9 bytes, ``Gb/s`` is 1e9 bits. A ``bidirectional`` figure is halved.

    Args:
        text: For example ``"300 GB/s per direction"``.
        directed: True demands the words ``per direction`` or ``bidirectional``; False refuses them.

    Raises:
        ProfileError: If *text* is not a bandwidth, is negative, or breaks *directed*.

    >>> parse_bandwidth("600 GB/s bidirectional"), parse_bandwidth("200 Gb/s per direction")
    (300000000000.0, 25000000000.0)
    """
    value = _parse(text, _BANDWIDTH_UNITS, allow_direction=directed is not False)
    is_directed = text.rstrip().endswith(("per direction", "bidirectional"))
    if directed and not is_directed:
        raise ProfileError(f"{shown(text)} does not say its direction; allowed: add {_DIRECTIONS}")
    # Vendors quote NVLink as the sum of both directions; a ring uses each one by itself.
    return float(value / 2 if text.rstrip().endswith("bidirectional") else value)


def parse_time(text: str) -> float:
    """Return a time in seconds.

    Raises:
        ProfileError: If *text* is not a time, or is negative.

    >>> parse_time("5 us")
    5e-06
    """
    return float(_parse(text, _TIME_UNITS))


def parse_flops_per_s(text: str) -> float:
    """Return a rate in FLOPs per second; one multiply-add counts 2.

    Raises:
        ProfileError: If *text* is not such a rate, or is negative.

    >>> parse_flops_per_s("312 TFLOP/s")
    312000000000000.0
    """
    return float(_parse(text, _FLOPS_UNITS))


def parse_price(text: str) -> float:
    """Return a price in US dollars per GPU and hour.

    Raises:
        ProfileError: If *text* is not a price, or is negative.

    >>> parse_price("2.5 USD/GPU-hour")
    2.5
    """
    return float(_parse(text, _PRICE_UNITS))


def format_bytes(size_bytes: float) -> str:
    """Return a size with a binary unit of at most GiB, four significant digits.

    >>> format_bytes(80 * GIBI), format_bytes(1536)
    ('80 GiB', '1.5 KiB')
    """
    return _format(size_bytes, {"GiB": GIBI, "MiB": MEBI, "KiB": KIBI, "B": 1})


def format_bandwidth(bandwidth_bytes_per_s: float) -> str:
    """Return a bandwidth with a decimal unit, four significant digits.

    >>> format_bandwidth(2.039e12), format_bandwidth(25e9)
    ('2.039 TB/s', '25 GB/s')
    """
    units = {"TB/s": TERA, "GB/s": GIGA, "MB/s": MEGA, "kB/s": KILO, "B/s": 1}
    return _format(bandwidth_bytes_per_s, units)


def format_time(time_s: float) -> str:
    """Return a time with the largest unit that keeps it at least 1, four significant digits.

    >>> format_time(16.06), format_time(18e-6)
    ('16.06 s', '18 us')
    """
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "ps": 1e-12}
    return _format(time_s, units)


def format_flops_per_s(flops_per_s: float) -> str:
    """Return a rate of FLOPs with a decimal unit of at most TFLOP/s, four significant digits.

    >>> format_flops_per_s(312e12)
    '312 TFLOP/s'
    """
    units = {"TFLOP/s": TERA, "GFLOP/s": GIGA, "MFLOP/s": MEGA, "FLOP/s": 1}
    return _format(flops_per_s, units)


def to_ps(time_s: float) -> int:
    """Return a time as whole picoseconds, halves rounded to even.

    >>> to_ps(5e-6), to_ps(0.5e-12), to_ps(1.5e-12)
    (5000000, 0, 2)
    """
    return round(time_s * PS_PER_S)


def _parse(text: str, units: Mapping[str, Decimal], *, allow_direction: bool = False) -> Decimal:
    allowed = f"allowed: a number and one of {', '.join(units)}"
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ProfileError(f"{shown(text)} is not a number with a unit; {allowed}")
    unit = match["unit"]
    if unit is None:
        raise ProfileError(f"{shown(text)} has no unit; {allowed}")
    if unit not in units:
        raise ProfileError(f"{shown(text)} has the wrong unit {shown(unit)}; {allowed}")
    if match["direction"] and not allow_direction:
        raise ProfileError(f"{shown(text)} names a direction, which has no meaning here; {allowed}")
    # Decimal, as 2.039 * 1e12 of floats is not 2.039e12.
    value = Decimal(match["number"]) * units[unit]
    if match["sign"] == "-" and value:
        raise ProfileError(f"{shown(text)} is negative; allowed: 0 or more")
    if value > _LARGEST:
        raise ProfileError(f"{shown(text)} is out of range; allowed: up to {_LARGEST} base units")
    return value


def _format(value: float, units: Mapping[str, float]) -> str:
    smallest = list(units)[-1]
    unit = next((unit for unit, scale in units.items() if abs(value) >= scale), smallest)
    scaled = value / units[unit]
    # ".4g" would write 10,000 GiB with an exponent.
    return f"{scaled:.0f} {unit}" if abs(scaled) >= 1000 else f"{scaled:.4g} {unit}"


class Profile(Record, populate_by_name=True, allow_inf_nan=False):
    """A frozen record that knows which keys its file may have."""

    def __repr__(self) -> str:
        """Return type and name, or all fields of a profile that has no name."""
        name = getattr(self, "name", None)
        return super().__repr__() if name is None else f"{type(self).__name__}({name!r})"

    @classmethod
    def file_keys(cls) -> tuple[str, ...]:
        """Return the keys a file may have.

        >>> class Size(Profile):
        ...     size_bytes: ByteCount = Field(alias="size")
        >>> Size.file_keys()
        ('size',)
        """
        return tuple(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="wrap")
    @classmethod
    def _check_keys(
        cls, data: object, check: "ValidatorFunctionWrapHandler", info: "ValidationInfo"
    ) -> object:
        if info.context is FROM_FILE and isinstance(data, Mapping):
            keys = cls.file_keys()
            for key in data:
                if key not in keys:
                    from pydantic_core import PydanticCustomError

                    word = key if isinstance(key, str) else ascii(key)
                    hint = suggestion(word, keys)
                    raise PydanticCustomError("unknown_key", "{hint}", {"key": word, "hint": hint})
        return check(data)


def _quantity(parse: Callable[[str], float], example: str) -> Declaration:
    def read(value: object, check: "ValidatorFunctionWrapHandler", info: "ValidationInfo") -> Any:  # noqa: ANN401
        from pydantic import ValidationError

        # Numbers from Python are in base units already.
        if info.context is not FROM_FILE:
            return check(value)
        if not isinstance(value, str):
            raise ProfileError(
                f"{shown(value)} has no unit; allowed: a text with a unit such as {example!r}"
            )
        parsed = parse(value)
        try:
            return check(parsed)
        except ValidationError:  # units refuse all that is negative or too large: this is zero
            raise ProfileError(f"{shown(value)} is not allowed; it must be more than 0") from None

    return WrapValidator(read, parse=parse)


def _undirected(text: str) -> float:
    return parse_bandwidth(text, directed=False)


def _directed(text: str) -> float:
    return parse_bandwidth(text, directed=True)


def _text(value: str) -> str:
    if has_controls(value):
        raise ProfileError(f"{shown(value)} is not allowed; it must {TEXT_RULE}")
    return value


def _line(value: str) -> str:
    if not value.isprintable():
        raise ProfileError(f"{shown(value)} is not allowed; it must {LINE_RULE}")
    return value


Text = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(_text)]
Title = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(_line)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
# Of a framework, and after an @ its release.
StackName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$")]
OptionalStackName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._@-]{0,99})?$")]
OptionalName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,99})?$")]
Flag = Annotated[bool, Field(strict=True)]
# A field with another limit needs a type of its own: pydantic keeps only one limit of each kind.
Count = Annotated[int, Field(strict=True, ge=1, le=10**12)]
CountPerNode = Annotated[int, Field(strict=True, ge=1, le=10**5)]
GroupSize = Annotated[int, Field(strict=True, ge=2, le=10**9)]
Size = Annotated[int, Field(strict=True, ge=0, le=10**6)]
Ratio = Annotated[float, Field(strict=True, ge=0, le=10**6)]
PositiveRatio = Annotated[float, Field(strict=True, gt=0, le=10**6)]
RatioFromOne = Annotated[float, Field(strict=True, ge=1, le=10**6)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
PositiveFraction = Annotated[float, Field(strict=True, gt=0, le=1)]
ByteCount = Annotated[int, Field(strict=True, ge=1), _quantity(parse_bytes, "80 GiB")]
MemoryBandwidth = Annotated[float, Field(strict=True, gt=0), _quantity(_undirected, "2 TB/s")]
LinkBandwidth = Annotated[
    float, Field(strict=True, gt=0), _quantity(_directed, "25 GB/s per direction")
]
Latency = Annotated[float, Field(strict=True, ge=0), _quantity(parse_time, "5 us")]
FlopsRate = Annotated[float, Field(strict=True, gt=0), _quantity(parse_flops_per_s, "312 TFLOP/s")]
Price = Annotated[float, Field(strict=True, ge=0), _quantity(parse_price, "2.5 USD/GPU-hour")]
