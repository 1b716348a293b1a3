# SPDX-License-Identifier: BSD-3-Clause
"""A real kube-apiserver with etcd and some of its controllers, built once by ``build.sh``, on ports of 127.0.0.1."""

from __future__ import annotations

import os
import secrets
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.ports import free_port
from tests.waits import WITHIN, until

VERSION = "1.20.2"

_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "etcd")
_BUILD_WITHIN = 1200.0
"""Seconds; two idle processors take a tenth of them."""

_UP_WITHIN = 300.0
_DOWN_WITHIN = 60.0


def cache() -> Path:
    """Where the programs are, or are to be, built."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root, "torchx-monarch-tests", f"kubernetes-{VERSION}")


def missing() -> str:
    """Why there can be no server here; empty when there can. Builds it where that is possible."""
    if shutil.which("openssl") is None:
        return "a Kubernetes API server needs a certificate, and there is no openssl to make it"
    if all((cache() / name).exists() for name in _PROGRAMS):
        return ""
    lacking = [name for name in ("apt-get", "dpkg", "bash") if shutil.which(name) is None]
    if lacking:
        return f"a Kubernetes API server is built from Debian's packages, and there is no {' and no '.join(lacking)}"
    log = Path(f"{cache()}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as file:
        # Which ends all that the build has started, should it take too long.
        within = ["timeout", "--kill-after=10", f"{_BUILD_WITHIN:g}"]
        build = [*within, "bash", str(Path(__file__).with_name("build.sh")), str(cache())]
        done = subprocess.run(build, stdout=file, stderr=file, check=False, timeout=_BUILD_WITHIN + WITHIN)
    if done.returncode:
        return f"the Kubernetes API server could not be built: {log.read_text(errors='replace')[-800:]}"
    log.unlink()
    return ""


def certificate(folder: Path) -> None:
    """Make ``tls.crt`` and ``tls.key``, for 127.0.0.1, strict enough for every client."""
    extensions = (
        "subjectAltName=IP:127.0.0.1,DNS:localhost",
        "keyUsage=critical,digitalSignature,keyCertSign,cRLSign",
        "extendedKeyUsage=serverAuth",
    )
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=tests"]
    words += ["-keyout", f"{folder}/tls.key", "-out", f"{folder}/tls.crt"]
    words += [word for extension in extensions for word in ("-addext", extension)]
    subprocess.run(words, check=True, capture_output=True, timeout=WITHIN)


class Server:
    """Starts with ``up``.

    Args:
        folder: for its files.
    """

    owner = ("setpriv", "--pdeathsig", "KILL", "--")
    """Words before a command that make it die with this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._token = secrets.token_hex(16)
        self.port, self._etcd, self._peer, self._manager = (free_port() for _ in range(4))

    def up(self) -> None:
        """Start all of it; returns when the server is ready."""
        certificate(self.folder)
        tokens = self.folder / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(f'{self._token},admin,admin,"system:masters"\n')
        etcd = f"http://127.0.0.1:{self._etcd}"
        peer = f"http://127.0.0.1:{self._peer}"
        self._start(
            "etcd",
            f"--data-dir={self.folder}/etcd",
            "--unsafe-no-fsync",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        key = f"{self.folder}/tls.key"
        self._start(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            *("--bind-address=127.0.0.1", f"--secure-port={self.port}", "--insecure-port=0"),
            *("--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none"),
            *(f"--tls-cert-file={self.folder}/tls.crt", f"--tls-private-key-file={key}"),
            *(f"--cert-dir={self.folder}/certs", "--service-cluster-ip-range=10.96.0.0/24"),
            *("--authorization-mode=RBAC", f"--token-auth-file={tokens}"),
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            *("--service-account-issuer=https://tests", "--disable-admission-plugins=ServiceAccount"),
            "--feature-gates=TTLAfterFinished=true",
            # Without these it takes half the processor time, of which an idle one takes 3 %.
            *("--enable-priority-and-fairness=false", "--runtime-config=api/beta=false,policy/v1beta1=true"),
        )
        self.wait("kube-apiserver", self.is_ready)
        config = self.kubeconfig(f"https://127.0.0.1:{self.port}", "direct")
        # Not that of Jobs: this release knows no Indexed ones. See node.py.
        self._start(
            "kube-controller-manager",
            *(f"--kubeconfig={config}", "--leader-elect=false", "--port=0", f"--secure-port={self._manager}"),
            *("--bind-address=127.0.0.1", f"--cert-dir={self.folder}/certs-manager"),
            "--controllers=namespace,garbagecollector,resourcequota,ttl-after-finished",
            "--use-service-account-credentials=false",
            *(f"--service-account-private-key-file={key}", "--feature-gates=TTLAfterFinished=true"),
        )

    def _start(self, name: str, *options: str) -> None:
        with open(self.folder / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                [*self.owner, str(cache() / name), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                # Less garbage collection: the machine has memory to spare, and not processors.
                env={"PATH": os.environ["PATH"], "HOME": str(self.folder), "GOGC": "400"},
            )

    def wait(self, name: str, ready: Callable[[], object]) -> None:
        """Wait until a process of ours is ready."""

        def is_up() -> object:
            log = (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]
            for other, process in self.processes.items():
                assert process.poll() is None, f"{other} has ended; {name}: {log}"
            return ready()

        until(is_up, name, _UP_WITHIN, every=0.1)

    def is_ready(self) -> bool:
        """Whether it answers."""
        context = ssl.create_default_context(cafile=str(self.folder / "tls.crt"))
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}/readyz", headers={"Authorization": f"Bearer {self._token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def kubeconfig(self, server: str, name: str) -> Path:
        """Write an administrator's; its path."""
        path = self.folder / f"{name}.yaml"
        path.touch(mode=0o600)
        cluster = {"server": server, "certificate-authority": str(self.folder / "tls.crt")}
        context = {"cluster": "tests", "user": "admin", "namespace": "default"}
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "tests",
                    "clusters": [{"name": "tests", "cluster": cluster}],
                    "contexts": [{"name": "tests", "context": context}],
                    "users": [{"name": "admin", "user": {"token": self._token}}],
                }
            )
        )
        return path

    def down(self) -> None:
        """End all of it, the last started first."""
        for process in reversed(self.processes.values()):
            process.terminate()
            try:
                process.wait(_DOWN_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()
