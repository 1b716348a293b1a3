# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What AWS answers over HTTP, from a list: throttling, refusals, pages, what moto never says."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]


def refusal(code: str, message: str = "no", status: int = 400) -> dict[str, Any]:
    """The answer of AWS that is an error."""
    return {"refusal": code, "message": message, "status": status}


class Wire:
    """Serves on a port of this machine.

    Attributes:
        url: for AWS_ENDPOINT_URL.
        asked: the requests, (operation, arguments).
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._answers: dict[str, list[Answer]] = defaultdict(list)
        wire = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                # Batch names the operation in the path, CloudWatch in a header.
                operation = self.headers.get("X-Amz-Target", self.path).rpartition("/" if "/v1/" in self.path else ".")[
                    2
                ]
                arguments = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                answer = wire._answer(operation.lower(), arguments)
                self.send_response(answer.pop("status", 200))
                if "refusal" in answer:
                    self.send_header("x-amzn-errortype", answer["refusal"])
                    answer["__type"] = answer.pop("refusal")
                body = json.dumps(answer).encode()
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def says(self, operation: str, *answers: Answer) -> None:
        """What is answered to an operation, one after the other; the last one for ever."""
        self._answers[operation.lower()] = list(answers)

    def _answer(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((operation, arguments))
        answers = self._answers[operation]
        if not answers:
            return refusal("ClientException", f"the test answers nothing to {operation}")
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return dict(answer(arguments) if callable(answer) else answer)

    def stop(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
