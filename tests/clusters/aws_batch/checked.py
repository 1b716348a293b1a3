# SPDX-License-Identifier: BSD-3-Clause
"""moto's answers, and what it is asked, beside AWS's own model: around its application (WSGI)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from tests.clusters.aws_batch import model

WRONG = "/wrong"
"""Path at which what was wrong is told, as a JSON list."""


_MOTOS_OWN = re.compile(
    r"DescribeJobs\.jobs\[\d+\] lacks 'startedAt'|"
    r"DescribeJobs\.jobs\[\d+\]\.container\.vcpus is [\d.]+, not a integer|"
    r"\.tags is 0 \(long\)|"
    r"ListSecrets\.SecretList\[\d+\] has no 'VersionIdsToStages'"
)
"""How moto differs from AWS where we do not look, or do without: when a job was started that was not."""


class Checked:
    """An application that notes what AWS would not have said, or would not have been asked.

    Args:
        application: moto's.
    """

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._wrong: dict[str, None] = {}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == WRONG:
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(list(self._wrong)).encode()]
        path = environ.get("RAW_URI") or environ["PATH_INFO"]
        try:
            operation = model.operation(environ["REQUEST_METHOD"], path, environ.get("HTTP_X_AMZ_TARGET", ""))
        except LookupError:
            return self._application(environ, start_response)  # what only the tests ask for
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        statuses: list[str] = []

        def start(status: str, *args: Any) -> Any:
            statuses.append(status)
            return start_response(status, *args)

        answer = b"".join(self._application(environ, start))
        problems = [f"request: {one}" for one in operation.request(json.loads(body or b"{}"))]
        if statuses[-1].startswith("2"):
            said = operation.answer(_without_nulls(json.loads(answer or b"{}")))
            problems += [f"answer: {one}" for one in said if not _MOTOS_OWN.search(one)]
        self._wrong |= dict.fromkeys(problems)
        return [answer]


def _without_nulls(value: Any) -> Any:
    """Without members that are null, which moto has where AWS has none: clients take both for the same."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
