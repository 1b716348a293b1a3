# SPDX-License-Identifier: BSD-3-Clause
"""Groups of ``monarch.ft``: they restart alone, and go on after the loss of ranks, hosts and machines.

MONARCH_TEST_LOSSES is the number of losses of each kind in the nightly run. What such a test prints, which ``pytest
-rP`` shows, is a cell of the table in docs/explanation/benchmarks.md.
"""

from __future__ import annotations

import abc
import contextlib
import os
import re
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from torchx.specs import AppState

from tests.contract.place import Place
from tests.waits import WITHIN, until
from torchx_monarch.components import ft

LOSSES = int(os.environ.get("MONARCH_TEST_LOSSES", "3"))

_STOPS = """
import os, signal, socket, sys, time, urllib.parse
where = urllib.parse.urlsplit(os.environ["TORCHFT_LIGHTHOUSE"])
for _ in range(600):
    try:
        socket.create_connection((where.hostname, where.port), 1).close()
        break
    except OSError:  # it has not started yet
        time.sleep(0.1)
group, attempt = os.environ["REPLICA_GROUP_ID"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("group", group, "of", os.environ["NUM_REPLICA_GROUPS"], "attempt", attempt, flush=True)
if group == "1" and attempt == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if group == "2":
    sys.exit(7)
while not told("go"):
    time.sleep(0.1)
"""

STEPS = """
import os, signal, socket, time, urllib.parse, uuid
env, start, step = os.environ, uuid.uuid4().hex, 0
where = urllib.parse.urlsplit(env["TORCHFT_LIGHTHOUSE"])
groups, loss, go = int(env["NUM_REPLICA_GROUPS"]), int(env["REPLICA_GROUP_ID"]), env["GO"]
while told(f"rank{loss}") or told(f"host{loss}"):
    loss += groups

def count_groups():
    try:
        with socket.create_connection((where.hostname, where.port), 5) as lighthouse:
            lighthouse.sendall(env["REPLICA_GROUP_ID"].encode())
            return int(lighthouse.recv(9) or 0)
    except OSError:
        return 0

while not told(go):
    present = count_groups()
    step += present > 0
    print("at", env["RANK"], start, step, present, time.time(), flush=True)
    time.sleep(0.2)
    if env["RANK"] == "0":
        for lost, pid in ("rank", os.getpid()), ("host", os.getppid()):
            if told(f"{lost}{loss}"):
                os.kill(pid, signal.SIGKILL)
"""
"""Stands for a program of torchft: each step counts the groups that take part, which the lighthouse knows."""

LIGHTHOUSE = """
import socket, sys, time
host, _, port = sys.argv[sys.argv.index("--bind") + 1].rpartition(":")
server, heard = socket.create_server((host, int(port))), {}
while True:
    client, _ = server.accept()
    client.settimeout(1)
    try:
        heard[client.recv(9)] = now = time.monotonic()
        client.sendall(b"%d" % sum(name != b"" and when > now - 2 for name, when in heard.items()))
    except OSError:
        pass
    client.close()
"""
"""Stands for torchft's lighthouse, which misses a group after two seconds."""


class Step(NamedTuple):
    """A step of a rank: the rank's start, the step's number in it, how many groups took part, and when."""

    start: str
    number: int
    groups: int
    time: float


