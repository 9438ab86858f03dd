"""Records of files: fields are declared once, and pydantic validates files of users.

Files of this package are read unchecked (`Record.trusted`): a test shows that checked they give the
same. pydantic, whose import takes longer than all of them, is imported when another file is first
validated, or a record serialised; declarations here are named after pydantic's.
"""
# ruff: noqa: PLC0415

from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from enum import EnumType
from functools import cache, partial
from inspect import get_annotations, isclass
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, cast

from typing import dataclass_transform, get_args, get_origin  # isort: skip

if TYPE_CHECKING:
    from pydantic import BaseModel

F = TypeVar("F")
Read = Callable[[Any], Any]


class Declaration:
    """A deferred call of pydantic: the name of its function, and arguments and options of that.

    A field has a type, and further constraints in ``metadata``. ``parse`` converts a file's value
    where it has another type than the field, such as a text with a unit.
    """

    annotation: Any = None
    metadata: tuple[object, ...] = ()

    def __init__(self, name: str, *arguments: object, **options: Any) -> None:  # noqa: ANN401
        """Store the call without importing pydantic."""
        self.parse: Read | None = options.pop("parse", None)
        self.name, self.arguments, self.options = name, arguments, options
        self.default, self.alias = options.get("default", ...), options.get("alias")

    def of(self, kind: Any) -> Self:  # noqa: ANN401  (of any type)
        """Return the declaration completed by its field's annotation."""
        parts = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        limits = [self] * bool(self.options.keys() - {"alias", "default", "exclude_if"})
        self.annotation, self.metadata = parts[0], (*parts[1:], *limits)
        return self

    def made(self) -> Any:  # noqa: ANN401  (one of many classes)
        """Return the result of pydantic's function."""
        import pydantic

        return getattr(pydantic, self.name)(*self.arguments, **self.options)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:  # noqa: ANN401
        """Return the schema of a type with this declaration in its ``Annotated`` metadata."""
        made = self.made()
        schema = getattr(made, "__get_pydantic_core_schema__", None)
        if schema is None:
            return handler.generate_schema(Annotated[source, made])
        return schema(source, handler)


def Field(default: Any = ..., **options: Any) -> Any:  # noqa: ANN401, N802  (as in pydantic)
    """Declare the default of a field, its name in files and its limits."""
    return Declaration("Field", **options, **({} if default is ... else {"default": default}))


def rare(usual: Any, **options: Any) -> Any:  # noqa: ANN401  (a field of any type)
    """Declare a field that is written and shown only where it differs from the default *usual*."""
    return Field(usual, exclude_if=lambda value: bool(value == usual), **options)


AfterValidator = partial(Declaration, "AfterValidator")
WrapValidator = partial(Declaration, "WrapValidator")


def _method(name: str, *, mode: str) -> Callable[[F], F]:
    def declare(method: Any) -> Any:  # noqa: ANN401  (a function, or a classmethod)
        method.declaration = Declaration(name, mode=mode)
        return method

    return declare


