# SPDX-License-Identifier: BSD-3-Clause
"""The private names of TorchX that this package calls, which may change with any of its releases.

To override these methods is not to use a private name: TorchX documents them as what a scheduler implements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubernetes.client import V1Pod
    from torchx.runner import Runner
    from torchx.schedulers.api import Scheduler
    from torchx.specs import AppDef, AppDryRunInfo, runopts
    from torchx.specs.api import runopt


def scheduler_of(runner: Runner, name: str) -> Scheduler[Any]:
    return runner._scheduler(name)


def render(scheduler: Scheduler[Any], app: AppDef, cfg: Any) -> AppDryRunInfo[Any, Any]:
    """Return a scheduler's request for an app, without calling the ``pre_proc`` of the app's roles."""
    return scheduler._submit_dryrun(app, cfg)


def validate(scheduler: Scheduler[Any], app: AppDef, cfg: Any) -> None:
    """Check an app as a runner does before it submits to a scheduler, which may raise anything."""
    scheduler._pre_build_validate(app, scheduler.backend, cfg)
    scheduler._validate(app, scheduler.backend, cfg)


def deletes(scheduler: Scheduler[Any]) -> bool:
    """Return whether a scheduler can delete an app; otherwise its ``delete`` only cancels."""
    from torchx.schedulers.api import Scheduler

    return type(scheduler)._delete_existing is not Scheduler._delete_existing


def put_option(options: runopts, name: str, option: runopt) -> None:
    """Add an option to run options, as an instance of the caller's own class, which ``runopts.add`` cannot."""
    options._opts[name] = option


def asking_registry_reads_entry_points() -> bool:
    """Return whether the registry of plugins that collects the caller's module (``dir``) reads entry points, too.

    A registry does not tell the modules that it collects how it was made.
    """
    import sys

    from torchx.plugins import PluginRegistry
    from torchx.plugins._registry import PluginSource

    registry = sys._getframe(2).f_locals.get("self")
    return isinstance(registry, PluginRegistry) and PluginSource.ENTRYPOINT in registry._plugin_sources


def apply_pod_overlay(pod: V1Pod, overlay: dict[str, Any]) -> None:
    """Merge a role's overlay into the pod that TorchX has rendered for the role, as TorchX's own scheduler does."""
    from torchx.schedulers.kubernetes_scheduler import _apply_pod_overlay

    _apply_pod_overlay(pod, overlay)
