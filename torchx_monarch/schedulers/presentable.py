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

from torchx_monarch.system.safe_files import parse_json
from torchx_monarch.system.untrusted_text import one_line, printable


def presentable(app: DescribeAppResponse) -> DescribeAppResponse:
    """A copy of what a scheduler says of an app, with printable messages and names; its roles are as submitted."""
    return dataclasses.replace(
        app,
        msg=printable(app.msg),
        structured_error_msg=_error(app.structured_error_msg),
        roles_statuses=[
            RoleStatus(one_line(role.role), [_replica(each) for each in role.replicas]) for role in app.roles_statuses
        ],
    )


def presentable_list(apps: list[ListAppResponse]) -> list[ListAppResponse]:
    """The same of a scheduler's list of apps."""
    return [dataclasses.replace(app, name=one_line(app.name)) for app in apps]


def _replica(replica: ReplicaStatus) -> ReplicaStatus:
    return dataclasses.replace(
        replica,
        role=one_line(replica.role),
        hostname=one_line(replica.hostname),
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
        return printable(value)
    if isinstance(value, list):
        return [_texts(each) for each in value]
    if isinstance(value, dict):
        return {one_line(name): _texts(each) for name, each in value.items()}
    return value
