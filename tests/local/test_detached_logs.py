# SPDX-License-Identifier: BSD-3-Clause
"""Logs of an app: what is in them, and reading them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from torchx.schedulers.api import Stream
from torchx.specs import AppState, Role

from tests.local.detached import Detached, py, sh, start_fresh

Eventually = Callable[..., object]


@pytest.fixture
def apps() -> Detached:
    return Detached()


class Follower:
    """Reads a log in a thread."""

    def __init__(self, apps: Detached, app_id: str, **more: object) -> None:
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(apps, app_id, more), daemon=True)
        self._thread.start()

    def _read(self, apps: Detached, app_id: str, more: dict[str, object]) -> None:
        for line in apps.runner.log_lines(apps.handle(app_id), "r", 0, should_tail=True, **more):
            self.lines.append(line)

    def join(self) -> list[str]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.lines


def test_streams(apps: Detached) -> None:
    app_id = apps.run(sh("echo one; echo two >&2; echo three"))
    apps.wait(app_id)
    assert apps.log(app_id, streams=Stream.STDOUT) == ["one\n", "three\n"]
    assert apps.log(app_id, streams=Stream.STDERR) == ["two\n"]
    assert sorted(apps.log(app_id, streams=Stream.COMBINED)) == ["one\n", "three\n", "two\n"]
    assert sorted(apps.log(app_id)) == ["one\n", "three\n", "two\n"]


@pytest.mark.parametrize("command", ["echo loss", "torchrun --no-python echo loss"])
def test_output_of_a_filter_that_ends_after_the_command(apps: Detached, command: str) -> None:
    """Bash does not wait for such a process, and becomes a last command that is not its own."""
    filtered = "while kill -0 $$ 2>/dev/null; do sleep 0.02; done; sed 's/^/filtered /'"
    app_id = apps.run(Role("r", image="", entrypoint="bash", args=["-c", f"{command} > >({filtered})"]))
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    assert apps.log(app_id, streams=Stream.STDOUT) == ["filtered loss\n"]


def test_lines_are_never_mixed(apps: Detached) -> None:
    code = """
import os, sys
for i in range(3000):
    for fd, c in ((1, b"o"), (2, b"e")):
        os.write(fd, c * 30)
        os.write(fd, c * 30 + b"\\n")
"""
    app_id = apps.run(py(code))
    apps.wait(app_id)
    log = apps.log(app_id)
    assert len(log) == 6000
    assert set(log) == {"o" * 60 + "\n", "e" * 60 + "\n"}


def test_an_unfinished_line_is_shown_after_a_while(apps: Detached, tmp_path: Path, eventually: Eventually) -> None:
    command = f"printf 'name? '; while ! test -e {tmp_path}/go; do sleep 0.02; done; echo err >&2; echo me"
    app_id = apps.run(sh(command))
    combined = Path(apps.paths(app_id).replica_logs("r", 0), "combined.log")
    eventually(lambda: combined.read_text() == "name? ", "the prompt")
    (tmp_path / "go").touch()
    apps.wait(app_id)
    assert apps.log(app_id) == ["name? \n", "err\n", "[continued] me\n"]
    assert apps.log(app_id, streams=Stream.STDOUT) == ["name? me\n"]


def test_the_last_line_may_lack_its_end(apps: Detached) -> None:
    app_id = apps.run(sh("echo one; printf two"))
    apps.wait(app_id)
    assert apps.log(app_id) == ["one\n", "two"]
    assert apps.log(app_id, should_tail=True) == ["one\n", "two"]


def test_bytes_that_are_no_text(apps: Detached) -> None:
    app_id = apps.run(py(r"import os; os.write(1, b'a\xff\xfe\r\x00b\n' + '\u00e9\u65e5'.encode() + b'\n')"))
    apps.wait(app_id)
    assert apps.log(app_id) == ["a\ufffd\ufffd\r\0b\n", "\u00e9\u65e5\n"]


def test_much_output_is_complete(apps: Detached) -> None:
    app_id = apps.run(py("import sys\nfor i in range(200000): sys.stdout.write(f'line {i}\\n')"))
    apps.wait(app_id)
    log = apps.log(app_id)
    assert len(log) == 200000 and log[-1] == "line 199999\n"


def test_a_line_without_end(apps: Detached) -> None:
    app_id = apps.run(py("import os\nfor _ in range(20): os.write(1, b'x' * 50000)"))
    apps.wait(app_id)
    assert apps.log(app_id) == ["x" * 1000000]


def test_regex(apps: Detached) -> None:
    app_id = apps.run(sh("for i in 1 2 3; do echo loss $i; echo other; done"))
    apps.wait(app_id)
    assert apps.log(app_id, regex="^loss [13]") == ["loss 1\n", "loss 3\n"]
    with pytest.raises(ValueError, match="is no regular expression"):
        apps.log(app_id, regex="(")


def test_what_is_not_there(apps: Detached) -> None:
    app_id = apps.run(sh("true", name="a"), sh("true", name="b", replicas=2))
    with pytest.raises(ValueError, match="has no role 'c'; its roles are a, b"):
        apps.log(app_id, "c")
    with pytest.raises(ValueError, match="has no replica 2; it has 0 to 1"):
        apps.log(app_id, "b", 2)
    with pytest.raises(ValueError, match="has no replica -1"):
        apps.log(app_id, "b", -1)
    with pytest.raises(ValueError, match="there is no app 'x-1' of monarch_local"):
        apps.scheduler.log_iter("x-1", "r")
    apps.wait(app_id)


def test_following(apps: Detached, tmp_path: Path, eventually: Eventually) -> None:
    command = f"for i in 1 2 3; do echo $i; while ! test -e {tmp_path}/$i; do sleep 0.01; done; done; printf end"
    app_id = apps.run(sh(command))
    follower = Follower(apps, app_id)
    for i in (1, 2, 3):
        eventually(lambda i=i: follower.lines == [f"{n}\n" for n in range(1, i + 1)], f"line {i}")
        (tmp_path / str(i)).touch()
    assert follower.join() == ["1\n", "2\n", "3\n", "end"]


def test_following_from_another_process_until_a_failure(apps: Detached, tmp_path: Path) -> None:
    app_id = apps.run(sh(f"echo up; while ! test -e {tmp_path}/go; do sleep 0.01; done; echo down; exit 3"))
    code = f"""
