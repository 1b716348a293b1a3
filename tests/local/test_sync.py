# SPDX-License-Identifier: BSD-3-Clause
"""Code that is brought to the hosts of a live allocation before each run."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.local.live import Live
from tests.local.test_serve import torchx
from tests.waits import WITHIN, until
from torchx_monarch.client.connection import Connection, ask
from torchx_monarch.client.result import RunResult
from torchx_monarch.client.workspace_sync import sync_workspace
from torchx_monarch.code_sync.scan import scan
from torchx_monarch.exceptions import CodeError

_SHOW = """
import os, sys, time
from pkg import value
print("value", value.VALUE, flush=True)
results = "results" + os.environ["RANK"]
with open(results, "a") as file:
    file.write(f"{value.VALUE}\\n")
while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
from pkg import late
again = open("pkg/value.py").read().split()[-1]
print("late", late.VALUE, again, "results", open(results).read().split(), flush=True)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace."""
    root = tmp_path / "ws"
    (root / "pkg").mkdir(parents=True)
    (root / "show.py").write_text(_SHOW)
    (root / ".gitignore").write_text("data/\n")
    (root / "data").mkdir()
    (root / "data" / "set.bin").write_bytes(bytes(1000))
    set_value(root, 1)
    return root


def set_value(root: Path, value: int) -> None:
    for name in ("value", "late"):
        (root / "pkg" / f"{name}.py").write_text(f"VALUE = {value}\n")


@pytest.fixture
def hosts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """Two hosts in a folder with nothing of the workspace."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    live = Live(folder, ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "show.py"], 2)
    try:
        yield live.ready()
        assert live.end() == [0, 0]
        assert not list(folder.glob("**/code")), "the hosts' copies end with them"
    finally:
        live.kill()


