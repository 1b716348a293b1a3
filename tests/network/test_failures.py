# SPDX-License-Identifier: BSD-3-Clause
"""What a host says when it and another cannot get together, and what its options do. All on the loopback interface.

Certificates that are wrong in other ways are in ``tests/unit/test_connections.py``.
"""

from __future__ import annotations

import base64
import contextlib
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.local.hosts import Hosts
from tests.ports import free_port
from tests.waits import WITHIN, until
from torchx_monarch.client.connection import Connection, Target
from torchx_monarch.exceptions import RefusedError
from torchx_monarch.transport import credentials
from torchx_monarch.transport.address import Address
from torchx_monarch.transport.credentials import ClientCredentials

_OPTIONS = ("--grace", "5", "--preload", "", "--lease", "6")

_PROGRAM = ["--nproc-per-node", "1", "--tee", "3", "--no-python", "sh", "-c"]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(folder: Path, port: int) -> Iterator[Callable[..., Hosts]]:
    """Start one replica, of two, with options and an environment of its own. They end with the test."""
    started: list[Hosts] = []

    def one(
        replica: int,
        *options: str,
        rendezvous: str = "",
        does: str = "true",
        command: Sequence[str] = (),
        **environ: str,
    ) -> Hosts:
        given = {"MONARCH_RENDEZVOUS": rendezvous or f"tls:127.0.0.1:{port}", **environ}
        command = [*command] or ["torchrun", "--nnodes", "2", *_PROGRAM, does]
        started.append(Hosts(folder, command, 2, (*_OPTIONS, *options), given))
        return started[-1].start(replica)

    yield one
    for hosts in started:
        for process in hosts.processes.values():
            process.terminate()
            process.wait(WITHIN)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("name", r"localhost:\d+: its certificate is not accepted: Hostname mismatch, .* 'localhost'"),
        ("foreign", r"127.0.0.1:\d+: its certificate is not accepted: .* \(it belongs to another job"),
        ("release", "replica 0 refused this host: it speaks version 1 of the protocol, and this end version 99"),
    ],
)
def test_a_host_that_replica_0_is_not_for_says_why(
    start: Callable[..., Hosts], port: int, tmp_path: Path, kind: str, why: str
) -> None:
    ours, _ = credentials.create()
    theirs, rendezvous, more = ours, "", {}
    if kind == "name":
        rendezvous = f"tls:localhost:{port}"
    elif kind == "foreign":
        theirs, _ = credentials.create()
    else:
        (tmp_path / "sitecustomize.py").write_text("import torchx_monarch.transport.messages as p; p.VERSION = 99\n")
        more = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    first = start(0, MONARCH_CREDENTIALS=ours.to_text())
    second = start(1, rendezvous=rendezvous, MONARCH_CREDENTIALS=theirs.to_text(), **more)
    assert second.processes[1].wait(WITHIN) == 1
    assert re.search(rf"^\[monarch\] (FAILED: )?host 1: {why}", second.err(1), re.M), second.err(1)
    # On a busy machine there are lines about the wait, too.
    assert len([line for line in second.err(1).splitlines() if "waiting for replica 0" not in line]) <= 2
    assert first.processes[0].poll() is None


@pytest.mark.parametrize(
    ("rendezvous", "why"),
    [
        ("tls:127.0.0.1:{port}", r"127.0.0.1:{port}: connection refused: nothing listens there \(yet\)"),
        ("tls:127.0.0.1:{full}", r"127.0.0.1:{full}: unreachable: no answer within 4 s \(a firewall, or a cut link\)"),
        ("tls:no-such-host.invalid:{port}", "the name 'no-such-host.invalid' cannot be resolved"),
        ("insecure-tcp:127.0.0.1:{port}", "127.0.0.1:{port}: connection refused"),
    ],
)
def test_a_host_that_finds_nobody_says_where_it_looks(
    start: Callable[..., Hosts], port: int, rendezvous: str, why: str
) -> None:
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # and takes nobody: who connects gets no answer
        for _ in range(4):
            bound = stack.enter_context(socket.socket())
            bound.setblocking(False)
            bound.connect_ex(full.getsockname())
        ports = {"port": port, "full": full.getsockname()[1]}
        secret = credentials.create()[0].to_text()
        hosts = start(1, rendezvous=rendezvous.format(**ports), MONARCH_CREDENTIALS=secret)
        line = rf"^\[monarch\] waiting for replica 0 \(.*{why.format(**ports)}"
        until(lambda: re.search(line, hosts.err(1), re.M), f"{line} in {hosts.err(1)}")
        assert hosts.err(1).count("waiting") == 1, hosts.err(1)  # the first of these lines says it, after five seconds


