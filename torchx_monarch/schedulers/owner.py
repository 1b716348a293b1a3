# SPDX-License-Identifier: BSD-3-Clause
"""The owner of an app on a system that ends nothing by itself: ``python -m torchx_monarch.schedulers.owner SCHEDULER``.

Docker, Kubernetes and ssh run each replica for itself. Hosts end together, but a container without a host process, such
as a sidecar, neither learns that the app is decided nor may it end another one. So a process of the submitting machine
does what a supervisor does elsewhere: it reads the app as every reader does, and once the outcome is decided stops what
does not end by itself. It has no other task, outlives the submitter, and ends with the app.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# `python -m` puts the working folder first in sys.path: a `docker.py` of the user's must not shadow the client library.
if __name__ == "__main__" and sys.path[0] == os.getcwd() and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.apps import Apps
from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.core.state import SETTLE, pending_stop
from torchx_monarch.model.env_names import JOB_VARIABLES
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.system import safe_files

_log = logging.getLogger("torchx_monarch")

_MIN_INTERVAL, _POLLS = 2.0, 5.0
"""Seconds between two reads, at least; and in units of ``Backend.poll``: an owner may live for days."""

_SILENCE = 86400.0
"""Seconds without an answer of the system after which the owner ends: it may be gone for good."""


def needs_owner(roles: Sequence[RoleSpec]) -> bool:
    """Return whether replicas of an app may run on after its outcome is decided.

    The hosts of ranks end each other, unless lost ones are replaced. Those of several roles, and of commands, do not
    where one has failed before another one has started.
    """

    def ends_itself(role: RoleSpec) -> bool:
        is_replaced = role.restarts_alone and role.max_retries > 0
        return role.replicas == 1 or (role.runs_ranks and not is_replaced)

    return len(roles) > 1 or not all(map(ends_itself, roles))


@contextlib.contextmanager
def starting(scheduler: str) -> Iterator[Callable[[str], None]]:
    """Start an owner before its app is submitted; yield the function that tells it the app's id, without which it ends.

    It imports what it needs while the app is submitted.
    """
    try:
        errors = safe_files.open_log(os.path.join(state_files.make_folder(), "owner.log"))
    except OSError:  # the owner works without
        errors = os.open(os.devnull, os.O_WRONLY)
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, scheduler],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env={name: value for name, value in os.environ.items() if name not in JOB_VARIABLES},
        start_new_session=True,
    )
    os.close(errors)

    def send_id(app_id: str) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(f"{app_id}\n".encode())
            process.stdin.flush()
        except OSError:
            folder, reason = state_files.state_dir(), "what does not end by itself runs until `torchx cancel`"
            _log.warning("The job runs, but its owner has not started (see owner.log in %s): %s", folder, reason)

    with process:  # it leaves the owner behind, and ends (``main``)
        yield send_id


def own(apps: Apps[Any], app_id: str) -> None:
    """Wait for the end of an app; stop what runs on ``SETTLE`` seconds after its outcome was decided."""
    interval = max(_MIN_INTERVAL, _POLLS * apps.backend.poll)
    decided, answered, last_error = 0.0, time.monotonic(), ""
    while time.monotonic() < answered + _SILENCE:
        try:
            found = apps.read(app_id, brief=True)
            answered = now = time.monotonic()
            if found is None or found[1].state.is_terminal:
                return
            outcome = pending_stop(found[0])
            decided = (decided or now) if outcome is not None else 0.0
            if outcome is not None and now >= decided + SETTLE:
                apps.backend.stop(found[0], outcome, None)
        except BackendError as error:
            if str(error) != last_error:
                last_error = str(error)
                print(f"{time.strftime('%F %T')} {app_id}: {last_error}", file=sys.stderr, flush=True)
            apps.backend.close()  # the next read connects again
        time.sleep(interval)


def main(scheduler: str) -> None:
    """Own the app whose id the first line of stdin has. The process that was started ends at once."""
    if os.fork():
        os._exit(0)
    from torchx_monarch.schedulers.monarch import scheduler_of

    apps = scheduler_of(scheduler).apps
    if app_id := sys.stdin.readline().strip():
        own(apps, app_id)


if __name__ == "__main__":
    main(sys.argv[1])
