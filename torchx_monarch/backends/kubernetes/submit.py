# SPDX-License-Identifier: BSD-3-Clause
"""Create the objects of a request, or none of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from torchx_monarch.backends.kubernetes.native import Api, KubernetesError
from torchx_monarch.backends.kubernetes.request import (
    KubernetesRequest,
    Object,
    collection_of,
    owner,
    path_of,
    with_credentials,
)

_NEEDED = ("completionMode", "backoffLimitPerIndex")
"""Fields of a Job that a server older than 1.29 silently drops."""

_IN_FLIGHT = 0.5
"""Seconds after which an interrupted request has taken effect, if it takes effect at all."""

_log = logging.getLogger("torchx_monarch")


def validate(api: Api, request: KubernetesRequest) -> None:
    """Have the API server validate the objects of a request without storing them.

    Raises:
        KubernetesError: the cluster would refuse an object.
    """
    for resource in request.objects:
        _check_kept(resource, api.create(collection_of(resource, request.namespace), resource, dry_run=True))


def submit(api: Api, request: KubernetesRequest, credentials: str) -> None:
    """Create all objects of a request.

    Objects that are created after the jobs belong to them from the start; those created before are given to them last.

    Args:
        api: the cluster.
        request: the request.
        credentials: the credentials of its hosts.

    Raises:
        KubernetesError: an object could not be created; those created before are removed.
    """
    made: list[Object] = []
    doubtful: list[Object] = []
    try:
        for resource in with_credentials(request.objects, credentials):
            jobs = [owner(job) for job in made if job["kind"] == "Job"]
            if jobs and resource["kind"] != "Job":
                resource = {**resource, "metadata": {**resource["metadata"], "ownerReferences": jobs}}
            doubtful = [resource]
            made.append(api.create(collection_of(resource, request.namespace), resource))
            doubtful.clear()
            _check_kept(resource, made[-1])
        owners = [owner(job) for job in made if job["kind"] == "Job"]
        # The record, made first, comes last: by it an app is found whose Secret has no owner yet.
        for resource in reversed(made):
            if resource["kind"] != "Job" and not resource["metadata"].get("ownerReferences"):
                api.patch(path_of(resource, request.namespace), {"metadata": {"ownerReferences": owners}})
    except BaseException as error:
        # With a 4xx status the object was not created, and an object of that name may belong to another app.
        if isinstance(error, KubernetesError) and 400 <= error.status < 500:
            doubtful.clear()
        _remove(api, [*doubtful, *reversed(made)], request.namespace)
        if doubtful:
            time.sleep(_IN_FLIGHT)
            _remove(api, doubtful, request.namespace)
        raise


def _remove(api: Api, objects: Sequence[Object], namespace: str) -> None:
    """Delete the objects of a failed submission; log a warning for each object that cannot be deleted."""
    for resource in objects:
        try:
            api.delete(path_of(resource, namespace))
        except KubernetesError as error:
            what = f"{resource['kind'].lower()} {resource['metadata']['name']} --namespace {namespace}"
            _log.warning("not removed, to be done by `kubectl delete %s`: %s", what, error)


def _check_kept(sent: Object, stored: Object) -> None:
    """Check that the server has kept the fields of a Job that this package needs.

    Args:
        sent: the object in the request.
        stored: the object in the answer.

    Raises:
        KubernetesError: the server has dropped a field.
    """
    dropped = [key for key in _NEEDED if key in sent.get("spec", {}) and key not in stored.get("spec", {})]
    if dropped:
        raise KubernetesError(
            f"the cluster does not know {' and '.join(dropped)} of a Job: mode=job needs Kubernetes 1.29 or later"
        )
