# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run ordinary torchrun programs on Monarch host meshes, on every backend that TorchX can reach."""

from __future__ import annotations

TYPE_CHECKING = False
"""False at run time, as ``typing.TYPE_CHECKING``.

``typing`` is not imported here: ``python -m torchx_monarch.host`` would import a ``typing.py`` in the working folder.
"""

if TYPE_CHECKING:
    from torchx_monarch.client.job import SPMDJob as SPMDJob
    from torchx_monarch.client.monarch_job import MonarchJob as MonarchJob
    from torchx_monarch.client.result import RunResult as RunResult
    from torchx_monarch.client.serve import serve as serve
    from torchx_monarch.client.this_job import this_job as this_job
    from torchx_monarch.exceptions import SPMDError as SPMDError

__version__ = "0.1.0"

_PUBLIC = {
    "MonarchJob": "client.monarch_job",
    "RunResult": "client.result",
    "SPMDError": "exceptions",
    "SPMDJob": "client.job",
    "serve": "client.serve",
    "this_job": "client.this_job",
}
"""The module that defines each public name; ``__getattr__`` imports it on first use."""

__all__ = ["MonarchJob", "RunResult", "SPMDError", "SPMDJob", "serve", "this_job"]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
