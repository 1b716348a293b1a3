# SPDX-License-Identifier: BSD-3-Clause
"""Disks that are full, and folders that cannot be written."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchx.specs import AppState, Role

from tests.local.detached import Detached, py, sh
from tests.waits import WITHIN, until
from torchx_monarch.backends.core.errors import StateDirError
from torchx_monarch.host.ranks import rank_errors
from torchx_monarch.system import error_files


def mount(folder: Path, options: str) -> None:
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WITHIN)
    if done.returncode:
        pytest.skip(f"needs to mount a small file system: {done.stderr.strip()}")


def unmount(folder: Path) -> None:
    """Unmount it; the supervisor of an app leaves it a moment after the app has ended."""
    command = ["umount", str(folder)]
    until(
        lambda: not subprocess.run(command, capture_output=True, check=False, timeout=WITHIN).returncode,
        f"everybody to leave {folder}",
        every=0.1,
    )


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory on a file system of its own, of 1 MiB."""
    folder = tmp_path / "small"
    mount(folder, "size=1m,mode=700")
    monkeypatch.setenv("MONARCH_STATE_DIR", str(folder))
    yield folder
    unmount(folder)


def fill(folder: Path) -> None:
    with open(folder / "ballast", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)


def test_the_disk_fills_up_while_a_job_writes(apps: Detached, small: Path) -> None:
    code = "import sys\nfor i in range(300): print('x' * 9999)\nprint('the end')\nsys.exit(4)"
    app_id = apps.run(py(code))
    status = apps.wait(app_id)
    assert status.state is AppState.FAILED
    assert "exited with code 4" in status.msg
    assert "bytes of output could not be written to the logs: No space left on device" in status.msg
    assert apps.log(app_id)[0] == "x" * 9999 + "\n"


def test_the_disk_is_full_when_a_job_ends(apps: Detached, small: Path, tmp_path: Path) -> None:
    app_id = apps.run(sh(f"while ! test -e {tmp_path}/go; do sleep 0.02; done; echo lost; exit 5"))
    fill(small)
    (tmp_path / "go").touch()
    status = apps.wait(app_id)
    assert status.state is AppState.FAILED
    assert "exited with code 5" in status.msg
    assert apps.record(app_id)["roles"][0]["replicas"][0]["exit_code"] == 5


def test_the_replica_that_says_why_is_the_cause_on_a_full_disk(apps: Detached, small: Path, tmp_path: Path) -> None:
    # Replica 0 ends first, and there was no room for its error file.
    code = """
import json, os, sys, time
folder, replica = sys.argv[1:]
def wait(name):
    while not os.path.exists(f"{folder}/{name}"):
        time.sleep(0.02)
if replica == "1":
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": "ValueError: boom", "extraInfo": {}}}, file)
with open(f"{folder}/pid{replica}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{folder}/pid{replica}.new", f"{folder}/pid{replica}")
wait("full")
if replica == "1":
    wait("pid0")
    while os.path.exists("/proc/" + open(f"{folder}/pid0").read()):
        time.sleep(0.02)
sys.exit(5 if replica == "1" else 7)
"""
    app_id = apps.run(py(code, str(tmp_path), "${replica_id}", replicas=2))
    until(lambda: (tmp_path / "pid0").exists() and (tmp_path / "pid1").exists(), "the start")
    fill(small)
    (tmp_path / "full").touch()
    status = apps.wait(app_id)
    assert status.state is AppState.FAILED
    assert "replica r/1" in status.msg and "exited with code 5: ValueError: boom" in status.msg
    assert f"the disk of {apps.paths(app_id).root} is full" in status.msg
    assert "boom" in status.structured_error_msg


@pytest.mark.parametrize(("recorded", "lacking"), [(False, "inodes"), (True, "space")])
def test_a_rank_fails_on_a_full_disk(
    apps: Detached,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lacking: str,
    recorded: bool,
) -> None:
    folder = tmp_path / "few"
    mount(folder, "size=6m,nr_inodes=400,mode=700")
    monkeypatch.setenv("MONARCH_STATE_DIR", str(folder))
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, sys, time
folder = {str(tmp_path)!r}
def main():
    open(f"{{folder}}/up{{os.environ['RANK']}}", "w").close()
    while not os.path.exists(f"{{folder}}/full"):
        time.sleep(0.02)
    if os.environ["RANK"] == "1":
        raise ValueError("boom of rank 1")
    time.sleep(1000)
if {recorded}:
    from torch.distributed.elastic.multiprocessing.errors import record
    main = record(main)
