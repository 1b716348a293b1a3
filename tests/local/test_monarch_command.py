# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch ls``, ``status`` and ``logs`` of real jobs, their JSON and their exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.contract.place import TORCHX
from tests.fork_server import run_torchx
from tests.unit.test_json_page import documented
from tests.waits import WITHIN, until
from torchx_monarch.backends.core import state_files
from torchx_monarch.cli import exit_codes

PROGRAM = """
import os, sys, time
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for number in range(3):
    time.sleep(0.05 + 0.05 * int(rank))
    print("step", number, "of attempt", attempt, flush=True)
open(f"steps_{rank}", "w").close()
if rank == "1" and attempt == 0:
    while not all(os.path.exists(f"steps_{other}") for other in range(4)):
        time.sleep(0.01)
    raise ValueError("boom\\x1b[31m")
while not os.path.exists("go on"):
    time.sleep(0.1)
print("the end", flush=True)
"""


def torchx(*words: str, code: int = 0, cwd: Path | None = None) -> str:
    """The standard output of a command that exits with this code; its standard error where it is to fail."""
    done = run_torchx(*words, cwd=cwd, seconds=WITHIN)
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback (most recent call last)" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def monarch(*words: str, **more: Any) -> str:
    return torchx("monarch", *words, **more)


def objects(*words: str) -> Any:
    return json.loads(monarch(*words, "--json"))


def submit(work: Path, *words: str, program: str = PROGRAM, script: str = "prog.py") -> str:
    (work / script).write_text(program)
    run = ("run", "-s", "monarch_local", "-cfg", "preload=none,grace=2", "monarch.spmd", *words)
    return torchx(*run, script, cwd=work).strip()


def test_a_job_from_its_start_to_its_end(tmp_path: Path) -> None:
    handle = submit(tmp_path, "--name", "trainer", "-j", "2x2", "--max_restarts", "2")
    follower = subprocess.Popen([*TORCHX, "monarch", "logs", "-f", "trainer"], stdout=subprocess.PIPE, text=True)
    watcher = subprocess.Popen(
        [*TORCHX, "monarch", "status", "--watch", "--json", "last"], stdout=subprocess.PIPE, text=True
    )
    until(lambda: monarch("logs", handle).count("step 2 of attempt 1") == 4, "the second attempt")

    status = objects("status", "trainer")
    assert (status["handle"], status["name"], status["state"], status["phase"]) == (
        *(handle, "trainer", "RUNNING", "running"),
    )
    assert [status[name] for name in ("attempt", "attempts", "restarts", "hosts", "ranks")] == [2, 3, 1, 2, 4]
    assert "ValueError: boom\\x1b[31m" in status["last_failure"]["message"]
    assert status["last_output"] and status["elapsed"] and Path(status["log_folder"]).is_dir()
    assert status["roles"][0]["command"].endswith("prog.py")
    shown = monarch("status", handle)
    assert "  attempt      2 of 3\n" in shown and "\x1b" not in shown
    assert "attempt 2 of 3; 4 ranks on 2 hosts" in " ".join(torchx("status", "trainer").split())

    look = objects("top", handle, "--once")
    assert [row["state"] for row in look["status"]["activity"]] == ["running"] * 4 and not look["missing"]
    assert "step 2 of attempt 1" in monarch("top", "--once", handle)

    (listed,) = objects("ls")
    assert set(listed) == set(status) == documented("status, ls, wait") and listed["handle"] == handle
    table = monarch("ls").splitlines()
    assert table[0].split() == ["ID", "STATE", "AGE", "TIME", "CODE", "HOSTS"]
    assert table[1].startswith(handle.rpartition("/")[2]) and table[1].endswith("2x2")

    (tmp_path / "go on").touch()
    out, _ = follower.communicate(timeout=WITHIN)
    assert out.count("the end\n") == 4 and out.count("step 0 of attempt 0") == 4
    records = [json.loads(line) for line in watcher.communicate(timeout=WITHIN)[0].splitlines()]
    assert records[-1]["state"] == "SUCCEEDED" and records[-1]["exit_code"] == 0
    assert (follower.returncode, watcher.returncode) == (0, 0)
    ended = objects("status", handle)
    assert (ended["exit_code"], ended["phase"], ended["live"]) == (0, None, None)
    assert monarch("ls").splitlines()[1].split()[-2:] == ["0", "2x2"]


