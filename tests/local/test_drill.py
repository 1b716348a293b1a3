# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch drill`` finds each resume fault that is planted in a program, and none in programs without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.local.test_cli import torchx

_TOGETHER = """
import os, signal, socket, time

def met():
    address = f"\\0{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if os.environ["RANK"] == "0":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            return listener.accept()[0]
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(address)
            return peer
        except OSError:
            peer.close()
            time.sleep(0.01)

def meet():
    try:
        peer.send(b".")
        if peer.recv(1):
            return
    except OSError:
        pass
    signal.pause()

peer = met()
"""
"""Two ranks that begin each step together, and that wait for one that has ended, as in a collective; without torch."""

_PROGRAM = (
    _TOGETHER
    + '''
"""Train with momentum, averaged weights, a learning-rate schedule, noise and shuffled data; save every 5th step."""
import glob, hashlib, json, os, random, sys, time

import torchx_monarch

planted, rank, ranks = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, PER_EPOCH = 60, 7
fresh = {"step": 0, "epoch": 0, "place": 0, "lr_step": 0, "weight": rank, "momentum": 0.0, "average": 0.0}
fresh["noise"] = random.Random(rank).getstate()
KEPT = {"scheduler": "lr_step", "optimizer": "momentum", "average": "average", "noise": "noise", "data": "place",
        "epoch": "epoch"}

def name(step, rank):
    if planted in ("torn", "silent"):
        return f"checkpoints/{rank}.json"
    return f"checkpoints/{step if planted == 'older' else f'{step:06}'}_{rank}.json"

def save(state, rank):
    path = name(state["step"] - (planted == "off by one"), rank)
    saved = {**state, "step": state["step"] - (planted == "off by one"), "padding": "x" * 4000}
    if planted in KEPT:
        del saved[KEPT[planted]]
    if planted == "rank 0" and rank:
        return
    os.makedirs("checkpoints", exist_ok=True)
    aside = path if planted in ("torn", "silent") else path + ".tmp"
    with open(aside, "w") as file:
        json.dump(saved, file)
    os.replace(aside, path)

def load(path):
    with open(path) as file:
        return {**fresh, **json.load(file)}

def newest():
    """The state of the newest step of which every rank has a whole file, of older ones if one is damaged."""
    if planted in ("torn", "silent"):
        try:
            return load(name(0, rank)) if os.path.exists(name(0, rank)) else fresh
        except ValueError:
            if planted == "torn":
                raise
            return fresh
    steps = {path.split("/")[1].split("_")[0] for path in glob.glob("checkpoints/*.json")}
    for step in sorted(steps, reverse=True):
        try:
            states = [load(f"checkpoints/{step}_{0 if planted == 'rank 0' else other}.json") for other in range(ranks)]
            return states[rank]
        except (OSError, ValueError):
            if planted == "damaged":
                return fresh
    return fresh

state = newest()
noise = random.Random()
kept = state["noise"]
noise.setstate((kept[0], tuple(kept[1]), kept[2]))
samples = random.Random(7)
samples = [samples.random() for _ in range(PER_EPOCH)]
while state["step"] < STEPS:
    time.sleep(0.02)
    meet()
    if planted == "too early" and (state["step"] + 1) % 5 == 0:
        save({**state, "step": state["step"] + 1}, rank)
    rate = 0.1 * 0.97 ** state["lr_step"]
    gradient = state["weight"] - samples[state["place"]] * (1 + state["epoch"]) + 0.1 * noise.random()
    state["momentum"] = 0.9 * state["momentum"] + gradient
    state["weight"] -= rate * state["momentum"]
    state["average"] = 0.9 * state["average"] + 0.1 * state["weight"]
    state["lr_step"] += 1
    state["place"] = (state["place"] + 1) % PER_EPOCH
    state["epoch"] += state["place"] == 0
    state["noise"] = noise.getstate()
    state["step"] += 1
    digest = hashlib.sha256(repr((state["weight"], state["average"])).encode()).hexdigest()
    if state["step"] % 5 == 0 and planted != "too early":
        save(state, rank)
    torchx_monarch.progress(state["step"], STEPS, digest=digest if len(sys.argv) == 2 else "", lr=rate)
if len(sys.argv) > 2:
    with open(f"{sys.argv[2]}_{rank}", "w") as file:
        file.write(digest)
'''
)

