# SPDX-License-Identifier: BSD-3-Clause
"""What protects a job on a network, tried from a machine that has no business with it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.local.hosts import Hosts
from tests.network.conftest import PORT
from tests.network.namespaces import Network, requires_namespaces
from tests.waits import WITHIN, until
from torchx_monarch.client.connection import Connection, Target
from torchx_monarch.transport import connections, credentials, messages
from torchx_monarch.transport.connections import Address, Identity
from torchx_monarch.transport.credentials import ClientCredentials, HostCredentials

pytestmark = requires_namespaces

_REFUSED_WITHIN = 60.0

_LOOKED_ON = 30.0
"""Seconds after which a connection that has sent nothing counts as kept; what is proposed to upstream is 10 s."""

_STRANGER = 2
"""The machine that has no part in the job."""


@dataclasses.dataclass
class Job:
    """Two hosts whose ranks wait, and a third machine beside them."""

    network: Network
    hosts: Hosts
    credentials: HostCredentials
    client: ClientCredentials
    go: Path

    @property
    def rendezvous(self) -> Address:
        """Where replica 0 listens."""
        return Address("tls", self.network.address(0), PORT)

    @property
    def ports(self) -> list[tuple[str, int, int]]:
        """Address, port and process of everything that listens, on both machines."""
        return [(self.network.address(at), port, pid) for at in (0, 1) for port, pid in self.network.listeners(at)]

    def finish(self) -> None:
        """Let the ranks end; the job must succeed."""
        assert all(process.poll() is None for process in self.hosts.processes.values()), "the job was disturbed"
        self.go.touch()
        assert self.hosts.wait() == [0, 0], self.hosts.err() + self.hosts.err(1)
        assert "SUCCEEDED" in self.hosts.err()
        assert not list(self.hosts.folder.glob("h*")), "folders with keys are left"

    def talk(self, identity: Identity, message: dict[str, Any]) -> dict[str, Any] | None:
        """Send one message to the rendezvous from the third machine; the answer."""

        async def ask() -> dict[str, Any] | None:
            reader, writer = await connections.connect(self.rendezvous, identity, _REFUSED_WITHIN)
            await messages.send(writer, {"version": messages.VERSION, **message})
            answer = await messages.receive(reader, _REFUSED_WITHIN)
            writer.close()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), _REFUSED_WITHIN)
            return answer

        with self.network.entered(_STRANGER):
            return asyncio.run(ask())

    def client_identity(self) -> Identity:
        """The submitter's."""
        paths = []
        for name, text in (("cert", self.client.certificate), ("key", self.client.key)):
            paths.append(self.go.with_name(f"client.{name}"))
            paths[-1].write_text(text)
        authority = self.go.with_name("client.ca")
        authority.write_text(self.client.authority)
        return Identity(str(paths[0]), str(paths[1]), str(authority))


@pytest.fixture
def job(
    network: Callable[[int], Network],
    networked: Callable[..., Hosts],
    tmp_path: Path,
) -> Iterator[Job]:
    machines = network(3)
    go = tmp_path / "go"
    hosts_credentials, client = credentials.create()
    waits = ["sh", "-c", f"until [ -e {go} ]; do sleep 0.1; done"]
    ranks = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--tee", "3", "--no-python", *waits]
    hosts = networked(
        machines,
        ranks,
        # As the first of several roles.
        options=("--grace", "5", "--preload", "", "--peer-roles", "1"),
        environ={"MONARCH_CREDENTIALS": hosts_credentials.to_text()},
    ).start()
    try:
        until(lambda: "ranks 4/4" in hosts.err(), "the ranks")
        yield Job(machines, hosts, hosts_credentials, client, go)
    finally:
        go.touch()
        hosts.wait()


@pytest.fixture
def workers(job: Job) -> Iterator[list[str]]:
    """The addresses of the worker loops of both hosts, to which a client has attached."""
    target = Target(job.rendezvous, credentials=job.client.to_text())
    with job.network.entered(_STRANGER):
        link = Connection.open(target, {"type": "attach", "names": [job.network.address(_STRANGER)]})
    with link:
        assert link.answer(WITHIN)["type"] == "attaching"
        yield [host["address"] for host in link.answer(WITHIN)["hosts"]]