def test_a_job_is_cancelled_waited_for_and_deleted_by_its_name(tmp_path: Path) -> None:
    program = "import time; print('up', flush=True); time.sleep(600)"
    handle = submit(tmp_path, "--nproc", "1", "--name", "sleeper", program=program)
    until(lambda: "up" in monarch("logs", handle), "the rank")
    absent = "not among the ranks that run: ranks 3-4. They are rank 0"
    assert absent in monarch("profile", "--rank", "3,4", "--seconds", "1", code=exit_codes.UNAVAILABLE)
    assert "rank 3. They are rank 0" in monarch("stacks", "--rank", "3", code=exit_codes.UNAVAILABLE)
    assert f"torchx delete --force {handle}" in torchx("delete", "sleeper", code=1)
    assert run_torchx("cancel", "slee").stderr == f"cancelled {handle}\n"
    assert run_torchx("monarch", "wait").returncode == 1
    assert objects("status")["state"] == "CANCELLED"
    for command in ("stacks", "profile"):
        assert f"where its ranks were last: torchx monarch report {handle}" in monarch(
            command, code=exit_codes.UNAVAILABLE
        )
    assert f"{handle} had ended before: CANCELLED" in run_torchx("monarch", "cancel", "last").stderr
    assert run_torchx("monarch", "delete", handle).stderr == f"deleted {handle} and its logs\n"
    assert "no app was submitted" in torchx("status", "last", code=exit_codes.UNKNOWN_APP)


def test_a_command_without_ranks(tmp_path: Path) -> None:
    handle = torchx("run", "-s", "monarch_local", "utils.sh", "sleep", "600", cwd=tmp_path).strip()
    until(lambda: objects("status", handle)["phase"] == "running", "its start")
    assert f"  replicas     sh/0 RUNNING on {os.uname().nodename}\n" in monarch("status", handle, "--roles", "sh")
    assert "has no role 'hs'; its roles are sh" in monarch("status", handle, "--roles", "hs", code=exit_codes.USAGE)
    torchx("cancel", handle)


def test_ls_and_status_agree_on_a_restarted_job(tmp_path: Path) -> None:
    program = """
import os, time
if not os.path.exists("failed"):
    open("failed", "w").close()
    raise ValueError("loss is nan")
while not os.path.exists("go on"):
    time.sleep(0.1)
"""
    handle = submit(tmp_path, "--nproc", "1", "--max_retries", "1", program=program)
    until(lambda: [objects("status", handle)[name] for name in ("restarts", "phase")] == [1, "running"], "a restart")
    status, (listed,) = objects("status", handle), objects("ls")
    assert "ValueError: loss is nan" in status["last_failure"]["message"]
    assert "ValueError: loss is nan" in monarch("top", "--once", handle)
    assert listed["started"] == status["started"] < status["last_failure"]["time"]
    (tmp_path / "go on").touch()
    until(lambda: objects("status", handle)["state"] == "SUCCEEDED", "the end")
    status, (listed,) = objects("status", handle), objects("ls")
    assert (listed["started"], listed["elapsed"]) == (status["started"], status["elapsed"])
    monarch("report", handle, "-o", str(tmp_path / "report.html"))
    assert "last failure" in (tmp_path / "report.html").read_text()


