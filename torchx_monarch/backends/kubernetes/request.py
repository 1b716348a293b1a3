# SPDX-License-Identifier: BSD-3-Clause
"""The request for one app, and how its objects are named, labelled and found. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from torchx.schedulers.ids import random_id

Object = dict[str, Any]
"""A Kubernetes object, as decoded from JSON."""

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

SECRET_KEY = "credentials"
"""The key of an app's Secret."""

TERMINATION_VARIABLE = "MONARCH_TERMINATION_LOG"
"""The variable of a container that runs a host: the file for its termination message."""

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""Pattern of a DNS label."""

_MAX_APP, _MAX_ROLE = 22, 18
# The sum is 63: app 22 + dash 1 + random 14, dash 1 + role 18 + role index 2 if names clash, dash 1 + replica 4.


@dataclass
class KubernetesRequest:
    """The request for one app.

    Attributes:
        app_id: the app's id without the namespace.
        objects: the objects in the order of their creation; the jobs own the others.
    """

    namespace: str
    app_id: str
    objects: list[Object]

    def __str__(self) -> str:
        return str(yaml.safe_dump_all(self.objects, sort_keys=False))


def secret(metadata: Object) -> Object:
    """Return the Secret for the credentials of an app's hosts, as yet without them."""
    data = {SECRET_KEY: "(made when the job is submitted)"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": data}


def with_credentials(objects: Iterable[Object], credentials: str) -> list[Object]:
    """Return the objects with the credentials in the app's Secret; the arguments are not changed."""
    data = {"stringData": {SECRET_KEY: credentials}}
    return [{**resource, **data} if resource["kind"] == "Secret" else resource for resource in objects]


def new_app_id(name: str) -> str:
    """Return a new app id, without namespace: a DNS label that begins with a letter, as a Service's name must."""
    short = _safe(name).lstrip("0123456789-")[:_MAX_APP].strip("-") or "app"
    return f"{short}-{random_id(14)}"


def job_names(app_id: str, roles: Sequence[str]) -> list[str]:
    """Return the name of each role's Job. The host name of replica k is this name followed by ``-k``."""
    short = [_safe(role)[:_MAX_ROLE].strip("-") or "role" for role in roles]
    if len(set(short)) < len(short):
        short = [f"{name}-{index}" for index, name in enumerate(short)]
    return [f"{app_id}-{name}" for name in short]


def split(app_id: str) -> tuple[str, str] | None:
    """Split an app's id into namespace and name; return None if no app can have this id."""
    namespace, _, name = app_id.partition(":")
    return (namespace, name) if is_namespace(namespace) and re.fullmatch(_LABEL, name) else None


def is_namespace(name: str) -> bool:
    """Whether this is a valid namespace name. Only such a name may become part of a URL."""
    return len(name) <= 63 and re.fullmatch(_LABEL, name) is not None


def _safe(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", name.lower())


def collection(api_version: str, kind: str, namespace: str) -> str:
    """Return the URL path of all objects of a kind in a namespace."""
    return f"/{'apis' if '/' in api_version else 'api'}/{api_version}/namespaces/{namespace}/{kind.lower()}s"


def path_of(resource: Object, namespace: str) -> str:
    """Return the URL path of an existing object."""
    return f"{collection(resource['apiVersion'], resource['kind'], namespace)}/{resource['metadata']['name']}"


def owner(resource: Object) -> Object:
    """Return an owner reference to an existing object. Kubernetes deletes an object after the last of its owners."""
    metadata = {key: resource["metadata"][key] for key in ("name", "uid")}
    return {"apiVersion": resource["apiVersion"], "kind": resource["kind"], **metadata}
