# SPDX-License-Identifier: BSD-3-Clause
"""Injecting faults into a running job: into which process, and when."""

from __future__ import annotations

import re
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.soak.jobs import Job
from tests.soak.plans import Fault
from torchx_monarch.backends.local import folder
from torchx_monarch.system import processes

_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP, "freeze": signal.SIGSTOP}

#: What is in the command line of a process of each kind; of zygotes, those that ranks are forks of.
_MARKS = {
    "rank": r"^\S+ -u (?!\S+/zygote_main\.py )",
    "zygote": r"torchx-monarch zygote \w",
}
#: Seconds between two looks at the events of a job, and at its processes.
_LOOK_EVERY = 0.005
#: Seconds that a further fault's moment is waited for in a job that may hang: it may never come.
_HANGS_FOR = 4.0
#: Seconds that ranks work in a job that ends by itself, at the very most.
MAX_WORK = 2.0


@dataclass(frozen=True)
class Injection:
    """What was really done.

    Attributes:
        fault: what was to be done.
        at: seconds from the submission.
        pid: the process, 0 for none.
        replica: of a host, or of the host that a rank belongs to; -1 where that has no meaning.
        start: the start time of the process, in clock ticks since boot.
    """

    fault: Fault
    at: float
    pid: int = 0
    replica: int = -1
    start: int = 0

    @property
    def process_state(self) -> str:
        """The state of the process as /proc tells it; empty once it has ended."""
        found = processes.process(self.pid)
        return found.state if found is not None and found.start == self.start and found.state not in "ZX" else ""


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _is_host(words: list[str]) -> bool:
    return "torchx_monarch.host" in words and "--replica" in words


def _replica(pid: int) -> int:
    """Which replica's host a process is or descends from; -1 for none."""
    while pid > 1:
        words = _words(pid)
        if _is_host(words):
            return int(words[words.index("--replica") + 1])
        found = processes.process(pid)
        pid = found.parent if found is not None else 0
    return -1


def targets(job: Job, kind: str) -> list[int]:
    """The living processes of one kind, in the order of their pids."""
    if kind == "submitter":
        return [job.submitter.pid] if job.submitter is not None and job.submitter.poll() is None else []
    who = folder.load_owner(job.paths) if job.app_id else None
    if who is None:
        return []
    if kind == "supervisor":
        return [who.supervisor.pid] if processes.identity(who.supervisor.pid) else []

    def is_one(words: list[str]) -> bool:
        if kind == "host":
            return _is_host(words)
        if kind == "child":
            return words[:1] == ["sleep"]
        return re.search(_MARKS[kind], " ".join(words)) is not None

    found = [pid for pid in job.processes() if is_one(_words(pid))]
    if kind == "zygote":  # the first of each host: its forks have its command line until their programs begin
        found = sorted({_replica(pid): pid for pid in reversed(found)}.values())
    return found


class Injector:
    """Injects the faults of one job, each when its moment has come."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._continuing: list[threading.Timer] = []
        self._hangs_until = float("inf")

    def inject(self, faults: Sequence[Fault]) -> list[Injection]:
        """Inject them; returns those that the job did not end before.

        A fault whose moment is ``with`` the one before it waits for that, and no other does.
        """
        done = [threading.Event() for _ in faults]

        def inject_in_order(index: int) -> Injection | None:
            try:
                if faults[index].moment.phase == "with":
                    done[index - 1].wait()
                return self._inject(faults[index])
            finally:
                done[index].set()

        with ThreadPoolExecutor(len(faults)) as pool:
            results = list(pool.map(inject_in_order, range(len(faults))))
        for timer in self._continuing:
            timer.join()
        return [injection for injection in results if injection is not None]

    def _inject(self, fault: Fault) -> Injection | None:
        events = set(fault.moment.events)
        while events and not events & self._job.seen():
            if self._is_over():
                return None
            time.sleep(_LOOK_EVERY)
        if fault.action == "none" or self._job.wait(fault.moment.delay):
            return None
        while not self._is_over():
            if (injection := self._try(fault)) is not None:
                return injection
            if fault.target == "submitter":
                break  # there is one only, from the beginning on
            time.sleep(_LOOK_EVERY)
        return None

    def _is_over(self) -> bool:
        """Whether the job has ended, or hangs."""
        return self._job.wait(0.0) or time.monotonic() > self._hangs_until

    def _try(self, fault: Fault) -> Injection | None:
        """Do what a fault says; None when there is nothing yet that it could be done to."""
        job = self._job

        def now(pid: int = 0, replica: int = -1, start: int = 0) -> Injection:
            return Injection(fault, time.monotonic() - job.began, pid, replica, start)

        if fault.target:
            if not (found := targets(job, fault.target)):
                return None
            pid = found[int(fault.which * len(found))]
            who, replica = processes.identity(pid), _replica(pid)
            if who is None or not processes.send(who, _SIGNALS[fault.action]):
                return None
            if fault.hangs or (fault.what == "freeze submitter" and not job.app_id):
                self._hangs_until = time.monotonic() + min(job.plan.seconds, MAX_WORK) + _HANGS_FOR
            if fault.action == "stop":
                timer = threading.Timer(fault.pause, processes.send, (who, signal.SIGCONT))
                self._continuing.append(timer)
                timer.start()
            return now(pid, replica, who.start)
        if not job.app_id:
            return None
        if fault.action == "cancel":
            job.scheduler.cancel(job.app_id)
        else:
            job.note_run_dir()
            shutil.rmtree(job.paths.root, ignore_errors=True)
            shutil.rmtree(job.paths.root, ignore_errors=True)  # what was written meanwhile
        return now()
