# SPDX-License-Identifier: BSD-3-Clause
"""Draw what a damaged, edited or planted file may hold."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import strategies as st

_DEEP = b"[" * 50_000
_NASTY = [_DEEP, b'{"a":' * 50_000, b'{"created":' + b"9" * 5000 + b"}", b"\xff\xfe\x00", b"null", b"[]", b"{}", b'""']
_TEXTS = [
    "",
    "\ud800",
    "\x1b[31mred",
    "a\x00b",
    "a\nb",
    "RUNNING",
    "SUCCEEDED",
    f"hosts {'9' * 5000}/1",
    f"restart 1 of {'9' * 5000} after: x",
    "tls:127.0.0.1:1",
    "1",
    "../..",
    "/dev/zero",
    _DEEP.decode(),
]
_ERROR_FILES = [
    '{"message": {"message": "\\u001b[31m"}}',
    '{"message": ' + "9" * 5000 + "}",
    '{"message": {"message": {"message": 1}, "extraInfo": []}}',
    *("[]", "null"),
]
_texts = st.sampled_from([*_TEXTS, *_ERROR_FILES])
_numbers = st.sampled_from([0, -1, 1, 1e300, float("nan"), float("-inf"), 10**30, 2**63, 10**400]) | st.integers()
_values = st.recursive(
    st.none() | st.booleans() | _numbers | _texts | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each part of a JSON document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, each in inner for place in _places(each, (*at, key)))]


def _changed(draw: st.DrawFn, document: Any) -> Any:
    """A document with another value somewhere, of the same type or any, or without it."""
    place = draw(st.sampled_from(_places(document)))
    if not place:
        return draw(_values)
    holder = document
    for key in place[:-1]:
        holder = holder[key]
    old = holder[place[-1]]
    how = draw(st.sampled_from(["same type", "any", "removed"]))
    if how == "removed":
        del holder[place[-1]]
    elif how == "same type" and isinstance(old, (str, int, float)):
        holder[place[-1]] = draw(_texts if isinstance(old, str) else _numbers)
    else:
        holder[place[-1]] = draw(_values)
    return document


@st.composite
def contents(draw: st.DrawFn, original: bytes) -> bytes:
    """Draw what a file may hold instead: bytes, JSON of another shape, or its own document with something changed."""
    kind = draw(st.sampled_from(["changed", "changed", "changed", "json", "bytes", "nasty"]))
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    if kind == "nasty":
        return draw(st.sampled_from(_NASTY))
    if kind == "changed":
        lines = original.splitlines(keepends=True) or [b""]
        at = draw(st.integers(0, len(lines) - 1))  # of a JSONL file, one line is changed
        with contextlib.suppress(ValueError):
            return b"".join([*lines[:at], as_json(_changed(draw, json.loads(lines[at]))), *lines[at + 1 :]])
    return as_json(draw(_values))


def as_json(value: Any) -> bytes:
    """The content of a file that holds this value."""
    return (json.dumps(value) + "\n").encode()
