# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The private names of TorchX that this package calls, which may change with any of its releases.

A scheduler that wraps another one passes on the calls that ``torchx.runner.Runner`` and ``Scheduler`` make: the public
methods of the wrapped scheduler would call a role's ``pre_proc``, or describe the app, a second time.

To override these methods is not to use a private name: TorchX documents them as what a scheduler implements.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from docker import DockerClient
    from kubernetes.client import V1Pod
    from torchx.runner import Runner
    from torchx.schedulers.api import Scheduler
    from torchx.specs import AppDef, AppDryRunInfo, CfgVal


def scheduler_of(runner: Runner, name: str) -> Scheduler[Any]:
    """Return the instance of a scheduler that a runner uses.

    Args:
        runner: the runner.
        name: name under which the scheduler is registered.

    Raises:
        torchx.specs.api.UnknownSchedulerException: no scheduler is registered under this name.
    """
    return runner._scheduler(name)


def resolve_cfg(scheduler: Scheduler[Any], cfg: Mapping[str, CfgVal]) -> Any:
    """Return run options with the scheduler's defaults, in the scheduler's own type."""
    return scheduler._resolve_cfg(cfg)


def render(scheduler: Scheduler[Any], app: AppDef, cfg: Any) -> AppDryRunInfo[Any, Any]:
    """Return a scheduler's request for an app, without calling the ``pre_proc`` of the app's roles.

    Args:
        scheduler: the scheduler.
        app: the app, with built workspaces.
        cfg: run options, as ``resolve_cfg`` returns them.
    """
    return scheduler._submit_dryrun(app, cfg)


def validate_before_build(scheduler: Scheduler[Any], app: AppDef, name: str, cfg: Any) -> None:
    """Have a scheduler check an app before workspaces are built. Arguments are those of ``validate``."""
    scheduler._pre_build_validate(app, name, cfg)


def validate(scheduler: Scheduler[Any], app: AppDef, name: str, cfg: Any) -> None:
    """Have a scheduler check an app whose workspaces are built.

    Args:
        scheduler: the scheduler.
        app: the app.
        name: name of the scheduler that the user has chosen.
        cfg: run options, as ``resolve_cfg`` returns them.
    """
    scheduler._validate(app, name, cfg)


def cancel(scheduler: Scheduler[Any], app_id: str) -> None:
    """Cancel an app that exists; ``Scheduler.cancel`` would describe it first."""
    scheduler._cancel_existing(app_id)


def delete(scheduler: Scheduler[Any], app_id: str) -> None:
    """Delete an app that exists; ``Scheduler.delete`` would describe it first."""
    scheduler._delete_existing(app_id)


def apply_pod_overlay(pod: V1Pod, overlay: dict[str, Any]) -> None:
    """Merge a role's overlay into the pod that TorchX has rendered for the role, as TorchX's own scheduler does."""
    from torchx.schedulers.kubernetes_scheduler import _apply_pod_overlay

    _apply_pod_overlay(pod, overlay)


class DockerClientMixin:
    """Have TorchX's DockerScheduler use the client that the property ``docker_client`` returns.

    TorchX takes a client only in the constructor; DockerScheduler does not pass one on, and connects without one. This
    class must precede DockerScheduler among the base classes.
    """

    @property
    def docker_client(self) -> DockerClient:
        """The client of the Docker daemon."""
        raise NotImplementedError

    @property
    def _docker_client(self) -> DockerClient:
        return self.docker_client


def uses_entry_points() -> bool:
    """Whether TorchX finds plugins by entry points; TORCHX_PLUGINS_SOURCE may switch that off."""
    from torchx.plugins._registry import PluginSource

    return bool(_sources() & PluginSource.ENTRYPOINT)


def namespace_schedulers() -> dict[str, Callable[..., Any]]:
    """Return the schedulers' factories in the package ``torchx_plugins``, by name.

    Empty if TORCHX_PLUGINS_SOURCE has TorchX ignore that package.
    """
    from torchx.plugins import PluginRegistry, PluginType
    from torchx.plugins._registry import PluginSource

    if not _sources() & PluginSource.NAMESPACE_PKG:
        return {}
    return dict(PluginRegistry(plugin_sources=PluginSource.NAMESPACE_PKG).get(PluginType.SCHEDULER))


def _sources() -> int:
    return int(os.environ.get("TORCHX_PLUGINS_SOURCE", "3"))
