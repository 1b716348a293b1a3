# SPDX-License-Identifier: BSD-3-Clause
"""What the submitting machine keeps of a job's credentials, what these allow, and the end of a Monarch client."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import ipaddress
import json
import os
import pickle
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.waits import WITHIN
from torchx_monarch.backends.core import stored_apps
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.client import connection
from torchx_monarch.client.connection import Connection, Target
from torchx_monarch.exceptions import AllocationError, ClientError, UnreachableError
from torchx_monarch.transport import credentials
from torchx_monarch.transport.address import Address
from torchx_monarch.transport.credentials import ClientCredentials, CredentialsError, HostCredentials

if TYPE_CHECKING:
    from torchx_monarch.client.attached_job import Attachment

_PARTS = ("authority", "certificate", "key")


def test_is_for_its_owner_alone_until_the_app_is_deleted() -> None:
    stored, kept = stored_apps.credentials("monarch_batch"), credentials.create()[1].to_text()
    content = stored_apps.StoredCredentials(kept, {"r": "tls:@HOST:1"})
    before = os.umask(0)
    try:
        stored.store("queue:app/1", content)
    finally:
        os.umask(before)
    path = Path(stored.path("queue:app/1"))
    assert stored_apps.load_credentials("monarch_batch", "queue:app/1") == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in list(path.parents)[:2])
    stored.remove("queue:app/1")
    stored.remove("queue:app/1")
    assert not path.exists()
    assert stored_apps.load_credentials("monarch_batch", "queue:app/1") == stored_apps.StoredCredentials()


def test_a_stray_file_hides_no_app(caplog: pytest.LogCaptureFixture) -> None:
    for scheduler in ("monarch_batch", "monarch_slurm", "monarch_ssh"):
        stored_apps.credentials(scheduler).store("7", stored_apps.StoredCredentials("secret", {}))
    clients = Path(stored_apps.credentials("monarch_slurm").path("7")).parent.parent
    for folder in (clients, clients / "monarch_ssh"):
        (folder / ".DS_Store").write_text("")
    (clients / "aaa").write_text("")
    linked = clients / "monarch_slurm"
    linked.rename(clients.parent / "elsewhere")
    linked.symlink_to(clients.parent / "elsewhere")
    assert stored_apps.apps_with_credentials() == [("monarch_batch", "7"), ("monarch_ssh", "7")]
    assert f"{linked}: is a symbolic link" in caplog.text
    stored_apps.credentials("monarch_slurm").remove("7")
    assert (clients.parent / "elsewhere" / "7").exists()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", "garbage"),
        ("", "tls:127.0.0.1:²"),
        ("", f"tls:127.0.0.1:{'9' * 5000}"),
        ("", "tls:127.0.0.1:1"),
        ("e30=", "tls:127.0.0.1:1"),
        (base64.b64encode(b"[" * 50_000).decode(), "tls:127.0.0.1:1"),
        (base64.b64encode(json.dumps(dict.fromkeys(_PARTS, "-----BEGIN é")).encode()).decode(), "tls:127.0.0.1:1"),
        (base64.b64encode(json.dumps(dict.fromkeys(_PARTS, "-----BEGIN x")).encode()).decode(), "tls:127.0.0.1:1"),
    ],
)
def test_a_damaged_file_leads_to_no_host(text: str, address: str) -> None:
    stored_apps.credentials("monarch_slurm").store("7", stored_apps.StoredCredentials(text, {"r": address}))
    with pytest.raises(UnreachableError) as error:
        Connection.open(Target.from_handle("monarch_slurm://torchx/7", "r"), {"type": "state"})
    assert error.value.final


def test_a_replica_0_that_reads_nothing_is_not_waited_for_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_SEND_TIMEOUT", 0.01)
    ours, theirs = socket.socketpair()
    with theirs, ours, pytest.raises(UnreachableError, match="the connection broke: timed out"):
        Connection(ours, Address("unix", path="/r.sock")).send_bytes(b"x" * (1 << 24))


class _Link:
    """A connection to replica 0, open until it is closed."""

    def __init__(self) -> None:
        self.closed = False

    def receive(self, timeout: float) -> None:
        if not self.closed:
            raise TimeoutError
        raise UnreachableError("closed")

    def close(self) -> None:
        self.closed = True


def _attached(address: str, leaf: Mapping[str, str] | None = None) -> Attachment:
    from torchx_monarch.client.attached_job import Attachment

    return Attachment(cast(Connection, _Link()), Address.parse(address, "test"), [], leaf)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Ran out of input"),
        (pickle.dumps("x" * 100)[:50], "pickle data was truncated"),
        (pickle.dumps({}), "'dict' object has no attribute 'active'"),
        (None, "it was saved by torchx-monarch 0.0.1, and this is "),
    ],
    ids=["empty", "truncated", "no job", "another version"],
)
def test_a_cached_job_that_cannot_be_loaded_is_removed(
    content: bytes | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from torchx_monarch import MonarchJob, SPMDJob

    cached, link = tmp_path / "state.pkl", tmp_path / "job_state.pkl"
    link.symlink_to(cached)
    for job in (SPMDJob("monarch_local://torchx/nosuch"), MonarchJob({"t": 1}, scheduler="nosuch")):
        with monkeypatch.context() as patch:
            patch.setattr("torchx_monarch.client.attached_job.__version__", "0.0.1")
            cached.write_bytes(job.dumps() if content is None else content)
        with pytest.raises((AllocationError, UserError)):  # of the job that is applied instead
            job.state(str(link))
        assert f"removing the cached state of a job, {cached}: it cannot be loaded: {why}" in caplog.text
        caplog.clear()
        assert link.is_symlink() and not cached.exists()


def test_only_jobs_of_this_package_have_hosts_to_attach_to() -> None:
    from torchx_monarch import SPMDJob

    with pytest.raises(UserError, match="local_cwd is a scheduler of another package, .* are monarch_local, "):
        SPMDJob.attach("local_cwd://torchx/x")


def test_one_job_on_a_network_for_a_process() -> None:
    from torchx_monarch.client.attached_job import _Client

    client = _Client()
    here, first, second = map(_attached, ("unix:/x", "insecure-tcp:127.0.0.1:1", "insecure-tcp:127.0.0.1:2"))
    url, _ = client.join("monarch_slurm://torchx/first", first)
    assert url.startswith("tcp://") and url.endswith(":0")
    assert client.join("monarch_local://torchx/here", here) == ("", [])
    assert client.join("monarch_slurm://torchx/first", first) == (url, [])
    with pytest.raises(ClientError, match=r"a client of monarch_slurm://torchx/first, .* kill\(\) that job first"):
        client.join("monarch_slurm://torchx/second", second)
    first.link.close()
    assert client.join("monarch_slurm://torchx/second", second) == (url, [])


_PROGRAM = """
import sys, threading, time
{first}
from torchx_monarch.monarch_adapter import monarch_api
monarch_api.prepare_import()

