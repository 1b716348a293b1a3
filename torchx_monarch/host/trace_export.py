# SPDX-License-Identifier: BSD-3-Clause
"""Send the job's trace to an OpenTelemetry collector, from a process that the host never waits for in its work.

The host passes each event on without blocking; ``host.trace_exporter`` makes spans of them and sends them. What that
process has not sent ``_END_TIMEOUT`` after the host's end, or the time-out in OpenTelemetry's variables, is lost.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType

from torchx_monarch.insight import events, trace_spans
from torchx_monarch.insight.events import Event
from torchx_monarch.model.env_names import TRACE_ENDPOINTS, is_for_hosts
from torchx_monarch.model.host_spec import HostSpec

_END_TIMEOUT = 1.0
"""Seconds that the last spans may take after the host has asked for the end of the process, by default."""

_LONGEST_END_TIMEOUT = 60.0
"""The same, whatever the variables say: other languages' exporters read them as milliseconds."""

_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
"""OpenTelemetry's variables for the longest time of an export; Python's exporter takes them as seconds."""

_NO_FIELDS: Mapping[str, object] = MappingProxyType({})


class TraceExport:
    """Pass the events of a job on to a process that exports them, on replica 0.

    Args:
        options: command line of the host process.
        environ: environment of the host process.
        restart: how often the backend has started the hosts before.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, options: HostSpec, environ: Mapping[str, str], restart: int) -> None:
        # A message is sent as a whole or not at all.
        self._channel, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._role = options.role
        self._end_timeout = end_timeout(environ)
        with far_end:
            command = [sys.executable, "-m", "torchx_monarch.host.trace_exporter", str(far_end.fileno())]
            try:
                # In the host's session: a process in one of its own counts as an orphan of a rank (`end_orphans`).
                self._process = subprocess.Popen(
                    [*command, options.app, options.role, str(restart)],
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

    def add(self, kind: str, seconds: float | None = None, fields: Mapping[str, object] = _NO_FIELDS) -> None:
        """Pass an event on; drop it if the process is behind or has ended."""
        self._send({**trace_spans.reduce(kind, time.time(), seconds, fields), "role": self._role})

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


def end_timeout(environ: Mapping[str, str]) -> float:
    """Return the seconds that the last spans of a job may take after its end.

    Args:
        environ: environment of the host process.
    """
    text = next((environ[name] for name in _TIMEOUTS if environ.get(name)), "")
    try:
        seconds = float(text)
    except ValueError:
        return _END_TIMEOUT  # none is set, or none that Python's exporter can use
    return min(max(0.0, seconds), _LONGEST_END_TIMEOUT)  # 0 for NaN


def start(options: HostSpec, environ: Mapping[str, str]) -> TraceExport | None:
    """Start the export if the job's environment names a collector.

    Args:
        options: command line of the host process.
        environ: environment of the host process.

    Returns:
        None on other replicas than replica 0, without a collector, if OpenTelemetry's variables switch traces off, and
        if the process cannot be started.
    """
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if options.replica != 0 or off or not any(environ.get(name) for name in TRACE_ENDPOINTS):
        return None
    restart = environ.get("MONARCH_RESTART", "")
    try:
        return TraceExport(options, environ, int(restart) if restart.isdecimal() else 0)
    except OSError as error:
        print(f"no traces: {error}", file=sys.stderr, flush=True)  # Monarch's log
        return None
