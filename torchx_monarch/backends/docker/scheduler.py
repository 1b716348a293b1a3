# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The TorchX scheduler for Docker. It inherits the request and the workspaces from TorchX's DockerScheduler.

The daemon stores the whole state of an app: its containers, their labels, and an empty volume if the app was cancelled.
Any process on any machine that reaches the daemon can therefore query the app.
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

from torchx_monarch.backends import appdef_codec
from torchx_monarch.backends.docker import bridge_network, container_files, logs, request, status
from torchx_monarch.backends.docker.daemon import answering, connect, lines_while_answering
from torchx_monarch.backends.docker.final_states import FinalStates
from torchx_monarch.backends.docker.map_concurrently import map_concurrently
from torchx_monarch.backends.docker.snapshot import HOST_EXTRA, DockerSnapshot, build_snapshot, describe_removed
from torchx_monarch.backends.errors import BackendError, UserError
from torchx_monarch.backends.local.render import safe_name
from torchx_monarch.backends.options import run_options
from torchx_monarch.backends.validation import check_replica, matching, restarts
from torchx_monarch.model.env_names import replica0_variable
from torchx_monarch.model.job_result import is_secondary
from torchx_monarch.torchx_adapter.torchx_api import DockerClientMixin

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

LABEL_CANCELLED = "torchx-monarch/cancelled"
"""Label with the app's id, on the volume that marks the app as cancelled. (Container labels cannot be changed.)"""

_POLL = 0.2
"""Seconds between two checks of the containers while waiting for an app to end."""

_ASKING = 2.0
"""Seconds that ``describe`` waits for the containers that it stops; dockerd stops them even if the client exits."""

_log = logging.getLogger("torchx_monarch")


class DockerSubmitError(BackendError):
    """The app could not be started and was removed. The torchx command shows the message without a traceback."""


@dataclass
class DockerOpts(Opts):  # type: ignore[misc]
    """The run options of TorchX's ``local_docker``, plus ``grace`` and ``init``."""

    grace: int = 30
    """Seconds that a replica has between SIGTERM and SIGKILL when the app is cancelled."""

    init: bool = True
    """Have docker-init be process 1 of each container, which passes signals on and reaps orphans; False where the
    daemon lacks it."""


