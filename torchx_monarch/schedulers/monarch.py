# SPDX-License-Identifier: BSD-3-Clause
"""The TorchX scheduler of all backends: it wraps the commands of submitted apps and describes apps as submitted."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Any

from torchx.schedulers import get_scheduler_factories
from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream
from torchx.specs import NONE, AppDef, AppDryRunInfo, AppState, CfgVal, InvalidRunConfigException, Role, runopts
from torchx.specs.api import UnknownSchedulerException
from torchx.workspace import WorkspaceMixin

from torchx_monarch.backends.core import stored_apps, torchx_api
from torchx_monarch.backends.core.apps import Apps
from torchx_monarch.backends.core.backend import Backend, CheckResult
from torchx_monarch.backends.core.errors import BackendError, SubmitError, UserError
from torchx_monarch.backends.core.options import (
    AvoidOpts,
    MonarchOpts,
    NetworkOpts,
    check_images,
    check_roles,
    compiled,
    warn_of_mounts,
)
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.command.allocation_spec import AllocationSpec
from torchx_monarch.command.command import CommandError
from torchx_monarch.command.rank_command import names_torchrun, rank_command
from torchx_monarch.command.rewrite import Rewritten, WrapOptions, rewrite
from torchx_monarch.model.host_spec import FLAGS, HostSpec, wrong_values
from torchx_monarch.schedulers import NAMES, command, no_scheduler, owner
from torchx_monarch.schedulers.description import describe, list_entry, shorten
from torchx_monarch.schedulers.foreground import Foreground
from torchx_monarch.schedulers.log_display import show_lines
from torchx_monarch.schedulers.node_history import known_bad, record_jobs
from torchx_monarch.schedulers.run_options import CheckedRunopts
from torchx_monarch.system.error_files import write_for_caller
from torchx_monarch.system.line_output import lines_of
from torchx_monarch.system.processes import raise_file_limit

if TYPE_CHECKING:
    from torchx.runner import Runner

Cfg = Mapping[str, CfgVal]

_log = logging.getLogger(__name__)

_PORTS_DRAWN = range(20000, 30000)
"""Below Linux's default range of ephemeral ports, which outgoing connections use.

They are drawn with the system's randomness: programs that submit several jobs seed that of ``random``.
"""

_LOCAL_IMAGE = "sha256:"
"""The beginning of the name of an image that is on this machine alone (``DockerWorkspaceMixin``)."""

_RANK_MEMORY = 512
"""MB of memory with which a rank can do little: an interpreter that has imported torch's CPU build has 230."""


class InvalidCommandError(UserError):
    """Raised when a role's command cannot run on Monarch hosts; the message gives the reason."""


class WorkspaceError(BackendError):
    """Raised when a workspace cannot be packed, or no image can be built with it; the message gives the reason."""


class _DryRun(AppDryRunInfo[Any, Cfg]):  # type: ignore[misc]
    """A dry run's result.

    Args:
        rendered: what ``Backend.render`` returned: a request, or another scheduler's dry run, whose request it shares.
        images: the images to push (``name_images``).
    """

    def __init__(self, rendered: Any, backend: Backend[Any, Any, Any], submitted: SubmittedApp, images: Any) -> None:
        self._inner: AppDryRunInfo[Any, Any] | None = rendered if isinstance(rendered, AppDryRunInfo) else None
        super().__init__(rendered.request if self._inner else rendered, lambda _: self._shown(backend))
        self.submitted = submitted
        self.images = images

    def _shown(self, backend: Backend[Any, Any, Any]) -> str:
        starts = [f"# {spec.describe_start()}" for spec in self.submitted.roles]
        return "\n".join([*starts, backend.show(self.rendered)])

    @property
    def rendered(self) -> Any:
        """What ``Backend.submit`` gets: what was rendered, with the request as the user has changed it since."""
        if self._inner is None:
            return self.request
        self._inner.request = self.request
        return self._inner


