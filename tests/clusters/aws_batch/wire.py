# SPDX-License-Identifier: BSD-3-Clause
"""What AWS answers over HTTP, from a list: throttling, refusals, pages, what moto never says.

Every request that comes and every answer that goes is checked against AWS's own model of its services.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.clusters.aws_batch import model
from tests.clusters.aws_batch.model import Operation

Answer = dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]


def refusal(code: str, message: str = "no", status: int = 400) -> dict[str, Any]:
    """The answer of AWS that is an error."""
    return {"refusal": code, "message": message, "status": status}


class Wire:
    """Serves on a port of this machine.

    Attributes:
        url: for AWS_ENDPOINT_URL.
        asked: the requests, (operation, arguments).
        wrong: what AWS would not have said, or would not have been asked.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.wrong: list[str] = []
        self._answers: dict[str, list[Answer]] = defaultdict(list)
        wire = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                status, headers, body = wire._handle(
                    model.operation("POST", self.path, self.headers.get("X-Amz-Target", "")),
                    json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"),
                )
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
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
        self._answers[operation] = list(answers)

    def _handle(self, operation: Operation, arguments: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        """The one way in and out: a request, and the status, headers and body of what is answered."""
        self.asked.append((operation.name, {**arguments, **operation.uri}))
        answer = self._answer(operation.name, arguments)
        status, headers = answer.pop("status", 200), {"Content-Type": "application/json"}
        problems = [f"request: {problem}" for problem in operation.request(arguments)]
        if code := answer.pop("refusal", ""):
            problems += [f"answer: {problem}" for problem in operation.refusal(code)]
            headers["x-amzn-errortype"] = answer["__type"] = code
        else:
            problems += [f"answer: {problem}" for problem in operation.answer(answer)]
        self.wrong += problems
        return status, headers, json.dumps(answer).encode()

    def _answer(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answers = self._answers[operation]
        if not answers:
            self.wrong.append(f"the test answers nothing to {operation}")
            return refusal("AccessDeniedException", status=403)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return dict(answer(arguments) if callable(answer) else answer)

    def stop(self) -> None:
        """Serve no more.

        Raises:
            AssertionError: something was said that AWS does not say, or is not asked.
        """
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        assert not self.wrong, "not as AWS's own model has it:\n" + "\n".join(dict.fromkeys(self.wrong))
