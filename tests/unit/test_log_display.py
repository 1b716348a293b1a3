# SPDX-License-Identifier: BSD-3-Clause
"""How `torchx log`, `torchx run --log` and `torchx monarch exec` show the lines of ranks."""

from __future__ import annotations

import io

import pytest
from torchx.specs import AppDef, Role
from torchx.util.log_tee_helpers import _prefix_line

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.client.run import Collector
from torchx_monarch.insight.log_lines import stamp
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.log_display import LogDisplay

ERASE = "\x1b[G\x1b[K"
CYAN, YELLOW, DIM, END = "\x1b[36m", "\x1b[33m", "\x1b[2m", "\x1b[0m"


def app(*args: str, replicas: int = 1, roles: int = 1, env: dict[str, str] | None = None) -> AppSnapshot:
    names = [f"r{index}" for index in range(roles)]
    size = ["--nnodes", str(replicas), "--nproc-per-node", "2"]
    words = [*size, "--role", "digits", *(args or ("--tee", "3")), "train.py"]
    command = {"image": "", "entrypoint": "torchrun", "args": words, "env": env or {}, "num_replicas": replicas}
    return AppSnapshot(
        "a",
        "a",
        [
            RoleSnapshot(RoleSpec(name, replicas), [ReplicaSnapshot(name, k, State.RUNNING) for k in range(replicas)])
            for name in names
        ],
        AppDef("a", [Role(name, **command) for name in names]),
    )


def shown(
    snapshot: AppSnapshot, *pieces: str, stream: io.TextIOBase | None = None, regex: str = "", replica: int = 0
) -> list[str]:
    display = LogDisplay(snapshot, "r0", replica, stream or io.StringIO())  # type: ignore[arg-type]
    return list(display.show(pieces, regex))


def test_in_a_pipe_a_line_has_a_short_prefix_and_no_control_sequence() -> None:
    lines = ("[digits0]:epoch 1\n", "[monarch] mesh\n", "raw\n", "[digits1]:\r 10%", "\r 20%", "\n")
    assert shown(app(), *lines) == ["[0] epoch 1\n", "[monarch] mesh\n", "raw\n", "[1] \r 10%", "\r 20%", "\n"]


def test_a_template_without_the_rank_is_shown_behind_it() -> None:
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[w${local_rank}]:"}
    assert shown(app(env=env, replicas=2), "[w1]:text\n", replica=1) == ["[3] [w1]:text\n"]
    elastic = app("--nnodes", "1:2", "--tee", "3", env=env, replicas=2)
    assert shown(elastic, "[w1]:text\n", replica=1) == ["[w1]:text\n"]  # rank 1 or 3


def test_a_regular_expression_is_for_what_is_shown() -> None:
    lines = ("[digits0]:a\n", "[digits1]:b\n")
    assert shown(app(), *lines, regex=r"^\[1\] b") == ["[1] b\n"]
    with pytest.raises(UserError, match="is no regular expression"):
        shown(app(), regex="(")


def test_a_terminal_shows_one_coloured_prefix(terminal: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("[digits0]:epoch 1\n", "[monarch] mesh\n")
    assert shown(app(), *lines, stream=terminal) == [
        f"{ERASE}{CYAN}[0] {END}epoch 1\n",
        f"{ERASE}{DIM}[monarch] {END}mesh\n",
    ]
    # TorchX's prefix says which host has written a line that names no rank, and of which role a rank is.
    assert shown(app(replicas=2), *lines, stream=terminal)[1] == f"{DIM}[monarch] {END}mesh\n"
    assert shown(app(roles=2), *lines, stream=terminal)[0] == f"{CYAN}[0] {END}epoch 1\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(app(), *lines, stream=terminal) == [f"{ERASE}[0] epoch 1\n", f"{ERASE}[monarch] mesh\n"]


def test_a_progress_bar_is_redrawn_behind_its_prefix(terminal: io.TextIOWrapper) -> None:
    pieces = shown(app(), "[digits1]:\r 10%", "\r 20%", "\n", stream=terminal)
    printed = "".join(_prefix_line("r0/0 ", piece) for piece in pieces)
    screen = ""
    for drawn in printed.split(ERASE):  # each erases the line so far
        screen = drawn
    assert screen == f"{YELLOW}[1] {END} 20%r0/0 \n"


def output(rank: int, prefix: str, text: str, **more: object) -> dict[str, object]:
    return {"type": "output", "rank": rank, "stream": "stdout", "text": text, "prefix": prefix, **more}


def test_exec_shows_the_same_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    collector = Collector("stream")
    for rank, prefix, text in (
        *((0, "[digits0]:", "[digits0]:one\n[digits0]:tw"), (0, "[digits0]:", "o\n"), (1, "", "raw\n")),
        *((13, "[bert213]:", "[bert213]:[step10]: x\n"), (2, "", "[rank2]: ValueError\n[step10]: loss=10\n")),
    ):
        collector._show(output(rank, prefix, text))
    assert capsys.readouterr().out == (
        "[0] one\n[0] two\nraw\n[13] [step10]: x\n[rank2]: ValueError\n[step10]: loss=10\n"
    )


def test_exec_names_every_rank_on_a_terminal(
    terminal: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr("sys.stdout", terminal)
    collector = Collector("stream")
    monkeypatch.undo()
    own, time = "2026-11-22T17:28:50.123Z own\n", stamp(1795368530.1239)
    collector._show(output(0, "", "half"))
    collector._show(output(1, "[digits1]:", f"[digits1]:{own}[digits1]:x\n"))
    collector._show(output(3, "", "[w1]:x\n"))
    collector._show(output(1, "[digits1]:", f"{time}[digits1]:{own}", stamped=True))
    *shown, stamped = capsysbinary.readouterr().out.decode().splitlines(keepends=True)
    rank1 = f"{YELLOW}[1] {END}"
    assert shown == [f"{CYAN}[0] {END}half\n", f"{rank1}{own}", f"{rank1}x\n", f"\x1b[35m[3] {END}[w1]:x\n"]
    assert stamped.startswith(DIM) and stamped.endswith(f":50.123 {END}{rank1}{own}")
