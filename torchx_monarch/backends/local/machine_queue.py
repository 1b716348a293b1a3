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
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local import gpus
from torchx_monarch.model import codec
from torchx_monarch.system import process_status, safe_files
from torchx_monarch.system.untrusted_text import one_line

POLL = 0.5
"""Seconds between two looks at the queue."""

_LOCK_TIMEOUT = 2.0
"""Seconds for which a job tries to lock the queue before it says who holds the lock: supervisors hold it for
milliseconds, unless they are stopped."""

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
        return f"GPUs asked for by all roles (run option `gpus`, or --gpu): {count}; {machine} has {there}"
    if slots and not (environ.get(_SLOTS) or "1").isdecimal():
        return f"{_SLOTS} of {machine} is {environ[_SLOTS]!r}; it is a number of slots, such as 4"
    if slots > (total := _count_slots(environ)):
        return (
            f"Slots asked for by all roles (run option `slots`): {slots}; {machine} has {total}: its CPUs, or {_SLOTS}"
        )
    return ""


def _count_slots(environ: Mapping[str, str]) -> int:
    return int(environ.get(_SLOTS) or len(os.sched_getaffinity(0)))


class MachineQueue:
    """The place of one job in the queue, from its supervisor's side."""

    def __init__(self, ticket: Ticket, submitted: float) -> None:
        self.ticket = ticket
        self._devices = gpus.devices(os.environ) if ticket.gpus else []
        self._folder = os.path.join(state_files.make_folder("queue"), os.uname().nodename)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        name = f"{submitted:017.6f}-{ticket.app_id}-{os.getpid()}"
        self._path, hidden = os.path.join(self._folder, name), os.path.join(self._folder, f".{name}")
        self._file = safe_files.open_file(hidden, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._write()
        os.rename(hidden, self._path)  # other jobs remove a ticket that they see and that is not locked

    def take(self) -> str:
        """Take what the job asks for if its turn has come; return what it waits for, empty if it has it."""
        try:
            return self._take()
        except TimeoutError as error:
            return f"waits for {self.ticket.what}: {error}"

    def _take(self) -> str:
        busy = set[str]()
        if self.ticket.gpus:
            with self._exclusive():
                if reason := self._choose(busy):
                    return reason
            try:
                busy = _busy_elsewhere()  # not under the lock: it may take long
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                said = one_line((getattr(error, "stderr", None) or str(error)).strip())
                return f"waits for {self.ticket.what} until nvidia-smi says which are free: {said}"
        with self._exclusive():
            if not (reason := self._choose(busy)):
                self.ticket.holds = True
                self._write()
        return reason

    def _choose(self, busy: Collection[str]) -> str:
        """Choose devices that are neither another job's nor busy; return what the job waits for if it must wait."""
        earlier, others = self._others()
        if waiting := [ticket for ticket in earlier if not ticket.holds]:
            return f"waits for {self.ticket.what} behind {waiting[0].app_id}, which waits for {waiting[0].what}"
        holders = [ticket for ticket in others if ticket.holds]
        taken = {device for ticket in holders for device in ticket.devices}
        unheld = [device for device in self._devices if device not in taken]
        usable = [device for device in unheld if device not in busy]
        self.ticket.devices = tuple(usable[: self.ticket.gpus])
        held = sum(ticket.slots for ticket in holders)  # more than there are where MONARCH_SLOTS differs between shells
        free = len(usable) if self.ticket.gpus else max(0, _count_slots(os.environ) - held)
        if free >= self.ticket.gpus + self.ticket.slots:
            return ""
        reasons = [f"{ticket.app_id} has {','.join(ticket.devices) or ticket.what}" for ticket in holders]
        if foreign := [device for device in unheld if device in busy]:
            reasons.append(f"other processes use {','.join(foreign)}")
        waits = f"waits for {self.ticket.what}, {free} {'is' if free == 1 else 'are'} free"
        return f"{waits}: {'; '.join(reasons)}" if reasons else waits

    def close(self) -> None:
        """Leave the queue, and give back what the job has."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._file)

    def _write(self) -> None:
        data = json.dumps(asdict(self.ticket)).encode()
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        lock = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + _LOCK_TIMEOUT
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(_describe_holder(lock)) from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(lock)

    def _others(self) -> tuple[list[Ticket], list[Ticket]]:
        """Return the tickets of earlier jobs, and of all other jobs; remove those whose supervisor has ended."""
        earlier, others = list[Ticket](), list[Ticket]()
        for name in sorted(name for name in os.listdir(self._folder) if not name.startswith(".")):
            path = os.path.join(self._folder, name)
            if path != self._path and (ticket := _read(path)) is not None:
                others.append(ticket)
                if path < self._path:
                    earlier.append(ticket)
        return earlier, others


def _read(path: str) -> Ticket | None:
    """Return the ticket in a file; None if its text is damaged, or nobody holds it, which removes it."""
    try:
        file = safe_files.open_file(path, os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(ValueError, RecursionError):  # the latter for text that nests deeply
            return codec.decode(Ticket, json.loads(os.pread(file, 1 << 16, 0)))
        return None
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    finally:
        os.close(file)


def _describe_holder(lock: int) -> str:
    """Describe the process that holds the lock of an open file, by the kernel's table of locks."""
    opened = os.fstat(lock)
    file = f"{os.major(opened.st_dev):02x}:{os.minor(opened.st_dev):02x}:{opened.st_ino}"
    with open("/proc/locks") as table:
        holders = [int(fields[4]) for line in table if file in (fields := line.split()) and fields[1] == "FLOCK"]
    if not holders:  # it has just let go, or runs in another PID namespace or on another machine
        return "another process holds the lock of the queue"
    state = process_status.status(holders[0])
    stopped = f", which is stopped: kill -CONT {holders[0]}" if state is not None and state.state in "Tt" else ""
    return f"process {holders[0]} holds the lock of the queue{stopped}"


def _busy_elsewhere() -> set[str]:
    """Return the GPUs, by index and by UUID, on which the driver sees processes."""

    def ask(what: str) -> list[list[str]]:
        command = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, check=True, text=True, timeout=30).stdout.splitlines()
        return [[field.strip() for field in line.split(",")] for line in lines]

    try:
        used = {uuid for uuid, *_ in ask("compute-apps=gpu_uuid,pid")}
    except FileNotFoundError:  # CUDA_VISIBLE_DEVICES names devices on a machine without the tool
        return set()
    return used | {index for index, uuid in ask("gpu=index,uuid") if uuid in used} if used else used
