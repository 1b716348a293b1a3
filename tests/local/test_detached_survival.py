# SPDX-License-Identifier: BSD-3-Clause
"""What an app survives, and what is left of it when it does not: deaths of submitter, supervisor, machine."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torchx.specs import AppState

from tests.contract.place import TORCHX, tree
from tests.fork_server import run_torchx
from tests.local.detached import Detached, fresh, lives, pid_in, py, sh, start_fresh
from tests.waits import WITHIN, until
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.local import folder

#: A program with a child, and a grandchild that has left session and family; each writes its pid down.
FAMILY = """
import os, signal, sys, time
folder = sys.argv[1]
def note(name):
    with open(f"{folder}/{name}", "w") as file:
        file.write(f"{os.getpid()}\\n")
def endure():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1000)
if os.fork() == 0:
    note("child")
    endure()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note("orphan")
        endure()
    os._exit(0)
note("main")
endure()
"""


class Family:
    """A running app of FAMILY."""

    def __init__(self, apps: Detached, folder: Path, code: str = FAMILY) -> None:
        self.folder = folder
        self.app_id = apps.run(py(code, str(folder)))
        for name in ("main", "child", "orphan"):
            until(lambda name=name: pid_in(folder / name), name)

    @property
    def alive(self) -> list[str]:
        return [name for name in ("main", "child", "orphan") if lives(pid_in(self.folder / name))]


@pytest.fixture
def family(apps: Detached, tmp_path: Path) -> Family:
    return Family(apps, tmp_path)


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGKILL])
def test_the_submitter_dies(apps: Detached, tmp_path: Path, signum: int) -> None:
    code = f"""
