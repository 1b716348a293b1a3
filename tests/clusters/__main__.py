# SPDX-License-Identifier: BSD-3-Clause
"""A cluster of the tests to work with by hand: ``python -m tests.clusters up|down NAME``, or ``make NAME-up``.

``up`` starts it under a process of its own and prints the variables that clients need; ``down`` ends it. Images are for
``--image "$IMAGE" --mounts "$MOUNTS"``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.waits import until
from torchx_monarch.backends.core import state_files
from torchx_monarch.system import processes

_FOLDER = Path("/tmp", f"torchx-monarch-clusters-{os.getuid()}-{zlib.crc32(__file__.encode()):08x}")
"""Of this checkout: ``down`` must not end what another one has started."""


def _require(reason: str) -> None:
    if reason:
        sys.exit(reason)


def _slurm(stack: ExitStack) -> dict[str, str]:
    """Start four nodes."""
    from tests.clusters.slurm.cluster import SlurmCluster, missing

    _require(missing())
    cluster = SlurmCluster(4)
    stack.callback(cluster.down)
    return {"SLURM_CONF": str(cluster.up().conf)}


def _ssh(stack: ExitStack) -> dict[str, str]:
    """Start three machines, m1 to m3."""
    from tests.clusters.ssh.machines import Machines, missing

    _require(missing())
    machines = Machines(3)
    stack.callback(machines.down)
    return machines.up().environ


def _docker(stack: ExitStack) -> dict[str, str]:
    """Start a daemon."""
    from tests.clusters.docker.daemon import Daemon, missing, mount_words

    _require(missing())
    daemon = Daemon()
    stack.callback(daemon.stop)
    return {"DOCKER_HOST": daemon.host, "IMAGE": daemon.image, "MOUNTS": mount_words(daemon.mounts())}


def _kubernetes(stack: ExitStack) -> dict[str, str]:
    """Start an API server with its stand-ins; the further variables are for runs of the tests there."""
    from tests.clusters.kubernetes.cluster import Cluster, missing

    _require(missing())
    cluster = Cluster().up()
    stack.callback(cluster.down)
    config = str(cluster.kubeconfig)
    further = {"TEST_KUBECONFIG": config, "TEST_IMAGE": cluster.image, "TEST_KUBE_WIRE": "api-server"}
    return {"KUBECONFIG": config, **further}


def _aws_batch(stack: ExitStack) -> dict[str, str]:
    """Start moto's AWS with the daemon that runs its jobs; the queue is for ``-cfg queue="$QUEUE"``."""
    from tests.clusters.aws_batch.apps import CREDENTIALS, with_docker
    from tests.clusters.aws_batch.server import QUEUES
    from tests.clusters.docker.daemon import Daemon, missing, mount_words

    _require(missing())
    daemon = Daemon()
    stack.callback(daemon.stop)
    aws = with_docker(daemon)
    stack.callback(aws.stop)
    image = {"DOCKER_HOST": daemon.host, "IMAGE": "tests:latest", "MOUNTS": mount_words(daemon.mounts())}
    return {"AWS_ENDPOINT_URL": aws.url, **CREDENTIALS, "QUEUE": QUEUES[0], **image}


CLUSTERS: dict[str, Callable[[ExitStack], dict[str, str]]] = {
    "slurm": _slurm,
    "docker": _docker,
    "ssh": _ssh,
    "kubernetes": _kubernetes,
    "aws_batch": _aws_batch,
}
"""What starts each cluster, registers its end, and returns the variables that clients need."""


def _record(name: str) -> Path:
    return _FOLDER / f"{name}.json"


def _holder(name: str) -> processes.ProcessIdentity | None:
    """Return the process that holds a cluster; None when there is none."""
    record = state_files.load_undamaged(dict, str(_record(name))) or {"pid": 0, "start": 0}
    holder = processes.ProcessIdentity(record["pid"], record["start"])
    return holder if processes.identity(holder.pid) == holder else None


def up(name: str) -> int:
    """Start a cluster, unless it is there; print its variables."""
    if _holder(name) is None:
        _FOLDER.mkdir(mode=0o700, exist_ok=True)
        log = _FOLDER / f"{name}.log"
        with open(log, "wb") as errors:
            words = [sys.executable, "-m", "tests.clusters", "hold", name]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
            holder = subprocess.Popen(words, start_new_session=True, **pipes)  # type: ignore[call-overload]
        if not holder.stdout.readline():
            print(f"{name} did not come up:\n{log.read_text()[-3000:]}", file=sys.stderr)
            return 1
    for variable, value in json.loads(_record(name).read_text())["variables"].items():
        print(f"export {variable}={shlex.quote(value)}")
    return 0


def hold(name: str) -> int:
    """Start a cluster, print a line when it is up, and end it when told to."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(1)

    signal.signal(signal.SIGTERM, end)
    me = processes.identity(os.getpid())
    assert me is not None
    with contextlib.ExitStack() as stack:
        stack.callback(_record(name).unlink, missing_ok=True)
        variables = CLUSTERS[name](stack)
        state_files.write_json(str(_record(name)), {"pid": me.pid, "start": me.start, "variables": variables})
        print("up", flush=True)
        while True:
            signal.pause()


def down(name: str) -> int:
    """End a cluster, if it is there."""
    holder = _holder(name)
    if holder is not None:
        processes.send(holder, signal.SIGTERM)
        until(lambda: processes.identity(holder.pid) != holder, f"the end of {name} (process {holder.pid})", every=0.1)
    return 0


def main() -> int:
    verbs = {"up": up, "down": down, "hold": hold}
    if len(sys.argv) != 3 or sys.argv[1] not in verbs or sys.argv[2] not in CLUSTERS:
        print(f"usage: python -m tests.clusters up|down {'|'.join(CLUSTERS)}", file=sys.stderr)
        return 2
    return verbs[sys.argv[1]](sys.argv[2])


if __name__ == "__main__":
    sys.exit(main())
