# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Slurm's job arrays without Slurm: what the option means, what Slurm (22.05) says, what an array's state is."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchx.runner import Runner
from torchx.specs import AppDef, InvalidRunConfigException, Role

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.state import reduce
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.slurm import array, array_state, folder, native, snapshot
from torchx_monarch.backends.slurm.folder import JobFolder
from torchx_monarch.backends.slurm.job_state import JobState
from torchx_monarch.backends.slurm.native import Job
from torchx_monarch.backends.slurm.request import SlurmRequest
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.schedulers import monarch_slurm
from torchx_monarch.transport import local_addresses

LINE = "JobName=p UserId=root(0) JobState={} Reason={} Requeue=1 Restarts={} ExitCode=0:0 NodeList={} Comment=t:/x \n"
SCONTROL = (
    "JobId=12 ArrayJobId=12 ArrayTaskId=3-5%2 ArrayTaskThrottle=2 "
    + LINE.format("PENDING", "JobArrayTaskLimit", 0, "")
    + "JobId=15 ArrayJobId=12 ArrayTaskId=2 ArrayTaskThrottle=2 "
    + LINE.format("RUNNING", "None", 0, "n1")
    + "JobId=14 ArrayJobId=12 ArrayTaskId=1 ArrayTaskThrottle=2 "
    + LINE.format("PENDING", "BeginTime", 1, "")
)

# -- the option --------------------------------------------------------------------------------------------------------

ITEMS = st.one_of(
    st.integers(0, 99).map(lambda low: (str(low), [low])),
    st.tuples(st.integers(0, 99), st.integers(0, 50)).map(
        lambda two: (f"{two[0]}-{sum(two)}", list(range(two[0], sum(two) + 1)))
    ),
    st.tuples(st.integers(0, 99), st.integers(0, 50), st.integers(1, 9)).map(
        lambda three: (
            f"{three[0]}-{three[0] + three[1]}:{three[2]}",
            list(range(three[0], three[0] + three[1] + 1, three[2])),
        )
    ),
)


@given(st.lists(ITEMS, min_size=1, max_size=6), st.none() | st.integers(1, 50))
def test_indices_are_ascending_whatever_the_order(items: list[tuple[str, list[int]]], throttle: int | None) -> None:
    text = ",".join(item for item, _ in items) + ("" if throttle is None else f"%{throttle}")
    indices, at_a_time = array.parse(text)
    assert indices == sorted({index for _, several in items for index in several})
    assert at_a_time == throttle


@given(st.text("0123,-:%x", max_size=6))
def test_anything_else_is_refused_with_a_reason(text: str) -> None:
    try:
        indices, throttle = array.parse(text)
    except ValueError as error:
        assert str(error)
        return
    assert indices == sorted(set(indices)) != []
    assert throttle is None or throttle > 0
    assert array.parse(",".join(map(str, indices)))[0] == indices


def runner() -> Runner:
    return Runner("torchx", {"monarch_slurm": monarch_slurm})


def role(name: str = "r", *words: str, replicas: int = 2) -> Role:
    return Role(name, image="", entrypoint=(words or ("sh",))[0], args=list(words[1:]), num_replicas=replicas)


def dryrun(given: str, *roles: Role) -> SlurmRequest:
    app = AppDef("app", list(roles or (role("r", "torchrun", "--nnodes", "2", "train.py"),)))
    request: SlurmRequest = runner().dryrun(app, "monarch_slurm", cfg={"array": given}).request
    return request


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("x", "'x' is neither an index nor a range; allowed are .*0,3,7-20:2%4"),
        ("", "'' is neither"),
        ("1,,2", "'' is neither"),
        ("[1-2]", "'.1-2.' is neither"),
        ("5-2", "'5-2' counts down"),
        ("0-9:0", "step of '0-9:0' is 0"),
        ("1%0", "'0' after `%` is not how many"),
        ("1%", "'' after `%`"),
        ("0-9999999999", "9999999999 is over 4000000"),
    ],
)
def test_what_is_no_array_is_refused_before_it_is_submitted(given: str, words: str) -> None:
    with pytest.raises(InvalidRunConfigException, match=f"`array` is '.*': .*{words}"):
        dryrun(given)