def test_a_host_without_credentials_says_so(start: Callable[..., Hosts]) -> None:
    """What else a value may lack is in ``tests/unit/test_credentials.py``."""
    pem = base64.b64encode(
        b'{"authority": "-----BEGIN X", "key": "-----BEGIN HUNTER2", "client_authority": "-----BEGIN X"}'
    ).decode()
    wrong = {
        "": "MONARCH_CREDENTIALS is not set: without the job's credentials a host can neither prove itself",
        pem: "MONARCH_CREDENTIALS does not hold a job's credentials: its PEM cannot be read",
    }
    for value, why in wrong.items():
        for replica in (0, 1):
            hosts = start(replica, MONARCH_CREDENTIALS=value)
            assert hosts.processes[replica].wait(WITHIN) == 1
            said = (hosts.logs(replica) / "err").read_text()
            assert f"host {replica}: " in said and why in said, said
            assert "hunter2" not in said.lower()
            (hosts.logs(replica) / "err").unlink()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ("--advertise", "127.0.0.9", "--bind", "127.0.0.1"),
            r"cannot be reached .*: 127.0.0.9:\d+: connection refused",
        ),
        (("--advertise", "no-such-host.invalid"), "cannot be reached .*: the name 'no-such-host.invalid' cannot be re"),
        (("--ports", "{port}"), r"no worker loop for actors: cannot start: none of the ports .* \(--ports\) can be op"),
    ],
)
def test_a_client_is_told_which_worker_loop_cannot_be_reached(
    start: Callable[..., Hosts],
    port: int,
    tmp_path: Path,
    options: tuple[str, ...],
    why: str,
) -> None:
    secret, client = credentials.create()
    go = tmp_path / "go"
    waits = f"until [ -e {go} ]; do sleep 0.1; done"
    first = start(0, does=waits, MONARCH_CREDENTIALS=secret.to_text())
    options = tuple(word.format(port=port) for word in options)
    second = start(1, *options, does=waits, MONARCH_CREDENTIALS=secret.to_text())
    until(lambda: "ranks 2/2" in first.err(0), "the ranks")
    with attaching(port, client) as link, pytest.raises(RefusedError, match=f"host 1 .*{why}"):
        link.answer(WITHIN)
    go.touch()
    assert [hosts.wait() for hosts in (first, second)] == [[0], [0]]


@contextlib.contextmanager
def attaching(port: int, client: ClientCredentials) -> Iterator[Connection]:
    """A Monarch client for which the hosts start their worker loops."""
    target = Target(Address("tls", "127.0.0.1", port), credentials=client.to_text())
    with Connection.open(target, {"type": "attach", "names": ["127.0.0.1"]}) as link:
        assert link.answer(WITHIN)["type"] == "attaching"
        yield link


def listening(pid: int) -> dict[int, str]:
    """Ports on which a process listens, and the address of each."""
    lines = subprocess.run(
        ["ss", "-tlnpH"], capture_output=True, text=True, check=True, timeout=WITHIN
    ).stdout.splitlines()
    places = [line.split()[3].rpartition(":") for line in lines if f"pid={pid}," in line]
    return {int(port): address for address, _, port in places}


@pytest.mark.parametrize(
    ("bind", "attaches"), [("127.0.0.1", False), ("lo", False), ("lo", True)], ids=["address", "lo", "loop"]
)
def test_opens_what_it_is_told_to_and_nothing_else(
    start: Callable[..., Hosts],
    port: int,
    tmp_path: Path,
    bind: str,
    attaches: bool,
) -> None:
    secret, client = credentials.create()
    go = tmp_path / "go"
    low = port + 1
    options = ("--bind", bind, "--ports", f"{low}-{low + 7}")
    both = [
        start(
            replica,
            *options,
            does=f"until [ -e {go} ]; do sleep 0.1; done",
            MONARCH_CREDENTIALS=secret.to_text(),
        )
        for replica in (0, 1)
    ]
    until(lambda: "ranks 2/2" in both[0].err(0), "the ranks")
    with contextlib.ExitStack() as stack:
        if attaches:
            link = stack.enter_context(attaching(port, client))
            assert link.answer(WITHIN)["type"] == "attached"
        for replica, hosts in enumerate(both):
            host = psutil.Process(hosts.processes[replica].pid)
            found: dict[int, str] = {}
            for process in (host, *host.children(recursive=True)):
                found |= listening(process.pid)
            assert set(found.values()) <= {"127.0.0.1"}
            assert all(low <= opened <= low + 7 for opened in found if opened != port), found
            assert len(found) == attaches + (replica == 0), "the rendezvous, and a worker loop"
    go.touch()
    assert [hosts.wait() for hosts in both] == [[0], [0]]


def test_says_what_is_wrong_with_an_option(start: Callable[..., Hosts], port: int) -> None:
    secret = credentials.create()[0].to_text()
    wrong = {
        ("--bind", "nonsense"): "--bind nonsense: neither an address nor an interface of this machine, which has",
        ("--advertise", "nöde"): "'nöde' is no name that a certificate can hold",
    }
    for options, why in wrong.items():
        hosts = start(1, *options, MONARCH_CREDENTIALS=secret)
        assert hosts.processes[1].wait(WITHIN) == 1
        assert re.search(why, hosts.err(1)), hosts.err(1)
    with socket.create_server(("", port)):
        hosts = start(0, MONARCH_CREDENTIALS=secret)
        assert hosts.processes[0].wait(WITHIN) == 1
        assert f"cannot listen for the other hosts at tls:127.0.0.1:{port}: Address already in use" in hosts.err(0)