def test_hosts_in_the_place_of_those_that_passed_the_code_on_get_it(
    folder: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    options = ("--grace", "5", "--preload", "", "--replacements", "3")
    live = Live(folder, ["torchrun", "--nnodes", "4", "--nproc-per-node", "1", "show.py"], 4, options=options)
    try:
        live.ready()
        go = tmp_path / "go"
        running = live.job.run_spmd_async(["show.py", str(go)], output="store", workspace=str(root), sync="always")
        until(lambda: len(list(live.job.logs())) == 4, "all ranks")
        set_value(root, 2)
        for replica in (1, 2, 3):
            live.processes[replica].kill()
            live.processes[replica].wait()
        for replica in (1, 2, 3):
            live.start(replica)
        go.touch()
        output = running.result(WITHIN).output
        assert all(output[rank].stdout.endswith("value 1\nlate 1 1 results ['1']\n") for rank in (1, 2, 3)), output
        live.end()
    finally:
        live.kill()


def said(result: RunResult) -> str:
    """What both ranks have printed alike."""
    assert result.exit_code == 0, result
    first, second = (result.output[rank].stdout for rank in (0, 1))
    assert first == second
    return first


def sent(hosts: Live, root: Path) -> int:
    """How many bytes a client sends for a workspace; about 200 if the hosts have it."""
    with patch.object(Connection, "send_bytes", autospec=True, side_effect=Connection.send_bytes) as sending:
        sync_workspace(hosts.target, str(root), "always")
    return sum(len(call.args[1]) for call in sending.call_args_list)


def tree_hash(root: Path) -> str:
    return scan(str(root)).hash


def test_each_run_has_the_code_as_it_was_when_it_began(hosts: Live, root: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"workspace": str(root), "sync": "always"}
    first = hosts.run(**more)
    assert said(first) == "value 1\nlate 1 1 results ['1']\n"
    first_code = tree_hash(root)
    assert first.code == first_code

    # A run goes on while the code changes under it, and the next one has all of it; results stay.
    go = tmp_path / "go"
    running = hosts.job.run_spmd_async(["show.py", str(go)], output="store", **more)
    until(lambda: len(list(hosts.job.logs())) == 2, "the first lines of both ranks")
    set_value(root, 2)
    (root / "data" / "set.bin").write_bytes(bytes(2000))
    assert sent(hosts, root) < 2500
    go.touch()
    assert said(running.result(WITHIN)) == "value 1\nlate 1 1 results ['1', '1']\n"
    second = hosts.run(**more)
    assert said(second) == "value 2\nlate 2 2 results ['1', '1', '2']\n"
    assert second.code == tree_hash(root) != first_code and sent(hosts, root) < 300
    assert [run["code"] for run in hosts.job.runs()] == [first_code, first_code, second.code]

    # What is gone is gone, what is back need not be sent again.
    (root / "pkg" / "late.py").rename(root / "late.py")
    failed = hosts.run(**more)
    assert failed.exit_code == 1 and "cannot import name 'late'" in failed.reason
    (root / "late.py").rename(root / "pkg" / "late.py")
    assert sent(hosts, root) < 300


def test_a_folder_that_all_hosts_see_is_used_itself(
    hosts: Live, root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(os.listdir(root))
    result = hosts.run("show.py", workspace=str(root))
    assert said(result).startswith("value 1\nlate 1 1 ")
    assert (hosts.job.runs()[-1]["cwd"], result.code) == (str(root), "")
    for rank in (0, 1):
        assert (root / f"results{rank}").read_text() == "1\n"
        (root / f"results{rank}").unlink()
    shutil.rmtree(root / "pkg" / "__pycache__", ignore_errors=True)
    assert sorted(os.listdir(root)) == before
    never = hosts.run("python", "-c", "import os; print(os.getcwd())", workspace=str(root), sync="never")
    assert never.code == "" and never.output[0].stdout == f"{os.getcwd()}\n"

    # A shell's current folder is the workspace.
    monkeypatch.chdir(root)
    handle = [hosts.job.handle, "--address", f"unix:{folder}/r.sock"]
    for sync, folders in (("auto", 1), ("always", 2)):
        done = torchx("monarch", "exec", *handle, "--sync", sync, "--", "python", "-c", "import os; print(os.getcwd())")
        seen = set(done.stdout.split())
        assert len(seen) == folders and (str(root) in seen) == (sync == "auto")
    assert tree_hash(root)[:12] in torchx("monarch", "ps", *handle).stdout.splitlines()[-1]
    with pytest.raises(ValueError, match="not both"):
        hosts.run(cwd="/", workspace=str(root))
    with pytest.raises(ValueError, match="none of auto, always, never"):
        hosts.run(sync="sometimes")


def test_what_goes_wrong_is_said_and_leaves_the_hosts_as_they_were(hosts: Live, root: Path, folder: Path) -> None:
    target = hosts.target
    request = {"type": "sync", "tree": tree_hash(root)}
    with Connection.open(target, {**request, "size": 1000}) as link:
        assert link.receive() == {"type": "ready"}
        link.send_bytes(b"half of it")
    assert ask(target, request) == {"type": "have", "have": False, "digests": []}
    answer = ask(target, {**request, "size": 10**16})
    assert answer["reason"].startswith("cannot store the code on this host: no space left: "), answer
    assert ask(target, {"type": "sync"}) == {"type": "failed", "reason": "'tree'"}

    # One of the hosts cannot: the run does not begin.
    more: dict[str, Any] = {"workspace": str(root), "sync": "always"}
    assert said(hosts.run(**more)).startswith("value 1")
    reasons: list[str] = []
    for place in folder.glob("**/code"):
        set_value(root, 2 + len(reasons))
        place.rename(away := place.with_name("away"))
        place.write_text("a file in its place")
        try:
            failed = hosts.run(**more)
            assert failed.exit_code == 1 and not failed.output
            reasons.append(failed.reason)
        except CodeError as error:
            reasons.append(str(error))
        place.unlink()
        away.rename(place)
    on_host, on_replica0 = sorted(reasons)
    assert re.match(r"host 1 \(.*\): cannot store the code on this host: File exists: /", on_host)
    assert on_replica0.startswith(
        "the code was not brought to the hosts: cannot store the code on this host: File exists"
    )
    assert said(hosts.run(**more)).startswith("value 3")

    (root / "pkg" / "late.py").chmod(0)
    if os.geteuid() == 0:
        (root / "pkg" / "late.py").unlink()
        (root / "pkg" / "late.py").mkdir()
        (root / "weights.bin").touch()
        os.truncate(root / "weights.bin", 200 << 20)
    with pytest.raises(CodeError, match=r"(weights.bin has 200 MB|cannot read .*late.py).*named? .*\.gitignore"):
        sync_workspace(target, str(root), "always")