def test_roles_that_cannot_be_arrays_are_refused() -> None:
    with pytest.raises(InvalidRunConfigException, match=r"has 2 roles \(trainer, reader\)"):
        dryrun("0-1", role("trainer"), role("reader"))
    with pytest.raises(InvalidRunConfigException, match=r"role hosts waits for clients \(torchx_monarch.hosts\)"):
        dryrun("0-1", role("hosts", "python", "-m", "torchx_monarch.hosts"))
    script = role("mesh", "python", "-m", "torchx_monarch.actors", "--", "python", "main.py")
    assert "--array=0-1" in dryrun("0-1", script).command("job.sh")


def test_dry_run_shows_the_array() -> None:
    request = dryrun("0,3,7-20:2%4")
    command = request.command("job.sh")
    assert "--array=0,3,7-20:2%4" in command
    assert f"--output={request.folder}/array/%a.log" in command
    assert "--array=0,3,7-20:2%4" in str(request)
    # What asks Slurm for the number of the array would mean all of its tasks.
    assert '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" 0 &' in request.script
    assert f'{request.folder}/array/"$SLURM_ARRAY_TASK_ID"/cancel.json' in request.script


def test_submitting_takes_no_array_from_the_environment() -> None:
    assert native.client_environment({"SBATCH_ARRAY_INX": "0-9", "SBATCH_ACCOUNT": "a"}) == {"SBATCH_ACCOUNT": "a"}


@pytest.mark.parametrize(
    ("port", "offset", "shifted"), [(20007, "", 20007), (20007, "5", 20012), (29999, "2", 20001), (65535, "1", 60000)]
)
def test_array_tasks_on_one_node_meet_at_ports_of_their_own(port: int, offset: str, shifted: int) -> None:
    environ = {"N": "n1", "MONARCH_PORT_OFFSET": offset}
    assert local_addresses.expand_address(f"tls:@N:{port}", environ, False) == f"tls:n1:{shifted}"


# -- what Slurm says ---------------------------------------------------------------------------------------------------


def test_ids_of_arrays_and_their_tasks() -> None:
    assert array.split("12") == ("12", None)
    assert array.split("12_7") == ("12", 7)
    for wrong in ("", "x", "12_", "12_x", "12_[1-2]", "12+1", "12_7_7"):
        assert array.split(wrong) is None


def test_records_of_an_array_are_read() -> None:
    jobs = native.parse_scontrol(SCONTROL)
    assert {job.leader for job in jobs} == {"12"}
    by_task = array_state.by_task(jobs)
    assert {index: (job.state, job.job_id) for index, job in by_task.items()} == {
        1: ("PENDING", "14"),
        2: ("RUNNING", "15"),
        3: ("PENDING", "12"),
        4: ("PENDING", "12"),
        5: ("PENDING", "12"),
    }
    assert by_task[1].restarts == 1
    # All of those that had waited were cancelled.
    (nobody,) = native.parse_scontrol(SCONTROL.splitlines()[0].replace("3-5%2", "4294967294"))
    assert (nobody.leader, nobody.tasks) == ("12", ())
    squeue = "12|12_[1,3-5%2]|PENDING|JobArrayTaskLimit|p|t:/x\n15|12_2|RUNNING|None|p|t:/x\n"
    assert [(job.leader, job.tasks) for job in native.parse_squeue(squeue)] == [("12", (1, 3, 4, 5)), ("12", (2,))]
    sacct = "12_0|FAILED|3:0|n2|p\n12_[3-5%2]|CANCELLED by 0|0:0|None assigned|p\n12_4|COMPLETED|0:0|n1|p\n"
    found = {index: job.state for index, job in array_state.by_task(native.parse_sacct(sacct)["12"]).items()}
    assert found == {0: "FAILED", 3: "CANCELLED by 0", 4: "COMPLETED", 5: "CANCELLED by 0"}


# -- what is known of one ----------------------------------------------------------------------------------------------


