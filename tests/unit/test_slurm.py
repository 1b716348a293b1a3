# SPDX-License-Identifier: BSD-3-Clause
"""Slurm's pure parts: what is submitted, what Slurm's commands (of 22.05) say, what a job's state is."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, InvalidRunConfigException, Resource, RetryPolicy, Role
from torchx.specs.finder import ComponentValidationException

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.slurm import folder, job_state, macros, native, prune, snapshot, states
from torchx_monarch.backends.slurm.backend import SlurmBackend
from torchx_monarch.backends.slurm.macros import first_node
from torchx_monarch.backends.slurm.native import Job
from torchx_monarch.backends.slurm.records import BatchRecord
from torchx_monarch.backends.slurm.request import SlurmRequest
from torchx_monarch.model import codec
from torchx_monarch.model.role_spec import RetryPolicy as SpecPolicy
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers import monarch_slurm
from torchx_monarch.transport import credentials

PENDING = (
    "JobId=17 JobName=app UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901743 Nice=0 Account=root "
    "QOS=normal JobState=PENDING Reason=Resources Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 "
    "ExitCode=0:0 RunTime=00:00:00 TimeLimit=UNLIMITED StartTime=Unknown EndTime=Unknown Partition=main "
    "ReqNodeList=(null) ExcNodeList=(null) NodeList= NumNodes=4-4 NumCPUs=4 NumTasks=4 CPUs/Task=1 "
    "ReqB:S:C:T=0:0:*:* TRES=cpu=4,mem=24000M,node=4,billing=4 Command=/tmp/s.sh WorkDir=/tmp "
    "Comment=torchx-monarch:/x  StdErr=/tmp/slurm-17.out StdIn=/dev/null StdOut=/tmp/slurm-17.out Power= \n"
)
COMPONENTS = (
    "JobId=15 HetJobId=15 HetJobOffset=0 JobName=two HetJobIdSet=15-16 UserId=root(0) JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 ExitCode=0:0 NodeList=n[1-2] BatchHost=n1 NumNodes=2 "
    "Command=/tmp/s.sh WorkDir=/tmp Comment=my job JobState=x=1 torchx-monarch:/a b/c  StdErr=/tmp/o Power= \n"
    "JobId=16 HetJobId=15 HetJobOffset=1 JobName=two HetJobIdSet=15-16 UserId=root(0) JobState=RUNNING Reason=None "
    "Requeue=1 Restarts=2 ExitCode=0:0 NodeList=n3 BatchHost=n3 Comment=my job  StdErr=/tmp/slurm-16.out Power= \n"
)
KILLED = "JobId=1 JobName=a JobState=CANCELLED Reason=None Restarts=1 ExitCode=0:9 NodeList=(null) Power= \n"


@pytest.fixture
def runner() -> Runner:
    return Runner("torchx", {"monarch_slurm": monarch_slurm})


def app(replicas: int = 2, **more: Any) -> AppDef:
    args = ["--nnodes", str(replicas), "--nproc-per-node", "2", "train.py"]
    resource = Resource(cpu=3, gpu=2, memMB=2048)
    trainer = Role(
        "trainer", image="", entrypoint="torchrun", args=args, num_replicas=replicas, resource=resource, **more
    )
    reader = Role("reader", image="", entrypoint="sh", args=["-c", "echo ${replica_id} $$x ${app_id}"], num_replicas=3)
    return AppDef("my app", [trainer, reader])


def dryrun(runner: Runner, app: AppDef, **cfg: Any) -> SlurmRequest:
    request: SlurmRequest = runner.dryrun(app, "monarch_slurm", cfg=cfg).request
    return request


def test_one_component_for_each_role_however_many_replicas(runner: Runner) -> None:
    request = dryrun(runner, app(500))
    command = request.command("job.sh")
    assert command.count(":") == 1
    assert [word for word in command if word.startswith("--nodes=")] == ["--nodes=500", "--nodes=3"]
    assert len(str(request)) < 10_000


def test_command_line_says_what_is_asked_for(runner: Runner) -> None:
    options = {
        "partition": "p",
        "account": "a",
        "qos": "q",
        "time": "1:00:00",
        "constraint": "c&d",
        "reservation": "r",
        "mail-user": "me@x",
        "mail-type": "END",
        "comment": "it's mine",
        "exclusive": True,
        "exclude_nodes": "n7+n[1-3]",
        "signal": "B:TERM@60",
    }
    request = dryrun(runner, app(), **options)
    first, second = " ".join(request.command("job.sh")).split(" : ")
    for name in (
        "partition",
        "account",
        "qos",
        "time",
        "constraint",
        "reservation",
        "mail-user",
        "mail-type",
        "signal",
    ):
        assert f"--{name}={options[name]}" in first
        assert f"--{name}={options[name]}" in second
    assert f"--comment=it's mine torchx-monarch:{request.folder}" in first
    assert "--exclusive" in first and "--exclude=n7,n[1-3]" in first
    for words in ("--cpus-per-task=3", "--mem=2048", "--gres=gpu:2", "--job-name=my-app", "--no-requeue"):
        assert words in first.split()
    assert "--gres" not in second
    assert dryrun(runner, app(), gres="gpu:a100:4").command("x").count("--gres=gpu:a100:4") == 1
    assert "--mem" not in " ".join(dryrun(runner, app(), nomem=True).command("x"))


def test_a_job_with_spare_nodes_goes_on_without_a_lost_one(runner: Runner) -> None:
    spared = dryrun(runner, app(), spares=1)
    for role, words in zip(spared.roles, " ".join(spared.command("job.sh")).split(" : "), strict=True):
        assert ("--no-kill" in words.split()) == ("no-kill" in role.srun) == (role.spec.spares == 1)
        assert f"--nodes={role.spec.replicas}" in words
    assert [role.spec.spares for role in spared.roles][0] == 1
    assert "--no-kill" not in dryrun(runner, app()).command("x")


def test_requeue_follows_max_retries_unless_it_is_said(runner: Runner) -> None:
    assert not dryrun(runner, app()).requeue
    assert dryrun(runner, app(max_retries=1)).requeue
    assert not dryrun(runner, app(max_retries=1), requeue=False).requeue
    assert "--requeue" in dryrun(runner, app(), requeue=True).command("x")


def test_dry_run_shows_what_runs_and_no_secret(runner: Runner) -> None:
    request = dryrun(runner, app(env={"A": "x y"}))
    shown = str(request)
    assert "torchx_monarch.host" in shown
    assert "export A='x y'" in shown
    assert "tls:@MONARCH_REPLICA0_0:" in shown
    assert "MONARCH_CREDENTIALS" not in shown
    hosts, _ = credentials.create()
    substitute = request.with_credentials(hosts.to_text())
    assert [role.env.get("MONARCH_CREDENTIALS") for role in substitute.roles] == [hosts.to_text(), None]
    assert "MONARCH_CREDENTIALS" not in request.roles[0].env
    # Neither the command line nor the script, which Slurm keeps, hold what is for the hosts alone.
    for public in (shlex.join(substitute.command("x")), substitute.script, str(request)):
        assert hosts.to_text() not in public
        assert "x y" not in public or public == str(request)
    assert codec.decode(SlurmRequest, json.loads(json.dumps(asdict(substitute)))) == substitute


def test_hosts_look_after_each_other_and_other_programs_do_not(runner: Runner) -> None:
    trainer, reader = dryrun(runner, app(max_retries=2, retry_policy=RetryPolicy.REPLICA)).roles
    assert (trainer.srun["kill-on-bad-exit"], reader.srun["kill-on-bad-exit"]) == ("0", "1")
    assert (trainer.spec.retry_policy, trainer.spec.max_retries) == (SpecPolicy.REPLICA, 2)
    assert (trainer.spec.workload, reader.spec) == (WorkloadKind.RANKS, RoleSpec("reader", 3))
    assert "--replacements" in trainer.command


def test_macros_are_filled_in_on_the_node(runner: Runner) -> None:
    _, reader = dryrun(runner, app()).roles
    command, _ = macros.substitute(reader.command, reader.env, reader.image, "42", 2)
    assert command == ["sh", "-c", "echo 2 $x 42"]
    trainer, _ = dryrun(runner, app(env={"WHERE": "${rank0_env}", "K": "${replica_id}$$"})).roles
    _, env = macros.substitute(trainer.command, trainer.env, trainer.image, "42", 1)
    assert (env["WHERE"], env["K"], env["TORCHX_JOB_ID"]) == ("TORCHX_RANK0_HOST", "1$", "monarch_slurm://torchx/42")


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        ({"partitoin": "x"}, "partitoin.*partition"),
        ({"retry": "later"}, "`retry` is 'later'; allowed are in_place and requeue"),
        ({"signal": "USR1@60"}, "`signal` is 'USR1@60'; allowed is B:TERM@SECONDS"),
        ({"grace": -1}, "`grace` is -1"),
    ],
)
def test_senseless_options_are_refused(runner: Runner, cfg: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRunConfigException, match=words):
        runner.dryrun(app(), "monarch_slurm", cfg=cfg)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,m2", "n1"),
        ("n[08-11,20],m1", "n08"),
        ("n[3,7]", "n3"),
        ("rack[1-2]n[04-09]-ib,x", "rack1n04-ib"),
        ("gpu-a[1-2].example.org", "gpu-a1.example.org"),
    ],
)
def test_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_missing_commands_are_named(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ComponentValidationException, match="'sbatch' is not on the PATH.*slurm-client"):
        runner.run(app(), "monarch_slurm")
    assert folder.job_folders() == {}
    with pytest.raises(RuntimeError, match="'scontrol' is not on the PATH"):
        runner.status("monarch_slurm://torchx/1")
    assert runner.status("monarch_slurm://torchx/nonsense") is None


def test_ctrl_c_while_sbatch_answers_leaves_nothing(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    scripts = {"sbatch": "kill -INT $PPID; sleep 0.5; echo 7", "scancel": f"echo $@ >{tmp_path}/cancelled"}
    for name in ("sbatch", "scancel", "scontrol", "squeue", "sacct", "sinfo"):
        (tools / name).write_text(f"#!/bin/sh\n{scripts.get(name, '')}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # TorchX's local scheduler may have set another
    try:
        with pytest.raises(KeyboardInterrupt):
            runner.run(app(), "monarch_slurm", cfg={"job_dir": str(tmp_path / "jobs")})
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (tmp_path / "cancelled").read_text() == "7\n"
    assert folder.job_folders() == {} and list((tmp_path / "jobs").iterdir()) == []


def test_hosts_meet_at_the_node_of_replica_0() -> None:
    assert SlurmBackend().replica0_host(app(), 1) == "@MONARCH_REPLICA0_1"


def test_submitting_within_a_job_does_not_inherit_its_shape() -> None:
    inside = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_CONF": "/c", "MONARCH_CREDENTIALS": "x", "HOME": "/h"}
    assert native.client_environment(inside) == {"SLURM_CONF": "/c", "HOME": "/h"}
    outside = {"SLURM_TIME_FORMAT": "relative", "HOME": "/h"}
    assert native.client_environment({**outside, "SBATCH_ARRAY_INX": "0-9"}) == outside


# -- what Slurm says ---------------------------------------------------------------------------------------------------


def test_scontrol_is_read() -> None:
    (job,) = native.parse_scontrol(PENDING)
    assert (job.job_id, job.leader, job.state, job.reason, job.nodes) == ("17", "17", "PENDING", "Resources", "")
    assert job.comment == "torchx-monarch:/x"
    first, second = native.parse_scontrol(COMPONENTS)
    assert (first.leader, second.leader, second.job_id) == ("15", "15", "16")
    assert (first.nodes, second.nodes, first.restarts, first.state) == ("n[1-2]", "n3", 2, "RUNNING")
    noted = folder.folder_of_comment(first.comment)
    assert noted is not None
    assert noted.root == "/a b/c"
    (killed,) = native.parse_scontrol(KILLED)
    assert (killed.exit_code, killed.nodes) == (-9, "")


def test_owner_is_not_taken_from_what_a_user_writes() -> None:
    mine, other = f"UserId=me({os.getuid()})", f"UserId=me({os.getuid() + 4242})"
    for text, owner in (
        (f"JobId=1 JobName=x {mine} GroupId=me(0)\n", ""),
        (f"JobId=1 JobName=x {other} GroupId=me(0)\n", str(os.getuid() + 4242)),
        (f"JobId=1 JobName={mine} {other} GroupId=me(0)\n", str(os.getuid() + 4242)),
        (f"JobId=1 JobName=UserId= {other} Comment={mine}\n", str(os.getuid() + 4242)),
        (f"JobId=1 JobName=x {mine} Comment=torchx-monarch:/x\nx {other}\n", str(os.getuid() + 4242)),
        ("JobId=1 JobName=x\n", "unknown"),
    ):
        assert native.parse_scontrol(text)[0].other_user == owner


def test_sacct_is_read() -> None:
    text = (
        "3|CANCELLED by 0|0:0|n[1-2]|app\n7+0|FAILED|3:0|n1|x\n7+1|COMPLETED|0:0|n2|x\n"
        "9|PENDING|0:0|None assigned|a|b\n8_[3-5%2]|PENDING|0:0|None assigned|foreign\n8_2|FAILED|0:0|n1|foreign"
    )
    jobs = native.parse_sacct(text)
    assert set(jobs) == {"3", "7", "9"}
    ((cancelled,), (failed,), (waits,)) = jobs.values()
    assert states.to_state(cancelled.state) is State.CANCELLED
    assert (failed.state, failed.exit_code, failed.nodes) == ("FAILED", 3, "n1")
    assert waits.nodes == ""


def test_squeue_is_read_and_each_job_is_there_once() -> None:
    text = (
        "17|17|PENDING|Resources|s.sh|torchx-monarch:/x\n15|15+0|RUNNING|None|two|my|note\n16|15+1|RUNNING|None|two|x\n"
        "8|8_[3-5%2]|PENDING|None|foreign|\n9|8_2|RUNNING|None|foreign|\n"
    )
    jobs = native.parse_squeue(text)
    assert [(job.job_id, job.state, job.comment) for job in jobs] == [
        ("17", "PENDING", "torchx-monarch:/x"),
        ("15", "RUNNING", "my|note"),
    ]


def job(state: str, reason: str = "None", code: int = 0, restarts: int = -1, is_accounted: bool = False) -> Job:
    return Job("1", "1", "app", state, reason, restarts=restarts, exit_code=code, is_accounted=is_accounted)


OVER = {"state": "FAILED", "msg": "role r ended with exit code 3", "ended": 1e9}


@pytest.mark.parametrize(
    ("said", "record", "cancelled", "state", "words"),
    [
        (job("PENDING", "Resources"), {}, False, "PENDING", "waits for Resources"),
        (job("CONFIGURING"), {}, False, "PENDING", ""),
        (job("RUNNING"), {"started": 1}, False, "RUNNING", ""),
        (job("COMPLETING"), {"started": 1}, False, "RUNNING", ""),
        (job("COMPLETING"), OVER, False, "FAILED", "exit code 3"),
        # Slurm may be about to queue it again.
        (job("COMPLETING"), {**OVER, "outside": True}, False, "RUNNING", ""),
        (job("RUNNING", restarts=1), {**OVER, "requeues": 1}, False, "FAILED", "exit code 3"),
        (job("RUNNING", restarts=1), OVER, False, "RUNNING", ""),  # the record is of the run before
        (job("RUNNING"), {**OVER, "ended": 1e9 - 100}, False, "RUNNING", "job.json says FAILED"),
        (job("RUNNING"), {"state": "SUCCEEDED"}, False, "RUNNING", "job.json says SUCCEEDED"),
        (job("RUNNING", is_accounted=True), {**OVER, "ended": 1e9 - 100}, False, "FAILED", "exit code 3"),
        (job("FAILED", code=3), OVER, False, "FAILED", "exit code 3"),
        (job("FAILED", code=-9), {}, False, "FAILED", "killed by signal 9"),
        (job("FAILED", code=-10), {}, True, "CANCELLED", "cancelled"),
        (job("FAILED", code=3), OVER, True, "FAILED", "exit code 3"),
        (job("CANCELLED by 0"), {}, False, "CANCELLED", "scancel"),
        (job("CANCELLED by 0"), {}, True, "CANCELLED", "cancelled"),
        (job("TIMEOUT"), {**OVER, "outside": True}, False, "FAILED", "TIMEOUT: it ran into its time limit"),
        (job("NODE_FAIL"), {"started": 1}, False, "FAILED", "NODE_FAIL: a node"),
        (job("OUT_OF_MEMORY"), OVER, False, "FAILED", "OUT_OF_MEMORY"),
        (job("PREEMPTED"), {}, False, "FAILED", "higher priority"),
        (job("COMPLETED"), {"state": "SUCCEEDED", "msg": ""}, False, "SUCCEEDED", ""),
        (job("NEW_IN_26"), {}, False, "UNKNOWN", ""),
        (None, {"state": "SUCCEEDED", "msg": ""}, False, "SUCCEEDED", ""),
        (None, {"started": 1}, False, "FAILED", "forgotten"),
        (None, {"started": 1}, True, "CANCELLED", "cancelled"),
        (None, {}, False, "CANCELLED", "had not started"),
    ],
)
def test_state_of_a_job(said: Job | None, record: dict[str, Any], cancelled: bool, state: str, words: str) -> None:
    written = codec.decode(BatchRecord, record) if record else None
    found = job_state.derive_outcome(said, written, cancelled, now=1e9 + 1)
    assert found.state is State[state]
    assert words in found.message
    assert words or not found.message


def test_deleted_jobs_stay_deleted_while_slurm_remembers_them() -> None:
    paths = folder.JobFolder(folder.new("a b/c", None))
    assert "/a-b-c-" in paths.root
    os.makedirs(paths.root)
    folder.link_id("7", paths.root)
    assert set(folder.job_folders()) == {"7"}
    folder.delete("7", paths)
    assert folder.job_folders() == {}
    assert folder.find("7") is None
    assert snapshot.is_deleted("7", paths, [job("COMPLETED")])
    assert snapshot.is_deleted("7", paths, [job("COMPLETING")])
    assert not snapshot.is_deleted("7", paths, [job("COMPLETED"), job("RUNNING")])
    assert not snapshot.is_deleted("8", paths, [job("COMPLETED")])


def test_folders_of_jobs_that_ended_long_ago_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # prune asks Slurm about jobs without a record of their end

    def job_folder(app_id: str, days: float, ended: bool) -> folder.JobFolder:
        paths = folder.JobFolder(folder.new("app", None))
        os.makedirs(paths.root)
        folder.link_id(app_id, paths.root)
        if ended:
            state_files.write_json(paths.job, {"state": "FAILED", "ended": 1.0})
        for path in (paths.root, os.path.join(folder.ids_dir(), app_id)):
            os.utime(path, (time.time() - days * 86400,) * 2, follow_symlinks=False)
        return paths

    job_folder("1", 15, True)
    job_folder("2", 13, True)
    job_folder("3", 15, False)
    folder.remove(job_folder("4", 15, True).root)
    prune.prune()
    assert set(folder.job_folders()) == {"2", "3"}
    assert len(os.listdir(folder.jobs_dir())) == 2
    assert set(os.listdir(folder.ids_dir())) == {"2", "3"}
    monkeypatch.setenv("MONARCH_KEEP_DAYS", "12")
    prune.prune()
    assert set(folder.job_folders()) == {"3"}
