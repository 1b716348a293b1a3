# SPDX-License-Identifier: BSD-3-Clause
"""Nodes of AWS Batch, each a machine of its own, that run what a job definition says: several roles, each for itself.

Batch tells a node its index, the attempt and, but for the main one, the main node's address; what is found out beyond
that is found out by the hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, Resource, Role

from tests.network.namespaces import Network, requires_namespaces
from tests.waits import WITHIN, until
from torchx_monarch.backends.aws_batch.request import with_credentials
from torchx_monarch.components import controller
from torchx_monarch.schedulers import monarch_aws_batch
from torchx_monarch.transport import credentials

pytestmark = requires_namespaces


class Nodes:
    """The nodes of one job, on machines of their own: node N on machine N, unless told otherwise.

    Args:
        folder: for what they print.
        network: the machines.
        definition: of the job.
    """

    def __init__(self, folder: Path, network: Network, definition: dict[str, Any]) -> None:
        self._folder, self._network = folder, network
        self._containers = []
        for node_range in definition["nodeProperties"]["nodeRangeProperties"]:
            first, last = node_range["targetNodes"].split(":")
            self._containers += [node_range["container"]] * (int(last) - int(first) + 1)
        self.processes: dict[tuple[int, int], subprocess.Popen[bytes]] = {}

    def start(self, *nodes: int, attempt: int = 1, machine: int | None = None) -> None:
        """Run the containers of these nodes; ``machine``: on another than their own."""
        for node in nodes:
            container, on = self._containers[node], node if machine is None else machine
            at = self._network.address(on)
            hosts = self._folder / f"hosts{on}"
            hosts.write_text(f"127.0.0.1 localhost\n{at} node{on}\n")
            environ = {variable["name"]: variable["value"] for variable in container["environment"]} | {
                "AWS_BATCH_JOB_NODE_INDEX": str(node),
                "AWS_BATCH_JOB_NUM_NODES": str(len(self._containers)),
                "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
                "AWS_BATCH_JOB_ATTEMPT": str(attempt),
                "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
            }
            if node != 0:
                environ["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = self._network.address(0)
            begin = f'mount --bind {hosts} /etc/hosts; hostname node{on}; exec "$@"'
            within = [*self._network.within(on), "unshare", "--uts", "--mount", "sh", "-c", begin, "node"]
            with open(self._log(node, attempt), "ab") as log:
                self.processes[node, attempt] = subprocess.Popen(
                    [*within, *container["command"]],
                    env={**os.environ, **environ},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def _log(self, node: int, attempt: int) -> Path:
        return self._folder / f"{node}.{attempt}.log"

    def log(self, node: int, attempt: int = 1) -> str:
        """What a node has printed."""
        return self._log(node, attempt).read_text()

    def wait(self, *nodes: int, attempt: int = 1) -> list[int]:
        """Their exit codes."""
        return [self.processes[node, attempt].wait(WITHIN) for node in nodes]

    def end(self) -> None:
        """Kill what is left of them."""
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def submitted(
    folder: Path, network: Callable[[int], Network], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Nodes]]:
    """Nodes of an app of ours, as many as it has replicas, and spare machines."""
    made: list[Nodes] = []

    def make(*roles: Role, spare: int = 0, **cfg: Any) -> Nodes:
        cfg = {"queue": "q", "preload": "none", "grace": 5, **cfg}
        with Runner("torchx", {"monarch_aws_batch": monarch_aws_batch}) as runner:
            info = runner.dryrun(AppDef("app", list(roles)), "monarch_aws_batch", cfg=cfg)
        definition = with_credentials(info.request, info.submitted.roles, credentials.create()[0].to_text())
        machines = network(sum(role.num_replicas for role in roles) + spare)
        made.append(Nodes(folder, machines, definition))
        return made[-1]

    yield make
    for hosts in made:
        hosts.end()


@pytest.fixture
def role(tmp_path: Path) -> Callable[..., Role]:
    """A role of ranks, one on each node, that prints who is in its world."""

    def make(name: str, replicas: int, then: str = "") -> Role:
        path = tmp_path / f"{name}.py"
        says = "print('rank', e['RANK'], 'of', e['WORLD_SIZE'], 'at', e['MASTER_ADDR'], flush=True)"
        path.write_text(f"import os, sys, time\ne = os.environ\n{says}\n{textwrap.dedent(then)}\n")
        shape = ["--nnodes", str(replicas), "--nproc-per-node", "1", "--tee", "3"]
        given = {"num_replicas": replicas, "resource": Resource(cpu=1, gpu=0, memMB=512)}
        return Role(name, "image", entrypoint="torchrun", args=[*shape, str(path)], **given)

    return make


def awaits(path: Path) -> str:
    """A rank's lines that wait for a file."""
    return f"while not os.path.exists({str(path)!r}): time.sleep(0.05)"


