# SPDX-License-Identifier: BSD-3-Clause
"""Stacks and profiles: what is parsed of ``faulthandler`` and py-spy, how it is grouped, and what a person reads."""

from __future__ import annotations

import dataclasses
import faulthandler
import itertools
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.waits import until
from torchx_monarch.cli import explain
from torchx_monarch.insight.profile import RankProfile, collapsed, flame_graph, parse_collapsed, speedscope
from torchx_monarch.insight.stacks import (
    Frame,
    ProcessStacks,
    SharedStacks,
    ThreadStack,
    parse_faulthandler,
    rank_ranges,
    render,
    shared_stacks,
)
from torchx_monarch.insight.summary import raised_at
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.system.process_status import kernel_wait, system_call

DUMP = """Thread 0x00007f24b1ffb640 (most recent call first):
  <no Python frame>

Thread 0x00007f24b27fc640 [pin memory] (most recent call first):
  File "/x/data.py", line 31 in do_one_step
  File "/usr/lib/threading.py", line 982 in run

Current thread 0x00007f24b4a6d740 (most recent call first):
  File "/x/train.py", line 12 in step
  File "/x/train.py", line ??? in <module>
  File "/us/rank_main.py", line 189 in _run
  File "/us/zygote_main.py", line 480 in main
"""


def process(rank: int, *frames: str, child: str = "", problem: str = "", pid: int = 0) -> ProcessStacks:
    stack = tuple(Frame("/x/train.py", 1, name) for name in frames)
    return ProcessStacks(
        rank, rank // 2, pid or 100 + rank, child, (ThreadStack("", stack),) if frames else (), problem
    )


def test_the_main_thread_comes_first_and_our_frames_are_left_out() -> None:
    main, pinning, other = parse_faulthandler(DUMP, ("/us/rank_main.py", "/us/zygote_main.py"))
    assert main.frames == (Frame("/x/train.py", 12, "step"), Frame("/x/train.py", 0, "<module>"))
    assert (pinning.name, pinning.frames[0]) == ("pin memory", Frame("/x/data.py", 31, "do_one_step"))
    assert other == ThreadStack("", ())


def test_frames_of_ours_above_the_program_stay() -> None:
    frames = parse_faulthandler('Thread 0x1 (most recent call first):\n  File "/us/a.py", line 1 in f\n', ())[0].frames
    assert frames == (Frame("/us/a.py", 1, "f"),)


def test_names_that_are_not_ascii(tmp_path: Path) -> None:
    dump: dict[str, Any] = {}
    exec(compile("def über(dump, file):\n    dump(file)\n", "/prög/漢/😀/\udc80\x9b.py", "exec"), dump)
    with open(tmp_path / "stacks", "w+") as file:
        dump["über"](faulthandler.dump_traceback, file)
        text = (tmp_path / "stacks").read_text()
        frames = parse_faulthandler(text)[0].frames
    assert frames[0] == Frame(r"/prög/漢/😀/\udc80\x9b.py", 2, "über")
    assert raised_at(explain._crash(text)) == r"/prög/漢/😀/\udc80\x9b.py, line 2, in über"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n" * 100,
        '  File "/x.py", line 1 in f\n',  # no thread
        "Thread 0x (most recent call first):\n",
        'Thread 0x1 (most recent call first):\n  File "/x.py", line 99999999999999999999 in f\n',
        "\x00\x1b[2J" * 1000,
    ],
)
def test_lines_that_are_no_stack_are_dropped(text: str) -> None:
    assert not any(stack.frames for stack in parse_faulthandler(text))


def test_what_a_rank_writes_itself_is_limited_and_escaped() -> None:
    thread = "Thread 0x1 (most recent call first):\n" + '  File "\x1b[31m%s", line 1 in f\x9b\n' % ("x" * 5000) * 5000
    stacks = parse_faulthandler(thread * 2 + "Thread 0x1 (most recent call first):\n" * 5000)
    assert len(stacks) == 200 and max(len(process.frames) for process in stacks) == 200
    shown = "\n".join(render([ProcessStacks(0, 0, 1, "\x1b", stacks, "")]))
    assert "\x1b" not in shown and "\x9b" not in shown and len(shown) < 1 << 20


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        ((3,), "rank 3"),
        ((0, 1, 2, 4, 5, 7), "ranks 0-2,4-5,7"),
        ((0, 2), "ranks 0,2"),
        ((0, 1), "ranks 0-1"),
        (range(1000), "ranks 0-999"),
        (range(0, 400, 2), f"ranks {','.join(map(str, range(0, 400, 2)))}"),
        (range(0, 65536, 8), f"ranks {','.join(map(str, range(0, 1600, 8)))} and 7992 more"),
    ],
    ids=["one", "runs", "apart", "two", "all", "many", "very many"],
)
def test_ranges_of_ranks(ranks: Sequence[int], shown: str) -> None:
    assert rank_ranges(ranks) == shown


