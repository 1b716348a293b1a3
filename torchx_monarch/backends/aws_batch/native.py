# SPDX-License-Identifier: BSD-3-Clause
"""Send requests to AWS through boto3 clients that are created on first use, and raise one exception for its errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import boto3
from botocore import exceptions, xform_name
from botocore.config import Config

from torchx_monarch.backends.core.errors import BackendError


class AwsError(BackendError):
    """Raised when AWS is unreachable or refuses a request.

    Attributes:
        code: AWS's error code; empty without an answer.
    """

    def __init__(self, error: Exception) -> None:
        """Take over botocore's text, which names the request and the reason, in one line."""
        super().__init__(f"AWS: {' '.join(str(error).split())}")
        self.code: str = getattr(error, "response", {}).get("Error", {}).get("Code", "")


class Aws:
    """Sends requests with the account and region of the environment and AWS's configuration; raises ``AwsError``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: Any = None
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        """Return the boto3 client of a service."""
        with self._lock:
            if service not in self._clients:
                options: dict[str, Any] = {"user_agent_extra": "torchx-monarch"}
                if "AWS_MAX_ATTEMPTS" not in os.environ:
                    # boto3 waits up to 20 s between two attempts at a request that AWS throttles or fails.
                    options["retries"] = {"mode": "standard", "total_max_attempts": 8}
                try:
                    # Not boto3's default session, which other code in this process shares.
                    # boto3 ignores AWS_REGION, which the AWS CLI and other SDKs read first.
                    region = os.environ.get("AWS_REGION") or None
                    self._session = self._session or boto3.session.Session(region_name=region)
                    self._clients[service] = self._session.client(service, config=Config(**options))
                except (exceptions.BotoCoreError, ValueError) as error:
                    raise AwsError(error) from None
            return self._clients[service]

    def call(self, service: str, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send a request, such as ``SubmitJob`` to ``batch``, and return the answer."""
        client = self.client(service)
        try:
            answer: dict[str, Any] = getattr(client, xform_name(operation))(**arguments)
        except (exceptions.BotoCoreError, exceptions.ClientError) as error:
            raise AwsError(error) from None
        return answer

    def pages(self, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Yield the pages of a paginated operation of Batch."""
        while True:
            answer = self.call("batch", operation, **arguments)
            yield answer
            if not answer.get("nextToken"):
                return
            arguments["nextToken"] = answer["nextToken"]

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()
