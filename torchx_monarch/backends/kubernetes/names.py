# SPDX-License-Identifier: BSD-3-Clause
"""The names of an app's objects, and the labels and annotations that identify them. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchx.schedulers.ids import random_id

from torchx_monarch.backends.core.errors import UserError

LABEL_APP = "torchx-monarch/app"
"""Label of every object of an app: the app's id without its namespace. Objects without it are not this scheduler's."""

LABEL_ROLE = "torchx-monarch/role"
"""Label of Jobs and pods: the index of the role in the app."""

ANNOTATION_APP = "torchx-monarch/appdef"
"""Annotation of an app's record: the app, packed by ``SubmittedApp.pack``."""

ANNOTATION_OPTIONS = "torchx-monarch/options"
"""Annotation of the record: the run options that a snapshot needs, as JSON: ``grace``, ``pull_timeout``."""

ANNOTATION_ENDED = "torchx-monarch/ended"
"""Annotation of the record: how this scheduler has begun to end the app, as JSON: ``state``, ``msg``, ``time``."""

MAX_ANNOTATIONS = 256 << 10
"""Largest total size of an object's annotations in bytes; the API server refuses more."""

_MAX_LABEL = 63
"""Characters of a host name, DNS label or Service name."""

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""Pattern of a DNS label."""

_MAX_APP, _MAX_ROLE = 22, 18
# The sum is 63: app 22 + dash 1 + random 14, dash 1 + role 18 + role index 2 if names clash, dash 1 + replica 4.


def app_id(name: str) -> str:
    """Return a new app id, without namespace: a DNS label that begins with a letter, as a Service's name must."""
    return f"{short_app(name)}-{random_id(14)}"


def short_app(name: str) -> str:
    """Return the part of an app's id that comes from its name."""
    return _safe(name).lstrip("0123456789-")[:_MAX_APP].strip("-") or "app"


def job_names(app_id: str, roles: Sequence[str]) -> list[str]:
    """Return the name of each role's Job. The host name of replica k is this name followed by ``-k``."""
    short = [_safe(role)[:_MAX_ROLE].strip("-") or "role" for role in roles]
    if len(set(short)) < len(short):
        short = [f"{name}-{index}" for index, name in enumerate(short)]
    return [f"{app_id}-{name}" for name in short]


def check_host_name(name: str, replica: str) -> None:
    """Raise UserError if the host name of a replica's pod is too long."""
    if len(name) > _MAX_LABEL:
        raise UserError(
            f"replica {replica} would be the host {name!r}, which has {len(name)} characters, and host names have "
            f"{_MAX_LABEL} at most; give the app or the role a shorter name"
        )


def split(app_id: str) -> tuple[str, str] | None:
    """Split an app's id into namespace and name; return None if no app can have this id."""
    namespace, _, name = app_id.partition(":")
    return (namespace, name) if is_namespace(namespace) and re.fullmatch(_LABEL, name) else None


def is_namespace(name: str) -> bool:
    """Whether this is a valid namespace name. Only such a name may become part of a URL."""
    return len(name) <= _MAX_LABEL and re.fullmatch(_LABEL, name) is not None


def _safe(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", name.lower())
