# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Make what a job or a file says of itself fit for a terminal, and for TorchX's own formatting.

Names, messages and error files come from programs, and from files that anybody may have written. TorchX prints them as
they are, and parses error files with a parser that a few of them break.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse
from torchx.specs import NONE, ReplicaStatus, RoleStatus

from torchx_monarch.safe_files import parse_json

_LAYOUT = frozenset("\n\t")


def printable(text: str, keep: frozenset[str] = frozenset()) -> str:
    r"""The text with each character that is not printable, ANSI codes among them, as an escape such as ``\x1b``.

    Args:
        text: from an untrusted source.
        keep: characters to leave as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def presentable(app: DescribeAppResponse) -> DescribeAppResponse:
    """A copy of what a scheduler says of an app, with printable messages and names; its roles are as submitted."""
    return dataclasses.replace(
        app,
        msg=printable(app.msg, _LAYOUT),
        structured_error_msg=_error(app.structured_error_msg),
        roles_statuses=[
            RoleStatus(printable(role.role), [_replica(each) for each in role.replicas]) for role in app.roles_statuses
        ],
    )


def presentable_list(apps: list[ListAppResponse]) -> list[ListAppResponse]:
    """The same of a scheduler's list of apps."""
    return [dataclasses.replace(app, name=printable(app.name)) for app in apps]


def _replica(replica: ReplicaStatus) -> ReplicaStatus:
    return dataclasses.replace(
        replica,
        role=printable(replica.role),
        hostname=printable(replica.hostname),
        structured_error_msg=_error(replica.structured_error_msg),
    )


def _error(text: str) -> str:
    """The content of an error file with its texts printable; NONE where TorchX could not parse it."""
    if text == NONE:
        return text
    try:
        return json.dumps(_texts(parse_json(text)))
    except (ValueError, RecursionError):
        return str(NONE)


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value, _LAYOUT)
    if isinstance(value, list):
        return [_texts(each) for each in value]
    if isinstance(value, dict):
        return {printable(name): _texts(each) for name, each in value.items()}
    return value