class Groups:
    """The tests."""

    @pytest.mark.scenario("groups restart alone")
    @pytest.mark.parametrize("min_groups", [2, 3])
    def test_a_group_restarts_alone_and_may_be_lost(self, place: Place, min_groups: int) -> None:
        program = place.program(place.hears + _STOPS)
        job = _Job(place, program, j="3x1", min_groups=min_groups, max_restarts=1)
        handle = job.handle
        if min_groups == 3:
            status = place.wait(handle, AppState.FAILED)
            assert "group2/0" in status.msg and "code 7" in status.msg
            return
        place.until(lambda: "without group2" in place.status(handle).msg, "the loss of a group", handle)

        def attempts(group: int) -> int:
            lines = place.lines(handle, 0, f"group{group}")
            return sum("of 3 attempt" in line and "[monarch]" not in line for line in lines)

        place.until(lambda: attempts(1) == 2, "the restart", handle)
        message = place.status(handle).msg
        assert "2 of 3 groups go on, without group2" in message and "lighthouse: http://" in message
        place.tell("go")
        place.wait(handle, AppState.SUCCEEDED)
        assert [attempts(group) for group in range(3)] == [1, 2, 2]
        assert place.states(handle)["group2/0"] is AppState.FAILED

    @pytest.mark.nightly("twenty losses take minutes")
    @pytest.mark.timeout(3600)
    @pytest.mark.scenario("groups restart alone")
    @pytest.mark.parametrize("lost", ["rank", "host"])
    def test_groups_lose_ranks_and_hosts_again_and_again(self, place: Place, lost: str) -> None:
        program = place.program(place.hears + STEPS)

        def start(go: str) -> _Job:
            return _Job(place, program, j="3x2", max_restarts=1, max_retries=1, env={"GO": go})

        show(place.name, lost, lose_again_and_again(start, place.tell, lost))

    @pytest.mark.nightly("twenty losses take minutes")
    @pytest.mark.timeout(3600)
    @pytest.mark.scenario("groups restart alone")
    def test_groups_lose_machines(self, place: Place) -> None:
        if not place.has_machines:
            pytest.skip("its test system has no machine that can be lost")
        program = place.program(place.hears + STEPS)
        show(place.name, "machine", [_lose_machines(place, program, f"go{loss}") for loss in range(LOSSES)])


def _lose_machines(place: Place, program: str, go: str) -> float:
    """Lose the machine of a group, that of another's second host, and of its spare one; the first group goes on.

    Where a lost machine is replaced, lose that of one group.

    Returns:
        Seconds until the group with a spare host took part again, or the group whose machine was replaced.
    """
    options = {"j": "3x1", "max_restarts": 1, "max_retries": int(place.replaces_machines), "env": {"GO": go}}
    cfg = {"lease": 5, "rejoin_timeout": 5}
    job = _Job(place, program, hosts=(1, 2, 1), spares=1, cfg=cfg, **options)
    place.until(lambda: "spare: host 2 (" in place.log(job.handle, "group1", 1), "the spare host", job.handle)
    steps = job.until_all_take_part({})
    with contextlib.ExitStack() as stack:

        def lose(group: str, replica: int) -> float:
            began = time.time()
            stack.enter_context(place.without_machine(job.handle, group, replica))
            job.unread.add((group, replica))
            return began

        def until_told(text: str) -> None:
            message = f"{text!r} in the status"
            place.until(lambda: re.search(text, place.status(job.handle).msg), message, job.handle)

        began = lose("group2", 0)
        if place.replaces_machines:
            job.unread.clear()
            restarted = ["group2/0"]
            steps = job.until_all_take_part(steps, restarted)
        else:
            until_told("without group2|replica group2/0: .* cannot be reached")
            steps = job.until_all_take_part(steps, groups=["group0", "group1"])
            began, restarted = lose("group1", 1), ["group1/0", "group1/1"]
            steps = job.until_all_take_part(steps, restarted, ["group0", "group1"])
            lose("group1", 2)
            until_told("without group1")
            job.until_all_take_part(steps, groups=["group0"])
        place.tell(go)
        job.wait()
    return max(steps[rank].time for rank in restarted) - began


