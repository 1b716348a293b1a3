# SPDX-License-Identifier: BSD-3-Clause
"""Send spans of a job by OTLP over HTTP: ``python -m torchx_monarch.host.trace_exporter FD APP ROLE RESTART``.

Reads one event of the host from each message of the socket FD, and ends with it. OpenTelemetry's own variables name the
collector, and say how to reach it.
"""

from __future__ import annotations

import os
import sys

# As in `host.__main__`: `python -m` puts the working folder first, where a `types.py` may lie.
if __name__ == "__main__" and sys.path[0] == os.getcwd() and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

import json  # noqa: E402
import math  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402

from torchx_monarch.host.trace_export import end_timeout  # noqa: E402
from torchx_monarch.insight import trace_spans  # noqa: E402
from torchx_monarch.insight.events import Event  # noqa: E402
from torchx_monarch.insight.trace_spans import TraceSpan  # noqa: E402

_MOST_EVENTS = 20_000
"""Events of which spans are made: those of thousands of runs on one live allocation."""

_PARTS_END_WITH = frozenset({"rank_restart", "run_end", "replacement", "result"})
"""The kinds of events at which the spans that have ended are sent; the others follow at the end."""

_MARGIN = 1
"""Seconds after the host's time-out: a host that has not ended this process by then has been killed."""

_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def main(words: Sequence[str]) -> None:
    """Send the spans of a job until the host has ended.

    Args:
        words: the command line without the program's name.
    """
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
        send_all(received(channel), app, role, restart, export)


def received(channel: socket.socket) -> Iterator[Event]:
    """Yield the events that the host sends, until it closes the socket."""
    while message := channel.recv(1 << 20):
        yield json.loads(message)


def send_all(
    happened: Iterator[Event], app: str, role: str, restart: int, export: Callable[[Sequence[TraceSpan]], None]
) -> None:
    """Send each span of a job once, when it has ended.

    Args:
        happened: the events, each as soon as it happens.
        app: id of the app.
        role: name of the role.
        restart: how often the backend has started the hosts before.
        export: sends spans.
    """
    seen: list[Event] = []
    sent: set[int] = set()

    def send(end: float, complete: bool) -> None:
        spans = trace_spans.build(seen, app, role, restart, end=end)
        new = [span for span in spans if span.id not in sent and (complete or span.end < end)]
        sent.update(span.id for span in new)
        if new:
            export(new)

    for event in happened:
        if len(seen) < _MOST_EVENTS:
            seen.append(event)
        if event["kind"] in _PARTS_END_WITH and seen[-1] is event:
            send(event["time"] + 1, complete=False)
    signal.alarm(math.ceil(end_timeout(os.environ)) + _MARGIN)
    if seen:
        send(time.time(), complete=True)


def exporter(trace: int) -> Callable[[Sequence[TraceSpan]], None]:
    """Return a function that sends spans of a trace to the collector that the environment names.

    Args:
        trace: id of the trace.

    Raises:
        ImportError: OpenTelemetry's SDK or its exporter is not installed.
    """
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

    def export(spans: Sequence[TraceSpan]) -> None:
        sender.export(
            [
                ReadableSpan(
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
                for span in spans
            ]
        )

    return export


if __name__ == "__main__":
    main(sys.argv[1:])
