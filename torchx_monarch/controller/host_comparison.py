# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare the facts of the hosts of a role, and say which host differs in what and how to fix it."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torchx_monarch.model.host_facts import HostFacts, Link

MAX_OFFSET = 1.0
"""Seconds by which the clock of a host may differ from replica 0's."""

_LITTLE_SHARED = 16 << 20

_FEW_FILES = 1024

SLOW_LATENCY = 0.02
"""Seconds to another host and back from which a link is slow: hosts of one training job are in one data centre."""

SLOW_RATE = 10 << 20
"""Bytes per second to another host below which a link is slow: about 100 Mbit/s."""

_ABSENT = os.strerror(errno.ENOENT)


def compare(
    facts: Mapping[str, HostFacts], offsets: Mapping[str, float], links: Mapping[tuple[str, str], Link]
) -> Iterator[str]:
    """Yield a line for each difference or deficiency; none if all is well.

    Args:
        facts: the facts of each host, by its name, that of replica 0 first.
        offsets: the least seconds by which the clock of a host is ahead of replica 0's; negative if it is behind.
        links: the connections, by the names of the host that has measured it and of the other host.
    """
    for name in sorted({name for each in facts.values() for name in each.versions}):
        values = {host: each.versions.get(name, "none") for host, each in facts.items() if not each.problem}
        yield from _differences(values, name, f"install the same {name} on all hosts")
    yield from _of_programs(facts)
    yield from _of_paths(facts)
    for host, offset in offsets.items():
        if abs(offset) > MAX_OFFSET:
            way = "ahead of" if offset > 0 else "behind"
            yield f"the clock of {host} is {abs(offset):.1f} s {way} replica 0's; run an NTP client on all hosts"
    for host, each in facts.items():
        if each.problem:
            yield f"{host}: the program's interpreter tells no versions: {each.problem}; run it there by hand"
        if 0 <= each.shared_memory < _LITTLE_SHARED:
            free = f"{each.shared_memory >> 20} MiB of shared memory free (/dev/shm)"
            yield f"{host} has {free}; remove files there, or give the container more (--shm-size)"
        if 0 <= each.open_files < _FEW_FILES:
            yield f"{host} lets a rank open {each.open_files} files; raise the limit (ulimit -n 65536)"
        for gpu in each.gpus:
            yield f"{host}: {gpu} by other processes; end them (nvidia-smi lists them), or take another host"
    for (host, other), link in links.items():
        if link.problem:
            yield f"the link from {host} to {other} cannot be measured: {link.problem}; see the network between them"
        elif link.latency > SLOW_LATENCY or link.rate < SLOW_RATE:
            figures = f"{link.latency * 1000:.1f} ms, {link.rate / (1 << 20):.1f} MiB/s"
            yield f"the link from {host} to {other} is slow ({figures}); see their network cards, cables and switches"


def _differences(values: Mapping[str, str], what: str, advice: str) -> Iterator[str]:
    """Yield a line for each value that differs from that of most hosts; that of the first host if it is a tie."""
    usual = Counter(values.values()).most_common(1)[0][0] if values else ""  # of equal counts, the first to be seen
    for value in dict.fromkeys(values.values()):
        if value != usual:
            those = [host for host, each in values.items() if each == value]
            others = [host for host, each in values.items() if each == usual]
            verb = "has" if len(those) == 1 else "have"
            yield f"{_names(those)} {verb} {what} {value}, and {_names(others)} {usual}; {advice}"


def _of_programs(facts: Mapping[str, HostFacts]) -> Iterator[str]:
    files = {host: each.program for host, each in facts.items() if each.program is not None}
    shown = {host: f"{file.path} of {file.size} bytes (SHA-256 {file.digest[:12]})" for host, file in files.items()}
    if len({file.digest for file in files.values()}) > 1:
        yield from _differences(shown, "the program", "copy the same file to all hosts, or put it on a shared disk")


def _of_paths(facts: Mapping[str, HostFacts]) -> Iterator[str]:
    """Yield a line for each path that some host cannot read; one that exists nowhere disturbs no program."""
    for path in dict.fromkeys(path for each in facts.values() for path in each.paths):
        reasons = {host: each.paths.get(path, "") for host, each in facts.items()}
        if all(reason == _ABSENT for reason in reasons.values()):
            continue
        for reason in dict.fromkeys(filter(None, reasons.values())):
            those = [host for host, each in reasons.items() if each == reason]
            yield f"{_names(those)} cannot read {path}: {reason}; mount it there, or fix its permissions"


def _names(hosts: Sequence[str]) -> str:
    """Return the names of hosts, shortened if there are many."""
    if len(hosts) > 4:
        return f"{', '.join(hosts[:3])} and {len(hosts) - 3} more"
    return " and ".join(filter(None, (", ".join(hosts[:-1]), hosts[-1])))
