# SPDX-License-Identifier: BSD-3-Clause
"""Running the jobs of a soak, some at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from torchx.specs import AppState

from tests.soak import expectations, faults
from tests.soak.jobs import Job
from tests.soak.plans import ROLE, Plan
from torchx_monarch.backends.core import state_files

#: Seconds from the faults to the end of the job, at the very most. An app whose submitter was killed before it had
#: started a supervisor is given up after 60 s.
BOUND = 90.0
#: Seconds that a job which may hang has to end by itself while the frozen process lives; it is cancelled then.
HANGS_FOR = 6.0
#: The same for a job that another fault may still end, which takes a lease at most.
HANGS_WITH_ANOTHER_FOR = 25.0
#: How often a fault is drawn that must have been injected once, at least.
_OFTEN = 3
#: Seconds that the supervisor has to leave after the final status, and everything else before.
LEFT_WITHIN = 20.0
#: Seconds in which a job whose folder was removed must be gone.
REMOVED_WITHIN = 60.0


@dataclass
class Outcome:
    """How one job went.

    Attributes:
        state: its final one; None when it has none.
        seconds: from its submission to its end.
        rescued: whether it hung and was cancelled.
        wrong: what is not as it should be.
        kept: where everything about it lies, when something is wrong.
    """

    plan: Plan
    app_id: str = ""
    injections: list[faults.Injection] = field(default_factory=list)
    state: AppState | None = None
    message: str = ""
    seconds: float = 0.0
    rescued: bool = False
    wrong: list[str] = field(default_factory=list)
    kept: str = ""

    def __str__(self) -> str:
        when = (
            ", ".join(f"{injection.fault.moment.phase} {injection.at:.2f}" for injection in self.injections) or "none"
        )
        state = self.state.name if self.state else "gone"
        words = f"{self.plan.number:4d} {self.plan.what:33} {when:24} {self.plan.shape:44} {state:9}"
        words += f" {self.seconds:5.1f} s{' (hung)' * self.rescued}"
        return f"{words}  {self.message}" if not self.wrong else f"{words}  WRONG: {'; '.join(self.wrong)}"


class _Followers:
    """Read the logs of all replicas of an app while it runs."""

    def __init__(self, job: Job) -> None:
        self._texts: list[str | None] = [None] * job.plan.replicas
        self._threads = [
            threading.Thread(target=self._follow, args=(job, k), daemon=True)
            for k in range(job.plan.replicas if job.plan.follow else 0)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, job: Job, k: int) -> None:
        while not job.app_id:
            if job.wait(0.0):  # it was never submitted
                return
            time.sleep(0.02)
        lines = []
        try:
            for line in job.runner.log_lines(job.handle, ROLE, k, should_tail=True):
                lines.append(line)
        except Exception as error:
            lines.append(f"cannot be followed: {error!r}")  # as it should be when its folder is removed
        self._texts[k] = "".join(lines)

    def texts(self) -> list[str | None]:
        """What they have read, None for those who have not come to the end."""
        for thread in self._threads:
            thread.join(60)
        return self._texts[: len(self._threads)]


def run(plan: Plan, seed: int) -> Outcome:
    """Submit one job, inject its faults, and look at its end."""
    outcome = Outcome(plan)
    folder = Path(tempfile.mkdtemp(prefix="soak"))
    try:
        with Job(plan, folder, seed) as job:
            _run(job, outcome)
    except Exception:
        outcome.wrong.append(traceback.format_exc())
    if outcome.wrong and outcome.kept:
        shutil.copytree(folder, os.path.join(outcome.kept, "proofs"), dirs_exist_ok=True)
    shutil.rmtree(folder)
    return outcome


def _run(job: Job, outcome: Outcome) -> None:
    plan = outcome.plan
    followers = _Followers(job)
    outcome.injections += faults.Injector(job).inject(plan.faults)
    job.note_run_dir()
    ended = _await_end(job, outcome)
    outcome.seconds, outcome.app_id = time.monotonic() - job.began, job.app_id
    if not ended:
        outcome.wrong.append(f"it has not ended {BOUND:g} s after the fault: {job.scheduler.describe(job.app_id)}")
        job.scheduler.apps.cancel(job.app_id, 0)
        job.wait(10)
    job.note_run_dir()
    status, injections = job.runner.status(job.handle) if job.app_id else None, outcome.injections
    is_removed = any(injection.fault.deletes for injection in injections)
    if status is not None:
        outcome.state, outcome.message = status.state, "" if status.msg == "<NONE>" else status.msg
        if ended:
            outcome.wrong += expectations.of_the_end(job, injections, status.state, outcome.message, outcome.rescued)
        outcome.wrong += expectations.of_the_record(job, injections, status.state)
        outcome.wrong += expectations.of_the_logs(job, injections, followers.texts())
    elif job.app_id and not is_removed:
        outcome.wrong.append("it is unknown")
    if job.submitter is not None:
        outcome.wrong += expectations.of_the_submitter(job, injections, outcome.state)
    unwatched = any(injection.fault.what == "kill supervisor" for injection in injections)
    outcome.wrong += expectations.of_leftovers(job, REMOVED_WITHIN if is_removed else LEFT_WITHIN, unwatched)
    if status is None and job.app_id and os.path.exists(job.paths.root):
        outcome.wrong.append(f"it is unknown, and its folder is still there: {sorted(os.listdir(job.paths.root))}")
    if outcome.wrong:
        outcome.kept = job.paths.root if job.app_id else os.path.join(state_files.state_dir(), f"soak{plan.number}")
    elif status is not None:
        job.scheduler.delete(job.app_id)
        outcome.wrong += expectations.of_leftovers(job, 0.0)
        if job.scheduler.exists(job.app_id) or os.path.exists(job.paths.root):
            outcome.wrong.append(f"it was deleted, and is still there: {job.paths.root}")


def _await_end(job: Job, outcome: Outcome) -> bool:
    """Wait for the end; a job that hangs is cancelled. Whether it has ended."""
    plan, injections = outcome.plan, outcome.injections
    if any(injection.fault.what == "freeze submitter" for injection in injections):
        job.kill_submitter()  # of one that is frozen there is nothing more to wait for
    hanging = [injection for injection in injections if injection.fault.hangs]
    alone = all(injection.fault.hangs or injection.fault.harmless for injection in injections)
    until = time.monotonic() + min(plan.seconds, faults.MAX_WORK) + (HANGS_FOR if alone else HANGS_WITH_ANOTHER_FOR)
    if plan.awaits_end and not is_told(injections):
        outcome.rescued = not job.wait(until - time.monotonic())
    # A signal takes effect some time after it was sent.
    while not outcome.rescued and any(injection.process_state for injection in hanging) and not job.wait(0.1):
        if time.monotonic() > until:
            outcome.rescued = any(injection.process_state == "T" for injection in hanging)
            break
    if outcome.rescued:
        job.scheduler.cancel(job.app_id)
    return job.wait(BOUND)


def is_told(injections: Sequence[faults.Injection]) -> bool:
    """Whether a job was certainly told to end: a submitter that is gone at once may not have told it."""
    gone = any(injection.fault.what in ("kill submitter", "freeze submitter") for injection in injections)
    ends = [injection.fault for injection in injections if injection.fault.tells or injection.fault.deletes]
    return any(fault.target != "submitter" or not gone for fault in ends)


def never_injected(outcomes: Sequence[Outcome]) -> list[str]:
    """Which faults were drawn often and never injected."""
    drawn = Counter(fault.what for outcome in outcomes for fault in outcome.plan.faults if fault.action != "none")
    done = {injection.fault.what for outcome in outcomes for injection in outcome.injections}
    return [f"never injected: {what}" for what, often in sorted(drawn.items()) if often >= _OFTEN and what not in done]


def run_all(plans: Sequence[Plan], parallel: int, tell: Callable[[Outcome], None], seed: int) -> list[str]:
    """Run all, ``parallel`` at a time.

    Args:
        tell: called with each outcome.
        seed: from which the plans were drawn.

    Returns:
        What is wrong with none of them in particular: faults that were never injected, descriptors that are still open,
        folders in the state directory.
    """
    before = len(os.listdir("/proc/self/fd"))
    good, outcomes = True, []
    with ThreadPoolExecutor(parallel) as pool:
        for done in as_completed([pool.submit(run, plan, seed) for plan in plans]):
            outcome = done.result()
            good = good and not outcome.wrong
            outcomes.append(outcome)
            tell(outcome)
    wrong = never_injected(outcomes)
    # TorchX and Python keep a few open from the first job on.
    if (grown := len(os.listdir("/proc/self/fd")) - before) > 5 + parallel:
        wrong.append(f"{grown} more descriptors are open than before")
    if good:
        wrong += expectations.of_the_state_dir(any(plan.by_command for plan in plans))
    return wrong
