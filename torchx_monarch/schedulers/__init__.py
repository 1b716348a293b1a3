# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The schedulers' factories, which the entry points register for ``torchx run -s NAME``.

The module is light to import: a factory imports its backend when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchx.schedulers.api import Scheduler

__all__ = ["monarch_aws_batch", "monarch_docker", "monarch_kubernetes", "monarch_local", "monarch_slurm"]


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


def monarch_aws_batch(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
    """Create the scheduler ``monarch_aws_batch``: Monarch hosts as the nodes of a job of AWS Batch.

    Raises:
        ModuleNotFoundError: boto3 is not installed.
    """
    from torchx_monarch.schedulers.compatibility import require_torchx_nightly

    require_torchx_nightly()
    try:
        from torchx_monarch.backends.aws_batch.scheduler import create_scheduler
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("boto3", "botocore"):
            raise
        message = "monarch_aws_batch needs AWS's client for Python; run: pip install 'boto3>=1.34'"
        raise ModuleNotFoundError(message, name=error.name) from None
    from torchx_monarch.schedulers.monarch import wrap

    return wrap("monarch_aws_batch", session_name, create_scheduler(session_name, **kwargs))
