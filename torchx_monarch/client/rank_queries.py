# SPDX-License-Identifier: BSD-3-Clause
"""Ask replica 0 of a job for its events, and through it all hosts what their ranks do (``controller.rank_clients``).

The functions with ``Hosts`` raise as ``Hosts`` does; replica 0 refuses if its hosts are not together, or have no ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from torchx_monarch.client.connection import Connection, Target
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.exceptions import AllocationError
from torchx_monarch.insight import events
from torchx_monarch.insight.events import Event
from torchx_monarch.insight.profile import RankProfile
from torchx_monarch.insight.rank_sample import RankSample
from torchx_monarch.insight.stacks import ProcessStacks, rank_ranges
from torchx_monarch.model.codec import decode

T = TypeVar("T")

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


def ask_samples(hosts: Hosts, timeout: float = SAMPLES_TIMEOUT) -> tuple[list[RankSample], dict[str, str]]:
    """Return a sample of each rank, in their order, and why a host has not answered, by replica."""
    samples, missing = _ask(hosts, {"type": "samples"}, RankSample, timeout)
    return sorted(samples, key=lambda sample: sample.rank), missing


def ask_stacks(hosts: Hosts, rank: int | None = None) -> tuple[list[ProcessStacks], dict[str, str]]:
    """Return the stacks of the ranks that run, and why a host has not answered, by replica."""
    return _ask(hosts, {"type": "stacks", "rank": rank}, ProcessStacks, _STACKS_TIMEOUT)


def ask_profiles(
    hosts: Hosts, ranks: Collection[int], seconds: float, idle: bool = False
) -> tuple[list[RankProfile], dict[str, str]]:
    """Return profiles of ranks, of all if none is given, in their order, and why a host has not answered, by replica.

    With ``idle`` threads that wait are sampled as well.
    """
    greeting = {"type": "profile", "ranks": sorted(ranks), "seconds": seconds, "idle": idle}
    profiles, missing = _ask(hosts, greeting, RankProfile, seconds + _STACKS_TIMEOUT)
    return sorted(profiles, key=lambda profile: profile.rank), missing


def describe_absent(hosts: Hosts, ranks: Iterable[int]) -> str:
    """Say that none of these ranks runs, and which do."""
    running = [sample.rank for sample in ask_samples(hosts)[0] if sample.state != "ended"]
    text = f"not among the ranks that run: {rank_ranges(sorted(ranks))}. They are {rank_ranges(running)}"
    return text if running else "no rank runs"


def _ask(hosts: Hosts, greeting: Mapping[str, object], kind: type[T], timeout: float) -> tuple[list[T], dict[str, str]]:
    """Return what the hosts answer: values in a field whose name is the ``type`` of the greeting."""

    def ask_at(target: Target) -> tuple[list[T], dict[str, str]]:
        found: list[T] = []
        with Connection.open(target, dict(greeting), _CONNECT_TIMEOUT) as link:
            while True:
                answer = link.answer(timeout)
                if answer.get("type") == "end":
                    return found, {str(replica): str(why) for replica, why in dict(answer.get("missing") or {}).items()}
                found += [decode(kind, value) for value in answer[str(greeting["type"])]]

    try:
        return hosts.reach(ask_at, wait=False)
    except AllocationError as error:
        if not hosts.has_ended:
            raise
        raise AllocationError(f"{error}; where its ranks were last: torchx monarch report {hosts.handle}") from None
