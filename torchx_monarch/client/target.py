# SPDX-License-Identifier: BSD-3-Clause
"""Resolve an app handle to the address and the credentials of replica 0 of a role."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchx_monarch.backends.core import client_credentials, state_files
from torchx_monarch.exceptions import UnreachableError
from torchx_monarch.system.untrusted_text import one_line
from torchx_monarch.torchx_adapter import torchx_api
from torchx_monarch.transport.address import Address, AddressError

if TYPE_CHECKING:
    from torchx.runner import Runner

    from torchx_monarch.backends.local.request import LocalRequest


@dataclass(frozen=True, repr=False)
class Target:
    """The address of one role of an app, with the credentials to connect to it.

    Attributes:
        address: address of replica 0, as this machine reaches it.
        role: name of the role; empty for the role that listens at the address.
        credentials: text of ``transport.credentials.ClientCredentials``; empty if this machine has none.
        given: whether the user gave the address; otherwise it comes from the scheduler or this machine's records.
    """

    address: Address
    role: str = ""
    credentials: str = ""
    given: bool = False

    @classmethod
    def from_handle(cls, handle: str, role: str = "", address: str = "", runner: Runner | None = None) -> Target:
        """Resolve the handle of an app.

        Args:
            handle: ``SCHEDULER://SESSION/APP``, as ``torchx run`` prints it.
            role: name of the role; empty for the first role.
            address: ``HOST:PORT`` to dial instead of the scheduler's address, such as the local end of a tunnel; or a
                complete address, ``unix:PATH``, ``tls:HOST:PORT`` or ``insecure-tcp:HOST:PORT``. Empty to ask the
                scheduler.
            runner: the TorchX runner that is asked about the app; None to create one when it is needed.

        Raises:
            UnreachableError: this machine cannot determine the address, or has no record of the app or of the role; the
                message says what is missing.
        """
        from torchx.specs import parse_app_handle

        scheduler, _, app_id = parse_app_handle(handle)
        stored = client_credentials.load(scheduler, app_id)
        credentials, addresses = stored.credentials, stored.rendezvous
        if address:
            return cls(_given(address, addresses, role), role, credentials, given=True)
        if not addresses:
            return cls(_on_this_machine(handle, app_id, role), role)
        role = role or next(iter(addresses))
        if role not in addresses:
            roles = ", ".join(addresses)
            raise UnreachableError(f"{handle} has no role {role!r} with hosts of ours; it has {roles}", final=True)
        there = _parsed(addresses[role], f"the address in {client_credentials.files(scheduler).path(app_id)}")
        where = Address(there.scheme, _host(handle, app_id, role, there.host, runner), there.port)
        return cls(where, role, credentials)


def _given(address: str, addresses: dict[str, str], role: str) -> Address:
    scheme = addresses.get(role or next(iter(addresses), ""), "tls:").partition(":")[0]
    full = address if address.startswith(("unix:", "tls:", "insecure-tcp:")) else f"{scheme}:{address}"
    return _parsed(full, "address")


def _parsed(text: str, source: str) -> Address:
    """Parse an address; arguments as for ``Address.parse``."""
    try:
        return Address.parse(text, source)
    except AddressError as error:
        raise UnreachableError(one_line(str(error)), final=True) from None


def _on_this_machine(handle: str, app_id: str, role: str) -> Address:
    request = _request(app_id)
    if request is None:
        raise UnreachableError(
            f"{handle} is not known in {state_files.state_dir()}: no app of this machine, and no certificate to reach "
            "one elsewhere. The command that submits a job stores it there",
            final=True,
        )
    names = [request_role.name for request_role in request.roles]
    if role and role not in names:
        raise UnreachableError(f"{handle} has no role {role!r}; it has {', '.join(names)}", final=True)
    index = names.index(role) if role else 0
    return Address("unix", path=os.path.join(request.run_dir, f"{index}.sock"))


def recorded_roles(scheduler: str, app_id: str) -> list[str]:
    """Return the roles of an app that have hosts, as this machine has recorded them; none if the record is damaged."""
    if addresses := client_credentials.load(scheduler, app_id).rendezvous:
        return list(addresses)
    request = None
    with contextlib.suppress(UnreachableError):
        request = _request(app_id)
    return [role.name for role in request.roles if role.spec.runs_hosts] if request is not None else []


def _request(app_id: str) -> LocalRequest | None:
    """Return the stored request of an app of this machine; None if there is no such app."""
    from torchx_monarch.backends.local import request  # needed for apps of this machine alone

    try:
        return request.load(state_files.app_paths(app_id)) if state_files.is_app_id(app_id) else None
    except state_files.DamagedFileError as error:
        raise UnreachableError(f"it is not known where the hosts of {app_id} listen: {error}") from None


def _host(handle: str, app_id: str, role: str, stored_host: str, runner: Runner | None) -> str:
    """Return the hostname of a role's replica 0: ``stored_host``, or if it starts with ``@`` the scheduler's answer."""
    if not stored_host.startswith("@"):
        return stored_host
    with contextlib.ExitStack() as stack:
        if runner is None:
            from torchx.runner import get_runner

            runner = stack.enter_context(get_runner())
        scheduler: Any = torchx_api.scheduler_of(runner, handle.partition(":")[0])
        host: str = scheduler.apps.address(app_id, role)
    if not host:
        raise UnreachableError(f"{handle}: its scheduler does not say yet where replica 0 of role {role!r} runs")
    return host
