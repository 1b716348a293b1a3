# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Environment variables that torch reads at import, and a warning for a program that sets one later.

``rank_main`` runs this file if torch was imported before the program: it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

_PREFIXES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "MKLDNN_", "ONEDNN_", "DNNL_", "OPENBLAS_"),
    *("PYTORCH_JIT", "TORCHDYNAMO_EXTENDED_DEBUG_", "TORCHDYNAMO_TRANSLATION_", "TORCH_COMPILE_", "TORCH_LOGS"),
    *("TORCH_BLAS_PREFER_", "TORCH_LINALG_PREFER_"),
)

# The variables that `import torch` of 2.13 reads, found by tracing os.environ and getenv. torch reads others when it
# needs them, so the program can set them: TORCH_HOME, TORCH_NCCL_*, and CUDA_VISIBLE_DEVICES until a device is used.
_NAMES = (
    *("KINETO_USE_DAEMON", "PYTORCH_API_USAGE_STDERR", "PYTORCH_MATCHER_LOGLEVEL"),
    *("TORCHDYNAMO_NO_DATA_DEPENDENT_GRAPH_BREAK", "TORCHEXPORT_EXTENDED_DEBUG_CURRENT_LOC"),
    *("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CPP_LOG_LEVEL"),
    *("TORCH_CUDAGRAPH_GC", "TORCH_CUDA_SANITIZER", "TORCH_CUSTOM_TERMINATE", "TORCH_DEVICE_BACKEND_AUTOLOAD"),
    *("TORCH_DISTRIBUTED_COMPILE_ON_ONE_RANK", "TORCH_DISTRIBUTED_DEBUG", "TORCH_DISTRIBUTED_USE_TORCHCOMMS"),
    *("TORCH_DTRACE", "TORCH_ENRICH_RPOFILER_STACK_TRACE", "TORCH_FAKE_TENSOR_DEBUG"),
    *("TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN", "TORCH_ROCM_FA_PREFER_CK", "TORCH_SHOW_CPP_STACKTRACES"),
    *("TORCH_TRACE", "TORCH_USE_RTLD_GLOBAL"),
    # Traced without CUDA. With it, c10's BackendStaticInitializer reads these when its library is loaded, before torch
    # 2.10 for `backend:` alone: https://github.com/pytorch/pytorch/issues/104801, pull request 165298.
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
)


def is_read_at_import(name: object) -> bool:
    """Return whether torch reads a variable at import and never again."""
    return isinstance(name, str) and (name in _NAMES or name.startswith(_PREFIXES))


def watch() -> None:
    """Warn on stderr when this process changes a variable that torch reads at import; once for each variable.

    Installed packages are left alone: ``import sklearn`` sets defaults of KMP_* for a user who need not know them.
    """
    own_pid, named = os.getpid(), set[str]()

    def watched(change: Callable[..., None]) -> Callable[..., None]:
        def changed(key: str | bytes, *value: str | bytes) -> None:
            name, after = os.fsdecode(key), os.fsdecode(value[0]) if value else None
            before = os.environ.get(name) if is_read_at_import(name) else after
            change(key, *value)
            if after != before and name not in named and os.getpid() == own_pid and not _is_changed_by_package():
                named.add(name)
                _warn(name, "removed" if after is None else "set")

        return changed

    # os.environ and os.environb call these for each change: os.environ.pop, for one, calls os.unsetenv.
    vars(os).update(putenv=watched(os.putenv), unsetenv=watched(os.unsetenv))


def _is_changed_by_package() -> bool:
    """Return whether an installed package other than the program has changed a variable, perhaps by ``setdefault``."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in ("os", "collections.abc"):
        frame = frame.f_back
    is_program = frame.f_globals.get("__name__") == "__main__"
    folders = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
    return not is_program and any(folder in frame.f_code.co_filename for folder in folders)


def _warn(name: str, change: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed, full or a broken pipe
        if sys.stderr is not None:
            print(
                f"warning: {name} is {change} by the program, which has no effect on torch: it was imported before. "
                f"Set it where the job is submitted (--env {name}=...), or have the program import torch "
                "(-cfg preload=none, or ranks=fresh)",
                file=sys.stderr,
                flush=True,
            )
