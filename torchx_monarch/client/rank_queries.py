# SPDX-License-Identifier: BSD-3-Clause
"""Ask replica 0 of a job for its events, and through it all hosts what their ranks do (``controller.rank_clients``).

The functions with ``Hosts`` raise as ``Hosts`` does; replica 0 refuses if its hosts are not together, or have no ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torchx_monarch.client.connection import Connection, Target
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.exceptions import AllocationError
from torchx_monarch.insight import events
from torchx_monarch.insight.events import Event
from torchx_monarch.insight.profile import RankProfile
from torchx_monarch.insight.rank_sample import RankSamples, read_samples
from torchx_monarch.insight.stacks import ProcessStacks, SharedStacks, rank_ranges
from torchx_monarch.model.codec import decode

_CONNECT_TIMEOUT = 5.0
"""Seconds to wait for the connection: somebody waits for the answer."""

SAMPLES_TIMEOUT = 12.0
"""Seconds to wait for samples: replica 0 waits for the other hosts."""

_STACKS_TIMEOUT = 40.0
"""Seconds to wait for stacks: replica 0 waits for the other hosts, and for a profile also for py-spy."""


def ask_events(target: Target, timeout: float) -> list[Event]:
    """Return the events of a role, which its replica 0 has; ``timeout`` seconds for each step.

    Raises:
        UnreachableError: replica 0 does not answer.
        RefusedError: it refuses the request, as a host of an earlier release does.
    """
    found: list[Event] = []
    with Connection.open(target, {"type": "events"}, timeout) as link:
        while (answer := link.answer(timeout)).get("type") == "events":
            found += filter(None, map(events.checked, answer["events"]))
    return found


def ask_samples(hosts: Hosts, timeout: float = SAMPLES_TIMEOUT) -> tuple[RankSamples, dict[str, str]]:
    """Return a sample of each rank, in their order, and why a host has not answered, by replica."""
    answers, missing = _ask(hosts, {"type": "samples"}, timeout)
    return read_samples(answers), missing


def ask_stacks(hosts: Hosts, rank: int | None = None) -> tuple[list[ProcessStacks], dict[str, str]]:
    """Return the stacks of the ranks that run, in their order, and why a host has not answered, by replica."""
    answers, missing = _ask(hosts, {"type": "stacks", "rank": rank}, _STACKS_TIMEOUT)
    return read_stacks(answers), missing


def read_stacks(answers: Iterable[Sequence[object]]) -> list[ProcessStacks]:
    """Read the stacks of all processes."""
    found = [
        stacks for answer in answers for shared in answer for stacks in decode(SharedStacks, shared).each_process()
    ]
    return sorted(found, key=lambda stacks: (stacks.rank, bool(stacks.child), stacks.pid))


def ask_profiles(
    hosts: Hosts, ranks: Collection[int], seconds: float, idle: bool = False
) -> tuple[list[RankProfile], dict[str, str]]:
    """Return profiles of ranks, of all if none is given, in their order, and why a host has not answered, by replica.

    With ``idle`` threads that wait are sampled as well.
    """
    greeting = {"type": "profile", "ranks": sorted(ranks), "seconds": seconds, "idle": idle}
    answers, missing = _ask(hosts, greeting, seconds + _STACKS_TIMEOUT)
    profiles = [decode(RankProfile, profile) for answer in answers for profile in answer]
    return sorted(profiles, key=lambda profile: profile.rank), missing


def describe_absent(hosts: Hosts, ranks: Iterable[int]) -> str:
    """Say that none of these ranks runs, and which do."""
    running = [sample.rank for sample in ask_samples(hosts)[0].ranks if sample.state != "ended"]
    text = f"not among the ranks that run: {rank_ranges(sorted(ranks))}. They are {rank_ranges(running)}"
    return text if running else "no rank runs"


def _ask(hosts: Hosts, greeting: Mapping[str, object], timeout: float) -> tuple[list[Any], dict[str, str]]:
    """Return what each message tells in the field whose name is the ``type`` of the greeting."""

    def ask_at(target: Target) -> tuple[list[Any], dict[str, str]]:
        found: list[Any] = []
        with Connection.open(target, dict(greeting), _CONNECT_TIMEOUT) as link:
            while True:
                answer = link.answer(timeout)
                if answer.get("type") == "end":
                    return found, {str(replica): str(why) for replica, why in dict(answer.get("missing") or {}).items()}
                found.append(answer[str(greeting["type"])])

    try:
        return hosts.reach(ask_at, wait=False)
    except AllocationError as error:
        if not hosts.has_ended:
            raise
        raise AllocationError(f"{error}; where its ranks were last: torchx monarch report {hosts.handle}") from None
