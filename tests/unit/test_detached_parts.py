# SPDX-License-Identifier: BSD-3-Clause
"""The parts of the detached local scheduler that need no supervisor, and the removal of an ended app."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchx.runner import Runner
from torchx.specs import (
    NULL_RESOURCE,
    AppDef,
    BindMount,
    DeviceMount,
    Resource,
    RetryPolicy,
    Role,
    VolumeMount,
    Workspace,
)

from tests.waits import WITHIN, until
from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import SubmitError
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.local import folder, gpus, submit
from torchx_monarch.backends.local.backend import LocalBackend, LocalOpts
from torchx_monarch.backends.local.supervision import SupervisorRequest
from torchx_monarch.insight import events
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.insight.timeline import count_rank_restarts
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.schedulers import monarch_local
from torchx_monarch.system import processes
from torchx_monarch.system.console import Console, WriterThread

words = st.text(max_size=20)
names = st.text("abcXYZ019_-. /\u00e9", min_size=1, max_size=12)

ROLE = Role(
    "r/\u00e9",
    image="i",
    min_replicas=2,
    entrypoint="x",
    args=["", "a b", "$${x}", "\n"],
    env={"A": "\u00e9", "B": ""},
    num_replicas=3,
    max_retries=1,
    retry_policy=RetryPolicy.REPLICA,
    resource=Resource(1, 2, 3, {"a": [None, {"b": True}]}, {"d": 4}, {"t": "u"}),
    port_map={"p": 1},
    metadata={"m": {"n": [1, None, "x"]}},
    mounts=[BindMount("/a", "/b", True), VolumeMount("v", "/c"), DeviceMount("/d", "/e", "rw")],
    workspace=Workspace({"/w": "v"}),
)
"""With a value of each field."""


def submitted_app(app: AppDef) -> SubmittedApp:
    return SubmittedApp(app, [RoleSpec.from_role(role) for role in app.roles])


@pytest.mark.parametrize("role", [ROLE, Role("r", image="", resource=NULL_RESOURCE)])
def test_an_app_survives_json(role: Role) -> None:
    submitted = submitted_app(AppDef("a", [role], {"team": "a b"}))
    assert SubmittedApp.from_json(json.loads(json.dumps(submitted.to_json()))) == submitted
    assert SubmittedApp.unpack(submitted.pack()) == submitted


def test_an_app_with_a_resolved_override_and_values_json_does_not_know() -> None:
    role = Role("r", image="old", metadata={"path": Path("/x")})
    role.overrides = {"image": lambda: "new"}
    submitted = submitted_app(AppDef("a", [role]))
    found = SubmittedApp.from_json(json.loads(json.dumps(submitted.to_json(), default=str))).app
    assert found.roles[0].image == "new"
    assert found.roles[0].metadata == {"path": "/x"}


def test_fields_of_a_newer_torchx_are_left_out() -> None:
    submitted = submitted_app(AppDef("a", [Role("r", image="i")]))
    data = submitted.to_json()
    data["app"]["roles"][0]["from_the_future"] = data["roles"][0]["from_the_future"] = 1
    data["app"]["roles"][0]["resource"]["from_the_future"] = 1
    assert SubmittedApp.from_json(data) == submitted


@pytest.mark.parametrize(
    ("visible", "found"),
    [("0,1", ["0", "1"]), ("3, GPU-ab", ["3", "GPU-ab"]), ("", []), ("-1", []), ("0,-1,2", ["0"]), ("1,1", ["1"])],
)
def test_visible_gpus(visible: str, found: list[str]) -> None:
    assert gpus.devices({"CUDA_VISIBLE_DEVICES": visible}) == found


def test_counting_gpus(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    smi.write_text(
        "#!/bin/sh\ntest \"$1\" = -L && printf 'GPU 0: H200 (UUID: a)\\n  MIG 1g: x\\nGPU 1: H200 (UUID: b)\\n'\n"
    )
    smi.chmod(0o755)
    assert gpus.devices(environ) == ["0", "1"]
    smi.write_text("#!/bin/sh\necho no driver >&2; exit 9\n")
    assert gpus.devices(environ) == []
    smi.write_text("#!/bin/sh\nprintf '\\377'\n")
    assert gpus.devices(environ) == []
    assert gpus.devices({"PATH": str(tmp_path / "none")}) == []


@pytest.mark.parametrize(
    ("visible", "replicas", "gpus", "warning"),
    [
        ("", 1, 0, "a replica of this app asks for --gpu 2, and this machine ({}) has none"),
        ("0", 2, 0, "a replica of this app asks for --gpu 2, and this machine ({}) has 1"),
        ("0,1", 1, 0, ""),
        (
            "0,1",
            2,
            0,
            "2 replicas of this app ask for GPUs, and each will see all 2 of this machine ({}); -cfg gpus=4 ",
        ),
        ("", 2, 2, ""),
    ],
)
def test_gpus_that_are_not_there_or_not_divided(
    visible: str,
    replicas: int,
    gpus: int,
    warning: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    role = Role("r", image="", entrypoint="x", num_replicas=replicas, resource=Resource(1, 2, 1))
    Runner("", {"monarch_local": monarch_local}).dryrun(AppDef("a", [role]), "monarch_local", {"gpus": gpus})
    warnings = [record.getMessage() for record in caplog.records if record.name == "torchx_monarch"]
    assert len(warnings) == bool(warning) and warning.format(os.uname().nodename) in "".join(warnings)


@pytest.mark.parametrize("name", ["a", "a/b", "", "..", "-x", "\u540d\u524d", "x" * 300, "a b\n"])
def test_app_ids(name: str) -> None:
    app_id = LocalBackend().render(AppDef(name, []), SubmittedApp(AppDef(name, []), []), LocalOpts()).app_id
    assert state_files.is_app_id(app_id)
    assert app_id[0] not in "-." and len(app_id) < 130


@given(st.lists(words | names, min_size=2, max_size=2, unique=True))
def test_names_of_paths(two: list[str]) -> None:
    first, other = (state_files.path_name(name) for name in two)
    assert first != other
    for part in (first, other):
        assert part not in ("", ".", "..") and "/" not in part and "\0" not in part and part.isascii()


@pytest.mark.parametrize(
    ("command", "is_host"),
    [
        ("python -m torchx_monarch.host --app x", True),
        ("/usr/bin/python3.11 -X faulthandler -u -m torchx_monarch.host", True),
        ("bash set-up.sh python -m torchx_monarch.host", False),
        ("python wrap.py -m torchx_monarch.host", False),
        ("python -c code -m torchx_monarch.host", False),
        ("python -m other torchx_monarch.host", False),
        ("python -m torchx_monarch.hosts", False),
        ("python", False),
        ("", False),
    ],
)
def test_what_a_host_is(command: str, is_host: bool) -> None:
    assert (processes._HOST.match("\0".join(command.split()).encode()) is not None) is is_host


def test_this_process() -> None:
    me = processes.identity(os.getpid())
    assert me is not None and me.start > 0
    assert processes.process(os.getpid()).parent == os.getppid()  # type: ignore[union-attr]
    assert processes.identity(2**22 + 1) is None
    assert not processes.send(processes.ProcessIdentity(os.getpid(), me.start + 1), 9)


def test_json_files_are_replaced_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "f.json")
    state_files.write_json(path, {"a": 1, "s": "\udcff\u00e9"})
    assert state_files.load_undamaged(dict, path) == {"a": 1, "s": "\udcff\u00e9"}
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(tmp_path) == ["f.json"]
    for damaged in ("", "[1]", '{"a'):
        (tmp_path / "f.json").write_text(damaged)
        assert state_files.load_undamaged(dict, path) is None
    with pytest.raises(OSError):
        state_files.write_json(str(tmp_path / "no" / "f.json"), {})


def test_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert events.read(path) == ([], 0)
    assert events.append(path, "one", "first\nline", seconds=1.5, rank=3, odd=Path("/x"))
    found, offset = events.read(path)
    assert found == [{**found[0], "kind": "one", "message": "first\nline", "seconds": 1.5, "rank": 3, "odd": "/x"}]
    with path.open("a") as file:
        file.write('not json\n{"time": 1.5, "message": "m", "kind": "half')
    assert events.read(path, offset)[0] == []
    offset = events.read(path, offset)[1]
    with path.open("a") as file:
        file.write('"}\n')
    assert events.read(path, offset) == ([{"time": 1.5, "message": "m", "kind": "half"}], path.stat().st_size)
    for field in ('"role": []', '"role": 7', '"seconds": ""', '"seconds": []', '"seconds": 1e300', '"time": NaN'):
        path.write_text(f'{{"time": 1.5, "kind": "hosts", "message": "m", {field}}}\n')
        assert events.read(path)[0] == [], field
    path.write_text('{"time": 1.5, "kind": "hosts", "message": "m", "role": null, "seconds": null}\n')
    assert len(events.read(path)[0]) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not events.append(tmp_path / "no" / "events", "x", "y")


def test_events_are_read_to_the_end_and_stay_short_with_many_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reporter = tmp_path / "events.jsonl", Reporter(Console(2), str(tmp_path / "events.jsonl"), "r")
    pids = tuple(range(10_000, 18_000))
    for attempt in range(3):
        reporter.ranks_started("ranks", [events.HostStart(0, pids=pids)], attempt=attempt)
        reporter.ranks_ended("ended", [events.RankEnd(rank, 1, 1.0, 2.0) for rank in range(8_000)], attempt=attempt)
        reporter.restarted("restart", attempt=attempt + 1)
    WriterThread.finish()
    assert path.stat().st_size < 2_000
    monkeypatch.setattr(events, "_PIECE", 300)
    assert count_rank_restarts(events.read(path)[0]) == 3
    monkeypatch.undo()

    def with_details() -> list[int]:
        found = events.read_detailed(path)
        ranks = [len(event["hosts"][0]["pids"]) for event in found if "hosts" in event]
        return ranks + [len(event["exits"]) for event in found if "exits" in event]

    assert with_details() == [8_000] * 6
    monkeypatch.setattr(events, "_MAX_DETAILS", 1)
    assert with_details() == [8_000] * 2, "those of the last attempt alone"


@pytest.fixture
def job() -> str:
    """Return an app's marker that no test beside this one has: a removal kills each process with the marker."""
    return f"a-removed1:{uuid.uuid4().hex}"


