# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the objects of an app are called, and the marks by which they are found again. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchx.schedulers.ids import random_id

from torchx_monarch.backends.errors import UserError

LABEL_APP = "torchx-monarch/app"
"""On every object of ours: the app's id without its namespace. Its presence tells ours from others'."""

LABEL_ROLE = "torchx-monarch/role"
"""On jobs and pods: which of the app's roles, by its position."""

ANNOTATION_APP = "torchx-monarch/appdef"
"""On the record of an app: the app as ``blob.pack`` has it."""

ANNOTATION_OPTIONS = "torchx-monarch/options"
"""On the record: the run options that those who look at an app need, as JSON."""

ANNOTATION_ENDED = "torchx-monarch/ended"
"""On the record: how the app was ended by one of us, as JSON: ``state``, ``msg``, ``time``."""

LARGEST_ANNOTATIONS = 256 << 10
"""Bytes of all annotations of an object together; the API server refuses more."""

_LONGEST = 63
"""Of a host's name, of one label of a name in the DNS, and of a Service's name."""

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""What the DNS takes for one."""

_LONGEST_APP = 22
_LONGEST_ROLE = 18
# With them: 22 + 1 + 14 random characters, 1 + 18 + 2 to tell two roles apart, 1 + 4 digits of the replica.


def app_id(name: str) -> str:
    """A new id for an app of this name: a label of the DNS that begins with a letter, as a Service's name must."""
    return f"{short_app(name)}-{random_id(14)}"


def short_app(name: str) -> str:
    """What an app's name leaves of itself in its id."""
    return _safe(name).lstrip("0123456789-")[:_LONGEST_APP].strip("-") or "app"


def job_names(app_id: str, roles: Sequence[str]) -> list[str]:
    """The name of each role's Job. The host name of its replica k is that with ``-k`` after it."""
    short = [_safe(role)[:_LONGEST_ROLE].strip("-") or "role" for role in roles]
    if len(set(short)) < len(short):
        short = [f"{name}-{index}" for index, name in enumerate(short)]
    return [f"{app_id}-{name}" for name in short]


def check_host_name(name: str, what: str) -> None:
    """Refuse the host name of a pod that has too many characters.

    Raises:
        ValueError: it has.
    """
    if len(name) > _LONGEST:
        raise UserError(
            f"{what} would be the host {name!r}, which has {len(name)} characters, and host names have {_LONGEST} at "
            "most; give the app or the role a shorter name"
        )


def host(pod: str, service: str, namespace: str) -> str:
    """The name by which a pod is reached from every namespace of its cluster."""
    return f"{pod}.{service}.{namespace}.svc"


def split(app_id: str) -> tuple[str, str]:
    """Namespace and name of an app's id.

    Raises:
        ValueError: it has no namespace.
    """
    namespace, colon, name = app_id.partition(":")
    if not colon or not is_namespace(namespace) or not re.fullmatch(_LABEL, name):
        raise ValueError(f"{app_id!r} is no id of an app on Kubernetes, which has the form NAMESPACE:NAME")
    return namespace, name


def is_namespace(name: str) -> bool:
    """Whether there may be a namespace of this name: it becomes a part of URLs."""
    return len(name) <= _LONGEST and re.fullmatch(_LABEL, name) is not None


def _safe(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", name.lower())
