# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whether what a job says of its end is true, and whether it left nothing behind."""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from torchx.schedulers.api import Stream
from torchx.specs import AppState

from tests.soak import printed, program
from tests.soak.faults import Injection
from tests.soak.jobs import Job
from tests.soak.plans import ROLE, Plan
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.local import folder as app_folder
from torchx_monarch.insight import events
from torchx_monarch.system import processes

#: What is said of an app whose submitter was killed or frozen before it had started a supervisor.
_NEVER_STARTED = "it was never started: its submission was interrupted"


def finished(folder: Path) -> bool:
    """Whether every rank of one attempt has proved that it reached its end."""
    attempts: dict[tuple[str, int], set[int]] = defaultdict(set)
    for path in folder.glob("end-*[0-9]"):
        proof = json.loads(path.read_text())
        attempts[proof["attempt"], proof["world"]].add(proof["rank"])
    return any(ranks == set(range(world)) for (_, world), ranks in attempts.items())


def _blame(injection: Injection) -> str:
    """What a message must say of a job that ended because of this fault."""
    pid, replica, action = injection.pid, injection.replica, injection.fault.action
    if action == "freeze":
        # The supervisor says so of a host that no other host waits for.
        by_supervisor = rf"^replica {ROLE}/{replica} \(.*its host \(pid {pid}\)"
        host = rf"host {replica} \(\S+, pid {pid if injection.fault.target == 'host' else '[0-9]+'}\)"
        # Frozen before its first call, an agent has not started.
        unstarted = rf"|the agent of host {replica} \(.*\) did not start" * (injection.fault.target == "agent")
        return rf"({by_supervisor}|{host}) does not answer{unstarted}"
    how = {"kill": r"killed by signal 9 \(SIGKILL\)", "term": r"killed by signal 15 \(SIGTERM\)"}[action]
    if injection.fault.target == "supervisor":
        return rf"^the supervisor \(pid {pid}\) (was {how}|and the keeper \(pid \d+\) were killed)"
    if injection.fault.target == "host":
        # One that is told so early that it does not listen yet is killed by it.
        preempted = rf"|preempted: host {replica} \(\S+, pid {pid}\) received SIGTERM" * (action == "term")
        return rf"^replica {ROLE}/{replica} \(pid {pid}\) was {how}{preempted}"
    if injection.fault.target == "agent":
        return rf"agent of host {replica} \("
    # A rank without a number is killed before its host knows it.
    unbegun = "|cannot start a rank: it was killed before it had begun" * (injection.fault.target == "rank")
    return rf"rank \d+ \(local rank \d on [\w.-]+, pid {pid}\) was {how}{unbegun}"


def goes_on(plan: Plan, injections: Sequence[Injection]) -> bool:
    """Whether a job into which these were injected has what it needs to succeed all the same, unless it hangs."""
    deadly = [one for one in injections if not one.fault.harmless]
    if any(one.fault.tells or one.fault.target == "supervisor" for one in deadly):
        return False
    lost = {one.replica for one in deadly if one.fault.target in ("host", "agent") and one.replica > 0}
    if plan.elastic and len(lost) <= plan.hosts - plan.fewest:
        deadly = [one for one in deadly if one.replica not in lost or one.fault.target == "rank"]
    of_ranks = sum(one.fault.target == "rank" for one in deadly)
    return len(deadly) <= plan.retries or of_ranks == len(deadly) <= plan.restarts - plan.fails


def of_the_end(job: Job, injections: Sequence[Injection], state: AppState, message: str, rescued: bool) -> list[str]:
    """What is wrong with the state and the message.

    Args:
        rescued: whether it was cancelled because it hung.
    """
    plan, wrong = job.plan, []
    told = rescued or any(one.fault.tells for one in injections)
    if state is AppState.SUCCEEDED and not finished(job.folder):
        wrong.append("SUCCEEDED, and not every rank has reached its end")
    if state is AppState.CANCELLED and not told:
        wrong.append(f"CANCELLED, and nobody cancelled it: {message}")
    if state is AppState.CANCELLED and "preempt" in message:
        wrong.append(f"a cancellation is called preemption: {message}")
    if state is AppState.FAILED:
        deadly = [one for one in injections if not (one.fault.tells or one.fault.harmless)]
        blames = [_blame(one) for one in deadly]
        blames += [rf"exited with code {program.CODE}"] * (plan.fails and bool(deadly))
        if message == _NEVER_STARTED and any(one.fault.target == "submitter" for one in injections):
            return wrong
        if goes_on(plan, injections):
            wrong.append(f"FAILED, and it could have gone on: {message}")
        elif told and not deadly:
            wrong.append(f"FAILED, and it was cancelled: {message}")
        elif not any(re.search(blame, message) for blame in blames):
            wrong.append(f"FAILED for a wrong reason: {message}")
    return wrong


