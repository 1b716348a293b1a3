# SPDX-License-Identifier: BSD-3-Clause
"""The torchx command with monarch_local, as a person uses it: every command in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from torchx.runner import Runner

from tests.contract.place import TORCHX
from tests.fork_server import run_torchx
from tests.local.terminal import Terminal
from tests.waits import WITHIN, until
from torchx_monarch.schedulers import monarch_local

RUN = [*TORCHX, "run", "-s", "monarch_local"]
torchx = partial(run_torchx, seconds=WITHIN, check=True)
run = partial(torchx, "run", "-s", "monarch_local")


def state(handle: str) -> str:
    """Return an app's state; asked in this process, as it may be asked until it changes."""
    with Runner("torchx", {"monarch_local": monarch_local}) as runner:
        status = runner.status(handle)
    assert status is not None
    return str(status.state)


def folder(handle: str) -> Path:
    return Path(os.environ["MONARCH_STATE_DIR"], "apps", handle.rpartition("/")[2])


@pytest.fixture
def work(tmp_path: Path) -> Path:
    path = tmp_path / "work dir"
    path.mkdir()
    return path


def write(work: Path, text: str, name: str = "prog.py") -> str:
    (work / name).write_text("import os, sys, time, signal\n" + text)
    return name


@pytest.mark.parametrize(("body", "cause"), [("raise OSError('no disk')", "OSError: no disk"), ("sys.exit(0)", "")])
def test_the_caller_gets_the_root_cause_in_its_error_file(
    work: Path, body: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error_file = work / "caller.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    run("--wait", "-cfg", "preload=none", "monarch.spmd", write(work, body), cwd=work, check=False)
    assert error_file.exists() is bool(cause)
    if cause:
        message = json.loads(error_file.read_text())["message"]
        assert cause in message["message"] and cause in message["extraInfo"]["py_callstack"]
        assert message["errorCode"] == 1


def last_screen(stderr: str) -> list[str]:
    """Return the lines of the summary, which nothing follows."""
    lines = stderr.splitlines()
    start = max(index for index, line in enumerate(lines) if re.match("(SUCCEEDED|FAILED|CANCELLED) after ", line))
    return lines[start:]


def test_the_last_screen_of_a_failed_run(work: Path) -> None:
    name = write(work, "if os.environ['RANK'] == '1': raise ValueError('boom ' * 60)\ntime.sleep(1000)")
    words = ("--wait", "--log", "-cfg", "preload=none", "monarch.spmd", "--max_restarts", "1", name)
    done = run(*words, cwd=work, check=False)
    handle = done.stdout.strip()
    summary = last_screen(done.stderr)
    assert summary[0].startswith("FAILED after ") and summary[0].endswith(f" s: {handle}")
    assert summary[1].startswith("  cause:  rank 1 (local rank 1 on ") and "ValueError: boom" in summary[1]
    assert summary[2] == f"  raised: {work}/prog.py, line 2, in <module>"
    assert summary[3] == f"  log:    {folder(handle)}/logs/prog/0/attempt_1/1/stderr.log"
    assert summary[4:] == [
        "  ran:    1 host x 2 ranks, 1 restart",
        f"  next:   torchx log {handle}/prog/0",
        f"          torchx monarch report {handle} -o job.html",
    ]
    rest = done.stderr[done.stderr.index("job finished") :].split("\nFAILED after ")[0].splitlines()
    torchx_said = [line for line in rest if line and not line.startswith("prog/0 ")]  # the log may lag behind the state
    assert len(torchx_said) <= 8 and "{" not in "".join(torchx_said)
    assert "python/object" not in done.stderr
    assert os.path.exists(summary[3].split()[1])


def test_the_last_screen_of_a_run_that_succeeded_ends_with_what_to_type(work: Path) -> None:
    done = run("--wait", "-cfg", "preload=none", "monarch.spmd", "-j", "2x1", write(work, ""), cwd=work)
    handle = done.stdout.strip()
    assert last_screen(done.stderr)[1:] == [
        f"  log:    {folder(handle)}/logs",
        "  ran:    2 hosts x 1 rank, no restart",
        f"  next:   torchx log {handle}",
        f"          torchx monarch report {handle} -o job.html",
    ]
    assert "\x1b" not in "\n".join(last_screen(done.stderr))


def test_progress_lines_precede_the_output_that_they_announce(work: Path) -> None:
    options = ("--wait", "--log", "-cfg", "preload=none")
    done = run(*options, "monarch.spmd", "--nproc", "4", write(work, "print('out')"), cwd=work)
    lines = [line for line in done.stderr.splitlines() if line.startswith("prog/0 ")]
    assert all(re.match(r"prog/0 \[([0-3]|monarch)\] ", line) for line in lines)
    assert any(line.endswith("[0] out") for line in lines)
    lines = [line.split(" ", 1)[1] for line in lines]
    kinds = ["ranks" if "ranks 4/4" in line else "first" if "first output" in line else line[:2] for line in lines]
    assert kinds[kinds.index("ranks") :][:2] == ["ranks", "first"]
    assert kinds.index("ranks") < min(kinds.index(line) for line in kinds if line in ("[0", "[1", "[2", "[3"))


def test_other_components_run_unchanged(work: Path) -> None:
    name = write(work, "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    words = ("--wait", "--log", "-cfg", "preload=none")
    done = run(*words, "dist.torchrun", "-j", "2x2", "--script", name, cwd=work)
    assert len(re.findall(r"rank \d of 4", done.stderr)) == 4
    done = run(*words, "utils.python", "--script", name, cwd=work)
    assert "rank 0 of 1" in done.stderr
    assert "hello" in run(*words, "utils.echo", "--msg", "hello", cwd=work).stderr


def test_dryrun_as_json(work: Path) -> None:
    done = run("--dryrun", "--json", "monarch.spmd", "-j", "2x2", "train.py", cwd=work)
    shown = json.loads(done.stdout)
    assert shown["app"]["roles"][0]["entrypoint"] == "torchrun"
    assert "torchx_monarch.host" in json.dumps(shown["request"])
    assert "No apps" not in torchx("list", "-s", "monarch_local").stdout


def test_waits_without_a_stderr(work: Path) -> None:
    name = write(work, "time.sleep(1.5)")
    words = [*RUN, "--wait", "-cfg", "preload=none", "monarch.spmd", "-j", "1", name]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *words], cwd=work, stdout=subprocess.PIPE, timeout=WITHIN
    )
    assert done.returncode == 0
    assert state(done.stdout.decode().strip()) == "SUCCEEDED"


@pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
def test_terminal_shows_the_phases_and_ctrl_c_cancels(work: Path) -> None:
    name = write(work, "print('ready', flush=True)\ntime.sleep(1000)\n")
    terminal = Terminal([*RUN, "--wait", "-cfg", "preload=none", "monarch.spmd", name], work)
    until(lambda: terminal.shows("first output"), "the phases")
    for phase in ("hosts 1/1 (", "ranks 2/2 ("):
        assert phase in terminal.text
    terminal.type("\x03")
    assert terminal.wait() == 130
    assert "cancelling monarch_local://torchx/" in terminal.text
    assert "Traceback" not in terminal.text
    assert "\x1b[33mCANCELLED\x1b[0m after " in terminal.text[terminal.text.index("cancelling") :]
    handle = re.findall(r"monarch_local://torchx/[\w-]+", terminal.text)[0]
    assert state(handle) == "CANCELLED"


@pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
def test_second_ctrl_c_kills(work: Path) -> None:
    name = write(work, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(1000)\n")
    terminal = Terminal([*RUN, "--wait", "--log", "-cfg", "preload=none,grace=600", "monarch.spmd", name], work)
    until(lambda: terminal.shows("ready"), "the ranks")
    assert terminal.text.count("hosts 1/1") == 1  # in the log, and not a second time
    terminal.type("\x03")
    until(lambda: terminal.shows("cancelling"), "the first Ctrl-C's answer")
    terminal.type("\x03")
    assert terminal.wait() == 130
    assert "killing monarch_local" in terminal.text


@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGTERM, ["--wait"]), (signal.SIGHUP, ["--wait", "--log"]), (signal.SIGTERM, ["--stdin"])],
)
def test_a_signal_to_a_command_that_waits_ends_its_job(work: Path, number: signal.Signals, options: list[str]) -> None:
    """The ranks have their grace, and the command lives as long as they do."""
    text = """
def stop(*_):
    open('told', 'w').close()
    time.sleep(1)
    open('stopped', 'w').close()
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
open('ready', 'w').close()
time.sleep(1000)
"""
    words = [*RUN, *options, "-cfg", "preload=none", "monarch.spmd", "--nproc", "1", write(work, text)]
    in_json = {
        "component_name": "monarch.spmd",
        "component_args": {"script": "prog.py", "nproc": "1"},
        "scheduler": "monarch_local",
        "scheduler_args": {"preload": "none"},
        "wait": True,
    }
    (work / "run.json").write_text(json.dumps(in_json))
    # What nohup ignores would be ignored here, too.
    begin = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
    whole = [sys.executable, "-c", begin, *([*TORCHX, "run", "--stdin"] if options == ["--stdin"] else words)]
    with (
        (work / "run.json").open() as given,
        subprocess.Popen(whole, cwd=work, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command,
    ):
        until((work / "ready").exists, "the rank")
        command.send_signal(number)
        until((work / "told").exists, "the signal")
        command.send_signal(signal.SIGHUP)  # a closed terminal says it twice
        out, err = command.communicate(timeout=WITHIN)
    assert command.returncode == 128 + number, err.decode()
    assert (work / "stopped").exists()
    handle = re.findall(r"monarch_local://torchx/[\w-]+", out.decode())[0]
    assert f"cancelling {handle} ({number.name})" in err.decode() and b"Traceback" not in err
    assert b"cause:  cancelled: " in err and b"without --wait and --log goes on" in err
    assert state(handle) == "CANCELLED"


def test_jobs_at_once_have_ports_of_their_own(work: Path) -> None:
    # Each job takes its MASTER_PORT as a TCPStore does: SO_REUSEADDR, then listen, on all addresses.
    name = write(
        work,
        "import socket\ns = socket.socket()\ns.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "s.bind(('', int(os.environ['MASTER_PORT'])))\ns.listen()\nprint('port', s.getsockname()[1])\n"
        "time.sleep(2)\n",
    )
    script = (
        "import sys; from torchx.runner import get_runner; from torchx.specs import AppDef, Role\n"
        "runner = get_runner()\n"
        "app = AppDef('many', roles=[Role('one', image='', entrypoint='python', args=sys.argv[1:])])\n"
        "handles = [runner.run(app, 'monarch_local', cfg={'preload': 'none'}) for _ in range(3)]\n"
        "states = [str(runner.wait(handle, wait_interval=0.2).state) for handle in handles]\n"
        "print(states.count('SUCCEEDED'), len(set(handles)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, name], cwd=work, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["3", "3"], done.stderr[-2000:]