import time
from torchx.specs import AppDef, Role
wait = "while ! test -e {tmp_path}/go; do sleep 0.05; done"
app = AppDef("a", [Role("r", image="", entrypoint="sh", args=["-c", wait])])
print(runner.run(app, "monarch_local").rpartition("/")[2], flush=True)
time.sleep(1000)
"""
    with start_fresh(code, start_new_session=True) as submitter:
        assert submitter.stdout is not None
        app_id = submitter.stdout.readline().strip()
        # The whole session, as when a terminal closes.
        os.killpg(submitter.pid, signum)
    assert apps.status(app_id).state is AppState.RUNNING
    (tmp_path / "go").touch()
    assert apps.wait(app_id).state is AppState.SUCCEEDED


def test_the_submitter_has_no_zombies(apps: Detached) -> None:
    app_id = apps.run(sh("sleep 1000"))
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    assert not [
        pid for pid in children if (Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    ]
    apps.scheduler.apps.cancel(app_id, 0)
    apps.wait(app_id)


def test_the_supervisor_is_killed(apps: Detached, family: Family) -> None:
    supervisor, status_file = apps.owner(family.app_id).supervisor.pid, apps.paths(family.app_id).status
    started = os.stat(status_file).st_mtime
    until(lambda: os.stat(status_file).st_mtime > started, "a sign of life from the supervisor of a silent job")
    os.kill(supervisor, signal.SIGKILL)
    killed = [supervisor, pid_in(family.folder / "main")]
    until(lambda: not any(map(lives, killed)), "the kernel to kill it and the replica")
    before = tree(apps.paths(family.app_id).root)
    code = f"print(runner.status(handle({family.app_id!r})).state)"
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(fresh, [code] * 3)) == ["FAILED\n"] * 3
    status = apps.status(family.app_id)
    assert status.state is AppState.FAILED
    why = f"it was killed, or {os.uname().nodename} was rebooted"
    assert status.msg == f"the supervisor (pid {supervisor}) has ended without a result: {why}"
    assert apps.states(family.app_id) == {"r/0": AppState.FAILED}
    record = folder.current_state(apps.paths(family.app_id))
    assert record is not None
    assert record.ended == record.roles[0].replicas[0].ended == os.stat(status_file).st_mtime > started
    # Readers say so and change nothing. What has survived its replica is killed with the app's folder.
    assert tree(apps.paths(family.app_id).root) == before
    assert family.alive == ["child", "orphan"]
    apps.runner.delete(apps.handle(family.app_id))
    until(lambda: not family.alive, "the kernel to end what was killed")
    assert apps.runner.status(apps.handle(family.app_id)) is None


def test_a_cancel_kills_what_has_survived_the_supervisor(apps: Detached, family: Family) -> None:
    os.kill(apps.owner(family.app_id).supervisor.pid, signal.SIGKILL)
    apps.wait(family.app_id)
    apps.scheduler.cancel(family.app_id)
    until(lambda: not family.alive, "the kernel to end what was killed")


def test_orphans_end_with_the_app(apps: Detached, tmp_path: Path) -> None:
    code = FAMILY.replace(
        'note("main")\nendure()', 'note("main")\nwhile not os.path.exists(f"{folder}/go"): time.sleep(0.02)'
    )
    family = Family(apps, tmp_path, code)
    (tmp_path / "go").touch()
    assert apps.wait(family.app_id).state is AppState.SUCCEEDED
    assert family.alive == []


def make_unended(apps: Detached, hostname: str = "") -> str:
    """An app that has ended, with a status file that does not know it; as if it had run on that machine."""
    app_id = apps.run(sh("true"))
    apps.wait(app_id)
    until(lambda: not lives(apps.owner(app_id).supervisor.pid), "the supervisor to leave")
    record, paths = apps.record(app_id), apps.paths(app_id)
    record.update(state="RUNNING", ended=None)
    record["roles"][0]["replicas"][0].update(state="RUNNING", ended=None, exit_code=None)
    record["hostname"] = hostname or record["hostname"]
    state_files.write_json(paths.status, record)
    if hostname:
        state_files.write_json(
            paths.supervisor, {**(state_files.load_undamaged(dict, paths.supervisor) or {}), "hostname": hostname}
        )
    return app_id


def test_a_reboot(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    app_id = make_unended(apps)
    assert [str(a.state) for a in apps.scheduler.list()] == ["FAILED"]
    assert apps.status(app_id).msg.endswith(f"it was killed, or {os.uname().nodename} was rebooted")
    monkeypatch.setenv("MONARCH_KEEP_DAYS", "0")
    assert folder.prune(state_files.apps_dir()) == [app_id]


def test_another_machine_whose_locks_are_not_seen(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    app_id = make_unended(apps, "elsewhere")
    status = apps.status(app_id)
    assert status.state is AppState.RUNNING
    assert status.msg == "runs on elsewhere, or has ended: that cannot be seen from here"
    assert status.roles[0].replicas[0].hostname == "elsewhere"
    with pytest.raises(RuntimeError, match="runs on elsewhere, which cannot be seen from here: cancel it there"):
        apps.scheduler.cancel(app_id)
    monkeypatch.setenv("MONARCH_KEEP_DAYS", "0")
    assert folder.prune(state_files.apps_dir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_a_reader_on_another_machine_leaves_a_job_alone(apps: Detached, family: Family, tmp_path: Path) -> None:
    """Another boot and another name, the same image (machine-id) and the same folder; it may cancel the job."""
    (tmp_path / "boot").write_text("another\n")
    enter = f'hostname other; mount --bind {tmp_path}/boot /proc/sys/kernel/random/boot_id; exec "$@"'
    elsewhere = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "sh", "-c", enter, "sh"]

    def there(*words: str) -> str:
        command = [*elsewhere, *TORCHX, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    handle, root = apps.handle(family.app_id), apps.paths(family.app_id).root
    before = tree(root)
    assert f"runs on {os.uname().nodename}" in there("status", handle)
    assert tree(root) == before
    assert len(family.alive) == 3
    there("cancel", handle)
    assert apps.status(family.app_id).state is AppState.CANCELLED
    assert family.alive == []


def test_pids_that_are_used_again(apps: Detached) -> None:
    app_id = make_unended(apps)
    path = apps.paths(app_id).supervisor
    data = state_files.load_undamaged(dict, path)
    assert data is not None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        data["supervisor"]["pid"] = other.pid
        state_files.write_json(path, data)
        apps.scheduler.cancel(app_id)
        assert apps.status(app_id).state is AppState.FAILED
        assert other.poll() is None, "an innocent process was killed"
        other.communicate(b"\n", timeout=WITHIN)
        assert other.returncode == 0


def test_a_submission_that_was_interrupted(apps: Detached) -> None:
    app_id = make_unended(apps)
    os.unlink(apps.paths(app_id).supervisor)
    with open(apps.paths(app_id).lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert apps.status(app_id).state is AppState.RUNNING, "its supervisor may still be starting"
    assert "its submission was interrupted" in apps.status(app_id).msg


def test_damaged_files(apps: Detached, caplog: pytest.LogCaptureFixture) -> None:
    good = apps.run(sh("true"))
    apps.wait(good)
    for name, content in (("empty-x", ""), ("list-x", "[]"), ("odd-x", '{"a": 1}')):
        root = Path(apps.paths(name).root)
        root.mkdir()
        (root / "status.json").write_text(content)
        with pytest.raises(BackendError, match=f"^{root}/status.json is damaged: "):
            apps.status(name)
    assert {a.app_id: a.state for a in apps.scheduler.list()} == {good: AppState.SUCCEEDED}
    assert f"{root}/status.json is damaged" in caplog.text
    apps.scheduler.delete("list-x")
    assert not Path(apps.paths("list-x").root).exists()


@pytest.mark.parametrize(
    ("name", "command"),
    [("status", ()), ("app", ()), ("request", ()), ("supervisor", ()), ("status", ("monarch",)), ("app", ("monarch",))],
)
def test_a_running_app_with_a_damaged_file_can_be_cancelled_and_deleted(
    apps: Detached, name: str, command: tuple[str, ...]
) -> None:
    app_id = apps.run(sh("sleep 300"))
    Path(getattr(apps.paths(app_id), name)).write_text("{")
    for word in ("cancel", "delete"):
        done = run_torchx(*command, word, apps.handle(app_id))
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert not Path(apps.paths(app_id).root).exists()


def test_an_app_that_is_submitted_by_an_app(apps: Detached, tmp_path: Path) -> None:
    code = f"""
