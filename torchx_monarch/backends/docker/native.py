# SPDX-License-Identifier: BSD-3-Clause
"""Make requests to the Docker daemon, read files and logs of containers, and report when it does not answer."""

from __future__ import annotations

import contextlib
import functools
import http
import io
import logging
import os
import tarfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import docker
import requests
import urllib3
from docker.errors import APIError, DockerException, NotFound
from docker.models.containers import Container
from torchx.schedulers.docker_scheduler import LABEL_APP_ID, NETWORK

from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.core.timed_line import LogQuery, TimedLine, seconds
from torchx_monarch.backends.docker.request import LABEL_APP
from torchx_monarch.model.state import State
from torchx_monarch.system.line_output import LineReader

LABEL_CANCELLED = "torchx-monarch/cancelled"
"""Label with the app's id, on the volume that marks the app as cancelled. (Container labels cannot be changed.)"""

LABEL_REASON = "torchx-monarch/reason"
"""Label of that volume with the reason; empty if the user has asked for it."""

_MAX_THREADS = 128

_MAX_BYTES = 1 << 20

_POLL = 0.3
"""Seconds between two checks of a followed container that does not run."""

_TICK = 1e-6
"""Seconds; the resolution of dockerd's ``since``."""

_GO_MODE_TYPE = 0x8F280000
"""Go's ``fs.ModeType``: dockerd sets one of these bits for anything but a regular file."""

_log = logging.getLogger("torchx_monarch")

T = TypeVar("T")
R = TypeVar("R")


class DaemonError(BackendError):
    """Raised when the Docker daemon is missing, does not answer, or refuses a request."""


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Raise DaemonError for the errors of requests to the daemon, which may end or hang meanwhile."""
    try:
        yield
    except DockerException as error:
        raise DaemonError(f"the Docker daemon at {_where()} refuses a request: {explained(error)}") from None
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
        raise DaemonError(
            f"the Docker daemon at {_where()} does not answer any more ({error}). What runs there may go on: ask again "
            "when it is back"
        ) from None


def explained(error: DockerException) -> str:
    """Return the reason that the daemon gives for an error."""
    return str(getattr(error, "explanation", None) or error)


def map_concurrently(action: Callable[[T], R], arguments: Sequence[T]) -> list[R]:
    """Return the results of ``action``, in order, or raise the first error, when all calls have ended.

    dockerd takes as long for one container as for many in parallel.
    """
    with ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="docker") as pool:
        futures = [pool.submit(action, argument) for argument in arguments]
    return [future.result() for future in futures]


class Daemon:
    """The daemon that ``DOCKER_HOST`` names, or this machine's if that is unset. Connects at the first request."""

    @functools.cached_property
    def client(self) -> docker.DockerClient:
        """The client of the daemon."""
        try:
            return docker.from_env()
        except DockerException as error:
            raise DaemonError(
                f"there is no Docker daemon at {_where()} ({error}). Start it (systemctl start docker; Debian's "
                "package is docker.io), name another in DOCKER_HOST, or have yourself put into the group that may "
                "use it"
            ) from None

    def close(self) -> None:
        """Close the connections."""
        if client := self.__dict__.pop("client", None):
            client.close()

    def containers(self, app_id: str = "") -> list[Container]:
        """Return the containers of an app; those of all apps without an id."""
        label = [LABEL_APP, f"{LABEL_APP_ID}={app_id}" if app_id else LABEL_APP_ID]
        found: list[Container] = self.client.containers.list(all=True, filters={"label": label}, ignore_removed=True)
        return found

    def cancelled(self) -> dict[str, Outcome]:
        """Return how each cancelled app was cancelled, by app id."""
        found = {}
        for volume in self.client.volumes.list(filters={"label": LABEL_CANCELLED}):
            labels, when = volume.attrs["Labels"], seconds(volume.attrs["CreatedAt"])
            found[labels[LABEL_CANCELLED]] = Outcome(State.CANCELLED, labels.get(LABEL_REASON, ""), time=when)
        return found

    def mark_cancelled(self, app_id: str, reason: str) -> None:
        """Mark an app as cancelled; a second call keeps time and reason of the first."""
        self.client.volumes.create(_marker(app_id), labels={LABEL_CANCELLED: app_id, LABEL_REASON: reason})

    def pull(self, images: Iterable[str]) -> None:
        """Pull images; warn of those that cannot be pulled, which the daemon may have."""
        for image in sorted(images):
            if not image.startswith("sha256:"):
                _log.info("pulling the image %s", image)
                try:
                    self.client.images.pull(image)
                except DockerException as error:
                    _log.warning("the image %s cannot be pulled, the daemon's own is used: %s", image, error)

    def ensure_network(self) -> None:
        """Create the containers' network if it does not exist.

        TorchX's ``ensure_network`` locks a file in /tmp, which only the user who created the file can open.
        """
        try:
            self.client.networks.create(NETWORK, driver="bridge", check_duplicate=True)
        except APIError as error:
            if error.status_code != http.HTTPStatus.CONFLICT:
                raise

    def remove(self, app_id: str, containers: Sequence[Container]) -> None:
        """Remove containers with their anonymous volumes, the mark of a cancelled app, and the network if unused."""

        def remove(container: Container) -> None:
            with contextlib.suppress(NotFound):
                container.remove(force=True, v=True)

        map_concurrently(remove, containers)
        with contextlib.suppress(NotFound):
            self.client.volumes.get(_marker(app_id)).remove()
        # Stopped containers need it for their next start.
        if not self.client.containers.list(all=True, sparse=True, limit=1, filters={"network": NETWORK}):
            with contextlib.suppress(APIError):  # a container has joined since, or it was removed
                self.client.networks.get(NETWORK).remove()