def submitted(spec: str = "1,4,6") -> JobFolder:
    """The folder of an array, as it is after its submission."""
    paths = JobFolder(folder.new("app", None))
    os.makedirs(paths.array)
    state_files.write_json(paths.request, {"sbatch": {"array": spec}})
    state_files.write_json(paths.app, SubmittedApp(AppDef("app", [role(replicas=1)]), [RoleSpec("r")]).to_json())
    folder.link_id("12", paths.root)
    return paths


def has_run(paths: JobFolder, index: int, state: str, ended: float = 0.0, **more: Any) -> None:
    """An array task's word on its end, and that of its one replica."""
    task = paths.task(index)
    os.makedirs(task.replica_logs("r", 0))
    said = {"state": state, "msg": f"says {index}", "ended": ended} if ended else {}
    state_files.write_json(task.job, {**said, **more})
    error = json.dumps({"message": {"message": f"boom {index}"}}) if state == "FAILED" else None
    record = {"id": 0, "state": state, "error": error, "ended": ended, "hostname": "n1"}
    state_files.write_json(task.record("r", 0), record)


def slurm(state: str, *indices: int) -> Job:
    return Job("12", "12", "app", state, tasks=indices)


def known(paths: JobFolder, jobs: Sequence[Job] = (), recorded: Sequence[Job] | None = None) -> JobState:
    def accounts() -> list[Job]:
        assert recorded is not None, "accounting was asked"
        return list(recorded)

    return snapshot.known(paths, list(jobs), accounts)


@pytest.mark.parametrize(
    ("jobs", "state", "msg"),
    [
        ([slurm("PENDING", 1, 4, 6)], "PENDING", "array tasks: 3 pending"),
        ([slurm("PENDING", 4, 6), slurm("RUNNING", 1)], "RUNNING", "array tasks: 1 running, 2 pending"),
        # Nothing runs between two of them, or when all were queued again.
        ([slurm("PENDING", 4, 6), slurm("COMPLETED", 1)], "PENDING", "array tasks: 2 pending, 1 succeeded"),
        ([slurm("RUNNING", 6), slurm("FAILED", 1, 4)], "RUNNING", "array tasks: 1 running, 2 failed"),
        ([slurm("COMPLETED", 1, 4, 6)], "SUCCEEDED", ""),
        ([slurm("COMPLETED", 1, 6), slurm("CANCELLED", 4)], "CANCELLED", "array task 4: CANCELLED: by scancel.*"),
        ([slurm("TIMEOUT", 6), slurm("CANCELLED", 1, 4)], "FAILED", "array task 6: TIMEOUT: .* time limit.*"),
        ([slurm("NODE_FAIL", 4, 6), slurm("COMPLETED", 1)], "FAILED", r"array task 4: .* \(1 more of 3 failed\)"),
    ],
)
def test_array_is_what_its_tasks_are(jobs: list[Job], state: str, msg: str) -> None:
    app = known(submitted(), jobs)
    assert app.state is State[state]
    assert re.fullmatch(msg, app.outcome.message), app.outcome


def test_first_failure_is_the_cause_and_replicas_count_through() -> None:
    paths = submitted()
    has_run(paths, 1, "FAILED", ended=30.0)
    has_run(paths, 4, "FAILED", ended=20.0, restarts=2)
    has_run(paths, 6, "SUCCEEDED", ended=10.0)
    job = known(paths, [slurm("FAILED", 1, 4), slurm("COMPLETED", 6)])
    app = snapshot.of_app("12", job, brief=False)
    status = reduce(app)
    assert (status.state, status.message) == (State.FAILED, "array task 4: says 4 (1 more of 3 failed)")
    assert [one.id for one in app.replicas] == [0, 1, 2]
    assert [status.shown(one).name for one in app.replicas] == ["FAILED", "FAILED", "SUCCEEDED"]
    assert app.restarts == 2
    assert json.loads(status.error)["message"]["message"] == "array task 4: boom 4"
    assert not status.is_stop_due
    errors = [reduce(snapshot.of_app("12_0", task, brief=False)).error for task in job.tasks.values()]
    messages = [json.loads(error or "{}").get("message") for error in errors]
    assert messages == [{"message": "boom 1"}, {"message": "boom 4"}, None]