import sys
from torchx.runner import Runner
from torchx.specs import AppDef, Role
from torchx_monarch.schedulers import monarch_local
runner = Runner("torchx", {{"monarch_local": monarch_local}})
command = "while ! test -e {tmp_path}/go; do sleep 0.05; done; env | grep ^MONARCH_"
print(runner.run(AppDef("inner", [Role("r", image="", entrypoint="sh", args=["-c", command])]), "monarch_local"))
"""
    outer = apps.run(py(code))
    assert apps.wait(outer).state is AppState.SUCCEEDED, apps.log(outer)
    inner = apps.log(outer)[0].strip().rpartition("/")[2]
    assert apps.status(inner).state is AppState.RUNNING, "the end of one app must not end the other"
    (tmp_path / "go").touch()
    assert apps.wait(inner).state is AppState.SUCCEEDED
    assert apps.log(inner) and not [line for line in apps.log(inner) if outer in line]


def test_a_supervisor_that_cannot_start(apps: Detached, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bad = tmp_path / "python"
    bad.write_text("#!/bin/sh\necho the reason >&2\nexit 1\n")
    bad.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bad))
    with pytest.raises(RuntimeError, match="could not be started .*: the reason"):
        apps.run(sh("true"))
    assert apps.scheduler.list() == []


def test_ctrl_c_while_submitting(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupt(process: subprocess.Popen[bytes], timeout: float) -> bytes:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        apps.run(sh("sleep 1000"))
    (listed,) = apps.scheduler.list()
    assert apps.wait(listed.app_id).state is AppState.CANCELLED
    started[0].wait(WITHIN)  # or its end is a warning


def test_a_submitter_that_ignores_its_children(apps: Detached) -> None:
    code = """
import signal
from torchx.specs import AppDef, Role
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])
app = AppDef("a", [Role("r", image="", entrypoint="grep", args=["^Sig", "/proc/self/status"])])
print(json.dumps(runner.run(app, "monarch_local").rpartition("/")[2]))
"""
    app_id = apps.fresh(code)
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    masks = dict(line.split() for line in apps.log(app_id))
    assert int(masks["SigBlk:"], 16) == 0
    # Bits 32 and 33 are the C library's own.
    assert int(masks["SigIgn:"], 16) & 0x7FFFFFFF == 0, json.dumps(masks)
