# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Doing harm to a running job: to which process, and when."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.soak.plans import Blow
from torchx_monarch import processes
from torchx_monarch.backends.local import state, store
from torchx_monarch.backends.local.scheduler import DetachedScheduler

_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Hit:
    """What was really done.

    Attributes:
        blow: what was to be done.
        at: seconds from the submission.
        pid: the process, 0 for none.
        replica: of a host, or of the host that an agent or a rank belongs to; -1 where that has no meaning.
    """

    blow: Blow
    at: float
    pid: int = 0
    replica: int = -1


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


def targets(paths: store.AppPaths, job: str, kind: str) -> list[int]:
    """The living processes of one kind, in the order of their start."""
    who = state.watched_by(paths)
    if who is None:
        return []
    watchers = {"keeper": who.keeper.pid, "supervisor": who.supervisor.pid}
    if kind in watchers:
        return [watchers[kind]] if processes.identity(watchers[kind]) else []

    def is_one(words: list[str]) -> bool:
        if kind == "host":
            return _is_host(words)
        if kind == "child":
            return words[:1] == ["sleep"]
        return any(word.endswith({"agent": "bootstrap_main", "rank": "rank_main.py"}[kind]) for word in words)

    return sorted(pid for pid in processes.marked(job) if is_one(_words(pid)))


def strike(blow: Blow, scheduler: DetachedScheduler, app_id: str, began: float) -> Hit | None:
    """Wait for the moment and for the target, and do what it says; None when the job ended before.

    Args:
        began: when the job was submitted, by ``time.monotonic``.
    """
    paths = store.app_paths(app_id)
    if blow.fault == "none" or _has_ended(scheduler, app_id, max(0.0, began + blow.moment - time.monotonic())):
        return None
    if blow.fault == "cancel":
        scheduler.cancel(app_id)
        return Hit(blow, time.monotonic() - began)
    if blow.fault == "folder":
        hit = Hit(blow, time.monotonic() - began)
        shutil.rmtree(paths.root, ignore_errors=True)
        shutil.rmtree(paths.root, ignore_errors=True)  # what was written meanwhile
        return hit
    request = store.read_json(paths.request) or {}
    while not _has_ended(scheduler, app_id, 0.0):
        if blow.fault == "log":
            if logs := sorted(Path(paths.logs).rglob("attempt_*/*/std*.log")):
                logs[int(blow.which * len(logs))].unlink(missing_ok=True)
                return Hit(blow, time.monotonic() - began)
        elif found := targets(paths, request["job"], blow.target):
            pid = found[int(blow.which * len(found))]
            replica = _replica(pid)
            try:
                os.kill(pid, _SIGNALS[blow.fault])
            except ProcessLookupError:
                continue
            hit = Hit(blow, time.monotonic() - began, pid, replica)
            if blow.fault == "stop":
                _has_ended(scheduler, app_id, blow.pause)
                _continue(pid)
            return hit
        time.sleep(0.01)
    return None


def _has_ended(scheduler: DetachedScheduler, app_id: str, timeout: float) -> bool:
    return scheduler.wait_terminal(app_id, timeout)


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return