main()
""")
    try:
        role = Role("r", image="", entrypoint="torchrun", args=["--nproc-per-node", "2", str(script)])
        app_id = apps.run(role, preload="torch" if recorded else "none")
        until(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists(), "the ranks")
        if lacking == "space":
            fill(folder)
        else:
            with pytest.raises(OSError, match="No space left"):
                for number in range(400):
                    (folder / f"ballast{number}").touch()
        (tmp_path / "full").touch()
        status = apps.wait(app_id)
        assert status.state is AppState.FAILED
        # Without its error file there is the last line that it has printed: with @record, why that was not written.
        said = "No space left on device" if recorded else "ValueError: boom of rank 1"
        assert "rank 1 " in status.msg and "exited with code 1; last output: " in status.msg and said in status.msg
        assert not list(folder.rglob("*.reserve"))
    finally:
        unmount(folder)


def test_the_error_of_a_full_disk_names_it(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(file: str) -> None:  # as torch.save does
        try:
            fill(Path(file).parent)
            raise RuntimeError("basic_ios::clear: iostream error")
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(RuntimeError) as caught:
        save(f"{small}/checkpoint.pt")
    rank_errors.record(caught.value, True)
    said = f"unexpected pos 704 vs 598 (after RuntimeError: basic_ios::clear: iostream error; {small} has 0 MiB free)"
    assert (error_files.read(str(tmp_path / "error.json")) or {})["message"]["message"] == f"RuntimeError: {said}"


def test_the_disk_has_room_again(apps: Detached, small: Path, tmp_path: Path) -> None:
    command = (
        f"while ! test -e {tmp_path}/full; do sleep 0.02; done;"
        # More than a pipe holds: by its end, the supervisor has read some of it, and could not write it.
        f" head -c 1000000 /dev/zero | tr '\\0' '\\n'; touch {tmp_path}/wrote;"
        f" while ! test -e {tmp_path}/room; do sleep 0.02; done; echo last"
    )
    app_id = apps.run(sh(command))
    fill(small)
    (tmp_path / "full").touch()
    until(lambda: (tmp_path / "wrote").exists(), "the job, which a full disk must not hold up")
    (small / "ballast").unlink()
    (tmp_path / "room").touch()
    status = apps.wait(app_id)
    assert status.state is AppState.SUCCEEDED
    assert "bytes of output could not be written to the logs: No space left on device" in status.msg
    assert apps.log(app_id)[-1] == "last\n"


def test_the_supervisor_is_killed_on_a_full_disk(apps: Detached, small: Path) -> None:
    app_id = apps.run(sh("sleep 1000"))
    fill(small)
    os.kill(apps.owner(app_id).supervisor.pid, 9)
    status = apps.wait(app_id)
    assert status.state is AppState.FAILED
    assert "it was killed" in status.msg
    apps.runner.delete(apps.handle(app_id))


def test_a_full_disk_when_submitting(apps: Detached, small: Path) -> None:
    fill(small)
    with pytest.raises(
        StateDirError, match="cannot write the state of the app to .*: No space left on device.*MONARCH_STATE_DIR"
    ):
        apps.run(sh("true"))
    assert apps.scheduler.list() == []
    (small / "ballast").unlink()
    assert [path for path in small.rglob("*") if path.is_file()] == []
    assert os.listdir(os.environ["TMPDIR"]) == []  # where a long path has its sockets


def test_a_state_directory_below_a_file(apps: Detached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MONARCH_STATE_DIR", str(tmp_path / "file" / "state"))
    with pytest.raises(StateDirError, match="Not a directory") as caught:
        apps.run(sh("true"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert apps.scheduler.list() == []
    assert apps.scheduler.describe("x-1") is None


def test_where_the_state_directory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchx_monarch.backends.core.state_files import state_dir

    assert state_dir({"MONARCH_STATE_DIR": "/a/b"}) == "/a/b"
    assert state_dir({"MONARCH_STATE_DIR": "rel"}) == os.path.join(os.getcwd(), "rel")
    assert state_dir({"XDG_STATE_HOME": "/x"}) == "/x/torchx-monarch"
    home = os.path.expanduser("~")
    assert state_dir({"MONARCH_STATE_DIR": "~/s"}) == f"{home}/s"
    assert state_dir({"XDG_STATE_HOME": "rel"}) == f"{home}/.local/state/torchx-monarch"
    assert state_dir({}) == f"{home}/.local/state/torchx-monarch"
