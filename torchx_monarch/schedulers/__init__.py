# SPDX-License-Identifier: BSD-3-Clause
"""The schedulers' factories, which the entry points register for ``torchx run -s NAME``.

The module is light to import: a factory imports its backend when it is called.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torchx.schedulers.api import Scheduler


class _Entry(NamedTuple):
    """Where a backend is, below ``torchx_monarch.backends``; the client library that it needs, and this one's extra."""

    module: str
    name: str
    client: str = ""
    extra: str = ""


_BACKENDS = {
    "monarch_local": _Entry("local.backend", "LocalBackend"),
    "monarch_docker": _Entry("docker.backend", "DockerBackend", "docker>=7", "docker"),
    "monarch_kubernetes": _Entry("kubernetes.backend", "KubernetesBackend", "kubernetes>=29,!=37.0.2", "kubernetes"),
    "monarch_slurm": _Entry("slurm.backend", "SlurmBackend"),
    "monarch_pbs": _Entry("batch.pbs", "PbsBackend"),
    "monarch_lsf": _Entry("batch.lsf", "LsfBackend"),
    "monarch_htcondor": _Entry("batch.htcondor", "HTCondorBackend"),
    "monarch_sge": _Entry("batch.sge", "SgeBackend"),
    "monarch_ssh": _Entry("ssh.backend", "SshBackend"),
    "monarch_aws_batch": _Entry("aws_batch.backend", "AWSBatchBackend", "boto3>=1.34", "aws"),
}


def registered() -> list[str]:
    """Return the names of the registered schedulers that are not TorchX's own."""
    from torchx.schedulers import DEFAULT_SCHEDULER_MODULES, get_scheduler_factories

    return sorted(name for name in get_scheduler_factories() if name not in DEFAULT_SCHEDULER_MODULES)


NAMES = tuple(_BACKENDS)
"""The names of this package's schedulers."""

EXTRAS = {name: entry.extra for name, entry in _BACKENDS.items() if entry.extra}
"""The extra of this package that a scheduler needs."""


def create(name: str, session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
    """Create a scheduler; connect to nothing yet."""
    import importlib
    import sys

    from torchx_monarch.schedulers.install_checks import require_torchx_nightly

    require_torchx_nightly()
    entry = _BACKENDS[name]
    try:
        backend = getattr(importlib.import_module(f"torchx_monarch.backends.{entry.module}"), entry.name)()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not entry.client or missing == "torchx_monarch":
            raise
        from torchx_monarch.backends.core.errors import MissingClientError

        raise MissingClientError(f"{name} needs {missing}; run: pip install '{entry.client}'") from None
    from torchx_monarch.schedulers import monarch

    # PATH may have no `python`, or the `python` of another environment.
    python = sys.executable if backend.capabilities.shares_interpreter else "python"
    return monarch.create(name, session_name, backend, python)


# Monarch hosts on this machine, as containers of a Docker daemon, as pods of a Kubernetes cluster, on the nodes of a
# Slurm job, as jobs of PBS, LSF, HTCondor and Grid Engine, on machines reached over ssh, as the nodes of a job of AWS
# Batch.
monarch_local = partial(create, "monarch_local")
monarch_docker = partial(create, "monarch_docker")
monarch_kubernetes = partial(create, "monarch_kubernetes")
monarch_slurm = partial(create, "monarch_slurm")
monarch_pbs = partial(create, "monarch_pbs")
monarch_lsf = partial(create, "monarch_lsf")
monarch_htcondor = partial(create, "monarch_htcondor")
monarch_sge = partial(create, "monarch_sge")
monarch_ssh = partial(create, "monarch_ssh")
monarch_aws_batch = partial(create, "monarch_aws_batch")


def wrap(
    name: str, session_name: str, inner: Scheduler[dict[str, object]], python: str = ""
) -> Scheduler[dict[str, object]]:
    """Create a scheduler that runs roles as Monarch hosts through any other TorchX scheduler.

    Args:
        python: the Python interpreter of the hosts; empty for this one's path. Ignored if replicas run in container
            images that TorchX builds, which have a ``python`` of their own.
    """
    import sys

    from torchx_monarch.schedulers.install_checks import require_torchx_nightly

    require_torchx_nightly()
    from torchx_monarch.backends.wrapped.backend import WrappedBackend
    from torchx_monarch.schedulers import monarch

    return monarch.create(name, session_name, WrappedBackend(inner, name), python or sys.executable)