for line in runner.log_lines(handle({app_id!r}), "r", 0, should_tail=True):
    print(line, end="", flush=True)
"""
    with start_fresh(code) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "up\n"
        (tmp_path / "go").touch()
        rest = follower.stdout.read()
    assert rest.startswith("down\n[monarch] replica r/0 (pid ") and rest.endswith("exited with code 3\n")


def test_following_a_role_that_starts_late(apps: Detached) -> None:
    """A replica that never started has an empty log, which ends with the app."""
    app_id = apps.run(sh("true"))
    apps.wait(app_id)
    assert apps.log(app_id, should_tail=True) == []


def test_since_and_until(apps: Detached, tmp_path: Path, eventually: Eventually) -> None:
    code = """
import os, sys, time
for i in range(12):
    print(i, flush=True)
    while i in (3, 8) and not os.path.exists(f"{sys.argv[1]}/after-{i}"):
        time.sleep(0.02)
"""
    app_id = apps.run(py(code, str(tmp_path)))
    moments = []
    for last in (3, 8):
        eventually(lambda last=last: f"{last}\n" in apps.log(app_id), f"line {last}")
        # A line's time is right to a tenth of a second: nothing is written that close to this moment.
        time.sleep(0.2)
        moments.append(time.time())
        time.sleep(0.2)
        (tmp_path / f"after-{last}").touch()
    apps.wait(app_id)
    for stream in (None, Stream.STDOUT):
        for zone in (None, timezone.utc):
            since, until = (datetime.fromtimestamp(moment, zone) for moment in moments)
            got = [int(line) for line in apps.log(app_id, since=since, until=until, streams=stream)]
            assert got == [4, 5, 6, 7, 8]
    assert apps.log(app_id, since=datetime.now() + timedelta(seconds=5)) == []
    assert len(apps.log(app_id, since=datetime.now() - timedelta(hours=1))) == 12
    assert len(apps.log(app_id, until=datetime.now() + timedelta(hours=1))) == 12
    assert apps.log(app_id, until=datetime.now() - timedelta(hours=1)) == []


def test_following_until_a_time(apps: Detached, eventually: Eventually) -> None:
    app_id = apps.run(sh("while true; do echo x; sleep 0.1; done"))
    eventually(lambda: apps.log(app_id), "the first line")
    assert "x\n" in apps.log(app_id, should_tail=True, until=datetime.now() + timedelta(seconds=1))
    assert apps.status(app_id).state is AppState.RUNNING
    apps.scheduler.apps.cancel(app_id, 0)
    apps.wait(app_id)


def test_output_of_orphans_is_kept_while_the_app_runs(apps: Detached, tmp_path: Path, eventually: Eventually) -> None:
    (tmp_path / "orphan.sh").write_text(f"while ! test -e {tmp_path}/late; do sleep 0.02; done; echo late")
    role = sh(f"sh {tmp_path}/orphan.sh & exit 0", name="side")
    app_id = apps.run(sh(f"while ! test -e {tmp_path}/end; do sleep 0.02; done", name="main"), role)
    eventually(lambda: apps.states(app_id)["side/0"] is AppState.SUCCEEDED, "the end of the role")
    (tmp_path / "late").touch()
    eventually(lambda: apps.log(app_id, "side") == ["late\n"], "what its child prints after it")
    (tmp_path / "end").touch()
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    assert apps.log(app_id, "side") == ["late\n"]


def test_a_job_whose_orphan_holds_the_pipe_ends(apps: Detached) -> None:
    app_id = apps.run(sh("sleep 1000 & echo done"))
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    assert apps.log(app_id) == ["done\n"]
