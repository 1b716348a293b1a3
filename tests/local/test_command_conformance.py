# SPDX-License-Identifier: BSD-3-Clause
"""What a command sees with a host process before it, and without one: no difference."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torchx.schedulers.api import Stream
from torchx.specs import AppState, Role

from tests.local.detached import Detached
from tests.waits import until

_SHOWS = """
import json, os, resource, sys
def is_open(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")
with open("/proc/self/status") as file:
    status = dict(line.rstrip().split(":", 1) for line in file)
shown = {
    "argv": sys.argv[2:],
    "environ": dict(os.environ),
    "cwd": os.getcwd(),
    "umask": status["Umask"],
    "signals": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd")},
    "descriptors": {fd: os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in "0123456789" if is_open(fd)},
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:7] == "RLIMIT_"},
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "nice": os.nice(0),
    "cpus": sorted(os.sched_getaffinity(0)),
    "capabilities": [status[name] for name in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Groups", "Uid")],
    "oom": open("/proc/self/oom_score_adj").read(),
    "stdin": sys.stdin.read(),
}
with open(sys.argv[1], "w") as file:
    json.dump(shown, file)
"""

_PRINTS = rb"""
printf 'one\ntwo\r\nbar 1\rbar 2\n\377\376 no UTF-8\n[monarch] looks like ours\n'
head -c 200000 /dev/zero | tr '\0' 'x'; echo
echo to stderr >&2
printf 'no line feed'
"""


def _command(tmp_path: Path, text: str | bytes, *args: str, wrap: bool, **more: Any) -> Role:
    """Return a role that runs an executable file, which is a command for any rule."""
    path = tmp_path / "command"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(0o755)
    more = {"metadata": {"monarch": {"wrap": wrap}}, **more}
    return Role("r", image="", entrypoint=str(path), args=list(args), **more)


@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "1"}])
def test_a_command_sees_no_host(
    apps: Detached, tmp_path: Path, locale: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_CTYPE", "LC_ALL", "LANG", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    shown = []
    for wrap in (False, True):
        path = tmp_path / f"shown{wrap}"
        env = {"A": "b c\n", "SHOWN": str(path), **locale}
        args = [str(path), "", "a b", "*", "--", "$$HOME"]
        role = _command(tmp_path, f"#!{sys.executable}{_SHOWS}", *args, wrap=wrap, env=env)
        app_id = apps.run(role)
        assert apps.wait(app_id).state is AppState.SUCCEEDED, apps.log(app_id)
        text = path.read_text().replace(app_id, "APP").replace(str(path), "SHOWN")
        for name in ("MONARCH_RUN_DIR", "MONARCH_JOB", "MONARCH_LOG_REFERENCES"):
            value = re.search(rf'"{name}": "([^"]+)"', text)
            assert value is not None
            text = text.replace(value[1], name)
        shown.append(json.loads(text))
    assert shown[0]["argv"] == ["", "a b", "*", "--", "$HOME"] and shown[0]["stdin"] == ""
    assert [name for name in shown[0]["environ"] if shown[0]["environ"][name] != shown[1]["environ"].get(name)] == []
    assert shown[0] == shown[1]


def test_what_a_command_prints_stays_what_it_is(apps: Detached, tmp_path: Path) -> None:
    printed = []
    for wrap in (False, True):
        app_id = apps.run(_command(tmp_path, b"#!/bin/sh\n" + _PRINTS, wrap=wrap))
        assert apps.wait(app_id).state is AppState.SUCCEEDED
        printed.append([apps.log(app_id, streams=stream) for stream in (Stream.STDOUT, Stream.STDERR)])
    for streams in zip(*printed, strict=True):
        assert [line[:80] for line in streams[0]] == [line[:80] for line in streams[1]]
    assert printed[0] == printed[1] and "".join(printed[0][0]).count("x") == 200_000


@pytest.mark.parametrize(
    ("ends", "code"), [("exit 3", 3), ("kill -SEGV $$", 128 + 11), ("exec no-such", 127), ("exit 255", 255)]
)
def test_a_command_ends_as_it_does_alone(apps: Detached, tmp_path: Path, ends: str, code: int) -> None:
    for wrap in (False, True):
        app_id = apps.run(_command(tmp_path, f"#!/bin/sh\n{ends}", wrap=wrap))
        status = apps.wait(app_id)
        assert status.state is AppState.FAILED
        assert json.loads(status.structured_error_msg if wrap else "null") is None or (
            json.loads(status.structured_error_msg)["message"]["errorCode"] == code
        )
        exit_code = apps.record(app_id)["roles"][0]["replicas"][0]["exit_code"]
        assert (exit_code if exit_code >= 0 else 128 - exit_code) == code


@pytest.mark.parametrize("stopped", [False, True])
def test_a_command_is_asked_to_stop_with_its_children(apps: Detached, tmp_path: Path, stopped: bool) -> None:
    said = []
    trap = "trap 'echo TERM; exit 0' TERM"  # a stopped process handles it if it is continued
    text = f"#!/bin/sh\nexec 2>/dev/null\nsay() {{ {trap}; echo up; while :; do sleep 0.05; done; }}"
    for wrap in (False, True):
        app_id = apps.run(_command(tmp_path, f"{text}\n(say) & say", wrap=wrap))
        until(lambda app_id=app_id: apps.log(app_id).count("up\n") == 2, "both")
        pid = apps.record(app_id)["roles"][0]["replicas"][0]["pid"]
        while wrap and (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            pid, wrap = int(children[0]), False
        if stopped:
            os.kill(pid, 19)
        apps.runner.cancel(apps.handle(app_id))
        assert apps.wait(app_id).state is AppState.CANCELLED
        said.append(sorted(line for line in apps.log(app_id) if not line.startswith("[monarch]")))
    assert said[0] == said[1] and said[0].count("TERM\n") == 2
