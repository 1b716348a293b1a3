# SPDX-License-Identifier: BSD-3-Clause
"""AWS's own model of its services, which botocore carries: what may go over the wire, either way.

botocore checks the arguments of a call as well, but no enum, no length and no pattern; of an answer it checks nothing,
and drops what it does not know.
"""

from __future__ import annotations

import functools
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import botocore.session
from botocore.model import ListShape, MapShape, OperationModel, ServiceModel, Shape, StructureShape

SERVICES = ("batch", "logs", "secretsmanager")
"""Those that we talk to."""

_ANYWHERE = {
    "AccessDeniedException",
    "ExpiredTokenException",
    "IncompleteSignature",
    "InternalFailure",
    "ServiceUnavailable",
    "ThrottlingException",
    "TooManyRequestsException",
    "UnrecognizedClientException",
    "ValidationError",
}
"""Errors that AWS documents for all operations; no operation's model names them."""

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "blob": str,
    "boolean": bool,
    "integer": int,
    "long": int,
    "float": (int, float),
    "double": (int, float),
    "timestamp": (int, float),
}
"""What JSON has for each of the model's."""


@dataclass(frozen=True)
class Operation:
    """One operation, as a request names it.

    Attributes:
        service: botocore's name of the service.
        model: botocore's model of the operation.
        uri: the members of the input that stand in the path.
    """

    service: str
    model: OperationModel
    uri: Mapping[str, str]

    @property
    def name(self) -> str:
        """As AWS's documentation has it: ``SubmitJob``."""
        return str(self.model.name)

    def request(self, body: Mapping[str, Any]) -> list[str]:
        """What is wrong with a request."""
        if self.model.input_shape is None:
            return [f"{self.name} takes no input"] if body else []
        return list(_problems(self.model.input_shape, {**body, **self.uri}, self.name))

    def answer(self, body: Mapping[str, Any]) -> list[str]:
        """What is wrong with an answer."""
        if self.model.output_shape is None:
            return [f"{self.name} has no output"] if body else []
        return list(_problems(self.model.output_shape, body, self.name))

    def refusal(self, code: str) -> list[str]:
        """What is wrong with an error."""
        own = {shape.metadata.get("error", {}).get("code", shape.name) for shape in self.model.error_shapes}
        own |= {shape.name for shape in self.model.error_shapes}
        return [] if code in own | _ANYWHERE else [f"{self.name} fails with {', '.join(sorted(own))}, not with {code}"]


def operation(method: str, path: str, target: str) -> Operation:
    """The operation that a request asks for.

    Args:
        method: of HTTP.
        path: its path.
        target: its header ``X-Amz-Target``; empty where there is none.

    Raises:
        LookupError: AWS has none such.
    """
    prefix, _, name = target.rpartition(".")
    for service in SERVICES:
        model = _service(service)
        if target:
            if model.metadata.get("targetPrefix") == prefix and name in model.operation_names:
                return Operation(service, model.operation_model(name), {})
            continue
        for one in model.operation_names if model.metadata["protocol"] == "rest-json" else ():
            known = model.operation_model(one)
            pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+)", re.escape(known.http["requestUri"]))
            if known.http["method"] == method and (found := re.fullmatch(pattern, path)):
                return Operation(
                    service, known, {key: urllib.parse.unquote(value) for key, value in found.groupdict().items()}
                )
    raise LookupError(f"AWS knows no operation {target or f'{method} {path}'} of {', '.join(SERVICES)}")


@functools.cache
def _service(name: str) -> ServiceModel:
    return botocore.session.Session().get_service_model(name)


def _problems(shape: Shape, value: Any, where: str) -> Iterator[str]:
    if isinstance(shape, StructureShape):
        if not isinstance(value, dict):
            yield f"{where} is {value!r}, not a structure"
            return
        members = {member.serialization.get("name", name): member for name, member in shape.members.items()}
        for name in set(value) - set(members):
            yield f"{where} has no {name!r}; it has {', '.join(sorted(members))}"
        for name in shape.required_members:
            if value.get(shape.members[name].serialization.get("name", name)) is None:
                yield f"{where} lacks {name!r}"
        for name in set(value) & set(members):
            yield from _problems(members[name], value[name], f"{where}.{name}")
    elif isinstance(shape, ListShape):
        if not isinstance(value, list):
            yield f"{where} is {value!r}, not a list"
            return
        yield from _length(shape, len(value), where)
        for index, each in enumerate(value):
            yield from _problems(shape.member, each, f"{where}[{index}]")
    elif isinstance(shape, MapShape):
        if not isinstance(value, dict):
            yield f"{where} is {value!r}, not a map"
            return
        yield from _length(shape, len(value), where)
        for key, each in value.items():
            yield from _problems(shape.key, key, f"{where} (key)")
            yield from _problems(shape.value, each, f"{where}[{key!r}]")
    else:
        yield from _scalar(shape, value, where)


def _scalar(shape: Shape, value: Any, where: str) -> Iterator[str]:
    wanted = _TYPES[shape.type_name]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        yield f"{where} is {value!r}, not a {shape.type_name}"
        return
    if not isinstance(value, str):
        if isinstance(value, (int, float)):
            yield from _length(shape, value, where)
        return
    yield from _length(shape, len(value), where)
    allowed = getattr(shape, "enum", None) or shape.metadata.get("enum")
    if allowed and value not in allowed:
        yield f"{where} is {value!r}, not one of {', '.join(allowed)}"
    try:
        pattern = re.compile(shape.metadata.get("pattern", ""))
    except re.error:
        return  # of a dialect that Python does not know
    if pattern.pattern and not pattern.fullmatch(value):
        yield f"{where} is {value!r}, which {pattern.pattern} does not match"


def _length(shape: Shape, size: float, where: str) -> Iterator[str]:
    least, most = shape.metadata.get("min", float("-inf")), shape.metadata.get("max", float("inf"))
    if not least <= size <= most:
        yield f"{where} is {size:g} (long), and may be {least:g} to {most:g}"
