# SPDX-License-Identifier: BSD-3-Clause
"""Ask replica 0 of a job for something that all its hosts know (see ``controller.rank_queries``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torchx_monarch.client.connection import TIMEOUT, Connection
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import UnreachableError
from torchx_monarch.model.codec import DecodeError, decode

T = TypeVar("T")


def query(
    target: Target, greeting: Mapping[str, object], kind: type[T], timeout: float
) -> tuple[list[T], dict[str, str]]:
    """Return what the hosts have answered, and why a host has not, by replica.

    Args:
        target: where replica 0 listens.
        greeting: the query; its ``type`` is also that of the answers, and the name of the field with the values.
        timeout: seconds for the connection, and for each message of the answer.

    Raises:
        UnreachableError: replica 0 cannot be reached, breaks the connection, or answers something else.
        RefusedError: replica 0 refuses the query: the hosts are not together, or have no ranks.
    """
    found: list[T] = []
    with Connection.open(target, dict(greeting), min(timeout, TIMEOUT)) as link:
        while True:
            answer = link.answer(timeout)
            if answer.get("type") == "end":
                return found, {str(replica): str(why) for replica, why in dict(answer.get("missing") or {}).items()}
            try:
                found += [decode(kind, value) for value in answer.get(str(greeting["type"])) or ()]
            except DecodeError as error:
                raise UnreachableError(f"{target.address}: not the {greeting['type']} of a rank: {error}") from None
