# SPDX-License-Identifier: BSD-3-Clause
"""Read what is known of a job: its scheduler's answer, its events, its hosts and its ranks.

``status``, ``top`` and ``report`` show parts of the same ``JobFacts``.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from torchx_monarch.backends.core.errors import BackendError, UserError
from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.backends.core.state import AppStatus
from torchx_monarch.cli.arguments import unknown
from torchx_monarch.client.connection import Target, ask
from torchx_monarch.client.hosts import Hosts, say
from torchx_monarch.client.rank_queries import SAMPLES_TIMEOUT, ask_events, ask_samples
from torchx_monarch.exceptions import AllocationError, RefusedError, UnreachableError
from torchx_monarch.insight.events import Event
from torchx_monarch.insight.progress import SIGN_OF_LIFE_EVERY
from torchx_monarch.insight.rank_sample import NO_SAMPLES, RankSamples, RankView, rank_views
from torchx_monarch.insight.timeline import Moment, Timeline
from torchx_monarch.model.codec import decode
from torchx_monarch.model.role_spec import WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers import job_status
from torchx_monarch.schedulers.job_metrics import AttemptMetrics, read_metrics, trends
from torchx_monarch.schedulers.job_status import JobStatus, LiveState
from torchx_monarch.schedulers.monarch import MonarchScheduler, opened

_AT_A_TIME = 16
"""Roles whose replicas 0 are asked at the same time."""

PATIENCE = 3.0
"""Seconds to wait for the connection to replica 0 of a live allocation, and again for its answer."""

SAMPLE_PAUSE_S = 1.0
"""Seconds between the two first samples of ranks, of which rates follow."""

_SILENT_AFTER = 4 * SIGN_OF_LIFE_EVERY
"""Seconds without a sign of life after which it is said that a host does not answer."""

NO_ANSWER = (UnreachableError, RefusedError, BackendError)
"""What is raised if replica 0, or the scheduler that is asked where it is, does not answer."""


@dataclass(frozen=True)
class JobFacts:
    """What is known of a job at one moment.

    Attributes:
        metrics: what the first rank of each attempt has reported over time.
        missing: why a host has not said what its ranks do, by replica.
        problem: why none has; empty if they have, or were not asked.
    """

    app: AppSnapshot
    status: JobStatus
    timeline: Timeline
    metrics: Sequence[AttemptMetrics] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass
class JobReader:
    """Read what is known of one job, once or again and again.

    Attributes:
        role: the role whose ranks are asked; empty for the first role that has some.
        timeout: seconds to wait for samples of the ranks.
        hosts: those whose ranks were asked last; None before that.
    """

    scheduler: MonarchScheduler
    handle: str
    app_id: str
    role: str
    address: str
    timeout: float
    hosts: Hosts | None = None
    _samples: RankSamples = NO_SAMPLES
    _before: RankSamples = NO_SAMPLES

    def read_app(self) -> tuple[AppSnapshot, AppStatus]:
        """Return the snapshot and the state of the app; raise CommandError or UserError without app or role."""
        found = self.scheduler.apps.read(self.app_id)
        if found is None:
            raise unknown(self.handle)
        check_roles(self.handle, found[0], [self.role] if self.role else ())
        return found

    def read(self, sample_pause: float | None = None) -> JobFacts:
        """Return what is known now; raise as ``read_app`` does.

        Args:
            sample_pause: seconds between the first two samples of the ranks of a job that runs; 0 for one sample, which
                tells no rates; None to take none.
        """
        app, decided = self.read_app()
        is_running, now = decided.state is State.RUNNING, time.time()
        if is_running and not app.events:
            app = replace(app, events=self._ask_events(app))
        timeline, live = job_status.timeline_of(app, decided, now), self._ask_live(app) if is_running else None
        status = job_status.build(self.handle, app, decided, now=now, timeline=timeline, live=live)
        if metrics := read_metrics(status.log_folder, timeline):
            status = replace(status, step=metrics[-1].points[-1].step, metrics=trends(metrics))
        facts = JobFacts(app, status, timeline, metrics)
        return facts if sample_pause is None or not is_running else self._with_ranks(facts, sample_pause)

    def say_problem(self, facts: JobFacts) -> JobFacts:
        """Say if nothing answers at the address of the user; return the facts."""
        if self.address and facts.problem:
            say(facts.problem)
        return facts

    def watch(self, interval: float, sample_pause: float) -> Iterator[JobFacts]:
        """Yield what is known again and again, until the job has ended."""
        while True:
            yield (facts := self.read(sample_pause))
            if facts.status.has_ended:
                return
            time.sleep(max(interval, self.scheduler.inner.poll))

    def _with_ranks(self, facts: JobFacts, pause: float) -> JobFacts:
        """Return the facts with what the ranks do, and with when one of them has printed something last."""
        if not (role := self._asked_role(facts.app)) or facts.status.phase == "queued":
            return facts
        try:
            if self.hosts is None or self.hosts.handle != self.handle:  # hosts of an allocation may have another run
                self.hosts = Hosts.of_ranks(self.handle, role, self.address)
            activity, missing = self._ask_ranks(self.hosts, pause)
        except AllocationError as error:
            return replace(facts, problem=str(error))
        except NO_ANSWER as error:
            return replace(facts, problem=str(error), status=replace(facts.status, silent=_silent(facts, role)))
        last = max((rank.last_output for rank in activity if rank.last_output is not None), default=None)
        account = job_status.account_of(facts.app, facts.timeline, activity)
        status = replace(facts.status, activity=activity or None, last_output=last, account=account)
        return replace(facts, status=status, missing=missing)

    def _ask_ranks(self, hosts: Hosts, pause: float) -> tuple[list[RankView], dict[str, str]]:
        """Return what each rank does, with rates since the time before, and why a host has not answered."""
        if pause and not self._samples.ranks:
            self._samples = ask_samples(hosts, self.timeout)[0]
            time.sleep(pause if self._samples.ranks else 0)
        samples, missing = ask_samples(hosts, self.timeout)
        if samples.ranks and samples != self._samples:  # equal within a second: replica 0 answers the same
            self._before, self._samples = self._samples, samples
        return rank_views(samples, self._before), missing

    def _ask_events(self, app: AppSnapshot) -> list[Event]:
        """Return the events that replica 0 of each role has; none of a role whose replica 0 cannot be reached."""

        def ask_role(name: str) -> list[Event]:
            with contextlib.suppress(*NO_ANSWER):
                return ask_events(self._target(app, name), PATIENCE)
            return []

        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            names = [role.spec.name for role in app.roles if role.spec.runs_hosts]
            return [*itertools.chain(*pool.map(ask_role, names))]

    def _target(self, app: AppSnapshot, role: str) -> Target:
        """Return where replica 0 of a role is: at the address of the user if it is the role whose ranks are asked."""
        return Target.from_handle(self.handle, role, self.address if role == self._asked_role(app) else "")

    def _asked_role(self, app: AppSnapshot) -> str:
        with_hosts = [role.spec for role in app.roles if role.spec.runs_hosts or role.spec.allocation]
        first = max(with_hosts, key=lambda spec: spec.runs_ranks).name if with_hosts else ""
        return self.role or first

    def _ask_live(self, app: AppSnapshot) -> LiveState | None:
        """Ask the hosts of a live allocation; return None for another job, and if they do not answer."""
        role = next((role.spec.name for role in app.roles if role.spec.workload is WorkloadKind.ALLOCATION), None)
        if role is not None:
            with contextlib.suppress(*NO_ANSWER):
                target = self._target(app, role)
                answer = ask(target, {"type": "state"}, PATIENCE)
                if (live := answer.get("live")) is not None:
                    runs = ask(target, {"type": "runs"}, PATIENCE)["runs"]
                    return decode(LiveState, {**live, "hosts": len(answer["hosts"]), "last_runs": runs[-10:]})
        return None


def check_roles(handle: str, app: AppSnapshot, names: Iterable[str]) -> None:
    """Raise UserError, which lists the roles of an app, if it has no role of one of these names."""
    known = [role.spec.name for role in app.roles]
    if unknown_names := [name for name in names if name not in known]:
        raise UserError(f"{handle} has no role {unknown_names[0]!r}; its roles are {', '.join(known)}")


def _silent(facts: JobFacts, role: str) -> Moment | None:
    """Return when replica 0 of a role, which has not answered, showed its last sign of life; None if unknown."""
    first = next((replica for replica in facts.app.replicas if (replica.role, replica.id) == (role, 0)), None)
    last = facts.app.last_sign_of_life
    if first is None or first.state is not State.RUNNING or not 0 < last < time.time() - _SILENT_AFTER:
        return None
    since = time.strftime("%H:%M:%S" if time.time() < last + 43200 else "%Y-%m-%d %H:%M:%S", time.localtime(last))
    return Moment(last, "silent", f"host 0 does not answer; its last sign of life was at {since}")


@contextlib.contextmanager
def opened_job(handle: str, role: str = "", address: str = "", timeout: float = SAMPLES_TIMEOUT) -> Iterator[JobReader]:
    """Open the scheduler of a job and close its connections afterwards; raise as ``opened`` does."""
    from torchx.specs import parse_app_handle

    scheduler_name, _, app_id = parse_app_handle(handle)
    with opened(str(scheduler_name)) as scheduler:
        yield JobReader(scheduler, handle, str(app_id), role, address, timeout)
