# SPDX-License-Identifier: BSD-3-Clause
"""Send the job's trace to an OpenTelemetry collector, from a process that the host never waits for in its work.

The host passes each event on without blocking. Its process, ``python -m torchx_monarch.host.trace_export FD APP ROLE
RESTART``, reads one event from each message of the socket FD, makes spans of them and sends these by OTLP over HTTP.
OpenTelemetry's own variables name the collector, and say how to reach it. What is not sent ``_END_TIMEOUT`` after the
host's end, or the time-out in these variables, is lost.
"""

from __future__ import annotations

import os
import sys

# As in `host.__main__`: `python -m` puts the working folder first, where a `types.py` may lie.
if __name__ == "__main__" and sys.path[0] == os.getcwd() and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

import contextlib  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Mapping, Sequence  # noqa: E402

from torchx_monarch.insight import events, trace_spans  # noqa: E402
from torchx_monarch.insight.events import Event  # noqa: E402
from torchx_monarch.insight.trace_spans import TraceSpan  # noqa: E402
from torchx_monarch.model.env_names import is_for_hosts  # noqa: E402
from torchx_monarch.model.host_spec import HostSpec  # noqa: E402

_END_TIMEOUT = 1.0
"""Seconds that the last spans may take after the host has asked for the end of the process, by default."""

_MAX_END_TIMEOUT = 60.0
"""The same, whatever the variables say: other languages' exporters read them as milliseconds."""

_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
"""OpenTelemetry's variables for the longest time of an export; Python's exporter takes them as seconds."""

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

_MAX_EVENTS = 20_000
"""Events of which spans are made: those of thousands of runs on one live allocation."""

_PARTS_END_WITH = frozenset({"rank_restart", "run_end", "replacement", "result"})
"""The kinds of events at which the spans that have ended are sent; the others follow at the end."""

_MARGIN = 1
"""Seconds after the host's time-out: a host that has not ended the process by then has been killed."""

# -- in the host -------------------------------------------------------------------------------------------------------


class TraceExport:
    """Pass the events of a job on to a process that exports them, on replica 0."""

    def __init__(self, options: HostSpec, environ: Mapping[str, str]) -> None:
        # A message is sent as a whole or not at all.
        self._channel, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._role = options.role
        self._end_timeout = end_timeout(environ)
        restart = environ.get("MONARCH_RESTART", "")
        words = [str(far_end.fileno()), options.app, options.role, restart if restart.isdecimal() else "0"]
        with far_end:
            try:
                # In the host's session: a process in one of its own counts as an orphan of a rank (`end_orphans`).
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "torchx_monarch.host.trace_export", *words],
                    pass_fds=(far_end.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env={name: text for name, text in environ.items() if not is_for_hosts(name)},
                )
            except OSError:
                self._channel.close()
                raise
        self._channel.setblocking(False)
        if path := environ.get("MONARCH_EVENTS"):
            for event in trace_spans.since_last_restart(events.read(path)[0], options.role):
                self._send(event)

    def add(self, kind: str, seconds: float | None = None, fields: Mapping[str, object] | None = None) -> None:
        """Pass an event on; drop it if the process is behind or has ended."""
        self._send({**trace_spans.reduce(kind, time.time(), seconds, fields or {}), "role": self._role})

    def end(self) -> None:
        """End the process once it has sent the last spans, or after the time-out."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
            select.select([self._channel], [], [], self._end_timeout)  # readable once the process has closed its end
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        self._channel.close()

    def _send(self, event: Event) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(json.dumps(event).encode())


def start(options: HostSpec, environ: Mapping[str, str]) -> TraceExport | None:
    """Start the export; None if OpenTelemetry's variables switch traces off, or the process cannot be started."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    try:
        return TraceExport(options, environ)
    except OSError as error:
        print(f"no traces: {error}", file=sys.stderr, flush=True)  # the host process's own log
        return None


def end_timeout(environ: Mapping[str, str]) -> float:
    """Return the seconds that the last spans of a job may take after its end."""
    text = next((environ[name] for name in _TIMEOUTS if environ.get(name)), "")
    try:
        seconds = float(text)
    except ValueError:
        return _END_TIMEOUT  # none is set, or none that Python's exporter can use
    return min(max(0.0, seconds), _MAX_END_TIMEOUT)  # 0 for NaN


# -- in its process ----------------------------------------------------------------------------------------------------


def main(words: Sequence[str]) -> None:
    """Send the spans of a job until the host has ended; ``words`` are FD, APP, ROLE and RESTART."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the host ends this process
    os.nice(10)  # what it imports takes longer than the start of a host
    fd, app, role, restart = int(words[0]), words[1], words[2], int(words[3])
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        sys.exit(f"no traces: the protocol is {protocol}, and only http/protobuf is there")
    try:
        export = exporter(trace_spans.trace_id(app))
    except ImportError as error:
        sys.exit(f"no traces: {error}: pip install 'torchx-monarch[otel]'")
    with socket.socket(fileno=fd) as channel:
        send_all(map(json.loads, iter(lambda: channel.recv(1 << 20), b"")), app, role, restart, export)


def send_all(
    happened: Iterator[Event], app: str, role: str, restart: int, export: Callable[[Sequence[TraceSpan]], None]
) -> None:
    """Send each span of a job once, when it has ended."""
    seen: list[Event] = []
    sent: set[int] = set()

    def send(end: float, complete: bool) -> None:
        spans = trace_spans.build(seen, app, role, restart, end=end)
        new = [span for span in spans if span.id not in sent and (complete or span.end < end)]
        sent.update(span.id for span in new)
        if new:
            export(new)

    for event in happened:
        if len(seen) < _MAX_EVENTS:
            seen.append(event)
        if event["kind"] in _PARTS_END_WITH and seen[-1] is event:
            send(event["time"] + 1, complete=False)
    signal.alarm(math.ceil(end_timeout(os.environ)) + _MARGIN)
    if seen:
        send(time.time(), complete=True)


def exporter(trace: int) -> Callable[[Sequence[TraceSpan]], None]:
    """Return a function that sends spans of a trace; ``ImportError`` if OpenTelemetry's SDK is not installed."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    # With OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, which exist to be sent.
    resource = Resource.create({} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "torchx-monarch"})
    scope = InstrumentationScope("torchx_monarch")
    sender = OTLPSpanExporter()

    def context(span: int) -> SpanContext:
        return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def readable(span: TraceSpan) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context(span.id),
            None if span.parent is None else context(span.parent),
            resource,
            {**span.attributes, **({"error.type": span.error} if span.error else {})},
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if span.error else StatusCode.UNSET),
            start_time=int(span.start * 1e9),
            end_time=int(span.end * 1e9),
            instrumentation_scope=scope,
        )

    def send(spans: Sequence[TraceSpan]) -> None:
        sender.export([readable(span) for span in spans])

    return send


if __name__ == "__main__":
    main(sys.argv[1:])
