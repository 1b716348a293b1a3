# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the files that a host wrote in its container: its error file and its events."""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
from typing import TYPE_CHECKING

from docker.errors import DockerException
from torchx.specs import AppState

from torchx_monarch.backends.docker import request
from torchx_monarch.backends.docker.status import DockerReplica
from torchx_monarch.backends.protocols import CREDENTIALS
from torchx_monarch.system import error_files

if TYPE_CHECKING:
    from docker.models.containers import Container

_TOO_LONG = 1 << 20

_GO_MODE_TYPE = 0x8F280000
"""Go's ``fs.ModeType``: dockerd sets one of these bits for anything but a regular file."""

_NO_SUCH_COMMAND = 127


def error(pair: tuple[Container, DockerReplica]) -> str:
    """Return the content of a failed replica's error file, which its host wrote before it ended; empty if missing."""
    container, replica = pair
    if replica.word or replica.state is not AppState.FAILED or not replica.started:
        return replica.word
    return error_files.cleaned(read(container, replica.env.get(request.ERROR_FILE, ""), replica.started))


def rank_restarts(pair: tuple[Container, DockerReplica]) -> int:
    """Count the rank restarts in the events of a replica 0."""
    container, replica = pair
    text = read(container, replica.env.get(request.EVENTS, ""), 0.0) if replica.started else ""
    return sum('"rank_restart"' in line for line in text.splitlines())


def why_no_host(container: Container, replica: DockerReplica) -> str:
    """Describe why a host without an error file did not start: its last log line, in parentheses; empty if unknown."""
    if CREDENTIALS not in replica.env or not 0 < replica.code <= _NO_SUCH_COMMAND:
        return ""
    with contextlib.suppress(DockerException):
        said: str = container.logs(tail=1).decode(errors="replace").strip()
        if re.search(r"No module named '?torchx_monarch", said):
            said += "; install torchx-monarch in the image"
        elif replica.code == _NO_SUCH_COMMAND:
            said += "; the image needs a `python` on its PATH, in which torchx-monarch is installed"
        return f" ({said})" if said else ""
    return ""


def read(container: Container, path: str, since: float = 0.0) -> str:
    """Return the text of a file in a running or stopped container.

    Args:
        container: the container.
        path: the file's path in it; empty means no file.
        since: in seconds since the epoch; a file last modified before it is ignored.

    Returns:
        The text; empty if the file is missing, too old, longer than ``_TOO_LONG`` or not regular.
    """
    if not path:
        return ""
    try:
        chunks, about = container.get_archive(path)
        if about["size"] > _TOO_LONG or about["mode"] & _GO_MODE_TYPE:
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
