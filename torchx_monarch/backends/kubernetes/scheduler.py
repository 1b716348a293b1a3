# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The TorchX scheduler for Kubernetes. It extends TorchX's own, of which it uses pods and workspaces.

The API server holds the whole state of an app, so any process on any machine can query and cancel it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream
from torchx.schedulers.kubernetes_scheduler import KubernetesScheduler
from torchx.specs import NONE, AppDef, AppDryRunInfo, AppState, CfgVal, ReplicaStatus, Role, RoleStatus, runopts

from torchx_monarch.backends import appdef_codec, validation
from torchx_monarch.backends.errors import UserError
from torchx_monarch.backends.kubernetes import cancel, jobs, logs, names, options, snapshot, status, volcano
from torchx_monarch.backends.kubernetes.api import Api, KubernetesError, cli_errors
from torchx_monarch.backends.kubernetes.options import KubernetesOpts
from torchx_monarch.backends.kubernetes.request import (
    VOLCANO,
    KubernetesRequest,
    Object,
    collection,
    collection_of,
    owner,
)
from torchx_monarch.backends.kubernetes.snapshot import KubernetesSnapshot
from torchx_monarch.backends.kubernetes.status import Attempt, Ended
from torchx_monarch.model.env_names import replica0_variable

_ENDED = (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED)

_NEEDED = ("completionMode", "backoffLimitPerIndex")
"""Fields of a Job that a server older than 1.29 silently drops."""

_IN_FLIGHT = 0.5
"""Seconds after which an interrupted request has taken effect, if it takes effect at all."""

_FRESH = 1.0
"""Seconds for which log followers use a cached snapshot."""

_log = logging.getLogger("torchx_monarch")


