# SPDX-License-Identifier: BSD-3-Clause
"""Send requests to AWS through boto3 clients that are created on first use, and explain AWS's errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import boto3
from botocore import exceptions
from botocore.config import Config

from torchx_monarch.backends.core.errors import BackendError

_ATTEMPTS = 8
"""Attempts at a request that AWS throttles or fails. boto3 waits up to 20 s between two attempts."""

_THROTTLED = {
    "Throttling",
    "ThrottlingException",
    "ThrottledException",
    "TooManyRequestsException",
    "RequestLimitExceeded",
}

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}

_REFUSED = {
    "UnrecognizedClientException",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "SignatureDoesNotMatch",
    "AuthFailure",
    "InvalidAccessKeyId",
    "IncompleteSignature",
    "MissingAuthenticationToken",
}

_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError"}

_HOW_TO_LOG_IN = (
    "log in (aws sso login, aws configure), name a profile in AWS_PROFILE, or set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY; `aws sts get-caller-identity` shows who you are"
)


class AwsError(BackendError):
    """Raised when AWS is unreachable or refuses a request.

    Attributes:
        code: AWS's error code; empty without an answer.
        throttled: whether AWS throttled the request, so that it may succeed later.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.throttled = code in _THROTTLED


class Aws:
    """Creates clients and sends requests, with the account and region of the environment and AWS's configuration."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: Any = None
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        """Return the boto3 client of a service.

        Raises:
            AwsError: no region is set, or the configuration is invalid.
        """
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
                    _raise(error, service, "")
            return self._clients[service]

    def call(self, service: str, operation: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the answer.

        Args:
            service: boto3's name of the service, such as ``batch``.
            operation: the operation's name in AWS's documentation, such as ``SubmitJob``.

        Raises:
            AwsError: AWS is unreachable or refuses.
        """
        client = self.client(service)
        try:
            answer: dict[str, Any] = getattr(client, _snake(operation))(**arguments)
        except (exceptions.BotoCoreError, exceptions.ClientError) as error:
            _raise(error, service, operation)
        return answer

    def pages(self, service: str, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Yield the pages of a paginated operation; arguments as for ``call``.

        Raises:
            AwsError: AWS is unreachable or refuses.
        """
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


def _snake(operation: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in operation).lstrip("_")


def _raise(error: Exception, service: str, operation: str) -> NoReturn:
    what = f"{service}:{operation}" if operation else service
    if isinstance(error, exceptions.ClientError):
        details = error.response.get("Error", {})
        code, message = details.get("Code", ""), details.get("Message", "") or str(error)
        raise AwsError(_refusal(what, code, message), code) from None
    if isinstance(error, exceptions.NoRegionError):
        text = "no AWS region is set: set AWS_REGION, AWS_DEFAULT_REGION, or `region` in ~/.aws/config"
    elif isinstance(error, exceptions.ProfileNotFound):
        text = f"{error}: see AWS_PROFILE, ~/.aws/config and ~/.aws/credentials"
    elif isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        text = f"there are no AWS credentials ({_first_line(error)}): {_HOW_TO_LOG_IN}"
    elif isinstance(
        error,
        (
            exceptions.CredentialRetrievalError,
            exceptions.TokenRetrievalError,
            exceptions.SSOError,
            exceptions.UnauthorizedSSOTokenError,
            exceptions.LoginError if hasattr(exceptions, "LoginError") else exceptions.SSOError,
        ),
    ):
        text = f"the AWS credentials could not be had, or have expired ({_first_line(error)}): {_HOW_TO_LOG_IN}"
    elif isinstance(error, (exceptions.ConnectionError, exceptions.HTTPClientError)):
        text = (
            f"AWS does not answer to {what} ({_first_line(error)}): see the network, the region (AWS_REGION) and "
            "AWS_ENDPOINT_URL"
        )
    else:
        text = f"{what}: {_first_line(error)}"
    raise AwsError(text) from None


def _refusal(what: str, code: str, message: str) -> str:
    if code in _EXPIRED:
        return f"the AWS credentials have expired ({code} for {what}): {_HOW_TO_LOG_IN}"
    if code in _REFUSED:
        return f"AWS does not accept these credentials ({code} for {what}: {message}): {_HOW_TO_LOG_IN}"
    if code in _DENIED:
        return f"AWS does not allow you {what} ({message}): have that action added to your IAM policy"
    if code in _THROTTLED:
        return f"AWS throttles {what} ({message}); try again in a minute, or with more attempts (AWS_MAX_ATTEMPTS)"
    return f"AWS refuses {what}: {message}" + (f" ({code})" if code not in ("", "ClientException") else "")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
