# SPDX-License-Identifier: BSD-3-Clause
"""The request for one app: its objects, in the form that the API server accepts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

Object = dict[str, Any]
"""A Kubernetes object, as decoded from JSON."""

VOLCANO = "batch.volcano.sh/v1alpha1"

SECRET_KEY = "credentials"
"""The key of an app's Secret."""

TERMINATION_VARIABLE = "MONARCH_TERMINATION_LOG"
"""The variable of a container that runs a host: the file for its termination message."""

_NO_CREDENTIALS = {SECRET_KEY: "(made when the job is submitted)"}
"""The content of the Secret until the app is submitted."""


@dataclass
class KubernetesRequest:
    """The request for one app.

    Attributes:
        mode: ``job`` or ``volcano``.
        app_id: the app's id without the namespace.
        objects: the objects in the order of their creation; the jobs own the others.
    """

    mode: str
    namespace: str
    app_id: str
    objects: list[Object]

    def __str__(self) -> str:
        return str(yaml.safe_dump_all(self.objects, sort_keys=False))


def secret(metadata: Object) -> Object:
    """Return the Secret for the credentials of an app's hosts, as yet without them."""
    data = dict(_NO_CREDENTIALS)
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": data}


def with_credentials(objects: Iterable[Object], credentials: str) -> list[Object]:
    """Return the objects with the credentials in the app's Secret; the arguments are not changed."""
    data = {"stringData": {SECRET_KEY: credentials}}
    return [{**resource, **data} if resource.get("stringData") == _NO_CREDENTIALS else resource for resource in objects]


def collection(api_version: str, kind: str, namespace: str) -> str:
    """Return the URL path of all objects of a kind in a namespace."""
    return f"/{'apis' if '/' in api_version else 'api'}/{api_version}/namespaces/{namespace}/{kind.lower()}s"


def collection_of(resource: Object, namespace: str) -> str:
    """Return the URL path of the collection that an object belongs to."""
    return collection(resource["apiVersion"], resource["kind"], namespace)


def path_of(resource: Object, namespace: str) -> str:
    """Return the URL path of an existing object."""
    return f"{collection_of(resource, namespace)}/{resource['metadata']['name']}"


def owner(resource: Object) -> Object:
    """Return an owner reference to an existing object. Kubernetes deletes an object after the last of its owners."""
    metadata = {key: resource["metadata"][key] for key in ("name", "uid")}
    return {"apiVersion": resource["apiVersion"], "kind": resource["kind"], **metadata}
