# SPDX-License-Identifier: BSD-3-Clause
"""A collector of traces on this machine: it keeps the spans that are sent to it by OTLP over HTTP."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """What was received.

    Attributes:
        endpoint: the value of OTEL_EXPORTER_OTLP_ENDPOINT.
        requests: the requests, each an ``ExportTraceServiceRequest``.
        bodies: their bytes.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.requests: list[Any] = []
        self.bodies: list[bytes] = []

    @property
    def spans(self) -> list[Any]:
        """All spans."""
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@contextlib.contextmanager
def receiver() -> Iterator[Receiver]:
    """Run a collector until the block ends."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            found.bodies.append(body)
            found.requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Receiver(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
