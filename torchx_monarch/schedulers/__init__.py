# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The schedulers' factories, which the entry points register for ``torchx run -s NAME``.

The module is light to import: a factory imports its backend when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchx.schedulers.api import Scheduler

__all__ = ["aws_batch", "monarch_aws_batch", "monarch_docker", "monarch_kubernetes", "monarch_local", "monarch_slurm"]


def monarch_local(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
    """Create the scheduler ``monarch_local``: Monarch hosts on this machine, detached from the terminal."""
    from torchx_monarch.schedulers.compatibility import require_torchx_nightly

    require_torchx_nightly()
    import sys

    from torchx_monarch.backends.local.scheduler import create_scheduler
    from torchx_monarch.schedulers.monarch import wrap

    # The submitter's interpreter: PATH may have no `python`, or the `python` of another environment.
    return wrap("monarch_local", session_name, create_scheduler(session_name, **kwargs), python=sys.executable)


def monarch_docker(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
    """Create the scheduler ``monarch_docker``: Monarch hosts as containers of a Docker daemon.

    Raises:
        ModuleNotFoundError: the package ``docker`` is not installed.
    """
    from torchx_monarch.schedulers.compatibility import require_torchx_nightly

    require_torchx_nightly()
    try:
        from torchx_monarch.backends.docker.scheduler import create_scheduler
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "docker":
            raise
        message = "monarch_docker needs Docker's client for Python; run: pip install 'docker>=7'"
        raise ModuleNotFoundError(message, name=error.name) from None
    from torchx_monarch.schedulers.monarch import wrap

    return wrap("monarch_docker", session_name, create_scheduler(session_name, **kwargs))


def monarch_kubernetes(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
    """Create the scheduler ``monarch_kubernetes``: Monarch hosts as pods of a Kubernetes cluster.

    Raises:
        ModuleNotFoundError: the package ``kubernetes`` is not installed.
    """
    from torchx_monarch.schedulers.compatibility import require_torchx_nightly

    require_torchx_nightly()
    try:
        from torchx_monarch.backends.kubernetes.scheduler import create_scheduler
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("kubernetes", "urllib3"):
            raise
        message = "monarch_kubernetes needs Kubernetes' client for Python; run: pip install 'kubernetes>=29,!=37.0.2'"
        raise ModuleNotFoundError(message, name=error.name) from None
    from torchx_monarch.schedulers.monarch import wrap

    return wrap("monarch_kubernetes", session_name, create_scheduler(session_name, **kwargs))


def monarch_slurm(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
    """Create the scheduler ``monarch_slurm``: Monarch hosts on the nodes of a Slurm job."""
    from torchx_monarch.schedulers.compatibility import require_torchx_nightly

    require_torchx_nightly()
    import sys

    from torchx_monarch.backends.slurm.scheduler import create_scheduler
    from torchx_monarch.schedulers.monarch import wrap

    # The submitter's interpreter, as in monarch_local: the nodes must share its Python environment to run its jobs.
    return wrap("monarch_slurm", session_name, create_scheduler(session_name, **kwargs), python=sys.executable)


def aws_batch(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
    """Create the scheduler ``aws_batch``: jobs of AWS Batch, without Monarch. TorchX had one until August 2026.

    If another plugin registers a scheduler of this name, perhaps a copy of TorchX's, return that one instead.

    Raises:
        ModuleNotFoundError: boto3 is not installed.
    """
    theirs = _registered_by_others("aws_batch")
    if theirs is not None:
        scheduler: Scheduler[dict[str, object]] = theirs(session_name, **kwargs)
        return scheduler
    return _boto3_needed("aws_batch").create_scheduler(session_name, **kwargs)


def monarch_aws_batch(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
    """Create the scheduler ``monarch_aws_batch``: Monarch hosts as the nodes of a job of AWS Batch.

    Raises:
        ModuleNotFoundError: boto3 is not installed.
    """
    module = _boto3_needed("monarch_aws_batch")
    from torchx_monarch.schedulers.monarch import wrap

    return wrap("monarch_aws_batch", session_name, module.create_monarch_scheduler(session_name, **kwargs))


def _boto3_needed(name: str) -> Any:
    """Import the module of both AWS Batch schedulers.

    Args:
        name: name of the requested scheduler, for the message.

    Raises:
        ModuleNotFoundError: boto3 is not installed.
    """
    from torchx_monarch.schedulers.compatibility import require_torchx_nightly

    require_torchx_nightly()
    try:
        from torchx_monarch.backends.aws_batch import scheduler
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("boto3", "botocore"):
            raise
        message = f"{name} needs AWS's client for Python; run: pip install 'boto3>=1.34'"
        raise ModuleNotFoundError(message, name=error.name) from None
    return scheduler


def _registered_by_others(name: str) -> Callable[..., Any] | None:
    """Return another plugin's factory for a scheduler's name; None if only this package registers the name.

    TorchX keeps one factory per name, and it may have chosen this package's.
    """
    import os
    from importlib.metadata import entry_points

    from torchx.plugins import PluginRegistry, PluginType
    from torchx.plugins._registry import PluginSource

    sources = int(os.environ.get("TORCHX_PLUGINS_SOURCE", "3"))
    if sources & PluginSource.ENTRYPOINT:
        for each in entry_points(group="torchx.schedulers", name=name):
            if not each.value.startswith("torchx_monarch."):
                found: Callable[..., Any] = each.load()
                return found
    if sources & PluginSource.NAMESPACE_PKG:
        spaces = PluginRegistry(plugin_sources=PluginSource.NAMESPACE_PKG).get(PluginType.SCHEDULER)
        if name in spaces and spaces[name].__module__ != "torchx_plugins.schedulers.torchx_monarch":
            spaced: Callable[..., Any] = spaces[name]
            return spaced
    return None
