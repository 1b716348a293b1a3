# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The TorchX scheduler: TorchX's own for Docker, for the request and the workspaces; the rest is ours.

All that is known of an app is with the daemon: its containers, what is on their labels, and a volume of no content that
says that it was cancelled. So it does not matter which process asks, or from which machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docker.errors import APIError, DockerException, NotFound
from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream
from torchx.schedulers.docker_scheduler import (
    LABEL_APP_ID,
    NETWORK,
    DockerJob,
    DockerScheduler,
    Opts,
)
from torchx.specs import (
    NONE,
    AppDef,
    AppDryRunInfo,
    AppState,
    CfgVal,
    Role,
    runopts,
)
from torchx.specs.finder import ComponentValidationException

from torchx_monarch.backends import appdef_codec
from torchx_monarch.backends.docker import bridge_network, container_files, logs, request, status
from torchx_monarch.backends.docker.daemon import answering, connect, lines_while_answering
from torchx_monarch.backends.docker.final_states import Ends
from torchx_monarch.backends.docker.map_concurrently import together
from torchx_monarch.backends.docker.snapshot import HOST_EXTRA, DockerSnapshot, gone, understood
from torchx_monarch.backends.errors import UserError
from torchx_monarch.backends.local.render import safe_name
from torchx_monarch.backends.options import run_options
from torchx_monarch.backends.validation import check_replica, matching, restarts
from torchx_monarch.model.env_names import replica0_variable
from torchx_monarch.model.job_result import is_secondary

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

LABEL_CANCELLED = "torchx-monarch/cancelled"
"""On the volume that says that an app was cancelled: the app's id. (No label of a container can be changed.)"""

_POLL = 0.2
"""Seconds between two looks at the containers while an end is waited for."""

_ASKING = 2.0
"""Seconds that whoever finds an app to be ended waits for its containers; dockerd goes on ending them without."""

_log = logging.getLogger("torchx_monarch")


class SubmitError(ComponentValidationException, RuntimeError):  # type: ignore[misc]
    """The app could not be started; nothing is left of it. The torchx command shows the message without a traceback."""


@dataclass
class DockerOpts(Opts):  # type: ignore[misc]
    """Run options: those of TorchX's ``local_docker``, and more."""

    grace: int = 30
    """Seconds that a replica has between SIGTERM and SIGKILL when the app is cancelled."""

    init: bool = True
    """Have docker-init be process 1 of each container, which passes signals on and reaps orphans; False where the
    daemon lacks it."""


