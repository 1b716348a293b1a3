# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Make the names, messages and error files of jobs safe for a terminal and for TorchX's formatting.

They come from programs, and from files that any user may have written. TorchX prints them unchanged, and its parser for
error files fails on some of them.
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
    """Return a copy of an app's description with printable messages and names; ``roles`` stay as submitted."""
    return dataclasses.replace(
        app,
        msg=printable(app.msg),
        structured_error_msg=_error(app.structured_error_msg),
        roles_statuses=[
            RoleStatus(one_line(role.role), [_replica(each) for each in role.replicas]) for role in app.roles_statuses
        ],
    )


def presentable_list(apps: list[ListAppResponse]) -> list[ListAppResponse]:
    """Return a copy of a list of apps with printable names."""
    return [dataclasses.replace(app, name=one_line(app.name)) for app in apps]


def _replica(replica: ReplicaStatus) -> ReplicaStatus:
    return dataclasses.replace(
        replica,
        role=one_line(replica.role),
        hostname=one_line(replica.hostname),
        structured_error_msg=_error(replica.structured_error_msg),
    )


def _error(text: str) -> str:
    """Return an error file with printable texts; NONE if it is not valid JSON, which TorchX could not parse."""
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