def monarch():  # as one of its threads that has not ended within Monarch's second
    with open(f"/proc/self/task/{{threading.get_native_id()}}/comm", "w") as name:
        name.write("monarch-pytokio")
    named.set()
    time.sleep({seconds})
    print("ended", flush=True)

named = threading.Event()
threading.Thread(target=monarch, daemon=True).start()
named.wait()
"""


@pytest.mark.parametrize(
    ("first", "seconds", "printed"),
    [("", 0.5, "ended\n"), ("sys.modules['monarch._rust_bindings'] = sys", 1000, "")],
    ids=["Monarch is imported later", "Monarch was imported before, and its threads are told to end last"],
)
def test_it_waits_for_monarchs_threads(first: str, seconds: float, printed: str) -> None:
    command = [sys.executable, "-c", _PROGRAM.format(first=first, seconds=seconds)]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")  # nothing about Monarch's log file


def test_a_closed_stderr_is_closed_after_the_import_of_monarch() -> None:
    text = """
import os
from torchx_monarch.monarch_adapter import attachment
os.close(2)
with attachment.without_noise():
    os.write(1, os.path.exists("/proc/self/fd/2") and b"open" or b"closed")
"""
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=WITHIN).stdout == b"closed"


def certificate(pem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem.encode())


def test_come_back_from_their_text(tmp_path: Path) -> None:
    hosts, client = credentials.create()
    assert HostCredentials.load(hosts.to_text()) == hosts
    assert ClientCredentials.from_text(client.to_text()) == client
    path = tmp_path / "secret"
    path.write_text(hosts.to_text() + "\n")  # as an editor or `echo` leaves it
    assert HostCredentials.load(f"file:{path}") == hosts


def test_a_certificate_names_its_host_and_ends_with_the_job() -> None:
    hosts, client = credentials.create()
    authority, leaf = certificate(hosts.authority), certificate(hosts.sign(["node7", "10.0.0.7", "node7"]).certificate)
    leaf.verify_directly_issued_by(authority)
    assert leaf.not_valid_after_utc == authority.not_valid_after_utc
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["node7"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("10.0.0.7")]
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0


def test_a_clients_certificate_is_no_hosts_and_serves_nothing() -> None:
    hosts, client = credentials.create()
    leaf = certificate(client.certificate)
    leaf.verify_directly_issued_by(certificate(hosts.client_authority))
    with pytest.raises(ValueError):
        leaf.verify_directly_issued_by(certificate(hosts.authority))
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    # And what the client keeps holds no authority's key.
    assert hosts.key not in client.to_text() and base64.b64decode(client.to_text()).count(b"PRIVATE KEY") == 2


def test_nothing_shows_a_key() -> None:
    hosts, client = credentials.create()
    for value in (hosts, client, hosts.sign(["node7"])):
        assert "BEGIN" not in repr(value) and "BEGIN" not in str(value)


def test_something_else_is_named_and_not_shown(tmp_path: Path) -> None:
    def packed(what: object) -> str:
        return base64.b64encode(json.dumps(what).encode()).decode()

    for text in ("hunter2", "", packed([1]), packed({"key": "hunter2"})):
        with pytest.raises(CredentialsError, match="MONARCH_CREDENTIALS .* with authority, key, client_auth") as caught:
            HostCredentials.load(text)
        assert "hunter2" not in str(caught.value)

    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\x00" * 100)
    with pytest.raises(CredentialsError, match=f"not JSON in base64 .*, in {binary}"):
        HostCredentials.load(f"file:{binary}")
    with pytest.raises(CredentialsError, match=f"cannot be read: {tmp_path}/no: No such file"):
        HostCredentials.load(f"file:{tmp_path}/no")
    with pytest.raises(CredentialsError, match=f"cannot be read: {tmp_path}: Is a directory"):
        HostCredentials.load(f"file:{tmp_path}")


def test_pem_of_something_else_cannot_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, _ = credentials.create()
    for change in ({"authority": "-----BEGIN X"}, {"key": "-----BEGIN X"}, {"client_authority": "-----BEGIN X"}):
        with pytest.raises(CredentialsError, match="its PEM cannot be read"):
            dataclasses.replace(hosts, **change).sign(["node7"])
    monkeypatch.setattr(credentials, "VALID_FOR", datetime.timedelta(seconds=-1))
    with pytest.raises(CredentialsError, match="the job's certificates have expired, .* or the clock of this machine"):
        credentials.create()[0].sign(["node7"])
    with pytest.raises(CredentialsError, match="'nöde' is no name that a certificate can hold"):
        hosts.sign(["nöde"])
