# SPDX-License-Identifier: BSD-3-Clause
"""Check the cluster and the user's rights for ``torchx monarch doctor``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchx_monarch.backends.kubernetes import objects
from torchx_monarch.backends.kubernetes.native import Api
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.model.check_result import CheckResult, check

_OLDEST = (1, 29)
"""The oldest Kubernetes with what ``mode=job`` needs."""

_REVIEW = "authorization.k8s.io/v1"

_RIGHTS = (
    *(("", "services", "create"), ("", "secrets", "create"), ("", "secrets", "patch")),
    *(("", "pods", "list"), ("", "pods", "delete"), ("", "pods/log", "get")),
)
"""Group, resource and verb of the rights that both modes need; docs/how_to/set_up_security.md has all."""

_JOB, _VOLCANO = (("batch", "jobs", "create"),), (("batch.volcano.sh", "jobs", "create"),)


def check_cluster(api: Api, options: KubernetesOpts | None) -> Iterator[CheckResult]:
    """Check that jobs can be submitted with run options.

    Args:
        api: the cluster.
        options: the run options; None to check only that the cluster answers.

    Raises:
        KubernetesError: the cluster is unreachable or refuses.
    """
    version = str(api.get("/version").get("gitVersion", ""))
    found = re.match(r"v?(\d+)\.(\d+)", version)
    old = found is not None and (0, 0) < (int(found[1]), int(found[2])) < _OLDEST  # 0.0 is a build without a version
    advice = f"mode=job needs Kubernetes {_OLDEST[0]}.{_OLDEST[1]} or later" if old else ""
    yield check("Kubernetes", f"{version} at {api.host}", warn=advice)
    if options is None:
        return
    namespace = options.namespace or api.namespace
    volcano = objects.has_volcano(api)
    missing = options.mode == "volcano" and not volcano
    advice = "Volcano is not installed in the cluster; use -cfg mode=job" if missing else ""
    mode = "volcano" if options.mode == "auto" and volcano else "job" if options.mode == "auto" else options.mode
    yield check("mode", mode, fail=advice)
    rights = (*_RIGHTS, *(_VOLCANO if mode == "volcano" else _JOB))
    lacking = [f"{right[2]} {right[1]}" for right in rights if not _may(api, namespace, *right)]
    advice = f"you lack the rights to {', '.join(lacking)}; docs/how_to/set_up_security.md has a role with all"
    yield check("namespace", namespace, fail=advice if lacking else "")


def _may(api: Api, namespace: str, group: str, resource: str, verb: str) -> bool:
    """Return whether the user has a right in a namespace; True if the cluster does not tell."""
    name, _, part = resource.partition("/")
    attributes = {"namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": part}
    body = {"apiVersion": _REVIEW, "kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": attributes}}
    answer = api.create(f"/apis/{_REVIEW}/selfsubjectaccessreviews", body)
    return bool((answer.get("status") or {}).get("allowed", True))
