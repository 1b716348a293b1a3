# SPDX-License-Identifier: BSD-3-Clause
"""Which hosts an attempt uses: spare hosts, places that stay, machines that fail repeatedly."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Collection
from types import FrameType, SimpleNamespace
from unittest.mock import Mock

import pytest

from torchx_monarch.controller import elastic
from torchx_monarch.controller.elastic import HostGatherer, NodeRange, choose
from torchx_monarch.controller.members import Member, Members, MemberState
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.system.console import Console


def host(replica: int, name: str = "", machine: str = "") -> Registration:
    return Registration(replica, name or f"n{replica}", 1, machine=machine)


def members(replicas: int, *hosts: Registration) -> Members:
    table = Members(replicas)
    for registration in hosts:
        table.add(Member(registration, MemberState.ABLE))
    return table


@pytest.mark.parametrize(
    ("present", "places", "sizes", "excluded", "chosen"),
    [
        # 3+1: at first, the spare is the last.
        ("0123", "", (3, 3), "", "012"),
        # A world that is complete does not wait for the one that is missing.
        ("013", "", (3, 3), "", "013"),
        # The spare gets the place of a lost host, in its order; the others keep theirs.
        ("023", "012", (3, 3), "", "032"),
        ("0123", "032", (3, 3), "", "032"),  # the lost host came back: it is the spare now
        ("013", "032", (3, 3), "", "031"),  # and takes the next place
        ("034", "012", (3, 3), "", "034"),  # two at a time
        # The loss of the spare itself changes nothing.
        ("012", "012", (3, 3), "", "012"),
        # Excluded hosts are left out while there are others, and used before a job would fail.
        ("0123", "012", (3, 3), "1", "032"),
        ("0123", "032", (3, 3), "13", "032"),  # of two bad ones, the one that is in stays
        ("012", "012", (3, 3), "12", "012"),
        ("0123", "012", (3, 3), "0", "012"),  # the controller's host stays
        ("03", "", (3, 3), "", "03"),  # too few: the caller waits for more
        # Elastic, 1:3, without spares: the order of replicas, and fewer without the excluded ones.
        ("02", "", (3, 1), "", "02"),
        ("012", "", (3, 1), "1", "02"),
        ("01", "", (3, 2), "1", "01"),
        # Elastic with a spare, 2:3+1: growth up to the most, not beyond it.
        ("0123", "02", (3, 2), "", "021"),
        ("01234", "021", (3, 2), "", "021"),
        ("02", "012", (3, 2), "", "02"),
    ],
)
def test_the_hosts_of_an_attempt(present: str, places: str, sizes: tuple[int, int], excluded: str, chosen: str) -> None:
    hosts = [host(int(replica)) for replica in present]
    found = choose(hosts, [int(replica) for replica in places], *sizes, {int(replica) for replica in excluded})
    assert "".join(str(host.replica) for host in found) == chosen


@pytest.mark.parametrize(
    ("others", "name"),
    [([host(0), host(1, "n1")], "n1"), ([host(1, "n1"), host(2, "n1")], "n1 (replica 1)"), ([], "n1")],
)
def test_failures_count_for_the_machine(others: Collection[Registration], name: str) -> None:
    table = members(4, *others)
    assert table.machine(host(1, "n1")) == name


def test_containers_fail_by_the_name_of_their_machine() -> None:
    table = members(4, host(1, "pod-1", "node7"), host(2, "pod-2", "node8"))
    assert table.machine(host(1, "pod-1", "node7")) == "node7"
    third = Member(host(3, "pod-3", "node7"), MemberState.ABLE)
    table.add(third)
    assert table.machine(host(1, "pod-1", "node7")) == "node7 (replica 1)"
    table.set_state(third, MemberState.LOST)
    assert table.machine(host(1, "pod-1", "node7")) == "node7"


def test_a_machine_is_excluded_by_failures_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(elastic, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def failures(exclude_after: int) -> Callable[[int], str]:
        hosts = [host(replica) for replica in range(4)]
        table = members(4, *hosts)
        gatherer = HostGatherer(NodeRange(3, 3, 1.0, spares=1), table, Mock(), exclude_after)
        table.form(hosts[:3])

        def fail(replica: int) -> str:
            event = gatherer.blame(replica, "failed_alone", "x")
            return event.result.reason if event is not None else ""

        return fail

    fail = failures(3)
    assert [fail(1), fail(1), fail(2)] == [""] * 3
    now[0] = 3601.0
    assert not fail(1) and not fail(1)
    assert fail(1) == "n1 is excluded after 3 failures within 1 h, the last: x"
    assert not fail(1), "it is told once"
    never = failures(0)
    assert not any(never(1) for _ in range(9))


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_failure_of_the_only_host_of_a_job_counts_for_no_machine(hosts: int) -> None:
    registrations, reporter = [*map(host, range(hosts))], Mock()
    table = members(hosts, *registrations)
    table.form(registrations)
    assert HostGatherer(NodeRange(hosts, hosts, 1.0), table, reporter, 3).blame(0, "failed_alone", "x") is None
    assert reporter.record.call_count == hosts - 1


def _calls_of_an_attempt(hosts: int) -> int:
    """The calls of Python functions in which hosts register, an elastic attempt is formed, and one is lost."""
    table = Members(hosts)
    reporter = Reporter(Console(os.open(os.devnull, os.O_WRONLY)), None, "trainer")
    gatherer = HostGatherer(NodeRange(1, hosts, 60.0), table, reporter, 3)
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    async def attempt() -> None:
        await table.until(lambda: table.able_count > 0, 0.0)
        assert await gatherer.gather(0.0) is None and len(table.attempt.hosts) == hosts and not gatherer.newcomers()
        gatherer.blame(hosts - 1, "lost", "it failed")
        lost = table.get(hosts - 1)
        assert lost is not None
        table.set_state(lost, MemberState.LOST)
        assert not gatherer.newcomers()

    sys.setprofile(profile)
    try:
        for replica in range(hosts):
            table.add(Member(host(replica), MemberState.ABLE))
        asyncio.run(attempt())
    finally:
        sys.setprofile(None)
    return count


def test_an_attempt_costs_no_square_of_the_number_of_hosts() -> None:
    assert _calls_of_an_attempt(800) < 6 * _calls_of_an_attempt(200)