def s_client(job: Job, address: str, port: int, *more: str) -> str:
    """What openssl says of a connection, which the other end must end."""
    command = [*job.network.within(_STRANGER), "openssl", "s_client", "-connect", f"{address}:{port}", *more]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        # Its stdin stays open: it ends when the other end does.
        process.wait(_REFUSED_WITHIN)
        assert process.stdout is not None
        return process.stdout.read().decode()
    finally:
        process.kill()
        process.communicate(timeout=WITHIN)


_MONARCH_CLIENT = """
import sys, time
from monarch import actor
actor.unhandled_fault_hook = lambda failure: None
actor.enable_transport(sys.argv[1])
meshes = [actor.attach_to_workers(ca="trust_all_connections", workers=[at], name=f"m{number}")
          for number, at in enumerate(sys.argv[3:])]
until = time.monotonic() + float(sys.argv[2])
for at, mesh in zip(sys.argv[3:], meshes):
    try:
        mesh.initialized.get(timeout=max(0.1, until - time.monotonic()))
        print("attached", at, flush=True)
    except Exception as error:
        print("refused", at, str(error)[:60].replace(chr(10), " "), flush=True)
import os
os._exit(0)
"""


def monarch_client(
    job: Job, scheme: str, tls: Identity | None, workers: list[str], seconds: float = 4.0
) -> subprocess.Popen[str]:
    """Start a Monarch client on the third machine that tries for so long to attach to workers."""
    environ = dict(os.environ)
    if tls is not None:
        names = ("HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY", "HYPERACTOR_TLS_CA")
        environ.update(zip(names, tls.files, strict=True))
    environ["MONARCH_LOG_SUFFIX"] = "to-stderr" * 32
    transport_url = f"{scheme}://{job.network.address(_STRANGER)}:0"
    return subprocess.Popen(
        [*job.network.within(_STRANGER), sys.executable, "-c", _MONARCH_CLIENT, transport_url, str(seconds), *workers],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_nobody_without_a_certificate_of_the_job_gets_in_anywhere(job: Job, workers: list[str], folder: Path) -> None:
    own = {process.pid for process in job.hosts.processes.values()}
    ports = job.ports
    # The rendezvous, and Monarch's worker loop on either machine.
    assert len(ports) == 3, ports
    listening = [pid for _, _, pid in ports]
    assert len(own.intersection(listening)) == 1
    assert all(pid in own or b"worker_loop_main" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in listening)

    foreign = Identity.from_credentials(credentials.create()[0], [job.network.address(_STRANGER)], str(folder))
    for address, port, _ in ports:
        for certificate in ((), ("-cert", foreign.certificate, "-key", foreign.key)):
            said = s_client(job, address, port, *certificate)
            # Monarch does not always wait until its alert has gone.
            assert re.search("alert|eof|reset", said), f"{address}:{port} {certificate} was not refused: {said}"
        with job.network.entered(_STRANGER):
            plain = socket.create_connection((address, port), timeout=_REFUSED_WITHIN)
        with plain, contextlib.suppress(ConnectionResetError):
            plain.sendall(b'{"type": "state", "version": 1}\n' + b"x" * 100)
            answer = b""
            while more := plain.recv(1000):  # until it is closed; in time, or this raises
                answer += more
            assert b"hosts" not in answer

    # An attacker who knows it all but has no key: the workers' full addresses, with their secret ids.
    everywhere = [f"{address}:{port}" for address, port, _ in ports]
    ours = Identity.from_credentials(job.credentials, [job.network.address(_STRANGER)], str(folder))
    plain_tcp = [*(f"tcp://{at}" for at in everywhere), *(at.replace("tls://", "tcp://") for at in workers)]
    with_tls = [*(f"tls://{at}" for at in everywhere), *workers]
    clients = {
        "plain": monarch_client(job, "tcp", None, plain_tcp),
        "foreign": monarch_client(job, "tls", foreign, with_tls),
        "client": monarch_client(job, "tls", job.client_identity(), with_tls),
        "ours": monarch_client(job, "tls", ours, workers, 60.0),
    }
    answers = {name: client.communicate(timeout=WITHIN)[0] for name, client in clients.items()}
    for name in ("plain", "foreign", "client"):
        assert answers[name].count("refused") == len(with_tls) and "attached" not in answers[name], answers
    # The same client with a host's certificate does attach: the others were not kept out by something else.
    assert answers["ours"].count("attached") == 2, answers
    job.finish()


def test_a_client_looks_and_stops_and_does_nothing_else(job: Job) -> None:
    me = job.client_identity()
    state = job.talk(me, {"type": "state"})
    assert state is not None and [host["replica"] for host in state["hosts"]] == [0, 1]
    assert state["missing"] == [] and not state["ended"]
    refused = job.talk(me, {"type": "register", "host": state["hosts"][1]})
    assert refused is not None and refused["type"] == "refused"
    assert "a client may look at the job and stop it" in refused["reason"]
    refused = job.talk(me, {"type": "register-role", "role": "b"})
    assert refused is not None and refused["type"] == "refused"
    assert "a client may look at the job and stop it" in refused["reason"]
    assert all(process.poll() is None for process in job.hosts.processes.values())
    assert (job.talk(me, {"type": "stop"}) or {})["type"] == "state"
    assert job.hosts.wait() == [143, 143]
    assert "the job was stopped by its client" in job.hosts.err()


def in_every_guise(key: str) -> set[bytes]:
    """What shows that a private key in PEM stands somewhere: its lines, and what base64 makes of them."""
    lines = [line.encode() for line in key.splitlines() if "-----" not in line]
    joined = b"".join(lines)
    # Base64 of it within something else begins at one of three places; the ends depend on what is around.
    coded = {base64.b64encode(b"x" * shift + line)[4:-4] for line in [joined, *lines] for shift in range(3)}
    return {*lines, joined, *coded, base64.b64decode(joined)}


def descendants(pid: int) -> set[int]:
    """A process and all that it has started."""
    with contextlib.suppress(OSError):  # the shell of a rank starts `sleep` again and again
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {pid}.union(*(descendants(int(child)) for child in children))
    return set()


def places_with(secrets: set[bytes], places: Iterable[Path]) -> list[Path]:
    """Those that hold one of the secrets."""
    found = []
    for place in places:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            content = place.read_bytes()
            found += [place] if any(secret in content for secret in secrets) else []
    return found


def test_a_private_key_stands_in_one_file_while_it_is_needed(job: Job, folder: Path, tmp_path: Path) -> None:
    hosts = {process.pid for process in job.hosts.processes.values()}
    key_files = [path for path in folder.rglob("tls*") if "PRIVATE KEY" in path.read_text()]
    assert len(key_files) == 2
    for path in key_files:
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    authoritys = in_every_guise(job.credentials.key)
    leafs = set.union(*(in_every_guise(path.read_text()) for path in key_files))
    all_of = {*authoritys, *leafs, job.credentials.to_text().encode()[-100:]}

    family = set.union(*(descendants(pid) for pid in hosts))
    assert len(family) >= 2 + 4, "two hosts, four ranks"
    environs = [Path(f"/proc/{pid}/environ") for pid in family]
    # This finds them: the hosts were given the authority's, in their environment.
    assert set(places_with(authoritys, environs)) == {Path(f"/proc/{pid}/environ") for pid in hosts}
    assert not places_with(leafs, environs)
    assert not places_with(all_of, Path("/proc").glob("[0-9]*/cmdline"))
    files = [path for root in (folder, tmp_path) for path in root.rglob("*") if path.is_file()]
    assert {"events.jsonl", "monarch.log", "err", "stdout.log"} <= {path.name for path in files}
    assert set(places_with(all_of, files)) == set(key_files)

    job.hosts.processes[1].kill()  # a failure: error files are written, and the most is said
    job.hosts.wait()
    assert (job.hosts.logs(0) / "error.json").exists()
    files = [path for root in (folder, tmp_path) for path in root.rglob("*") if path.is_file()]
    left = set(places_with(all_of, files))
    # Who is killed cannot tidy up; that folder goes with the job's, which the backend removes.
    assert left <= set(key_files) and len(left) == 1
    assert not [path for path in folder.iterdir() if path.name.startswith("h") and path not in {left.pop().parent}]


def resident(pid: int) -> int:
    """Memory of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) // 1024
    raise AssertionError("no VmRSS")


def open_files(pid: int) -> int:
    """How many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def attack(job: Job, victim: int, port: int, *more: str) -> tuple[dict[str, int], int, float]:
    """Run the attacks on a port of machine 0: how many there were, the most memory meanwhile, and the slowest look."""
    me = job.client_identity()
    command = [sys.executable, "-m", "tests.network.attacks", job.network.address(0), str(port), *more]
    root = Path(__file__).parents[2]
    process = subprocess.Popen([*job.network.within(_STRANGER), *command], stdout=subprocess.PIPE, cwd=root)
    most, slowest, looked = 0, 0.0, 0.0
    try:
        while process.poll() is None:
            most = max(most, resident(victim))
            if time.monotonic() > looked + 2:
                looked = time.monotonic()
                answer = job.talk(me, {"type": "state"})
                assert answer is not None and answer["type"] == "state", answer
                slowest = max(slowest, time.monotonic() - looked)
            time.sleep(0.1)
    finally:
        process.kill()
        out = process.communicate(timeout=WITHIN)[0]
    assert process.returncode == 0
    return json.loads(out), most, slowest


@pytest.mark.slow
def test_a_thousand_connections_that_nobody_wants(job: Job, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """1,000, and 8,500 under ``--hypothesis-profile nightly``."""
    hundreds = 100 if pytestconfig.getoption("hypothesis_profile") == "nightly" else 12
    secret = tmp_path / "hosts"
    secret.write_text(job.credentials.to_text())
    victim = job.hosts.processes[0].pid
    memory, files = resident(victim), open_files(victim)
    log = job.hosts.logs(0) / "monarch.log"
    logged = log.stat().st_size + (job.hosts.logs(0) / "err").stat().st_size

    started = time.monotonic()
    done, most, slowest = attack(job, victim, PORT, str(secret), str(hundreds))
    print(f"{done} in {time.monotonic() - started:.0f} s; {memory} MB before, {most} at most; look {slowest:.1f} s")

    assert sum(done.values()) >= 85 * hundreds, done
    assert most < memory + 50, f"{memory} MB before, {most} MB at most"
    until(lambda: open_files(victim) <= files + 5, "the connections to be closed")
    grown = log.stat().st_size + (job.hosts.logs(0) / "err").stat().st_size - logged
    assert grown < 20_000, log.read_text()[-3000:]
    job.finish()


@pytest.mark.usefixtures("workers")
def test_hundreds_of_unauthenticated_clients_on_the_ports_of_monarch(job: Job) -> None:
    on_host_0 = [(port, pid) for address, port, pid in job.ports if address == job.network.address(0) and port != PORT]
    ((port, victim),) = on_host_0
    memory, files = resident(victim), open_files(victim)
    log = job.hosts.logs(0) / "err"
    logged = log.stat().st_size
    done, most, _ = attack(job, victim, port)
    print(f"{done}; {memory} MB before, {most} at most; log {log.stat().st_size - logged} bytes")
    assert sum(done.values()) >= 300
    assert most < memory + 50, f"{memory} MB before, {most} MB at most"
    until(lambda: open_files(victim) <= files + 5, "the connections to be closed")
    assert log.stat().st_size - logged < 200_000
    job.finish()


@pytest.mark.usefixtures("workers")
@pytest.mark.nightly("it watches for half a minute whether upstream has fixed a fault")
def test_monarch_keeps_silent_connections(job: Job) -> None:
    """If this fails, docs/explanation/upstream.md has a section, and security.md a limit, that can go."""
    silent: dict[socket.socket, int] = {}
    try:
        for address, port, _ in job.ports:
            with job.network.entered(_STRANGER):
                silent[socket.create_connection((address, port), timeout=_REFUSED_WITHIN)] = port
        closed, deadline = set(), time.monotonic() + _LOOKED_ON
        while (left := deadline - time.monotonic()) > 0 and (ended := select.select(list(silent), [], [], left)[0]):
            for connection in ended:
                closed.add(silent.pop(connection))
                connection.close()
        assert closed == {PORT}, "replica 0's own port closes them, Monarch's two do not"
        assert len(silent) == 2
    finally:
        for connection in silent:
            connection.close()
    job.finish()