class MonarchDockerScheduler(DockerClientMixin, DockerScheduler, Scheduler[DockerOpts]):  # type: ignore[misc]
    """Run each replica as a container of one Docker daemon, on the network ``torchx``.

    dockerd restarts a container that fails, up to the role's ``max_retries`` times.
    """

    def __init__(self, session_name: str) -> None:
        super().__init__(session_name)
        # TorchX sets "docker", which no configuration file uses.
        self.backend = "local_docker"
        self._client: DockerClient | None = None
        self._asked_to_end: set[str] = set()
        self._ends = FinalStates()

    @property
    def docker_client(self) -> DockerClient:
        """The client of the daemon, connected on first use."""
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
        options.update(run_options(Opts))  # StructuredOpts.get_docstrings misses inherited fields
        return options

    # -- submitting ----------------------------------------------------------------------------------------------------

    def replica0_host(self, app: AppDef, role: Role) -> str:
        """Return ``@VARIABLE``, which stands for the DNS name of the role's replica 0. (TorchX: of the first role.)"""
        return f"@{replica0_variable(app.roles.index(role))}"

    always_together = False

    @answering()
    def client_host(self, app_id: str, role: str) -> str:
        """Return the IP address of the role's replica 0: its name resolves on the containers' network only."""
        found = self._find(app_id)
        for container, replica in zip(found.containers, found.replicas, strict=True) if found else ():
            if replica.role == role and replica.id == 0:
                return str(container.attrs["NetworkSettings"]["Networks"].get(NETWORK, {}).get("IPAddress", ""))
        return ""

    def _submit_dryrun(self, app: AppDef, cfg: DockerOpts) -> AppDryRunInfo[DockerJob, DockerOpts]:
        request.check(app, cfg.grace)
        # TorchX uses the name unchanged, but a slash would end the app's handle, and dockerd refuses it for a volume.
        info = super()._submit_dryrun(dataclasses.replace(app, name=safe_name(app.name)), cfg)
        request.adapt(info.request, app, cfg.init, os.environ)
        return info

    @answering()
    def schedule(self, dryrun_info: AppDryRunInfo[DockerJob, DockerOpts]) -> str:
        """Create all containers, then start them.

        Raises:
            ValueError: the dry run carries no AppDef.
            DockerSubmitError: a container could not be created or started; all are removed. (TorchX leaves the others.)
            DaemonError: the daemon is missing or stops answering.
        """
        if dryrun_info.app is None:
            raise ValueError("the dry run carries no AppDef; it must come from submit_dryrun()")
        job, client = dryrun_info.request, self.docker_client
        grace = dryrun_info.cfg.grace
        more = {request.LABEL_APP: appdef_codec.pack(dryrun_info.app), request.LABEL_GRACE: str(grace)}
        self._pull({container.image for container in job.containers})
        made: list[Container] = []
        try:
            bridge_network.ensure(client)
            for one in job.containers:
                kwargs = {**one.kwargs, "labels": {**one.kwargs["labels"], **more}}
                made.append(client.containers.create(one.image, one.command, **kwargs))
            map_concurrently(self._start, made)
            if job.app_id in self._cancelled(job.app_id):  # cancelled while containers were created
                self._end(made, grace)
        except BaseException as error:
            map_concurrently(_remove, made)
            bridge_network.remove_unused(client)
            if isinstance(error, DockerException):
                raise DockerSubmitError(f"the app was not started: {_explained(error)}") from None
            raise
        return str(job.app_id)

    def _pull(self, images: Iterable[str]) -> None:
        for image in sorted(images):
            if not image.startswith("sha256:"):
                _log.info("pulling the image %s", image)
                try:
                    self.docker_client.images.pull(image)
                except DockerException as error:
                    _log.warning("the image %s cannot be pulled, the daemon's own is used: %s", image, error)

    def _start(self, container: Container) -> None:
        try:
            container.start()
        except NotFound as error:
            if not bridge_network.is_missing(error):
                raise
            bridge_network.ensure(self.docker_client)
            container.start()

    # -- looking -------------------------------------------------------------------------------------------------------

    def _ours(self, app_id: str = "") -> list[Container]:
        label = [request.LABEL_APP, f"{LABEL_APP_ID}={app_id}" if app_id else LABEL_APP_ID]
        found: list[Container] = self.docker_client.containers.list(
            all=True, filters={"label": label}, ignore_removed=True
        )
        return found

    def _cancelled(self, app_id: str = "") -> dict[str, float]:
        """Return when each cancelled app was cancelled, in seconds since the epoch, by app id."""
        label = f"{LABEL_CANCELLED}={app_id}" if app_id else LABEL_CANCELLED
        volumes = self.docker_client.volumes.list(filters={"label": label})
        return {each.attrs["Labels"][LABEL_CANCELLED]: status.seconds(each.attrs["CreatedAt"]) for each in volumes}

    def _find(self, app_id: str) -> DockerSnapshot | None:
        found = self._ours(app_id)
        return build_snapshot(app_id, found, self._cancelled(app_id).get(app_id, 0.0), self._ends) if found else None

    @answering()
    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Return the app's state, from its containers; None if it has none.

        If the app's result is decided and containers still run (sidecars after the other roles have succeeded; other
        roles after one has failed), this call stops them, because no process of this package runs beside them.
        """
        found = self._find(app_id)
        if found is None:
            return None
        if found.overall.needs_stop:
            self._stop_rest(found)
        errors = map_concurrently(container_files.error, list(zip(found.containers, found.replicas, strict=True)))
        # The replica at fault may have been killed and end later. Replicas that lost it report a secondary failure.
        by_end = sorted(
            zip(found.replicas, errors, strict=True), key=lambda pair: (is_secondary(pair[1]), pair[0].ended)
        )
        cause = found.overall.cause
        if cause is not None and is_secondary(errors[found.replicas.index(cause)]):
            cause = next(replica for replica, _ in by_end if replica.state is AppState.FAILED)
        error = next((said for _, said in by_end if said), "") if cause else ""
        message = found.message(cause)
        if cause is not None and not error:
            message += container_files.why_no_host(found.containers[found.replicas.index(cause)], cause)
        return DescribeAppResponse(
            app_id=app_id,
            state=found.overall.state,
            num_restarts=self._restarts(found),
            msg=message or NONE,
            structured_error_msg=error or NONE,
            metadata=found.app.metadata,
            roles_statuses=found.statuses(errors),
            roles=found.app.roles,
        )

    def _restarts(self, found: DockerSnapshot) -> int:
        """Count dockerd's restarts of containers and the hosts' restarts of ranks."""
        counts = {replicas[0].role: [each.restarts for each in replicas] for replicas in found.roles if replicas}
        firsts = [pair for pair in zip(found.containers, found.replicas, strict=True) if pair[1].id == 0]
        return restarts(found.app, counts) + sum(map_concurrently(container_files.rank_restarts, firsts))

    @answering()
    def list(self, cfg: Mapping[str, CfgVal] | None = None) -> list[ListAppResponse]:
        """List the apps of this scheduler, newest first. (TorchX lists an app once per state of its containers.)"""
        apps: dict[str, list[Container]] = {}
        for container in self._ours():
            apps.setdefault(container.labels[LABEL_APP_ID], []).append(container)
        cancelled = self._cancelled()
        found = [
            build_snapshot(app_id, containers, cancelled.get(app_id, 0.0), self._ends)
            for app_id, containers in apps.items()
        ]
        found.sort(key=lambda one: one.created, reverse=True)
        return [ListAppResponse(one.app_id, one.overall.state, name=one.app.name) for one in found]

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
        """Return the lines of one replica's log; of both streams if ``streams`` is None.

        Raises:
            ValueError: the app, role or replica does not exist, its container was removed, or the regular expression
                is invalid.
        """
        found = self._find(app_id)
        if found is None:
            raise UserError(f"there is no app {app_id!r} with this Docker daemon")
        check_replica(app_id, found.sizes, role_name, k)
        if f"{role_name}/{k}" in found.removed:
            raise UserError(describe_removed(f"{role_name}/{k}"))
        everyone = [(replica.role, replica.id) for replica in found.replicas]

        def ended() -> bool:
            now = self._find(app_id)
            return now is None or now.overall.state in _ENDED

        lines = logs.lines(
            found.containers[everyone.index((role_name, k))],
            stdout=streams is not Stream.STDERR,
            stderr=streams is not Stream.STDOUT,
            since=since,
            until=until,
            follow=should_tail and found.overall.state not in _ENDED,
            ended=ended,
        )
        return lines_while_answering(matching(lines, regex))

    # -- ending --------------------------------------------------------------------------------------------------------

    @answering()
    def _cancel_existing(self, app_id: str) -> None:
        """Stop all containers and wait until they have ended; do nothing if the app has ended.

        TorchX stops one container after another, 10 s each, and the app counts as FAILED afterwards.
        """
        found = self._find(app_id)
        if found is None or found.overall.state in _ENDED:
            return
        self._note_cancel(app_id)
        self._end(found.containers, found.grace)

    def _note_cancel(self, app_id: str) -> None:
        """Mark the app as cancelled on the daemon; a second call keeps the time of the first."""
        self.docker_client.volumes.create(_record(app_id), labels={LABEL_CANCELLED: app_id})

    def _end(self, containers: Sequence[Container], grace: float) -> None:
        def stop(container: Container) -> None:
            with contextlib.suppress(NotFound):
                container.stop(timeout=int(grace + HOST_EXTRA))

        map_concurrently(stop, containers)

    def _stop_rest(self, found: DockerSnapshot) -> None:
        """Ask dockerd once to stop the containers of an app that still live; dockerd continues without the client."""
        if found.app_id in self._asked_to_end:
            return
        self._asked_to_end.add(found.app_id)
        pairs = zip(found.containers, found.replicas, strict=True)
        left = [container for container, replica in pairs if replica.lives or replica.restarts_needlessly]
        self._stop_in_background(left, found.grace).join(_ASKING)

    def _stop_in_background(self, containers: Sequence[Container], grace: float) -> threading.Thread:
        def end() -> None:
            with contextlib.suppress(DockerException, OSError):
                self._end(containers, grace)

        ending = threading.Thread(target=end, name="docker-end", daemon=True)
        ending.start()
        return ending

    # -- waiting in the foreground (schedulers/foreground.py) ----------------------------------------------------------

    @answering()
    def wait_terminal(self, app_id: str, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the app's end; return whether it has ended or does not exist."""
        until = time.monotonic() + timeout
        while (found := self._find(app_id)) is not None and found.overall.state not in _ENDED:
            if found.overall.needs_stop:
                self._stop_rest(found)
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL)
        return True

    def events_path(self, app_id: str) -> Path:
        """Return /dev/null: the events are in the containers and are not shown."""
        return Path(os.devnull)

    @answering()
    def stop(self, app_id: str, grace: float | None) -> None:
        """Cancel the app and return immediately.

        Args:
            app_id: the app's id.
            grace: seconds from SIGTERM to SIGKILL; None for the app's run option, 0 to kill immediately.
        """
        found = self._find(app_id)
        if found is None or found.overall.state in _ENDED:
            return
        self._note_cancel(app_id)
        if grace == 0:
            map_concurrently(_kill, found.containers)
        else:
            self._stop_in_background(found.containers, found.grace if grace is None else grace)

    @answering()
    def _delete_existing(self, app_id: str) -> None:
        """Cancel the app if it lives. Remove its containers and their anonymous volumes, the volume that marks the app
        as cancelled, and the network if no container uses it."""
        self._cancel_existing(app_id)
        map_concurrently(_remove, self._ours(app_id))
        with contextlib.suppress(NotFound):
            self.docker_client.volumes.get(_record(app_id)).remove()
        bridge_network.remove_unused(self.docker_client)


_ENDED = (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED)


def _record(app_id: str) -> str:
    return f"{app_id}-cancelled"


def _kill(container: Container) -> None:
    with contextlib.suppress(APIError):  # the container does not run
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
    """Create the scheduler without connecting to a daemon; ignore parameters for other schedulers."""
    return MonarchDockerScheduler(session_name)
