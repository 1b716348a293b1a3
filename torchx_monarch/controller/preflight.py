# SPDX-License-Identifier: BSD-3-Clause
"""Check the hosts of a role before their ranks start (``-cfg preflight``)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torchx_monarch.controller.host_messages import TakeFacts
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.model.host_facts import PROGRAM, HostFacts
from torchx_monarch.system.untrusted_text import one_line

_LINE = 600


async def check(hosts: JobHosts) -> str:
    """Check the hosts of the attempt; return why the run must not start, empty if it may.

    It raises the errors of ``JobHosts.ask``.
    """
    mode, reporter = hosts.spec.preflight, hosts.reporter
    if mode == "off":
        return ""
    began = time.monotonic()
    asking = hosts.ask(TakeFacts())
    facts = await reporter.while_waiting(asking, lambda: "the imports of all hosts, for the pre-flight")
    problems = [one_line(problem, _LINE) for problem in _compare(hosts, facts)]
    for problem in problems:
        reporter.line(f"pre-flight: {problem}")
    if not problems:
        reporter.line(f"pre-flight: {len(facts)} hosts are alike ({time.monotonic() - began:.2f} s)")
    if not problems or mode == "warn":
        return ""
    more = f" (and {len(problems) - 1} more, see the log)" if len(problems) > 1 else ""
    return f"pre-flight: {problems[0]}{more}"


def report_differences(hosts: JobHosts) -> None:
    """Report how hosts differ whose ranks have started."""
    members = hosts.members.attempt.hosts.items()
    facts = {replica: member.launched.facts for replica, member in members if member.launched is not None}
    if found := list(_compare(hosts, facts)):
        hosts.reporter.report("differences", one_line(f"hosts differ: {'; '.join(found)}", _LINE))


def _compare(hosts: JobHosts, facts: Mapping[int, HostFacts]) -> Iterator[str]:
    names = {host.replica: host.name for host in hosts.members.hosts}
    return compare(names, {replica: facts[replica] for replica in names})


def compare(names: Mapping[int, str], facts: Mapping[int, HostFacts]) -> Iterator[str]:
    """Yield a text for each fact that hosts, which are by replica, do not have in common."""
    # A host whose zygote has ended while it imported knows no versions; without modules to import, no host does.
    known = {replica: host for replica, host in facts.items() if "python" in host} or facts
    if lost := [names[replica] for replica in facts if replica not in known]:
        yield f"the imports of {_listed(lost)} have failed; see the log"
    for name in sorted({name for host in facts.values() for name in host}):
        compared = facts if name == PROGRAM else known
        values = {replica: host.get(name, "none") for replica, host in compared.items()}
        same = f"install the same {name} on" if name != PROGRAM else "copy the same file to"
        yield from _differences(names, values, name, f"{same} all hosts")


def _differences(names: Mapping[int, str], values: Mapping[int, str], what: str, advice: str) -> Iterator[str]:
    """Yield a text for each value that differs from that of most hosts; that of the first host if it is a tie."""
    usual = Counter(values.values()).most_common(1)[0][0] if values else ""  # of equal counts, the first to be seen
    others = [names[replica] for replica, value in values.items() if value == usual]
    for value in dict.fromkeys(values.values()):
        if value != usual:
            hosts = [names[replica] for replica in values if values[replica] == value]
            verb = "has" if len(hosts) == 1 else "have"
            yield f"{_listed(hosts)} {verb} {what} {value}, and {_listed(others)} {usual}; {advice}"


def _listed(hosts: Sequence[str]) -> str:
    if len(hosts) > 4:
        return f"{', '.join(hosts[:3])} and {len(hosts) - 3} more"
    return " and ".join(filter(None, (", ".join(hosts[:-1]), hosts[-1])))
