# SPDX-License-Identifier: BSD-3-Clause
"""Building data classes from JSON that may hold anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from torchx_monarch.model import codec


class Point(NamedTuple):
    x: int
    y: int = 0


@dataclass
class Inner:
    name: str
    ratio: float = 1.0
    time: codec.Seconds | None = None


@dataclass
class Outer:
    inner: Inner
    many: list[Inner] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    code: int | None = None
    anything: Any = None
    point: Point = Point(0)
    flag: bool = False


def test_values_of_the_stated_types_are_taken() -> None:
    data = {
        "inner": {"name": "a", "ratio": 2, "time": 3, "newer": 1},
        "many": [{"name": "b"}],
        "env": {"A": "1"},
        "code": None,
        "anything": [1],
        "point": {"x": 1},
        "flag": True,
    }
    expected = Outer(Inner("a", 2.0, 3.0), [Inner("b")], {"A": "1"}, None, [1], Point(1), True)
    assert codec.decode(Outer, data) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the whole is \\[\\], not an object"),
        ({}, "the object lacks 'inner'"),
        ({"inner": {}}, "inner lacks 'name'"),
        ({"inner": {"name": 3}}, "name is 3, not str"),
        ({"inner": {"name": "a", "ratio": float("nan")}}, "ratio is nan, not a finite number"),
        (
            {"inner": {"name": "a", "time": 1e300}},
            "time is 1e\\+300, not a number of seconds, at most 1e\\+11 \\| None",
        ),
        ({"inner": {"name": "a", "time": -2e11}}, "time is -2"),
        ({"inner": {"name": "a", "ratio": "1"}}, "ratio is '1', not a finite number"),
        ({"inner": {"name": "a", "ratio": 10**400}}, "ratio is 1000"),
        ({"inner": {"name": "a"}, "many": {}}, "many is {}, not a list"),
        ({"inner": {"name": "a"}, "many": [{"name": "b"}, 1]}, "many is 1, not an object"),
        ({"inner": {"name": "a"}, "env": {"A": None}}, "env is None, not str"),
        ({"inner": {"name": "a"}, "code": "x" * 100}, "code is 'x{39}…, not int | None"),
        ({"inner": {"name": "a"}, "code": True}, "code is True, not int | None"),
        ({"inner": {"name": "a"}, "point": {}}, "point lacks 'x'"),
        ({"inner": {"name": "a"}, "flag": 1}, "flag is 1, not bool"),
    ],
)
def test_other_values_are_refused_by_name(data: object, message: str) -> None:
    with pytest.raises(codec.DecodeError, match=message):
        codec.decode(Outer, data)
