# SPDX-License-Identifier: BSD-3-Clause
"""Whether what a job says of its end is true, and whether it left nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchx.schedulers.api import Stream
from torchx.specs import AppState

from tests.soak import printed, program
from tests.soak.faults import Injection, targets
from tests.soak.jobs import Job
from tests.soak.plans import ROLE, Plan
from torchx_monarch.backends.core import state_files
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


def _blame(job: Job, injection: Injection) -> str | None:
    """What a message must say of a job that ended because of this fault; None for a fault that ends no job."""
    pid, replica, action, target = injection.pid, injection.replica, injection.fault.action, injection.fault.target
    if action == "freeze" and target == "host":
        return rf"host {replica} \(\S+, pid {pid}\) does not answer"
    if injection.fault.hangs:
        return None
    how = {"kill": r"killed by signal 9 \(SIGKILL\)", "term": r"killed by signal 15 \(SIGTERM\)"}[action]
    if target == "supervisor":
        return rf"^the supervisor \(pid {pid}\) has ended without a result: it was killed, or"
    if target == "host":
        # One that is told so early that it does not listen yet is killed by it.
        preempted = rf"|preempted: host {replica} \(\S+, pid {pid}\) received SIGTERM" * (action == "term")
        return rf"^replica {ROLE}/{replica} \(pid {pid}\) was {how}{preempted}"
    # A rank without a number is killed before its host knows it, and before the program begins.
    unbegun = "|cannot start rank [0-9]+: it was killed before it had begun"
    unbegun *= not any(job.folder.glob(f"begin-*-{pid}"))
    return rf"rank \d+ \(local rank \d on [\w.-]+, pid {pid}\) was {how}{unbegun}"


def goes_on(plan: Plan, injections: Sequence[Injection]) -> bool:
    """Whether a job into which these were injected has what it needs to succeed all the same, unless it hangs."""
    deadly = [injection for injection in injections if not injection.fault.harmless]
    if any(injection.fault.tells or injection.fault.target == "supervisor" for injection in deadly):
        return False
    lost = {injection.replica for injection in deadly if injection.fault.target == "host" and injection.replica > 0}
    if len(lost) <= plan.replicas - plan.fewest:
        deadly = [
            injection for injection in deadly if injection.replica not in lost or injection.fault.target == "rank"
        ]
    of_ranks = sum(injection.fault.target == "rank" for injection in deadly)
    return len(deadly) <= plan.retries or of_ranks == len(deadly) <= plan.restarts - plan.fails


def of_the_end(job: Job, injections: Sequence[Injection], state: AppState, message: str, rescued: bool) -> list[str]:
    """What is wrong with the state and the message.

    Args:
        rescued: whether it was cancelled because it hung.
    """
    plan, wrong = job.plan, []
    told = rescued or any(injection.fault.tells for injection in injections)
    if state is AppState.SUCCEEDED and not finished(job.folder):
        wrong.append("SUCCEEDED, and not every rank has reached its end")
    if state is AppState.CANCELLED and not told:
        wrong.append(f"CANCELLED, and nobody cancelled it: {message}")
    if state is AppState.CANCELLED and "preempt" in message:
        wrong.append(f"a cancellation is called preemption: {message}")
    if state is AppState.FAILED:
        deadly = [injection for injection in injections if not (injection.fault.tells or injection.fault.harmless)]
        blames = [_blame(job, injection) for injection in deadly]
        # The program's own failure ends a job whose restarts were used up by the faults.
        of_ranks = sum(injection.fault.target == "rank" for injection in deadly)
        blames += [rf"exited with code {program.CODE}"] * (plan.fails and of_ranks >= plan.restarts)
        if message == _NEVER_STARTED and any(injection.fault.target == "submitter" for injection in injections):
            return wrong
        if goes_on(plan, injections):
            wrong.append(f"FAILED, and it could have gone on: {message}")
        elif told and not deadly:
            wrong.append(f"FAILED, and it was cancelled: {message}")
        elif not any(re.search(blame, message) for blame in blames if blame is not None):
            wrong.append(f"FAILED for a wrong reason: {message}")
    return wrong


def of_the_record(job: Job, injections: Sequence[Injection], state: AppState) -> list[str]:
    """What is wrong with what can be asked of an ended app."""
    wrong, scheduler = [], job.scheduler
    described = scheduler.describe(job.app_id)
    if described is None:
        return ["it is not described"]
    states = {replica.id: replica.state.name for role in described.roles_statuses for replica in role.replicas}
    if reason := of_the_replicas(job.plan, injections, state, states):
        wrong.append(f"{reason}: replicas {states}")
    wrong += _of_the_restarts(job, injections, state, described.num_restarts)
    if job.app_id not in {app.app_id for app in scheduler.list()}:
        wrong.append("it is not listed")
    ends = [event for event in events.read(job.paths.events)[0] if event["kind"] == "ended"]
    if not ends and any(injection.fault.what == "kill supervisor" for injection in injections):
        return wrong
    if len(ends) != 1 or not ends[0]["message"].startswith(state.name):
        wrong.append(f"events of its end: {ends}")
    return wrong


def of_the_replicas(plan: Plan, injections: Sequence[Injection], state: AppState, states: Mapping[int, str]) -> str:
    """Why the states of the replicas, by id, do not fit the state of the app; empty if they do."""
    if sorted(states) != list(range(plan.replicas)):
        return "not one state for each replica"
    if strange := set(states.values()) - {"SUCCEEDED", "FAILED", "CANCELLED"}:
        return f"an ended app has replicas that are {', '.join(sorted(strange))}"
    failed = {replica for replica, state in states.items() if state == "FAILED"}
    hit = {
        injection.replica
        for injection in injections
        if injection.fault.target == "host" and not injection.fault.harmless
    }
    if state is AppState.SUCCEEDED and "SUCCEEDED" not in states.values():
        return "SUCCEEDED, and no replica has"
    if state is AppState.SUCCEEDED and not failed <= hit:
        return f"SUCCEEDED, and replicas have failed that nothing was done to ({sorted(failed - hit)})"
    if state is AppState.SUCCEEDED and len(failed) > plan.replicas - plan.fewest:
        return f"SUCCEEDED, and {len(failed)} replicas have failed"
    if state is AppState.FAILED and not failed:
        return "FAILED, and no replica has"
    if state is AppState.CANCELLED and failed:
        return "CANCELLED, and replicas have failed"
    return ""


def _of_the_restarts(job: Job, injections: Sequence[Injection], state: AppState, number: int) -> list[str]:
    """What is wrong with the number of restarts that an ended app tells."""
    plan, deadly = job.plan, [injection for injection in injections if not injection.fault.harmless]
    failed = (job.folder / "failed").exists()
    # A failure that ends the hosts of a job ends each with an exit code of its own, and REPLICA restarts each of them.
    # A host whose place a spare one has taken, which is a restart, is started again, too.
    each = (plan.replicas if plan.policy == "REPLICA" and plan.retries else 1) + bool(plan.spares and plan.retries)
    most = len(deadly) * each + failed
    if number > most:
        return [f"{number} restarts, and there was something to restart after {most} times"]
    if any(injection.fault.target == "supervisor" for injection in deadly) or plan.replicas > plan.fewest:
        return []  # nobody was there to count, or an attempt with other hosts is no restart
    least = len({proof["attempt"] for proof in printed.proofs(job.folder, "begin")}) - 1
    if state is AppState.SUCCEEDED and not deadly:
        least = int(failed)
    return [f"{number} restarts, and {least} have left proofs"] if number < least else []


def of_the_logs(job: Job, injections: Sequence[Injection], followed: Sequence[str | None]) -> list[str]:
    """What is wrong with the logs of an ended app, and with what those have read who followed them.

    Args:
        followed: by replica; None for one who has not come to an end. Empty where nobody followed.
    """
    logs, wrong = [], []
    streams = {Stream.COMBINED: ("out", "err"), Stream.STDOUT: ("out",), Stream.STDERR: ("err",)}
    for k in range(job.plan.replicas):
        for stream, names in streams.items():
            text = "".join(job.scheduler.log_iter(job.app_id, ROLE, k, streams=stream))
            logs.append(printed.Log(f"the log ({stream.value})", k, names, text))
            if stream is Stream.COMBINED and followed and followed[k] != text:
                wrong.append(f"one who followed the log of replica {k} has read {(followed[k] or '')[-100:]!r}")
        for file, name in (("stdout.log", "out"), ("stderr.log", "err")):
            paths = Path(job.paths.replica_logs(ROLE, k)).glob(f"attempt_*/*/{file}")
            text = "\n".join(path.read_text() for path in sorted(paths))  # a killed rank may leave half a line
            logs.append(printed.Log(f"the ranks' {file}", k, (name,), text))
    killed = [injection.pid for injection in injections if injection.fault.what == "kill host"]
    unwatched = any(injection.fault.what == "kill supervisor" for injection in injections)
    return wrong + printed.check(job.folder, *printed.host_starts(Path(job.paths.events), killed, unwatched), logs)


def of_the_submitter(job: Job, injections: Sequence[Injection], state: AppState | None) -> list[str]:
    """What is wrong with the end of the ``torchx run`` that has submitted the job."""
    actions = {injection.fault.action for injection in injections if injection.fault.target == "submitter"}
    if actions & {"kill", "freeze"}:
        return []
    code = job.submitter_code()
    if code is None:
        return ["the torchx run that submitted it does not end"]
    said = (job.folder / "submitter.log").read_text()
    wrong = [f"the torchx run that submitted it printed a traceback: {said[-2000:]}"] * ("Traceback" in said)
    # One that is told before it handles signals is killed by it, and has then submitted nothing.
    told = {128 + signal.SIGTERM} if job.app_id else {128 + signal.SIGTERM, -signal.SIGTERM}
    good = told if "term" in actions else set()
    if state is AppState.SUCCEEDED:
        right = code in {0, *good}
    else:
        right = code in good if good else code != 0 and state is not None
    return wrong if right else [*wrong, f"the torchx run that submitted it has exited with code {code}: {said[-2000:]}"]


def of_leftovers(job: Job, within: float, unwatched: bool = False) -> list[str]:
    """What is left of an ended app after ``within`` seconds.

    Args:
        unwatched: whether its supervisor was killed: children of ranks then live until the app is deleted.
    """
    until = time.monotonic() + within
    while left := set(job.processes()) - set(targets(job, "child") if unwatched else ()):
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    wrong = []
    for pid in left:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        wrong.append(f"left running: {pid} {command}")
    processes.kill(left)
    if job.run_dir and os.path.exists(job.run_dir) and not unwatched:
        wrong.append(f"left on disk: {job.run_dir}, with {sorted(os.listdir(job.run_dir))}")
    return wrong


def of_the_state_dir(killed_submitters: bool) -> list[str]:
    """What is left in the state directory when all apps are deleted.

    Args:
        killed_submitters: whether some were: what one was working on is removed an hour later, see ``prune``.
    """
    left = os.listdir(state_files.apps_dir()) if os.path.isdir(state_files.apps_dir()) else []
    if killed_submitters:
        left = [name for name in left if os.path.exists(state_files.app_paths(name).status)]
    return [f"left in the state directory: {left}"] if left else []
