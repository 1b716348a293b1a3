# SPDX-License-Identifier: BSD-3-Clause
"""What is kept of the modules that a program imports, whatever ranks and files say."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from torchx_monarch.cli.main import CmdMonarch
from torchx_monarch.host.ranks.learned_imports import InstalledModules, names_in
from torchx_monarch.host.ranks.learned_preload import LearnedPreload
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.learned_modules import MAX_MODULES, LearnedModules, file_of, files_in

WRONG_NAMES = ["", "a b", "a..b", ".a", "a;b", "a\0", "ä", "a" * 201, "pkg.__main__", "__main__", "1a"]


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_what_is_no_name_of_a_module_is_left_out(name: str) -> None:
    modules = LearnedModules()
    assert modules.learn(["a", name, "b.c"], (), {name: "why", "d": "why"})
    assert modules.names == ("a", "b.c") and list(modules.dropped) == ["d"]


@pytest.mark.parametrize("reported", [None, 3, "a", {"a": 1}, [], [[]], [7], [None]])
def test_what_is_no_list_of_names_teaches_nothing(reported: object, tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.write_text(json.dumps({"names": reported}))
    assert LearnedModules.read(str(path)) == LearnedModules()


def test_their_number_is_bounded_and_each_is_learned_once() -> None:
    modules = LearnedModules()
    assert modules.learn(["a", "b", "a"]) and modules.names == ("a", "b")
    assert not modules.learn(["b", "a"])
    modules.learn([f"m{number}" for number in range(3 * MAX_MODULES)])
    assert len(modules.names) == MAX_MODULES


def test_a_dropped_module_never_returns() -> None:
    modules = LearnedModules(("a", "a.b", "ab", "a.b.c"))
    modules.learn(dropped={"a.b": "why"})
    assert modules.names == ("a", "ab")
    assert not modules.learn(["a.b", "a.b.d"])


def place(folder: Path, app_id: str = "app-x1", role: str = "role", program: str = "script /a.py") -> str:
    """The path of the file of a program."""
    return file_of(str(folder), app_id, role, program)[0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"names": {"a": 1}, "dropped": ["a"]}',
        b'{"names": [["a"]], "dropped": {"a b": "x", "c": 1}}',
        b"[" * 100_000,
        b"\xff",
        b'"' + b"a" * (1 << 20) + b'"',
    ],
)
def test_a_damaged_file_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    Path(place(tmp_path)).write_bytes(content)
    assert LearnedModules.read(place(tmp_path)) == LearnedModules()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str) -> None:
    real, path = place(tmp_path / "of", "other-x1"), place(tmp_path / "of")
    LearnedModules(("a",)).write(real)
    make: Any = {"link": lambda path: os.symlink(real, path), "fifo": os.mkfifo, "folder": os.mkdir}[kind]
    make(path)
    assert LearnedModules.read(path) == LearnedModules()


def test_the_apps_of_one_name_share_a_file(tmp_path: Path) -> None:
    path, modules = file_of(str(tmp_path / "of"), "my-app-x1y2", "role", "script /a.py")
    modules.learn(["b", "a"], (), {"c": "it is unsafe"})
    modules.write(path)
    assert file_of(str(tmp_path / "of"), "my-app-z3", "role", "script /a.py") == (path, modules)
    for other in (("my-x1", "role", "script /a.py"), ("my-app-x1", "r", "script /a.py"), ("my-app-x1", "role", "x")):
        assert place(tmp_path / "of", *other) != path
    assert (os.stat(tmp_path / "of").st_mode & 0o77) == 0


def test_a_report_is_taken_once_and_only_from_a_file(tmp_path: Path) -> None:
    report = tmp_path / "imported"
    learned = LearnedPreload(str(report), print, place(tmp_path / "of"))
    assert not learned.collect()
    report.write_text(json.dumps({"names": ["a", 1]}))
    assert not learned.collect() and not report.exists()
    report.write_text(json.dumps({"names": ["a", "b c"], "variables": ["B", "A"]}))
    assert learned.collect() and learned.modules.names == ("a",) and not report.exists()
    assert LearnedModules.read(place(tmp_path / "of")) == LearnedModules(("a",), {}, ("A", "B"))
    (tmp_path / "real").write_text('{"names": ["c"]}')
    report.symlink_to(tmp_path / "real")
    assert not learned.collect() and not report.is_symlink()
    os.mkfifo(report)
    assert not learned.collect()


def test_a_drop_is_said_once_and_kept_with_what_another_host_has_learned(tmp_path: Path) -> None:
    said: list[str] = []
    path = place(tmp_path / "of")
    LearnedModules(("a", "b", "c"), {"d": "x"}).write(path)
    learned = LearnedPreload(str(tmp_path / "imported"), said.append, path, LearnedModules(("a", "b")))
    learned.drop("a", "it runs a thread")
    learned.drop("a", "it runs a thread")
    assert said == ["learned preload: a is not imported ahead any more: it runs a thread"]
    assert LearnedModules.read(path) == LearnedModules(("b", "c"), {"a": "it runs a thread", "d": "x"})


def test_auto_stands_for_torch() -> None:
    assert HostSpec(preload=("auto",)).preload_modules == ("torch",)
    assert HostSpec(preload=("torch", "auto", "numpy")).preload_modules == ("torch", "numpy")
    assert HostSpec(preload=("numpy",)).preload_modules == ("numpy",)


def test_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = InstalledModules()
    assert installed.offers("pytest") and installed.offers("numpy.version") == ("numpy" in sys.modules)
    assert not installed.offers("json") and not installed.offers("torchx_monarch") and not installed.offers("nosuch.x")
    assert "pytest" in installed.imported_since(set())
    assert not {"json", "os", __name__, "torchx_monarch"} & set(installed.imported_since(set()))
    assert installed.foreign(["json", "pytest", "sys"]) == ""
    assert installed.foreign(["json", __name__]) == __file__
    place = os.path.dirname(os.path.dirname(pytest.__file__))
    assert not InstalledModules(place).offers("pytest")
    monkeypatch.setenv("PYTHONPATH", place)
    assert not InstalledModules().offers("pytest")


def test_what_comes_before_installed_modules(tmp_path: Path) -> None:
    for name in ("a.py", "b.txt", "c.so", "e.pyc", "data.json"):
        (tmp_path / name).touch()
    (tmp_path / "namespace").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    assert names_in(str(tmp_path)) == {"a", "c", "e", "package"}
    assert names_in("") == names_in(str(tmp_path / "nosuch")) == set()


def preload(*words: str) -> None:
    parser = argparse.ArgumentParser()
    command = CmdMonarch()
    command.add_arguments(parser)
    command.run(parser.parse_args(["preload", *words]))


def test_it_is_listed_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MONARCH_STATE_DIR", str(tmp_path))
    for app in ("one-x1", "two-x2"):
        path, modules = file_of(str(tmp_path / "learned"), app, "role", "script /a.py")
        modules.learn(("b", "a.c"), (), {"t": "it runs a thread \x1b[31m"})
        modules.write(path)
    preload()
    printed = capsys.readouterr().out
    assert "one  role  script /a.py  2        a, b" in printed
    assert "two: t is not imported ahead: it runs a thread \\x1b[31m" in printed
    preload("one", "--json")
    [entry] = json.loads(capsys.readouterr().out)
    assert (entry["app"], entry["names"], list(entry["dropped"])) == ("one", ["b", "a.c"], ["t"])
    preload("one", "--clear")
    assert [LearnedModules.read(path).app for path in files_in(str(tmp_path / "learned"))] == ["two"]
    preload("--clear")
    preload()
    assert capsys.readouterr().out.splitlines() == ["APP  ROLE  PROGRAM  MODULES  OF"]
