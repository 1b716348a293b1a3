# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Check this machine: state directory, disk, sockets, shared memory, limits, ports, clock."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import resource
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from torchx_monarch.backends.core import state_files
from torchx_monarch.model.check_result import CheckResult, check
from torchx_monarch.system import run_dirs

_MIB, _GIB = 1 << 20, 1 << 30

_LITTLE_SPACE, _NO_SPACE = _GIB, 50 * _MIB
"""Bytes free on a disk below which a check warns and fails."""

_LITTLE_INODES = 1000

_LITTLE_SHARED = 128 * _MIB
"""Bytes free in /dev/shm below which a check warns: containers have 64 MiB by default."""

_FEW_FILES = 1024
"""Open files below which a check warns: each rank has connections to all others, and DataLoader workers share files."""

_FEW_PORTS = 1000

_LONGEST_APP_ID = 36
"""Bytes of the id of an app whose name has 20 letters."""

_UNSYNCHRONISED = 5
"""TIME_ERROR of adjtimex(2)."""


def check_machine() -> Iterator[CheckResult]:
    """Check what every scheduler needs of this machine."""
    yield from check_state_dir(state_files.state_dir())
    yield check_sockets(state_files.apps_dir(), os.environ.get("TMPDIR") or "/tmp")
    yield check_space("temporary folder", os.environ.get("TMPDIR") or "/tmp")
    yield check_shared_memory("/dev/shm")
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_ports(Path("/proc/sys/net/ipv4/ip_local_port_range"))
    yield check_clock(time.time(), Path(__file__).stat().st_mtime, _clock_is_synchronised())


def check_state_dir(path: str) -> Iterator[CheckResult]:
    """Check the owner, the mode, the space and the file system of the state directory, which need not exist.

    Args:
        path: the state directory.
    """
    remedy = "fix it, or name another folder in MONARCH_STATE_DIR"
    folder = path
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    try:
        found = os.stat(folder)
    except OSError as error:
        yield check("state folder", path, fail=f"{folder}: {error.strerror}; {remedy}")
        return
    value, wrong = f"{path}, {_file_system(folder)}", ""
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        wrong = f"{folder} is no folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        wrong = f"{folder} (mode {mode:04o}, uid {found.st_uid}) cannot be written by you (uid {os.geteuid()})"
    elif folder == path and found.st_uid != os.geteuid():
        wrong = f"it belongs to uid {found.st_uid}, and you are uid {os.geteuid()}"
    open_to_others = folder == path and mode & 0o077
    advice = f"others may enter it (mode {mode:04o}), and it holds credentials; run: chmod 700 {path}"
    yield check("state folder", value, fail=f"{wrong}; {remedy}" if wrong else "", warn=advice * bool(open_to_others))
    if not wrong:
        yield check_space("disk of the state folder", folder)


def check_space(what: str, folder: str) -> CheckResult:
    """Check that a folder can be written, and that its disk has space and inodes.

    Args:
        what: name of the check.
        folder: the folder.
    """
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        return check(what, folder, fail=f"{error.strerror}; make the folder, or name another in TMPDIR")
    if not os.access(folder, os.W_OK | os.X_OK):
        return check(what, folder, fail=f"you (uid {os.geteuid()}) cannot write there; name another in TMPDIR")
    free, inodes = disk.f_bavail * disk.f_frsize, disk.f_favail
    value = f"{folder}, {_size(free)} free" + (f", {inodes} inodes free" if disk.f_files else "")
    fail = "the disk is full: remove files there" if free < _NO_SPACE else ""
    if disk.f_files and not inodes:  # file systems without a fixed number of inodes have 0 of 0
        fail = "the disk has no inode left: remove files there"
    scarce = free < _LITTLE_SPACE or (disk.f_files and inodes < _LITTLE_INODES)
    return check(what, value, fail=fail, warn="logs may fill the disk: remove files there" if scarce else "")