def environment(container: Container) -> dict[str, str]:
    """Return the environment of a container's command."""
    return dict(word.split("=", 1) for word in container.attrs["Config"].get("Env") or () if "=" in word)


def read_file(container: Container, path: str, since: float = 0.0) -> str:
    """Return the text of a file in a running or stopped container.

    It is empty if there is no path or no such file, or if the file is longer than ``_MAX_BYTES``, not regular, or was
    last modified before ``since``, in seconds since the epoch.
    """
    if not path:
        return ""
    try:
        chunks, about = container.get_archive(path)
        if about["size"] > _MAX_BYTES or about["mode"] & _GO_MODE_TYPE:
            chunks.close()  # the archive of a folder holds the folder's whole content
            return ""
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            member = archive.next()
            # Times in an archive are whole seconds. An older file is from an earlier start of the container.
            if member is None or not member.isfile() or member.mtime + 1 < since:
                return ""
            file = archive.extractfile(member)
            return file.read().decode(errors="replace") if file is not None else ""
    except (DockerException, tarfile.TarError):
        return ""


def log_lines(container: Container, query: LogQuery[Any]) -> Iterator[TimedLine]:
    """Yield the lines of a container's log. Bytes that are not UTF-8 are replaced.

    TorchX passes times to docker-py, which takes a time without zone for UTC and fails on a time with a zone. When it
    follows a log, it stops at a restart, and yields chunks as written, which may be several lines or part of one.
    """
    start = query.since.timestamp() if query.since is not None else 0.0
    stop = query.until.timestamp() if query.until is not None else None
    tail: int | str = query.tail or "all"
    streams = {"stdout": query.stream != "stderr", "stderr": query.stream != "stdout"}
    while True:
        # Ask before the read: output written just before the app's end is then read, too.
        last = not query.follow or query.has_ended()
        options: dict[str, float] = {"since": start} if start > 0 else {}
        if stop is not None:
            options["until"] = stop
        try:
            chunks = container.logs(timestamps=True, stream=True, follow=not last, tail=tail, **streams, **options)
            with contextlib.closing(chunks):
                latest = yield from _lines(chunks)
        except NotFound:
            return  # deleted meanwhile
        if last:
            return
        if latest:
            start, tail = max(start, latest + _TICK), "all"
        time.sleep(_POLL)


def _lines(chunks: Iterable[bytes]) -> Generator[TimedLine, None, float]:
    """Join chunks, each of which begins with its timestamp, to lines; return the latest timestamp, 0.0 without chunks.

    dockerd splits a long line into several chunks. A line has the time of its last chunk.
    """
    latest, reader = 0.0, LineReader()
    for chunk in chunks:
        stamp, _, text = chunk.partition(b" ")
        latest = max(latest, seconds(stamp.decode(errors="replace")))
        for line in reader.feed(text):
            yield TimedLine(latest, line.decode(errors="replace"))
    if rest := reader.rest():
        yield TimedLine(latest, rest.decode(errors="replace"))
    return latest


def _where() -> str:
    return os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")


def _marker(app_id: str) -> str:
    return f"{app_id}-cancelled"
