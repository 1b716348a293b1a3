# SPDX-License-Identifier: BSD-3-Clause
"""Read files and logs of containers, and report when the Docker daemon does not answer."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import requests
import urllib3
from docker.errors import DockerException, NotFound
from docker.models.containers import Container

from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.core.snapshot import LogQuery, TimedLines, seconds
from torchx_monarch.system.line_output import LineReader

_MAX_THREADS = 128

_MAX_BYTES = 1 << 20

_POLL = 0.3
"""Seconds between two checks of a followed container that does not run."""

_GO_MODE_TYPE = 0x8F280000
"""Go's ``fs.ModeType``: dockerd sets one of these bits for anything but a regular file."""

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
        raise DaemonError(f"the Docker daemon at {where()} refuses a request: {explained(error)}") from None
    except (requests.exceptions.RequestException, urllib3.exceptions.HTTPError) as error:
        raise DaemonError(
            f"the Docker daemon at {where()} does not answer any more ({error}). What runs there may go on: ask again "
            "when it is back"
        ) from None


def explained(error: DockerException) -> str:
    return str(getattr(error, "explanation", None) or error)


def map_concurrently(action: Callable[[T], R], arguments: Sequence[T]) -> list[R]:
    """Return the results of ``action``, in order, or raise the first error, when all calls have ended.

    dockerd takes as long for one container as for many in parallel.
    """
    with ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="docker") as pool:
        futures = [pool.submit(action, argument) for argument in arguments]
    return [future.result() for future in futures]


def environment(container: Container) -> dict[str, str]:
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
        read = io.BytesIO()
        for chunk in chunks:
            if read.tell() > 2 * _MAX_BYTES:  # it has grown since
                chunks.close()
                return ""
            read.write(chunk)
        read.seek(0)
        with tarfile.open(fileobj=read) as archive:
            member = archive.next()
            # Times in an archive are whole seconds. An older file is from an earlier start of the container.
            if member is None or not member.isfile() or member.mtime + 1 < since:
                return ""
            file = archive.extractfile(member)
            return file.read().decode(errors="replace") if file is not None else ""
    except (DockerException, tarfile.TarError):
        return ""


def log_lines(container: Container, query: LogQuery[Any]) -> Iterator[TimedLines]:
    """Yield the lines of a container's log. Bytes that are not UTF-8 are replaced.

    TorchX passes times to docker-py, which takes a time without zone for UTC and fails on a time with a zone. When it
    follows a log, it stops at a restart, and yields chunks as written, which may be several lines or part of one.
    """
    start = query.since.timestamp() if query.since is not None else 0.0
    stop = query.until.timestamp() if query.until is not None else None
    tail: int | str = query.tail or "all"
    streams = {"stdout": query.stream != "stderr", "stderr": query.stream != "stdout"}
    for is_last in query.reads(_POLL):
        options: dict[str, float] = {"since": start} if start > 0 else {}
        if stop is not None:
            options["until"] = stop
        try:
            chunks = container.logs(timestamps=True, stream=True, follow=not is_last, tail=tail, **streams, **options)
            with contextlib.closing(chunks):
                latest = yield from _lines(chunks)
        except NotFound:
            return  # deleted meanwhile
        if latest:
            start, tail = max(start, latest + 1e-6), "all"  # the resolution of dockerd's ``since``


def _lines(chunks: Iterable[bytes]) -> Generator[TimedLines, None, float]:
    """Join chunks, each of which begins with its timestamp, to lines; return the latest timestamp, 0.0 without chunks.

    dockerd splits a long line into several chunks. A line has the time of its last chunk.
    """
    latest, reader = 0.0, LineReader()
    for chunk in chunks:
        stamp, _, text = chunk.partition(b" ")
        latest = max(latest, seconds(stamp.decode(errors="replace")))
        for line in reader.feed(text):
            yield TimedLines(latest, line.decode(errors="replace"))
    if rest := reader.rest():
        yield TimedLines(latest, rest.decode(errors="replace"))
    return latest


def where() -> str:
    return os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
