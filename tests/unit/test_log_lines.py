# SPDX-License-Identifier: BSD-3-Clause
"""How a line of a log is shown: the prefix of its rank, its time, and colours."""

from __future__ import annotations

import io

import pytest

from torchx_monarch.insight.log_lines import TEMPLATE, LineParser, host_text, is_coloured, is_terminal, stamp

LOCAL = "[w${local_rank}]:"


@pytest.mark.parametrize(
    ("role_name", "template", "line", "rank", "plain"),
    [
        ("digits", TEMPLATE, "[digits0]:epoch 1\n", 0, "[0] epoch 1\n"),
        ("digits", TEMPLATE, "[digits510]:\n", 510, "[510] \n"),
        ("", TEMPLATE, "[7]:dist.ddp\n", 7, "[7] dist.ddp\n"),
        ("bert2", TEMPLATE, "[bert23]:text", 3, "[3] text"),
        ("digits", TEMPLATE, "[digits0]:[digits1]:[monarch] x", 0, "[0] [digits1]:[monarch] x"),
        ("digits", TEMPLATE, "[digits0]:2026-11-25T10:00:00.123Z x", 0, "[0] 2026-11-25T10:00:00.123Z x"),
        ("digits", TEMPLATE, "[other3]:text", None, "[other3]:text"),
        ("digits", TEMPLATE, "raw [digits0]:text", None, "raw [digits0]:text"),
        ("digits", TEMPLATE, "[monarch] ranks 2/2", None, "[monarch] ranks 2/2"),
        ("a.b", TEMPLATE, "[aXb3]:text", None, "[aXb3]:text"),
        ("r", "${rank}/${local_rank} ${rank} $$ é|", "3/1 3 $ é|text", 3, "3/1 3 $ é|text"),
        ("r", "${rank}/${rank}:", "3/4:text", None, "3/4:text"),
        ("r", LOCAL, "[w1]:text", 7, "[7] [w1]:text"),
        ("r", "${hostname} ${nothing} ${rank}|", "node-1 ${nothing} 5|text", 5, "node-1 ${nothing} 5|text"),
        ("r", TEMPLATE, f"[r{'9' * 5000}]:text", None, f"[r{'9' * 5000}]:text"),
        ("r", "", "[r3]:text", None, "[r3]:text"),
    ],
)
def test_the_prefix_names_the_rank_and_a_template_stays(
    role_name: str, template: str, line: str, rank: int | None, plain: str
) -> None:
    parsed = LineParser(role_name, template, first_rank=6).parse(line)
    assert parsed.rank == rank
    assert parsed.plain() == plain
    assert parsed.on_terminal(coloured=False) == plain


@pytest.mark.parametrize(
    ("parser", "line", "rank"),
    [
        (LineParser("r", TEMPLATE, is_complete=False), "[r3]:a line of --tee 1 has it, another can look so", 3),
        (LineParser(), "[step10]: loss=10", None),
        (LineParser(), "2026-11-25T10:00:00.123Z the program's own time", None),
        (LineParser("r", LOCAL), "[w1]:the replica's ranks are not known", None),
        (LineParser("r", LOCAL, is_complete=False, first_rank=6), "[w1]:text", 7),
    ],
)
def test_what_a_program_may_have_written_stays(parser: LineParser, line: str, rank: int | None) -> None:
    parsed = parser.parse(line)
    assert (parsed.rank, parsed.plain(), parsed.on_terminal(coloured=False)) == (rank, line, line)


def test_time_is_utc_in_files_and_local_on_a_terminal() -> None:
    stamped = LineParser("r", TEMPLATE, stamped=True)
    line = stamped.parse(f"{stamp(1795368530.1239)}[r1]:text\n")
    assert line.plain() == "2026-11-22T17:28:50.123Z [1] text\n"
    assert line.on_terminal(coloured=False).endswith(":50.123 [1] text\n")
    odd = "2026-99-99T17:28:50.123Z "
    assert stamped.parse(f"{odd}[r1]:text").on_terminal(coloured=False) == f"{odd}[1] text"
    assert stamped.parse("[monarch] of the supervisor").is_of_host
    assert [host_text(line) for line in (f"{odd}[monarch] mesh", "[monarch] mesh", "mesh")] == ["mesh", "mesh", None]


def test_each_rank_has_a_colour_of_its_own() -> None:
    shown = [LineParser("r", TEMPLATE).parse(f"[r{rank}]:text").on_terminal(coloured=True) for rank in range(9)]
    assert len({text.partition("[")[2].partition("m")[0] for text in shown}) == 9
    assert all(text.endswith("\x1b[0mtext") for text in shown)
    assert LineParser("r").parse("text").on_terminal(coloured=True) == "text"


def test_colours_are_for_terminals_that_want_them(terminal: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_terminal(terminal) and is_coloured(terminal)
    assert not is_coloured(io.StringIO()) and not is_coloured(None)
    monkeypatch.setenv("NO_COLOR", "1")
    assert is_terminal(terminal) and not is_coloured(terminal)
    monkeypatch.setenv("NO_COLOR", "")
    assert is_coloured(terminal)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(terminal) and not is_coloured(terminal)
