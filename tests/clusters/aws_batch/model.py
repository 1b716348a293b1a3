# SPDX-License-Identifier: BSD-3-Clause
"""AWS's own model of its services, which botocore carries: what may go over the wire, either way.

botocore checks the arguments of a call as well, but no enum, no length and no pattern; of an answer it checks nothing,
and drops what it does not know.
"""

from __future__ import annotations

import contextlib
import functools
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import botocore.session
import jsonschema
from botocore.model import OperationModel, ServiceModel, Shape

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

_TYPES = {
    **dict.fromkeys(("string", "blob"), "string"),
    **dict.fromkeys(("integer", "long"), "integer"),
    **dict.fromkeys(("float", "double", "timestamp"), "number"),
    "boolean": "boolean",
    "structure": "object",
    "map": "object",
    "list": "array",
}
"""What JSON has for each of the model's."""

_LIMITS = {"string": "{}Length", "array": "{}Items", "object": "{}Properties", "integer": "{}imum", "number": "{}imum"}
"""How JSON Schema calls the least and the most."""


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
        for operation_name in model.operation_names if model.metadata["protocol"] == "rest-json" else ():
            known = model.operation_model(operation_name)
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
    for error in jsonschema.Draft202012Validator(_schema(shape)).iter_errors(value):
        yield f"{error.json_path.replace('$', where, 1)}: {error.message}"


def _schema(shape: Shape) -> dict[str, Any]:
    """The JSON Schema of a shape: its members, type, enum, pattern and limits."""
    kind = _TYPES[shape.type_name]
    found: dict[str, Any] = {"type": kind}
    if shape.type_name == "structure":
        names = {name: member.serialization.get("name", name) for name, member in shape.members.items()}
        found["properties"] = {names[name]: _schema(member) for name, member in shape.members.items()}
        found |= {"required": [names[name] for name in shape.required_members], "additionalProperties": False}
    elif shape.type_name == "list":
        found["items"] = _schema(shape.member)
    elif shape.type_name == "map":
        found |= {"additionalProperties": _schema(shape.value), "propertyNames": _schema(shape.key)}
    if enum := getattr(shape, "enum", None) or shape.metadata.get("enum"):
        found["enum"] = list(enum)
    with contextlib.suppress(re.error):  # a pattern of a dialect that Python does not know
        if pattern := shape.metadata.get("pattern"):
            found["pattern"] = f"^(?:{re.compile(pattern).pattern})$"
    limits = {"min": shape.metadata.get("min"), "max": shape.metadata.get("max")}
    return found | {_LIMITS[kind].format(name): limit for name, limit in limits.items() if limit is not None}
