# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hosts that wait for actors, without a scheduler: who is let in, and what ends them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.waits import until
from torchx_monarch.client.connection import Connection
from torchx_monarch.client.target import Target
from torchx_monarch.exceptions import RefusedError, UnreachableError
from torchx_monarch.transport.address import Address

COMMAND = ["python", "-m", "torchx_monarch.actors", "--idle-timeout"]
Eventually = Callable[..., object]


def attached(folder: Path, **more: object) -> Connection:
    """A client's connection, when replica 0 listens."""
    found: list[Connection] = []

    def is_attached() -> list[Connection]:
        with contextlib.suppress(UnreachableError):
            target = Target(Address("unix", path=f"{folder}/r.sock"))
            found.append(Connection.open(target, {"type": "attach", "names": ["me"], **more}))
        return found

    until(is_attached, "replica 0 to listen")
    return found[0]


def test_a_client_is_let_in_when_all_hosts_are_there_and_is_missed_when_it_goes(folder: Path) -> None:
    hosts = Hosts(folder, [*COMMAND, "1"], replicas=2).start(0)
    with attached(folder) as link:
        with pytest.raises(TimeoutError):
            link.receive(0.5)  # replica 1 is missing
        hosts.start(1)
        answer = link.receive(60)
        assert answer is not None and answer["leaf"] is None
        assert [host["replica"] for host in answer["hosts"]] == [0, 1]
        assert all(host["address"].partition("@")[2].startswith(f"ipc://{folder}/") for host in answer["hosts"])
        with pytest.raises(TimeoutError):
            link.receive(2.0)  # the timeout does not count while somebody is there
        assert hosts.processes[0].poll() is None
    assert hosts.wait() == [0, 0]
    assert "SUCCEEDED: no client for 1 s (--idle-timeout)" in hosts.err()
    assert [event["kind"] for event in hosts.events()] == ["hosts", "ready", "result"]


@pytest.mark.parametrize(
    ("names", "says"), [("me", "names of a client are a list"), ([1], "are a list"), (["n"] * 1001, "at most 1000")]
)
def test_a_greeting_that_makes_no_sense_is_refused(folder: Path, names: object, says: str) -> None:
    hosts = Hosts(folder, [*COMMAND, "1"]).start()
    with attached(folder, names=names) as link, pytest.raises(RefusedError, match=says):
        link.receive(60)
    assert hosts.wait() == [0]


def test_a_lost_host_ends_the_job_and_its_clients_see_it(folder: Path) -> None:
    hosts = Hosts(folder, [*COMMAND, "0"], replicas=2).start()
    with attached(folder) as link:
        assert link.receive(60)
        os.kill(hosts.processes[1].pid, signal.SIGKILL)
        assert link.receive(60) is None
    assert hosts.wait() == [1, -9]
    assert "was lost: its connection broke" in hosts.err()


def test_a_script_is_the_only_client_and_is_stopped_with_its_host(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'saved\\n'), sys.exit(0)))\n"
        "print('begun', flush=True)\n"
        "time.sleep(1000)\n"
    )
    hosts = Hosts(folder, [*COMMAND, "0", "--", "python", str(script)], replicas=2).start()
    with attached(folder) as link, pytest.raises(RefusedError, match="the client of this job is its own script"):
        link.receive(60)
    until(lambda: "begun" in hosts.out(), "the script")
    hosts.processes[0].send_signal(signal.SIGTERM)
    assert hosts.wait() == [143, 143]
    assert "saved" in hosts.out()
    assert "preempted" in hosts.err()


def test_a_script_that_is_not_there_is_said_to_be_missing(folder: Path, eventually: Eventually) -> None:
    hosts = Hosts(folder, [*COMMAND, "0", "--", "python", "nosuch.py"], replicas=2).start(1)
    # Those that come late are told for a moment only (see tests/unit/test_rendezvous.py).
    eventually(lambda: any(folder.glob("h*/worker")), "the host to look for replica 0")
    hosts.start(0)
    assert hosts.wait() == [2, 2]
    assert "nosuch.py': No such file or directory" in hosts.err()
