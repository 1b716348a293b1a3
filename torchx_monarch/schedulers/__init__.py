# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``-s`` names: the factories that the entry points register. Light to import; a factory imports its backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchx.schedulers.api import Scheduler

__all__ = ["monarch_docker", "monarch_kubernetes", "monarch_local", "monarch_slurm"]


def monarch_local(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
    """The scheduler ``monarch_local``: Monarch hosts on this machine, detached from the terminal."""
    from torchx_monarch.schedulers.compatibility import require_torchx_nightly

    require_torchx_nightly()
    import sys

    from torchx_monarch.backends.local.scheduler import create_scheduler
    from torchx_monarch.schedulers.monarch import wrap

    # The submitter's interpreter: PATH may know no `python`, or one of another environment.
    return wrap("monarch_local", session_name, create_scheduler(session_name, **kwargs), python=sys.executable)


def monarch_docker(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
    """The scheduler ``monarch_docker``: Monarch hosts as containers of a Docker daemon.

    Raises:
        ModuleNotFoundError: Docker's client for Python is not installed.
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
    """The scheduler ``monarch_kubernetes``: Monarch hosts as pods of a Kubernetes cluster.

    Raises:
        ModuleNotFoundError: Kubernetes' client for Python is not installed.
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
    """The scheduler ``monarch_slurm``: Monarch hosts on the nodes of a Slurm job."""
    from torchx_monarch.schedulers.compatibility import require_torchx_nightly

    require_torchx_nightly()
    import sys

    from torchx_monarch.backends.slurm.scheduler import create_scheduler
    from torchx_monarch.schedulers.monarch import wrap

    # As above; the nodes see the submitter's environment, or they could not run its jobs.
    return wrap("monarch_slurm", session_name, create_scheduler(session_name, **kwargs), python=sys.executable)
