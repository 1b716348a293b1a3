# SPDX-License-Identifier: BSD-3-Clause
"""Opening and reading files that somebody else may have planted, and what a process says that has too many open."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.waits import WITHIN
from torchx_monarch.system import processes, run_dirs, safe_files

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
SOMEBODY_ELSE = 12345


def test_a_missing_file_is_told_as_such(tmp_path: Path) -> None:
    for path in (tmp_path / "file", tmp_path / "a" / "file"):
        with pytest.raises(FileNotFoundError):
            safe_files.read_file(path, below=tmp_path)
        with pytest.raises(FileNotFoundError):
            safe_files.read_file(path)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    target = path.with_name("target")
    target.write_text("secret")
    path.symlink_to(target)


def _link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path.relative_to(os.getcwd())))


@pytest.mark.parametrize(
    "plant, kind",
    [
        (_fifo, "a FIFO"),
        (_link, "a symbolic link"),
        (_link_to_zeros, "a symbolic link"),
        (Path.mkdir, "a folder"),
        (_socket, "a socket"),
    ],
)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, plant: Callable[[Path], None], kind: str, flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    plant(file)
    try:
        for below in (None, tmp_path):
            with pytest.raises(safe_files.UnsafeFileError) as refused:
                safe_files.open_file(file, flags, below=below)
            assert str(refused.value) == f"{file} is {kind}"
    finally:
        if kind == "a socket":
            file.unlink()


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    (tmp_path / "elsewhere" / "inner" / "file").write_text("secret")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "app").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(safe_files.UnsafeFileError) as refused:
        safe_files.read_file(tmp_path / "state" / "app" / "inner" / "file", below=tmp_path / "state")
    assert str(refused.value) == f"{tmp_path}/state/app is a symbolic link"


def test_the_trusted_folder_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert safe_files.read_file(tmp_path / "link" / "file", below=tmp_path / "link") == b"mine"


def test_a_path_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not lie below"):
        safe_files.read_file(tmp_path / "a" / ".." / ".." / "file", below=tmp_path)


@root_only
@pytest.mark.parametrize("which", ["state", "state/app", "state/app/file"])
def test_what_belongs_to_somebody_else_is_refused(tmp_path: Path, which: str) -> None:
    (tmp_path / "state" / "app").mkdir(parents=True)
    file = tmp_path / "state" / "app" / "file"
    file.write_text("{}")
    os.chown(tmp_path / which, SOMEBODY_ELSE, -1)
    with pytest.raises(safe_files.UnsafeFileError) as refused:
        safe_files.read_file(file, below=tmp_path / "state")
    assert str(refused.value).startswith(f"{tmp_path / which} belongs to uid {SOMEBODY_ELSE}, not to ")


def test_a_file_of_another_user_is_refused_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("theirs")
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY_ELSE)
    with pytest.raises(safe_files.UnsafeFileError, match=f"not to uid {SOMEBODY_ELSE}"):
        safe_files.open_file(tmp_path / "file", os.O_WRONLY | os.O_APPEND)
    assert (tmp_path / "file").read_text() == "theirs"


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    assert safe_files.read_file(file, limit=100) == b"x" * 100
    with pytest.raises(safe_files.UnsafeFileError, match="is larger than 99 bytes"):
        safe_files.read_file(file, limit=99)
    os.truncate(file, 1 << 40)  # a hole: no disk space, but a terabyte to a reader
    with pytest.raises(safe_files.UnsafeFileError, match="is larger than"):
        safe_files.read_file(file)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 100_000, b"9" * 10_000 + b"x"])
def test_what_cannot_be_parsed_is_a_value_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(ValueError):
        safe_files.read_json(file)


def test_values_that_readers_cannot_use_are_replaced() -> None:
    numbers = f"[NaN, -Infinity, 1e999, 1.5, -7, 1e300, {'9' * 400}, -{'9' * 5000}]"
    assert safe_files.parse_json(numbers) == [None, None, None, 1.5, -7, 1e300, None, None]
    parsed = safe_files.parse_json(r'{"\ud800": ["\ud83d\ude00", "\udcff", "\udfff", "\\ud800"]}')
    assert parsed == {"\ufffd": ["\U0001f600", "\udcff", "\ufffd", r"\ud800"]}
    os.fsencode(json.dumps(parsed, ensure_ascii=False))
    with pytest.raises(ValueError):
        safe_files.parse_json('"\ud800"'.encode(errors="surrogatepass"))


def test_a_file_is_made_private(tmp_path: Path) -> None:
    fd = safe_files.open_file(tmp_path / "new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, below=tmp_path)
    os.close(fd)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("folder", "file", "link", "missing", "file/below"):
        try:
            safe_files.read_file(tmp_path / name, below=tmp_path)
        except OSError:
            continue
    assert len(os.listdir("/proc/self/fd")) <= before  # garbage of other tests may be collected meanwhile


@pytest.mark.parametrize("plant", [_fifo, _link, lambda path: None, lambda path: path.write_text("of an earlier job")])
def test_any_other_named_file_is_replaced(plant: Callable[[Path], None], tmp_path: Path) -> None:
    plant(path := tmp_path / "file")
    safe_files.replace_file(str(path), b"the cause")
    assert path.read_bytes() == b"the cause" and path.lstat().st_mode & 0o170777 == 0o100600
    assert not (target := tmp_path / "target").exists() or target.read_text() == "secret"


def test_only_names_as_a_host_writes_them_count_as_numbered(tmp_path: Path) -> None:
    for end in ("0", "7", "12", "²", "٣", "007", "1_0", "-1", "+1", "", "x", "9" * 7, "9" * 247):
        (tmp_path / f"run_{end}").mkdir()
    (tmp_path / "99").mkdir()
    assert sorted(safe_files.numbered(tmp_path, "run_")) == [0, 7, 12]
    assert safe_files.numbered(tmp_path / "missing", "run_") == []


@pytest.mark.parametrize("plant", [_fifo, _link, Path.mkdir])
def test_what_is_in_the_place_of_a_folder_is_removed(plant: Callable[[Path], object], tmp_path: Path) -> None:
    """shutil.rmtree waits for ever for a writer of a FIFO."""
    plant(tmp_path / "folder")
    for _ in range(2):
        run_dirs.remove_tree(str(tmp_path / "folder"))
    assert set(os.listdir(tmp_path)) <= {"target"}


@pytest.fixture
def limit() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
    yield 64
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_error_for_want_of_descriptors_names_the_limit(limit: int) -> None:
    opened = []
    with pytest.raises(OSError) as caught:
        while True:
            opened.append(os.dup(2))
    for descriptor in opened:
        os.close(descriptor)
    assert processes.limit_hint(caught.value) == f" (RLIMIT_NOFILE is {limit}: ulimit -n)"
    assert "ulimit -u" in processes.limit_hint(OSError(errno.EAGAIN, "try again"))
    assert "ulimit -u" in processes.limit_hint(RuntimeError("can't start new thread"))
    assert "fs.file-max" in processes.limit_hint(OSError(errno.ENFILE, "too many"))
    assert processes.limit_hint(OSError(errno.ENOENT, "no such file")) == processes.limit_hint(ValueError("x")) == ""


_READ_LOGS = """if True:
    import argparse, contextlib, resource, sys
    from types import SimpleNamespace
    from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot, RoleSnapshot
    from torchx_monarch.backends.core.snapshot import LogQuery
    from torchx_monarch.cli import jobs, logs
    from torchx_monarch.model.role_spec import RoleSpec
    from torchx_monarch.model.state import State
    from torchx_monarch.schedulers import command, monarch_local
    from torchx_monarch.supervisor import log_reader

    LIMIT = 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    replicas = [ReplicaSnapshot("r", replica, State.SUCCEEDED) for replica in range(LIMIT)]
    app = AppSnapshot("a", "a", [RoleSnapshot(RoleSpec("r", LIMIT), replicas)])
    found = app, SimpleNamespace(state=State.SUCCEEDED)

    def lines(app, role, replica, **_):
        return log_reader.lines(".", LogQuery())

    scheduler = monarch_local("torchx")
    scheduler.apps = SimpleNamespace(read=lambda _: found, recent=lambda _: found, replica_log=lines)
    scheduler.apps.lines = lambda *place, **_: (line.text for line in lines(*place))
    if sys.argv[1] == "log":
        command.running = command.TorchXCommand(argparse.Namespace(), sys.stdout)
        opened = [iter(scheduler.log_iter("a", "r", replica)) for replica in range(LIMIT)]
        print(*(next(log) for log in opened), sep="")
        sys.exit()
    jobs.opened = lambda _: contextlib.nullcontext(scheduler)
    names = ("rank", "since", "tail", "timestamps", "follow", "json")
    logs.run(argparse.Namespace(handle="monarch_local://torchx/a", role="", **dict.fromkeys(names)))
"""


@pytest.mark.parametrize(("command", "lines"), [("log", 1), ("monarch", 1500)])
def test_the_logs_of_more_replicas_than_files_may_be_open(command: str, lines: int, tmp_path: Path) -> None:
    (tmp_path / "combined.log").write_text("a line\n" * 1500)  # of which 1000 are read ahead
    (tmp_path / "torchx").write_text(_READ_LOGS)
    words = [sys.executable, "torchx", command]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cannot be read" not in done.stdout and done.stdout.count("a line\n") == lines * 64