def test_the_logs_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "go on").touch()
    much = PROGRAM + "\nfor _ in range(10): print('much ' * 5000, flush=True)"
    handle = submit(tmp_path, "-j", "2x2", "--max_restarts", "1", script="gpt2.py", program=much)
    lines = [json.loads(line) for line in monarch("logs", handle, "--follow", "--json").splitlines()]
    lines = [json.loads(line) for line in monarch("logs", handle, "--json").splitlines()]
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert all(set(line) == documented("logs") for line in lines)
    assert {(line["replica"], line["rank"]) for line in lines if line["rank"] is not None} == {
        *((0, 0), (0, 1), (1, 2), (1, 3)),
    }
    plain = monarch("logs", handle).splitlines()
    assert len(plain) == len(lines)
    printed = sum(len(line["text"]) + 1 for line in lines if line["rank"] is not None)
    logs = Path(state_files.app_paths(handle.rpartition("/")[2]).logs).rglob("*")
    kept = [path for path in logs if path.suffix in (".log", ".idx")]
    assert 1_000_000 < printed < sum(path.stat().st_size for path in kept) < 1.1 * printed
    assert "[3] step 0 of attempt 1" in plain and any(line.startswith("gpt2/0 [monarch] ranks 4/4") for line in plain)
    assert "gpt2/1 [3] step 0 of attempt 1\n" in torchx("log", handle)
    chosen = monarch("logs", handle, "--rank", "0,2-3", "-n", "9").splitlines()
    ranks = {line.partition(" ")[0] for line in chosen}
    assert len(chosen) == 9 and ranks <= {"[0]", "[2]", "[3]"}
    assert monarch("logs", handle, "-n", "5").splitlines() == plain[-5:]
    assert monarch("logs", handle, "-n", "0") == ""
    stamped = monarch("logs", handle, "--timestamps", "-n", "1")
    assert stamped.partition(" ")[0].endswith("Z") and stamped.partition(" ")[2] == plain[-1] + "\n"
    assert monarch("logs", handle, "--since", "2000-01-01") == monarch("logs", handle)
    assert monarch("logs", handle, "--since", "2100-01-01") == ""
    assert "has no role 'nobody'; its roles are gpt2" in monarch("logs", handle, "--role", "nobody", code=64)
    for wrong in ("a-b", "3-1"):
        assert "is no list of ranks" in monarch("logs", handle, "--rank", wrong, code=2)
    for wrong in ("7", "0,2-4"):
        assert f"{handle} has no rank {wrong[-1]}; it has ranks 0-3" in monarch(
            "logs", handle, "--rank", wrong, code=64
        )


def test_an_interrupted_follower_leaves_the_job_running(tmp_path: Path) -> None:
    handle = submit(tmp_path, "-j", "1", program="import time; time.sleep(600)")
    follower = subprocess.Popen([*TORCHX, "monarch", "logs", "-f", handle], stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None
    assert follower.stdout.readline()
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=WITHIN)
    assert follower.returncode == 128 + signal.SIGINT
    text = monarch("stop", handle, code=exit_codes.UNAVAILABLE)
    assert text == f"[monarch] {handle} is not a live allocation; to end it: torchx cancel {handle}\n"
    text = monarch("ps", handle, code=exit_codes.UNAVAILABLE)
    assert "is not a live allocation, and takes no runs" in text and "torchx monarch status prog-" in text
    text = monarch("exec", handle, "--", "python", "x.py", code=exit_codes.UNAVAILABLE)
    assert "to get one: torchx run -s monarch_local monarch.hosts -j 1x4" in text
    for command in ("debug", "exec", "profile", "ps", "stacks", "stop", "top"):
        assert "has no role 'nobody'" in monarch(command, handle, "--role", "nobody", code=exit_codes.USAGE)
    status = objects("status", handle)
    assert (status["state"], status["restarts"]) == ("RUNNING", 0)
    torchx("cancel", handle)
    status = objects("status", handle)
    assert (status["state"], status["exit_code"]) == ("CANCELLED", None)
    done = run_torchx("monarch", "logs", handle, "--rank", "0", seconds=WITHIN)
    assert done.stdout == "" and "no line of this log is of these ranks. Lines name their rank with" in done.stderr


def test_apps_that_do_not_exist(tmp_path: Path) -> None:
    for command in ("status", "logs", "ps", "follow", "stop"):
        assert "no app was submitted" in monarch(command, "last", code=exit_codes.UNKNOWN_APP)
        assert "there is no app 'nobody'" in monarch(command, "nobody", code=exit_codes.UNKNOWN_APP)
    for command in ("status", "logs"):
        text = monarch(command, "monarch_local://torchx/nobody", code=exit_codes.UNKNOWN_APP)
        assert "there is no app 'monarch_local://torchx/nobody'" in text and len(text.splitlines()) <= 12
        assert "there is no scheduler" in monarch(command, "nowhere://torchx/x", code=exit_codes.USAGE)
    for command in ("cancel", "debug", "delete", "follow", "profile", "ps", "stacks", "stop"):
        text = monarch(command, "monarch_local://torchx/nobody", code=exit_codes.UNKNOWN_APP)
        assert "there is no app 'monarch_local://torchx/nobody'" in text
    assert "is not of the form" in monarch("status", "a://b", code=exit_codes.USAGE)
    assert "another package" in monarch("status", "local_cwd://torchx/x", code=exit_codes.USAGE)


