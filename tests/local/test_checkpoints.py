# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints in the memory of the hosts: what ranks begin with after they, or their hosts, were killed."""

from __future__ import annotations

import collections
import itertools
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.local import checkpoint_training
from tests.local.hosts import NO_PRELOAD, Hosts, torchrun
from tests.waits import until

_PROGRAM = Path(__file__).with_name("checkpoint_training.py")
_STEPS = 10
PHASES = "step", "save", "saved", "left"


class Training:
    """``checkpoint_training`` on hosts of two ranks each; with ``fewest`` on so many hosts at least."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        hosts: int = 2,
        fewest: int = 0,
        spares: int = 0,
        options: tuple[str, ...] = (),
        make: Callable[..., Any] = Hosts,
    ) -> None:
        self.size = 2 * hosts
        (said := folder / "said").mkdir(exist_ok=True)
        self.said = said
        command = torchrun(str(_PROGRAM), str(said), str(_STEPS), *words, nnodes=hosts, restarts=9)
        if fewest:
            command[1:1] = ["--rdzv-conf", "last_call_timeout=1"]
            command[command.index("--nnodes") + 1] = f"{fewest}:{hosts}"
        self.hosts = make(folder, command, hosts + spares, options=(*NO_PRELOAD, *options)).start()

    def memories(self, again: bool = False) -> list[Path]:
        """Wait until all ranks wait; return the folder in memory of each. ``again``: they are to wait once more."""
        waits = [self.said / f"waits_{rank}" for rank in range(self.size)]
        until(lambda: all(path.exists() for path in waits), lambda: f"all ranks to wait: {self.hosts.err()}")
        found = [Path(path.read_text().split()[1]) for path in waits]
        for path in waits if again else ():
            path.unlink()
        return found

    def until_copied(self, *steps: int) -> None:
        """Wait until two hosts have each part of a checkpoint, that of one of these steps."""
        folders = {*self.memories()}

        def is_copied(step: int) -> bool:
            found = [path for folder in folders for path in folder.glob(f"[cg]*_{step}_*/step_{step}/rank_?")]
            hosts = collections.Counter(name for name, _ in {(path.name, path.parents[2]) for path in found})
            return min(hosts.values(), default=0) > 1 and len(hosts) == int(found[0].read_text().split()[-1])

        until(lambda: any(map(is_copied, steps)), "the copies")

    def kill(self, rank: int) -> None:
        os.kill(int((self.said / f"waits_{rank}").read_text().split()[0]), signal.SIGKILL)

    def finish(self, only_rank_0: bool = False) -> list[str]:
        """Wait for the end; check the weights, and that no step was done a third time; return what rank 0 has done."""
        assert set(self.hosts.wait()) <= {0, -signal.SIGKILL}, self.hosts.err()
        done = (self.said / "done_0").read_text().splitlines()
        attempts = [(int(line.split()[3]), int(line.split()[-1])) for line in done if line.startswith("attempt")]
        attempts.insert(0, (0, attempts[0][1]))  # in a job before
        expected = checkpoint_training.replayed(attempts, _STEPS, only_rank_0)
        assert len(expected) == self.size
        assert [int((self.said / f"end_{rank}").read_text()) for rank in range(self.size)] == expected
        return done


def begins(done: list[str]) -> list[int]:
    """The steps with which the attempts began."""
    return [int(line.split()[3]) for line in done if line.startswith("attempt")]


def kill_four_times(folder: Path, draw: random.Random, **more: Any) -> None:
    """Train on one, two or four hosts, of which ranks are killed at random moments; check the end."""
    hosts = draw.choice((1, 2, 4))
    kills = [
        f"{at}:{draw.randrange(2 * hosts)}:{draw.randint(2 * at, 2 * at + 1)}:{draw.choice(PHASES)}" for at in range(4)
    ]
    done = Training(folder, *(word for kill in kills for word in ("--kill", kill)), hosts=hosts, **more).finish()
    steps = [line for line in done if line.isdecimal()]
    assert len(steps) - len({*steps}) <= len(begins(done)) - 1


def change_sizes(
    folder: Path, sizes: Sequence[int], draw: random.Random, returns: bool = False, **more: Any
) -> list[str]:
    """Train on these numbers of hosts, of which some are lost or come at random moments; check the end.

    Args:
        returns: whether a host that was lost comes again by itself.
    """
    steps = sorted(draw.sample(range(1, _STEPS - 1), len(sizes) - 1))
    losses, words = 0, []
    for (count, next_count), step in zip(itertools.pairwise(sizes), steps, strict=True):
        words += ["--kill", f"{losses}:wait{2 * count}:{step}:{draw.choice(PHASES)}"]
        losses += next_count < count
    training = Training(folder, *words, hosts=max(sizes), fewest=1, **more)
    present, lost = {*range(1, max(sizes))}, list[int]()
    for (count, next_count), step in zip(itertools.pairwise(sizes), steps, strict=True):
        training.size = 2 * count
        if next_count > count and returns:
            present.add(lost.pop())
            continue
        if count > 1:
            training.until_copied(step, step - 1)
        training.memories(again=True)
        if next_count > count:
            present.add(replica := lost.pop())
            training.hosts.start(replica)
        else:
            lost.append(draw.choice(sorted(present)))
            present.remove(lost[-1])
            training.hosts.lose(lost[-1])
    training.size = 2 * sizes[-1]
    done = training.finish()
    repeated = [line for line in done if line.isdecimal()]
    assert len(repeated) - len({*repeated}) <= len(sizes) - 1
    return done


@pytest.mark.parametrize(
    ("kills", "steps"),
    [
        (("0:1:5:save", "1:2:-1:load"), [4, 4]),
        pytest.param(("0:3:5:saved",), [4], marks=pytest.mark.nightly("one of the random moments below")),
        (("0:2:5:left",), [4, 5]),
    ],
    ids=["in a save and in a load", "before the block is left", "after it"],
)
def test_ranks_that_are_killed_lose_one_step_at_most(folder: Path, kills: tuple[str, ...], steps: list[int]) -> None:
    training = Training(folder, *(word for kill in kills for word in ("--kill", kill)))
    done = training.finish()
    resumed = [event["step"] for event in training.hosts.events() if event["kind"] == "resumed"]
    assert resumed == steps or len(kills) == 1 and resumed[0] in steps
    assert [event["bytes"] for event in training.hosts.events() if event["kind"] == "checkpoint_memory"]
    memory = re.search(r"/\S*tm-memory-[^/]*", " ".join(done))
    assert memory and memory[0].startswith("/dev/shm/") and not os.path.exists(memory[0])


def test_a_spare_host_begins_with_the_copy_of_the_part_of_the_lost_one(folder: Path) -> None:
    training = Training(folder, "--kill", "0:wait:5:left", "--own", options=("--spares", "1"), spares=1)
    training.until_copied(5)
    training.hosts.lose(1)
    assert begins(training.finish()) == [0, 6]
    assert "step 5 in memory (host 1's part from host 0)" in training.hosts.err()


def test_a_damaged_checkpoint_is_not_used_and_the_last_is_saved_at_the_end(folder: Path) -> None:
    persist = folder / "saved"
    (persist / "step_99").mkdir(parents=True)
    words = ("--kill", "0:wait:5:left", "--kill", "1:wait:7:left", "--persist", str(persist))
    training = Training(folder, *words)
    training.until_copied(5)
    until(lambda: len([*persist.glob("step_*")]) == 2, "the copy of the first")
    for path in (path for memory in {*training.memories()} for path in memory.glob("*_5_0*/step_5/rank_3")):
        path.write_text("5 13")
    training.kill(0)
    until(lambda: "the ranks begin with the checkpoint of step 4" in training.hosts.err(), "the second attempt")
    assert "step 5 in memory cannot be used: host " in training.hosts.err()
    for rank in range(4):
        (training.said / f"waits_{rank}").unlink(missing_ok=True)
    training.memories()
    training.hosts.stop()
    found = {path.name for path in persist.iterdir()}
    assert found > {"step_7", "step_99"} and len(found) == 3, training.hosts.err()  # and the first
    assert 7 in [event["step"] for event in training.hosts.events() if event["kind"] == "checkpoint"]
    # Another job goes on from there, as after a requeue.
    for path in training.said.iterdir():
        path.unlink()
    again = Training(folder, "--persist", str(persist), "--every", "0.001")
    assert begins(again.finish()) == [8]
    assert {path.name for path in persist.iterdir()} <= {f"step_{step}" for step in (7, 8, 9, 99)}
    assert (persist / "step_9").exists() and not any((persist / "step_99").iterdir())


def test_ranks_begin_without_checkpoints_whose_memory_was_removed(folder: Path) -> None:
    """As logind does at the last logout of a user (``RemoveIPC``)."""
    training = Training(folder, "--kill", "0:wait:5:left", hosts=1)
    for memory in {*training.memories()}:
        shutil.rmtree(memory)
    training.kill(0)
    assert begins(training.finish()) == [0, 0], training.hosts.err()


def test_all_hosts_have_what_rank_0_alone_has_saved(folder: Path) -> None:
    training = Training(folder, "--only-rank-0", "--kill", "0:3:5:left")
    assert begins(training.finish(only_rank_0=True))[1] in (5, 6)


def test_a_checkpoint_that_cannot_be_copied_to_disk_leaves_nothing_there(
    folder: Path, script: Callable[[str], str]
) -> None:
    path = script("""
        import torchx_monarch
        with torchx_monarch.checkpoint(1, sys.argv[1]) as place:
            (place / "same").write_text("x" * int(os.environ["GROUP_RANK"]))
    """)
    persist = folder / "persist"
    hosts = Hosts(folder, torchrun(path, str(persist), nnodes=2), 2, options=NO_PRELOAD).start()
    assert hosts.wait() == [0, 0]
    failed = [event for event in hosts.events() if event["kind"] == "persist_failed"][-1]
    assert f"the checkpoint of step 1 is not in {persist}" in failed["message"] in hosts.err()
    assert not any(persist.iterdir())


@pytest.mark.nightly(reason="500 kills of ranks at random moments, with one, two and four hosts")
@pytest.mark.parametrize("seed", range(125))
def test_kills_at_random_moments(folder: Path, seed: int) -> None:
    kill_four_times(folder, random.Random(seed))


@pytest.mark.nightly(reason="the same as with one lost host above, before, during and after its copy is made")
@pytest.mark.parametrize("seed", range(20))
def test_hosts_are_killed_at_random_moments(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    words = ("--kill", f"0:wait:{draw.randrange(1, 9)}:left", "--kill", f"1:{draw.randrange(6)}:9:save")
    training = Training(folder, *words, hosts=3, spares=1, options=("--spares", "1"))
    training.memories()
    training.hosts.lose(draw.randrange(1, 3))
    training.finish()


@pytest.mark.nightly(reason="changes of the number of hosts at random moments")
@pytest.mark.parametrize("seed", range(60))
def test_hosts_are_lost_and_come_at_random_moments(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    change_sizes(folder, draw.choice(((2, 1), (2, 1, 2), (3, 2, 1), (3, 2, 3, 2), (2, 1, 2, 1), (4, 3, 4, 3, 2))), draw)
