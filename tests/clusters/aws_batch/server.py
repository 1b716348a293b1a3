# SPDX-License-Identifier: BSD-3-Clause
"""``python server.py simple|docker``: moto's AWS on a port of this machine, until its stdin ends. Prints the URL.

``simple``: every job has succeeded as soon as it is looked at. ``docker``: jobs are containers of the daemon that
DOCKER_HOST names, on the network that MOTO_DOCKER_NETWORK_NAME names. There, what moto lacks of multi-node jobs is
added: the nodes' variables, and the child jobs with a log stream and an address each.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections import Counter
from typing import Any

QUEUES = ("first", "second")

_NODES: dict[str, dict[int, str]] = {}
"""Addresses of the nodes of each multi-node job, by their index."""


def main(mode: str) -> None:
    """Serve until stdin ends."""
    os.environ.update(AWS_ACCESS_KEY_ID="testing", AWS_SECRET_ACCESS_KEY="testing", AWS_DEFAULT_REGION="us-east-1")
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    config = json.dumps({"batch": {"use_docker": mode == "docker"}}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/config", config), timeout=240).close()
    _make_queues(url)
    if mode == "docker":
        _add_nodes()
    print(url, flush=True)
    sys.stdin.read()
    # Its threads may be waiting for containers of a daemon that is gone.
    os._exit(0)


def _make_queues(url: str) -> None:
    import boto3

    def client(service: str) -> Any:
        return boto3.client(service, endpoint_url=url)

    vpc = client("ec2").create_vpc(CidrBlock="172.30.0.0/24")["Vpc"]["VpcId"]
    subnet = client("ec2").create_subnet(VpcId=vpc, CidrBlock="172.30.0.0/25")["Subnet"]["SubnetId"]
    group = client("ec2").create_security_group(Description="of tests", GroupName="tests", VpcId=vpc)["GroupId"]
    role = client("iam").create_role(RoleName="tests", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    client("iam").create_instance_profile(InstanceProfileName="tests")
    client("iam").add_role_to_instance_profile(InstanceProfileName="tests", RoleName="tests")
    profile = client("iam").get_instance_profile(InstanceProfileName="tests")["InstanceProfile"]["Arn"]
    batch = client("batch")
    batch.create_compute_environment(
        computeEnvironmentName="tests",
        type="MANAGED",
        state="ENABLED",
        serviceRole=role,
        computeResources={
            "type": "EC2",
            "minvCpus": 0,
            "maxvCpus": 16,
            "instanceTypes": ["t2.small"],
            "subnets": [subnet],
            "securityGroupIds": [group],
            "instanceRole": profile,
        },
    )
    for name in QUEUES:
        order = [{"order": 1, "computeEnvironment": "tests"}]
        batch.create_job_queue(jobQueueName=name, state="ENABLED", priority=1, computeEnvironmentOrder=order)


def _add_nodes() -> None:
    from docker.models import containers
    from moto.batch import models as batch
    from moto.logs import models as logs

    collection, backend, written_to = containers.ContainerCollection, batch.BatchBackend, logs.LogsBackend
    run, describe, put = collection.run, backend.describe_jobs, written_to.put_log_events
    written = Counter[str]()
    network = os.environ["MOTO_DOCKER_NETWORK_NAME"]

    def run_node(self: Any, image: str, **kwargs: Any) -> Any:
        kwargs.pop("extra_hosts")  # this daemon has no network of its own that they could name
        before, _, node = kwargs["name"].rpartition("-")
        is_node = len(node) < 4  # NAME-JOB-NODE; without a node it ends in a longer part of the job's id
        if is_node:
            kwargs["environment"] |= {"AWS_BATCH_JOB_NODE_INDEX": node, "AWS_BATCH_JOB_ATTEMPT": "1"}
        container = run(self, image, init=True, shm_size="512m", **kwargs)
        if is_node:
            container.reload()
            address = container.attrs["NetworkSettings"]["Networks"][network]["IPAddress"]
            _NODES.setdefault(before[-36:], {})[int(node)] = address
        return container

    def describe_jobs(self: Any, jobs: list[str] | None) -> list[dict[str, Any]]:
        wanted = jobs or []
        found = list(describe(self, [job for job in wanted if "#" not in job] or ["none"] if jobs else jobs))
        for job in found:
            code = self.get_job_by_id(job["jobId"]).exit_code
            if code is not None:
                job["container"]["exitCode"] = code
        for job_id, _, index in (job.partition("#") for job in wanted if "#" in job):
            if int(index) in _NODES.get(job_id, {}):
                (parent,) = describe_jobs(self, [job_id])
                found.append(_child(parent, int(index)))
        return found

    def put_log_events(self: Any, group: str, stream: str, events: list[dict[str, Any]]) -> Any:
        for event in events:
            event["timestamp"] = int(event["timestamp"])  # as AWS has it
        # One call for each node, in order, all to one stream.
        child = f"{stream}/{written[stream]}"
        written[stream] += 1
        self.ensure_log_stream(group, child)
        put(self, group, child, events)
        return put(self, group, stream, events)

    for owner, replacement in ((collection, run_node), (backend, describe_jobs), (written_to, put_log_events)):
        setattr(owner, replacement.__name__.replace("run_node", "run"), replacement)


def _child(parent: dict[str, Any], index: int) -> dict[str, Any]:
    keys = ("jobName", "jobQueue", "jobDefinition", "startedAt", "stoppedAt", "status", "statusReason")
    container: dict[str, Any] = {"networkInterfaces": [{"privateIpv4Address": _NODES[parent["jobId"]][index]}]}
    if parent["container"].get("logStreamName"):
        container["logStreamName"] = f"{parent['container']['logStreamName']}/{index}"
    if "exitCode" in parent["container"]:
        container["exitCode"] = parent["container"]["exitCode"]  # moto knows that of one node; hosts end with the same
    return {
        **{key: parent[key] for key in keys if key in parent},
        "jobId": f"{parent['jobId']}#{index}",
        "jobArn": f"{parent['jobArn']}#{index}",
        "nodeDetails": {"nodeIndex": index, "isMainNode": index == 0},
        "container": container,
    }


if __name__ == "__main__":
    main(sys.argv[1])
