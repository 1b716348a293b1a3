# SPDX-License-Identifier: BSD-3-Clause
"""A channel between two processes: its messages arrive once and in order, although a network may break connections.

Each end counts the messages that it has received, and keeps those that it has sent until the other end has them. When
the connection breaks, the end that opened it opens another one. Each end then says how many messages it has received,
and gets the others again. The lease limits how long this may take.

A process that ends closes its connections. A connection that was closed must therefore be replaced soon. A channel over
a socket file, which no network can break, ends with its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
from collections.abc import Awaitable, Callable

from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.transport import messages
from torchx_monarch.transport.messages import Message, ProtocolError

REPLACED_WITHIN = 2.0
"""Seconds in which a connection that was closed must be replaced. The end that opened it tries at once."""

_CONFIRMED_EVERY = 1 << 20
"""Bytes after which the other end is asked how many messages it has received."""

_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

Reopened = tuple[Message, asyncio.StreamReader, asyncio.StreamWriter]
"""The answer to a request to go on, and the streams of the connection behind it."""

Reopen = Callable[[int], Awaitable[Reopened | None]]


class Channel:
    """One end of a channel.

    Attributes:
        token: secret by which the other end proves, over another connection, that it is the same process.
        silence: seconds since the last message.
        broken_by: what has broken its last connection; empty if nothing has.
        loss: how the channel has ended, as a predicate whose subject is the peer; empty until then.

    Args:
        options: of the host process, for the lease and the peer timeout.
        networked: whether the connection is over a network, and no socket file.
        reopen: opens another connection, given the number of messages received; returns None if the channel cannot go
            on. The end that listens has none; ``resume`` is called there.
        say: called with a line for the log when the network breaks the connection, and when there is another one.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        options: HostSpec,
        networked: bool,
        reopen: Reopen | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.token = secrets.token_hex(16)
        self.silence = 0.0
        self.broken_by = ""
        self.loss = ""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = reader, writer
        self._lease = options.lease
        self._peer_timeout = options.peer_timeout
        self._networked = networked
        self._reopen = reopen
        self._say = say
        self._received = 0
        self._confirmed = 0
        self._unconfirmed: list[bytes] = []
        self._unasked = 0
        self._is_finished = False
        self._peer_has_ended = False
        self._changed: asyncio.Event | None = None  # while there is no connection
        self._reopening: asyncio.Task[None] | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._saying: asyncio.TimerHandle | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the channel has no connection at present."""
        return self._streams is None

    def write(self, message: bytes) -> None:
        """Send an encoded message, but do not wait until the peer has read it."""
        self._unconfirmed.append(message)
        self._unasked += len(message)
        self._pass_on(message)
        if self._unasked > _CONFIRMED_EVERY:
            self.confirm(asks=True)

    async def send(self, message: Message) -> None:
        """Send a message, and wait while the peer reads too slowly."""
        await self.send_bytes(messages.encode(message))

    async def send_bytes(self, message: bytes) -> None:
        self.write(message)
        if self._streams is not None:
            with contextlib.suppress(OSError, RuntimeError):
                await self._streams[1].drain()

    def confirm(self, asks: bool = False) -> None:
        """Tell the peer how many messages have been received, and ask it for the same, which renews its lease."""
        if asks:
            self._unasked = 0
        self._pass_on(messages.encode({"type": "alive", "received": self._received, "asks": asks}))

    def _pass_on(self, data: bytes) -> None:
        if self._streams is not None and not self._streams[1].is_closing():  # after a break that is not known yet
            self._streams[1].write(data)

    async def receive(self) -> Message | None:
        """Return the next message; None at the end of the channel; raise ``ProtocolError`` if it is not valid."""
        while not self.loss:
            if self._streams is None:
                assert self._changed is not None
                await self._changed.wait()
                continue
            reader = self._streams[0]
            message = await messages.receive(reader)
            if self._streams is None or self._streams[0] is not reader:
                continue  # the peer sends it again over the connection in the place of this one
            if message is None:
                self._break(reader.exception())
                continue
            self.silence = 0.0
            if message.get("type") != "alive":
                self._received += 1
                return message
            self._drop_confirmed(message.get("received"))
            if message.get("asks") is True:
                self.confirm()
        return None

    # -- connections ---------------------------------------------------------------------------------------------------

    def _break(self, error: BaseException | None) -> None:
        """Wait for another connection, unless there can be none."""
        self._disconnect()
        is_at_end = self._peer_has_ended or (self._is_finished and not self._unconfirmed)
        if is_at_end or not self._networked:
            return self.close("was lost: its connection broke")
        self.silence = min(self.silence, self._peer_timeout)
        self._changed = asyncio.Event()
        if error is None:
            self.broken_by = "its connection broke"
            reason = f"was lost: its connection broke, and it made no other one within {REPLACED_WITHIN:g} s"
            self._closing = asyncio.get_running_loop().call_later(REPLACED_WITHIN, self.close, reason)
        else:
            number = getattr(error, "errno", None) or 0
            why = os.strerror(number) if number else str(error)
            silent = f" (no answer for {self._peer_timeout:g} s)" if number in _SILENT else ""
            self.broken_by = f"the network broke its connection: {why}{silent}"
            text = f"{self.broken_by}; it is lost unless it connects again within {self._lease:g} s (lease)"
            # Not at once: the end of a process resets its connection, too, if it has left messages unread.
            self._saying = asyncio.get_running_loop().call_later(REPLACED_WITHIN, self._say, text)
        if self._reopen is not None:
            self._reopening = asyncio.ensure_future(self._connect(self._reopen))

    async def _connect(self, reopen: Reopen) -> None:
        opened = await reopen(self._received)
        self._reopening = None
        try:
            if opened is None:
                self.close(f"was lost: {self.broken_by}, and it does not know this host any more")
            else:
                answer, reader, writer = opened
                self._go_on(reader, writer, answer.get("received"))
        except ProtocolError as error:
            self.close(f"was lost: {error}")

    async def resume(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: int) -> None:
        """Go on over a connection that the other end has opened; return at the end of that connection."""
        self._go_on(reader, writer, received, {"type": "resumed", "received": self._received})
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _go_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        received: object,
        answer: Message | None = None,
    ) -> None:
        self._drop_confirmed(received)
        self._disconnect()
        first = [messages.encode(answer)] if answer is not None else []
        writer.write(b"".join(first + self._unconfirmed))
        self._streams, self.silence = (reader, writer), 0.0
        after = f", after {self.broken_by}" if self.broken_by else ""  # else the other end alone has noticed the break
        self._say(f"it has connected again{after}")
        self._wake()

    def _drop_confirmed(self, received: object) -> None:
        count = received - self._confirmed if isinstance(received, int) else -1
        if not 0 <= count <= len(self._unconfirmed):
            raise ProtocolError(f"{str(received)[:20]} is no number of messages that were sent")
        del self._unconfirmed[:count]
        self._confirmed += count

    def _disconnect(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._streams = None

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Have the channel end with its connection, once the peer has received all that was sent."""
        self._is_finished = True

    def peer_has_ended(self) -> None:
        """Have the channel end with its connection: the peer has sent its last message, and reads nothing any more."""
        self._peer_has_ended = True

    def close(self, loss: str = "has left") -> None:
        """End the channel at once."""
        self.loss = self.loss or loss
        self._disconnect()
        if self._reopening is not None:
            self._reopening.cancel()
        self._wake()

    def lease_expired(self) -> None:
        if self._streams is None:
            self.close(f"was lost: {self.broken_by}; it has not connected again within {self._lease:g} s (lease)")
        else:
            self.close(f"does not answer: no message from it for {self._lease:g} s (lease)")

    def _wake(self) -> None:
        for timer in (self._closing, self._saying):
            if timer is not None:
                timer.cancel()
        if self._changed is not None:
            self._changed.set()