class MonarchScheduler(Scheduler[Cfg]):  # type: ignore[misc]
    """Submits roles as Monarch hosts to a backend.

    A dry run and ``describe`` show the user's own app; the request shows the wrapped commands.
    """

    def __init__(self, name: str, session_name: str, inner: Backend[Any, Any, Any], python: str = "python") -> None:
        super().__init__(name, session_name)
        self.inner = inner
        self.apps: Apps[Any] = Apps(inner, name)
        self._python = python
        self._foreground = Foreground(self.apps, name)

    # -- options -------------------------------------------------------------------------------------------------------

    def run_opts(self) -> runopts:
        return CheckedRunopts(self.inner.run_opts(), self.inner.retired_options)

    def _options(self, cfg: Cfg) -> MonarchOpts:
        """Convert run options, with defaults filled in, to the backend's type and check them."""
        options: MonarchOpts = self.inner.options.from_cfg(cfg)
        for name, allowed in wrong_values(options):
            reason = f"Run option `{name}` is {options[name]}; it is {allowed}"
            raise InvalidRunConfigException(reason, name, cfg)
        self.inner.check_options(options)
        return options

    def checks(self, cfg: Cfg) -> Iterable[CheckResult]:
        """Check run options, as for a submission, and that apps can run in the place of the backend."""
        options = self._options(cfg)
        self._wrap_options(AppDef(""), options, cfg)
        return self.inner.checks(options)

    # -- submission ----------------------------------------------------------------------------------------------------

    def _submit_dryrun(self, app: AppDef, cfg: Cfg) -> AppDryRunInfo[Any, Cfg]:
        options = self._options(cfg)
        if isinstance(options, AvoidOpts) and options.avoid_known_bad and (nodes := known_bad(self.backend, self.apps)):
            _log.warning("avoid_known_bad leaves out %s: `torchx monarch nodes` says why", ", ".join(nodes))
            options.left_out = nodes
        images = name_images(self.inner.workspace, app, options)
        rewritten = self._rewrite(app, options, cfg)
        _warn_of_unused_torchrun(app)
        if self.inner.capabilities.limits_resources:
            _warn_of_few_resources(app)
        if not self.inner.makes_mounts(options):
            warn_of_mounts(app, self.backend)
        submitted = SubmittedApp(app, rewritten.roles)
        rendered = self.inner.render(rewritten.app, submitted, options)
        return _DryRun(rendered, self.inner, submitted, images)

    def _rewrite(self, app: AppDef, options: MonarchOpts, cfg: Cfg) -> Rewritten:
        """Check an app's roles, with their commands, metadata and images, and rewrite it."""
        check_roles(app)
        try:
            if getattr(options, "on", ""):
                from torchx_monarch.schedulers.run_on_allocation import run_on_allocation  # imports this module

                return run_on_allocation(app, options, self._python)
            rewritten = rewrite(app, self._wrap_options(app, options, cfg))
        except CommandError as error:
            raise InvalidCommandError(str(error)) from None
        if self.inner.runs_images(options):
            check_images(app, rewritten.roles)
        return rewritten

    def _wrap_options(self, app: AppDef, options: MonarchOpts, cfg: Cfg) -> WrapOptions:
        """Return the options of the host processes; add those of the network unless the hosts share one machine."""
        # An image has its own Python, whatever path the submitter's has.
        python = "python" if self.inner.runs_images(options) else self._python
        network = options if isinstance(options, NetworkOpts) else None
        values = dict[str, Any]()
        for option in dataclasses.fields(MonarchOpts if network is None else NetworkOpts):
            name, value = option.name, getattr(options, option.name)
            # Options that hosts have too have the same names and defaults.
            if name in FLAGS and value != option.default:
                try:
                    values[name] = FLAGS[name].parse(value) if isinstance(value, str) else value
                except ValueError as error:
                    raise InvalidRunConfigException(f"Run option `{name}` is {value}: {error}", name, cfg) from None
        capabilities, rendezvous = self.inner.capabilities, dict[str, str]()
        if network is not None:
            port = network.rendezvous_port or secrets.choice(_PORTS_DRAWN)
            highest = 65536 - max(1, len(app.roles))  # each role takes the port after that of the role before
            if not 0 < port <= highest:
                reason = f"Run option `rendezvous_port` is {port}; it is a port, 1 to {highest}, or 0 to draw one"
                raise InvalidRunConfigException(reason, "rendezvous_port", cfg)
            scheme = "insecure-tcp" if network.insecure_plain_tcp else "tls"
            # The replicas 0 of two roles may run on one machine.
            rendezvous = {
                role.name: f"{scheme}:{self.inner.replica0_host(app, index)}:{port + index}"
                for index, role in enumerate(app.roles)
                if index == 0 or not capabilities.one_host_role
            }
        return WrapOptions(
            python=python,
            spec=HostSpec(**values),
            rendezvous=rendezvous,
            one_host_role=capabilities.one_host_role,
            in_images=self.inner.runs_images(options),
            supervised=capabilities.supervises,
        )

    def schedule(self, dryrun_info: AppDryRunInfo[Any, Cfg]) -> str:
        """Submit the result of a dry run, including changes made to its request since, and return the app's id."""
        if not isinstance(dryrun_info, _DryRun) or dryrun_info.app is None:
            raise ValueError(f"not a dry run of {self.backend}; it must come from submit_dryrun()")
        submitted = dataclasses.replace(dryrun_info.submitted, app=dryrun_info.app)
        needs_owner = self.inner.capabilities.needs_owner and owner.needs_owner(submitted.roles)
        owning = owner.starting(self.backend) if needs_owner else contextlib.nullcontext(lambda app_id: None)
        with self._foreground.submission() as on_submitted, owning as send_id:
            hosts = client = ""
            if self.inner.has_network:
                from torchx_monarch.transport import credentials

                for_hosts, for_client = credentials.create()
                hosts, client = for_hosts.to_text(), for_client.to_text()
            push_images(self.inner.workspace, dryrun_info.images)
            app_id = self.inner.submit(dryrun_info.rendered, submitted, hosts)
            send_id(app_id)
            on_submitted(app_id)
            if client:
                rendezvous = {role.name: role.rendezvous for role in submitted.roles if role.rendezvous}
                stored = stored_apps.StoredCredentials(client, rendezvous, submitted.app.name)
                try:
                    stored_apps.credentials(self.backend).store(app_id, stored)
                except OSError as error:
                    _log.warning("The job runs, but the certificate to reach it with could not be stored: %s", error)
        return app_id

    def _pre_build_validate(self, app: AppDef, scheduler: str, cfg: Cfg) -> None:
        """Check all that can be checked before workspaces are built, which may take long."""
        self._rewrite(app, self._options(cfg), cfg)

    def _validate(self, app: AppDef, scheduler: str, cfg: Cfg) -> None:
        """Accept roles without resources, which TorchX refuses; ``Backend.render`` refuses what a backend needs."""

    # -- a submitted app -----------------------------------------------------------------------------------------------

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Describe an app, with the roles as the user wrote them.

        None stands for an app that does not exist; a `torchx` command that names it gets a ``UserError``.
        """
        self._foreground.on_poll(app_id)
        found = self.apps.read(app_id, brief=command.running is not None and command.running.brief)
        if found is None:
            if command.running is not None:  # for an unknown app `log` exits with 0
                reason = f"there is no app {app_id!r} of {self.backend}"
                raise UserError(f"{reason}; `torchx list -s {self.backend}` shows all")
            return None
        response = describe(*found)
        if self._foreground.has_submitted(app_id):
            if response.state == AppState.FAILED and response.structured_error_msg != NONE:
                write_for_caller(response.structured_error_msg)
            if found[1].state.is_terminal:
                return shorten(response, found[1])
        return response

    def exists(self, app_id: str) -> bool:
        return self.apps.read(app_id, brief=True) is not None

    def list(self, cfg: Cfg | None = None) -> list[ListAppResponse]:
        """List the backend's apps, the newest first."""
        return [list_entry(*listed_app) for listed_app in self.apps.list(cfg or {})]

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
        """Return the log lines of one replica; of both streams if ``streams`` is None."""
        texts = self.apps.lines(app_id, role_name, k, since=since, until=until, follow=should_tail, stream=streams)
        pattern, found, running = compiled(regex), self.apps.recent(app_id), command.running
        if found is None or running is None or running.log_stream is None:
            return filter(pattern.search, chain.from_iterable(map(lines_of, texts)))
        raise_file_limit()  # the command reads the logs of all replicas at once
        shown = show_lines(found[0], role_name, texts, pattern, running.log_stream)
        return chain.from_iterable(map(lines_of, shown)) if getattr(running.options, "tee_logs", False) else shown

    def _cancel_existing(self, app_id: str) -> None:
        self.apps.cancel(app_id, waits=True)

    def _delete_existing(self, app_id: str) -> None:
        record_jobs(self.backend, self.apps, [app_id])
        self.apps.delete(app_id)
        stored_apps.credentials(self.backend).remove(app_id)

    def close(self) -> None:
        """Close the backend's connections. If a signal has ended a waiting ``torchx run``, cancel its apps first."""
        try:
            self._foreground.on_close()
        finally:
            self.inner.close()


