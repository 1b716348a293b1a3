# SPDX-License-Identifier: BSD-3-Clause
"""Keep the modules that the zygote has imported out of a rank's ``sys.modules`` until its program imports them.

``zygote_main`` runs this file: it imports the standard library alone. What a program does before it imports torch, such
as setting OMP_NUM_THREADS, then has the effect on torch that it would have in a fresh interpreter, or rank 0 warns.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PREFIXES = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "MKLDNN_",
    "ONEDNN_",
    "DNNL_",
    "OPENBLAS_",
    "PYTORCH_JIT",
    "TORCHDYNAMO_EXTENDED_DEBUG_",
    "TORCHDYNAMO_TRANSLATION_",
    "TORCH_COMPILE_",
    "TORCH_LOGS",
    "TORCH_BLAS_PREFER_",
    "TORCH_LINALG_PREFER_",
)

# The variables that `import torch` of 2.13 reads, found by tracing os.environ and getenv. torch reads others when it
# needs them, so the program can set them: TORCH_HOME, TORCH_NCCL_*, and CUDA_VISIBLE_DEVICES until a device is used.
_NAMES = (
    "KINETO_USE_DAEMON",
    "PYTORCH_API_USAGE_STDERR",
    "PYTORCH_MATCHER_LOGLEVEL",
    "TORCHDYNAMO_NO_DATA_DEPENDENT_GRAPH_BREAK",
    "TORCHEXPORT_EXTENDED_DEBUG_CURRENT_LOC",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_CUDAGRAPH_GC",
    "TORCH_CUDA_SANITIZER",
    "TORCH_CUSTOM_TERMINATE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_DISTRIBUTED_COMPILE_ON_ONE_RANK",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_DISTRIBUTED_USE_TORCHCOMMS",
    "TORCH_DTRACE",
    "TORCH_ENRICH_RPOFILER_STACK_TRACE",
    "TORCH_FAKE_TENSOR_DEBUG",
    "TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN",
    "TORCH_ROCM_FA_PREFER_CK",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_TRACE",
    "TORCH_USE_RTLD_GLOBAL",
    # Builds with CUDA. c10's BackendStaticInitializer reads the first three when its library is loaded, before torch
    # 2.10 for `backend:` alone: https://github.com/pytorch/pytorch/issues/104801, pull request 165298.
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "TORCH_DISABLE_NATIVE_JIT",
)

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_SET_BY_SKLEARN = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
"""Defaults that ``import sklearn`` sets for a user who need not know them."""


def is_read_at_import(name: object) -> bool:
    """Return whether torch reads a variable at import and never again."""
    return isinstance(name, str) and (name in _NAMES or name.startswith(_PREFIXES))


class PreloadedModules:
    """Record which modules the zygote imports, and hide them in a rank until its program imports them.

    A finder in ``sys.meta_path`` gives the program a hidden package with all of its modules, and with torch also the
    packages that torch has imported.
    """

    def __init__(self) -> None:
        self._before = set(sys.modules)
        self._brought: dict[str, list[str]] = {}
        self._cpus = os.sched_getaffinity(0)
        self._late: set[str] = set()
        self._is_active = False
        self._hidden: dict[str, ModuleType] = {}
        self._environ: dict[str, str] = {}

    @contextlib.contextmanager
    def importing(self, name: str) -> Iterator[None]:
        """Record what the import of a module, the body of a ``with`` statement, brings."""
        before = set(sys.modules)
        yield
        brought = [module for module in sys.modules if module not in before]
        if name == "torch" and "tqdm" in brought:
            _leave_tqdm_to_program([sys.modules[module] for module in brought])
        self._brought[name.partition(".")[0]] = brought
        self._cpus = os.sched_getaffinity(0)  # with OMP_PROC_BIND, libgomp binds the thread that loads it

    def hide(self) -> None:
        """Hide the modules before a program begins; a second time those alone that its beginning has not imported."""
        if not self._is_active:
            self._is_active = True
            # Python and C libraries look up some without an import: threading, for one, and modules without a spec.
            packages = {
                name
                for name, module in sys.modules.items()
                if not ("." in name or name in self._before or name in sys.stdlib_module_names)
                and getattr(module, "__spec__", None)
            }
            names = [name for name in sys.modules if name.partition(".")[0] in packages]
            self._hidden = {name: sys.modules[name] for name in names}
            self._environ = dict(os.environ)
            if self._hidden:
                sys.meta_path.insert(0, self)
        for name in self._hidden:
            sys.modules.pop(name, None)

    def hide_again(self, names: Iterable[str]) -> None:
        """Hide modules that the program has not imported yet."""
        self._late.update(names)
        self._hidden.update((name, sys.modules.pop(name)) for name in names)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def show(self) -> None:
        """Have this process find the modules that are hidden; the program has not begun, or ``hide`` follows."""
        sys.modules.update(self._hidden)
        self._cpus = os.sched_getaffinity(0)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a hidden module, with this object as its loader."""
        original = self._hidden[name].__spec__ if name in self._hidden else None
        if original is None:
            return None
        spec = ModuleSpec(name, None)
        vars(spec).update(vars(original), loader=self, loader_state=original)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._hidden[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Put the module, and what belongs to it, back into ``sys.modules``."""
        assert module.__spec__ is not None
        name, module.__spec__ = module.__spec__.name, module.__spec__.loader_state
        top = name.partition(".")[0]
        brought = {*self._brought.get(top, ())}
        shown = [hidden for hidden in self._hidden if hidden in brought or hidden.partition(".")[0] == top]
        if name not in self._late:
            shown = [hidden for hidden in shown if hidden not in self._late]
        for hidden in shown:
            sys.modules.setdefault(hidden, self._hidden.pop(hidden))
        if not self._hidden:
            sys.meta_path.remove(self)
        self._renew(shown)

    def _renew(self, shown: Iterable[str]) -> None:
        """Have modules take over what the program has changed since it began."""
        names = self._environ.keys() | os.environ.keys()
        changed = {name for name in names if self._environ.get(name) != os.environ.get(name)}
        numpy = sys.modules.get("numpy._core._multiarray_umath")
        if {*_THREADS} & changed or os.sched_getaffinity(0) != self._cpus:
            if numpy is not None and numpy.__name__ in shown:
                _set_threads_of_openblas(numpy)
            if "torch" in shown:
                _set_threads_of_torch()
        if "torch" not in shown:
            return
        torch: Any = sys.modules["torch"]
        changed.difference_update(_THREADS, _SET_BY_SKLEARN)
        if "TORCH_DISTRIBUTED_DEBUG" in changed and torch.distributed.is_available():
            torch.distributed.set_debug_level_from_env()
            changed.remove("TORCH_DISTRIBUTED_DEBUG")
        if {"TORCH_LOGS", "TORCH_LOGS_OUT"} & changed:
            torch._logging._init_logs()
            changed -= {"TORCH_LOGS", "TORCH_LOGS_OUT"}
        if os.environ.get("RANK") == "0":
            for name in filter(is_read_at_import, sorted(changed)):
                _warn(name, "set" if name in os.environ else "removed")


class _Tqdm:
    """Stand for ``tqdm.tqdm`` in torch's modules: it is imported when torch uses it."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return importlib.import_module("tqdm").tqdm(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("tqdm").tqdm, name)


def _leave_tqdm_to_program(modules: Iterable[ModuleType]) -> None:
    """Have the program import tqdm itself, which reads its variables then: ``torch.hub`` has imported it."""
    tqdm, stand_in = sys.modules["tqdm"].tqdm, _Tqdm()
    for module in modules:
        if vars(module).get("tqdm") is tqdm:
            vars(module)["tqdm"] = stand_in
    for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
        del sys.modules[name]


def _threads(*names: str) -> int:
    """Return the first of some variables that is a number of threads, or else the number of CPUs of this process."""
    for name in names:
        with contextlib.suppress(ValueError):
            if (number := int(os.environ.get(name, "").partition(",")[0])) > 0:
                return number
    return len(os.sched_getaffinity(0))


def _set_threads_of_torch() -> None:
    """Have torch use as many threads as if it was imported now: with MKL at most one a core."""
    torch: Any = sys.modules["torch"]
    number = _threads("OMP_NUM_THREADS")
    if torch.backends.mkl.is_available():
        cores = set()
        for cpu in os.sched_getaffinity(0):
            with (
                contextlib.suppress(OSError),
                open(f"/sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list") as file,
            ):
                cores.add(file.read())
        number = min(_threads("MKL_NUM_THREADS", "OMP_NUM_THREADS"), len(cores) or number)
    torch.set_num_threads(number)


def _set_threads_of_openblas(numpy: ModuleType) -> None:
    """Have the OpenBLAS that numpy has loaded use as many threads as if it was loaded now."""
    library = ctypes.CDLL(numpy.__file__)
    number = min(_threads("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), len(os.sched_getaffinity(0)))
    for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
        if function := getattr(library, name, None):
            function(number)
            return


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
