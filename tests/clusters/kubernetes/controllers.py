# SPDX-License-Identifier: BSD-3-Clause
"""A stand-in for the controller of Indexed Jobs, as Kubernetes 1.29 has it.

What kube-apiserver 1.20 drops of a Job it finds in the annotation that ``api_proxy.py`` makes of it.
"""

from __future__ import annotations

import copy
import json
import time
import uuid
from typing import Any

from tests.clusters.kubernetes import api_proxy
from tests.clusters.kubernetes.kubelet import now
from torchx_monarch.backends.kubernetes.connection import Api, KubernetesError

INDEX = "batch.kubernetes.io/job-completion-index"

_BACKOFF = 0.3
"""Seconds until the first replacement; Kubernetes takes ten, and twice as long each time."""

Object = dict[str, Any]


class IndexedJobs:
    """``look`` is to be called again and again."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._counted: dict[str, dict[str, bool]] = {}
        self._failed_at: dict[tuple[str, int], float] = {}

    def look(self, pods: list[Object]) -> None:
        """Make, count and delete pods, and write the Jobs' status."""
        for job in self._api.get("/apis/batch/v1/jobs")["items"]:
            newer = json.loads((job["metadata"].get("annotations") or {}).get(api_proxy.SPEC, "{}"))
            if newer.get("completionMode") == "Indexed" and "deletionTimestamp" not in job["metadata"]:
                uid = job["metadata"]["uid"]
                mine = [pod for pod in pods if any(o["uid"] == uid for o in pod["metadata"].get("ownerReferences", ()))]
                try:
                    self._job(job, newer, mine)
                except KubernetesError as error:
                    if error.status not in (404, 409):
                        raise

    def _job(self, job: Object, newer: Object, pods: list[Object]) -> None:
        status = job.get("status") or {}
        if any(condition["type"] in ("Complete", "Failed") for condition in status.get("conditions") or ()):
            return
        uid = job["metadata"]["uid"]
        count = job["spec"]["completions"]
        seen = self._counted.setdefault(uid, {})  # of each pod that has failed or is gone: whether that counts
        by_index: dict[int, list[Object]] = {index: [] for index in range(count)}
        for pod in pods:
            by_index[int(pod["metadata"]["annotations"][INDEX])].append(pod)
        succeeded, failed = set(), set()
        for index, theirs in by_index.items():
            if any(pod["status"].get("phase") == "Succeeded" for pod in theirs):
                succeeded.add(index)
                continue
            final = False
            for pod in theirs:
                if pod["status"].get("phase") == "Failed" and pod["metadata"]["uid"] not in seen:
                    action = self._action(newer, pod)
                    seen[pod["metadata"]["uid"]] = action != "Ignore"
                    self._failed_at[uid, index] = time.monotonic()
                    final = final or action == "FailIndex"
                if "deletionTimestamp" in pod["metadata"] and pod["status"].get("phase") != "Failed":
                    self._failed_at[uid, index] = time.monotonic()
            failures = sum(seen.get(pod["metadata"]["uid"], False) for pod in theirs)
            key = f"final-{index}"
            seen[key] = seen.get(key, False) or final
            if seen[key] or failures > newer.get("backoffLimitPerIndex", 6):
                failed.add(index)
        self._conclude(job, newer, by_index, succeeded, failed)

    def _action(self, newer: Object, pod: Object) -> str:
        statuses = pod["status"].get("containerStatuses") or [{}]
        code = ((statuses[0].get("state") or {}).get("terminated") or {}).get("exitCode", 0)
        conditions = {condition["type"]: condition["status"] for condition in pod["status"].get("conditions") or ()}
        for rule in newer.get("podFailurePolicy", {}).get("rules", ()):
            if "onExitCodes" in rule and code in rule["onExitCodes"]["values"]:
                return str(rule["action"])
            if any(conditions.get(wanted["type"]) == wanted["status"] for wanted in rule.get("onPodConditions", ())):
                return str(rule["action"])
        return "Count"

    def _conclude(
        self, job: Object, newer: Object, by_index: dict[int, list[Object]], succeeded: set[int], failed: set[int]
    ) -> None:
        count, uid = len(by_index), job["metadata"]["uid"]
        active = [
            pod
            for theirs in by_index.values()
            for pod in theirs
            if pod["status"].get("phase") not in ("Succeeded", "Failed")
        ]
        too_many = "maxFailedIndexes" in newer and len(failed) > newer["maxFailedIndexes"]
        condition: Object | None = None
        if len(succeeded) == count:
            condition = {"type": "Complete", "reason": "CompletionsReached", "message": ""}
        elif too_many:
            condition = {"type": "Failed", "reason": "MaxFailedIndexesExceeded", "message": "too many failed indexes"}
        elif len(succeeded) + len(failed) == count and not active:
            condition = {"type": "Failed", "reason": "FailedIndexes", "message": "Job has failed indexes"}
        if too_many:
            for pod in active:
                self._api.delete(self._path(job, "pods", pod["metadata"]["name"]))
        elif condition is None and not newer.get("suspend"):
            for index, theirs in by_index.items():
                busy = any(pod in active for pod in theirs)
                since = self._failed_at.get((uid, index), 0.0)
                waited = time.monotonic() > since + _BACKOFF * 2 ** max(0, len(theirs) - 1)
                if index not in succeeded | failed and not busy and waited:
                    self._make(job, index)
        self._write(job, condition, succeeded, failed, len(active))

    def _make(self, job: Object, index: int) -> None:
        template = copy.deepcopy(job["spec"]["template"])
        name = job["metadata"]["name"]
        metadata = template["metadata"]
        metadata["name"] = f"{name}-{index}-{uuid.uuid4().hex[:5]}"
        metadata.setdefault("annotations", {})[INDEX] = str(index)
        metadata.setdefault("labels", {}).update({INDEX: str(index), "batch.kubernetes.io/job-name": name})
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        metadata["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": True}]
        template["spec"]["hostname"] = f"{name}-{index}"
        try:
            self._api.create(self._path(job, "pods"), {"apiVersion": "v1", "kind": "Pod", **template})
        except KubernetesError as error:
            if error.status != 403:
                raise
            self._failed_at[job["metadata"]["uid"], index] = time.monotonic()
            self._say(job, f"Error creating: {str(error).partition(' refuses: ')[2]}")

    def _say(self, job: Object, message: str) -> None:
        about = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            **{k: job["metadata"][k] for k in ("namespace", "name", "uid")},
        }
        path = f"/api/v1/namespaces/{job['metadata']['namespace']}/events"
        event = {"involvedObject": about, "reason": "FailedCreate", "type": "Warning", "message": message}
        name = f"{job['metadata']['name']}.{uuid.uuid4().hex[:16]}"
        self._api.create(path, {**event, "metadata": {"name": name}, "lastTimestamp": now()})

    def _write(self, job: Object, condition: Object | None, succeeded: set[int], failed: set[int], active: int) -> None:
        newer = {
            "completedIndexes": ",".join(map(str, sorted(succeeded))),
            "failedIndexes": ",".join(map(str, sorted(failed))),
        }
        if json.loads(job["metadata"]["annotations"].get(api_proxy.STATUS, "{}")) != newer:
            annotation = {api_proxy.STATUS: json.dumps(newer)}
            self._api.patch(self._path(job, "jobs", here=True), {"metadata": {"annotations": annotation}})
        status: Object = {"active": active, "succeeded": len(succeeded), "failed": len(failed)}
        status["startTime"] = (job.get("status") or {}).get("startTime") or now()
        if condition is not None:
            condition |= {"status": "True", "lastTransitionTime": now(), "lastProbeTime": now()}
            status["conditions"] = [condition]
            if condition["type"] == "Complete":
                status["completionTime"] = now()
        known = {key: (job.get("status") or {}).get(key, 0) for key in ("active", "succeeded", "failed")}
        if condition is not None or any(known[key] != status[key] for key in known):
            self._api.patch(f"{self._path(job, 'jobs', here=True)}/status", {"status": status})

    def _path(self, job: Object, kind: str, name: str = "", here: bool = False) -> str:
        root = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        path = f"{root}/namespaces/{job['metadata']['namespace']}/{kind}"
        name = job["metadata"]["name"] if here else name
        return f"{path}/{name}" if name else path