def of_the_record(job: Job, state: AppState) -> list[str]:
    """What is wrong with what can be asked of an ended app."""
    wrong, plan, scheduler = [], job.plan, job.scheduler
    described = scheduler.describe(job.app_id)
    if described is None:
        return ["it is not described"]
    replicas = [replica for role in described.roles_statuses for replica in role.replicas]
    if len(replicas) != plan.hosts or [
        one for one in replicas if one.state.name not in ("SUCCEEDED", "FAILED", "CANCELLED")
    ]:
        wrong.append(f"replicas: {[(one.id, one.state.name) for one in replicas]}")
    if job.app_id not in {app.app_id for app in scheduler.list()}:
        wrong.append("it is not listed")
    ends = [event for event in events.read(job.paths.events)[0] if event["kind"] == "ended"]
    if len(ends) != 1 or not ends[0]["message"].startswith(state.name):
        wrong.append(f"events of its end: {ends}")
    return wrong


def of_the_logs(job: Job, followed: Sequence[str | None]) -> list[str]:
    """What is wrong with the logs of an ended app, and with what those have read who followed them.

    Args:
        followed: by replica; None for one who has not come to an end. Empty where nobody followed.
    """
    logs, wrong = [], []
    streams = {Stream.COMBINED: ("out", "err"), Stream.STDOUT: ("out",), Stream.STDERR: ("err",)}
    for k in range(job.plan.hosts):
        for stream, names in streams.items():
            text = "".join(job.scheduler.log_iter(job.app_id, ROLE, k, streams=stream))
            logs.append(printed.Log(f"the log ({stream.value})", k, names, text))
            if stream is not Stream.COMBINED or not followed:
                continue
            if (read := followed[k]) is None:
                wrong.append(f"one who follows the log of replica {k} does not come to an end")
            elif read != text:
                wrong.append(f"one who followed the log of replica {k} read something else, at its end {read[-100:]!r}")
        if not any(fault.action == "log" for fault in job.plan.faults):
            for file, name in (("stdout.log", "out"), ("stderr.log", "err")):
                paths = Path(job.paths.replica_logs(ROLE, k)).glob(f"attempt_*/*/{file}")
                text = "\n".join(path.read_text() for path in sorted(paths))  # a killed rank may leave half a line
                logs.append(printed.Log(f"the ranks' {file}", k, (name,), text))
    return wrong + printed.check(job.folder, Path(job.paths.events), logs)


def of_the_submitter(job: Job, injections: Sequence[Injection], state: AppState | None) -> list[str]:
    """What is wrong with the end of the ``torchx run`` that has submitted the job."""
    if any(one.fault.target == "submitter" and one.fault.action != "stop" for one in injections):
        return []
    code = job.submitter_code()
    if code is None:
        return ["the torchx run that submitted it does not end"]
    said = (job.folder / "submitter.log").read_text()
    if state is None or (code == 0) != (state is AppState.SUCCEEDED):
        return [f"the torchx run that submitted it has exited with code {code}: {said[-2000:]}"]
    return [] if "Traceback" not in said else [f"the torchx run that submitted it printed a traceback: {said[-2000:]}"]


def of_leftovers(marker: str, run_dir: str, within: float) -> list[str]:
    """What is left of an ended app after ``within`` seconds."""
    until = time.monotonic() + within
    while (left := processes.marked(marker)) and time.monotonic() < until:
        time.sleep(0.02)
    wrong = []
    for pid in left:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        wrong.append(f"left running: {pid} {command}")
    processes.kill(left)
    if os.path.exists(run_dir):
        wrong.append(f"left on disk: {run_dir}, with {sorted(os.listdir(run_dir))}")
    return wrong


def of_the_state_dir(killed_submitters: bool) -> list[str]:
    """What is left in the state directory when all apps are deleted.

    Args:
        killed_submitters: whether some were: what one was working on is removed an hour later, see ``prune``.
    """
    left = os.listdir(state_files.apps_dir()) if os.path.isdir(state_files.apps_dir()) else []
    if killed_submitters:
        left = [name for name in left if not name.startswith(app_folder.STAGING_PREFIX)]
    return [f"left in the state directory: {left}"] if left else []


def listening(ports: set[int]) -> set[int]:
    """Those of these TCP ports on which somebody listens."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                found.add(int(words[1].rpartition(":")[2], 16))
    return found & ports


def ports(folder: Path) -> set[int]:
    """Where the ranks of a job met."""
    return {json.loads(path.read_text())["port"] for path in folder.glob("begin-*[0-9]")}