def check_sockets(apps: str, temporary: str) -> CheckResult:
    """Check that the paths of unix sockets are short enough.

    Args:
        apps: the folder of all apps.
        temporary: the folder for sockets if paths below ``apps`` are too long.
    """
    longest = len(os.fsencode(os.path.join(apps, "x" * _LONGEST_APP_ID, "run")))
    if longest <= run_dirs.MAX_RUN_DIR:
        return check("sockets", f"{apps}, {longest} of {run_dirs.MAX_RUN_DIR} bytes")
    short = next((each for each in (temporary, "/tmp") if os.access(each, os.W_OK | os.X_OK)), None)
    advice = f"{apps} is too long for sockets, and /tmp cannot be written; name a shorter folder in MONARCH_STATE_DIR"
    return check("sockets", short or apps, fail="" if short else advice)


def check_shared_memory(folder: str) -> CheckResult:
    """Check the shared memory, which ranks and DataLoader workers pass tensors in.

    Args:
        folder: where it is mounted.
    """
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        return check("shared memory", folder, fail=f"{error.strerror}; mount a tmpfs there")
    if not os.access(folder, os.W_OK | os.X_OK):
        return check("shared memory", folder, fail="you cannot write there; run: chmod 1777 /dev/shm (as root)")
    free = disk.f_bavail * disk.f_frsize
    advice = "DataLoader workers and NCCL may fail for want of it; in a container, give more (docker run --shm-size 1g)"
    return check("shared memory", f"{folder}, {_size(free)} free", warn=advice if free < _LITTLE_SHARED else "")


def check_open_files(soft: int, hard: int) -> CheckResult:
    """Check the limit of open files.

    Args:
        soft, hard: the limits; -1 for no limit.
    """
    few = soft != resource.RLIM_INFINITY and soft < _FEW_FILES
    value = f"{_limit(soft)} of at most {_limit(hard)}"
    return check("open files", value, warn="few for jobs of many ranks; run: ulimit -n 65536" if few else "")


def check_ports(range_file: Path) -> CheckResult:
    """Check that this machine can listen on its own address and has ports for connections.

    Args:
        range_file: the file in /proc with the range of ports that outgoing connections use.
    """
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
    except OSError as error:
        return check("ports", "127.0.0.1", fail=f"no port can be opened: {error.strerror}; run: ip link set lo up")
    low, high = 0, 0
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, range_file.read_text().split())
    few = high and high - low < _FEW_PORTS
    advice = "few for jobs of many ranks; run: sysctl net.ipv4.ip_local_port_range='32768 60999'"
    return check("ports", f"127.0.0.1, {low} to {high} for connections", warn=advice if few else "")


def check_clock(now: float, installed: float, synchronised: bool | None) -> CheckResult:
    """Check the clock: the certificates of a job are valid from its submission on.

    Args:
        now: the time, in seconds since the epoch.
        installed: when this package was installed.
        synchronised: whether the kernel says that the clock is synchronised; None if it does not tell.
    """
    value = f"{datetime.datetime.fromtimestamp(now, datetime.timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    value += "" if synchronised is None else ", synchronised" if synchronised else ", not synchronised"
    return check(
        "clock",
        value,
        fail="it is earlier than this package's installation; set it" if now < installed - 60 else "",
        warn="clocks of hosts that differ spoil certificates and times; run an NTP client (chrony, systemd-timesyncd)"
        if synchronised is False
        else "",
    )


def _clock_is_synchronised() -> bool | None:
    try:
        buffer = ctypes.create_string_buffer(1024)  # struct timex of zeros: asks for nothing to be changed
        state = ctypes.CDLL(None).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else bool(state != _UNSYNCHRONISED)


def _file_system(folder: str) -> str:
    """Return the type of the file system of a folder."""
    real, best = os.path.realpath(folder), ("", "unknown file system")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            fields, _, more = line.partition(" - ")
            point = fields.split()[4].replace("\\040", " ")
            if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
                best = point, more.split()[0]
    return best[1]


def _size(number: float) -> str:
    return f"{number / _GIB:.1f} GiB" if number >= _GIB else f"{number / _MIB:.0f} MiB"


def _limit(number: int) -> str:
    return "any number" if number == resource.RLIM_INFINITY else str(number)