class MonarchDockerScheduler(DockerScheduler, Scheduler[DockerOpts]):  # type: ignore[misc]
    """Runs each replica as a container of one Docker daemon, on the network ``torchx``.

    A container that fails is started again by dockerd, as often as the role's ``max_retries`` says.
    """

    def __init__(self, session_name: str) -> None:
        super().__init__(session_name)
        # Upstream's is "docker", by which no configuration file calls it.
        self.backend = "local_docker"
        self._client: DockerClient | None = None
        self._asked_to_end: set[str] = set()
        self._ends = Ends()

    @property
    def _docker_client(self) -> DockerClient:
        if self._client is None:
            self._client = connect()
        return self._client

    def close(self) -> None:
        """Close the connections to the daemon."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _run_opts(self) -> runopts:
        options = run_options(DockerOpts)
        options.update(run_options(Opts))  # of inherited fields TorchX finds no help
        return options

    # -- submitting ----------------------------------------------------------------------------------------------------

    def replica0_host(self, app: AppDef, role: Role) -> str:
        """The container of the role's replica 0, by its name in the network's DNS. (Upstream has the first role's.)"""
        return f"@{replica0_variable(app.roles.index(role))}"

    always_together = False

    @answering()
    def client_host(self, app_id: str, role: str) -> str:
        """The address of the role's first container: its name is known on the containers' network alone."""
        found = self._find(app_id)
        for container, replica in zip(found.containers, found.replicas, strict=True) if found else ():
            if replica.role == role and replica.id == 0:
                return str(container.attrs["NetworkSettings"]["Networks"].get(NETWORK, {}).get("IPAddress", ""))
        return ""

    def _submit_dryrun(self, app: AppDef, cfg: DockerOpts) -> AppDryRunInfo[DockerJob, DockerOpts]:
        request.check(app, cfg.grace)
        # Upstream takes the name as it is: a handle ends at a slash, and dockerd takes no such name for a volume.
        info = super()._submit_dryrun(dataclasses.replace(app, name=safe_name(app.name)), cfg)
        request.adapt(info.request, app, cfg.init, os.environ)
        return info

    @answering()
    def schedule(self, dryrun_info: AppDryRunInfo[DockerJob, DockerOpts]) -> str:
        """Make all containers, then start them.

        Raises:
            SubmitError: one could not be made or started; all are removed. (Upstream leaves those that were.)
            DaemonError: there is no daemon, or none any more.
        """
        if dryrun_info.app is None:
            raise ValueError("the dry run carries no AppDef; it must come from submit_dryrun()")
        job, client = dryrun_info.request, self._docker_client
        grace = dryrun_info.cfg.grace
        more = {request.LABEL_APP: appdef_codec.pack(dryrun_info.app), request.LABEL_GRACE: str(grace)}
        self._pull({container.image for container in job.containers})
        made: list[Container] = []
        try:
            bridge_network.ensure(client)
            for one in job.containers:
                kwargs = {**one.kwargs, "labels": {**one.kwargs["labels"], **more}}
                made.append(client.containers.create(one.image, one.command, **kwargs))
            together(self._start, made)
            if job.app_id in self._cancelled(job.app_id):  # while the containers were being made
                self._end(made, grace)
        except BaseException as error:
            together(_remove, made)
            bridge_network.remove_unused(client)
            if isinstance(error, DockerException):
                raise SubmitError(f"the app was not started: {_explained(error)}") from None
            raise
        return str(job.app_id)

    def _pull(self, images: Iterable[str]) -> None:
        for image in sorted(images):
            if not image.startswith("sha256:"):
                _log.info("pulling the image %s", image)
                try:
                    self._docker_client.images.pull(image)
                except DockerException as error:
                    _log.warning("the image %s cannot be pulled, the daemon's own is used: %s", image, error)

    def _start(self, container: Container) -> None:
        try:
            container.start()
        except NotFound as error:
            if not bridge_network.is_missing(error):
                raise
            bridge_network.ensure(self._docker_client)
            container.start()

    # -- looking -------------------------------------------------------------------------------------------------------

    def _ours(self, app_id: str = "") -> list[Container]:
        label = [request.LABEL_APP, f"{LABEL_APP_ID}={app_id}" if app_id else LABEL_APP_ID]
        found: list[Container] = self._docker_client.containers.list(
            all=True, filters={"label": label}, ignore_removed=True
        )
        return found

    def _cancelled(self, app_id: str = "") -> dict[str, float]:
        """When the apps were cancelled that were, by their ids."""
        label = f"{LABEL_CANCELLED}={app_id}" if app_id else LABEL_CANCELLED
        volumes = self._docker_client.volumes.list(filters={"label": label})
        return {each.attrs["Labels"][LABEL_CANCELLED]: status.seconds(each.attrs["CreatedAt"]) for each in volumes}

    def _find(self, app_id: str) -> DockerSnapshot | None:
        found = self._ours(app_id)
        return understood(app_id, found, self._cancelled(app_id).get(app_id, 0.0), self._ends) if found else None

    @answering()
    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """The app, from its containers alone.

        One that is decided and that nobody has ended in full (its sidecars, after the other roles have succeeded; the
        other roles, after one has failed) is ended by whoever looks: nothing of ours stays behind to do it.
        """
        found = self._find(app_id)
        if found is None:
            return None
        if found.evaluate.unended:
            self._have_ended(found)
        errors = together(container_files.error, list(zip(found.containers, found.replicas, strict=True)))
        # The first to fail was perhaps killed; those that have lost it say so, and are not the cause.
        by_end = sorted(
            zip(found.replicas, errors, strict=True), key=lambda pair: (is_secondary(pair[1]), pair[0].ended)
        )
        cause = found.evaluate.cause
        if cause is not None and is_secondary(errors[found.replicas.index(cause)]):
            cause = next(replica for replica, _ in by_end if replica.state is AppState.FAILED)
        error = next((said for _, said in by_end if said), "") if cause else ""
        message = found.message(cause)
        if cause is not None and not error:
            message += container_files.why_no_host(found.containers[found.replicas.index(cause)], cause)
        return DescribeAppResponse(
            app_id=app_id,
            state=found.evaluate.state,
            num_restarts=self._restarts(found),
            msg=message or NONE,
            structured_error_msg=error or NONE,
            metadata=found.app.metadata,
            roles_statuses=found.statuses(errors),
            roles=found.app.roles,
        )

    def _restarts(self, found: DockerSnapshot) -> int:
        """Those by dockerd, and those of the ranks within one start of the hosts, which the hosts report."""
        counts = {replicas[0].role: [each.restarts for each in replicas] for replicas in found.roles if replicas}
        firsts = [pair for pair in zip(found.containers, found.replicas, strict=True) if pair[1].id == 0]
        return restarts(found.app, counts) + sum(together(container_files.rank_restarts, firsts))

    @answering()
    def list(self, cfg: Mapping[str, CfgVal] | None = None) -> list[ListAppResponse]:
        """Our apps, each once, the newest first. (Upstream lists an app once for each state of a container of it.)"""
        apps: dict[str, list[Container]] = {}
        for container in self._ours():
            apps.setdefault(container.labels[LABEL_APP_ID], []).append(container)
        cancelled = self._cancelled()
        found = [
            understood(app_id, containers, cancelled.get(app_id, 0.0), self._ends)
            for app_id, containers in apps.items()
        ]
        found.sort(key=lambda one: one.created, reverse=True)
        return [ListAppResponse(one.app_id, one.evaluate.state, name=one.app.name) for one in found]

    @answering()
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
        """The lines of one replica's log; both streams unless one is named.

        Raises:
            ValueError: there is no such app, role or replica, or the regular expression is none.
        """
        found = self._find(app_id)
        if found is None:
            raise UserError(f"there is no app {app_id!r} with this Docker daemon")
        check_replica(app_id, found.sizes, role_name, k)
        if f"{role_name}/{k}" in found.removed:
            raise UserError(gone(f"{role_name}/{k}"))
        everyone = [(replica.role, replica.id) for replica in found.replicas]

        def ended() -> bool:
            now = self._find(app_id)
            return now is None or now.evaluate.state in _ENDED

        lines = logs.lines(
            found.containers[everyone.index((role_name, k))],
            stdout=streams is not Stream.STDERR,
            stderr=streams is not Stream.STDOUT,
            since=since,
            until=until,
            follow=should_tail and found.evaluate.state not in _ENDED,
            ended=ended,
        )
        return lines_while_answering(matching(lines, regex))

    # -- ending --------------------------------------------------------------------------------------------------------

    @answering()
    def _cancel_existing(self, app_id: str) -> None:
        """End the app; returns when nothing of it lives. One that has ended is left alone.

        Upstream stops container after container, 10 s each, and the app counts as FAILED afterwards.
        """
        found = self._find(app_id)
        if found is None or found.evaluate.state in _ENDED:
            return
        self._note_cancel(app_id)
        self._end(found.containers, found.grace)

    def _note_cancel(self, app_id: str) -> None:
        """Have the daemon remember it; the first time counts."""
        self._docker_client.volumes.create(_record(app_id), labels={LABEL_CANCELLED: app_id})

    def _end(self, containers: Sequence[Container], grace: float) -> None:
        def stop(container: Container) -> None:
            with contextlib.suppress(NotFound):
                container.stop(timeout=int(grace + HOST_EXTRA))

        together(stop, containers)

    def _have_ended(self, found: DockerSnapshot) -> None:
        """Have dockerd end what lives of an app; once asked, it does so without us."""
        if found.app_id in self._asked_to_end:
            return
        self._asked_to_end.add(found.app_id)
        pairs = zip(found.containers, found.replicas, strict=True)
        left = [container for container, replica in pairs if replica.lives or replica.is_restless]
        self._begin_to_end(left, found.grace).join(_ASKING)

    def _begin_to_end(self, containers: Sequence[Container], grace: float) -> threading.Thread:
        def end() -> None:
            with contextlib.suppress(DockerException, OSError):
                self._end(containers, grace)

        ending = threading.Thread(target=end, name="docker-end", daemon=True)
        ending.start()
        return ending

    # -- waiting in the foreground (schedulers/foreground.py) ----------------------------------------------------------

    @answering()
    def wait_terminal(self, app_id: str, timeout: float) -> bool:
        """Wait until the app has ended, for at most ``timeout`` seconds; whether it has (or does not exist)."""
        until = time.monotonic() + timeout
        while (found := self._find(app_id)) is not None and found.evaluate.state not in _ENDED:
            if found.evaluate.unended:
                self._have_ended(found)
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL)
        return True

    def events_path(self, app_id: str) -> Path:
        """Events are in the containers; none are shown."""
        return Path(os.devnull)

    @answering()
    def stop(self, app_id: str, grace: float | None) -> None:
        """Ask for the end of the app and return at once.

        Args:
            app_id: of the app.
            grace: seconds from SIGTERM to SIGKILL; None for the app's own, 0 kills now.
        """
        found = self._find(app_id)
        if found is None or found.evaluate.state in _ENDED:
            return
        self._note_cancel(app_id)
        if grace == 0:
            together(_kill, found.containers)
        else:
            self._begin_to_end(found.containers, found.grace if grace is None else grace)

    @answering()
    def _delete_existing(self, app_id: str) -> None:
        """Remove the containers with their anonymous volumes, what says that it was cancelled, and the network after
        the last app on it; an app that lives is ended before."""
        self._cancel_existing(app_id)
        together(_remove, self._ours(app_id))
        with contextlib.suppress(NotFound):
            self._docker_client.volumes.get(_record(app_id)).remove()
        bridge_network.remove_unused(self._docker_client)


_ENDED = (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED)


def _record(app_id: str) -> str:
    return f"{app_id}-cancelled"


def _kill(container: Container) -> None:
    with contextlib.suppress(APIError):  # it does not run
        container.kill()


def _remove(container: Container) -> None:
    with contextlib.suppress(NotFound):
        container.remove(force=True, v=True)


def _explained(error: DockerException) -> str:
    text = str(getattr(error, "explanation", None) or error)
    if "docker-init" in text:
        text += " (run option init=False does without)"
    return text


def create_scheduler(session_name: str, **kwargs: Any) -> MonarchDockerScheduler:
    """TorchX's factory; it talks to no daemon yet. Parameters meant for other schedulers are ignored."""
    return MonarchDockerScheduler(session_name)