class MonarchWorkspaceScheduler(WorkspaceMixin[Any], MonarchScheduler):  # type: ignore[misc]
    """The scheduler of a backend that takes workspaces along, which TorchX detects by the base class."""

    def workspace_opts(self) -> runopts:
        """Return no options: those of the workspace are among the backend's."""
        return runopts()

    def build_workspaces(self, roles: list[Role], cfg: Cfg) -> None:
        """Build the workspaces through the backend, but no image for a dry run, which may lack Docker."""
        assert self.inner.workspace is not None
        if makes_images(self.inner.workspace) and command.running is not None and command.running.options.dryrun:
            if any(role.workspace for role in roles):
                _log.warning("a dry run does not make the workspace part of the image; a submission does")
            return
        try:
            self.inner.workspace.build_workspaces(roles, cfg)
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


def create(name: str, session_name: str, backend: Backend[Any, Any, Any], python: str) -> MonarchScheduler:
    """Create the scheduler of a backend, a ``WorkspaceMixin`` too if the backend takes workspaces along."""
    kind = MonarchScheduler if backend.workspace is None else MonarchWorkspaceScheduler
    return kind(name, session_name, backend, python)


def scheduler_of(name: str, runner: Runner | None = None) -> MonarchScheduler:
    """Return the scheduler of this package that a runner uses; without a runner, a new one.

    Raises:
        UserError: there is none.
        BackendError: the client library that its backend needs is not installed.
    """
    factories = get_scheduler_factories()
    if runner is None and name not in factories:
        raise UserError(no_scheduler(name))
    try:
        scheduler = factories[name]("torchx") if runner is None else torchx_api.scheduler_of(runner, name)
    except UnknownSchedulerException:
        raise UserError(no_scheduler(name)) from None
    if not isinstance(scheduler, MonarchScheduler):
        raise UserError(
            f"{name} is a scheduler of another package, whose jobs have no hosts of torchx-monarch; the schedulers of "
            f"torchx-monarch are {', '.join(NAMES)}"
        )
    return scheduler


