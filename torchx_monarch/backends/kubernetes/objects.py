# SPDX-License-Identifier: BSD-3-Clause
"""Read the records, Jobs and pods of apps from the API server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchx_monarch.backends.kubernetes import names
from torchx_monarch.backends.kubernetes.native import Api, KubernetesError
from torchx_monarch.backends.kubernetes.request import VOLCANO, Object, collection


@dataclass(frozen=True)
class AppObjects:
    """The objects of one app.

    Attributes:
        mode: ``job`` or ``volcano``.
        record: the object that carries the app's annotations: the Service, or the Volcano job.
        jobs: the existing Jobs in mode ``job``; empty in mode ``volcano``.
        pods: the existing pods.
    """

    mode: str
    namespace: str
    record: Object
    jobs: Sequence[Object] = ()
    pods: Sequence[Object] = ()

    @property
    def name(self) -> str:
        """The app's id without the namespace."""
        return str(self.record["metadata"]["name"])


def find(api: Api, namespace: str, name: str) -> AppObjects | None:
    """Return the objects of an app; None if this scheduler has no app of this id."""
    mode, record = "job", api.find(f"{collection('v1', 'Service', namespace)}/{name}")
    if record is None or not _is_record(record):
        mode, record = "volcano", api.find(f"{collection(VOLCANO, 'Job', namespace)}/{name}")
    if record is None or not _is_record(record):
        return None
    selector = f"{names.LABEL_APP}={name}"
    jobs = api.items(collection("batch/v1", "Job", namespace), selector) if mode == "job" else []
    return AppObjects(mode, namespace, record, jobs, api.items(collection("v1", "Pod", namespace), selector))


def find_all(api: Api, namespace: str) -> list[AppObjects]:
    """Return the objects of all apps of this scheduler in a namespace, the newest app first."""
    label = names.LABEL_APP
    jobs = _by_app(api.items(collection("batch/v1", "Job", namespace), label))
    pods = _by_app(api.items(collection("v1", "Pod", namespace), label))
    records = [("job", service) for service in api.items(collection("v1", "Service", namespace), label)]
    if has_volcano(api):
        records += [("volcano", job) for job in api.items(collection(VOLCANO, "Job", namespace), label)]
    apps = []
    for mode, record in records:
        if _is_record(record):
            name = record["metadata"]["name"]
            apps.append(AppObjects(mode, namespace, record, jobs.get(name, []), pods.get(name, [])))
    return sorted(apps, key=lambda app: str(app.record["metadata"]["creationTimestamp"]), reverse=True)


def has_volcano(api: Api) -> bool:
    """Whether Volcano is installed in the cluster."""
    return api.find(f"/apis/{VOLCANO}") is not None


def refusals(api: Api, app: AppObjects) -> dict[str, str]:
    """Return why open Jobs without pods cannot get any, by the Jobs' uids. Only FailedCreate events tell the reason."""
    with_pods = {owner["uid"] for pod in app.pods for owner in pod["metadata"].get("ownerReferences") or ()}
    found = {}
    for job in app.jobs:
        uid, conditions = job["metadata"]["uid"], (job.get("status") or {}).get("conditions") or ()
        has_ended = any(condition.get("status") == "True" for condition in conditions)
        if uid in with_pods or has_ended or job["spec"].get("suspend"):
            continue
        selector = f"involvedObject.uid={uid},reason=FailedCreate"
        try:
            events = api.get(collection("v1", "Event", app.namespace), fieldSelector=selector)["items"]
        except KubernetesError as error:
            if error.status != 403:  # a user may have access to Jobs and not to events
                raise
            return {}
        if events:
            last = max(events, key=lambda event: event.get("lastTimestamp") or event["metadata"]["creationTimestamp"])
            found[uid] = f"gets no pods: {str(last.get('message', '')).removeprefix('Error creating: ')}"
    return found


def _is_record(resource: Object) -> bool:
    return names.ANNOTATION_APP in (resource["metadata"].get("annotations") or {})


def _by_app(objects: Iterable[Object]) -> dict[str, list[Object]]:
    found: dict[str, list[Object]] = {}
    for resource in objects:
        found.setdefault(resource["metadata"]["labels"][names.LABEL_APP], []).append(resource)
    return found
