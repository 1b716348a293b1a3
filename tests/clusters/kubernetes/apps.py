# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apps on monarch_kubernetes, through TorchX's Runner here, and through its command in processes of their own."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchx.specs import AppDef, AppState, AppStatus, BindMount, Resource, Role

from tests.clusters.apps import BaseApps
from tests.clusters.kubernetes.cluster import Cluster
from torchx_monarch.backends.kubernetes.api import Api
from torchx_monarch.backends.kubernetes.names import LABEL_APP
from torchx_monarch.schedulers import monarch_kubernetes

NAME = "monarch_kubernetes"


class Apps(BaseApps):
    """A Runner, and shorthands, in a namespace of its own. KUBECONFIG must name the cluster.

    Args:
        cluster: where they run.
        folder: where programs are written; every pod sees it.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.api = Api.of_here()
        self.namespace = f"tests-{uuid.uuid4().hex[:6]}"
        self.api.create("/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": self.namespace}})
        super().__init__(folder, {NAME: monarch_kubernetes})

    def role(self, entrypoint: str, *args: str, name: str = "trainer", replicas: int = 1, **more: Any) -> Role:
        """A role that sees the folder."""
        return Role(
            name,
            image=more.pop("image", self.cluster.image),
            entrypoint=entrypoint,
            args=list(args),
            num_replicas=replicas,
            mounts=[BindMount(str(self.folder), str(self.folder))],
            resource=more.pop("resource", Resource(cpu=-1, gpu=0, memMB=-1)),
            **more,
        )

    def run(self, *roles: Role, name: str = "app", **cfg: Any) -> str:
        """Submits; the handle."""
        options = {"preload": "none", "grace": 3, "namespace": self.namespace, "mode": "job", **cfg}
        app = AppDef(name, list(roles), {"team": "a b"})
        handle: str = self.runner.run(app, NAME, cfg=options, workspace=None)
        return handle

    def until(self, condition: Callable[[], object], what: str, handle: str, seconds: float = 60.0) -> None:
        """Poll until it holds."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                raise AssertionError(f"waited {seconds:g} s in vain for {what}\n{self.everything(handle)}")
            time.sleep(0.1)

    def until_true(self, condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        """Poll until it holds, of what is no app's."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"waited {seconds:g} s in vain for {what}"
            time.sleep(0.1)

    def wait(self, handle: str, state: AppState, seconds: float = 60.0) -> AppStatus:
        """Its final status, which must be this state."""
        self.until(lambda: self.status(handle).is_terminal(), "the end", handle, seconds)
        status = self.status(handle)
        assert status.state is state, f"{status}\n{self.everything(handle)}"
        return status

    def everything(self, handle: str) -> str:
        """For the message of a failure."""
        found = [str(self.status(handle)), self.cluster.log()[-4000:]]
        for role in self.status(handle).roles:
            for one in role.replicas:
                found += [f"== {one.role}/{one.id} {one.hostname}", *self.lines(handle, one.id, one.role)]
        return "\n".join(found)

    def pods(self, handle: str) -> list[dict[str, Any]]:
        """Its pods, the oldest first."""
        name = handle.rpartition(":")[2]
        found = self.api.items(f"/api/v1/namespaces/{self.namespace}/pods", f"{LABEL_APP}={name}")
        return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def pod(self, handle: str, replica: int) -> str:
        """The name of the pod of a replica of the first role that runs."""
        found = [
            pod["metadata"]["name"]
            for pod in self.pods(handle)
            if pod["status"]["phase"] == "Running" and pod["spec"]["hostname"].endswith(f"-{replica}")
        ]
        assert len(found) == 1, found
        return str(found[0])

    def kill(self, handle: str, replica: int) -> None:
        """Kill everything in a replica's pod at once."""
        pod = self.pod(handle, replica)
        # With the process that holds its namespaces all others go; its command line names the pod's folder.
        uid = next(one["metadata"]["uid"] for one in self.pods(handle) if one["metadata"]["name"] == pod)
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            except OSError:
                continue
            if any(word.endswith(f"{uid}/spec.json".encode()) for word in words) and words[0].endswith(b"unshare"):
                os.kill(int(entry.name), 9)
                return
        raise AssertionError(f"nothing runs for {pod}")

    def left(self) -> list[str]:
        """What is in the namespace that is ours."""
        found = []
        for path in ("/api/v1", "/apis/batch/v1"):
            for kind in ("pods", "services", "secrets") if path == "/api/v1" else ("jobs",):
                items = self.api.items(f"{path}/namespaces/{self.namespace}/{kind}", LABEL_APP)
                found += [f"{kind}/{one['metadata']['name']}" for one in items]
        return found

    def close(self) -> None:
        """Deletes all of them."""
        for app in self.runner.list(NAME, cfg={"namespace": self.namespace}):
            self.runner.delete(app.app_handle)
        until = time.monotonic() + 30
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(0.1)
        self.runner.close()
        self.api.delete(f"/api/v1/namespaces/{self.namespace}")
        self.api.close()
        assert not left, f"left in the cluster: {left}\n{self.cluster.log()[-3000:]}"
