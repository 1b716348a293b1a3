# SPDX-License-Identifier: BSD-3-Clause
"""Read the records, Jobs and pods of apps from the API server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchx_monarch.backends.kubernetes import names
from torchx_monarch.backends.kubernetes.native import Api, KubernetesError
from torchx_monarch.backends.kubernetes.request import VOLCANO, Object, collection


@dataclass(frozen=True)
class AppObjects:
    """The objects of one app.

    Attributes:
        mode: ``job`` or ``volcano``.
        namespace: their namespace.
        record: the object that carries the app's annotations: the Service, or the Volcano job.
        jobs: the existing Jobs in mode ``job``; empty in mode ``volcano``.
        pods: the existing pods.
        refusals: why the Job controller cannot create pods, by the uid of the Job.
    """

    mode: str
    namespace: str
    record: Object
    jobs: Sequence[Object] = ()
    pods: Sequence[Object] = ()
    refusals: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The app's id without the namespace."""
        return str(self.record["metadata"]["name"])


def find(api: Api, namespace: str, name: str) -> AppObjects | None:
    """Return the objects of an app; None if this scheduler has no app of this id.

    Raises:
        KubernetesError: the cluster is unreachable or refuses.
    """
    selector = f"{names.LABEL_APP}={name}"
    mode, record = "job", api.find(f"{collection('v1', 'Service', namespace)}/{name}")
    if record is None or not _is_record(record):
        mode, record = "volcano", api.find(f"{collection(VOLCANO, 'Job', namespace)}/{name}")
    if record is None or not _is_record(record):
        return None
    jobs = api.items(collection("batch/v1", "Job", namespace), selector) if mode == "job" else []
    return AppObjects(mode, namespace, record, jobs, api.items(collection("v1", "Pod", namespace), selector))


def find_all(api: Api, namespace: str) -> list[AppObjects]:
    """Return the objects of all apps of this scheduler in a namespace, the newest app first.

    Raises:
        KubernetesError: the cluster is unreachable or refuses.
    """
    label = names.LABEL_APP
    jobs = _by_app(api.items(collection("batch/v1", "Job", namespace), label))
    pods = _by_app(api.items(collection("v1", "Pod", namespace), label))
    services = api.items(collection("v1", "Service", namespace), label)
    volcano = api.items(collection(VOLCANO, "Job", namespace), label) if has_volcano(api) else []
    found = []
    for mode, records in (("job", services), ("volcano", volcano)):
        for record in filter(_is_record, records):
            name = record["metadata"]["name"]
            its_jobs = jobs.get(name, []) if mode == "job" else []
            found.append(AppObjects(mode, namespace, record, its_jobs, pods.get(name, [])))
    return sorted(found, key=lambda app: str(app.record["metadata"]["creationTimestamp"]), reverse=True)


def has_volcano(api: Api) -> bool:
    """Whether Volcano is installed in the cluster.

    Raises:
        KubernetesError: the cluster is unreachable or refuses.
    """
    return api.find(f"/apis/{VOLCANO}") is not None


def with_refusals(api: Api, app: AppObjects) -> AppObjects:
    """Return the objects of an app with the reasons for which Jobs without pods cannot get any.

    Only the Jobs' FailedCreate events contain the reason. No reasons are known if the user may not read events.

    Raises:
        KubernetesError: the cluster is unreachable or refuses.
    """
    have = {owner["uid"] for pod in app.pods for owner in pod["metadata"].get("ownerReferences") or ()}
    found = {}
    for job in app.jobs:
        uid = job["metadata"]["uid"]
        ended = any(
            condition.get("status") == "True" for condition in (job.get("status") or {}).get("conditions") or ()
        )
        if uid in have or ended or job["spec"].get("suspend"):
            continue
        wanted = f"involvedObject.uid={uid},reason=FailedCreate"
        try:
            events = api.get(collection("v1", "Event", app.namespace), fieldSelector=wanted)["items"]
        except KubernetesError as error:
            if error.status != 403:  # a user may have access to Jobs and not to events
                raise
            return app
        if events:
            last = max(
                events, key=lambda event: str(event.get("lastTimestamp") or event["metadata"]["creationTimestamp"])
            )
            found[uid] = f"gets no pods: {str(last.get('message', '')).removeprefix('Error creating: ')}"
    return replace(app, refusals=found)


def _is_record(resource: Object) -> bool:
    return names.ANNOTATION_APP in (resource["metadata"].get("annotations") or {})


def _by_app(objects: Iterable[Object]) -> dict[str, list[Object]]:
    found: dict[str, list[Object]] = {}
    for resource in objects:
        found.setdefault(resource["metadata"]["labels"][names.LABEL_APP], []).append(resource)
    return found
