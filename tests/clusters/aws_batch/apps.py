# SPDX-License-Identifier: BSD-3-Clause
"""Apps on an AWS of moto's, through TorchX's Runner here, and through its command in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchx.specs import BindMount, Resource

from tests.clusters.docker.daemon import ROOT, Daemon, mount_words
from tests.contract.place import Place
from tests.network.namespaces import entered
from torchx_monarch.client.connection import Target
from torchx_monarch.schedulers import monarch_aws_batch

NAME = "monarch_aws_batch"

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Some, and a region. boto3 must not look for a machine of AWS's around it."""

_NETWORK = "batch"


class Aws:
    """A process that serves moto's AWS.

    Args:
        mode: ``simple`` or ``docker``, see ``server.py``.
        environ: its environment.
    """

    def __init__(self, mode: str, environ: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.clusters.aws_batch.server", mode],
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        # What it logs must not fill the pipe.
        self._said: list[str] = []
        self._drain = threading.Thread(target=lambda: self._said.extend(self._process.stderr or ()), daemon=True)
        self._drain.start()
        self.url = self._process.stdout.readline().strip()
        assert self.url.startswith("http://"), f"moto's server does not start: {''.join(self._said)}"
        import boto3  # a quarter of a second, which each process of pytest would take to collect the tests

        self._session, self._clients = boto3.session.Session(), dict[str, Any]()

    def stop(self) -> None:
        """End it, and wait for that."""
        for client in self._clients.values():
            client.close()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._drain.join(60)
        self._process.stdout.close()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def client(self, service: str) -> Any:
        """boto3's client."""
        if service not in self._clients:
            key = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
            self._clients[service] = self._session.client(service, endpoint_url=self.url, **key)
        return self._clients[service]


def with_docker(daemon: Daemon) -> Aws:
    """One whose jobs are containers of that daemon."""
    with contextlib.closing(daemon.client()) as client:
        client.networks.create(_NETWORK)
    return Aws("docker", {"DOCKER_HOST": daemon.host, "MOTO_DOCKER_NETWORK_NAME": _NETWORK})


class Apps(Place):
    """An AWS of moto's.

    Args:
        folder: where programs are written.
        image: of the roles.
        mounts: what a container of the image needs.
        network: the namespace of the containers' network; empty where no containers run.
    """

    name = NAME
    factory = staticmethod(monarch_aws_batch)
    wire = "moto+docker"
    wires = {"missing tool says what to install": "real"}
    cannot = {
        "lost host replaced": "AWS Batch replaces no node of a job: it starts all of it again (max_retries)",
        "spare host": "a job of AWS Batch ends when it loses a node",
        "retries": "moto starts no job again",
        "retry policies of commands": "moto starts no job again",
        "elastic role": "moto fails a job when one of its nodes fails",
        "groups restart alone": "AWS Batch restarts a job as a whole",
        "preemption": "moto takes no instance away",
        "credentials not on show": "containers of moto get no secrets",
        "test_a_failing_rank_is_the_root_cause": "moto knows no exit code but that of node 0",
        "test_a_failing_command_is_the_root_cause": "moto has no log of a node that fails",
        "test_an_app_ends_when_it_is_decided_though_nobody_looks[succeeded]": "moto ends no nodes with the main one",
        "test_an_app_ends_when_it_is_decided_though_nobody_looks[failed hosts]": "hosts of one role alone can meet",
        "test_cancel_while_running": "moto has no log of a job before its end",
        "test_delete_leaves_nothing": "moto has no log of a job before its end",
        "test_reading_changes_nothing": "moto has no log of a job before its end",
        "test_a_log_is_read_by_times_streams_and_expressions": "moto has no log of a job before its end",
    }
    cfg = {"queue": "first", "preload": "none", "grace": 5}
    long_grace = 25  # what an instance gives a container to end, less the host's share
    own_bad_options = (
        ({"job_type": "array"}, "job_type is 'array'; it is auto, multinode or container"),
        ({"job_type": "container"}, "job_type is container, which is for one replica; app 'app' has 2"),
        ({"priority": 10000}, "priority is 10000; it is a number from 0 to 9999"),
        ({"timeout": 59}, "timeout is 59; it is a number of seconds, 60 or more"),
        ({"ulimits": ["memlock:-1"]}, "'memlock:-1' is not NAME:SOFT:HARD"),
        ({"secret": True}, "secret needs execution_role_arn"),
    )
    package = "boto3"
    install = "monarch_aws_batch needs boto3; run: pip install 'boto3>=1.34'"
    names_hosts = False
    resource = Resource(cpu=1, gpu=0, memMB=512)

    def __init__(
        self, folder: Path, image: str = "image:1", mounts: list[BindMount] | None = None, network: str = ""
    ) -> None:
        self.image = image
        self.network = network
        self.mounts = mounts or []
        super().__init__(folder)

    @contextlib.contextmanager
    def reached(self, handle: str) -> Iterator[str]:
        """Yield the address of node 0, within the network of the containers, where AWS cannot be asked."""
        self.until(lambda: self.hostname(handle, 0), "node 0's address", handle)
        there = Target.from_handle(handle, runner=self.runner).address
        with entered(self.network):
            yield f"{there.host}:{there.port}"

    def client(self, handle: str) -> tuple[Sequence[str], str]:
        """Enter the network of the containers, where AWS cannot be asked."""
        self.until(lambda: self.hostname(handle, 0), "node 0's address", handle)
        there = Target.from_handle(handle, runner=self.runner).address
        return ("nsenter", f"--net={self.network}"), f"{there.host}:{there.port}"

    def run_words(self) -> Sequence[str]:
        """Return the options of ``torchx run``: the queue."""
        return ("-cfg", "queue=first")

    def component_words(self) -> Sequence[str]:
        """Return the options of ``monarch.spmd``: the image, and this machine's folders."""
        return ("--memMB", "6000", "--image", self.image, "--mounts", mount_words(self.mounts))

    @contextlib.contextmanager
    def pending(self) -> Iterator[str]:
        """Have jobs stay in each state until they have been looked at very often."""
        _transition({"progression": "manual", "times": 100000})
        try:
            yield self.run(self.role("sleep", "1000", replicas=2))
        finally:
            _transition({"progression": "immediate"})  # moto ends a job only when its time has come

    def left(self, handle: str) -> Sequence[object]:
        """Return nothing: the fixture looks for definitions and secrets after each test."""
        return ()


def _transition(how: dict[str, object]) -> None:
    """Tell moto how jobs go from state to state."""
    data = json.dumps({"model_name": "batch::job", "transition": how}).encode()
    url = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/state-manager/set-transition"
    with contextlib.closing(urllib.request.urlopen(urllib.request.Request(url, data), timeout=240)) as answer:
        assert answer.status == 201


def definitions(client: Any) -> list[str]:
    """The names of active job definitions."""
    return [
        definition["jobDefinitionName"]
        for definition in client.describe_job_definitions(status="ACTIVE")["jobDefinitions"]
    ]


def request_of(client: Any, name: str) -> str:
    """All that AWS shows of a job and its definition, as text."""
    known = client.describe_job_definitions(jobDefinitionName=name)["jobDefinitions"]
    by_name = [{"name": "JOB_NAME", "values": [name]}]
    jobs = [summary["jobId"] for summary in client.list_jobs(jobQueue="first", filters=by_name)["jobSummaryList"]]
    return json.dumps([known, client.describe_jobs(jobs=jobs)["jobs"]], default=str)
