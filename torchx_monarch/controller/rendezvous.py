# SPDX-License-Identifier: BSD-3-Clause
"""The rendezvous, through which the hosts of a role register with replica 0 and learn the result of the job.

Replica 0 listens. Every other host connects, registers, sends heartbeats, which replica 0 answers, and waits for the
result. Each side counts the other as lost when their channel ends (``transport.channel``), which it also does when the
other is silent for longer than the lease (``transport.lease``).

=========================  =======================================================================================
host to replica 0          ``register`` and ``resume`` (greetings, with the protocol's version), ``answer`` and
                           the reports (``host_messages``)
client to replica 0        ``state``, ``stop`` (greetings; the answer is ``state``, for a ``stop`` with ``save``
                           once ranks have ended, with the ``reason``, and whether they were ``stopped``), and the kinds
                           in ``HostNetwork.handlers``
replica 0 to either        ``registered`` (with its name), ``resumed``, ``refused`` (with the reason), ``state``,
                           ``request`` and ``cancel`` (``host_messages``), ``result``
=========================  =======================================================================================

The certificate distinguishes hosts from clients (``transport.connections.is_client``). Without certificates, on a
socket file of this user or on an insecure port, every peer may do everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import resource
import signal
import time
from collections.abc import Callable, Iterator

from torchx_monarch.controller.host_events import (
    HostEvents,
    HostLost,
    HostPreempted,
    StopRequested,
    signalled,
)
from torchx_monarch.controller.host_messages import CheckpointParts, Report, decode_report
from torchx_monarch.controller.host_network import HostNetwork, LaterError, Peer, RendezvousError, TakenError, brief
from torchx_monarch.controller.members import Member, Members, MemberState
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.model.host_facts import Registration
from torchx_monarch.model.job_result import JobResult
from torchx_monarch.transport import messages
from torchx_monarch.transport.channel import Channel
from torchx_monarch.transport.connections import ConnectError
from torchx_monarch.transport.lease import Leases

_LATECOMERS = 1.0

_CANCELLED_WITHIN = 60.0
"""Seconds for which a job whose ranks have saved for a client waits for its cancellation."""


class Rendezvous:
    """Replica 0's side of the rendezvous.

    Attributes:
        network: its own connections.
        members: the hosts.
        stopped: the result of a job that its client stops.
        more_state: returns further fields of the answer to ``state``, which take precedence.

    Args:
        min_hosts: minimum number of hosts that the job needs; None for all.
        say: called with a line for the job's log.
    """

    def __init__(
        self, network: HostNetwork, min_hosts: int | None = None, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.events = HostEvents()
        self.members = Members(network.options.replicas)
        self.network = network
        network.handlers.update(
            {"register": self._register, "resume": self._resume, "state": self._send_state, "stop": self._stop}
        )
        self.stopped = JobResult(128 + signal.SIGTERM, "the job was stopped by its client", stopped=True)
        self.more_state: Callable[[], messages.Message] = dict
        self._replicas = network.options.replicas
        self._min_hosts = self._replicas if min_hosts is None else min_hosts
        self._spares = network.options.spares
        self._say = say
        self._channels: dict[str, Channel] = {}  # by their tokens
        self._leases = Leases(network.options.lease, lambda: [*self._channels.values()])
        self._puts_off = False
        self._cancelling = 0
        """The number of clients that cancel the job once its ranks have saved."""
        self._saved: JobResult | None = None
        self._result: JobResult | None = None

    async def start(self) -> None:
        """Start to listen; raise ``RendezvousError`` if the process cannot, or may not open a file for each host."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if files <= self._min_hosts:
            raise RendezvousError(
                f"replica 0 needs a connection to each of {self._min_hosts} hosts, and its machine allows it {files} "
                "open files: raise the hard limit there (ulimit -Hn)"
            )
        try:
            self.network.listen(self.network.rendezvous, self._say)
        except ConnectError as error:
            raise RendezvousError(str(error)) from None
        self._leases.start()

    def register(self, host: Registration, channel: Channel | None = None) -> Member:
        """Register a host as present. The error of a host that cannot start is an event."""
        member = Member(host, MemberState.UNABLE if host.error else MemberState.ABLE, channel)
        self.members.add(member)
        if host.error:
            reason = f"{host.name} cannot start: {host.error}"
            result = JobResult(host.code, reason, replica=host.replica)
            self.events.post(StopRequested(host.replica, result))
        return member

    def dismiss(self, replica: int, result: JobResult) -> None:
        """Send one host the result with which it ends, while the job goes on without it."""
        member = self.members.get(replica)
        if member is not None and member.is_registered:
            self.members.set_state(member, MemberState.DISMISSED)
            member.send_result(result, dismissed=True)

    def put_off_restarted_hosts(self) -> None:
        """Refuse hosts that the backend starts again, until it has started replica 0 again as well.

        This is for backends that restart the hosts of a job one by one. A host that registered now would get the
        result of the job that is ending, and would use up one of its restarts for nothing.
        """
        self._puts_off = self.members.has_begun

    async def announce(self, result: JobResult, timeout: float) -> None:
        """Send every host the result; return when all have disconnected, or after ``timeout`` seconds.

        If no attempt has been formed, keep listening for a second and send the result to hosts that arrive late. They
        would otherwise look for a replica 0 for a long time.
        """
        self._result = result
        if result.code != 0:
            self.put_off_restarted_hosts()
        members, end = self.members, time.monotonic() + timeout
        for member in members.connected.values():
            member.send_result(result)
        if not members.has_begun:
            await members.until(lambda: not members.unseen, min(_LATECOMERS, timeout))
        await members.until(lambda: not members.connected, end - time.monotonic())
        self.network.close()

    async def _register(self, peer: Peer) -> None:
        host, own = self._admit(peer.greeting), self.members.registered(0)
        # No await between ``_admit`` and this: another connection may greet with the same replica.
        with self.channel(peer, host.name, name=own.name if own else "replica 0") as channel:
            member = self.register(host, channel)
            if self._result is not None:
                member.send_result(self._result)
            try:
                await self._follow(member, channel)
            except messages.ProtocolError as error:
                channel.close(f"was lost: {error}")
            self._leave(member, self._loss(member, channel))

    @contextlib.contextmanager
    def channel(self, peer: Peer, whom: str, **answer: object) -> Iterator[Channel]:
        """Answer a process that registers. Within the context its channel may go on over other connections."""
        options, networked = self.network.options, self.network.rendezvous.networked
        channel = Channel(peer.reader, peer.writer, options, networked, say=lambda text: self._say(f"{whom}: {text}"))
        self._channels[channel.token] = channel
        peer.writer.write(messages.encode({"type": "registered", "token": channel.token, **answer}))
        try:
            yield channel
        finally:
            del self._channels[channel.token]
            channel.close()

    async def _resume(self, peer: Peer) -> None:
        """Have a channel go on over another connection, from the number of messages on that the peer has received."""
        channel = self._channels.get(decode(str, peer.greeting.get("token"), "token"))
        if channel is None or channel.loss:
            raise RendezvousError("it has not registered there, or counts as lost")
        await channel.resume(peer.reader, peer.writer, decode(int, peer.greeting.get("received"), "received"))

    def _leave(self, member: Member, lost: HostLost) -> None:
        """Remove a host whose channel has ended, or whose replica has another host now.

        Nothing in here awaits, so all who wait for the event, the host or its answers find everything done: a request
        that fails because the host is lost finds the event, which names the cause better, pending.
        """
        if member.state is MemberState.LOST:
            return  # another host has its place
        was_able = member.state is MemberState.ABLE
        is_needed = self._is_needed(member)  # before its state changes: it is counted among those that are present
        if was_able and not is_needed:
            self._say(f"{lost.result.reason}; it ran no ranks")
        self.members.set_state(member, MemberState.LOST)
        if was_able and is_needed:
            self.events.post(lost)

    def state(self) -> messages.Message:
        """Return the hosts' state for a client."""
        hosts = list(filter(None, map(self.members.registered, range(self._replicas))))
        common = {"type": "state", "hosts": hosts, "missing": self.members.missing, "ended": self._result is not None}
        return {**common, **self.more_state()}

    async def _send_state(self, peer: Peer) -> None:
        await peer.send(self.state())

    async def _stop(self, peer: Peer) -> None:
        saves = peer.greeting.get("save") is True
        self.events.post(StopRequested(0, self.stopped, saves=saves))
        if not saves:
            await peer.send(self.state())
            return
        self._cancelling += 1
        try:
            await peer.while_connected(self._send_end(peer))
        finally:
            self._cancelling -= 1

    async def _send_end(self, peer: Peer) -> None:
        await self.members.until(lambda: self._saved is not None)
        assert (result := self._saved) is not None
        await peer.send({**self.state(), "reason": result.reason, "stopped": result.stopped})

    async def await_cancel(self, result: JobResult) -> None:
        """Tell clients that wait for it how the job has ended, and wait until they have cancelled it.

        Its backend would take the exit code of hosts that end before for a failure. Another client may have cancelled
        it before the ranks had ended.
        """
        self._saved = result
        self.members.notify()
        if self._cancelling:
            self.events.take(lambda event: event.result is self.stopped)
            cancelling = asyncio.sleep(_CANCELLED_WITHIN if result.stopped else 0.0)
            await self.events.until_event(cancelling, lambda event: event.replica == 0)

    def _admit(self, greeting: messages.Message) -> Registration:
        host = decode(Registration, greeting.get("host"), "the registration")
        if not 0 <= host.replica < self._replicas:
            raise RendezvousError(f"replica {host.replica!r} is not one of the {self._replicas} of this role")
        last = self.members.get(host.replica)
        if last is not None and last.is_registered and last.channel is not None and last.channel.is_broken:
            last.channel.close(f"was lost: {last.channel.broken_by}; its replica has started again")
            self._leave(last, self._loss(last, last.channel))
            raise LaterError(f"{last.host.name} has just been lost")  # the controller may put off hosts because of that
        if last is not None and last.is_registered:
            raise TakenError(f"replica {host.replica} has registered already: {last.host.name}")
        if self._puts_off and host.world is None:  # one that has run attempts belongs to this job and needs its result
            raise LaterError("the hosts that this one was started to join are ending")
        if last is not None and last.knows_result:
            raise LaterError("its start before this one knows how the job has ended: it belongs to the next job")
        if host.error and self._min_hosts < self._replicas and self.members.has_begun:
            raise RendezvousError(host.error)  # the job goes on without it
        if host.error and host.replica and self._spares:
            self.members.add(Member(host, MemberState.REFUSED))
            if self.members.counts[MemberState.REFUSED] <= self._spares:
                raise RendezvousError(host.error)
        return host

    async def _follow(self, member: Member, channel: Channel) -> None:
        while message := await channel.receive():
            if member.state is MemberState.LOST:
                continue  # it was dismissed, and another one has its place
            try:
                report = decode_report(message)
            except DecodeError as error:
                raise messages.ProtocolError(str(error)) from None
            if report is not None:
                await self.report(member, report)
            elif message.get("type") == "answer":
                member.answer(message)

    async def report(self, member: Member, report: Report) -> None:
        """Take what a host reports without a request; raise ``ProtocolError`` if it makes no sense."""
        if isinstance(report, CheckpointParts):
            self.members.set_checkpoints(member.host.replica, report)
        elif not 0 < report.number < signal.NSIG:
            raise messages.ProtocolError(f"{brief(report.number)} is no number of a signal")
        elif member.is_registered:
            event = signalled(member.host, report.number, report.announced, report.saves)
            if isinstance(event, HostPreempted) and not self._is_needed(member):
                self._say(f"{event.result.reason}; it ran no ranks")
                self.dismiss(member.host.replica, event.result)
            else:
                self.events.post(event)

    def _loss(self, member: Member, channel: Channel) -> HostLost:
        """Return the event of a host whose channel has ended."""
        host = member.host
        # A pause of this process is the reason why the host has left, whose own lease for it has expired.
        pause = self._leases.own_pause if channel.silence <= self._leases.seconds else 0.0
        if pause and (own := self.members.registered(0)):
            blamed = _lost(own, f"did not run for {pause:.0f} s, and {host.name} has left it")
            return dataclasses.replace(blamed, replica=host.replica)  # the host is sound and may register again
        return _lost(host, channel.loss)

    def _is_needed(self, member: Member) -> bool:
        """Return whether the loss of a registered host ends the attempt: it is in it, or too few would be left."""
        is_spare = self._spares > 0 and self.members.has_begun and not self.members.in_attempt(member.host.replica)
        return not is_spare or self.members.able_count - 1 < self._min_hosts


def _lost(host: Registration, how: str) -> HostLost:
    result = JobResult(1, f"{host.name} {how}", consequence=True, replica=host.replica)
    return HostLost(host.replica, result)
