# SPDX-License-Identifier: BSD-3-Clause
"""Run each replica as a container of one Docker daemon, on the network ``torchx``.

The daemon stores the whole state of an app: its containers, their labels, and an empty volume if the app was cancelled.
Any process on any machine that reaches the daemon can therefore query the app.
"""

from __future__ import annotations

import contextlib
import functools
import http
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence

import docker
from docker.errors import APIError, DockerException, NotFound
from docker.models.containers import Container
from torchx.schedulers.docker_scheduler import LABEL_APP_ID, LABEL_ROLE_NAME, NETWORK, DockerJob
from torchx.specs import AppDef
from torchx.workspace import WorkspaceMixin
from torchx.workspace.docker_workspace import DockerWorkspaceMixin

from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, CheckResult, LogQuery, read_undamaged
from torchx_monarch.backends.core.errors import SubmitError, UserError
from torchx_monarch.backends.core.snapshot import Outcome, TimedLines, seconds
from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.docker import connection
from torchx_monarch.backends.docker.connection import DaemonError, answering, map_concurrently
from torchx_monarch.backends.docker.request import LABEL_APP, DockerOpts, render
from torchx_monarch.backends.docker.snapshot import DockerSnapshot, add_files, build, describe_removed, read_results
from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.model.state import State

LABEL_CANCELLED = "torchx-monarch/cancelled"
"""Label with the app's id, on the volume that marks the app as cancelled. (Container labels cannot be changed.)"""

LABEL_REASON = "torchx-monarch/reason"
"""Label of that volume with the reason; empty if the user has asked for it."""

_log = logging.getLogger("torchx_monarch")


class _Workspace(DockerWorkspaceMixin):  # type: ignore[misc]
    """Builds workspaces into images of the daemon, which runs them: none is pushed."""

    dryrun_push_images = WorkspaceMixin.dryrun_push_images


