# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whether what a job says of its end is true, and whether it left nothing behind."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from torchx.specs import AppState

from tests.soak.faults import Hit
from tests.soak.plans import ROLE, Blow, Plan
from torchx_monarch import events, processes
from torchx_monarch.backends.local.scheduler import DetachedScheduler


def finished(plan: Plan, folder: Path) -> bool:
    """Whether every rank of one attempt has proved that it reached its end."""
    attempts: dict[str, set[int]] = {}
    for path in folder.glob("end-*[0-9]"):
        proof = json.loads(path.read_text())
        attempts.setdefault(proof["attempt"], set()).add(proof["rank"])
    return any(ranks == set(range(plan.world)) for ranks in attempts.values())


def _blame(hit: Hit) -> str:
    """What a message must say of a job that ended because of this fault."""
    how = {"kill": r"killed by signal 9 \(SIGKILL\)", "term": r"killed by signal 15 \(SIGTERM\)"}[hit.blow.fault]
    if hit.blow.target == "supervisor":
        return rf"^the supervisor \(pid {hit.pid}\) was {how}"
    if hit.blow.target == "host":
        # One that is told so early that it does not listen yet is killed by it.
        preempted = rf"|preempted: host {hit.replica} \(\S+, pid {hit.pid}\) received SIGTERM" * (
            hit.blow.fault == "term"
        )
        return rf"^replica {ROLE}/{hit.replica} \(pid {hit.pid}\) was {how}{preempted}"
    if hit.blow.target == "agent":
        return rf"host {hit.replica} \(.*\) lost its agent|agent of host {hit.replica} \("
    return rf"rank \d+ \(local rank \d on [\w.-]+, pid {hit.pid}\) was {how}"


def _goes_on(plan: Plan, blows: Sequence[Blow]) -> bool:
    """Whether a job that was hit by these has what it needs to succeed all the same."""
    deadly = [blow for blow in blows if not blow.harmless]
    if any(blow.tells or blow.target == "supervisor" for blow in deadly):
        return False
    return len(deadly) <= plan.retries or (len(deadly) <= plan.restarts and all(one.target == "rank" for one in deadly))


def of_the_end(plan: Plan, hits: Sequence[Hit], state: AppState, message: str, folder: Path) -> list[str]:
    """What is wrong with the state and the message."""
    wrong = []
    if state is AppState.SUCCEEDED and not finished(plan, folder):
        wrong.append("SUCCEEDED, and not every rank has reached its end")
    if state is AppState.CANCELLED and not any(hit.blow.tells for hit in hits):
        wrong.append(f"CANCELLED, and nobody cancelled it: {message}")
    if state is AppState.CANCELLED and "preempt" in message:
        wrong.append(f"a cancellation is called preemption: {message}")
    if state is AppState.FAILED:
        if _goes_on(plan, [hit.blow for hit in hits]):
            wrong.append(f"FAILED, and it could have gone on: {message}")
        elif all(hit.blow.tells for hit in hits):
            wrong.append(f"FAILED, and it was cancelled: {message}")
        elif not any(re.search(_blame(hit), message) for hit in hits if not (hit.blow.tells or hit.blow.harmless)):
            wrong.append(f"FAILED for a wrong reason: {message}")
    return wrong


def of_the_record(plan: Plan, scheduler: DetachedScheduler, app_id: str, state: AppState) -> list[str]:
    """What is wrong with what can be asked of an ended app."""
    wrong = []
    described = scheduler.describe(app_id)
    if described is None:
        return ["it is not described"]
    replicas = [replica for role in described.roles_statuses for replica in role.replicas]
    if len(replicas) != plan.hosts or [
        one for one in replicas if one.state.name not in ("SUCCEEDED", "FAILED", "CANCELLED")
    ]:
        wrong.append(f"replicas: {[(one.id, one.state.name) for one in replicas]}")
    if app_id not in {app.app_id for app in scheduler.list()}:
        wrong.append("it is not listed")
    ends = [event for event in events.read(scheduler.events_path(app_id))[0] if event["kind"] == "ended"]
    if len(ends) != 1 or not ends[0]["message"].startswith(state.name):
        wrong.append(f"events of its end: {ends}")
    logs = ["".join(scheduler.log_iter(app_id, ROLE, k, should_tail=True)) for k in range(plan.hosts)]
    if state is AppState.SUCCEEDED:
        text = "".join(logs)
        wrong += [f"the log lacks the end of rank {n}" for n in range(plan.world) if f"end {n}\n" not in text]
    return wrong


def of_followers(plan: Plan, scheduler: DetachedScheduler, app_id: str, followed: Sequence[str | None]) -> list[str]:
    """What is wrong with what was read of the logs by those who followed them from the beginning."""
    wrong = []
    for k, text in enumerate(followed):
        if text is None:
            wrong.append(f"one who follows the log of replica {k} does not come to an end")
        elif text != (whole := "".join(scheduler.log_iter(app_id, ROLE, k))):
            wrong.append(f"one who followed the log of replica {k} read {len(text)} characters of {len(whole)}")
    return wrong


def of_leftovers(job: str, run_dir: str, within: float) -> list[str]:
    """What is left of an ended app after ``within`` seconds."""
    until = time.monotonic() + within
    while (left := processes.marked(job)) and time.monotonic() < until:
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
    return {int(json.loads(path.read_text())["attempt"].partition("/")[2]) for path in folder.glob("begin-*[0-9]")}
