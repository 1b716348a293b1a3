# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Check the hosts of a role before their ranks start (``-cfg preflight``)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torchx_monarch.controller.host_comparison import compare
from torchx_monarch.controller.host_messages import FactsTaken, LinkOpened, OpenLink, TakeFacts
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import HostFacts, Link
from torchx_monarch.model.registration import Registration
from torchx_monarch.system.untrusted_text import one_line

_LINE = 600


class Preflight:
    """Compare the hosts of a run, once for each set of hosts.

    Attributes:
        culprit: the host that the first problem of the last check names; None for none.

    Args:
        mode: ``on`` to fail the run if something is wrong, ``warn`` to report it, ``off`` to check nothing.
        networked: whether hosts reach each other over a network.
        hosts: the hosts, which are asked.
        reporter: writes progress lines and events.
    """

    def __init__(self, mode: str, networked: bool, hosts: JobHosts, reporter: Reporter) -> None:
        self._mode = mode
        self._networked = networked
        self._hosts = hosts
        self._reporter = reporter
        self._checked: list[Registration] = []
        self.culprit: Registration | None = None

    async def check(self, hosts: list[Registration]) -> str:
        """Check the hosts, unless these have been checked; return why the run must not start, empty if it may.

        Raises:
            Interrupted: an event is pending.
            HostRefused: a host refused the request.
        """
        if self._mode == "off" or hosts == self._checked:
            return ""
        began = time.monotonic()
        names = {host.replica: host.name for host in hosts}
        ports = await self._open_links() if self._networked else []
        sent = time.time()
        facts: dict[int, HostFacts] = {}
        offsets: dict[int, float] = {}
        links: dict[int, Link] = {}
        async for answer in self._hosts.ask(TakeFacts(tuple(ports))):
            assert isinstance(answer, FactsTaken)
            facts[answer.replica] = answer.facts
            offsets[answer.replica] = clock_offset(answer.facts, sent, time.time())
            if answer.link is not None:
                links[answer.replica] = answer.link
        self._checked = hosts
        order = [replica for replica in names if replica in facts]
        problems = [
            one_line(text, _LINE)
            for text in compare(
                {names[replica]: facts[replica] for replica in order},
                {names[replica]: offsets[replica] for replica in order},
                {(names[replica], names[links[replica].replica]): links[replica] for replica in sorted(links)},
            )
        ]
        for problem in problems:
            self._reporter.line(f"pre-flight: {problem}")
        if not problems:
            self._reporter.line(f"pre-flight: {len(hosts)} hosts are fit and alike ({time.monotonic() - began:.2f} s)")
        if not problems or self._mode == "warn":
            return ""
        blamed = culprit(problems, {host.name: host.replica for host in hosts})
        self.culprit = next((host for host in hosts if host.replica == blamed), None)
        more = f" (and {len(problems) - 1} more, see the log)" if len(problems) > 1 else ""
        return f"pre-flight: {problems[0]}{more}"

    async def _open_links(self) -> list[LinkOpened]:
        """Have all hosts listen for their measurement; return where, in the order of their replicas."""
        answers = [answer async for answer in self._hosts.ask(OpenLink())]
        return sorted((one for one in answers if isinstance(one, LinkOpened)), key=lambda one: one.replica)


def culprit(problems: Sequence[str], hosts: Mapping[str, int]) -> int | None:
    """Return the replica that the first problem names; None for none.

    The problem of a link names two hosts: the one that more problems name, or else the one that is not replica 0.

    Args:
        problems: the lines of ``compare``.
        hosts: the replica of each host, by its name.
    """
    # What follows the word is how the other hosts are.
    subjects = [problem.partition(", and ")[0] for problem in problems]
    named = [name for name in hosts if name in subjects[0]]
    named.sort(key=lambda name: (-sum(name in each for each in subjects), hosts[name] == 0, subjects[0].find(name)))
    return hosts[named[0]] if named else None


def clock_offset(facts: HostFacts, sent: float, received: float) -> float:
    """Return the least seconds by which a host's clock is ahead of this one; negative if behind, 0 if it may agree.

    The host read its clock after it had taken the facts, and before the answer arrived.

    Args:
        facts: the facts of the host.
        sent: when the request was sent.
        received: when the answer arrived.
    """
    if facts.clock > received:
        return facts.clock - received
    return min(0.0, facts.clock - (sent + facts.taken))