model_serializer = partial(_method, "model_serializer")
model_validator = partial(_method, "model_validator")


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record:
    """A frozen record; keyword arguments of a subclass are added to pydantic's ConfigDict."""

    model_fields: ClassVar[Mapping[str, Declaration]] = {}
    config: ClassVar[Mapping[str, Any]] = {"frozen": True, "extra": "forbid", "defer_build": True}
    _fills: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **config: bool) -> None:
        """Collect the declared fields of a class, as pydantic's metaclass does."""
        super().__init_subclass__()
        own, members = {}, dict(vars(cls))
        for name, kind in get_annotations(cls).items():
            if getattr(kind, "__origin__", None) is not ClassVar:
                declared = members.get(name, ...)
                field = declared if isinstance(declared, Declaration) else Field(declared)
                own[name] = field.of(kind)
                # Left on the class, the declaration would stand in for a missing value.
                if name in members:
                    delattr(cls, name)
        cls.model_fields, cls.config = {**cls.model_fields, **own}, {**cls.config, **config}
        methods = {name: each for name, each in members.items() if hasattr(each, "declaration")}
        fills = [name for name in methods if methods[name].declaration.options["mode"] == "before"]
        cls._fills = (*fills, *cls._fills)  # what is declared last runs first

    def __init__(self, **values: Any) -> None:  # noqa: ANN401  (each of its field's type)
        """Check *values*; raises pydantic's ValidationError."""
        vars(self).update(vars(self.model_validate(values)))

    @classmethod
    def model_validate(cls, data: object, *, context: object = None) -> Self:
        """Return *data* as a validated record; raises pydantic's ValidationError."""
        if isinstance(data, cls):
            return data
        return cls._of(vars(cls.checked_model().model_validate(data, context=context)))

    @classmethod
    def trusted(cls, data: Mapping[str, object]) -> Self:
        """Return the record that a file of this package describes, unchecked."""
        for fill in cls._fills:
            data = getattr(cls, fill)(data)
        reads = cls._reads().items()
        return cls._of(
            {name: read(data[key]) if key in data else usual for name, (key, read, usual) in reads}
        )

    @classmethod
    @cache
    def _reads(cls) -> Mapping[str, tuple[str, Read, object]]:
        return {
            name: (
                field.alias or name,
                _reader(field.annotation, *field.metadata),
                field.default,
            )
            for name, field in cls.model_fields.items()
        }

    @classmethod
    def _of(cls, values: Mapping[str, object]) -> Self:
        # Past __init__, which validates, and __setattr__, which refuses.
        record = object.__new__(cls)
        vars(record).update(values)
        return record

    def model_copy(self, *, update: Mapping[str, object]) -> Self:
        """Return the same record with other values, unchecked."""
        return self._of({**vars(self), **update})

    def model_dump(self, **options: Any) -> dict[str, Any]:  # noqa: ANN401  (pydantic's own)
        """Return its values as pydantic serialises them."""
        return self.checked_model().model_construct(**vars(self)).model_dump(**options)

    @classmethod
    @cache
    def checked_model(cls) -> "type[BaseModel]":
        """Return the pydantic model of the same fields and methods."""
        from pydantic import BaseModel

        kinds: dict[str, object] = {}
        members: dict[str, Any] = {}
        # pydantic orders fields as annotated: those of base classes come first.
        for base in cls.__mro__[cls.__mro__.index(Record) - 1 :: -1]:
            kinds |= get_annotations(base)
            members |= {name: each for name, each in vars(base).items() if name[:2] != "__"}
        methods = [(name, each) for name, each in members.items() if hasattr(each, "declaration")]
        members |= {name: each.declaration.made()(_returning_self(each)) for name, each in methods}
        members = {name: each for name, each in members.items() if name not in vars(Record)}
        members |= {name: field.made() for name, field in cls.model_fields.items()}
        own = {"__module__": cls.__module__, "__annotations__": kinds, "model_config": cls.config}
        metaclass: Any = type(BaseModel)
        return cast("type[BaseModel]", metaclass(cls.__name__, (BaseModel,), members | own))

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, handler: Any) -> Any:  # noqa: ANN401
        """Return the pydantic schema of a record nested in another model."""
        from pydantic_core import core_schema

        model = cls.checked_model()

        def read(value: object, check: Read) -> object:
            return value if isinstance(value, cls) else cls._of(vars(check(value)))

        def write(record: Record, written: Read) -> object:
            return written(model.model_construct(**vars(record)))

        schema = handler(model)
        writing = core_schema.wrap_serializer_function_ser_schema(write, schema=schema)
        return core_schema.no_info_wrap_validator_function(read, schema, serialization=writing)

    def __setattr__(self, name: str, value: object) -> None:
        """Raise FrozenInstanceError."""
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __eq__(self, other: object) -> bool:
        """Return True if *other* is of the same type with the same values."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        """Return the hash of all values."""
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        """Return its type and values."""
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"


def _returning_self(method: Any) -> Any:  # noqa: ANN401  (a function, or a classmethod)
    """Return a method as pydantic calls it: one that runs after validation returns the record."""
    if method.declaration.options["mode"] != "after":
        return method

    def check(self: F) -> F:
        method(self)
        return self

    return check


def _reader(kind: Any, *limits: object) -> Read:  # noqa: ANN401, PLR0911  (of any type)
    """Return the conversion from a TOML value to a value of a type."""
    for limit in limits:
        if isinstance(limit, Declaration) and limit.parse:
            return limit.parse
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _reader(*parts)
    if origin in (Union, UnionType):
        others = [part for part in parts if part is not NoneType]
        # A union of several types has no single conversion: its values are TOML's own.
        return _reader(*others) if len(others) == 1 else _unchanged
    if origin is tuple:
        item = _reader(parts[0])
        return lambda items: tuple(map(item, items))
    if origin is dict:
        key, value = map(_reader, parts)
        return lambda table: {key(word): value(each) for word, each in table.items()}
    if origin is Literal:
        kind = type(parts[0])
    if isclass(kind) and issubclass(kind, Record):
        record = kind
        return lambda data: data if isinstance(data, Record) else record.trusted(data)
    return kind if kind is float or isinstance(kind, EnumType) else _unchanged


def _unchanged(value: object) -> object:
    return value
