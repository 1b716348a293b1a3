# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The request for one app: its objects, in the form that the API server accepts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

Object = dict[str, Any]
"""A Kubernetes object, as decoded from JSON."""

_PATHS = {
    ("v1", "Service"): "/api/v1/namespaces/{namespace}/services",
    ("v1", "Secret"): "/api/v1/namespaces/{namespace}/secrets",
    ("v1", "Pod"): "/api/v1/namespaces/{namespace}/pods",
    ("v1", "Event"): "/api/v1/namespaces/{namespace}/events",
    ("batch/v1", "Job"): "/apis/batch/v1/namespaces/{namespace}/jobs",
    ("batch.volcano.sh/v1alpha1", "Job"): "/apis/batch.volcano.sh/v1alpha1/namespaces/{namespace}/jobs",
}

VOLCANO = "batch.volcano.sh/v1alpha1"


@dataclass
class KubernetesRequest:
    """The request for one app.

    Attributes:
        mode: ``job`` or ``volcano``.
        namespace: the namespace of its objects.
        app_id: the app's id without the namespace.
        objects: the objects in the order of their creation; the last ones, the jobs, own the others.
        images_to_push: the result of ``DockerWorkspaceMixin.dryrun_push_images``; empty for none.
    """

    mode: str
    namespace: str
    app_id: str
    objects: list[Object]
    images_to_push: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(yaml.safe_dump_all(self.objects, sort_keys=False))


def collection(api_version: str, kind: str, namespace: str) -> str:
    """Return the URL path of all objects of a kind in a namespace."""
    return _PATHS[api_version, kind].format(namespace=namespace)


def collection_of(one: Object, namespace: str) -> str:
    """Return the URL path of the collection that an object belongs to."""
    return collection(one["apiVersion"], one["kind"], namespace)


def owner(one: Object) -> Object:
    """Return an owner reference to an existing object. Kubernetes deletes an object after the last of its owners."""
    return {
        "apiVersion": one["apiVersion"],
        "kind": one["kind"],
        "name": one["metadata"]["name"],
        "uid": one["metadata"]["uid"],
    }
