# SPDX-License-Identifier: BSD-3-Clause
"""What PBS, LSF and HTCondor are told, and what their answers mean."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppDef, Role

from tests.waits import WITHIN, until
from torchx_monarch.backends import entrypoint
from torchx_monarch.backends.batch.backend import BatchBackend, Job
from torchx_monarch.backends.batch.folder import BatchRequest, JobFolder
from torchx_monarch.backends.batch.htcondor import HTCondorBackend, HTCondorOpts
from torchx_monarch.backends.batch.lsf import LsfBackend, LsfOpts
from torchx_monarch.backends.batch.options import time_limit
from torchx_monarch.backends.batch.pbs import PbsBackend, PbsOpts
from torchx_monarch.backends.batch.sge import SgeBackend, SgeOpts
from torchx_monarch.backends.batch.snapshot import QueuedJob, read_replica
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import BackendError, UserError
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.core.state import reduce
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local.supervision import RoleRecord, RoleRequest, SupervisorRecord
from torchx_monarch.insight import events
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.supervisor.replica import ReplicaRecord

JOB = Job("m-x-0", ["/a b/python", "it's", '"$HOME"'], 2, 4, 8, 1000, "/jobs/x/job.log", ["-x", "more"])

QSTAT = """
pbs: 
                                                                             Req'd  Req'd   Elap
Job ID              Username        Queue           Jobname         SessID   NDS  TSK   Memory Time  S Time
------------------- --------------- --------------- --------------- -------- ---- ----- ------ ----- - -----
7.pbs               me              workq           m-x-0-0             4711    1     4 1000mb 04:00 R 00:01
   Job run at Fri Nov 27 at 05:00 on (node1:ncpus=4)
8.pbs               me              workq           m-x-0-1               --    1     4 1000mb 04:00 Q   -- 
   Not Running: Insufficient amount of resource: ngpus (R: 8 A: 0 T: 8)
9.pbs               me              workq           m-x-0-2               --    1    99 1000mb 04:00 Q   -- 
   Can Never Run: Insufficient amount of resource: ncpus (R: 99 A: 4 T: 4)
10.pbs              me              workq           m-x-0-3               --    1     4 1000mb 04:00 H   -- 
    -- 
