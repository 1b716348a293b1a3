# SPDX-License-Identifier: BSD-3-Clause
"""The controller of a role of commands, on replica 0: each host runs the command of its replica as one process.

The hosts stay until all commands have succeeded. What a failure ends follows from the retry policy of the role:

- Under APPLICATION and ROLE it ends all commands. Where all are to start again (``HostSpec.starts``), commands start
  when all hosts are there, so that none runs beside one of the start before; else each starts with its host.
- Under REPLICA, and where the role does not need all replicas, the host of a command that has failed leaves alone, and
  its replacement registers. The other commands go on, also when replica 0 is replaced: they register with the new one.
"""

from __future__ import annotations

import asyncio

from torchx_monarch.controller.elastic import listed
from torchx_monarch.controller.host_events import CommandFailed, HostEvent, HostLost, HostPreempted
from torchx_monarch.controller.host_messages import HostError, HostRefused, LaunchRanks, WatchRanks
from torchx_monarch.controller.hosts import JobHosts
from torchx_monarch.controller.members import Attempt, Member
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.host_result import why_no_other_start
from torchx_monarch.model.job_result import EARLY_FAILURES_WITHIN, JobResult, RankExit, describe_others, shell_code
from torchx_monarch.model.world import HostRange, World


class CommandController:
    """Follow the commands of a role to its end.

    Attributes:
        ends_role: whether the result is that of the role; else of replica 0 alone, and the other commands go on.
    """

    def __init__(self, hosts: JobHosts) -> None:
        self.ends_role = True
        self._spec = hosts.spec
        self._members = hosts.members
        self._hosts = hosts
        self._events = hosts.events
        self._reporter = hosts.reporter
        commands = HostRange(0, self._spec.replicas, 1)
        self._attempt.begin(World(0, 0, 0, (commands,), "", 0, False, self._spec.app))
        self._launched = 0
        """The number of commands that have started, and whose hosts have not left."""
        self._spared = 0
        """The number of hosts that are spared (see ``Member``)."""
        self._is_late = False
        """Whether the role does without replicas that have never arrived."""

    @property
    def _attempt(self) -> Attempt:
        return self._members.attempt

    async def run(self) -> JobResult:
        """Follow the commands to the end of the role, or of replica 0 alone, and return the result."""
        if self._spec.starts == "together":
            self._limit_wait()
        result = None
        while result is None:
            self._watch_new_hosts()
            event = await self._events.until_event(self._news())
            result = await self._handle(event) if event else self._result()
        for replica in list(self._attempt.hosts):
            self._forget(replica)
        return result

    def _limit_wait(self) -> None:
        """Do without replicas that have not arrived ``host_timeout`` seconds from now."""

        def end() -> None:
            self._is_late = True
            self._members.notify()

        asyncio.get_running_loop().call_later(self._spec.host_timeout, end)

    # -- the commands --------------------------------------------------------------------------------------------------

    @property
    def _waits_for_all(self) -> bool:
        return self._spec.starts == "together" and not self._attempt.hosts and not self._members.is_complete

    def _new_hosts(self) -> list[Registration]:
        """Return the hosts whose commands are to start now."""
        hosts = [] if self._waits_for_all else self._members.idle
        return [host for host in hosts if host.replica not in self._attempt.hosts]

    async def _news(self) -> None:
        news = self._members.until(self._has_news)
        if self._waits_for_all:
            news = self._reporter.while_waiting(news, lambda: f"replica {listed(self._members.missing)}")
        await news

    def _has_news(self) -> bool:
        return (self._is_late and self._waits_for_all) or bool(self._new_hosts()) or self._are_done()

    def _are_done(self) -> bool:
        """Return whether all commands that the role has, or still waits for, have succeeded: a failure is an event."""
        absent = self._members.unseen if self._is_late else 0
        needed = self._spec.replicas - self._spared - absent
        return len(self._attempt.exits) >= needed and not self._events.pending

    def _watch_new_hosts(self) -> None:
        new = self._new_hosts()
        if not new:
            return
        self._members.extend(new)
        self._members.has_begun |= self._members.is_complete
        for host in new:
            member = self._attempt.hosts[host.replica]
            member.following = asyncio.ensure_future(self._watch(member))

    def _forget(self, replica: int) -> None:
        """Forget the command of a host that leaves."""
        self._attempt.exits.pop(replica, None)
        if (member := self._attempt.hosts.pop(replica, None)) and member.following:
            member.following.cancel()
            self._launched -= member.launched is not None

    async def _watch(self, member: Member) -> None:
        """Start the command of a host unless it runs, and wait for its end. The loss of the host is an event."""
        replica = member.host.replica
        try:
            assert self._attempt.world is not None
            member.launched = await self._hosts.ask_host(LaunchRanks(self._attempt.world), replica)
            self._launched += 1
            if (count := self._launched) == self._spec.replicas:  # again when one of them has started again
                self._reporter.phase("hosts", f"hosts {count}/{count}", count=count)
                self._attempt.report_start(self._reporter, "commands")
            for ended in await self._hosts.ask_host(WatchRanks(), replica):
                if ended.stopped_at is None or ended.failed:  # else its host reports why it has stopped it
                    self._attempt.add([ended])
                    if ended.code:
                        result = JobResult(shell_code(ended.code), ended.describe(), ended)
                        self._events.post(CommandFailed(replica, result))
                    if replica == 0:
                        self._limit_wait()
            self._members.notify()
        except HostRefused as refusal:
            failed = CommandFailed(replica, JobResult(refusal.code, str(refusal), replica=replica))
            await self._events.report_within(self._hosts.report_timeout, failed)
            if all(event.replica != replica for event in self._events.pending):  # else its host has reported why
                self._events.post(failed)
        except HostError:
            pass

    # -- their ends ----------------------------------------------------------------------------------------------------

    def _result(self) -> JobResult | None:
        """Return the result of the role if all its commands have succeeded, or the time for their start has passed."""
        if self._is_late and self._waits_for_all:
            missing = f"replica {listed(self._members.missing)}"
            return JobResult(1, f"{missing} did not arrive within {self._spec.host_timeout:g} s (--host-timeout)")
        if not self._are_done():
            return None
        self._attempt.record_end(self._reporter)
        count = len(self._attempt.exits)
        return JobResult(0, f"all {count} commands ended with code 0" if count > 1 else "the command ended with code 0")

    async def _handle(self, event: HostEvent) -> JobResult | None:
        """Settle an event; return the result if it ends the role or replica 0, None if the commands go on."""
        if isinstance(event, CommandFailed) and self._attempt.exits.get(event.replica) is not event.result.cause:
            self._events.remove(event)  # its host has left since
            return None
        leaves = isinstance(event, (HostLost, HostPreempted, CommandFailed))
        if leaves and self._goes_on_without(event):
            self._events.remove(event)
            self._reporter.line(f"{event.result.reason}; the other commands go on")
            self._forget(event.replica)
            self._hosts.rendezvous.dismiss(event.replica, event.result)
            return None
        result = event.result
        self.ends_role = not (leaves and event.replica == 0 and self._is_replaced(event))
        if not isinstance(event, CommandFailed):
            self._hosts.settle(event)
        elif self.ends_role:
            # A wrong option ends all commands within moments.
            watching = [member.following for member in self._attempt.hosts.values() if member.following]
            await asyncio.wait(watching, timeout=EARLY_FAILURES_WITHIN)
        if self.ends_role:
            # Hosts that are started again are put off until replica 0 is.
            self._hosts.rendezvous.put_off_restarted_hosts()
            await self._hosts.stop(event.signal, self._spec.grace)
        if failed := event.result.cause:
            result = self._failure((self._attempt.cause if self.ends_role else None) or failed)
        self._attempt.record_end(self._reporter)
        return result

    def _failure(self, cause: RankExit) -> JobResult:
        """Report the failure of a command, and of the others; return the result."""
        failure = self._attempt.failure(cause)
        self._reporter.record("failure", failure.reason, rank=cause.rank, failed_at=cause.failed_at)
        for line in describe_others(self._attempt.exits.values(), cause):
            self._reporter.line(f"also: {line}")
        return failure

    def _goes_on_without(self, event: HostEvent) -> bool:
        """Return whether the others go on without a replica, which its backend replaces, or the role does not need."""
        spec = self._spec
        if event.replica == 0:
            return False
        if self._is_replaced(event):
            return True
        member = self._members.get(event.replica)
        if not spec.min_replicas or member is None:
            return False
        if not member.is_spared:
            if spec.replicas - self._spared - 1 < spec.min_replicas:
                return False
            member.is_spared = True
            self._spared += 1
        return True

    def _is_replaced(self, event: HostEvent) -> bool:
        """Return whether the backend replaces a replica that leaves now, while the others go on."""
        member = self._attempt.hosts.get(event.replica)
        has_retries = (member.host.restarts if member is not None else 0) < self._spec.replacements
        return has_retries and not why_no_other_start(event.result, self._spec.retry_on)