def test_each_role_meets_at_a_replica_0_of_its_own(
    submitted: Callable[..., Nodes], role: Callable[..., Role], tmp_path: Path
) -> None:
    """The main node's host comes last of all, though Batch would start it first. With TLS the other tests meet."""
    go = tmp_path / "go"
    nodes = submitted(role("a", 2, awaits(go)), role("b", 2), role("c", 2), insecure_plain_tcp=True)
    others = [3, 5, 2, 4]
    nodes.start(*others, 1)
    until(lambda: nodes.log(3).count("waiting for replica 0 ("), "a wait with its reason")
    nodes.start(0)
    assert nodes.wait(*others) == [0, 0, 0, 0], "".join(map(nodes.log, others))
    go.touch()
    assert nodes.wait(0, 1) == [0, 0], nodes.log(0)
    for node in range(6):
        at = f"10.99.0.{node // 2 * 2 + 1}"
        assert f"rank {node % 2} of 2 at {at}" in nodes.log(node), nodes.log(node)
        assert f"INSECURE: host {node % 2}: plain TCP: any process that reaches" in nodes.log(node)


def test_a_job_that_begins_again_has_nothing_to_do_with_nodes_of_the_attempt_before(
    submitted: Callable[..., Nodes], role: Callable[..., Role], tmp_path: Path
) -> None:
    """Its replica 0 of the second role has never found the main node, and goes on trying, at the same address."""
    go = tmp_path / "go"
    nodes = submitted(role("a", 1, awaits(go)), role("b", 2), spare=1)
    nodes.start(1)
    nodes.start(0, 2, attempt=2)
    until(lambda: "is of another start of the app" in nodes.log(1), "the old replica 0")
    until(lambda: "has not registered its address yet" in nodes.log(2, 2), "a wait for the new one")
    assert nodes.processes[1, 1].poll() is None
    nodes.start(1, attempt=2, machine=3)
    assert nodes.wait(1, 2, attempt=2) == [0, 0], nodes.log(1, 2) + nodes.log(2, 2)
    assert "rank 1 of 2 at 10.99.0.4" in nodes.log(2, 2)
    go.touch()
    assert nodes.wait(0, attempt=2) == [0]
    nodes.processes[1, 1].send_signal(signal.SIGTERM)  # as Batch does
    assert nodes.wait(1) == [143], nodes.log(1)


def test_a_role_that_fails_ends_the_job(submitted: Callable[..., Nodes], role: Callable[..., Role]) -> None:
    """Batch itself watches the main node alone, which also starts all of them again when there are attempts left."""
    fails = "time.sleep(1)\nif e['RANK'] == '1': sys.exit(7)\ntime.sleep(1000)"
    nodes = submitted(role("a", 1, "time.sleep(1000)"), role("b", 2, fails), role("c", 1, "time.sleep(1000)"))
    nodes.start(0, 1, 2, 3)
    assert nodes.wait(0, 1, 2, 3) == [7, 7, 7, 7], "".join(map(nodes.log, range(4)))
    said = "FAILED: b/1 failed: rank 1 (local rank 0 on node2, pid "
    assert said in nodes.log(0) and said in nodes.log(3), nodes.log(0) + nodes.log(3)


def test_a_controller_finds_the_hosts_of_all_roles(submitted: Callable[..., Nodes], tmp_path: Path) -> None:
    """Those of a role with one replica, too, which nobody else would have to find."""
    script = tmp_path / "main.py"
    script.write_text(
        "import json\nfrom torchx_monarch import this_job\n"
        "print(json.dumps({role: found.addresses for role, found in this_job()._attachments.items()}))"
    )
    meshes = {"trainers": "1", "loaders": "1", "readers": "2"}
    nodes = submitted(*controller(str(script), meshes=meshes, image="image").roles)
    nodes.start(3, 2, 1, 0)
    assert nodes.wait(0) == [0], "".join(map(nodes.log, range(4)))
    found = json.loads(next(line for line in nodes.log(0).splitlines() if line.startswith("{")))
    at = {mesh: re.findall(r"@tls://([\d.]+):", " ".join(hosts)) for mesh, hosts in found.items()}
    assert at == {"trainers": ["10.99.0.1"], "loaders": ["10.99.0.2"], "readers": ["10.99.0.3", "10.99.0.4"]}, found
    for node in (1, 2, 3):  # they would go on waiting for actors
        nodes.processes[node, 1].send_signal(signal.SIGTERM)
    assert nodes.wait(1, 2, 3) == [143, 143, 143]


def test_who_waits_in_vain_says_for_what(submitted: Callable[..., Nodes], role: Callable[..., Role]) -> None:
    nodes = submitted(role("a", 1, "time.sleep(1000)"), role("b", 2), host_timeout=7)
    nodes.start(1)  # without the main node
    assert nodes.wait(1) == [1]
    assert "waiting for the first role's replica 0 (10.99.0.1:" in nodes.log(1), nodes.log(1)
    nodes.start(0, 2)  # without the role's own replica 0
    assert nodes.wait(2) == [1]
    refused = "replica 0 refused this host: replica 0 of role 'b' has not registered its address yet"
    why = f"host 1: replica 0 was not reached in 7 s: {refused}$"
    assert re.search(why, nodes.log(2), re.MULTILINE), nodes.log(2)
    nodes.processes[0, 1].send_signal(signal.SIGTERM)
    assert nodes.wait(0) == [143]