"""  # noqa: W291

BJOBS = {
    "COMMAND": "bjobs",
    "JOBS": 3,
    "RECORDS": [
        {"JOBID": "7", "JOBINDEX": "1", "JOB_NAME": "m-x-0[1]", "STAT": "RUN", "PEND_REASON": ""},
        {
            "JOBID": "7",
            "JOBINDEX": "2",
            "JOB_NAME": "m-x-0[2]",
            "STAT": "PEND",
            "PEND_REASON": "Not enough GPUs:\n 4 hosts;",
        },
        {"JOBID": "7", "JOBINDEX": "3", "JOB_NAME": "m-x-0[3]", "STAT": "SSUSP", "PEND_REASON": ""},
        {
            "JOBID": "8",
            "JOBINDEX": "1",
            "JOB_NAME": "m-x-1[1]",
            "STAT": "PEND",
            "PEND_REASON": "Dependency condition invalid or never satisfied;",
        },
    ],
}

CONDOR_Q = [
    {"ClusterId": 7, "ProcId": 0, "JobStatus": 2, "JobBatchName": "m-x-0"},
    {"ClusterId": 7, "ProcId": 1, "JobStatus": 1, "LastRejMatchReason": "no match found "},
    {"ClusterId": 7, "ProcId": 2, "JobStatus": 5, "HoldReasonCode": 1, "HoldReason": "via condor_hold (by user me)"},
    {"ClusterId": 7, "ProcId": 3, "JobStatus": 5, "HoldReasonCode": 6, "HoldReason": "Failed to execute"},
    {"ClusterId": 7, "ProcId": 4, "JobStatus": 4},
]

RUNNING, WAITING = QueuedJob(), QueuedJob(State.PENDING)


def answers(monkeypatch: pytest.MonkeyPatch, backend: type, text: str) -> None:
    monkeypatch.setattr(backend, "run", lambda self, command: text)


def test_pbs(monkeypatch: pytest.MonkeyPatch) -> None:
    options = PbsOpts(queue="workq", time="1-2:3:4", account="proj")
    assert PbsBackend().submit_command(JOB, options) == [
        *("qsub", "-V", "-N", "m-x-0", "-l", "select=1:ncpus=4:mem=1000mb:ngpus=8"),
        *("-j", "oe", "-o", "/jobs/x/job.log", "-q", "workq", "-l", "walltime=26:03:04", "-A", "proj"),
        *("-x", "more", "--", *JOB.words),
    ]
    answers(monkeypatch, PbsBackend, QSTAT)
    assert PbsBackend().queued() == {
        "7": RUNNING,
        "8": WAITING._replace(reason="Not Running: Insufficient amount of resource: ngpus (R: 8 A: 0 T: 8)"),
        "9": QueuedJob(
            State.PENDING, "Can Never Run: Insufficient amount of resource: ncpus (R: 99 A: 4 T: 4)", is_stuck=True
        ),
        "10": WAITING,
    }


@pytest.fixture
def pbs_app() -> JobFolder:
    """The folder of an app of PBS whose two jobs are 8 and 9, and which has recorded nothing."""
    backend = PbsBackend()
    folder = JobFolder(backend.new_folder("app", backend.root))
    submitted = SubmittedApp(AppDef("app", [Role("r", image="", entrypoint="true")]), [RoleSpec("r", 2)])
    os.makedirs(folder.root)
    os.makedirs(backend._index)
    os.symlink(folder.root, os.path.join(backend._index, folder.app_id))
    state_files.write_json(folder.app, {"created": 1.0, "jobs": ["8", "9"], **submitted.to_json()})
    return folder


def test_jobs_that_are_submitted_while_the_queue_is_read_have_not_left_it(
    pbs_app: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = json.loads(Path(pbs_app.app).read_text())
    jobs = content["jobs"] = list[str]()
    lists = list[str]()

    def run(self: PbsBackend, command: Sequence[str]) -> str:
        if command[0] == "qstat" and len(lists) < 2:
            lists.append("".join(line for line in QSTAT.splitlines(True) if line.partition(".")[0] in jobs))
            jobs.append("89"[len(jobs)])
            state_files.write_json(pbs_app.app, content)
        return lists[-1] if command[0] == "qstat" else ""

    state_files.write_json(pbs_app.app, content)
    monkeypatch.setattr(PbsBackend, "run", run)
    for count in (0, 1):
        app = PbsBackend().snapshot(pbs_app.app_id)
        assert app is not None and len(app.jobs) == len(lists) - 1 == count
        assert {replica.state for replica in app.replicas} == {State.PENDING}


def test_a_job_that_the_batch_system_ends_says_so(pbs_app: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(2):
        record = SupervisorRecord("x", "app", 1.0, state=State.CANCELLED, msg="got SIGTERM", started=1.0)
        record.roles = [RoleRecord("r", [ReplicaRecord(k, State.CANCELLED, exit_code=-15, started=1.0, ended=2.0 - k)])]
        os.makedirs(pbs_app.replica("r", k).root)
        state_files.write_json(pbs_app.replica("r", k).status, asdict(record))
    answers(monkeypatch, PbsBackend, "")
    found = PbsBackend().snapshot(pbs_app.app_id)
    assert found is not None
    status = reduce(found)
    reason = "the batch system has ended its job, as at a time limit"
    assert (status.state, status.message) == (State.FAILED, f"replica r/1: {reason}")
    pbs_app.write_stop(Outcome(State.CANCELLED, "cancelled"), None)
    cancelled = PbsBackend().snapshot(pbs_app.app_id)
    assert cancelled is not None and {replica.state for replica in cancelled.replicas} == {State.CANCELLED}


def test_a_job_that_cannot_be_taken_back_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = iter(["8.pbs"])

    def run(self: PbsBackend, command: Sequence[str]) -> str:
        if command[0] == "qsub" and (job := next(jobs, "")):
            return job
        raise BackendError(f"{command[0]} refuses: the server is busy")

    monkeypatch.setattr(PbsBackend, "run", run)
    app = AppDef("app", [Role("r", image="", entrypoint="true", num_replicas=2)])
    submitted, backend = SubmittedApp(app, [RoleSpec("r", 2)]), PbsBackend()
    with pytest.raises(BackendError, match="qsub refuses"):
        backend.submit(backend.render(app, submitted, PbsOpts()), submitted, "")
    assert "not cancelled, to be done by `qdel 8`: qdel refuses: the server is busy" in caplog.text


def test_a_task_says_for_which_role_it_waits(pbs_app: JobFolder) -> None:
    roles = [RoleRequest(RoleSpec(name), ["true"], {}, "/") for name in ("a", "b")]
    backend = PbsBackend()
    backend.fill_folder(pbs_app, BatchRequest("app", pbs_app.root, roles, []))
    code = (
        f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})\n"
        "from torchx_monarch.backends.batch import task\n"
        f"task._QUIET_TIME = 0.0\nsys.exit(task.main({pbs_app.root!r}, '1', '0'))"
    )
    record = pbs_app.replica("b", 0).load_record
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", code]) as waiting, contextlib.ExitStack() as undo:
        undo.callback(waiting.kill)
        until(lambda: (found := record()) and found.msg, "the reason")
        found = read_replica(roles[1].spec, 0, record(), RUNNING, None)
        assert (found.state, found.waiting) == (State.PENDING, "its job runs, and waits for replica 0 of role a")
        (first := SupervisorRecord("x", "app", 1.0, hostname="node1")).roles = [RoleRecord("a", [ReplicaRecord(0)])]
        state_files.write_json(pbs_app.replica("a", 0).status, asdict(first))
        until(lambda: (found := record()) and found.state is State.SUCCEEDED, "the end of the task")
        state_files.write_json(pbs_app.replica("a", 0).status, asdict(replace(first, state=State.SUCCEEDED)))
        assert waiting.wait(WITHIN) == 0


def test_the_command_at_the_end_is_told_what_was_slow(pbs_app: JobFolder, tmp_path: Path) -> None:
    spec = RoleSpec("r", on_end=f"cat >{tmp_path}/end.json")
    request = BatchRequest("app", pbs_app.root, [RoleRequest(spec, ["false"], {}, "/")], [])
    PbsBackend().fill_folder(pbs_app, request)
    events.append(pbs_app.events, "slow", "rank 1 is slow")
    words = [sys.executable, "-I", "-S", entrypoint.__file__, "batch.task", pbs_app.root, "0", "0"]
    assert subprocess.run(words, check=False, timeout=WITHIN).returncode == 1
    end = json.loads((tmp_path / "end.json").read_text())
    assert (end["state"], end["exit_code"], end["restarts"], end["slow"]) == ("FAILED", 1, 0, "rank 1 is slow")


def test_lsf(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LsfBackend().submit_command(JOB, LsfOpts(queue="normal", time="90:30", account="proj")) == [
        *("bsub", "-J", "m-x-0[1-2]", "-o", "/jobs/x/job.log", "-q", "normal", "-n", "4", "-R", "span[hosts=1]"),
        *("-R", "rusage[mem=1000MB]", "-gpu", "num=8", "-W", "1:31", "-P", "proj", "-x", "more"),
        "'/a b/python' 'it'\"'\"'s' '\"$HOME\"'",
    ]
    answers(monkeypatch, LsfBackend, json.dumps(BJOBS))
    running, waiting = (
        RUNNING._replace(name="m-x-0"),
        QueuedJob(State.PENDING, "Not enough GPUs: 4 hosts;", name="m-x-0"),
    )
    stuck = QueuedJob(State.PENDING, "Dependency condition invalid or never satisfied;", True, "m-x-1")
    assert LsfBackend().queued() == {"7.1": running, "7.2": waiting, "7.3": running, "8.1": stuck}
    answers(monkeypatch, LsfBackend, "No unfinished job found\n")
    assert LsfBackend().queued() == {}


def test_sge() -> None:
    options = SgeOpts(queue="all.q", time="2-12", account="proj")
    command = " ".join(SgeBackend().submit_command(JOB, options))
    assert " -q all.q -l h_rt=60:00:00 -P proj -pe smp 4 -l mem_free=1000M -l gpu=8 -x more /a b/python" in command


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("240", 14400), ("4:30", 270), ("4:00:01", 14401), ("1-0", 86400), ("1-1:30", 91800), ("1-01:30:05", 91805)],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(text: str, seconds: int) -> None:
    assert time_limit(text) == seconds


@pytest.mark.parametrize("text", ["4h", "0", "1:2:3:4", "-5", "1-2-3", "UNLIMITED", "²"])
def test_another_time_limit_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=rf"^Run option `time` is {text}; it is MINUTES, MINUTES:SECONDS, HOURS:"):
        PbsBackend().submit_command(JOB, PbsOpts(time=text))


@pytest.mark.parametrize("message", ["No unfinished job found", "LSF is down"])
def test_lsf_has_a_code_for_an_empty_queue(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    def run(self: LsfBackend, command: Sequence[str]) -> str:
        raise BackendError(f"bjobs refuses: {message}")

    monkeypatch.setattr(LsfBackend, "run", run)
    if message == "LSF is down":
        with pytest.raises(BackendError, match=message):
            LsfBackend().queued()
    else:
        assert LsfBackend().queued() == {}


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (LsfBackend(), "{ LSF is going down"),
        (LsfBackend(), '{"JOBS": 1}'),
        (SgeBackend(), "<job_info>&"),
        (HTCondorBackend(), "-- Failed to fetch ads"),
        (HTCondorBackend(), '[{"ProcId": 1}]'),
    ],
)
def test_an_answer_that_is_no_list_of_jobs_is_shown(
    backend: BatchBackend[Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, type(backend), text)
    with pytest.raises(BackendError, match=rf"^{backend.name} has answered what is no list of jobs: \w+Error\("):
        backend.list_jobs({})


def test_htcondor(monkeypatch: pytest.MonkeyPatch) -> None:
    options = HTCondorOpts(time="90", account="group_physics.proj")
    command = HTCondorBackend().submit_command(JOB._replace(submit_args=["hold=True"]), options)
    assert command[:2] == ["condor_submit", "-terse"] and command[-3:] == ["hold=True", "-queue", "2"]
    settings = dict(word.split("=", 1) for word in command[2:-2])
    assert (settings["allowed_job_duration"], settings["accounting_group"]) == ("5400", "group_physics.proj")
    assert settings["executable"] == "/a b/python"
    assert settings["arguments"] == '"\'it\'\'s\' ""$(DOLLAR)HOME"""'
    options.left_out = ["node7"]
    with pytest.raises(
        UserError, match="^`requirements` in run option `submit_args` would replace that of `avoid_known_bad`"
    ):
        HTCondorBackend().submit_command(JOB._replace(submit_args=["Requirements = HasGPU"]), options)
    amounts = {name: value for name, value in settings.items() if name.startswith("request_")}
    assert amounts == {"request_cpus": "4", "request_memory": "1000", "request_gpus": "8"}
    answers(monkeypatch, HTCondorBackend, json.dumps(CONDOR_Q))
    assert HTCondorBackend().queued() == {
        "7.0": RUNNING._replace(name="m-x-0"),
        "7.1": WAITING._replace(reason="no match found"),
        "7.2": WAITING._replace(reason="via condor_hold (by user me)"),
        "7.3": QueuedJob(State.PENDING, "Failed to execute", is_stuck=True),
    }
    answers(monkeypatch, HTCondorBackend, "\n")
    assert HTCondorBackend().queued() == {}
