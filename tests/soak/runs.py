# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Running the jobs of a soak, some at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from torchx.runner import Runner
from torchx.specs import AppState
from torchx.specs.api import UnknownAppException

from tests.soak import faults, truth
from tests.soak.plans import ROLE, Plan
from torchx_monarch.backends.local import store
from torchx_monarch.schedulers import monarch_local

#: Seconds from the fault to the end of the job, at the very most.
BOUND = 60.0
#: Seconds from SIGTERM to SIGKILL.
GRACE = 3
#: Seconds that the keeper has to leave after the final status, and everything else before.
LEFT_WITHIN = 20.0
#: Seconds in which a job whose folder was removed must be gone.
REMOVED_WITHIN = 60.0


@dataclass
class Outcome:
    """How one job went.

    Attributes:
        state: its final one; None when it has none.
        seconds: from its submission to its end.
        wrong: what is not as it should be.
        kept: where everything about it lies, when something is wrong.
    """

    plan: Plan
    app_id: str = ""
    hits: list[faults.Hit] = field(default_factory=list)
    state: AppState | None = None
    message: str = ""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    kept: str = ""

    def __str__(self) -> str:
        when = ", ".join(f"{hit.at:.2f}" for hit in self.hits) or "missed"
        state = self.state.name if self.state else "gone"
        words = (
            f"{self.plan.number:4d} {self.plan.what:29} {when:10} {self.plan.shape:38} {state:9} {self.seconds:5.1f} s"
        )
        return f"{words}  {self.message}" if not self.wrong else f"{words}  WRONG: {'; '.join(self.wrong)}"


class _Followers:
    """Read the logs of all replicas of an app while it runs.

    Attributes:
        wrong: what has kept them from it.
    """

    def __init__(self, plan: Plan, runner: Runner, handle: str) -> None:
        self.wrong: list[str] = []
        self._is_removed = plan.is_removed
        self._texts: list[str | None] = [None] * plan.hosts
        self._threads = [
            threading.Thread(target=self._follow, args=(runner, handle, k), daemon=True)
            for k in range(plan.hosts if plan.follow else 0)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, runner: Runner, handle: str, k: int) -> None:
        try:
            self._texts[k] = "".join(runner.log_lines(handle, ROLE, k, should_tail=True))
        except (ValueError, UnknownAppException) as error:
            # An app whose folder is removed before this thread looks for it is unknown: of that the soak is the cause.
            if not self._is_removed:
                self.wrong.append(f"the log of replica {k} cannot be followed: {error}")

    def texts(self) -> list[str | None]:
        """What they have read, None for those who have not come to the end."""
        for thread in self._threads:
            thread.join(60)
        return self._texts[: len(self._threads)]


def run(plan: Plan) -> Outcome:
    """Submit one job, do what is to be done to it, and look at its end."""
    outcome = Outcome(plan)
    try:
        _run(outcome)
    except Exception:
        outcome.wrong.append(traceback.format_exc())
    return outcome


def _run(outcome: Outcome) -> None:
    plan = outcome.plan
    folder = Path(tempfile.mkdtemp(prefix="soak"))
    with Runner("torchx", {"monarch_local": monarch_local}) as runner:
        scheduler = runner._scheduler("monarch_local").inner
        began = time.monotonic()
        cfg = {"grace": GRACE, "preload": "torch" if plan.torch else "none"}
        handle = runner.run(plan.app(folder), "monarch_local", cfg=cfg)
        outcome.app_id = app_id = handle.rpartition("/")[2]
        paths = store.app_paths(app_id)
        request = store.read_json(paths.request)
        assert request is not None
        followers = _Followers(plan, runner, handle)
        for blow in plan.blows:
            if hit := faults.strike(blow, scheduler, app_id, began):
                outcome.hits.append(hit)
        ended = scheduler.wait_terminal(app_id, BOUND)
        outcome.seconds = time.monotonic() - began
        if not ended:
            outcome.wrong.append(f"it has not ended {BOUND:g} s after the fault: {scheduler.describe(app_id)}")
            scheduler.stop(app_id, 0)
            scheduler.wait_terminal(app_id, 10)
        status = runner.status(handle)
        if status is None:
            if not plan.is_removed:
                outcome.wrong.append("it is unknown")
        else:
            outcome.state, outcome.message = status.state, "" if status.msg == "<NONE>" else status.msg
            if ended:
                outcome.wrong += truth.of_the_end(plan, outcome.hits, status.state, outcome.message, folder)
            outcome.wrong += truth.of_the_record(plan, scheduler, app_id, status.state)
            outcome.wrong += truth.of_followers(plan, scheduler, app_id, followers.texts())
        within = REMOVED_WITHIN if plan.is_removed and outcome.hits else LEFT_WITHIN
        outcome.wrong += truth.of_leftovers(request["job"], request["run_dir"], within)
        if status is None and os.path.exists(paths.root):
            outcome.wrong.append(f"it is unknown, and its folder is still there: {sorted(os.listdir(paths.root))}")
        outcome.ports = truth.ports(folder)
        outcome.wrong += followers.wrong
        if outcome.wrong:
            outcome.kept = paths.root
        elif status is not None:
            scheduler.delete(app_id)
            if scheduler.exists(app_id) or os.path.exists(paths.root):
                outcome.wrong.append(f"it was deleted, and is still there: {paths.root}")
    if outcome.kept:
        shutil.copytree(folder, os.path.join(outcome.kept, "proofs"), dirs_exist_ok=True)
    shutil.rmtree(folder)


def run_all(plans: Sequence[Plan], parallel: int, tell: Callable[[Outcome], None]) -> list[str]:
    """Run all, ``parallel`` at a time.

    Args:
        tell: called with each outcome.

    Returns:
        What is wrong with none of them in particular: ports that are listened on, descriptors that are still open.
    """
    ports: set[int] = set()
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(parallel) as pool:
        for done in as_completed([pool.submit(run, plan) for plan in plans]):
            outcome = done.result()
            ports |= outcome.ports
            tell(outcome)
    wrong = [f"port {port} of a job that has ended is listened on" for port in sorted(truth.listening(ports))]
    # TorchX and Python keep a few open from the first job on.
    if (grown := len(os.listdir("/proc/self/fd")) - before) > 5 + parallel:
        wrong.append(f"{grown} more descriptors are open than before")
    return wrong