@contextlib.contextmanager
def opened(name: str, runner: Runner | None = None) -> Iterator[MonarchScheduler]:
    """Yield what ``scheduler_of`` returns; close a new one afterwards."""
    scheduler = scheduler_of(name, runner)
    try:
        yield scheduler
    finally:
        if runner is None:
            scheduler.inner.close()


def makes_images(workspace: WorkspaceMixin[Any]) -> bool:
    """Return whether a workspace builder makes images, which are pushed, rather than folders: as TorchX tells it."""
    return type(workspace).dryrun_push_images is not WorkspaceMixin.dryrun_push_images


def name_images(workspace: WorkspaceMixin[Any] | None, app: AppDef, options: MonarchOpts) -> Any:
    """Write the names under which images will be pushed into an app.

    Args:
        workspace: the backend's builder of workspaces; None without one.

    Returns:
        What ``push_images`` needs; None if there is nothing to push.
    """
    if workspace is None or not makes_images(workspace):
        return None
    local = next((role.image for role in app.roles if role.image.startswith(_LOCAL_IMAGE)), None)
    if local is not None and not options.get("image_repo"):
        raise UserError(
            f"the image {local} is on this machine alone, where a workspace was built into it: name a repository to "
            "push it to in the run option image_repo, or submit without a workspace (--workspace '')"
        )
    return workspace.dryrun_push_images(app, options) or None


def push_images(workspace: WorkspaceMixin[Any] | None, images: Any) -> None:
    """Push images, of which ``name_images`` has returned what this needs."""
    if workspace is None or images is None:
        return
    from docker.errors import DockerException

    try:
        workspace.push_images(images)
    except (DockerException, OSError, RuntimeError) as error:  # TorchX raises RuntimeError for a refused push
        raise SubmitError(f"the image with the workspace cannot be pushed: {error}") from error


def _warn_of_unused_torchrun(app: AppDef) -> None:
    """Warn of roles that name torchrun, but not where its ranks could be started on hosts."""
    for role in app.roles:
        if names_torchrun(role) and rank_command(role) is None:
            _log.warning(
                "role %s names torchrun, but not as its command, and runs as it is: such a torchrun finds no other "
                "replica. To start ranks on hosts, make torchrun the command, which may follow env, timeout, numactl, "
                "nsys profile, conda run and their like, or a script (NAME.sh torchrun, bash SCRIPT torchrun)",
                role.name,
            )


def _warn_of_few_resources(app: AppDef) -> None:
    """Warn of roles whose hosts have fewer GPUs than ranks, or fewer CPUs if they have no GPU, or little memory."""
    roles: dict[str, list[str]] = {}
    for role in app.roles:
        ranks = _ranks_per_host(role)
        gpus, cpus, memory = max(0, role.resource.gpu), max(0.0, role.resource.cpu), max(0, role.resource.memMB)
        if 0 < (gpus or cpus) < ranks or 0 < memory < ranks * _RANK_MEMORY:
            devices = f"{cpus:g} CPU{'s' * (cpus > 1)}, {gpus or 'no'} GPU{'s' * (gpus > 1)}"
            advice = f"Give --gpu {ranks}, or --cpu {ranks} for ranks without GPUs, and --memMB"
            roles.setdefault(
                f"is for {ranks} ranks and asks for {devices} and {memory} MB of memory. {advice}", []
            ).append(role.name)
    for text, names in roles.items():
        _log.warning("role %s: each host %s", ", ".join(names), text)


def _ranks_per_host(role: Role) -> int:
    """Return how many ranks each host of a role starts, or is to be ready for; 0 if that is not known here."""
    command = rank_command(role)
    if command is not None and command.kind == "hosts":
        nproc = AllocationSpec.from_command(command, role.env, role.num_replicas).nproc
        return int(nproc) if nproc.isdecimal() else 0
    return (command.ranks_per_host or 0) if command is not None else 0
