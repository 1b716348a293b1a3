# SPDX-License-Identifier: BSD-3-Clause
"""Check the hosts of a role before their ranks start (``-cfg preflight``)."""

from __future__ import annotations

import time

from torchx_monarch.controller.host_comparison import compare
from torchx_monarch.controller.host_messages import FactsTaken, TakeFacts
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.insight.progress import Reporter
from torchx_monarch.model.host_facts import HostFacts
from torchx_monarch.model.registration import Registration
from torchx_monarch.system.untrusted_text import one_line

_LINE = 600


class Preflight:
    """Compare the hosts of a run, once for each set of hosts.

    Attributes:
        culprit: the host of the first problem of the last check, the last one if it has several; None for none.

    Args:
        mode: ``on`` to fail the run if something is wrong, ``warn`` to report it, ``off`` to check nothing.
        hosts: the hosts, which are asked.
        reporter: writes progress lines and events.
    """

    def __init__(self, mode: str, hosts: JobHosts, reporter: Reporter) -> None:
        self._mode = mode
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
        sent = time.time()
        facts: dict[int, HostFacts] = {}
        offsets: dict[int, float] = {}
        async for answer in self._hosts.ask(TakeFacts()):
            assert isinstance(answer, FactsTaken)
            facts[answer.replica] = answer.facts
            offsets[answer.replica] = clock_offset(answer.facts, sent, time.time())
        self._checked = hosts
        names = {host.replica: host.name for host in hosts}
        facts = {replica: facts[replica] for replica in names}
        problems = list(compare(names, facts, {replica: offsets[replica] for replica in names}))
        texts = [one_line(problem.text, _LINE) for problem in problems]
        for text in texts:
            self._reporter.line(f"pre-flight: {text}")
        if not problems:
            self._reporter.line(f"pre-flight: {len(hosts)} hosts are fit and alike ({time.monotonic() - began:.2f} s)")
        if not problems or self._mode == "warn":
            return ""
        unfit = problems[0].replicas[-1]  # not the leader, if another host is as unfit
        self.culprit = next(host for host in hosts if host.replica == unfit)
        more = f" (and {len(problems) - 1} more, see the log)" if len(problems) > 1 else ""
        return f"pre-flight: {texts[0]}{more}"


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