def test_the_odd_rank_comes_first_and_children_after_the_ranks() -> None:
    worker = process(1, "fetch", child="pt_data_worker", pid=900)
    stopped = process(7, problem="stopped (SIGSTOP)")
    waiting = [process(rank, "all_reduce", "main") for rank in (0, 1, 2, 4, 5, 6)]
    lines = render([*waiting, worker, process(3, "load", "main"), stopped])
    assert [line for line in lines if not line.startswith(" ")] == [
        "rank 3 (host 1, pid 103): main thread",
        "rank 7 (host 3, pid 107): main thread: stopped (SIGSTOP)",
        "ranks 0-2,4-6: main thread",
        "rank 1 (host 0, pid 900): pt_data_worker, main thread",
    ]
    assert "    /x/train.py:1 in all_reduce" in lines


def test_several_children_of_one_rank_are_counted() -> None:
    workers = [process(0, "fetch", child="pt_data_worker", pid=pid) for pid in (5, 6, 7)]
    assert render(workers)[0] == "rank 0 (3 of them): pt_data_worker, main thread"


def test_other_threads_are_groups_of_their_own() -> None:
    busy = ThreadStack("", (Frame("/x.py", 1, "beat"),))
    ranks = [
        dataclasses.replace(stacks, threads=(*stacks.threads, busy, ThreadStack("", ())))
        for stacks in (process(0, "f"), process(1, "f"))
    ]
    titles = [line for line in render(ranks) if not line.startswith(" ")]
    assert titles == ["ranks 0-1: main thread", "ranks 0-1: other thread"]


def test_equal_stacks_are_sent_and_decoded_once() -> None:
    stacks = [*(process(rank, "all_reduce", "main") for rank in range(5)), process(5, "load", "main")]
    hosts = [shared_stacks(stacks[at : at + 2]) for at in (0, 2, 4)]
    assert [len(host) for host in hosts] == [1, 1, 2]
    received = [decode(list[SharedStacks], json.loads(json.dumps(host, default=vars))) for host in hosts]
    assert received[0][0].threads is received[1][0].threads
    together = shared_stacks(itertools.chain(*received))
    assert [len(shared.processes) for shared in together] == [5, 1]
    assert [process for shared in together for process in shared.each_process()] == stacks
    with pytest.raises(DecodeError, match="file is 1, not str"):
        decode(SharedStacks, {**vars(together[0]), "threads": [{"name": "", "frames": [{"file": 1}]}]})


_SVG = "{http://www.w3.org/2000/svg}"

_RAW = """\
<module> (/run/zygote_main.py:9);main (/run/zygote_main.py:5);<module> (/train.py:8);step (/train.py:7) 30
<module> (/run/zygote_main.py:9);main (/run/zygote_main.py:5);<module> (/train.py:8);load (/data.py:3) 60
_bootstrap (/lib/threading.py:1002);work (/train.py:4) 10
"""


def test_the_file_for_which_a_process_waits_inside_the_kernel_is_named(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    reader = os.open(fifo, os.O_RDWR)
    try:
        with subprocess.Popen(["cat"], stdin=reader, stdout=subprocess.DEVNULL) as waiting:
            try:
                until(lambda: kernel_wait(waiting.pid).startswith(f"read of {fifo}"), "the wait of cat")
                assert system_call(waiting.pid) == ("read", str(fifo))
            finally:
                waiting.kill()
    finally:
        os.close(reader)
    with subprocess.Popen(["cat", "fifo"], cwd=tmp_path, stdout=subprocess.DEVNULL) as opening:
        try:
            until(lambda: system_call(opening.pid) == ("openat", str(fifo)), "cat to open it")
        finally:
            opening.kill()


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
