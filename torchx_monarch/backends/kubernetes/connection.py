# SPDX-License-Identifier: BSD-3-Clause
"""Send plain HTTP requests to the API server with the Kubernetes client's configuration, and explain its errors.

The client's own calls differ between its releases, and each release knows only the object fields of its time. So only
its configuration is used: the server, the user's credentials and the trusted certificates.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
import urllib.parse
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import urllib3
import yaml
from kubernetes import client, config

from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.kubernetes.request import Object
from torchx_monarch.system.line_output import LineReader

_CONNECT_TIMEOUT, _READ_TIMEOUT = 10.0, 60.0

_WAITS = (0.2, 0.5, 1.0, 2.0)
"""Seconds between the attempts at a request that failed with a transient error. urllib3's ``Retry`` would log a warning
for each of them."""

_NO_KUBECONFIG = (config.ConfigException, OSError, yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions that the client raises for a kubeconfig that is missing, unreadable or malformed."""

_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class KubernetesError(BackendError):
    """Raised when the cluster is unreachable or refuses a request.

    Attributes:
        status: the HTTP status; 0 without an answer.
        is_repeated: whether the request was sent more than once, so that an earlier one may have taken effect.
    """

    is_repeated = False

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """Sends requests to one API server, as the Kubernetes client's ``Configuration`` says.

    Attributes:
        server_time: the time in the server's latest answer, in seconds since the epoch; 0 before the first one. The
            times in its objects are compared with it, never with this machine's clock.
    """

    def __init__(self, configuration: Any, namespace: str) -> None:
        self.namespace = namespace
        self.host: str = configuration.host.rstrip("/")
        self.server_time = 0.0
        self._configuration = configuration
        self._pool: urllib3.PoolManager = client.ApiClient(configuration).rest_client.pool_manager

    @classmethod
    def from_environment(cls) -> Api:
        """Choose the cluster of KUBECONFIG; else the cluster that this process runs in; else that of ~/.kube/config."""
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
                f"no Kubernetes cluster is configured: {where}: {why}. Name a kubeconfig in KUBECONFIG. "
                "A dry run needs none with -cfg validate_spec=False,namespace=NAME"
            ) from None
        return cls(configuration, (context or {}).get("context", {}).get("namespace") or "default")

    def close(self) -> None:
        self._pool.clear()

    # -- requests: each raises KubernetesError if the server is unreachable or refuses ---------------------------------

    def get(self, path: str, **query: str) -> Object:
        return self._json("GET", path, query)

    def find(self, path: str) -> Object | None:
        return self._if_exists("GET", path, {})

    def items(self, path: str, selector: str) -> list[Object]:
        """Return all objects of a collection that match a label selector."""
        found = self.get(path, labelSelector=selector)
        # The API server omits apiVersion and kind on the objects of a list.
        kind = {"apiVersion": found.get("apiVersion"), "kind": str(found.get("kind", "")).removesuffix("List")}
        return [{**kind, **resource} for resource in found.get("items") or ()]

    def create(self, path: str, body: Object, dry_run: bool = False) -> Object:
        """Create an object in a collection; return it as the server has it, with defaults filled in."""
        try:
            return self._json("POST", path, {"dryRun": "All"} if dry_run else {}, body)
        except KubernetesError as error:
            # Names end with random characters, so the object is from an earlier attempt whose answer was lost.
            if error.status != 409 or not error.is_repeated:
                raise
            return self.get(f"{path}/{body['metadata']['name']}")

    def patch(self, path: str, body: Object) -> Object | None:
        """Apply a JSON merge patch to an object and return the object, or None if it does not exist."""
        return self._if_exists("PATCH", path, {}, body, "application/merge-patch+json")

    def delete(self, path: str, propagation: str = "Background", **query: str) -> None:
        """Delete an object, or the objects of a collection that match a selector; do nothing if none exists.

        ``Background`` deletes the objects that it owns, too; ``Orphan`` keeps them.
        """
        self._if_exists("DELETE", path, {**query, "propagationPolicy": propagation})

    def lines(self, path: str, **query: str) -> Iterator[bytes]:
        """Yield the lines of an answer as they arrive, each with its line end; stop when the connection breaks."""
        answer, reader = self._send("GET", path, query, stream=True), LineReader()
        try:
            for data in answer.stream():
                for piece in reader.feed(data):
                    yield from io.BytesIO(piece)
            if rest := reader.rest():
                yield rest
        except urllib3.exceptions.HTTPError:
            return
        finally:
            answer.close()
            answer.release_conn()

    # -- one request ---------------------------------------------------------------------------------------------------

    def _if_exists(self, *request: Any) -> Object | None:
        """Send a request (``_send``) and return the answer's object; None if what it names does not exist."""
        try:
            return self._json(*request)
        except KubernetesError as error:
            if error.status != 404:
                raise
            return None

    def _json(self, *request: Any) -> Object:
        try:
            return json.loads(self._send(*request).data)  # type: ignore[no-any-return]
        except ValueError as error:
            raise KubernetesError(f"{self.host}{request[1]} does not answer as an API server does: {error}") from None

    def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: Object | None = None,
        content: str = "application/json",
        stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request and repeat it after transient failures.

        With ``stream``, the body is left to the caller to read: a quiet log may send nothing for hours.
        """
        url = f"{self.host}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        data = json.dumps(body).encode() if body is not None else None
        timeout = urllib3.Timeout(connect=_CONNECT_TIMEOUT, read=None if stream else _READ_TIMEOUT)
        headers = {"Accept": "application/json", "Content-Type": content, **self._credentials()}
        for attempt, wait in enumerate((*_WAITS, None)):
            try:
                answer = self._pool.request(
                    method, url, body=data, headers=headers, timeout=timeout, preload_content=not stream, retries=False
                )
                if answer.status < 400:
                    if date := answer.headers.get("Date"):
                        self.server_time = parsedate_to_datetime(date).timestamp()
                    return answer
                failure = self._refused(method, path, answer)
            except urllib3.exceptions.HTTPError as error:
                failure = KubernetesError(
                    f"the cluster at {self.host}, which the kubeconfig names, cannot be reached: "
                    f"{getattr(error, 'reason', None) or error}. Does it run, and is KUBECONFIG or the context the "
                    "right one?"
                )
            failure.is_repeated = attempt > 0
            if wait is None or failure.status not in (0, 429, 500, 502, 503, 504):
                raise failure
            time.sleep(wait)
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
        message = ""
        with contextlib.suppress(ValueError, AttributeError, urllib3.exceptions.HTTPError):
            message = json.loads(answer.data).get("message") or ""
        answer.release_conn()
        message = message or f"{method} {path} was answered with HTTP status {answer.status}"
        if answer.status in (401, 403):
            message += " (see the user, credentials and rights of the kubeconfig)"
        return KubernetesError(f"the cluster at {self.host} refuses: {message}", answer.status)