class Job(abc.ABC):
    """A job of groups that runs ``STEPS``.

    Args:
        ranks: how many each group has, by its name.
    """

    def __init__(self, ranks: Mapping[str, int]) -> None:
        self._ranks = dict(ranks)

    @abc.abstractmethod
    def lines(self, group: str) -> Iterable[str]:
        """Return what the ranks of a group have printed."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait until the job has succeeded."""

    def until_all_take_part(
        self, before: Mapping[str, Step], restarted: Collection[str] = (), groups: Collection[str] = ()
    ) -> dict[str, Step]:
        """Wait until the ranks of groups, by default of all, have made a step together; return that of each rank.

        Args:
            before: a step of ranks, GROUP/RANK, after which it is to be.
            restarted: which of them are to have started again; it is their first step then.
        """
        groups = groups or self._ranks.keys()
        wanted = {f"{group}/{rank}" for group in groups for rank in range(self._ranks[group])}
        found: dict[str, Step] = {}

        def take_part() -> bool:
            for name, step in (named for group in groups for named in self._steps(group)):
                last = before.get(name)
                is_new = last is None or (step.time > last.time and (step.start != last.start) == (name in restarted))
                if is_new and step.groups == len(groups) and not (name in restarted and name in found):
                    found[name] = step
            return wanted <= found.keys()

        until(take_part, lambda: f"steps of {len(groups)} groups without {wanted - found.keys()}", WITHIN, every=0.1)
        return found

    def _steps(self, group: str) -> Iterator[tuple[str, Step]]:
        """Yield the steps of the ranks of a group, each with GROUP/RANK."""
        for line in self.lines(group):
            if found := re.search(r"at (\d+) (\w{32}) (\d+) (\d+) ([\d.]+)$", line):
                yield f"{group}/{found[1]}", Step(found[2], int(found[3]), int(found[4]), float(found[5]))


def lose_again_and_again(start: Callable[[str], Job], tell: Callable[[str], None], lost: str) -> list[float]:
    """Have jobs of three groups lose a rank or a host of each; return the seconds until the group took part again.

    A group that fails twice within a minute waits before it starts again (``model.backoff``): each job loses three.

    Args:
        start: starts a job, which ends when it hears the given word.
        tell: see ``Place.tell``.
        lost: ``rank`` or ``host``.
    """
    took = []
    for first in range(0, LOSSES, 3):
        job = start(f"go{first}")
        before = job.until_all_take_part({})
        for loss in range(first, min(first + 3, LOSSES)):
            began = time.time()
            tell(f"{lost}{loss}")
            restarted = [rank for rank in before if rank.startswith(f"group{loss % 3}/")]
            before = job.until_all_take_part(before, restarted)
            took.append(max(before[rank].time for rank in restarted) - began)
        tell(f"go{first}")
        job.wait()
    return took


def show(place: str, lost: str, took: Sequence[float]) -> None:
    """Print how many losses there were, and the seconds until the group took part again."""
    spread = f"{statistics.median(took):.2f} ({min(took):.2f}-{max(took):.2f})"
    print(f"{place}, {lost}: {len(took)} of {LOSSES}, back after {spread} s")


class _Job(Job):
    """A job of ``monarch.ft``.

    Args:
        place: where it runs.
        program: the program of its ranks.
        hosts: how many each group has; one by default.
        spares: how many more the groups of several hosts have.
        cfg: run options.
        options: of ``monarch.ft``.

    Attributes:
        unread: replicas whose log is not read: it may be on a machine that is off.
    """

    def __init__(
        self,
        place: Place,
        program: str,
        hosts: Sequence[int] = (1, 1, 1),
        spares: int = 0,
        cfg: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        nproc = int(options["j"].partition("x")[2])
        *groups, lighthouse = ft(program, **options).roles
        roles, self._replicas = [], dict[str, int]()
        for group, count in zip(groups, hosts, strict=False):
            more: dict[str, Any] = {"env": group.env, "metadata": group.metadata, "retry_policy": group.retry_policy}
            self._replicas[group.name] = count
            if count > 1:
                group.metadata["monarch"]["spares"] = spares
                self._replicas[group.name] += spares
            more |= {"name": group.name, "nproc": nproc, "replicas": count, "max_retries": group.max_retries}
            roles.append(place.torchrun(*group.args[2:], **more))
        more = {"metadata": lighthouse.metadata, "max_retries": lighthouse.max_retries}
        more |= {"name": lighthouse.name, "retry_policy": lighthouse.retry_policy}
        roles.append(place.role("python", "-c", LIGHTHOUSE, *lighthouse.args, **more))
        super().__init__({group.name: count * nproc for group, count in zip(groups, hosts, strict=False)})
        self._place, self.unread = place, set[tuple[str, int]]()
        self.handle = place.run(*roles, **(cfg or {}))

    def lines(self, group: str) -> Iterable[str]:
        for replica in range(self._replicas[group]):
            if (group, replica) not in self.unread:
                yield from self._place.lines(self.handle, replica, group)

    def wait(self) -> None:
        self._place.wait(self.handle, AppState.SUCCEEDED)
