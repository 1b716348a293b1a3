# SPDX-License-Identifier: BSD-3-Clause
"""The files that hosts keep beside logs are found, also those of runs on live allocations; -o replaces files alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.test_chrome_trace import dump, entry
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli.job_files import read_collectives, read_stacks
from torchx_monarch.cli.output import write_output


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_dumps_and_stacks_are_found(tmp_path: Path) -> None:
    good, recorder = dump(entry(1, 5.0)), "flight_recorder"
    write(tmp_path / "t/0/attempt_0" / recorder / "rank_0", good)
    write(tmp_path / "t/1/attempt_2" / recorder / "gloo_rank_3", good)
    write(tmp_path / "t/1/attempt_2" / recorder / "nccl_rank_3", good)
    write(tmp_path / "t/1/run_4/attempt_1" / recorder / "rank_3", good)
    write(tmp_path / "t/1/attempt_2" / recorder / "rank_4", b"wrong")
    write(tmp_path / "t/1/attempt_2" / recorder / "rank_x", good)
    found, problems = read_collectives(str(tmp_path))
    assert {key: len(collectives) for key, collectives in found.items()} == {(0, 1, 0): 1, (0, 3, 3): 2, (4, 2, 3): 1}
    assert len(problems) == 1 and "rank_4: it is no dump" in problems[0]
    write(tmp_path / "t/0/attempt_1/stacks.txt", b"old")
    write(tmp_path / "t/0/attempt_2/stacks.txt", b"new\x1b[2J\n  here\xff")
    (tmp_path / "t/1/attempt_2/stacks.txt").symlink_to("/etc/passwd")
    assert read_stacks(str(tmp_path)) == [("t/0/attempt_2/stacks.txt", "new\\x1b[2J\n  here\ufffd")]
    write(tmp_path / "t/0/run_1/attempt_0/stacks.txt", b"of a run")
    assert read_stacks(str(tmp_path)) == [("t/0/run_1/attempt_0/stacks.txt", "of a run")]
    assert read_stacks(None) == [] and read_collectives(None) == ({}, [])


def test_the_file_is_replaced_or_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "job.html"
    for text in ("one", "two"):
        write_output(str(path), text)
        assert path.read_text() == text
    path.chmod(0o604)
    write_output(str(path), "a\udcff")  # a name that is no UTF-8
    assert path.read_text() == r"a\udcff" and path.stat().st_mode & 0o777 == 0o604
    (tmp_path / "link").symlink_to("job.html")
    write_output(str(tmp_path / "link"), "three")
    assert path.read_text() == "three" and (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "", "no/folder"):
        with pytest.raises(UserError, match="cannot write"):
            write_output(str(tmp_path / name), "four")
    assert {each.name for each in tmp_path.iterdir()} == {"job.html", "link", "pipe"}


def test_a_dash_is_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-", "/dev/stdout"):
        write_output(name, "a\udcff")
        assert capsys.readouterr().out == r"a\udcff"
    assert not os.listdir()