class DockerBackend(Backend[DockerOpts, DockerJob, DockerSnapshot]):
    """Runs each replica as a container. dockerd restarts one that fails, up to the role's ``max_retries`` times."""

    options = DockerOpts
    capabilities = Capabilities(waits_for_cancel=True, limits_resources=True, needs_owner=True, needs_image=True)
    poll = 0.2

    def __init__(self) -> None:
        self._stopping: dict[str, threading.Thread] = {}
        self.workspace = _Workspace()

    @functools.cached_property
    def _client(self) -> docker.DockerClient:
        """The client of the daemon that ``DOCKER_HOST`` names, or this machine's; connects at the first request."""
        try:
            return docker.from_env()
        except DockerException as error:
            raise DaemonError(
                f"there is no Docker daemon at {connection.where()} ({error}). Start it (systemctl start docker; "
                "Debian's package is docker.io), name another in DOCKER_HOST, or have yourself put into the group that "
                "may use it"
            ) from None

    def close(self) -> None:
        if client := self.__dict__.pop("_client", None):
            client.close()

    # -- submitting ----------------------------------------------------------------------------------------------------

    def checks(self, options: DockerOpts) -> Iterable[CheckResult]:
        with answering():
            info = self._client.info()
        return [CheckResult("Docker", f"{info.get('ServerVersion', 'unknown version')} at {connection.where()}")]

    def render(self, app: AppDef, submitted: SubmittedApp, options: DockerOpts) -> DockerJob:
        return render(app, options)

    @answering()
    def submit(self, request: DockerJob, submitted: SubmittedApp, credentials: str) -> str:
        """Create all containers, then start them. If that fails, remove all. (TorchX leaves those that were.)"""
        packed = submitted.pack()
        self._pull({container.image for container in request.containers})
        hosts = {spec.name for spec in submitted.roles if spec.runs_hosts}
        made: list[Container] = []
        try:
            self._ensure_network()
            for container in request.containers:
                options = {**container.kwargs, "labels": {**container.kwargs["labels"], LABEL_APP: packed}}
                if options["labels"][LABEL_ROLE_NAME] in hosts:
                    options["environment"] = {**options["environment"], CREDENTIALS: credentials}
                made.append(self._client.containers.create(container.image, list(container.command), **options))
            map_concurrently(lambda container: container.start(), made)
            if request.app_id in self._cancelled() and (app := self.snapshot(request.app_id, brief=True)):
                self.stop(app, Outcome(State.CANCELLED), None)  # cancelled while containers were created
        except BaseException as error:
            self._remove(request.app_id, made)
            if isinstance(error, DockerException):
                hint = " (run option init=False does without)" if "docker-init" in connection.explained(error) else ""
                raise SubmitError(f"the app was not started: {connection.explained(error)}{hint}") from None
            raise
        return str(request.app_id)

    def _pull(self, images: Iterable[str]) -> None:
        """Pull images; warn of those that cannot be pulled, which the daemon may have."""
        for image in sorted(images):
            if not image.startswith("sha256:"):
                _log.info("pulling the image %s", image)
                try:
                    self._client.images.pull(image)
                except DockerException as error:
                    _log.warning("the image %s cannot be pulled, the daemon's own is used: %s", image, error)

    def _ensure_network(self) -> None:
        """Create the containers' network if it does not exist.

        TorchX's ``ensure_network`` locks a file in /tmp, which only the user who created the file can open.
        """
        try:
            self._client.networks.create(NETWORK, driver="bridge", check_duplicate=True)
        except APIError as error:
            if error.status_code != http.HTTPStatus.CONFLICT:
                raise

    # -- reading -------------------------------------------------------------------------------------------------------

    @answering()
    def snapshot(self, app_id: str, *, brief: bool = False) -> DockerSnapshot | None:
        containers = self._containers(app_id)
        if not containers:
            return None
        app = build(app_id, containers, self._cancelled().get(app_id), read_results(containers))
        return app if brief else add_files(app)

    @answering()
    def snapshots(self, options: Cfg) -> Sequence[DockerSnapshot]:
        """Read each app once. (TorchX lists an app once per state of its containers.)"""
        apps: dict[str, list[Container]] = {}
        for container in self._containers():
            apps.setdefault(container.labels[LABEL_APP_ID], []).append(container)
        cancelled = self._cancelled()
        return read_undamaged(apps.items(), lambda item: build(*item, cancelled.get(item[0]), read_results(item[1])))

    def _containers(self, app_id: str = "") -> list[Container]:
        label = [LABEL_APP, f"{LABEL_APP_ID}={app_id}" if app_id else LABEL_APP_ID]
        found: list[Container] = self._client.containers.list(all=True, filters={"label": label}, ignore_removed=True)
        return found

    def _cancelled(self) -> dict[str, Outcome]:
        """Return how each cancelled app was cancelled, by app id."""
        found = {}
        for volume in self._client.volumes.list(filters={"label": LABEL_CANCELLED}):
            labels, when = volume.attrs["Labels"], seconds(volume.attrs["CreatedAt"])
            found[labels[LABEL_CANCELLED]] = Outcome(State.CANCELLED, labels.get(LABEL_REASON, ""), time=when)
        return found

    def read_log(
        self, app: DockerSnapshot, role: str, replica: int, query: LogQuery[DockerSnapshot]
    ) -> Iterator[TimedLines]:
        name = f"{role}/{replica}"
        container = app.containers.get(name)
        if container is None:
            gone = any(found.name == name and found.state is State.UNKNOWN for found in app.replicas)
            raise UserError(describe_removed(name) if gone else f"replica {name} has no container yet")
        with answering():
            yield from connection.log_lines(container, query)

    # -- ending --------------------------------------------------------------------------------------------------------

    @answering()
    def stop(self, app: DockerSnapshot, outcome: Outcome, grace: float | None) -> None:
        """Begin to stop the containers that run or are restarted; record a cancel on the daemon."""
        if outcome.state is State.CANCELLED:
            labels = {LABEL_CANCELLED: app.app_id, LABEL_REASON: outcome.message}
            self._client.volumes.create(f"{app.app_id}-cancelled", labels=labels)  # again: the first labels stay
        names = [replica.name for replica in app.replicas if replica.is_alive]
        left = [app.containers[name] for name in names if name in app.containers]
        seconds = int((app.grace if grace is None else grace) + HOST_EXTRA)

        def end(container: Container) -> None:
            with contextlib.suppress(APIError):  # it has ended, or was removed
                container.stop(timeout=seconds) if grace != 0 else container.kill()

        def end_all() -> None:
            with contextlib.suppress(DaemonError), answering():
                map_concurrently(end, left)

        if grace == 0:
            map_concurrently(end, left)
        elif app.app_id not in self._stopping or not self._stopping[app.app_id].is_alive():
            thread = self._stopping[app.app_id] = threading.Thread(target=end_all, name="docker-stop", daemon=True)
            thread.start()
            thread.join(2.0)  # dockerd stops them even if the client exits

    @answering()
    def remove(self, app: DockerSnapshot) -> None:
        """Remove the app's containers, the volume that marks it as cancelled, and the network if it is unused."""
        self._remove(app.app_id, self._containers(app.app_id))

    def _remove(self, app_id: str, containers: Sequence[Container]) -> None:
        """Remove containers with their anonymous volumes, the mark of a cancelled app, and the network if unused."""

        def remove(container: Container) -> None:
            with contextlib.suppress(NotFound):
                container.remove(force=True, v=True)

        map_concurrently(remove, containers)
        with contextlib.suppress(NotFound):
            self._client.volumes.get(f"{app_id}-cancelled").remove()
        # Stopped containers need it for their next start.
        if not self._client.containers.list(all=True, sparse=True, limit=1, filters={"network": NETWORK}):
            with contextlib.suppress(APIError):  # a container has joined since, or it was removed
                self._client.networks.get(NETWORK).remove()
