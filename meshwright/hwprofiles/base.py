"""How a profile record reads its fields, from a file or from Python.

A file names a field without its unit and gives a text with one (``memory_capacity = "80 GiB"``);
Python names the unit and gives a number (``memory_capacity_bytes=...``).
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from meshwright.hwprofiles.complaints import (
    LINE_RULE,
    TEXT_RULE,
    ProfileError,
    has_controls,
    shown,
    suggestion,
)
from meshwright.hwprofiles.units import (
    parse_bandwidth,
    parse_bytes,
    parse_flops_per_s,
    parse_price,
    parse_time,
)

FROM_FILE: Final = {"from_file": True}  # the validation context of data read from a file


class Profile(BaseModel):
    """A frozen record that knows which keys its file may have."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        allow_inf_nan=False,
        defer_build=True,
    )

    def __repr__(self) -> str:
        """Return the name of what has one, as a person would tell it from others."""
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

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: object, info: ValidationInfo) -> object:
        if info.context is not FROM_FILE or not isinstance(data, Mapping):
            return data
        keys = cls.file_keys()
        for key in data:
            if key not in keys:
                word = key if isinstance(key, str) else ascii(key)
                hint = suggestion(word, keys)
                raise PydanticCustomError("unknown_key", "{hint}", {"key": word, "hint": hint})
        return data


def _quantity(parse: Callable[[str], float], example: str) -> WrapValidator:
    def read(value: object, check: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
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

    return WrapValidator(read)


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
