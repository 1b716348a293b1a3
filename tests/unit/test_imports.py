# SPDX-License-Identifier: BSD-3-Clause
"""Who imports what: the submit side neither torch nor monarch, the launch path no torch, nobody upwards."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import torchx_monarch
from tests.waits import WITHIN
from torchx_monarch.schedulers import NAMES
from torchx_monarch.schedulers.monarch import MonarchScheduler, MonarchWorkspaceScheduler

_PACKAGE = Path(torchx_monarch.__file__).parent


def imported_by(statement: str) -> set[str]:
    return {name.partition(".")[0] for name in modules_of(statement)}


_SUBMIT_SIDE = (
    "import torchx_monarch",
    "import torchx_monarch.components",
    "from torchx_monarch import RunResult, SPMDError, serve",
    "import torchx_monarch.cli.main",
    "import torchx_plugins.schedulers.torchx_monarch",
    "from torchx.runner import get_runner; get_runner()._scheduler('monarch_local')",
    *(f"from torchx_monarch.schedulers import {name}; {name}('torchx')" for name in NAMES),
    "from torchx.schedulers.slurm_scheduler import create_scheduler as inner\n"
    "from torchx_monarch.schedulers import wrap; wrap('acme', 'torchx', inner('torchx'))",
)


def test_submit_side_imports_neither_torch_nor_monarch() -> None:
    found = [
        f"exec({statement!r}); print([{statement!r}], {{'torch', 'monarch'}} & set(sys.modules))"
        for statement in _SUBMIT_SIDE
    ]
    code = "\n".join(["import sys", *found])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WITHIN)
    assert done.stdout.splitlines() == [f"{[statement]} set()" for statement in _SUBMIT_SIDE]


def test_clients_of_clouds_are_imported_by_their_own_backend_alone() -> None:
    statement = "from torchx_monarch import schedulers as s; s.monarch_local('torchx'); s.monarch_slurm('torchx')"
    assert not imported_by(f"import torchx_plugins.schedulers.torchx_monarch\n{statement}") & {"boto3", "botocore"}
    assert "boto3" in imported_by("from torchx_monarch import schedulers as s; s.monarch_aws_batch('torchx')")


@pytest.mark.parametrize(
    "statement",
    [
        "import torchx_monarch.host, torchx_monarch.host.host_process",
        "import torchx_monarch.monarch_adapter.monarch_api, torchx_monarch.host.worker_loop_main",
        "import torchx_monarch.backends.local.supervisor",
    ],
)
def test_launch_path_does_not_import_torch(statement: str) -> None:
    assert "torch" not in imported_by(statement)


def test_the_package_itself_is_light() -> None:
    assert not imported_by("import torchx_monarch") & {"torchx", "asyncio", "ssl", "cryptography"}


def modules_of(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=WITHIN)
    return set(done.stdout.split())


def test_host_process_starts_without_torchx() -> None:
    theirs = imported_by(
        "import torchx_monarch.host, torchx_monarch.host.host_process, torchx_monarch.host.code_distribution"
    )
    assert not theirs & {"torchx", "pathspec"}  # who reads patterns is the client


def test_a_host_of_ranks_imports_monarch_when_it_starts_a_worker_and_not_before() -> None:
    names = "host_process, rank_runs, code_distribution"
    theirs = imported_by(f"from torchx_monarch.host import {names}")
    assert not theirs & {"torch", "monarch", "cryptography"}


def test_a_host_of_a_command_imports_nothing_for_ranks() -> None:
    """It is to cost little: each of these takes milliseconds, and memory of each replica."""
    theirs = modules_of("import torchx_monarch.host.command_run, torchx_monarch.host.host_process")
    packages = ("command.", "host.ranks.zygote", "host.ranks.run_spec", "host.worker_loops", "controller.attempts")
    assert not [name for name in theirs if name.startswith(tuple(f"torchx_monarch.{package}" for package in packages))]
    assert not theirs & {"cryptography", "multiprocessing", "argparse", "torch", "monarch", "importlib.metadata"}


@pytest.mark.parametrize("module", ["local.supervisor", "slurm.batch_step", "batch.task", "ssh.in_job.entry"])
def test_what_starts_hosts_needs_the_standard_library_alone(module: str) -> None:
    theirs = imported_by(f"import torchx_monarch.backends.{module}")
    assert not theirs & {"torchx", "psutil", "rich", "cryptography", "yaml"}


@pytest.mark.parametrize("module", ["exec", "arguments"])
def test_what_begins_a_run_asks_no_scheduler(module: str) -> None:
    assert "torchx" not in imported_by(f"import torchx_monarch.cli.{module}")


@cache
def modules_imported(path: Path) -> set[str]:
    """What a module imports by name, wherever in it: of ``from A import B`` both A and A.B, which may be a module."""
    module = ".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                around = module.split(".")[: -node.level]
                base = ".".join([*around, *([base] if base else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            words = [word.value for word in node.args[:1] if isinstance(word, ast.Constant)]
            found.update(str(word) for word in words)
    return found


_BELOW = {
    "system": set(),
    "model": {"system"},
    "insight": {"model", "system"},
    "transport": {"model", "system"},
    "training": {"insight", "model", "system"},
    "command": {"model"},
    "code_sync": {"model", "system"},
    "monarch_adapter": {"transport", "insight", "model", "system"},
    "controller": {"monarch_adapter", "transport", "insight", "command", "model", "system"},
    "host/ranks": {"training", "transport", "insight", "command", "model", "system"},
    "host": {
        *("host/ranks", "controller", "code_sync", "monarch_adapter", "training"),
        *("transport", "insight", "command", "model", "system"),
    },
    "backends/core": {"insight", "model", "system"},
    "supervisor": {"backends/core", "insight", "model", "system"},
    "backends": {"backends/core", "supervisor", "code_sync", "insight", "model", "system"},
    "schedulers": {"backends/core", "backends", "transport", "insight", "command", "model", "system"},
    "client": {
        *("schedulers", "backends/core", "backends", "code_sync", "monarch_adapter"),
        *("transport", "insight"),
        *("command", "model", "system"),
    },
    "cli": {
        *("client", "schedulers", "backends/core", "backends", "code_sync"),
        *("transport", "insight"),
        *("command", "model", "system"),
    },
    "components": {"command", "model"},
}
"""The packages that each package may import; ``backends/core`` and ``host/ranks`` count as ones of their own.
``exceptions`` and ``torchx_monarch`` itself are for all."""

_FOREIGN = {
    "": ("monarch", "torchx"),
    "host": ("torchx",),
    "host/ranks": ("monarch", "torchx"),
    "controller": ("torchx",),
    "monarch_adapter": ("torchx",),
    "insight": ("monarch", "torchx"),
    "components": ("monarch",),
    "transport": ("torchx",),
    "command": ("monarch",),
    "backends": ("monarch",),
    "backends/core": ("monarch",),
    "supervisor": ("monarch", "torchx"),
    "schedulers": ("monarch",),
    "client": ("monarch",),
    "cli": ("monarch",),
    "code_sync": ("monarch", "torchx"),
    "system": ("monarch", "torchx"),
    "model": ("monarch", "torchx"),
}
"""Libraries that a package does not import; "" are the modules beside the packages. No package imports torch."""

_EXEMPT = {
    *("rank_main.py", "zygote_main.py", "rank_errors.py"),
    *("attached_job.py", "job.py", "monarch_job.py", "this_job.py"),
}
"""The files of ranks, where torch belongs, and those of a Monarch client's process, where monarch belongs."""


