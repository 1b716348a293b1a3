# SPDX-License-Identifier: BSD-3-Clause
"""Run apps on a Kubernetes cluster, with TorchX's pods and workspaces.

The API server holds the whole state of an app, so any process on any machine can query and cancel it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence

from torchx.specs import AppDef
from torchx.workspace.docker_workspace import DockerWorkspaceMixin

from torchx_monarch.backends.core.backend import Backend, Capabilities, Cfg, LogQuery, read_undamaged
from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.core.submitted_app import SubmittedApp
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.backends.kubernetes import logs, objects, options, request, snapshot
from torchx_monarch.backends.kubernetes.native import Api, KubernetesError
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.backends.kubernetes.render import render_job, render_volcano
from torchx_monarch.backends.kubernetes.request import KubernetesRequest, collection
from torchx_monarch.backends.kubernetes.snapshot import Attempt, KubernetesSnapshot
from torchx_monarch.model.check_result import CheckResult


class KubernetesBackend(Backend[KubernetesOpts, KubernetesRequest, KubernetesSnapshot]):
    """Runs each replica as a pod of the cluster that the kubeconfig names."""

    options = KubernetesOpts
    capabilities = Capabilities(
        limits_resources=True,
        separates_roles=True,
        removes_running_apps=True,
        kills=False,
        separate_streams=False,
        needs_image=True,
    )

    def __init__(self) -> None:
        self.workspace = DockerWorkspaceMixin()

    @functools.cached_property
    def _api(self) -> Api:
        return Api.from_environment()

    def close(self) -> None:
        if api := self.__dict__.pop("_api", None):
            api.close()

    # -- submitting ----------------------------------------------------------------------------------------------------

    def checks(self, options: KubernetesOpts) -> Iterable[CheckResult]:
        version = self._api.get("/version").get("gitVersion")
        return [CheckResult("Kubernetes", f"{version} at {self._api.host}")]

    def check_options(self, cfg: KubernetesOpts) -> None:
        """Check the options and, for those that need a cluster, the cluster's configuration."""
        options.check(cfg)
        if cfg.mode == "auto" or cfg.validate_spec:
            _ = self._api

    def render(self, app: AppDef, submitted: SubmittedApp, options: KubernetesOpts) -> KubernetesRequest:
        """Ask the cluster for Volcano (``mode=auto``), and have it validate the objects (``validate_spec``)."""
        record = {
            request.ANNOTATION_APP: submitted.pack(),
            request.ANNOTATION_OPTIONS: json.dumps({"grace": options.grace, "pull_timeout": options.pull_timeout}),
        }
        mode = options.mode
        if mode == "auto":
            mode = "volcano" if objects.has_volcano(self._api) else "job"
        namespace = options.namespace
        if namespace is None:
            try:
                namespace = self._api.namespace
            except KubernetesError:  # a dry run without mode=auto and validate_spec needs no cluster
                namespace = "default"
        render = render_volcano if mode == "volcano" else render_job
        rendered = render(app, submitted.roles, options, namespace, record)
        for resource in rendered.objects if options.validate_spec else ():
            objects.create(self._api, resource, namespace, dry_run=True)
        return rendered

    def submit(self, request: KubernetesRequest, submitted: SubmittedApp, credentials: str) -> str:
        objects.submit(self._api, request, credentials)
        return f"{request.namespace}:{request.app_id}"

    # -- reading -------------------------------------------------------------------------------------------------------

    def snapshot(self, app_id: str, *, brief: bool = False) -> KubernetesSnapshot | None:
        place = request.split(app_id)
        found = objects.find(self._api, *place) if place else None
        if found is None:
            return None
        refusals = {} if brief else objects.refusals(self._api, found)
        return snapshot.assemble(found, self._api.server_time, refusals)

    def snapshots(self, options: Cfg) -> list[KubernetesSnapshot]:
        """Read the apps of one namespace: that of the kubeconfig, unless the option names one.

        TorchX lists all Volcano jobs of all users.
        """
        found = objects.find_all(self._api, str(options.get("namespace") or self._api.namespace))
        return read_undamaged(found, lambda objects: snapshot.assemble(objects, self._api.server_time))

    def read_log(
        self, app: KubernetesSnapshot, role: str, replica: int, query: LogQuery[KubernetesSnapshot]
    ) -> Iterator[TimedLine]:
        def attempts() -> Sequence[Attempt]:
            latest = query.latest() if query.follow else None
            return (latest or app).attempts[role, replica]

        return logs.lines(self._api, collection("v1", "Pod", app.objects.namespace), attempts, query)

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(self, app: KubernetesSnapshot, outcome: Outcome, grace: float | None) -> None:
        """Give the pods their grace period, whatever ``grace`` is."""
        objects.stop(self._api, app, outcome)

    def remove(self, app: KubernetesSnapshot) -> None:
        objects.remove(self._api, app)