@pytest.mark.parametrize("brief", [True, False])
def test_replicas_of_an_array_are_those_of_all_tasks(brief: bool) -> None:
    paths = submitted()
    state_files.write_json(paths.app, SubmittedApp(AppDef("app", [role()]), [RoleSpec("r", 2)]).to_json())
    job = known(paths, [slurm("RUNNING", 1), slurm("PENDING", 4, 6)])
    app = snapshot.of_app("12", job, brief=brief)
    assert [replica.id for replica in app.replicas] == list(range(6))
    assert snapshot.locate_replica(app, "r", 5) == ("12_6", job.tasks[6], 1)
    only = snapshot.of_app("12_6", job.tasks[6], brief=brief)
    assert [replica.id for replica in only.replicas] == [0, 1]
    assert snapshot.locate_replica(only, "r", 1) == ("12_6", job.tasks[6], 1)


def test_tasks_that_slurm_has_forgotten() -> None:
    paths = submitted("0-5")
    has_run(paths, 0, "SUCCEEDED", ended=10.0)
    has_run(paths, 1, "RUNNING")
    # Of task 5, which was cancelled before it had begun, the database still says that it waits.
    recorded = [slurm("NODE_FAIL", 1), slurm("PENDING", 2, 3, 5)]
    app = known(paths, [slurm("PENDING", 2), slurm("CANCELLED", 3), slurm("RUNNING", 4)], recorded)
    states = {index: task.state.name for index, task in app.tasks.items()}
    assert states == dict(enumerate(["SUCCEEDED", "FAILED", "PENDING", "CANCELLED", "RUNNING", "CANCELLED"]))
    assert app.tasks[5].outcome.message == "cancelled before it had started"


def test_the_end_of_an_array_is_what_accounting_says_or_the_tasks_have_said() -> None:
    paths = submitted()
    has_run(paths, 1, "SUCCEEDED", ended=10.0)
    has_run(paths, 4, "RUNNING")
    app = known(paths, recorded=[slurm("COMPLETED", 1), slurm("TIMEOUT", 4), slurm("CANCELLED", 6)])
    assert (app.state, app.outcome.message[:21]) == (State.FAILED, "array task 4: TIMEOUT")
    paths = submitted()
    has_run(paths, 1, "SUCCEEDED", ended=10.0)
    has_run(paths, 4, "SUCCEEDED", ended=10.0)
    assert [task.state.name for task in known(paths, recorded=[]).tasks.values()] == [
        "SUCCEEDED",
        "SUCCEEDED",
        "CANCELLED",
    ]


def test_wish_to_cancel_the_array_is_one_for_each_task() -> None:
    paths = submitted()
    has_run(paths, 1, "FAILED", ended=5.0)
    state_files.write_json(paths.cancel, {"time": 1.0})
    assert paths.task(4).is_cancelled
    app = known(paths, [slurm("FAILED", 1), slurm("CANCELLED", 4, 6)])
    assert [(task.state.name, task.outcome.message) for task in app.tasks.values()] == [
        ("FAILED", "says 1"),
        ("CANCELLED", "cancelled"),
        ("CANCELLED", "cancelled"),
    ]
    # One alone.
    paths = submitted()
    os.makedirs(paths.task(4).root)
    state_files.write_json(paths.task(4).cancel, {"time": 1.0})
    app = known(paths, [slurm("COMPLETED", 1, 6), slurm("CANCELLED", 4)])
    assert (app.state, app.outcome.message) == (State.CANCELLED, "array task 4: cancelled")


def test_an_array_has_said_that_it_has_ended_when_all_of_its_tasks_have() -> None:
    paths = submitted()
    for index in (1, 4, 6):
        assert not snapshot.has_recorded_end(paths)
        has_run(paths, index, "SUCCEEDED", ended=1.0)
    assert snapshot.has_recorded_end(paths)
    only = snapshot.folder_of("12_4")
    assert only is not None
    assert snapshot.has_recorded_end(only)
    assert (only.app, only.request) == (paths.app, paths.request)


def test_another_machines_array_is_known_by_what_slurm_says() -> None:
    app = known(JobFolder("/nonexistent/of-somebody"), [slurm("RUNNING", 3), slurm("PENDING", 4, 5)])
    assert list(app.tasks) == [3, 4, 5]
    assert app.state is State.RUNNING
