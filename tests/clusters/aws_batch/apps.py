# Copyright (c) the torchx-monarch authors.
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
from pathlib import Path
from typing import Any

import boto3
from torchx.specs import BindMount, Resource, Role

from tests.clusters.aws_batch.checked import WRONG
from tests.clusters.docker.daemon import ROOT, Daemon
from tests.contract.place import Place
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

    def wrong(self) -> list[str]:
        """What AWS would not have said so far, or would not have been asked."""
        with contextlib.closing(urllib.request.urlopen(f"{self.url}{WRONG}", timeout=240)) as answer:
            wrong: list[str] = json.loads(answer.read())
        return wrong

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
    """

    name = NAME
    factory = staticmethod(monarch_aws_batch)
    cfg = {"queue": "first", "preload": "none", "grace": 5}

    def __init__(self, folder: Path, image: str = "image:1", mounts: list[BindMount] | None = None) -> None:
        self.image = image
        self.mounts = mounts or []
        super().__init__(folder)

    def role(self, entrypoint: str, *args: str, name: str = "trainer", replicas: int = 1, **more: Any) -> Role:
        resource = more.pop("resource", Resource(cpu=1, gpu=0, memMB=512))
        return Role(
            name,
            image=self.image,
            entrypoint=entrypoint,
            args=list(args),
            num_replicas=replicas,
            mounts=list(self.mounts),
            resource=resource,
            **more,
        )


def definitions(client: Any) -> list[str]:
    """The names of active job definitions."""
    return [each["jobDefinitionName"] for each in client.describe_job_definitions(status="ACTIVE")["jobDefinitions"]]


def request_of(client: Any, name: str) -> str:
    """All that AWS shows of a job and its definition, as text."""
    known = client.describe_job_definitions(jobDefinitionName=name)["jobDefinitions"]
    by_name = [{"name": "JOB_NAME", "values": [name]}]
    jobs = [each["jobId"] for each in client.list_jobs(jobQueue="first", filters=by_name)["jobSummaryList"]]
    return json.dumps([known, client.describe_jobs(jobs=jobs)["jobs"]], default=str)
