# SPDX-License-Identifier: BSD-3-Clause
"""Apps on monarch_kubernetes, through TorchX's Runner here, and through its command in processes of their own."""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import shutil
import subprocess
import textwrap
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import Resource, Role

from tests.clusters.kubernetes.cluster import WIRE, Cluster
from tests.contract.place import Place
from tests.network import namespaces
from tests.network.relay import Relay
from tests.waits import WITHIN, until
from torchx_monarch.backends.kubernetes.connection import Api
from torchx_monarch.backends.kubernetes.request import LABEL_APP
from torchx_monarch.client.connection import Target
from torchx_monarch.schedulers import monarch_kubernetes

NAME = "monarch_kubernetes"


class Apps(Place):
    """A cluster, and on it a namespace of its own. KUBECONFIG must name the cluster.

    Nothing is shared with the pods but what any cluster has: a program travels in the command, and what a test tells it
    later is a name in the cluster's DNS.

    Args:
        cluster: where they run.
        folder: for files of this machine.
    """

    name = NAME
    factory = staticmethod(monarch_kubernetes)
    wire = WIRE
    wires = dict.fromkeys(("bad options named", "missing tool says what to install"), "real")
    request_function = "torchx_monarch.backends.kubernetes.connection:Api._send"
    keeps_preempted_logs = keeps_events = False
    own_bad_options = (
        ({"mode": "volcano"}, "no run option `mode` any more: each role is an Indexed Job.*wrap TorchX's scheduler"),
        ({"kueu_queue": "a"}, "kueu_queue.*kueue_queue"),
        ({"pull_timeout": -1}, "`pull_timeout` is -1; allowed is 0 or more"),
        ({"namespace": "No Such"}, "`namespace` is 'No Such'; a namespace is called by up to 63 lower-case letters"),
    )
    package = "kubernetes"
    install = "pip install 'kubernetes>=29,!=37.0.2'"
    has_machines = replaces_machines = True
    resource = Resource(cpu=-1, gpu=0, memMB=-1)

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.image = cluster.image
        self.patience = cluster.patience
        self.api = Api.from_environment()
        self.namespace = f"tests-{uuid.uuid4().hex[:6]}"
        self.api.create("/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": self.namespace}})
        self._programs: dict[str, str] = {}
        self.cfg = {"preload": "none", "grace": 3, "namespace": self.namespace}
        self.list_cfg = {"namespace": self.namespace}
        super().__init__(folder)

    def is_read(self, *request: Any) -> bool:
        """Return whether a request of ours changes nothing."""
        return bool(request[1] == "GET")

    def program(self, text: str) -> str:
        """A program for ``torchrun``; the path that it is to have in the pods."""
        path = f"/tmp/prog{len(self._programs)}.py"
        self._programs[path] = textwrap.dedent(text)
        return path

    def torchrun(self, *words: str, nproc: int = 2, replicas: int = 2, **more: Any) -> Role:
        """A role of ranks; the program among the words, if it is one of ours, comes along in the command."""
        role = super().torchrun(*words, nproc=nproc, replicas=replicas, **more)
        for path in [word for word in words if word in self._programs]:
            command = shlex.join([role.entrypoint, *role.args]).replace("$", "$$")
            text = self._programs[path].replace("$", "$$")
            role.entrypoint, role.args = "sh", ["-c", f'printf %s "$$0" > {path} && exec {command}', text]
        return role

    @property
    def hears(self) -> str:
        """The source of ``told(word)``: whether the name is known in the namespace's DNS."""
        return textwrap.dedent("""
            import socket
            def told(word):
                try:
                    return bool(socket.getaddrinfo(word, None))
                except OSError:
                    return False
        """)

    def tell(self, word: str) -> None:
        """Have a name be known in the namespace's DNS."""
        spec = {"ports": [{"port": 1}], "selector": {"nobody": "is"}}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": word}, "spec": spec}
        self.api.create(f"/api/v1/namespaces/{self.namespace}/services", service)

    def submit_script(self, script: Path, *args: str) -> str:
        """Submit a script whose text travels in the command: it is not in the image."""
        role = self.torchrun(self.program(script.read_text()), *args, nproc=1, env={"OMP_NUM_THREADS": "1"})
        return self.run(role, preload="torch")

    @contextlib.contextmanager
    def without_machine(self, handle: str, role: str, replica: int) -> Iterator[None]:
        """Kill what runs in a pod, and remove the pod, as the cluster does when its node has been away for minutes."""
        if self.cluster.stand_ins is None:
            pytest.skip("a node of the cluster is not ours to be switched off")
        (pod,) = [
            pod
            for pod in self.pods(handle)
            if pod["status"]["phase"] == "Running" and pod["spec"]["hostname"].endswith(f"-{role}-{replica}")
        ]
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{self.namespace}/pods/{metadata['name']}"
        network = Path(self.cluster.network(metadata["uid"])).name
        namespaces.ip("-n", network, "link", "set", "eth0", "down")  # no connection is closed
        namespaces.kill_all(network)
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
        self.api.patch(f"{path}/status", {"status": {"conditions": [condition]}})
        self.api.delete(path)
        yield

    def preempt(self, handle: str, replica: int) -> None:
        """Evict the pod, as when its node is drained."""
        name = self.pod(handle, replica)
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        new = self.api.find("/apis/policy/v1") is not None
        if not new:
            # A server of before 1.22 does not say so of the pod.
            condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
            self.api.patch(f"{path}/status", {"status": {"conditions": [condition]}})
        eviction = {"apiVersion": "policy/v1" if new else "policy/v1beta1", "kind": "Eviction"}
        self.api.create(f"{path}/eviction", {**eviction, "metadata": {"name": name, "namespace": self.namespace}})

    @contextlib.contextmanager
    def pending(self) -> Iterator[str]:
        """Ask for a node that is not there."""
        nowhere = Resource(cpu=1, gpu=0, memMB=1, capabilities={"example.com/zone": "none"})
        yield self.run(self.role("true", resource=nowhere, replicas=2))

    def credentials(self, handle: str) -> tuple[str, str]:
        """Return what the Secret holds, and the pods and Jobs."""
        path = f"/api/v1/namespaces/{self.namespace}/secrets/{handle.rpartition(':')[2]}"
        secret = base64.b64decode(self.api.get(path)["data"]["credentials"]).decode()
        jobs = self.api.get(f"/apis/batch/v1/namespaces/{self.namespace}/jobs")
        return secret, json.dumps([self.pods(handle), jobs])

    def everything(self, handle: str) -> str:
        """For the message of a failure."""
        found = [str(self.status(handle)), self.cluster.log()[-4000:]]
        for role in self.status(handle).roles:
            for replica in role.replicas:
                found += [
                    f"== {replica.role}/{replica.id} {replica.hostname}",
                    *self.lines(handle, replica.id, replica.role),
                ]
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

    @contextlib.contextmanager
    def reached(self, handle: str) -> Iterator[str]:
        """Yield the address to which the port of replica 0's pod is forwarded, as docs/how_to/live.md has it."""
        port = Target.from_handle(handle, runner=self.runner).address.port
        pod = next(pod for pod in self.pods(handle) if pod["metadata"]["name"] == self.pod(handle, 0))
        if self.cluster.stand_ins is not None:
            with Relay(port, self.cluster.network(pod["metadata"]["uid"])) as relay:
                yield f"localhost:{relay.port}"
            return
        if shutil.which("kubectl") is None:
            pytest.skip("a port of a pod of the cluster is forwarded by kubectl, which is not installed")
        where = ["kubectl", "--kubeconfig", str(self.cluster.kubeconfig), "--namespace", self.namespace]
        command = [*where, "port-forward", f"pod/{pod['metadata']['name']}", f":{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forward:
            try:
                assert forward.stdout is not None
                said = forward.stdout.readline()  # Forwarding from 127.0.0.1:40404 -> 24123
                assert " -> " in said, f"{' '.join(command)}: {said}"
                yield "localhost:" + said.partition(" -> ")[0].rpartition(":")[2]
            finally:
                forward.terminate()

    def client(self, handle: str) -> tuple[Sequence[str], str]:
        """Enter the network of the pods."""
        if self.cluster.stand_ins is None:
            pytest.skip("a Monarch client dials every host, and this machine is not in the network of the pods")
        there = Target.from_handle(handle, runner=self.runner).address
        return ("nsenter", f"--net={self.cluster.network()}"), f"{there.host}:{there.port}"

    def left(self, handle: str = "") -> list[str]:
        """Return what is in the namespace that is ours."""
        found = []
        for path in ("/api/v1", "/apis/batch/v1"):
            for kind in ("pods", "services", "secrets") if path == "/api/v1" else ("jobs",):
                items = self.api.items(f"{path}/namespaces/{self.namespace}/{kind}", LABEL_APP)
                found += [f"{kind}/{item['metadata']['name']}" for item in items]
        return found

    def close(self) -> None:
        """Deletes all of them."""
        for app in self.runner.list(NAME, cfg={"namespace": self.namespace}):
            self.runner.delete(app.app_handle)
        try:
            what = lambda: f"the end of {self.left()}\n{self.cluster.log()[-3000:]}"  # noqa: E731
            until(lambda: not self.left(), what, WITHIN * self.patience, every=0.1)
        finally:
            self.runner.close()
            self.api.delete(f"/api/v1/namespaces/{self.namespace}")
            self.api.close()
