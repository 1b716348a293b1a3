# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The TorchX scheduler that wraps another: it rewrites submitted apps, restores described apps, delegates the rest."""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
import random
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from torchx.runner import config
from torchx.schedulers import DEFAULT_SCHEDULER_MODULES
from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream, StructuredOpts
from torchx.specs import AppDef, AppDryRunInfo, CfgVal, InvalidRunConfigException, Role, runopts
from torchx.workspace import WorkspaceMixin

from torchx_monarch.backends import client_credentials
from torchx_monarch.backends.errors import BackendError, UserError
from torchx_monarch.backends.options import run_options
from torchx_monarch.backends.protocols import (
    CREDENTIALS,
    PLACEHOLDER,
    IndependentRoles,
    NetworkBackend,
    with_credentials,
)
from torchx_monarch.command.command import CommandError
from torchx_monarch.command.rewrite import WrapOptions, restore, rewrite
from torchx_monarch.model.exit_codes import parse_exit_codes
from torchx_monarch.model.host_spec import HostSpec, parse_ports
from torchx_monarch.model.sidecars import SidecarError, is_sidecar
from torchx_monarch.schedulers.caller_error_file import write_root_cause
from torchx_monarch.schedulers.command import CheckedRunopts, exit_on_user_error, keep_threads_quiet, subcommand
from torchx_monarch.schedulers.foreground import Foreground
from torchx_monarch.schedulers.presentable import presentable, presentable_list
from torchx_monarch.torchx_adapter import torchx_api

Cfg = Mapping[str, CfgVal]

_log = logging.getLogger(__name__)


class InvalidCommandError(UserError):
    """Raised when a role's command cannot run on Monarch hosts; the message gives the reason."""


class WorkspaceError(BackendError):
    """Raised when a workspace cannot be packed, or no image can be built with it; the message gives the reason."""


@dataclasses.dataclass
class MonarchOpts(StructuredOpts):  # type: ignore[misc]
    """Run options of every ``monarch_*`` scheduler, in addition to those of the scheduler that it wraps."""

    grace: int = 30
    """Seconds between SIGTERM and SIGKILL when ranks are ended."""

    host_timeout: int = 300
    """Seconds after which the job fails if the hosts of a role have not all joined."""

    lease: int = 30
    """Seconds without a heartbeat after which a host, or its agent, counts as lost, also if it is stopped or hung."""

    preload: str = "torch"
    """Modules, separated by `+`, that the interpreters of a torchrun command import while the mesh forms; `none` for
    programs that must set environment variables before the first import of torch."""

    retry_on: str = ""
    """Exit codes after which ranks are restarted, within torchrun's `--max-restarts`: numbers and names of signals,
    separated by `+` (`1+134+SIGKILL`); empty for any. On monarch_local, monarch_slurm and monarch_docker this also
    applies to restarts of hosts within `max_retries`. Exit code 78 always prevents a restart."""


@dataclasses.dataclass
class NetworkOpts(StructuredOpts):  # type: ignore[misc]
    """Run options of schedulers whose hosts communicate over a network."""

    rendezvous_port: int = 0
    """Port on which replica 0 listens for the other hosts; 0 for a random one per job."""

    ports: str = ""
    """The range LOW-HIGH of ports that Monarch may listen on, for firewalls; empty for any."""

    bind: str = ""
    """Address or interface on which hosts listen; empty for all."""

    peer_timeout: int = 5
    """Seconds without network traffic from a machine after which it counts as lost."""

    rejoin_timeout: int = 60
    """Seconds for which a host that has lost replica 0 tries to reach its replacement."""

    insecure_plain_tcp: bool = False
    """Use no TLS between the hosts. Anyone who can reach one of their ports can run code there."""


_PORTS_DRAWN = range(20000, 30000)
"""Below Linux's default range of ephemeral ports, which outgoing connections use."""