def test_schedulers_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    assert monarch("ls").splitlines() == ["ID  STATE  AGE  TIME  CODE  HOSTS"]  # never used, and not asked
    text = monarch("ls", "-s", "monarch_docker", code=exit_codes.UNAVAILABLE)
    assert len(text.splitlines()) == 1 and "no Docker daemon" in text
    used = Path(os.environ["MONARCH_STATE_DIR"], "clients", "monarch_docker")
    used.mkdir(parents=True)
    (used / "train-x7").write_text("{}")
    done = run_torchx("monarch", "ls")  # where Docker's client has been imported: each scheduler has 20 s to answer
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("[monarch] monarch_docker is left out: there is no Docker daemon")
    assert "there is no scheduler nobody." in monarch("ls", "-s", "nobody", code=exit_codes.USAGE)


def test_a_live_allocation(tmp_path: Path) -> None:
    (tmp_path / "go on").touch()
    (tmp_path / "prog.py").write_text(PROGRAM)
    torchx("run", "-s", "monarch_local", "-cfg", "preload=none", "monarch.hosts", "-j", "1x2", cwd=tmp_path)
    command = ["last", "--json", "--workspace", "", "--", "torchrun", "--nproc-per-node", "1", "prog.py"]
    records = [json.loads(line) for line in monarch("exec", *command, cwd=tmp_path).splitlines()]
    handle = records[0]["handle"]
    assert records[0] == {"type": "accepted", "handle": handle, "run": 1}
    assert {record["type"] for record in records} >= {"accepted", "phase", "output", "result"}
    result = records[-1]
    assert (result["exit_code"], result["handle"], [rank["rank"] for rank in result["ranks"]]) == (0, handle, [0])
    again = [json.loads(line) for line in monarch("follow", "hosts", "1", "--json").splitlines()]
    assert again[-1] == result
    command[1:1] = ["--detach"]
    assert json.loads(monarch("exec", *command, cwd=tmp_path)) == {"type": "accepted", "handle": handle, "run": 2}
    until(lambda: [run["state"] for run in objects("ps", "last")] == ["succeeded"] * 2, "the second run")
    printed = ["[step10]: loss=10\n", "[rank0]: 2026-11-25T10:00:00.123Z\n", *["much\n"] * 50_000]
    (tmp_path / "print.py").write_text(f"print({''.join(printed[:2])!r}, 'much\\n' * 50_000, sep='', end='')")
    torchrun = ["--workspace", "", "--", "torchrun", "--nproc-per-node", "1"]
    for more, lead in (((), ""), (("--tee", "3"), "[0] ")):
        said = monarch("exec", "last", *torchrun, *more, "print.py", cwd=tmp_path)
        assert said == "".join(lead + line for line in printed)
    files = Path(state_files.app_paths(handle.rpartition("/")[2]).logs, "hosts/0/run_4")
    assert sum(path.stat().st_size for path in files.rglob("*") if path.is_file()) < 1.1 * len("".join(printed))
    assert [run["run"] for run in objects("ps")] == [1, 2, 3, 4]
    live = objects("status", "hosts")["live"]
    assert (live["ready"], live["runs"], [run["run"] for run in live["last_runs"]]) == (True, 4, [1, 2, 3, 4])
    assert "  runs         4 so far\n" in monarch("status", handle)
    assert "the following arguments are required: HANDLE" in monarch("stop", code=2)
    run = {"handle": handle, "stopped": "run"}
    assert objects("stop", "last", "--run", "2") == {**run, "run": 2}
    assert objects("stop", "last") == {"handle": handle, "stopped": "allocation", "run": None}
    until(lambda: objects("status", handle)["state"] != "RUNNING", "the end of the hosts")
    assert objects("status", handle)["live"] is None
