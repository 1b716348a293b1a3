# SPDX-License-Identifier: BSD-3-Clause
"""A Docker daemon of our own, in namespaces of its own, and an image of what is installed on this machine.

The daemon sees a network, mounts and processes of its own alone: its bridges, firewall rules, overlays, containers and
everything in them end with it, and it cannot touch what belongs to another daemon or to the tests over networks.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import docker
import psutil
from torchx.specs import BindMount

from tests.clusters import packages
from tests.waits import until

ROOT = Path(__file__).parents[3]

_PACKAGES = ("docker.io", "iptables")
"""Debian's. iptables redirects a container's DNS to the daemon's."""

_PROGRAMS = ("dockerd", "containerd", "runc", "docker-init", "iptables")

_UP_WITHIN = 300.0


def missing() -> str:
    """Why there can be no daemon here; empty when there can. Installs it where that is possible."""
    namespaces = ("--net", "--mount", "--pid", "--fork")
    return packages.unavailable("a Docker daemon of our own", namespaces, _PROGRAMS, _PACKAGES)


def mount_words(mounts: Sequence[BindMount]) -> str:
    """Return mounts as a component's ``--mounts`` has them."""
    return ",".join(
        f"type=bind,src={mount.src_path},dst={mount.dst_path}{',readonly' if mount.read_only else ''}"
        for mount in mounts
    )