class _SubmitInfo(AppDryRunInfo[Any, Cfg]):  # type: ignore[misc]
    """A dry run's result: the wrapped scheduler's request.

    Args:
        inner: the wrapped scheduler's own result, which its ``schedule`` needs.
        rendezvous: the rendezvous address of each role, by name; empty without a network.
    """

    def __init__(self, inner: AppDryRunInfo[Any, Any], rendezvous: Mapping[str, str]) -> None:
        super().__init__(inner.request, self._shown)
        self.inner = inner
        self.rendezvous = rendezvous

    def _shown(self, request: Any) -> str:
        inner = copy.copy(self.inner)
        inner.request = request
        return repr(inner)


def _own_options(cfg: Cfg) -> MonarchOpts:
    """Return and check the options of ``MonarchOpts``.

    Raises:
        InvalidRunConfigException: a value is out of range; the message names the option.
    """
    options: MonarchOpts = MonarchOpts.from_cfg({name: cfg[name] for name in cfg if name in MonarchOpts()})
    for name, lowest in (("grace", 0), ("host_timeout", 1), ("lease", 1)):
        if options[name] < lowest:
            reason = f"Run option `{name}` is {options[name]}; it is a number of seconds, {lowest} or more"
            raise InvalidRunConfigException(reason, name, cfg)
    return options


