# SPDX-License-Identifier: BSD-3-Clause
"""The certificates of one job. They are created when the job is submitted and are valid for that job only.

Each job has two certificate authorities. Every host carries the hosts' authority with its key, and signs its own
certificate for the names by which it is dialled when it starts, on any machine. The client's authority signs one
certificate, for the client that submitted the job; its key is then discarded. Hosts trust each other by the hosts'
authority only: a client's certificate gives access to the rendezvous, and none to Monarch.

All keys are P-256. The module is imported only where hosts talk over a network: ``cryptography`` takes 30 ms.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import ipaddress
import json
from collections.abc import Iterable, Sequence
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.system import safe_files

HOST_AUTHORITY, CLIENT_AUTHORITY = "torchx-monarch hosts", "torchx-monarch client"
"""Common names of the authorities that sign the hosts' certificates, and the client's."""

VALID_FOR = datetime.timedelta(days=90)
"""Validity of a job's certificates, and so the longest lifetime of a job."""

T = TypeVar("T", bound="_Credentials")

_SKEW = datetime.timedelta(hours=1)
"""Largest tolerated difference between the clocks of two machines."""


class CredentialsError(ValueError):
    """The text does not hold a job's credentials; the message says why, and never shows the text."""


@dataclasses.dataclass(frozen=True, repr=False)
class Leaf:
    """A certificate and its private key, as PEM."""

    certificate: str
    key: str


@dataclasses.dataclass(frozen=True, repr=False)
class _Credentials:
    def to_text(self) -> str:
        """Return the credentials as one line of base64, for an environment variable or a backend's secret."""
        return base64.b64encode(json.dumps(dataclasses.asdict(self)).encode()).decode()

    @classmethod
    def from_text(cls: type[T], text: str) -> T:
        names = [field.name for field in dataclasses.fields(cls)]
        try:
            values = safe_files.parse_json(base64.b64decode(text, validate=True))
            return cls(**{name: str(values[name]) for name in names})
        except (ValueError, KeyError, TypeError):
            why = f"not JSON in base64 with {', '.join(names)}"
            raise CredentialsError(f"{CREDENTIALS} does not hold a job's credentials: {why}") from None


@dataclasses.dataclass(frozen=True, repr=False)
class ClientCredentials(_Credentials):
    """The credentials of the submitting machine: a certificate with which a client can query and stop the job.

    The client verifies hosts by the certificate of their authority.
    """

    authority: str
    certificate: str
    key: str


@dataclasses.dataclass(frozen=True, repr=False)
class HostCredentials(_Credentials):
    """The credentials that every host of a job carries: certificate and key of the hosts' authority."""

    authority: str
    key: str
    client_authority: str

    @classmethod
    def load(cls, value: str) -> HostCredentials:
        """Read the credentials from the value of ``env_names.CREDENTIALS``: the text itself, or ``file:PATH``."""
        if not value.startswith("file:"):
            return cls.from_text(value)
        path = value[len("file:") :]
        try:
            with open(path, errors="replace") as file:
                text = file.read().strip()
        except OSError as error:
            why = f"{CREDENTIALS} names a file that cannot be read: {path}: {error.strerror}"
            raise CredentialsError(why) from None
        try:
            return cls.from_text(text)
        except CredentialsError as error:
            raise CredentialsError(f"{error}, in {path}") from None

    def sign(self, names: Iterable[str]) -> Leaf:
        """Sign a certificate for this host."""
        try:
            authority = x509.load_pem_x509_certificate(self.authority.encode())
            x509.load_pem_x509_certificate(self.client_authority.encode())
            key = serialization.load_pem_private_key(self.key.encode(), None)
        except (ValueError, TypeError):  # TypeError for a key with a password
            raise CredentialsError(f"{CREDENTIALS} does not hold a job's credentials: its PEM cannot be read") from None
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        if authority.not_valid_after_utc < datetime.datetime.now(datetime.timezone.utc):
            raise CredentialsError(
                f"the job's certificates have expired, {authority.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: the job is "
                "older than that, or the clock of this machine is wrong"
            )
        usages = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
        return _leaf("host", authority, key, usages, sorted(set(names)))


def create() -> tuple[HostCredentials, ClientCredentials]:
    """Create the credentials of a new job, for its hosts and for its client."""
    hosts, hosts_key = _authority(HOST_AUTHORITY)
    clients, clients_key = _authority(CLIENT_AUTHORITY)
    leaf = _leaf("client", clients, clients_key, (ExtendedKeyUsageOID.CLIENT_AUTH,), ())
    ours = HostCredentials(_pem(hosts), _key_pem(hosts_key), _pem(clients))
    return ours, ClientCredentials(_pem(hosts), leaf.certificate, leaf.key)


def _authority(name: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    end = datetime.datetime.now(datetime.timezone.utc) + VALID_FOR
    return _builder(name, name, key, end, is_authority=True).sign(key, hashes.SHA256()), key


def _leaf(
    name: str,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    usages: Sequence[x509.ObjectIdentifier],
    names: Sequence[str],
) -> Leaf:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    builder = _builder(name, str(issuer), key, authority.not_valid_after_utc, is_authority=False)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(list(map(_general_name, names))), critical=False)
    return Leaf(_pem(builder.sign(authority_key, hashes.SHA256())), _key_pem(key))


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePrivateKey, end: datetime.datetime, *, is_authority: bool
) -> x509.CertificateBuilder:
    """Return a certificate to sign, which is valid until ``end``; that of an authority may sign others."""
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        **dict.fromkeys((*unused, "encipher_only", "decipher_only"), False),
    )
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime.now(datetime.timezone.utc) - _SKEW)
        .not_valid_after(end)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )


def _general_name(name: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    try:
        return x509.DNSName(name)
    except ValueError:
        raise CredentialsError(f"{name!r} is no name that a certificate can hold: give its ASCII form") from None


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain).decode()
