# SPDX-License-Identifier: BSD-3-Clause
"""Send plain HTTP requests to the API server with the Kubernetes client's configuration, and explain its errors.

The client's own calls differ between its releases, and each release knows only the object fields of its time. So only
its configuration is used: the server, the user's credentials and the trusted certificates.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import urllib3
import yaml
from kubernetes import client, config

from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.kubernetes.request import Object
from torchx_monarch.system.line_output import LineReader

_CONNECT, _READ = 10.0, 60.0
"""Timeouts in seconds: to connect, and to read an answer."""

_WAITS = (0.2, 0.5, 1.0, 2.0)
"""Seconds between the attempts at a request that failed with a transient error."""

_LONGEST_WAIT = 10.0
"""Longest Retry-After, in seconds, that is obeyed."""

_RETRIABLE_STATUSES = (429, 500, 502, 503, 504)

_PAGE = 500

_NO_KUBECONFIG = (config.ConfigException, OSError, yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions that the client raises for a kubeconfig that is missing, unreadable or malformed."""

_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class KubernetesError(BackendError):
    """Raised when the cluster is unreachable or refuses a request.

    Attributes:
        status: the HTTP status; 0 without an answer.
        reason: the ``reason`` of the server's Status object, such as ``Expired``; empty if it gave none.
    """

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Api:
    """Sends requests to one API server.

    Args:
        configuration: the Kubernetes client's ``Configuration``.

    Attributes:
        server_time: the time in the server's latest answer, in seconds since the epoch; 0 before the first one. The
            times in its objects are compared with it, never with this machine's clock.
    """

    def __init__(self, configuration: Any, namespace: str) -> None:
        self.namespace = namespace
        self.server_time = 0.0
        self._configuration = configuration
        self._host: str = configuration.host.rstrip("/")
        self._pool: urllib3.PoolManager = client.ApiClient(configuration).rest_client.pool_manager

    @classmethod
    def from_environment(cls) -> Api:
        """Choose the cluster of KUBECONFIG; else the cluster that this process runs in; else that of ~/.kube/config.

        Raises:
            KubernetesError: no usable configuration exists.
        """
        configuration = client.Configuration()
        in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
        where = _NAMESPACE_FILE
        try:
            if in_cluster:
                config.load_incluster_config(client_configuration=configuration)
                with open(_NAMESPACE_FILE) as file:
                    return cls(configuration, file.read().strip() or "default")
            # Passed explicitly: the client reads KUBECONFIG only once, when it is imported.
            where = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
            config.load_kube_config(config_file=where, client_configuration=configuration)
            _, context = config.list_kube_config_contexts(config_file=where)
            server = urllib.parse.urlsplit(configuration.host or "")
            if server.scheme not in ("http", "https") or not server.hostname:
                raise ValueError(f"its server is {configuration.host!r}, which is no URL")
        except _NO_KUBECONFIG as error:
            why = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise KubernetesError(
                f"no Kubernetes cluster is configured: {where}: {why}. Name a kubeconfig in KUBECONFIG"
            ) from None
        return cls(configuration, (context or {}).get("context", {}).get("namespace") or "default")

    @property
    def host(self) -> str:
        """URL of the API server."""
        return self._host

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    # -- requests ------------------------------------------------------------------------------------------------------

    def get(self, path: str, **query: str) -> Object:
        """Return an object.

        Raises:
            KubernetesError: the request failed; status 404 if the object does not exist.
        """
        return self._json("GET", path, query)

    def find(self, path: str) -> Object | None:
        """Return an object, or None if it does not exist."""
        with _missing_is_none():
            return self.get(path)
        return None

    def items(self, path: str, selector: str) -> list[Object]:
        """Return all objects of a collection that match a label selector, fetched page by page."""
        found: list[Object] = []
        query = {"labelSelector": selector, "limit": str(_PAGE)}
        while True:
            try:
                page = self.get(path, **query)
            except KubernetesError as error:
                if error.status != 410 or "continue" not in query:
                    raise
                found, query = [], {"labelSelector": selector}  # the token has expired: list in one page
                continue
            # The API server omits apiVersion and kind on the objects of a list.
            kind = {"apiVersion": page.get("apiVersion"), "kind": str(page.get("kind", "")).removesuffix("List")}
            found += [{**kind, **resource} for resource in page.get("items") or ()]
            further = (page.get("metadata") or {}).get("continue")
            if not further:
                return found
            query["continue"] = further

    def create(self, path: str, body: Object, dry_run: bool = False) -> Object:
        """Create an object.

        Args:
            path: path of the collection.

        Returns:
            The object as the server has it, with defaults filled in.

        Raises:
            KubernetesError: the server refuses the object.
        """
        query = {"dryRun": "All"} if dry_run else {}
        ambiguous_failures: list[str] = []
        try:
            return self._json("POST", path, query, body, ambiguous_failures=ambiguous_failures)
        except KubernetesError as error:
            # Names end with random characters, so the object is from an earlier attempt whose answer was lost.
            if error.status != 409 or not ambiguous_failures:
                raise
            return self.get(f"{path}/{body['metadata']['name']}")

    def patch(self, path: str, body: Object) -> Object | None:
        """Apply a JSON merge patch to an object and return the object, or None if it does not exist."""
        with _missing_is_none():
            return self._json("PATCH", path, {}, body, content="application/merge-patch+json")
        return None

    def replace_status(self, path: str, body: Object) -> Object:
        """Replace an object's status.

        Raises:
            KubernetesError: the request failed; status 409 if the object has changed since it was read.
        """
        return self._json("PUT", f"{path}/status", {}, body)

    def delete(self, path: str, propagation: str = "Background", **query: str) -> None:
        """Delete an object, or the objects of a collection that match a selector; do nothing if none exists.

        Args:
            path: path of the object or the collection.
            propagation: what happens to the objects that it owns: ``Background`` deletes them, ``Orphan`` keeps them.
            query: ``labelSelector``, for a collection.
        """
        with _missing_is_none():
            self._json("DELETE", path, {**query, "propagationPolicy": propagation})

    def lines(self, path: str, **query: str) -> Iterator[bytes]:
        """Yield the lines of an answer as they arrive, each with its line end; stop when the connection breaks.

        Raises:
            KubernetesError: the server is unreachable or refuses the request.
        """
        # Without a read timeout: a quiet log may send nothing for hours.
        answer = self._send("GET", path, query, timeout=urllib3.Timeout(connect=_CONNECT, read=None))
        reader = LineReader()
        try:
            for chunk in answer.stream(1 << 16, decode_content=True):
                yield from reader.feed(chunk)
            if rest := reader.rest():
                yield rest
        except urllib3.exceptions.HTTPError:
            return
        finally:
            answer.close()
            answer.release_conn()

    # -- one request ---------------------------------------------------------------------------------------------------

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
        content: str = "application/json",
        ambiguous_failures: list[str] | None = None,
    ) -> Object:
        answer = self._send(method, path, query, body, content, ambiguous_failures=ambiguous_failures)
        try:
            decoded: Object = json.loads(answer.data)
        except (ValueError, urllib3.exceptions.HTTPError) as error:
            raise KubernetesError(f"{self._host}{path} does not answer as an API server does: {error}") from None
        return decoded

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
        content: str = "application/json",
        timeout: urllib3.Timeout | None = None,
        ambiguous_failures: list[str] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request and repeat it after transient failures.

        Args:
            path: the URL path.
            body: sent as JSON; None for no body.
            timeout: None for the default. Without a read timeout the answer's body is left to the caller to read.
            ambiguous_failures: receives the errors of attempts that may have taken effect; None for no list.

        Raises:
            KubernetesError: the server is unreachable or refuses the request.
        """
        url = f"{self._host}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        data = json.dumps(body).encode() if body is not None else None
        if timeout is None:
            timeout = urllib3.Timeout(connect=_CONNECT, read=_READ)
        for wait in (*_WAITS, None):
            headers = {"Accept": "application/json", **self._credentials()}
            if data is not None:
                headers["Content-Type"] = content
            try:
                answer = self._pool.request(
                    method, url, body=data, headers=headers, timeout=timeout, preload_content=False, retries=False
                )
                if answer.status < 400:
                    if date := answer.headers.get("Date"):
                        self.server_time = parsedate_to_datetime(date).timestamp()
                    if timeout.read_timeout is not None:
                        _ = answer.data  # read the whole body here, so that a failure is retried
                    return answer
                failure = self._refused(method, path, answer)
                asked = answer.headers.get("Retry-After", "")
            except urllib3.exceptions.HTTPError as error:
                failure, asked = self._unreachable(error), ""
                if isinstance(error, urllib3.exceptions.SSLError):
                    raise failure from None
            if wait is None or failure.status not in (0, *_RETRIABLE_STATUSES):
                raise failure
            if ambiguous_failures is not None and failure.status != 429:
                ambiguous_failures.append(str(failure))
            time.sleep(min(float(asked), _LONGEST_WAIT) if asked.isdigit() else wait)
        raise AssertionError("unreachable")

    def _credentials(self) -> dict[str, str]:
        found = {}
        for setting in self._configuration.auth_settings().values():  # auth_settings() renews expired tokens
            if setting.get("in") == "header" and setting.get("value"):
                if not setting["value"].isprintable():
                    raise KubernetesError("the token of the kubeconfig holds a line end or the like, and can be none")
                found[setting["key"]] = setting["value"]
        return found

    def _refused(self, method: str, path: str, answer: urllib3.BaseHTTPResponse) -> KubernetesError:
        status, reason, said = answer.status, "", ""
        with contextlib.suppress(ValueError, AttributeError, urllib3.exceptions.HTTPError):
            body = json.loads(answer.data)
            reason, said = body.get("reason") or "", body.get("message") or ""
        answer.release_conn()
        if status == 401:
            said = f"{said or 'Unauthorized'}: the credentials of the kubeconfig are not, or no longer, good there"
        elif status == 403 and "system:anonymous" in said:
            said = f"{said}: the kubeconfig gives no credentials (no such user, or its credential plugin has failed)"
        elif status == 403:
            said = f"{said}: the user of the kubeconfig lacks a right there (RBAC)"
        said = said or f"{method} {path} was answered with HTTP status {status}"
        return KubernetesError(f"the cluster at {self._host} refuses: {said}", status, reason)

    def _unreachable(self, error: urllib3.exceptions.HTTPError) -> KubernetesError:
        why = getattr(error, "reason", None) or error
        return KubernetesError(
            f"the cluster at {self._host}, which the kubeconfig names, cannot be reached: {why}. Does it run, and is "
            "KUBECONFIG or the context the right one?"
        )


@contextlib.contextmanager
def _missing_is_none() -> Iterator[None]:
    try:
        yield
    except KubernetesError as error:
        if error.status != 404:
            raise