@pytest.mark.parametrize("room", ["", *_BELOW])
def test_dependencies_point_one_way(room: str) -> None:
    packages = {path.name for path in _PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert packages == {name for name in _BELOW if "/" not in name}
    wrong = set()
    # All packages may import the modules beside them, which therefore import none. That of the public names imports
    # them all, on first use.
    paths = (_PACKAGE / room).rglob("*.py") if room else {*_PACKAGE.glob("*.py")} - {_PACKAGE / "__init__.py"}
    for path in paths:
        for name in modules_imported(path):
            first, _, rest = name.partition(".")
            up = first == "torchx_monarch" and _room(rest) in _BELOW.keys() - {room} - _BELOW.get(room, set())
            up = up and not (path.name == "exceptions.py" and rest.startswith("client.result"))  # for type checkers
            foreign = first in ("torch", *_FOREIGN.get(room, ())) and path.name not in _EXEMPT
            if up or foreign:
                wrong.add(f"{path.relative_to(_PACKAGE)} imports {name}")
    assert not wrong


def _room(module: str) -> str:
    """The package of a module, or of a public name, by their names below ``torchx_monarch``."""
    first, _, rest = module.partition(".")
    parts = f"{torchx_monarch._PUBLIC.get(first, first)}.{rest}".rstrip(".").split(".")
    inner = "/".join(parts[:2])
    return inner if inner in _BELOW else parts[0]


@pytest.mark.parametrize(
    ("public", "package"),
    [
        (r"monarch\.(actor|job)(\.[A-Z]\w*|\.concurrent_endpoint|\.job_load)?", "monarch_adapter"),
        (r"torchx(\.[A-Za-z]\w*)*", "backends/core"),
    ],
)
def test_private_names_of_others_are_imported_in_one_package(public: str, package: str) -> None:
    library = public.partition("\\")[0].partition("(")[0]
    users = {
        str(path.relative_to(_PACKAGE).parent)
        for path in _PACKAGE.rglob("*.py")
        for name in modules_imported(path)
        if name.startswith(f"{library}.") and not re.fullmatch(public, name)
    }
    assert users <= {package}


_EXTENSION_POINTS = {
    *("_submit_dryrun", "_run_opts", "_cancel_existing", "_delete_existing", "_pre_build_validate", "_validate"),
}
"""The methods that TorchX has a scheduler implement, and whose overrides may call ``super()``."""


@pytest.mark.parametrize("kind", [MonarchScheduler, MonarchWorkspaceScheduler])
def test_the_scheduler_overrides_what_torchx_has_it_implement(kind: type[MonarchScheduler]) -> None:
    inherited = {each for base in kind.__mro__ if base.__module__.startswith("torchx.") for each in vars(base)}
    overridden = {each for each in vars(kind) if re.match("_(?!_)", each)} & inherited
    assert overridden <= _EXTENSION_POINTS | {"_abc_impl"}