@pytest.fixture
def paths(tmp_path: Path, job: str) -> state_files.AppPaths:
    """Return the paths of an app whose folder holds its request."""
    root = tmp_path / "a-removed1"
    root.mkdir(mode=0o700)
    found = state_files.AppPaths(str(root))
    state_files.write_json(found.request, asdict(SupervisorRequest("a-removed1", "a", [], job=job)))
    return found


@pytest.fixture
def supervisor(job: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process with the app's marker, which ends when its stdin is closed."""
    env = {**os.environ, processes.MARKER: job}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=env) as process:
        until(lambda: processes.marked(job), "its environment")  # the kernel shows it a little later
        yield process


def test_waits_for_the_supervisor_before_it_removes_the_folder(
    paths: state_files.AppPaths, supervisor: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_ENDING_TIME", 60.0)
    removal = threading.Thread(target=folder.remove_ended, args=[paths])
    removal.start()
    assert os.path.exists(paths.root) and supervisor.stdin is not None
    supervisor.stdin.close()
    assert supervisor.wait(WITHIN) == 0, "it has ended by itself"
    removal.join(60)
    assert not os.path.exists(paths.root)


def test_kills_what_does_not_end(
    paths: state_files.AppPaths, supervisor: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_ENDING_TIME", 0.0)
    folder.remove_ended(paths)
    assert supervisor.wait(WITHIN) == -9
    assert not os.path.exists(paths.root)


def test_a_supervisor_that_does_not_start_in_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = tmp_path / "python"
    hung.write_text(f"#!/bin/sh\nsleep 10\ntouch {tmp_path}/waited\n")
    hung.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(hung))
    monkeypatch.setattr(submit, "_START_TIMEOUT", 0.1)
    with pytest.raises(SubmitError, match="it printed nothing"):
        submit.submit(SupervisorRequest("a-hung", "a", []), {})
    assert not (tmp_path / "waited").exists() and not os.path.exists(state_files.app_paths("a-hung").root)


def test_pruning_reads_no_record_that_is_young(paths: state_files.AppPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    monkeypatch.setattr(folder, "current_state", lambda found: read.append(found.app_id))
    state_files.write_json(paths.status, {})
    for age, expected in ((13, []), (15, [paths.app_id])):
        os.utime(paths.status, (time.time() - age * 86400,) * 2)
        assert folder.prune(os.path.dirname(paths.root)) == [] and read == expected


def test_removes_an_app_with_a_damaged_request(paths: state_files.AppPaths) -> None:
    Path(paths.request).write_text("{")
    folder.remove_ended(paths)
    assert not os.path.exists(paths.root)


def test_the_exit_of_a_process_is_awaited_and_not_that_of_another_with_its_pid() -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    with child:
        target = processes.identity(child.pid)
        assert target is not None
        assert processes.await_exit(target, 0.0) and child.poll() is None  # it has not exited in that time
        assert not processes.await_exit(replace(target, start=target.start - 1), WITHIN)
        child.stdin.close()
        processes.await_exit(target, WITHIN)  # False if it has exited before the call
        assert processes.identity(child.pid) is None
    assert not processes.await_exit(target, WITHIN)
