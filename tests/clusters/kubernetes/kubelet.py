# SPDX-License-Identifier: BSD-3-Clause
"""A stand-in for kubelet and the scheduler: one node, whose pods are processes of this machine in namespaces.

A pod has a network address, a host name, names of the other pods of its Services, /tmp, /dev/shm and processes of its
own; its image is this machine's file system. Images whose name has ``missing`` in it cannot be pulled. What it writes
into the status of a pod is what kubelet writes. Logs go the real way: client, kube-apiserver, this.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import traceback
import urllib.parse
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.clusters.kubernetes.network import Network
from torchx_monarch.backends.kubernetes.connection import Api, KubernetesError

NODE = "node-a"
ROOT = Path(__file__).parents[3]

_POLL = 0.1
_NAME_COMES_AFTER = 1.0
"""Seconds after a pod's start until others can resolve its name: the DNS of clusters is not faster."""


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def stamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


class Pod:
    """One pod: from when it is bound to its end. Its thread is ``run``."""

    def __init__(self, kubelet: Kubelet, pod: dict[str, Any]) -> None:
        self.kubelet = kubelet
        self.pod = pod
        metadata = pod["metadata"]
        self.namespace, self.name, self.uid = metadata["namespace"], metadata["name"], metadata["uid"]
        self.path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self.folder = kubelet.folder / "pods" / self.uid
        self.folder.mkdir(parents=True)
        self.log = self.folder / "log"
        self.log.touch()
        self.hosts = self.folder / "hosts"
        self.address = ""
        self.started = 0.0
        self.over = False
        self.stop_grace: float | None = None
        self.deadline_passed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._stop_begun = False

    @property
    def container(self) -> dict[str, Any]:
        first: dict[str, Any] = self.pod["spec"]["containers"][0]
        return first

    def run(self) -> None:
        """Its life."""
        try:
            self._run()
        except Exception:
            traceback.print_exc()
        finally:
            self.over = True
            self.kubelet.names_changed()

    def _run(self) -> None:
        begun = now()
        if not self._image_is_there(begun):
            return
        network, self.address = self.kubelet.network.add()
        try:
            env = self._environment(begun)
            if env is None:
                return
            self.started = time.monotonic()
            self.kubelet.names_changed()
            self._execute(network, env, begun)
        finally:
            self.kubelet.network.remove(network)

    def _image_is_there(self, begun: str) -> bool:
        image = self.container["image"]
        tries = 0
        while "missing" in image:
            reason = "ErrImagePull" if tries == 0 else "ImagePullBackOff"
            message = f"rpc error: {image} not found" if tries == 0 else f'Back-off pulling image "{image}"'
            if tries < 2:
                self._status("Pending", begun, {"waiting": {"reason": reason, "message": message}})
            tries += 1
            if self._ended_early():
                return False
            time.sleep(_POLL)
        return not self._ended_early()

    def _environment(self, begun: str) -> dict[str, str] | None:
        """What the container starts with; None when the pod was ended before there was a Secret."""
        told = ""
        while not self._ended_early():
            try:
                return self._resolved()
            except KubernetesError as error:
                if str(error) != told:
                    waiting = {"reason": "CreateContainerConfigError", "message": str(error)}
                    self._status("Pending", begun, {"waiting": waiting})
                told = str(error)
            time.sleep(_POLL)
        return None

    def _resolved(self) -> dict[str, str]:
        env: dict[str, str] = {}
        for variable in self.container.get("env") or ():
            source = variable.get("valueFrom") or {}
            if "fieldRef" in source:
                env[variable["name"]] = self._field(source["fieldRef"]["fieldPath"])
            elif "secretKeyRef" in source:
                ref = source["secretKeyRef"]
                secret = self.kubelet.api.get(f"/api/v1/namespaces/{self.namespace}/secrets/{ref['name']}")
                env[variable["name"]] = base64.b64decode(secret["data"][ref["key"]]).decode()
            else:
                env[variable["name"]] = expanded(variable.get("value") or "", env)
        return env

    def _field(self, path: str) -> str:
        if path == "status.podIP":
            return self.address
        if path == "spec.nodeName":
            return str(self.pod["spec"].get("nodeName", ""))
        if path.startswith("metadata.annotations["):
            return str(
                (self.pod["metadata"].get("annotations") or {}).get(path[len("metadata.annotations['") : -2], "")
            )
        return str(self.pod["metadata"][path.removeprefix("metadata.")])

    def _execute(self, network: str, env: dict[str, str], begun: str) -> None:
        termination = self.folder / "termination"
        termination.touch(mode=0o666)
        (self.folder / "outer").mkdir()
        self.kubelet.write_hosts(self)
        volumes = {volume["name"]: volume for volume in self.pod["spec"].get("volumes") or ()}
        mounts = [
            (volumes[mount["name"]]["hostPath"]["path"], mount["mountPath"])
            for mount in self.container.get("volumeMounts") or ()
            if "hostPath" in volumes.get(mount["name"], {})
        ]
        # What the image has of this machine, where it is in the /tmp that the pod does not see.
        of_image = {str(ROOT), sys.prefix, sys.base_prefix}
        mounts += [(path, path) for path in sorted(of_image) if path.startswith("/tmp/")]
        image = {"PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": "/root"}
        words = [*(self.container.get("command") or ()), *(self.container.get("args") or ())]
        spec = {
            "hostname": self.pod["spec"].get("hostname") or self.name,
            "hosts": str(self.hosts),
            "termination_log": str(termination),
            "outer": str(self.folder / "outer"),
            "mounts": mounts,
            "command": [expanded(word, env) for word in words],
            "env": {**image, **env},
        }
        (self.folder / "network").write_text(network)
        path = self.folder / "spec.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(spec))
        # If the kubelet is killed, its pods go as well; and with process 1 all others of the pod.
        begin = ["setpriv", "--pdeathsig", "KILL", "--", "nsenter", f"--net=/run/netns/{network}", "--", "unshare"]
        begin += ["--kill-child", "--fork", "--pid", "--mount-proc", "--mount", "--uts", "--ipc"]
        begin += ["--propagation", "private", "--", sys.executable, "-I", "-S"]
        started = now()
        self._process = subprocess.Popen(
            [*begin, str(Path(__file__).with_name("container.py")), str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"]},
        )
        self._status("Running", begun, {"running": {"startedAt": started}})
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        code = self._wait()
        reader.join(5)
        said = termination.read_text(errors="replace")[:4096]
        if not said and code and self.container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            lines = self.log.read_text(errors="replace").splitlines()[-80:]
            said = "\n".join(line.partition(" ")[2] for line in lines)[-2048:]
        ended = {
            "exitCode": code,
            "reason": "Error" if code else "Completed",
            "message": said,
            "startedAt": started,
            "finishedAt": now(),
        }
        extra = {}
        if self.deadline_passed:
            extra = {
                "reason": "DeadlineExceeded",
                "message": "Pod was active on the node longer than the specified deadline",
            }
        failed = code != 0 or self.deadline_passed
        self._status("Failed" if failed else "Succeeded", begun, {"terminated": ended}, extra)
        for leftover in ("spec.json", "hosts", "termination"):
            (self.folder / leftover).unlink()

    def _wait(self) -> int:
        assert self._process is not None
        kill_at = 0.0
        while (code := self._process.poll()) is None:
            if self.stop_grace is not None and not self._stop_begun:
                kill_at = time.monotonic() + self.stop_grace
                self._stop_begun = self._signal(signal.SIGTERM)
            if kill_at and time.monotonic() > kill_at:
                self._process.kill()
            time.sleep(_POLL / 2)
        return 128 - code if code < 0 else code

    def _signal(self, number: int) -> bool:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), number)
        return bool(children)

    def kill(self) -> None:
        """Kill all of it, as the loss of its machine would."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with open(self.log, "ab", buffering=0) as file:
            for line in self._process.stdout:
                file.write(f"{stamp()} ".encode() + line)
        self._process.stdout.close()

    def past_deadline(self, pod: dict[str, Any]) -> bool:
        """Whether its deadline has just passed."""
        seconds = pod["spec"].get("activeDeadlineSeconds")
        runs = self.started and not self.over and not self.deadline_passed
        return bool(seconds and runs and time.monotonic() > self.started + seconds)

    def _ended_early(self) -> bool:
        return self.stop_grace is not None

    def _status(self, phase: str, begun: str, state: dict[str, Any], extra: dict[str, Any] | None = None) -> None:
        running = phase == "Running"
        container = {
            "name": self.container["name"],
            "image": self.container["image"],
            "imageID": "",
            "ready": running,
            "restartCount": 0,
            "state": state,
        }
        status = {"phase": phase, "startTime": begun, "containerStatuses": [container], **(extra or {})}
        if self.address:
            status |= {"podIP": self.address, "hostIP": "127.0.0.1"}
        with contextlib.suppress(KubernetesError):  # deleted meanwhile
            self.kubelet.api.patch(f"{self.path}/status", {"status": status})


def expanded(text: str, env: dict[str, str]) -> str:
    """As kubelet expands ``$(NAME)``; two dollars are one."""
    found, position = [], 0
    while position < len(text):
        rest = text[position:]
        if rest.startswith("$$"):
            found.append("$")
            position += 2
        elif rest.startswith("$(") and ")" in rest:
            name = rest[2 : rest.index(")")]
            found.append(env.get(name, f"$({name})"))
            position += len(name) + 3
        else:
            found.append(text[position])
            position += 1
    return "".join(found)


class Kubelet:
    """The node. ``look`` is to be called again and again.

    Args:
        api: the API server, as an administrator.
        folder: for its files; it has ``tls.crt`` and ``tls.key``.
    """

    def __init__(self, api: Api, folder: Path) -> None:
        self.api = api
        self.folder = folder
        self.network = Network()
        (folder / "network").write_text(self.network.switch)
        self.pods: dict[str, Pod] = {}
        self.services: list[dict[str, Any]] = []
        self._names = threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(str(folder / "tls.crt"), str(folder / "tls.key"))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self._register()

    def _register(self) -> None:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": {"disk": "ssd"}}}
        self.api.create("/api/v1/nodes", node)
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "",
            "lastTransitionTime": now(),
        }
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._server.server_address[1]}},
            "conditions": [{**ready, "lastHeartbeatTime": now()}],
        }
        self.api.patch(f"/api/v1/nodes/{NODE}/status", {"status": status})

    def look(self, listed: list[dict[str, Any]]) -> None:
        """Bind, start, stop and remove pods, as the API server lists them now."""
        for pod in listed:
            metadata = pod["metadata"]
            uid, phase = metadata["uid"], pod["status"].get("phase")
            mine = self.pods.get(uid)
            if not pod["spec"].get("nodeName"):
                if "deletionTimestamp" in metadata:
                    self._remove(pod)
                else:
                    self._schedule(pod)
            elif mine is None:
                if phase == "Pending" and "deletionTimestamp" not in metadata:
                    mine = self.pods[uid] = Pod(self, pod)
                    threading.Thread(target=mine.run, name=metadata["name"], daemon=True).start()
                elif "deletionTimestamp" in metadata:
                    self._remove(pod)
            elif "deletionTimestamp" in metadata:
                mine.stop_grace = float(metadata.get("deletionGracePeriodSeconds") or 0)
                if mine.over:
                    self._remove(pod)
            elif mine.past_deadline(pod):
                mine.deadline_passed = True
                mine.stop_grace = float(pod["spec"]["terminationGracePeriodSeconds"])
        for uid in set(self.pods) - {pod["metadata"]["uid"] for pod in listed}:
            gone = self.pods[uid]
            if gone.over:
                shutil.rmtree(gone.folder, ignore_errors=True)
                del self.pods[uid]
            else:
                gone.stop_grace = 0.0  # removed by force
        if self._names.is_set() or any(not pod.over for pod in self.pods.values()):
            self._names.clear()
            for run_pod in list(self.pods.values()):
                if not run_pod.over:
                    self.write_hosts(run_pod)

    def _schedule(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        wanted = pod["spec"].get("nodeSelector") or {}
        if not wanted.items() <= {"disk": "ssd"}.items():
            if not pod["status"].get("conditions"):
                message = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
                self.api.patch(f"{path}/status", {"status": {"conditions": [condition]}})
            return
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}}
        with contextlib.suppress(KubernetesError):
            self.api.create(f"{path}/binding", {**binding, "target": {"kind": "Node", "name": NODE}})

    def _remove(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        self.api.delete(path, gracePeriodSeconds="0")

    def names_changed(self) -> None:
        self._names.set()

    def write_hosts(self, pod: Pod) -> None:
        """Have a pod know the others of its namespace by the names that the DNS would have."""
        spec = pod.pod["spec"]
        lines = ["127.0.0.1 localhost", f"{pod.address} {spec.get('hostname') or pod.name}"]
        for run_pod in list(self.pods.values()):
            theirs = run_pod.pod["spec"]
            ready = run_pod.started and time.monotonic() > run_pod.started + _NAME_COMES_AFTER
            if run_pod.namespace == pod.namespace and theirs.get("subdomain") and ready and not run_pod.over:
                name = f"{theirs['hostname']}.{theirs['subdomain']}"
                lines.append(f"{run_pod.address} {name} {name}.{run_pod.namespace}.svc")
        for service in self.services:
            address, metadata = service["spec"].get("clusterIP", "None"), service["metadata"]
            if metadata["namespace"] == pod.namespace and address != "None":
                lines.append(f"{address} {metadata['name']}")
        text = "\n".join(lines) + "\n"
        if not pod.hosts.exists() or pod.hosts.read_text() != text:
            # In place, because it is mounted, and never empty: a name that goes and comes would mislead a program.
            descriptor = os.open(pod.hosts, os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(descriptor, text.encode(), 0)
            os.ftruncate(descriptor, len(text.encode()))
            os.close(descriptor)

    def close(self) -> None:
        """Kill all pods."""
        for run_pod in self.pods.values():
            run_pod.kill()
        until = time.monotonic() + 10
        while any(not pod.over for pod in self.pods.values()) and time.monotonic() < until:
            time.sleep(0.02)
        self.network.remove()
        self._server.shutdown()
        self._server.server_close()

    # -- logs ----------------------------------------------------------------------------------------------------------

    def _log_lines(self, pod: Pod, follow: bool) -> Iterator[bytes]:
        with open(pod.log, "rb") as file:
            rest = b""
            while True:
                over = pod.over  # in this order: what was written before the end is read after it is known
                rest += file.read()
                *whole, rest = rest.split(b"\n")
                yield from (line + b"\n" for line in whole)
                if over or not follow:
                    break
                time.sleep(_POLL)
            if rest:
                yield rest

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        kubelet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                url = urllib.parse.urlparse(self.path)
                words = url.path.strip("/").split("/")
                query = dict(urllib.parse.parse_qsl(url.query))
                found = [pod for pod in list(kubelet.pods.values()) if words[1:3] == [pod.namespace, pod.name]]
                if words[0] != "containerLogs" or not found:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/plain")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                since = query.get("sinceTime", "")
                try:
                    for line in kubelet._log_lines(found[-1], query.get("follow") == "true"):
                        if since and line.decode(errors="replace")[:19] < since[:19]:
                            continue
                        if query.get("timestamps") != "true":
                            line = line.partition(b" ")[2]
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                    self.wfile.write(b"0\r\n\r\n")
                except OSError:
                    self.close_connection = True

        return Handler