class MonarchKubernetesScheduler(KubernetesScheduler, Scheduler[KubernetesOpts]):  # type: ignore[misc]
    """Runs each replica as a pod of the cluster that the kubeconfig names."""

    def __init__(self, session_name: str) -> None:
        super().__init__(session_name)
        self._connected: Api | None = None
        self._cache: dict[str, tuple[float, KubernetesSnapshot]] = {}
        self._cache_lock = threading.Lock()

    @property
    def _api(self) -> Api:
        if self._connected is None:
            self._connected = Api.from_environment()
        return self._connected

    def close(self) -> None:
        """Close the connections."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def _run_opts(self) -> runopts:
        return KubernetesOpts.as_runopts()

    # -- submitting ----------------------------------------------------------------------------------------------------

    def replica0_host(self, app: AppDef, role: Role) -> str:
        """Return the reference ``@VARIABLE`` to the variable that holds the DNS name of the role's replica 0."""
        return f"@{replica0_variable(app.roles.index(role))}"

    always_together = False

    def client_host(self, app_id: str, role: str) -> str:
        """Return the pod address of the role's replica 0; empty while it does not run.

        Not its DNS name, which resolves only inside the cluster and only some seconds after the pod's start.
        """
        found = self._find(app_id)
        replicas = [each for one in (found.roles if found else ()) if one.name == role for each in one.replicas]
        return next((each.last.address for each in replicas if each.id == 0 and each.last), "")

    def _pre_build_validate(self, app: AppDef, scheduler: str, cfg: KubernetesOpts) -> None:
        """Check the options and the cluster's configuration before an image is built, since a build takes long.

        Raises:
            InvalidRunConfigException: the value of an option is not allowed.
            KubernetesError: no cluster is configured, and ``mode=auto`` or ``validate_spec`` needs one.
        """
        super()._pre_build_validate(app, scheduler, cfg)
        options.check(cfg)
        if cfg.mode == "auto" or cfg.validate_spec:
            _ = self._api

    def _submit_dryrun(self, app: AppDef, cfg: KubernetesOpts) -> AppDryRunInfo[KubernetesRequest, KubernetesOpts]:
        """Render the request for an app.

        Queries the cluster for Volcano (``mode=auto``) and has it validate the objects (``validate_spec``).

        Raises:
            InvalidRunConfigException: the value of an option is not allowed.
            ValueError: the app cannot run on Kubernetes.
            KubernetesError: the cluster is unreachable or would refuse the objects.
        """
        options.check(cfg)
        validation.check_names(app)
        with cli_errors():
            images = self.dryrun_push_images(app, cfg)
            record = {
                names.ANNOTATION_APP: appdef_codec.pack(app),
                names.ANNOTATION_OPTIONS: json.dumps({"grace": cfg.grace, "pull_timeout": cfg.pull_timeout}),
            }
            size = sum(len(key) + len(value) for key, value in record.items())
            if size > names.LARGEST_ANNOTATIONS:
                raise UserError(
                    f"the app takes {size} bytes when it is packed, and Kubernetes keeps {names.LARGEST_ANNOTATIONS} "
                    "with an object; put what is large among its arguments and environment into files"
                )
            mode = cfg.mode
            if mode == "auto":
                mode = "volcano" if snapshot.has_volcano(self._api) else "job"
            render = volcano.render if mode == "volcano" else jobs.render
            # A dry run with mode=job,validate_spec=False needs no cluster, and may have no context with a namespace.
            offline = cfg.mode == "job" and not cfg.validate_spec
            namespace = cfg.namespace or ("default" if offline and not self._configured() else self._api.namespace)
            request = render(app, cfg, namespace, record)
            request.images_to_push = images
            if cfg.validate_spec:
                for one in request.objects:
                    _check_kept(one, self._api.create(collection_of(one, namespace), one, dry_run=True))
        return AppDryRunInfo(request, str)

    def _configured(self) -> bool:
        try:
            return bool(self._api)
        except KubernetesError:
            return False

    def schedule(self, dryrun_info: AppDryRunInfo[KubernetesRequest, KubernetesOpts]) -> str:
        """Create all objects of a request and return the app's id.

        Raises:
            KubernetesError: an object could not be created; those created before are removed.
        """
        request, api = dryrun_info.request, self._api
        with cli_errors():
            self.push_images(request.images_to_push)
            made: list[Object] = []
            doubtful: list[Object] = []
            try:
                for one in request.objects:
                    doubtful = [one]
                    made.append(api.create(collection_of(one, request.namespace), one))
                    doubtful.clear()
                    _check_kept(one, made[-1])
                owners = [owner(one) for one in made if one["kind"] == "Job"]
                for one in made:
                    if one["kind"] != "Job":
                        path = f"{collection_of(one, request.namespace)}/{one['metadata']['name']}"
                        api.patch(path, {"metadata": {"ownerReferences": owners}})
            except BaseException as error:
                # With a 4xx status the object was not created, and an object of that name may belong to another app.
                if isinstance(error, KubernetesError) and 400 <= error.status < 500:
                    doubtful.clear()
                self._remove([*doubtful, *reversed(made)], request.namespace)
                if doubtful:
                    time.sleep(_IN_FLIGHT)
                    self._remove(doubtful, request.namespace)
                raise
        return f"{request.namespace}:{request.app_id}"

    def _remove(self, objects: Sequence[Object], namespace: str) -> None:
        """Delete the objects of a failed submission; log a warning for each object that cannot be deleted."""
        for one in objects:
            name = one["metadata"]["name"]
            try:
                self._api.delete(f"{collection_of(one, namespace)}/{name}")
            except KubernetesError as error:
                what = f"{one['kind'].lower()} {name} --namespace {namespace}"
                _log.warning("not removed, to be done by `kubectl delete %s`: %s", what, error)

    # -- querying ------------------------------------------------------------------------------------------------------

    def _find(self, app_id: str) -> KubernetesSnapshot | None:
        try:
            namespace, name = names.split(app_id)
        except ValueError:
            return None  # no app has such an id
        with cli_errors():
            return snapshot.find(self._api, namespace, name)

    def _find_cached(self, app_id: str) -> KubernetesSnapshot | None:
        """Return a snapshot that is at most ``_FRESH`` seconds old, as `torchx log` reads 500 replicas in 500 threads.

        None if the app does not exist.
        """
        with self._cache_lock:
            when, found = self._cache.get(app_id, (0.0, None))
            if found is None or time.monotonic() > when + _FRESH:
                found = self._find(app_id)
                if found is not None:
                    self._cache[app_id] = time.monotonic(), found
            return found

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Describe an app from its objects; None if it does not exist.

        No process of this project keeps watching an app. So this call also ends the rest of an app whose result is
        decided: sidecars after the other roles have succeeded, other roles after one has failed, pods that can never
        start.
        """
        found = self._find(app_id)
        if found is None:
            return None
        self._cache[app_id] = time.monotonic(), found
        overall = found.overall
        if overall.pending_decision is not None:
            try:
                self._end(found, overall.pending_decision)
            except KubernetesError as error:  # a user with read access only may still describe the app
                _log.warning("%s is decided and could not be ended: %s", app_id, error)
        failed = overall.state is AppState.FAILED or overall.cause is not None
        return DescribeAppResponse(
            app_id=app_id,
            state=overall.state,
            num_restarts=found.restarts,
            msg=overall.msg or NONE,
            structured_error_msg=(status.root_cause(found.roles) if failed else "") or NONE,
            metadata=found.app.metadata,
            roles_statuses=[
                RoleStatus(
                    role.name,
                    [
                        ReplicaStatus(
                            id=each.id,
                            state=_displayed_state(each, overall),
                            role=each.role,
                            hostname=names.host(each.last.host, found.name, found.namespace) if each.last else "",
                            structured_error_msg=_error(each),
                        )
                        for each in role.replicas
                    ],
                )
                for role in found.roles
            ],
            roles=found.app.roles,
        )

    def describe_native(self, app_id: str) -> AppDryRunInfo[KubernetesRequest, KubernetesOpts] | None:
        """Return the app's record and Jobs as the API server has them; None if the app does not exist."""
        found = self._find(app_id)
        if found is None:
            return None
        objects = [found.record, *found.jobs]
        return AppDryRunInfo(KubernetesRequest(found.mode, found.namespace, found.name, objects), str)

    def list(self, cfg: Mapping[str, CfgVal] | None = None) -> list[ListAppResponse]:
        """List this scheduler's apps in one namespace, the newest first. (TorchX lists all Volcano jobs of all users.)

        Args:
            cfg: its ``namespace`` is the namespace; without it, that of the kubeconfig's context.
        """
        with cli_errors():
            namespace = (cfg or {}).get("namespace") or self._api.namespace
            found = snapshot.find_all(self._api, str(namespace))
        return [ListAppResponse(one.app_id, one.overall.state, name=one.app.name) for one in found]

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Return the lines of one replica's log, from all of its pods that still exist.

        Raises:
            ValueError: the app, role or replica does not exist; ``regex`` is invalid; or ``streams`` selects one
                stream, while Kubernetes merges both.
            KubernetesError: the cluster is unreachable or refuses.
        """
        if streams not in (None, Stream.COMBINED):
            raise UserError(f"Kubernetes keeps both streams of a container as one; {streams.value} alone is not there")
        found = self._find_cached(app_id)
        if found is None:
            raise UserError(f"there is no app {app_id!r} of this scheduler in the cluster")
        sizes = {role.name: len(role.replicas) for role in found.roles}
        validation.check_replica(app_id, sizes, role_name, k)
        role, latest = list(sizes).index(role_name), [found]

        def attempts() -> Sequence[Attempt]:
            return latest[0].roles[role].replicas[k].attempts

        def ended() -> bool:
            now = self._find_cached(app_id)
            if now is not None:
                latest[0] = now
            return now is None or now.overall.state in _ENDED

        lines = logs.lines(
            self._api,
            collection("v1", "Pod", found.namespace),
            attempts,
            since=since,
            until=until,
            follow=should_tail and found.overall.state not in _ENDED,
            ended=ended,
        )
        return validation.matching(lines, regex)

    # -- cancelling and deleting ---------------------------------------------------------------------------------------

    def _cancel_existing(self, app_id: str) -> None:
        """Start to end an app and return without waiting; do nothing if it has ended."""
        found = self._find(app_id)
        if found is not None and found.overall.state not in _ENDED:
            with cli_errors():
                self._end(found, Ended(AppState.CANCELLED))

    def _end(self, found: KubernetesSnapshot, ended: Ended) -> None:
        # An earlier note wins: two processes may describe or cancel the app concurrently.
        before = snapshot.noted(found.record) or ended
        if found.mode == "job":
            open_roles = {str(index) for index, role in enumerate(found.roles) if role.open}
            living = [job for job in found.jobs if job["metadata"]["labels"].get(names.LABEL_ROLE) in open_roles]
            cancel.end(self._api, found.namespace, found.name, found.jobs, living, before)
        else:
            cancel.abort(self._api, f"{collection(VOLCANO, 'Job', found.namespace)}/{found.name}", before)

    def _delete_existing(self, app_id: str) -> None:
        """Delete all objects of an app; running pods get their grace period."""
        found = self._find(app_id)
        if found is None:
            return
        api, namespace, selector = self._api, found.namespace, f"{names.LABEL_APP}={found.name}"
        with cli_errors():
            for job in found.jobs:
                api.delete(f"{collection('batch/v1', 'Job', namespace)}/{job['metadata']['name']}")
            if found.mode == "volcano":
                api.delete(f"{collection(VOLCANO, 'Job', namespace)}/{found.name}")
            api.delete(collection("v1", "Pod", namespace), labelSelector=selector)
            for kind in ("Secret", "Service") if found.mode == "job" else ("Secret",):
                api.delete(f"{collection('v1', kind, namespace)}/{found.name}")


def _check_kept(sent: Object, kept: Object) -> None:
    """Check that the server has kept the fields of a Job that this scheduler needs.

    Args:
        sent: the object in the request.
        kept: the object in the answer.

    Raises:
        KubernetesError: the server has dropped a field.
    """
    dropped = [key for key in _NEEDED if key in sent.get("spec", {}) and key not in kept.get("spec", {})]
    if dropped:
        raise KubernetesError(
            f"the cluster does not know {' and '.join(dropped)} of a Job: mode=job needs Kubernetes 1.29 or later"
        )


def _displayed_state(each: status.KubernetesReplica, overall: status.KubernetesStatus) -> AppState:
    """Return the state of a replica to show: CANCELLED, not FAILED, if it was ended because the app had ended."""
    state = overall.state
    if state is AppState.SUCCEEDED and each.state is AppState.FAILED and each.failed_at <= overall.decided:
        return each.state  # a failure before the app's success, which the role tolerates
    if state in (AppState.CANCELLED, AppState.SUCCEEDED) and each.state is not AppState.SUCCEEDED:
        return AppState.CANCELLED
    return each.state


def _error(each: status.KubernetesReplica) -> str:
    if each.state is AppState.FAILED and each.last is not None and each.last.error is not None:
        return each.last.said
    return str(NONE)


def create_scheduler(session_name: str, **kwargs: Any) -> MonarchKubernetesScheduler:
    """Create the scheduler (TorchX's factory). Connects to no cluster yet; ignores other schedulers' parameters."""
    return MonarchKubernetesScheduler(session_name)
