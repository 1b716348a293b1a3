# SPDX-License-Identifier: BSD-3-Clause
"""Run each replica as a container of one Docker daemon, on the network ``torchx``.

The daemon stores the whole state of an app: its containers, their labels, and an empty volume if the app was cancelled.
Any process on any machine that reaches the daemon can therefore query the app.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence

from docker.errors import APIError, DockerException
from docker.models.containers import Container
from torchx.schedulers.docker_scheduler import LABEL_APP_ID, LABEL_ROLE_NAME, DockerJob
from torchx.specs import AppDef
from torchx.workspace import WorkspaceMixin
from torchx.workspace.docker_workspace import DockerWorkspaceMixin

from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, LogQuery, read_undamaged
from torchx_monarch.backends.core.errors import SubmitError, UserError
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.backends.docker import native
from torchx_monarch.backends.docker.native import Daemon, DaemonError, answering, map_concurrently
from torchx_monarch.backends.docker.request import LABEL_APP, DockerOpts, render
from torchx_monarch.backends.docker.snapshot import DockerSnapshot, add_files, build, describe_removed, read_results
from torchx_monarch.model.check_result import CheckResult
from torchx_monarch.model.env_names import CREDENTIALS
from torchx_monarch.model.state import State

_STOP_WAIT = 2.0
"""Seconds that ``stop`` waits for the containers; dockerd stops them even if the client exits."""


class _Workspace(DockerWorkspaceMixin):  # type: ignore[misc]
    """Builds workspaces into images of the daemon, which runs them: none is pushed."""

    dryrun_push_images = WorkspaceMixin.dryrun_push_images


class DockerBackend(Backend[DockerOpts, DockerJob, DockerSnapshot]):
    """Runs each replica as a container. dockerd restarts one that fails, up to the role's ``max_retries`` times."""

    options = DockerOpts
    capabilities = Capabilities(separates_roles=True, waits_for_cancel=True, limits_resources=True, needs_image=True)
    poll = 0.2

    def __init__(self) -> None:
        self._daemon = Daemon()
        self._stopping: dict[str, threading.Thread] = {}
        self.workspace = _Workspace()

    def close(self) -> None:
        self._daemon.close()

    # -- submitting ----------------------------------------------------------------------------------------------------

    def checks(self, options: DockerOpts) -> Iterable[CheckResult]:
        with answering():
            info = self._daemon.client.info()
        where = os.environ.get("DOCKER_HOST") or "this machine"
        return [CheckResult("Docker", f"{info.get('ServerVersion', 'unknown version')} at {where}")]

    def render(self, app: AppDef, submitted: SubmittedApp, options: DockerOpts) -> DockerJob:
        return render(app, options)

    @answering()
    def submit(self, request: DockerJob, submitted: SubmittedApp, credentials: str) -> str:
        """Create all containers, then start them. If that fails, remove all. (TorchX leaves those that were.)"""
        daemon, packed = self._daemon, submitted.pack()
        daemon.pull({container.image for container in request.containers})
        hosts = {spec.name for spec in submitted.roles if spec.runs_hosts}
        made: list[Container] = []
        try:
            daemon.ensure_network()
            for container in request.containers:
                options = {**container.kwargs, "labels": {**container.kwargs["labels"], LABEL_APP: packed}}
                if options["labels"][LABEL_ROLE_NAME] in hosts:
                    options["environment"] = {**options["environment"], CREDENTIALS: credentials}
                made.append(daemon.client.containers.create(container.image, list(container.command), **options))
            map_concurrently(lambda container: container.start(), made)
            if request.app_id in daemon.cancelled() and (app := self.snapshot(request.app_id, brief=True)):
                self.stop(app, Outcome(State.CANCELLED), None)  # cancelled while containers were created
        except BaseException as error:
            daemon.remove(request.app_id, made)
            if isinstance(error, DockerException):
                hint = " (run option init=False does without)" if "docker-init" in native.explained(error) else ""
                raise SubmitError(f"the app was not started: {native.explained(error)}{hint}") from None
            raise
        return str(request.app_id)

    # -- reading -------------------------------------------------------------------------------------------------------

    @answering()
    def snapshot(self, app_id: str, *, brief: bool = False) -> DockerSnapshot | None:
        containers = self._daemon.containers(app_id)
        if not containers:
            return None
        app = build(app_id, containers, self._daemon.cancelled().get(app_id), read_results(containers))
        return app if brief else add_files(app)

    @answering()
    def snapshots(self, options: Cfg) -> Sequence[DockerSnapshot]:
        """Read each app once. (TorchX lists an app once per state of its containers.)"""
        apps: dict[str, list[Container]] = {}
        for container in self._daemon.containers():
            apps.setdefault(container.labels[LABEL_APP_ID], []).append(container)
        cancelled = self._daemon.cancelled()
        return read_undamaged(apps.items(), lambda item: build(*item, cancelled.get(item[0]), read_results(item[1])))

    def read_log(
        self, app: DockerSnapshot, role: str, replica: int, query: LogQuery[DockerSnapshot]
    ) -> Iterator[TimedLine]:
        name = f"{role}/{replica}"
        container = app.containers.get(name)
        if container is None:
            gone = any(found.name == name and found.state is State.UNKNOWN for found in app.replicas)
            raise UserError(describe_removed(name) if gone else f"replica {name} has no container yet")
        with answering():
            yield from native.log_lines(container, query)

    # -- ending --------------------------------------------------------------------------------------------------------

    @answering()
    def stop(self, app: DockerSnapshot, outcome: Outcome, grace: float | None) -> None:
        """Begin to stop the containers that run or are restarted; record a cancel on the daemon."""
        if outcome.state is State.CANCELLED:
            self._daemon.mark_cancelled(app.app_id, outcome.message)
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
            thread.join(_STOP_WAIT)

    @answering()
    def remove(self, app: DockerSnapshot) -> None:
        """Remove the app's containers, the volume that marks it as cancelled, and the network if it is unused."""
        self._daemon.remove(app.app_id, self._daemon.containers(app.app_id))
