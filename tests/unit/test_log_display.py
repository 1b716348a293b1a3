# SPDX-License-Identifier: BSD-3-Clause
"""How `torchx log`, `torchx run --log` and `torchx monarch exec` show the lines of ranks."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchx.specs import AppDef, Role

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.options import compiled
from torchx_monarch.backends.core.snapshot import AppSnapshot, ReplicaSnapshot, RoleSnapshot
from torchx_monarch.client.run import Collector
from torchx_monarch.insight.log_lines import LineParser, LogLines, is_coloured, is_terminal
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.log_display import show_lines

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


def shown(snapshot: AppSnapshot, *pieces: str, stream: io.TextIOBase | None = None, regex: str = "") -> list[str]:
    return list(show_lines(snapshot, "r0", pieces, compiled(regex), stream or io.StringIO()))  # type: ignore[arg-type]


def test_in_a_pipe_a_line_has_a_short_prefix_and_no_control_sequence() -> None:
    lines = ("[digits0]:epoch 1\n", "[monarch] mesh\n", "raw\n", "[digits1]:\r 10%", "\r 20%", "\n")
    assert shown(app(), *lines) == ["[0] epoch 1\n", "[monarch] mesh\n", "raw\n", "[1]  20%\n"]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["[d0]:\r 10%", "\r 20%"], ["[0]  20%\n"]),  # the log has no more
        (["[d0]:\r 10%\n", "[d1]:x\n", "[d0]:[continued] \r 20%\n"], ["[1] x\n", "[0]  20%\n"]),
        (["[d0]:\r 10%\n", "[d0]:[continued] \r 20%\n", "[d0]:end\n"], ["[0]  20%\n", "[0] end\n"]),
        (["[d0]:\r 10%\n", "[d1]:x\n", "[d0]:[continued] \n", "[d0]:y\n"], ["[1] x\n", "[0]  10%\n", "[0] y\n"]),
        (["[d0]:10%\r", "20%\r", "\n", "[d0]:y\n"], ["[0] 20%\r\n", "[0] y\n"]),  # a state ends with its return
        (["[d0]:\r 99%\n", "[d0]:\r 0%\n"], ["[0]  99%\n", "[0]  0%\n"]),  # two bars
        (["[d0]:\r 99%\r    \r\n", "[d0]:x\r\n"], ["[0] x\r\n"]),  # a bar that leaves nothing behind
        (["[d0]:a long line\n", "[d0]:[continued] of pieces"], ["[0] a long line\n", "[0] [continued] of pieces"]),
    ],
)
def test_of_a_progress_bar_the_last_state_is_shown(pieces: list[str], lines: list[str]) -> None:
    assert shown(app("--tee", "3", "--role", "d"), *pieces) == lines


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "[d0]:", "[d1]:", "[d01]:", "[monarch] ", "[x2]:", "[d0]:[continued] "]),
            st.sampled_from(["a", "[d1]:b", "c\r", "\r 5%", "\r ", "", "\x85[d0]:\u2028"]),
        ),
        min_size=1,
    ),
    st.sampled_from([("--tee", "3"), ("--tee", "1"), ("--tee", "0")]),
    st.sampled_from(["", "5", r"^\[1\] "]),
)
def test_lines_that_come_together_are_shown_as_those_that_come_alone(
    parts: list[tuple[str, str]], tee: tuple[str, str], regex: str
) -> None:
    lines = [f"{prefix}{text}\n" for prefix, text in parts]
    found = [shown(app(*tee, "--role", "d"), *pieces, regex=regex) for pieces in (lines, ["".join(lines)])]
    assert "".join(found[0]) == "".join(found[1])


def test_lines_with_a_prefix_of_the_users_are_shown_as_they_are() -> None:
    lines = ["[w1]:text\n", "[digits1]:text\n"]
    assert shown(app(env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[w${rank}]:"}), *lines) == lines


def test_a_regular_expression_is_for_what_is_shown() -> None:
    lines = ("[digits0]:a\n", "[digits1]:b\n")
    assert shown(app(), *lines, regex=r"^\[1\] b") == ["[1] b\n"]
    with pytest.raises(UserError, match="is no regular expression"):
        shown(app(), regex="(")


def test_a_terminal_shows_colours_and_progress_bars(
    terminal: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("[digits0]:epoch 1\n", "[monarch] mesh\n", "[digits1]:\r 10%", "\r 20%", "\n")
    bar = [f"{YELLOW}[1] {END}\r 10%", "\r 20%", "\n"]
    assert shown(app(), *lines, stream=terminal) == [f"{CYAN}[0] {END}epoch 1\n", f"{DIM}[monarch] {END}mesh\n", *bar]
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(app(), *lines[:2], stream=terminal) == ["[0] epoch 1\n", "[monarch] mesh\n"]


def output(rank: int, prefix: str, text: str, **more: object) -> dict[str, object]:
    return {"type": "output", "rank": rank, "stream": "stdout", "text": text, "prefix": prefix, **more}


def test_exec_shows_the_last_state_of_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    collector = Collector("stream")
    for rank, text in ((0, "[d0]:\r 10%"), (1, "[d1]:x\n[d1]:\r 1%"), (0, "\r 20%"), (0, "\r 30%\n[d0]:end\n")):
        collector._show(output(rank, f"[d{rank}]:", text))
    assert capsys.readouterr().out == "[1] x\n[0]  30%\n[0] end\n"
    for text in ("[d2]:\r 40%", "\r     \r"):  # tqdm's leave=False
        collector._show(output(2, "[d2]:", text))
    assert collector._streams["stdout"].rest() == "[1]  1%\n"


def test_exec_names_every_rank_on_a_terminal(
    terminal: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr("sys.stdout", terminal)
    collector = Collector("stream")
    monkeypatch.undo()
    own = "2026-11-22T17:28:50.123Z own\n"
    collector._show(output(0, "", "half"))
    collector._show(output(1, "[digits1]:", f"[digits1]:{own}[digits1]:x\n"))
    collector._show(output(3, "", "[w1]:x\n"))
    shown = capsysbinary.readouterr().out.decode().splitlines(keepends=True)
    rank1 = f"{YELLOW}[1] {END}"
    assert shown == [f"{CYAN}[0] {END}half\n", f"{rank1}{own}", f"{rank1}x\n", f"\x1b[35m[3] {END}[w1]:x\n"]


@pytest.mark.parametrize(
    ("role_name", "line", "rank", "plain"),
    [
        ("digits", "[digits0]:epoch 1\n", 0, "[0] epoch 1\n"),
        ("digits", "[digits510]:\n", 510, "[510] \n"),
        ("", "[7]:dist.ddp\n", 7, "[7] dist.ddp\n"),
        ("bert2", "[bert23]:text", 3, "[3] text"),
        ("digits", "[digits0]:[digits1]:[monarch] x", 0, "[0] [digits1]:[monarch] x"),
        ("digits", "[digits0]:2026-11-25T10:00:00.123Z x", 0, "[0] 2026-11-25T10:00:00.123Z x"),
        ("digits", "[other3]:text", None, "[other3]:text"),
        ("digits", "raw [digits0]:text", None, "raw [digits0]:text"),
        ("digits", "[monarch] ranks 2/2", None, "[monarch] ranks 2/2"),
        ("a.b", "[aXb3]:text", None, "[aXb3]:text"),
        ("r", f"[r{'9' * 5000}]:text", None, f"[r{'9' * 5000}]:text"),
    ],
)
def test_the_prefix_names_the_rank(role_name: str, line: str, rank: int | None, plain: str) -> None:
    (parsed,) = LineParser(role_name).parse(line)
    assert parsed.rank == rank
    assert parsed.plain() == plain
    assert parsed.on_terminal(coloured=False) == plain


@pytest.mark.parametrize(
    ("parser", "line", "rank"),
    [
        (LineParser("r", is_complete=False), "[r3]:a line of --tee 1 has it, another can look so", 3),
        (LineParser(), "[step10]: loss=10", None),
        (LineParser(), "2026-11-25T10:00:00.123Z the program's own time", None),
    ],
)
def test_what_a_program_may_have_written_stays(parser: LineParser, line: str, rank: int | None) -> None:
    (parsed,) = parser.parse(line)
    assert (parsed.rank, parsed.plain(), parsed.on_terminal(coloured=False)) == (rank, line, line)


def test_time_is_utc_in_files_and_local_on_a_terminal() -> None:
    line = LogLines("text\n", "[1] ", 1, 1795368530.1239)
    assert line.plain() == "2026-11-22T17:28:50.123Z [1] text\n"
    assert line.on_terminal(coloured=False).endswith(":50.123 [1] text\n")


def test_each_rank_has_a_colour_of_its_own() -> None:
    shown = [line.on_terminal(True) for rank in range(9) for line in LineParser("r").parse(f"[r{rank}]:text")]
    assert len({text.partition("[")[2].partition("m")[0] for text in shown}) == 9
    assert all(text.endswith("\x1b[0mtext") for text in shown)
    assert [line.on_terminal(True) for line in LineParser().parse("text")] == ["text"]


def test_colours_are_for_terminals_that_want_them(terminal: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_terminal(terminal) and is_coloured(terminal)
    assert not is_coloured(io.StringIO()) and not is_coloured(None)
    monkeypatch.setenv("NO_COLOR", "1")
    assert is_terminal(terminal) and not is_coloured(terminal)
    monkeypatch.setenv("NO_COLOR", "")
    assert is_coloured(terminal)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(terminal) and not is_coloured(terminal)