class MonarchScheduler(Scheduler[Cfg]):  # type: ignore[misc]
    """Submits roles as Monarch hosts through any TorchX scheduler.

    A dry run and ``describe`` show the user's own app; the request shows the wrapped commands.

    Args:
        backend: the registered name of this scheduler.
        session_name: TorchX's session name.
        inner: the wrapped scheduler, which submits.
        python: the Python interpreter of the hosts.
    """

    def __init__(self, backend: str, session_name: str, inner: Scheduler[Any], python: str = "python") -> None:
        super().__init__(backend, session_name)
        self.inner = inner
        self._python = python
        self._foreground = Foreground(inner, backend)

    # -- options -------------------------------------------------------------------------------------------------------

    def run_opts(self) -> runopts:
        """Return the options of this and of the wrapped scheduler.

        The latter's defaults come from the wrapped scheduler's own section in ``.torchxconfig``, if it has one.
        """
        options = CheckedRunopts()
        options.update(run_options(MonarchOpts))
        if isinstance(self.inner, NetworkBackend):
            options.update(run_options(NetworkOpts))
        theirs = self.inner.run_opts()
        for key, value in self._inner_section().items():
            option = theirs.get(key)
            if option is not None:
                option.default, option.is_required = value, False
        options.update(theirs)
        return options

    def _inner_section(self) -> dict[str, CfgVal]:
        """Return the wrapped scheduler's section of ``.torchxconfig``, such as ``[slurm]`` for ``monarch_slurm``.

        Empty if the wrapped scheduler is not one of TorchX's own, which alone are registered themselves.
        """
        section: dict[str, CfgVal] = {}
        if self.inner.backend in DEFAULT_SCHEDULER_MODULES:
            for path in config.find_configs():
                text = Path(path).read_text()
                if f"[{self.inner.backend}]" in text:  # config.load first loads all schedulers
                    config.load(self.inner.backend, io.StringIO(text), section)
        return section

    def _inner_cfg(self, cfg: Cfg) -> Any:
        """Return the wrapped scheduler's part of the resolved options, in the wrapped scheduler's own type."""
        names = {name for name, _ in self.inner.run_opts()}
        return torchx_api.resolve_cfg(self.inner, {name: value for name, value in cfg.items() if name in names})

    # -- submission ----------------------------------------------------------------------------------------------------

    def _submit_dryrun(self, app: AppDef, cfg: Cfg) -> AppDryRunInfo[Any, Cfg]:
        options = _own_options(cfg)
        try:
            retry_on = parse_exit_codes(options.retry_on)
        except ValueError as error:
            reason = f"Run option `retry_on` is {options.retry_on}: {error}"
            raise InvalidRunConfigException(reason, "retry_on", cfg) from None
        preload = [] if options.preload == "none" else options.preload.replace("+", ",").split(",")
        spec = HostSpec(
            grace=float(options.grace),
            host_timeout=float(options.host_timeout),
            preload=tuple(filter(None, preload)),
            retry_on=retry_on,
            lease=float(options.lease),
        )
        hosts = self._wrap_options(app, cfg, spec)
        try:
            for role in app.roles:
                is_sidecar(role)
            rewritten = rewrite(app, hosts)
        except (CommandError, SidecarError) as error:
            raise InvalidCommandError(str(error)) from None
        for role, ours in zip(app.roles, rewritten.roles, strict=True):
            if role.name in hosts.rendezvous and ours.args != role.args:
                ours.env[CREDENTIALS] = PLACEHOLDER
        inner_cfg = self._inner_cfg(cfg)
        info = torchx_api.render(self.inner, rewritten, inner_cfg)
        info.app, info.cfg = rewritten, inner_cfg
        for role, ours in zip(app.roles, rewritten.roles, strict=True):
            role.image = ours.image  # a scheduler that pushes images writes the pushed name
        return _SubmitInfo(info, hosts.rendezvous)

    def _wrap_options(self, app: AppDef, cfg: Cfg, spec: HostSpec) -> WrapOptions:
        """Return the options of the host processes; add those of the network unless the hosts share one machine.

        Raises:
            InvalidRunConfigException: ``rendezvous_port`` or ``ports`` is invalid.
        """
        if not isinstance(self.inner, NetworkBackend):
            return WrapOptions(self._python, spec)
        options = NetworkOpts.from_cfg({name: cfg[name] for name in cfg if name in NetworkOpts()})
        port = options.rendezvous_port or random.choice(_PORTS_DRAWN)
        if not 0 < port < 65536:
            reason = f"Run option `rendezvous_port` is {port}; it is a port, 1 to 65535, or 0 to draw one"
            raise InvalidRunConfigException(reason, "rendezvous_port", cfg)
        scheme = "insecure-tcp" if options.insecure_plain_tcp else "tls"
        try:
            ports = parse_ports(options.ports) if options.ports else None
        except ValueError as error:
            raise InvalidRunConfigException(f"Run option `ports`: {error}", "ports", cfg) from None
        spec = dataclasses.replace(
            spec,
            ports=ports,
            bind=options.bind,
            peer_timeout=float(options.peer_timeout),
            rejoin_timeout=float(options.rejoin_timeout),
        )
        # A port per role: the replicas 0 of two roles may run on one machine.
        rendezvous = {
            role.name: f"{scheme}:{self.inner.replica0_host(app, role)}:{port + index}"
            for index, role in enumerate(app.roles)
        }
        if not isinstance(self.inner, IndependentRoles):
            return WrapOptions(self._python, spec, rendezvous)
        main = rendezvous[app.roles[0].name]
        return WrapOptions(self._python, spec, rendezvous, main, self.inner.always_together)

    def schedule(self, dryrun_info: AppDryRunInfo[Any, Cfg]) -> str:
        """Submit the result of a dry run, including changes made to its request since, and return the app's id."""
        assert isinstance(dryrun_info, _SubmitInfo), "the request of another scheduler"
        inner = copy.copy(dryrun_info.inner)
        inner.request = dryrun_info.request
        with self._foreground.submission() as submitted:
            client = ""
            if isinstance(self.inner, NetworkBackend):
                from torchx_monarch.transport import credentials

                hosts, for_client = credentials.create()
                client = for_client.to_text()
                # A copy: the caller's request keeps the placeholder, so printing it reveals no private key.
                inner.request = with_credentials(inner.request, hosts.to_text())
            app_id: str = self.inner.schedule(inner)
            submitted(app_id)
            if client:
                try:
                    client_credentials.keep(self.backend, app_id, client, dryrun_info.rendezvous)
                except OSError as error:
                    _log.warning("The job runs, but the certificate to reach it with could not be kept: %s", error)
        return app_id

    def _pre_build_validate(self, app: AppDef, scheduler: str, cfg: Cfg) -> None:
        _own_options(cfg)
        torchx_api.validate_before_build(self.inner, app, scheduler, self._inner_cfg(cfg))

    def _validate(self, app: AppDef, scheduler: str, cfg: Cfg) -> None:
        torchx_api.validate(self.inner, app, scheduler, self._inner_cfg(cfg))

    # -- a submitted app -----------------------------------------------------------------------------------------------

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Describe an app through the wrapped scheduler, with the roles as the user wrote them; None if unknown.

        Raises:
            ValueError: the app does not exist, and the process runs `torchx cancel`, `delete` or `log`.
        """
        self._foreground.on_poll(app_id)
        keep_threads_quiet()
        response = self.inner.describe(app_id)
        if response is None and subcommand() in ("cancel", "delete", "log"):
            # For an unknown app these subcommands do nothing, or wait, and exit with 0.
            raise UserError(f"there is no app {app_id!r} of {self.backend}; `torchx list -s {self.backend}` shows all")
        if response is not None:
            response.roles = [restore(role) for role in response.roles]
            for role in response.roles:
                role.env.pop(CREDENTIALS, None)
            if self._foreground.has_submitted(app_id):
                write_root_cause(response)
        return response and presentable(response)

    def describe_native(self, app_id: str) -> AppDryRunInfo[Any, Any] | None:
        """Return the wrapped scheduler's native description."""
        return self.inner.describe_native(app_id)

    def list(self, cfg: Cfg | None = None) -> list[ListAppResponse]:
        """List the wrapped scheduler's apps."""
        return presentable_list(self.inner.list(self._inner_cfg(cfg) if cfg else None))

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Return the log lines of one replica from the wrapped scheduler."""
        lines: Iterable[str] = self.inner.log_iter(app_id, role_name, k, regex, since, until, should_tail, streams)
        return lines

    def _cancel_existing(self, app_id: str) -> None:
        torchx_api.cancel(self.inner, app_id)

    def _delete_existing(self, app_id: str) -> None:
        torchx_api.delete(self.inner, app_id)
        client_credentials.forget(self.backend, app_id)

    def close(self) -> None:
        """Close the wrapped scheduler. If a signal has ended a waiting ``torchx run``, cancel its apps first.

        Raises:
            SystemExit: the torchx command exits because of a signal or a user's mistake.
        """
        try:
            self._foreground.on_close()
            exit_on_user_error()
        finally:
            self.inner.close()


class MonarchWorkspaceScheduler(WorkspaceMixin[Any], MonarchScheduler):  # type: ignore[misc]
    """Wraps a scheduler that builds workspaces, which TorchX detects by the base class ``WorkspaceMixin``."""

    def build_workspaces(self, roles: list[Role], cfg: Cfg) -> None:
        """Build the workspaces through the wrapped scheduler, with its part of the options.

        Raises:
            WorkspaceError: TorchX cannot pack a file of the workspace, or Docker cannot build the image.
        """
        assert isinstance(self.inner, WorkspaceMixin)
        try:
            self.inner.build_workspaces(roles, self._inner_cfg(cfg))
        except Exception as error:
            if type(error).__module__.partition(".")[0] == "docker":
                raise WorkspaceError(
                    f"the workspace cannot be made part of the image: Docker, which builds it, says: {error}. Start "
                    "Docker here (DOCKER_HOST), or take no workspace along: --workspace ''"
                ) from None
            if not isinstance(error, OSError) or error.filename is None:
                raise
            raise WorkspaceError(
                f"the workspace cannot be taken along: {error.filename}: {error.strerror}. TorchX packs files, and no "
                "links to folders or to nothing, no sockets, and nothing unreadable. Name it in .dockerignore (for "
                "monarch_slurm .torchxignore), or take no workspace along: --workspace ''"
            ) from None


def wrap(backend: str, session_name: str, inner: Scheduler[Any], python: str = "python") -> MonarchScheduler:
    """Wrap a scheduler, with ``WorkspaceMixin`` as a base class if ``inner`` has it.

    Args:
        backend: the registered name of the wrapper.
        session_name: TorchX's session name.
        inner: the scheduler to wrap.
        python: the Python interpreter of the hosts.
    """
    kind = MonarchWorkspaceScheduler if isinstance(inner, WorkspaceMixin) else MonarchScheduler
    return kind(backend, session_name, inner, python)
