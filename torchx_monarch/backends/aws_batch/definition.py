# SPDX-License-Identifier: BSD-3-Clause
"""Read the containers and roles of a job definition, as rendered by ``request`` or as Batch describes it or its job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchx.specs import Resource, Role

from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.system.signed_line import KEY_VARIABLE

ROLE_NAME = "TORCHX_ROLE_NAME"
"""Variable of each container, from TorchX's former scheduler. It names the roles if the app is too large to store."""

SECRET_PREFIX = "torchx-monarch/"
"""Beginning of the names of the secrets that are made for jobs."""

_DEFAULT_LOG_GROUP = "/aws/batch/job"


def containers_of(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the container properties of each role."""
    if nodes := job.get("nodeProperties"):
        return [node_range["container"] for node_range in nodes["nodeRangeProperties"]]
    single = job.get("containerProperties") or job.get("container")
    return [single] if single else []


def result_key(job: Mapping[str, Any]) -> str:
    """Return the key with which the hosts of a job sign their results; empty if none runs hosts."""
    environments = [_environment(properties) for properties in containers_of(job)]
    return next((env[KEY_VARIABLE] for env in environments if KEY_VARIABLE in env), "")


def secrets_of(job: Mapping[str, Any]) -> list[str]:
    """Return the ARNs of the secrets that were made for the credentials of a job's hosts."""
    given = [
        (secret["name"], secret["valueFrom"])
        for properties in containers_of(job)
        for secret in properties.get("secrets", ())
    ]
    return [arn for name, arn in given if name == CREDENTIALS and f":{SECRET_PREFIX}" in arn]


def log_group(job: Mapping[str, Any]) -> str:
    """Return the CloudWatch log group of a job's containers."""
    properties = next(iter(containers_of(job)), {})
    return str(properties.get("logConfiguration", {}).get("options", {}).get("awslogs-group", _DEFAULT_LOG_GROUP))


def roles_of(job: Mapping[str, Any]) -> list[Role]:
    """Reconstruct the roles of a job that does not hold its app."""
    nodes = job.get("nodeProperties")
    if not nodes:
        return [_role(properties, 1) for properties in containers_of(job) or [{}]]
    ranges = nodes["nodeRangeProperties"]
    return [
        _role(node_range["container"], _count(node_range["targetNodes"], nodes["numNodes"])) for node_range in ranges
    ]


def _count(target: str, nodes: int) -> int:
    """Return the number of nodes in a range ``2:5``, ``:5``, ``2:`` or ``2`` of a job of ``nodes`` nodes."""
    first, colon, last = target.partition(":")
    return int(last or nodes - 1) - int(first or 0) + 1 if colon else 1


def _role(properties: Mapping[str, Any], replicas: int) -> Role:
    env = {name: text for name, text in _environment(properties).items() if name not in (CREDENTIALS, KEY_VARIABLE)}
    words = properties.get("command") or [""]
    return Role(
        env.pop(ROLE_NAME, "node"),
        image=properties.get("image", ""),
        entrypoint=words[0],
        args=list(words[1:]),
        env=env,
        num_replicas=replicas,
        resource=_resource(properties),
    )


def _environment(properties: Mapping[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in properties.get("environment", ())}


def _resource(properties: Mapping[str, Any]) -> Resource:
    """Convert container properties to a resource; -1 for what is unknown.

    Batch may return the older fields ``vcpus`` and ``memory`` instead of ``resourceRequirements``.
    """
    amounts = {"VCPU": int(properties.get("vcpus", -1)), "MEMORY": int(properties.get("memory", -1))}
    amounts |= {
        requirement["type"]: int(float(requirement["value"]))
        for requirement in properties.get("resourceRequirements", ())
    }
    return Resource(cpu=amounts["VCPU"], gpu=amounts.get("GPU", 0), memMB=amounts["MEMORY"])