class Daemon:
    """Starts with the object.

    Attributes:
        host: for DOCKER_HOST.
        image: id of the image.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tmdocker", dir="/tmp"))
        self.host = f"unix://{self.folder}/docker.sock"
        self._cgroup = f"tm{uuid.uuid4().hex[:8]}"
        dockerd = [
            "dockerd",
            *("--host", self.host, "--pidfile", f"{self.folder}/docker.pid"),
            *("--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec"),
            *("--config-file", f"{self.folder}/daemon.json"),
            # A network without the default one, and no firewall rules that nobody needs.
            *("--bridge", "none", "--iptables=false", "--ip-masq=false"),
            *("--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", f"/{self._cgroup}"),
        ]
        (self.folder / "daemon.json").write_text("{}")
        namespaces = [
            # If this process is killed, the daemon goes as well.
            *("setpriv", "--pdeathsig", "KILL", "--"),
            *("unshare", "--kill-child", "--fork", "--pid", "--mount-proc", "--net", "--mount"),
            *("--propagation", "private", "--"),
        ]
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [*namespaces, *dockerd],
                env={**os.environ, "PATH": packages.PATH, "GOGC": "400"},  # less garbage collection; memory suffices
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait()
            path = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
            self.image = self.import_image("tests", path, [f"ENV PYTHONPATH={ROOT}", "ENV HOME=/root"])
        except BaseException:
            self.stop()
            raise

    def client(self) -> docker.DockerClient:
        """A client of it, to be closed."""
        return docker.DockerClient(self.host)

    def _wait(self) -> None:
        def answers() -> bool:
            assert self._process.poll() is None, f"dockerd has ended:\n{(self.folder / 'log').read_text()[-3000:]}"
            # Not by docker-py, which leaves a socket open when it cannot connect.
            with socket.socket(socket.AF_UNIX) as probe:
                return probe.connect_ex(f"{self.folder}/docker.sock") == 0

        until(answers, "dockerd", _UP_WITHIN, every=0.1)

    def import_image(self, name: str, path: str, more: Sequence[str] = ()) -> str:
        """Make an image of empty folders, where those of this machine are to be mounted; return its id.

        It has a few kB, is from no registry, and its /opt has a ``python`` with nothing installed.

        Args:
            path: its PATH.
            more: further changes, as a Dockerfile has them.
        """
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:

            def add(
                name: str, kind: bytes = tarfile.DIRTYPE, content: bytes = b"", link: str = "", mode: int = 0o755
            ) -> None:
                info = tarfile.TarInfo(name)
                info.type, info.mode, info.size, info.linkname = kind, mode, len(content), link
                tar.addfile(info, io.BytesIO(content))

            # A folder for docker-init, which dockerd mounts there and which would lie below the /usr of this machine.
            for folder in ("usr", "sbin", "etc", "root", "proc", "sys", "dev", "run", "var", "opt"):
                add(folder)
            add("tmp", mode=0o1777)
            for folder in ("bin", "lib", "lib64"):
                add(folder, tarfile.SYMTYPE, link=f"usr/{folder}")
            add("opt/python", tarfile.SYMTYPE, link="/usr/bin/python3")
            add("etc/passwd", tarfile.REGTYPE, b"root:x:0:0:root:/root:/bin/sh\n", mode=0o644)
            add("etc/group", tarfile.REGTYPE, b"root:x:0:\n", mode=0o644)
            add("etc/nsswitch.conf", tarfile.REGTYPE, b"hosts: files dns\n", mode=0o644)
            add("etc/ld.so.cache", tarfile.REGTYPE, Path("/etc/ld.so.cache").read_bytes(), mode=0o644)
        with contextlib.closing(self.client()) as client:
            client.api.import_image_from_data(data.getvalue(), name, "latest", [f"ENV PATH={path}", *more])
            return str(client.images.get(f"{name}:latest").id)

    def mounts(self, *more: Path) -> list[BindMount]:
        """What a container of the image needs to be as this machine is, read-only, and further folders to write to."""
        wanted = {Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), Path(os.path.realpath(sys.executable)), ROOT}
        paths = {path.parents[1] if path.is_file() else path for path in wanted}
        outer = [path for path in paths if not any(other in path.parents for other in paths)]
        mounts = [BindMount(str(path), str(path), read_only=True) for path in sorted(outer)]
        return [*mounts, *(BindMount(str(path), str(path)) for path in more)]

    @property
    def first(self) -> int:
        """The daemon's own process; number 1 to those it starts."""
        return int(psutil.Process(self._process.pid).children()[0].pid)

    def kill(self, container: str, signal: str = "KILL") -> None:
        """Signal a container's first process. After a ``docker kill``, dockerd would not start it again."""
        with contextlib.closing(self.client()) as client:
            pid = client.containers.get(container).attrs["State"]["Pid"]
        assert pid > 0, f"{container} does not run"
        within = ["nsenter", f"--target={self.first}", "--pid", "--mount", "--", "sh", "-c", f"kill -{signal} {pid}"]
        subprocess.run(within, check=True, timeout=240)

    def left(self) -> list[str]:
        """What is with the daemon: containers, volumes, networks of anybody's."""
        with contextlib.closing(self.client()) as client:
            containers = [f"container {container.name}" for container in client.containers.list(all=True)]
            volumes = [f"volume {volume.name}" for volume in client.volumes.list()]
            networks = [
                f"network {network.name}" for network in client.networks.list() if network.name not in ("none", "host")
            ]
        return containers + volumes + networks

    def stop(self) -> None:
        """End it, and everything that it has started, made and mounted.

        Raises:
            AssertionError: something is left.
        """
        with contextlib.suppress(psutil.Error, IndexError):
            os.kill(self.first, 9)  # its namespaces end with it, and all processes in them
        self._process.kill()
        self._process.wait(60)
        for path in list(self._cgroups()):
            _remove_group(path)
        ours = str(self.folder)
        packages.until_ended(ours)
        shutil.rmtree(self.folder)
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if ours in line]
        assert not mounts, f"mounts left: {mounts}"

    def _cgroups(self) -> Iterator[Path]:
        """The groups of its containers, children first; other daemons may remove theirs meanwhile."""
        for folder, _, _ in os.walk("/sys/fs/cgroup", topdown=False):
            if self._cgroup in Path(folder).parts:
                yield Path(folder)


def _remove_group(path: Path) -> None:
    """The processes in it were killed; they may be about to go."""

    def is_removed() -> bool:
        with contextlib.suppress(OSError):
            path.rmdir()
        return not path.exists()

    until(is_removed, f"the end of the processes in {path}", 60, every=0.05)


def of_a_run() -> Iterator[Daemon]:
    """For a fixture: a daemon as long as its tests run; they are skipped where there can be none, and fail in CI."""
    packages.skip_for(missing())
    started = Daemon()
    yield started
    started.stop()
