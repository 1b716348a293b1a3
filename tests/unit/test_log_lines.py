# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How a line of a log is shown: the prefix of its rank, its time, and colours."""

from __future__ import annotations

import io

import pytest

from torchx_monarch.insight.log_lines import TEMPLATE, LineParser, is_coloured, is_terminal, stamp


@pytest.mark.parametrize(
    ("role_name", "template", "line", "rank", "plain"),
    [
        ("digits", "", "[digits0]:epoch 1\n", 0, "[0] epoch 1\n"),
        ("digits", TEMPLATE, "[digits510]:\n", 510, "[510] \n"),
        ("", "", "[7]:dist.ddp\n", 7, "[7] dist.ddp\n"),
        (None, "", "[any-role12]:text", 12, "[12] text"),
        ("bert2", "", "[bert23]:text", 3, "[3] text"),
        ("digits", "", "[other3]:text", None, "[other3]:text"),
        ("digits", "", "raw [digits0]:text", None, "raw [digits0]:text"),
        ("digits", "", "[monarch] ranks 2/2", None, "[monarch] ranks 2/2"),
        ("a.b", "", "[aXb3]:text", None, "[aXb3]:text"),
        ("r", "${rank}/${local_rank} ${rank} $$ é|", "3/1 3 $ é|text", 3, "3/1 3 $ é|text"),
        ("r", "${rank}/${rank}:", "3/4:text", None, "3/4:text"),
        ("r", "<${local_rank}> ", "<1> text", None, "<1> text"),
        ("r", "${hostname} ${nothing} ${rank}|", "node-1 ${nothing} 5|text", 5, "node-1 ${nothing} 5|text"),
        ("r", "", f"[r{'9' * 5000}]:text", None, f"[r{'9' * 5000}]:text"),
    ],
)
def test_the_prefix_names_the_rank_and_a_template_stays(
    role_name: str | None, template: str, line: str, rank: int | None, plain: str
) -> None:
    parsed = LineParser(role_name, template).parse(line)
    assert parsed.rank == rank
    assert parsed.plain() == plain
    assert parsed.on_terminal(coloured=False) == plain


def test_time_is_utc_in_files_and_local_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    line = LineParser("r").parse(f"{stamp(1795368530.1239)}[r1]:text\n")
    assert line.plain() == "2026-11-22T17:28:50.123Z [1] text\n"
    assert line.on_terminal(coloured=False).endswith(":50.123 [1] text\n")
    odd = "2026-99-99T17:28:50.123Z "
    assert LineParser("r").parse(f"{odd}[r1]:text").on_terminal(coloured=False) == f"{odd}[1] text"


def test_each_rank_has_a_colour_of_its_own() -> None:
    shown = [LineParser("r").parse(f"[r{rank}]:text").on_terminal(coloured=True) for rank in range(9)]
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
