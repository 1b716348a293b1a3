# SPDX-License-Identifier: BSD-3-Clause
"""Decode parsed JSON into data classes and check each value against the type of its field.

The values that ``decode`` returns have the types that their annotations state, so no reader meets a string where it
expects a number. Standard library only.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, TypeVar

T = TypeVar("T")

_MAX_SECONDS = 1e11

Seconds: TypeAlias = Annotated[float, _MAX_SECONDS]
"""A time in seconds since the epoch, or a duration in seconds; ``decode`` refuses what lies beyond the year 5138, which
``time.localtime`` may not convert. Differences of two such numbers are finite."""

_Where: TypeAlias = "str | tuple[_Where, str | int]"
"""The place of a value: a name, or the place of what holds it and its key. It becomes text only in an error: a message
of the samples of ranks has thousands of values."""

_Decoder = Callable[[Any, _Where], Any]


class DecodeError(ValueError):
    """Raised when a value does not have the type of its field; the message names the field and shows the value."""


def decode(cls: type[T], data: Any, where: str = "") -> T:
    """Decode a JSON object into a data class or named tuple.

    Types of fields may be bool, int, float, ``Seconds``, str, None, enums of strings, unions of these, lists, tuples
    of any length, mappings with string keys, ``Any``, and further data classes or named tuples. An int is accepted for
    a float. A float that is not finite is refused. Keys without a field are ignored: a newer version may write them.

    Args:
        where: the name of ``data`` in messages; empty for the whole document.
    """
    built: T = _decoder(typing.cast(collections.abc.Hashable, cls))(data, where)
    return built


@functools.cache
def _decoder(hint: Any) -> _Decoder:
    """Return the function that decodes values of an annotated type."""
    if hint is Any:
        return lambda value, where: value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _limited(_decoder(arguments[0]), arguments[1])
    if origin in (typing.Union, types.UnionType):
        return _union([_decoder(argument) for argument in arguments], " | ".join(map(_shown, arguments)))
    if origin is list:
        return _list(_decoder(arguments[0]))
    if origin is tuple:  # JSON has lists only
        items = _list(_decoder(arguments[0]))
        return lambda value, where: tuple(items(list(value) if isinstance(value, tuple) else value, where))
    if origin in (dict, collections.abc.Mapping):
        return _mapping(_decoder(arguments[1]))
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return _record(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum(hint)
    return _scalar(type(None) if hint is None else hint)


def _scalar(cls: type[Any]) -> _Decoder:
    def convert(value: Any, where: _Where) -> Any:
        if type(value) is cls:  # isinstance() would accept a bool for an int
            if cls is float and not math.isfinite(value):
                raise _wrong(value, where, "a finite number")
            return value
        if cls is float and type(value) is int and abs(value) < 1 << 63:
            return float(value)
        raise _wrong(value, where, "null" if cls is type(None) else cls.__name__)

    return convert


def _limited(number: _Decoder, limit: float) -> _Decoder:
    def convert(value: Any, where: _Where) -> Any:
        converted = number(value, where)
        if abs(converted) > limit:
            raise _wrong(value, where, _shown(Annotated[float, limit]))
        return converted

    return convert


def _enum(cls: type[enum.Enum]) -> _Decoder:
    allowed = {member.value: member for member in cls}

    def convert(value: Any, where: _Where) -> Any:
        if isinstance(value, str) and value in allowed:
            return allowed[value]
        raise _wrong(value, where, f"one of {', '.join(filter(None, allowed))}")

    return convert


def _union(options: list[_Decoder], wanted: str) -> _Decoder:
    def convert(value: Any, where: _Where) -> Any:
        for option in options:
            try:
                return option(value, where)
            except DecodeError:
                continue
        raise _wrong(value, where, wanted)

    return convert


def _list(item: _Decoder) -> _Decoder:
    def convert(value: Any, where: _Where) -> Any:
        if not isinstance(value, list):
            raise _wrong(value, where, "a list")
        return [item(entry, (where, index)) for index, entry in enumerate(value)]

    return convert


def _mapping(item: _Decoder) -> _Decoder:
    def convert(value: Any, where: _Where) -> Any:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        return {name: item(entry, (where, name)) for name, entry in value.items()}

    return convert


def _record(cls: Any) -> _Decoder:
    hints = typing.get_type_hints(cls, include_extras=True)
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls) if field.init]
        missing = dataclasses.MISSING
        required = {f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing}
    else:
        names = list(cls._fields)
        required = set(names) - set(cls._field_defaults)
    fields = [(name, _decoder(hints[name])) for name in names]

    def convert(value: Any, where: _Where) -> Any:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        given = {}
        for name, item in fields:
            if name in value:
                given[name] = item(value[name], (where, name))
            elif name in required:
                raise DecodeError(f"{_text(where) or 'the object'} lacks {name!r}")
        return cls(**given)

    return convert


def _shown(hint: Any) -> str:
    if typing.get_origin(hint) is Annotated:
        return f"a number of seconds, at most {typing.get_args(hint)[1]:g}"
    return "None" if hint is type(None) else hint.__name__ if isinstance(hint, type) else str(hint)


def _wrong(value: Any, where: _Where, wanted: str) -> DecodeError:
    shown = repr(value)
    if len(shown) > 40:
        shown = f"{shown[:40]}…"
    return DecodeError(f"{_text(where) or 'the whole'} is {shown}, not {wanted}")


def _text(where: _Where) -> str:
    """Return a place as text: ``roles[2].env``."""
    if isinstance(where, str):
        return where
    holder, key = _text(where[0]), where[1]
    if isinstance(key, int):
        return f"{holder}[{key}]"
    return f"{holder}.{key}" if holder else key
