# SPDX-License-Identifier: BSD-3-Clause
"""The certificates of a job: what they allow, and what is said of something else in their place."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import ipaddress
import json
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from torchx_monarch.transport import credentials
from torchx_monarch.transport.credentials import ClientCredentials, CredentialsError, HostCredentials


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
