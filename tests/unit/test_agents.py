# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Requests reach replica 0's host directly and the other hosts through their agents; nothing listens anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from torchx_monarch.controller.agents import Agents
from torchx_monarch.controller.elastic import HostGatherer, NodeRange
from torchx_monarch.controller.host_events import HostEvents, Interrupted
from torchx_monarch.controller.host_messages import (
    Answer,
    Launched,
    LaunchRanks,
    RanksExited,
    Request,
    WatchRanks,
    encode_message,
)
from torchx_monarch.controller.job_options import JobOptions
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.registration import Registration
from torchx_monarch.model.world import World
from torchx_monarch.monarch_adapter import monarch_api
from torchx_monarch.system.console import Console
from torchx_monarch.transport.address import Address

SIZES = NodeRange(1, 3, 1.0)
OPTIONS = JobOptions("id", 1, 0, (), 0, SIZES, 1.0, 1.0, "node0", "", 0.05, 0.05, "")
HOSTS = [Registration(replica, f"address{replica}", f"node{replica}", 7, 1) for replica in (0, 2, 5)]
LAUNCH = LaunchRanks(World(0, 0, 0, (0, 2, 5), (1, 1, 1), "node0", 29500, True, "id"))


class Mesh:
    """Agents of other hosts, of which each answers with an exit; a mesh can fail to form."""

    failure = ""
    addresses: list[list[str]] = []

    def __init__(self, addresses: list[str], agent: object, number: int, timeout: float) -> None:
        self.addresses.append(addresses)
        if self.failure:
            raise RuntimeError(self.failure)

    def stream(self, op: str, args: Mapping[str, Any]) -> Iterator[Any]:
        for number in range(len(self.addresses[-1])):
            yield encode_message(RanksExited(HOSTS[1 + number].replica, ()))


@pytest.fixture(autouse=True)
def meshes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The addresses of all meshes."""
    monkeypatch.setattr(monarch_api, "AgentMesh", Mesh)
    monkeypatch.setattr(Mesh, "failure", "")
    monkeypatch.setattr(Mesh, "addresses", made := list[list[str]]())
    return made


def answers(hosts: list[Registration], *requests: Request) -> tuple[list[set[int]], list[Request]]:
    """The replicas that answer each request, and the requests that reach replica 0's host directly."""
    asked: list[Request] = []

    async def own(request: Request) -> Answer:
        asked.append(request)
        return Launched(0, (7,))

    async def reachable(hosts: object) -> dict[int, str]:
        return {}

    async def ask() -> list[set[int]]:
        events, reporter = HostEvents(), Reporter(Console(2), None, "trainer")
        agents = Agents(OPTIONS, events, reporter, own)
        await agents.form(hosts, HostGatherer(SIZES, Rendezvous(Address("unix", path="/no"), 6), reporter, reachable))
        replicas = []
        for request in requests:
            replicas.append({answer.replica async for answer in agents.ask(request)})
        return replicas

    return asyncio.run(ask()), asked


def test_a_host_alone_has_no_mesh_and_no_agent(meshes: list[list[str]]) -> None:
    assert answers(HOSTS[:1], LAUNCH, WatchRanks()) == ([{0}, {0}], [LAUNCH, WatchRanks()])
    assert meshes == []


def test_agents_are_on_the_other_hosts(meshes: list[list[str]]) -> None:
    assert answers(HOSTS, LAUNCH, WatchRanks()) == ([{0, 2, 5}, {0, 2, 5}], [LAUNCH, WatchRanks()])
    assert meshes == [["address2", "address5"]]


def test_the_host_whose_agent_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "failure", "error creating proc (host rank 1)")
    with pytest.raises(Interrupted) as caught:
        answers(HOSTS)
    assert "the agent of host 5 (node5, pid 7) did not start" in caught.value.event.result.reason
    assert caught.value.event.result.replica == 5
