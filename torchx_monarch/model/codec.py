# SPDX-License-Identifier: BSD-3-Clause
"""Decode parsed JSON into data classes and check each value against the type of its field.

The values that ``decode`` returns have the types that their annotations state, so no reader meets a string where it
expects a number. Standard library only.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import functools
import marshal
import math
import sys
import types
import typing
from typing import Annotated, Any, TypeAlias, TypeVar

T = TypeVar("T")

Seconds: TypeAlias = Annotated[float, 1e11]
"""A time in seconds since the epoch, or a duration in seconds; ``decode`` refuses what lies beyond the year 5138, which
``time.localtime`` may not convert. Differences of two such numbers are finite."""

_SHARED = "shared"

Shared: TypeAlias = Annotated[T, _SHARED]
"""A type of JSON values of which many are equal: ``decode`` decodes each of them once, and their readers share it."""

_RECORD = object()
"""The kind of data classes and named tuples."""


class DecodeError(ValueError):
    """Raised when a value does not have the type of its field; the message names the innermost field, and the value."""


def decode(cls: type[T], data: Any, where: str = "") -> T:
    """Decode a JSON object into a data class or named tuple.

    Types of fields may be bool, int, float, ``Seconds``, str, None, enums of strings, unions of these, lists, tuples
    of any length, mappings with string keys, ``Any``, and further data classes or named tuples. An int is accepted for
    a float. A float that is not finite is refused. Keys without a field are ignored: a newer version may write them.

    Args:
        where: the name of ``data`` in messages; empty for the whole document.
    """
    decoded: T = _decode(cls, data, where)
    return decoded


def _decode(hint: Any, value: Any, where: str) -> Any:
    if hint is Any or (type(value) is hint and (hint is not float or math.isfinite(value))):
        return value  # isinstance() would accept a bool for an int
    kind, arguments = _kind(hint)
    if kind is float:
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
    elif kind is Annotated and arguments[1] is _SHARED:
        return _decode_shared(arguments[0], marshal.dumps(value, 2), where)  # version 2: equal bytes for equal values
    elif kind is Annotated:
        number = _decode(arguments[0], value, where)
        if abs(number) <= arguments[1]:
            return number
    elif kind is typing.Union:
        if type(value) in arguments and type(value) is not float:
            return value
        for argument in arguments:
            with contextlib.suppress(DecodeError):
                return _decode(argument, value, where)
    elif (kind is list or kind is tuple) and isinstance(value, (list, kind)):  # JSON has lists only
        if set(map(type, value)) == {arguments[0]} and (arguments[0] is not float or all(map(math.isfinite, value))):
            return kind(value)
        return kind([_decode(arguments[0], entry, where) for entry in value])
    elif kind is dict and isinstance(value, dict):
        return {name: _decode(arguments[1], entry, where) for name, entry in value.items()}
    elif kind is _RECORD and isinstance(value, dict):
        return hint(**_arguments(hint, value, where))
    elif kind is enum.Enum:
        with contextlib.suppress(ValueError):
            return hint(value)
    shown = repr(value)
    if len(shown) > 40:
        shown = f"{shown[:40]}…"
    raise DecodeError(f"{where or 'the whole'} is {shown}, not {_wanted(hint)}")


@functools.lru_cache(maxsize=512)
def _decode_shared(hint: Any, value: bytes, where: str) -> Any:
    return _decode(hint, marshal.loads(value), where)


def _arguments(cls: Any, values: dict[str, Any], where: str) -> dict[str, Any]:
    given = {}
    for name, hint, is_required in _fields(cls):
        if name in values:
            entry = values[name]
            given[name] = entry if type(entry) is hint is not float else _decode(hint, entry, name)
        elif is_required:
            raise DecodeError(f"{where or 'the object'} lacks {name!r}")
    return given


@functools.cache
def _kind(hint: collections.abc.Hashable) -> tuple[Any, tuple[Any, ...]]:
    """Return how values of an annotated type are decoded, and the arguments of the type."""
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is types.UnionType:
        kind = typing.Union
    elif kind is collections.abc.Mapping:
        kind = dict
    elif dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        kind = _RECORD
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        kind = enum.Enum
    return kind, arguments


@functools.cache
def _fields(cls: Any) -> list[tuple[str, Any, bool]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    if not dataclasses.is_dataclass(cls):
        return [(name, hints[name], name not in cls._field_defaults) for name in cls._fields]
    missing = dataclasses.MISSING
    return [
        (field.name, hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(cls)
        if field.init
    ]


def _wanted(hint: Any) -> str:
    kind, arguments = _kind(hint)
    if kind is Annotated:
        return f"a number of seconds, at most {arguments[1]:g}"
    if kind is typing.Union:
        return " | ".join(map(_wanted, arguments))
    if kind is enum.Enum:
        return f"one of {', '.join(filter(None, (member.value for member in hint)))}"
    names = {list: "a list", tuple: "a list", dict: "an object", _RECORD: "an object", float: "a finite number"}
    return names.get(kind) or ("None" if kind is type(None) else str(kind.__name__))
