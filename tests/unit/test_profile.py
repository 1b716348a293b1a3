# SPDX-License-Identifier: BSD-3-Clause
"""Profiles of ranks as they are parsed and written."""

from __future__ import annotations

import asyncio
import json
import tempfile
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest

from torchx_monarch.host.ranks import rank_profiles
from torchx_monarch.insight.profile import RankProfile, collapsed, flame_graph, parse_collapsed, speedscope

_SVG = "{http://www.w3.org/2000/svg}"

_RAW = """\
<module> (/run/zygote_main.py:9);main (/run/zygote_main.py:5);<module> (/train.py:8);step (/train.py:7) 30
<module> (/run/zygote_main.py:9);main (/run/zygote_main.py:5);<module> (/train.py:8);load (/data.py:3) 60
_bootstrap (/lib/threading.py:1002);work (/train.py:4) 10
"""


def _profile(rank: int = 0, text: str = _RAW) -> RankProfile:
    return RankProfile(rank, 0, 7, parse_collapsed(text, 10_000, ["/run/zygote_main.py"]))


def test_what_py_spy_writes_is_parsed() -> None:
    assert _profile().samples == {
        "<module> (/train.py:8);load (/data.py:3)": 60,
        "<module> (/train.py:8);step (/train.py:7)": 30,
        "_bootstrap (/lib/threading.py:1002);work (/train.py:4)": 10,
    }


def test_what_a_rank_names_is_limited_and_escaped() -> None:
    hostile = f'{"f" * 5000} (/x.py:1) 1\n\x1b[2J<script>&" (/x\r.py:1) 3\nno number\n5\n {9**40}\n'
    hostile += f"{';'.join('g' * 900)} 2\n"
    profile = _profile(text=hostile)
    assert [*profile.samples.values()] == [3, 2, 1] and "\x1b" not in str([*profile.samples])
    assert max(len(stack) for stack in profile.samples) < 500
    assert parse_collapsed("a 1\nbb 3\ncc 2\n", 14) == {"bb": 3, "cc": 2}
    graph = flame_graph([profile], "a <title>\x1b")
    assert "<script>" not in graph and ElementTree.fromstring(graph).tag == f"{_SVG}svg"


def test_a_flame_graph_has_a_width_for_each_share_of_the_time() -> None:
    root = ElementTree.fromstring(flame_graph([_profile(), _profile(1)], "two ranks"))
    widths = {
        (frame.findtext(f"{_SVG}title") or "").partition(":")[0]: float(frame.find(f"{_SVG}rect").attrib["width"])  # type: ignore[union-attr]
        for frame in root.iter(f"{_SVG}g")
    }
    assert widths["all"] == 1199.5 and widths["rank 0"] == widths["rank 1"] == 599.5
    assert widths["load (/data.py"] == 359.5 and widths["step (/train.py"] == 179.5
    shown = [text.text for text in root.iter(f"{_SVG}text")]
    assert "load (data.py:3)" in shown and "step (train.py:7)" in shown


def test_speedscope_and_text_have_the_same_samples() -> None:
    written = json.loads(speedscope([_profile(), _profile(3)]))
    names = [frame["name"] for frame in written["shared"]["frames"]]
    first, second = written["profiles"]
    assert [first["name"], second["name"]] == ["rank 0", "rank 3"] and first["endValue"] == 100
    assert [names[index] for index in first["samples"][0]] == ["<module> (/train.py:8)", "load (/data.py:3)"]
    assert collapsed([_profile()]).startswith("<module> (/train.py:8);load (/data.py:3) 60\n")
    assert collapsed([_profile(), _profile(3)]).count("rank 3;") == 3
    assert flame_graph([], "nothing").endswith("</svg>\n")


def test_without_a_folder_for_samples_the_rank_has_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nosuch")
    (found,) = asyncio.run(rank_profiles.profile([Mock(rank=3, is_running=True)], 0, 1.0, False))
    assert found.rank == 3 and "No such file" in found.problem