_IN_MEMORY = (
    _TOGETHER
    + """
import json

import torchx_monarch as tm

rank, state = int(os.environ["RANK"]), {"step": 0, "weight": 1.0}
if folder := tm.last_checkpoint(persist="checkpoints"):
    state = json.loads((folder / f"{rank}.json").read_text())
for step in tm.steps(range(state["step"], 60)):
    time.sleep(0.02)
    meet()
    state = {"step": step + 1, "weight": 0.9 * state["weight"] + step, "padding": "x" * 4000}
    if step % 5 == 4:
        with tm.checkpoint(step, persist="checkpoints") as folder:
            (folder / f"{rank}.json").write_text(json.dumps(state))
    tm.progress(step, 60, digest=repr(state["weight"]))
"""
)

_PLANTED = {
    "scheduler": ("rank", "result"),
    "optimizer": ("rank", "result"),
    "average": ("rank", "result"),
    "noise": ("rank", "result"),
    "data": ("rank", "result"),
    "epoch": ("rank", "result"),
    "off by one": ("rank", "result"),
    "too early": ("rank", "result"),
    "rank 0": ("rank", "some"),
    "older": ("rank", "older"),
    "torn": ("save", "failed"),
    "silent": ("save", "beginning"),
    "damaged": ("damage", "beginning"),
}
"""Each fault that can be planted in the program, with what brings it to light, and what the drill says of it."""

_ALWAYS = ("scheduler", "torn")


@pytest.fixture
def work(tmp_path: Path, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    return tmp_path / "work"


def drill(
    folder: Path, *words: str, options: tuple[str, ...] = (), program: str = _PROGRAM, shape: str = "1x2"
) -> dict[str, Any]:
    (folder / "train.py").write_text(program)
    command = ("monarch", "drill", "--json", "-cfg", "preload=none,grace=2", *options, "--")
    done = torchx(*command, "monarch.spmd", "-j", shape, "train.py", *words, cwd=folder, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["survived"] else 1)
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]
    return found


@pytest.mark.parametrize(
    "planted",
    [
        name if name in _ALWAYS else pytest.param(name, marks=pytest.mark.nightly("6 s of processor time each"))
        for name in _PLANTED
    ],
)
def test_a_planted_fault_is_found(planted: str, work: Path) -> None:
    fault, kind = _PLANTED[planted]
    found = drill(work, planted, options=("--faults", fault))
    (row,) = found["faults"]
    assert kind in {difference["kind"] for difference in row["differences"]}, found
    if planted == "scheduler":
        assert ": lr is 0." in row["differences"][0]["text"]


ALL = ("rank", "host", "save", "load", "disk", "term", "damage")


_MORE = [pytest.param(seed, marks=pytest.mark.nightly("all faults, at other moments")) for seed in (1, 2, 3)]


@pytest.mark.parametrize("seed", [0, *_MORE])
def test_a_sound_program_survives(seed: int, work: Path) -> None:
    faults = ("save", "host") if seed == 0 else ALL
    options = ("--faults", ",".join(faults), "--seed", str(seed), "--compare", "final_0", "--compare", "./final_1")
    found = drill(work, "nothing", "final", options=options)
    assert [row["differences"] for row in found["faults"]] == [[] for _ in faults]
    # At most from the checkpoint before the last one, with the step in which one rank has been alone, in two restarts.
    assert all(row["redone"] <= 2 * (5 + 5 + 1) and row["back"] > 0 for row in found["faults"]), found["faults"]


@pytest.mark.nightly("7 jobs; checkpoints in memory have tests of their own")
def test_checkpoints_in_memory_survive(work: Path) -> None:
    found = drill(work, program=_IN_MEMORY, shape="2x1")  # a host alone loses its memory with its end
    assert [row["differences"] for row in found["faults"]] == [[] for _ in ALL[:-1]]
    assert all(row["redone"] < 60 and row["back"] > 0 for row in found["faults"]), found["faults"]
