# SPDX-License-Identifier: BSD-3-Clause
"""Proxy kube-apiserver 1.20 so that it keeps the fields of Indexed Jobs, which it would drop.

Requests carry the fields that the server does not know in an annotation, and answers have them back in their places.
Everything else passes unchanged: connections, authentication, errors, streams.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import ssl
import threading
import urllib.parse
from pathlib import Path
from typing import Any

SPEC = "tests/newer-spec"
STATUS = "tests/newer-status"

_FIELDS = (
    "backoffLimitPerIndex",
    "completionMode",
    "maxFailedIndexes",
    "podFailurePolicy",
    "podReplacementPolicy",
    "suspend",
)

_HOPS = ("connection", "transfer-encoding", "content-length", "host", "accept-encoding")


def packed(job: dict[str, Any]) -> dict[str, Any]:
    """A Job as the old server can keep it."""
    spec = job.get("spec", {})
    newer = {name: spec[name] for name in _FIELDS if name in spec}
    if newer:
        job.setdefault("metadata", {}).setdefault("annotations", {})[SPEC] = json.dumps(newer)
    return job


def unpacked(answer: dict[str, Any]) -> dict[str, Any]:
    """A Job, or all of a list, as a newer server would have it."""
    for item in answer.get("items") or ():
        unpacked(item)
    annotations = (answer.get("metadata") or {}).get("annotations") or {}
    for name, part in ((SPEC, "spec"), (STATUS, "status")):
        if name in annotations:
            answer.setdefault(part, {}).update(json.loads(annotations.pop(name)))
    return answer


class ApiProxy:
    """Listen on a port of 127.0.0.1.

    Args:
        folder: has ``tls.crt`` and ``tls.key``, the server's, which the proxy uses as well.
        port: the server's.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._trust = ssl.create_default_context(cafile=str(folder / "tls.crt"))
        self._port = port
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(str(folder / "tls.crt"), str(folder / "tls.key"))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _pass(self) -> None:
                url = urllib.parse.urlparse(self.path)
                about_jobs = "/apis/batch/v1/" in url.path and "/jobs" in url.path
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length) if length else None
                if about_jobs and body and self.command == "POST":
                    body = json.dumps(packed(json.loads(body))).encode()
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOPS}
                server = http.client.HTTPSConnection("127.0.0.1", proxy._port, context=proxy._trust, timeout=None)
                try:
                    server.request(self.command, self.path, body, headers)
                    self._answer(server.getresponse(), about_jobs, "follow=true" in url.query)
                except OSError:
                    self.close_connection = True
                finally:
                    server.close()

            def _answer(self, answer: http.client.HTTPResponse, about_jobs: bool, streams: bool) -> None:
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOPS:
                        self.send_header(name, value)
                if not streams:
                    data = answer.read()
                    if about_jobs:
                        with contextlib.suppress(ValueError):
                            data = json.dumps(unpacked(json.loads(data))).encode()
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                    return
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while data := answer.read1(1 << 16):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.write(b"0\r\n\r\n")

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass

        return Handler
