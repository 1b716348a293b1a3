# SPDX-License-Identifier: BSD-3-Clause
"""The queue for this machine's GPUs, or slots, among the jobs of one user (``-cfg gpus`` and ``-cfg slots``).

Each job that asks for some has a ticket: a file that its supervisor keeps locked, with what the job waits for or has.
The kernel releases the lock with the supervisor, however that ends. Tickets are in the order of submission, and no job
passes an earlier one that waits: how long jobs take is not known, so any that passed might delay it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local import gpus
from torchx_monarch.model import codec
from torchx_monarch.system import safe_files

POLL = 0.5
"""Seconds between two looks at the queue."""

_SLOTS = "MONARCH_SLOTS"


@dataclass
class Ticket:
    """What a job of the queue asks for, and the GPUs that it has; ``holds`` says whether its turn has come."""

    app_id: str
    gpus: int = 0
    slots: int = 0
    holds: bool = False
    devices: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        number, unit = (self.gpus, "GPU") if self.gpus else (self.slots, "slot")
        return f"{number} {unit}{'s' if number > 1 else ''}"


def check(count: int, slots: int, environ: Mapping[str, str]) -> str:
    """Return why this machine can never have as many GPUs, or slots, as a job asks for; empty if it can."""
    machine = f"this machine ({os.uname().nodename})"
    if count and count > (there := len(gpus.devices(environ))):
        return f"Run option `gpus` is {count}, and {machine} has {there}"
    if slots > (total := _count_slots(environ)):
        return f"Run option `slots` is {slots}, and {machine} has {total}: its CPUs, or {_SLOTS}"
    return ""


def _count_slots(environ: Mapping[str, str]) -> int:
    text = environ.get(_SLOTS, "")
    return int(text) if text.isdecimal() else len(os.sched_getaffinity(0))


class MachineQueue:
    """The place of one job in the queue, from its supervisor's side."""

    def __init__(self, ticket: Ticket, submitted: float) -> None:
        self.ticket = ticket
        self._devices = gpus.devices(os.environ) if ticket.gpus else []
        self._folder = os.path.join(state_files.make_folder("queue"), os.uname().nodename)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        self._path = os.path.join(self._folder, f"{submitted:017.6f}-{ticket.app_id}-{os.getpid()}")
        with self._exclusive():  # else another job might remove the ticket before it is locked
            self._file = safe_files.open_file(self._path, os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._write()

    def take(self) -> str:
        """Take what the job asks for if its turn has come; return what it waits for, empty if it has it."""
        with self._exclusive():
            is_next = all(ticket.holds for ticket in self._others()[0])
        busy = _busy_elsewhere() if self.ticket.gpus and is_next else set()  # not under the lock: it may take long
        with self._exclusive():
            earlier, others = self._others()
            if waiting := [ticket for ticket in earlier if not ticket.holds]:
                return f"waits for {self.ticket.what} behind {waiting[0].app_id}, which waits for {waiting[0].what}"
            holders = [ticket for ticket in others if ticket.holds]
            if self.ticket.slots:
                free = _count_slots(os.environ) - sum(ticket.slots for ticket in holders)
                if free < self.ticket.slots:
                    return self._describe(free, holders, "")
            else:
                taken = {device for ticket in holders for device in ticket.devices}
                unheld = [device for device in self._devices if device not in taken]
                usable = [device for device in unheld if device not in busy]
                if len(usable) < self.ticket.gpus or not is_next:  # its turn has come after the driver was asked
                    foreign = ", ".join(device for device in unheld if device in busy)
                    return self._describe(len(usable), holders, foreign and f"other processes use {foreign}")
                self.ticket.devices = tuple(usable[: self.ticket.gpus])
            self.ticket.holds = True
            self._write()
        return ""

    def close(self) -> None:
        """Leave the queue, and give back what the job has."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._file)

    def _describe(self, free: int, holders: list[Ticket], more: str) -> str:
        having = [f"{ticket.app_id} has {','.join(ticket.devices) or ticket.what}" for ticket in holders]
        reasons = "; ".join(filter(None, (", ".join(having), more)))
        verb = "is" if free == 1 else "are"
        return f"waits for {self.ticket.what}, {free} {verb} free{f': {reasons}' if reasons else ''}"

    def _write(self) -> None:
        data = json.dumps(asdict(self.ticket)).encode()
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        lock = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a supervisor holds it for milliseconds
            yield
        finally:
            os.close(lock)

    def _others(self) -> tuple[list[Ticket], list[Ticket]]:
        """Return the tickets of earlier jobs, and of all other jobs; remove those whose supervisor has ended."""
        earlier, others = list[Ticket](), list[Ticket]()
        for name in sorted(os.listdir(self._folder)):
            path = os.path.join(self._folder, name)
            if path != self._path and (ticket := _read(path)) is not None:
                others.append(ticket)
                if path < self._path:
                    earlier.append(ticket)
        return earlier, others


def _read(path: str) -> Ticket | None:
    """Return the ticket in a file; None if nobody holds it, and remove it then."""
    try:
        file = safe_files.open_file(path, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(ValueError):
            return codec.decode(Ticket, json.loads(os.pread(file, 1 << 16, 0)))
        return None
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    finally:
        os.close(file)


def _busy_elsewhere() -> set[str]:
    """Return the GPUs, by index and by UUID, on which the driver sees processes."""

    def ask(what: str) -> list[list[str]]:
        done = subprocess.run(
            ["nvidia-smi", f"--query-{what}", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
        return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]

    try:
        used = {uuid for uuid, *_ in ask("compute-apps=gpu_uuid,pid")}
        return used | {index for index, uuid in ask("gpu=index,uuid") if uuid in used} if used else set()
    except (OSError, ValueError, subprocess.SubprocessError):
        return set()  # CUDA_VISIBLE_DEVICES names devices on a machine without the tool
