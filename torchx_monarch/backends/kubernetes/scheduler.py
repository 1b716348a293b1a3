# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The TorchX scheduler: TorchX's own for Kubernetes, for pods and workspaces; the rest is ours.

All that is known of an app is with the API server. So it does not matter which process asks, or from which machine.
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
from torchx_monarch.backends.kubernetes.request import VOLCANO, KubernetesRequest, Object, collection, home, owner
from torchx_monarch.backends.kubernetes.snapshot import KubernetesSnapshot
from torchx_monarch.backends.kubernetes.status import Attempt, Ended
from torchx_monarch.model.env_names import replica0_variable

_ENDED = (AppState.SUCCEEDED, AppState.FAILED, AppState.CANCELLED)

_NEEDED = ("completionMode", "backoffLimitPerIndex")
"""What a server that is too old drops from a Job without a word."""

_IN_FLIGHT = 0.5
"""Seconds that a request of ours whose answer we have not waited for may still take to have its effect."""

_FRESH = 1.0
"""Seconds for which what was found is good enough for those who follow logs."""

_log = logging.getLogger("torchx_monarch")


class MonarchKubernetesScheduler(KubernetesScheduler, Scheduler[KubernetesOpts]):  # type: ignore[misc]
    """Runs each replica as a pod of the cluster that the kubeconfig names."""

    def __init__(self, session_name: str) -> None:
        super().__init__(session_name)
        self._connected: Api | None = None
        self._seen: dict[str, tuple[float, KubernetesSnapshot]] = {}
        self._looking = threading.Lock()

    @property
    def _api(self) -> Api:
        if self._connected is None:
            self._connected = Api.of_here()
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
        """The pod of the role's replica 0, by its name in the cluster's DNS."""
        return f"@{replica0_variable(app.roles.index(role))}"

    always_together = False

    def client_host(self, app_id: str, role: str) -> str:
        """The address of the pod of the role's replica 0: its name is known to the cluster's DNS alone, and late."""
        found = self._find(app_id)
        replicas = [each for one in (found.roles if found else ()) if one.name == role for each in one.replicas]
        return next((each.last.address for each in replicas if each.id == 0 and each.last), "")

    def _pre_build_validate(self, app: AppDef, scheduler: str, cfg: KubernetesOpts) -> None:
        """Check the options, and that a cluster is configured, before an image is built, which takes long.

        Raises:
            InvalidRunConfigException: an option makes no sense.
            KubernetesError: no cluster is configured, and one is needed.
        """
        super()._pre_build_validate(app, scheduler, cfg)
        options.check(cfg)
        if cfg.mode == "auto" or cfg.validate_spec:
            _ = self._api

    def _submit_dryrun(self, app: AppDef, cfg: KubernetesOpts) -> AppDryRunInfo[KubernetesRequest, KubernetesOpts]:
        """The request. The cluster is asked whether it has Volcano (``mode=auto``) and takes it (``validate_spec``).

        Raises:
            InvalidRunConfigException: an option makes no sense.
            ValueError: the app cannot run on Kubernetes.
            KubernetesError: the cluster cannot be asked, or would refuse it.
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
            # Without a cluster, as in a dry run with mode=job,validate_spec=False, there is no context to look at.
            offline = cfg.mode == "job" and not cfg.validate_spec
            namespace = cfg.namespace or ("default" if offline and not self._configured() else self._api.namespace)
            request = render(app, cfg, namespace, record)
            request.images_to_push = images
            if cfg.validate_spec:
                for one in request.objects:
                    _check_kept(one, self._api.create(home(one, namespace), one, dry_run=True))
        return AppDryRunInfo(request, str)

    def _configured(self) -> bool:
        try:
            return bool(self._api)
        except KubernetesError:
            return False

    def schedule(self, dryrun_info: AppDryRunInfo[KubernetesRequest, KubernetesOpts]) -> str:
        """Make all objects.

        Raises:
            KubernetesError: one could not be made; all are removed.
        """
        request, api = dryrun_info.request, self._api
        with cli_errors():
            self.push_images(request.images_to_push)
            made: list[Object] = []
            doubtful: list[Object] = []
            try:
                for one in request.objects:
                    doubtful = [one]
                    made.append(api.create(home(one, request.namespace), one))
                    doubtful.clear()
                    _check_kept(one, made[-1])
                owners = [owner(one) for one in made if one["kind"] == "Job"]
                for one in made:
                    if one["kind"] != "Job":
                        path = f"{home(one, request.namespace)}/{one['metadata']['name']}"
                        api.patch(path, {"metadata": {"ownerReferences": owners}})
            except BaseException as error:
                # What was refused is not there, and one of that name may be another's.
                if isinstance(error, KubernetesError) and 400 <= error.status < 500:
                    doubtful.clear()
                self._remove([*doubtful, *reversed(made)], request.namespace)
                if doubtful:
                    time.sleep(_IN_FLIGHT)
                    self._remove(doubtful, request.namespace)
                raise
        return f"{request.namespace}:{request.app_id}"

    def _remove(self, objects: Sequence[Object], namespace: str) -> None:
        """Remove what an app that cannot run has got already, and say what could not be."""
        for one in objects:
            name = one["metadata"]["name"]
            try:
                self._api.delete(f"{home(one, namespace)}/{name}")
            except KubernetesError as error:
                what = f"{one['kind'].lower()} {name} --namespace {namespace}"
                _log.warning("not removed, to be done by `kubectl delete %s`: %s", what, error)

    # -- looking -------------------------------------------------------------------------------------------------------

    def _find(self, app_id: str) -> KubernetesSnapshot | None:
        try:
            namespace, name = names.split(app_id)
        except ValueError:
            return None  # there can be none
        with cli_errors():
            return snapshot.find(self._api, namespace, name)

    def _glance(self, app_id: str) -> KubernetesSnapshot | None:
        """The app as it was a moment ago: `torchx log` of an app of 500 replicas asks in 500 threads."""
        with self._looking:
            when, found = self._seen.get(app_id, (0.0, None))
            if found is None or time.monotonic() > when + _FRESH:
                found = self._find(app_id)
                if found is not None:
                    self._seen[app_id] = time.monotonic(), found
            return found

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """The app, from its objects alone.

        One that is decided and that nobody has ended in full (its sidecars, after the other roles have succeeded; the
        other roles, after one has failed; pods that can never start) is ended by whoever looks: nothing of ours stays
        behind to do it.
        """
        found = self._find(app_id)
        if found is None:
            return None
        self._seen[app_id] = time.monotonic(), found
        evaluate = found.evaluate
        if evaluate.unended is not None:
            try:
                self._end(found, evaluate.unended)
            except KubernetesError as error:  # who looks may lack the right; the state is what it is
                _log.warning("%s is decided and could not be ended: %s", app_id, error)
        failed = evaluate.state is AppState.FAILED or evaluate.cause is not None
        return DescribeAppResponse(
            app_id=app_id,
            state=evaluate.state,
            num_restarts=found.restarts,
            msg=evaluate.msg or NONE,
            structured_error_msg=(status.root_cause(found.roles) if failed else "") or NONE,
            metadata=found.app.metadata,
            roles_statuses=[
                RoleStatus(
                    role.name,
                    [
                        ReplicaStatus(
                            id=each.id,
                            state=_shown(each, evaluate),
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
        """The app's objects as they are with the API server."""
        found = self._find(app_id)
        if found is None:
            return None
        objects = [found.record, *found.jobs]
        return AppDryRunInfo(KubernetesRequest(found.mode, found.namespace, found.name, objects), str)

    def list(self, cfg: Mapping[str, CfgVal] | None = None) -> list[ListAppResponse]:
        """Our apps of one namespace, each once, the newest first. (Upstream lists everybody's Volcano jobs.)"""
        with cli_errors():
            namespace = (cfg or {}).get("namespace") or self._api.namespace
            found = snapshot.find_all(self._api, str(namespace))
        return [ListAppResponse(one.app_id, one.evaluate.state, name=one.app.name) for one in found]

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
        """The lines of one replica's log, both streams, of all of its pods that are left.

        Raises:
            ValueError: there is no such app, role or replica; the regular expression is none; one stream alone is asked
                for, and Kubernetes keeps both as one.
            KubernetesError: the cluster cannot be asked, or refuses.
        """
        if streams not in (None, Stream.COMBINED):
            raise UserError(f"Kubernetes keeps both streams of a container as one; {streams.value} alone is not there")
        found = self._glance(app_id)
        if found is None:
            raise UserError(f"there is no app {app_id!r} of this scheduler in the cluster")
        sizes = {role.name: len(role.replicas) for role in found.roles}
        validation.check_replica(app_id, sizes, role_name, k)
        role, latest = list(sizes).index(role_name), [found]

        def attempts() -> Sequence[Attempt]:
            return latest[0].roles[role].replicas[k].attempts

        def ended() -> bool:
            now = self._glance(app_id)
            if now is not None:
                latest[0] = now
            return now is None or now.evaluate.state in _ENDED

        lines = logs.lines(
            self._api,
            collection("v1", "Pod", found.namespace),
            attempts,
            since=since,
            until=until,
            follow=should_tail and found.evaluate.state not in _ENDED,
            ended=ended,
        )
        return validation.matching(lines, regex)

    # -- ending --------------------------------------------------------------------------------------------------------

    def _cancel_existing(self, app_id: str) -> None:
        """Ask for the end of the app and return at once; one that has ended is left alone."""
        found = self._find(app_id)
        if found is not None and found.evaluate.state not in _ENDED:
            with cli_errors():
                self._end(found, Ended(AppState.CANCELLED))

    def _end(self, found: KubernetesSnapshot, ended: Ended) -> None:
        # What is noted already stays: two may look at a time.
        before = snapshot.noted(found.record) or ended
        if found.mode == "job":
            open_roles = {str(index) for index, role in enumerate(found.roles) if role.open}
            living = [job for job in found.jobs if job["metadata"]["labels"].get(names.LABEL_ROLE) in open_roles]
            cancel.end(self._api, found.namespace, found.name, found.jobs, living, before)
        else:
            cancel.abort(self._api, f"{collection(VOLCANO, 'Job', found.namespace)}/{found.name}", before)

    def _delete_existing(self, app_id: str) -> None:
        """Remove all of an app; what lives of it is ended, with its grace."""
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
    """Make sure that the server knows what a Job of ours is made of.

    Raises:
        KubernetesError: it has dropped a part.
    """
    dropped = [key for key in _NEEDED if key in sent.get("spec", {}) and key not in kept.get("spec", {})]
    if dropped:
        raise KubernetesError(
            f"the cluster does not know {' and '.join(dropped)} of a Job: mode=job needs Kubernetes 1.29 or later"
        )


def _shown(each: status.KubernetesReplica, evaluate: status.KubernetesStatus) -> AppState:
    """A replica's state beside the app's: one that was ended because all was over has not failed."""
    state = evaluate.state
    if state is AppState.SUCCEEDED and each.state is AppState.FAILED and each.failed_at <= evaluate.decided:
        return each.state  # a failure that the role tolerates
    if state in (AppState.CANCELLED, AppState.SUCCEEDED) and each.state is not AppState.SUCCEEDED:
        return AppState.CANCELLED
    return each.state


def _error(each: status.KubernetesReplica) -> str:
    if each.state is AppState.FAILED and each.last is not None and each.last.error is not None:
        return each.last.said
    return str(NONE)


def create_scheduler(session_name: str, **kwargs: Any) -> MonarchKubernetesScheduler:
    """TorchX's factory; it talks to no cluster yet. Parameters meant for other schedulers are ignored."""
    return MonarchKubernetesScheduler(session_name)
