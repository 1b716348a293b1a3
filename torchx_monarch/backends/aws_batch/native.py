# SPDX-License-Identifier: BSD-3-Clause
"""Send requests to AWS through boto3 clients that are created on first use, and explain AWS's errors."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import boto3
from botocore import exceptions, xform_name
from botocore.config import Config

from torchx_monarch.backends.core.errors import BackendError

_ATTEMPTS = 8
"""Attempts at a request that AWS throttles or fails. boto3 waits up to 20 s between two attempts."""

_THROTTLED = "Throttling|(Throttling|Throttled|TooManyRequests)Exception|RequestLimitExceeded"

_HOW_TO_LOG_IN = (
    "log in (aws sso login, aws configure), name a profile in AWS_PROFILE, or set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY; `aws sts get-caller-identity` shows who you are"
)

_EXPLANATIONS = {
    "ExpiredToken(Exception)?|RequestExpired|TokenRefreshRequired|"
    "(Credential|Token)RetrievalError|SSOError|LoginError": "the AWS credentials have expired, or cannot be had "
    f"({{code}} for {{request}}: {{message}}): {_HOW_TO_LOG_IN}",
    "(UnrecognizedClient|InvalidSignature)Exception|InvalidClientTokenId|SignatureDoesNotMatch|AuthFailure|"
    "InvalidAccessKeyId|IncompleteSignature|MissingAuthenticationToken": "AWS does not accept these credentials "
    f"({{code}} for {{request}}: {{message}}): {_HOW_TO_LOG_IN}",
    "(No|Partial)CredentialsError": f"there are no AWS credentials ({{message}}): {_HOW_TO_LOG_IN}",
    "AccessDenied(Exception)?|UnauthorizedOperation|AuthorizationError": "AWS does not allow you {request} "
    "({message}): have that action added to your IAM policy",
    _THROTTLED: "AWS throttles {request} ({message}); try again in a minute, or with more attempts (AWS_MAX_ATTEMPTS)",
    "NoRegionError": "no AWS region is set: set AWS_REGION, AWS_DEFAULT_REGION, or `region` in ~/.aws/config",
    "ProfileNotFound": "{message}: see AWS_PROFILE, ~/.aws/config and ~/.aws/credentials",
    "ConnectionError|HTTPClientError": "AWS does not answer to {request} ({message}): see the network, the region "
    "(AWS_REGION) and AWS_ENDPOINT_URL",
    "|ClientException": "AWS refuses {request}: {message}",
}
"""What to do after AWS's error codes and boto3's exceptions, which the keys match as regular expressions."""


class AwsError(BackendError):
    """Raised when AWS is unreachable or refuses a request.

    Attributes:
        code: AWS's error code; empty without an answer.
        throttled: whether AWS throttled the request, so that it may succeed later.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.throttled = re.fullmatch(_THROTTLED, code) is not None


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
                    options["retries"] = {"mode": "standard", "total_max_attempts": _ATTEMPTS}
                try:
                    # Not boto3's default session, which other code in this process shares.
                    # boto3 ignores AWS_REGION, which the AWS CLI and other SDKs read first.
                    region = os.environ.get("AWS_REGION") or None
                    self._session = self._session or boto3.session.Session(region_name=region)
                    self._clients[service] = self._session.client(service, config=Config(**options))
                except (exceptions.BotoCoreError, ValueError) as error:
                    raise _explained(error, service) from None
            return self._clients[service]

    def call(self, service: str, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send a request, such as ``SubmitJob`` to ``batch``, and return the answer."""
        client = self.client(service)
        try:
            answer: dict[str, Any] = getattr(client, xform_name(operation))(**arguments)
        except (exceptions.BotoCoreError, exceptions.ClientError) as error:
            raise _explained(error, f"{service}:{operation}") from None
        return answer

    def pages(self, service: str, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Yield the pages of a paginated operation."""
        while True:
            answer = self.call(service, operation, **arguments)
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


def _explained(error: Exception, request: str) -> AwsError:
    if isinstance(error, exceptions.ClientError):
        details = error.response.get("Error", {})
        code, message = details.get("Code", ""), details.get("Message", "") or str(error)
        codes, otherwise = [code], "AWS refuses {request}: {message} ({code})"
    else:
        code, message = "", (str(error).strip() or type(error).__name__).splitlines()[0]
        codes, otherwise = [kind.__name__ for kind in type(error).__mro__], "{request}: {message}"
    texts = (text for codes_of, text in _EXPLANATIONS.items() if any(re.fullmatch(codes_of, name) for name in codes))
    text = next(texts, otherwise)
    return AwsError(text.format(code=code or type(error).__name__, request=request, message=message), code)
