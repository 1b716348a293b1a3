# SPDX-License-Identifier: BSD-3-Clause
"""Run ordinary torchrun programs on Monarch host meshes, on every backend that TorchX can reach."""

from __future__ import annotations

TYPE_CHECKING = False
"""False at run time, as ``typing.TYPE_CHECKING``.

``typing`` is not imported here: ``python -m torchx_monarch.host`` would import a ``typing.py`` in the working folder.
"""

if TYPE_CHECKING:
    from torchx_monarch.backends.core.errors import BackendError as BackendError
    from torchx_monarch.backends.core.errors import UserError as UserError
    from torchx_monarch.client.function import run as run
    from torchx_monarch.client.hosts import AllocationStatus as AllocationStatus
    from torchx_monarch.client.job import SPMDJob as SPMDJob
    from torchx_monarch.client.monarch_job import MonarchJob as MonarchJob
    from torchx_monarch.client.result import RankOutput as RankOutput
    from torchx_monarch.client.result import RankResult as RankResult
    from torchx_monarch.client.result import RunInfo as RunInfo
    from torchx_monarch.client.result import RunResult as RunResult
    from torchx_monarch.client.run import RunHandle as RunHandle
    from torchx_monarch.client.run_options import Output as Output
    from torchx_monarch.client.run_options import RunOptions as RunOptions
    from torchx_monarch.client.run_options import RunOptionsDict as RunOptionsDict
    from torchx_monarch.client.serve import serve as serve
    from torchx_monarch.client.this_job import ThisJob as ThisJob
    from torchx_monarch.client.this_job import this_job as this_job
    from torchx_monarch.client.workspace_sync import SyncMode as SyncMode
    from torchx_monarch.exceptions import AllocationError as AllocationError
    from torchx_monarch.exceptions import ClientError as ClientError
    from torchx_monarch.exceptions import CodeError as CodeError
    from torchx_monarch.exceptions import RefusedError as RefusedError
    from torchx_monarch.exceptions import ResultError as ResultError
    from torchx_monarch.exceptions import SPMDError as SPMDError
    from torchx_monarch.exceptions import TorchXMonarchError as TorchXMonarchError
    from torchx_monarch.exceptions import UnreachableError as UnreachableError
    from torchx_monarch.insight.step_progress import progress as progress
    from torchx_monarch.schedulers.monarch import InvalidCommandError as InvalidCommandError
    from torchx_monarch.schedulers.monarch import WorkspaceError as WorkspaceError
    from torchx_monarch.training.checkpoint import checkpoint as checkpoint
    from torchx_monarch.training.checkpoint import last_checkpoint as last_checkpoint
    from torchx_monarch.training.steps import steps as steps
    from torchx_monarch.training.steps import time_left as time_left

__version__ = "0.2.0"

_MODULES = {
    "backends.core.errors": "BackendError UserError",
    "client.function": "run",
    "client.hosts": "AllocationStatus",
    "client.job": "SPMDJob",
    "client.monarch_job": "MonarchJob",
    "client.result": "RankOutput RankResult RunInfo RunResult",
    "client.run": "RunHandle",
    "client.run_options": "Output RunOptions RunOptionsDict",
    "client.serve": "serve",
    "client.this_job": "ThisJob this_job",
    "client.workspace_sync": "SyncMode",
    "exceptions": "AllocationError ClientError CodeError RefusedError ResultError SPMDError TorchXMonarchError "
    "UnreachableError",
    "insight.step_progress": "progress",
    "schedulers.monarch": "InvalidCommandError WorkspaceError",
    "training.checkpoint": "checkpoint last_checkpoint",
    "training.steps": "steps time_left",
}
"""The public names that each module defines; ``__getattr__`` imports it on first use."""

_PUBLIC = dict(sorted((name, module) for module, names in _MODULES.items() for name in names.split()))

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
