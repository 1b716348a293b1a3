# SPDX-License-Identifier: BSD-3-Clause
"""The user's jobs as the batch system has listed them last: one list for all apps that a process watches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torchx_monarch.backends.batch.folder import JobFolder
from torchx_monarch.backends.batch.snapshot import BatchSnapshot, QueuedJob
from torchx_monarch.model.state import State

_MIN_INTERVAL = 2.0
_MAX_INTERVAL = 60.0
"""Seconds between two lists, which double while nothing changes: administrators of clusters ask for that."""


class _LastRead(NamedTuple):
    """How an app was read last.

    Attributes:
        folder: its folder.
        list_time: when the list was made with which it was read.
        files: what its files said.
        states: the states of its replicas, and whether they are stuck.
    """

    folder: JobFolder
    list_time: float
    files: object
    states: list[tuple[State, bool]]


class JobList:
    """The latest list, which counts for an app while it is young and the app's files are as they were then.

    Beside files that are newer, a list would say that a job waits whose task has begun.

    Args:
        list_jobs: has the batch system list the jobs of apps, by the ids of these.
    """

    def __init__(self, list_jobs: Callable[[Mapping[str, JobFolder]], Mapping[str, QueuedJob]]) -> None:
        self._list_jobs = list_jobs
        self._lock = threading.Lock()
        self._jobs: Mapping[str, QueuedJob] = {}
        self._list_time = self._interval = 0.0
        self._apps: dict[str, _LastRead] = {}

    def has_news(self, app_id: str, folder: JobFolder) -> bool:
        """Return whether an app is to be read: with a list that it was not read with yet, or as it has ended."""
        last = self._apps.get(app_id)
        if last is None or last.list_time != self._list_time or self._is_due(folder):
            return True
        return all(state.is_terminal for state, _ in last.states)

    def _is_due(self, folder: JobFolder) -> bool:
        interval = self._interval if folder.load_ending() is None else _MIN_INTERVAL
        return time.monotonic() >= self._list_time + interval

    def read(
        self, app_id: str, folder: JobFolder, read: Callable[[Mapping[str, QueuedJob]], BatchSnapshot | None]
    ) -> BatchSnapshot | None:
        """Return what ``read`` makes of the list and of an app's files, which it reads now."""
        with self._lock:
            before = self._apps.get(app_id)
            app = None if before is None or self._is_due(folder) else read(self._jobs)
            if app is None or before is None or app.files != before.files:
                folders = {known: last.folder for known, last in self._apps.items()}
                self._jobs, self._list_time = self._list_jobs({**folders, app_id: folder}), time.monotonic()
                self._interval = min(_MAX_INTERVAL, 2 * self._interval)
                app = read(self._jobs)
            if app is None:
                self.forget(app_id)
                return None
            states = [(replica.state, replica.is_stuck) for replica in app.replicas]
            if before is None or (app.files, states) != (before.files, before.states):
                self._interval = _MIN_INTERVAL
            self._apps[app_id] = _LastRead(folder, self._list_time, app.files, states)
            return app

    def forget(self, app_id: str) -> None:
        """List the jobs of an app no more, which has ended."""
        self._apps.pop(app_id, None)
