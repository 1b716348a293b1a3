# SPDX-License-Identifier: BSD-3-Clause
"""The schedulers' factories, which the entry points register for ``torchx run -s NAME``.

The module is light to import: a factory imports its backend when it is called.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torchx.schedulers.api import Scheduler


class _Entry(NamedTuple):
    """Where a backend is, below ``torchx_monarch.backends``, and the client library that it needs."""

    module: str
    name: str
    client: str


_BACKENDS: dict[str, _Entry] = {}


def _factory(name: str, module: str, backend: str, client: str = "") -> partial[Scheduler[dict[str, object]]]:
    _BACKENDS[name] = _Entry(module, backend, client)
    return partial(create, name)


def no_scheduler(name: str) -> str:
    """Return what is wrong with the name of a scheduler that does not exist, and what to type instead."""
    from torchx.schedulers import get_scheduler_factories

    from torchx_monarch.model.spelling import did_you_mean

    schedulers = list(get_scheduler_factories())
    return f"there is no scheduler {name}.{did_you_mean(name, schedulers)} Schedulers are: {', '.join(schedulers)}"


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
monarch_local = _factory("monarch_local", "local.backend", "LocalBackend")
monarch_docker = _factory("monarch_docker", "docker.backend", "DockerBackend", "docker>=7")
monarch_kubernetes = _factory(
    "monarch_kubernetes", "kubernetes.backend", "KubernetesBackend", "kubernetes>=29,!=37.0.2"
)
monarch_slurm = _factory("monarch_slurm", "slurm.backend", "SlurmBackend")
monarch_pbs = _factory("monarch_pbs", "batch.pbs", "PbsBackend")
monarch_lsf = _factory("monarch_lsf", "batch.lsf", "LsfBackend")
monarch_htcondor = _factory("monarch_htcondor", "batch.htcondor", "HTCondorBackend")
monarch_sge = _factory("monarch_sge", "batch.sge", "SgeBackend")
monarch_ssh = _factory("monarch_ssh", "ssh.backend", "SshBackend")
monarch_aws_batch = _factory("monarch_aws_batch", "aws_batch.backend", "AWSBatchBackend", "boto3>=1.34")

NAMES = tuple(_BACKENDS)
"""The names of this package's schedulers."""

_WRAP_SECTION = "monarch_wrap"
"""The section of ``.torchxconfig`` that registers schedulers: ``corp = theirs`` is ``theirs``, wrapped."""


@cache
def configured_wraps() -> dict[str, str]:
    """Return the names of the schedulers that ``.torchxconfig`` has wrapped, by the names under which it does so.

    Names that exist are left out with a warning. TorchX reports a file that it cannot read.
    """
    import configparser
    import logging

    from torchx.runner.config import find_configs
    from torchx.schedulers import DEFAULT_SCHEDULER_MODULES

    found: dict[str, str] = {}
    try:
        for path in find_configs():
            parser = configparser.ConfigParser(interpolation=None)
            parser.optionxform = str  # type: ignore[assignment,method-assign]
            parser.read(path)
            if parser.has_section(_WRAP_SECTION):
                found = {**dict(parser[_WRAP_SECTION]), **found}
    except (OSError, UnicodeDecodeError, configparser.Error):
        return {}
    for name in [name for name in found if name in (*NAMES, *DEFAULT_SCHEDULER_MODULES, found[name])]:
        line = f"[{_WRAP_SECTION}] {name} = {found.pop(name)} of .torchxconfig"
        advice = f"{name} is a scheduler already; give another name, such as my_{name}"
        logging.getLogger("torchx_monarch").warning("%s is ignored: %s", line, advice)
    return found


def is_ours(name: str) -> bool:
    """Return whether a scheduler is this package's, or is wrapped by ``.torchxconfig``."""
    return name in NAMES or name in configured_wraps()


def create_wrapped(name: str, wrapped: str, session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
    """Create a scheduler of ``configured_wraps``; raise UserError if the one that it wraps cannot be wrapped."""
    from torchx.schedulers import get_scheduler_factories

    from torchx_monarch.backends.core.errors import UserError

    factories = get_scheduler_factories()
    if wrapped not in factories:
        raise UserError(f"[{_WRAP_SECTION}] {name} = {wrapped} of .torchxconfig: {no_scheduler(wrapped)}")
    if is_ours(wrapped):
        why = f"{wrapped} is a scheduler of torchx-monarch, which needs no wrapping"
        raise UserError(f"[{_WRAP_SECTION}] {name} = {wrapped} of .torchxconfig: {why}")
    return wrap(name, session_name, factories[wrapped](session_name, **kwargs))


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
