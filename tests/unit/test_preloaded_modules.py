# SPDX-License-Identifier: BSD-3-Clause
"""The modules that a rank finds preloaded, and the variables that torch reads when it is imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from torchx_monarch.host.ranks import preloaded_modules
from torchx_monarch.host.ranks.preloaded_modules import is_read_at_import

TRACED = """
    import os
    names = set()
    class Traced(type(os.environ)):
        def __getitem__(self, name):
            names.add(name)
            return super().__getitem__(name)
    os.environ.__class__ = Traced
    import torch
    print(*sorted(names))
"""


def python(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=120, check=True
    )


def test_the_list_has_what_torch_reads() -> None:
    read = {name for name in python(TRACED).stdout.split() if name.startswith(("TORCH", "PYTORCH", "OMP", "MKL"))}
    assert "TORCH_LOGS" in read
    assert not [name for name in read if not is_read_at_import(name)]


@pytest.mark.parametrize(
    "name",
    [
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG", "PYTORCH_JIT"),
        *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    ],
)
def test_what_has_no_effect_afterwards(name: str) -> None:
    assert is_read_at_import(name)


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "TORCH_HOME", "TORCH_NCCL_BLOCKING_WAIT", "HOME", "", 3])
def test_what_is_read_later(name: object) -> None:
    assert not is_read_at_import(name)


PRELOADED = f"""
import importlib, os, runpy, sys, types, warnings
os.environ.update(RANK="0", OMP_A="1", OMP_B="1")
preloaded = runpy.run_path({preloaded_modules.__file__!r})["PreloadedModules"]()
with preloaded.importing("torch"):
    import torch, other
with preloaded.importing("pack.part"):
    import pack.part
sys.modules["made.in.c"] = types.ModuleType("made.in.c")
preloaded.hide()
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a program with small modules in place of torch and others, which have been preloaded."""
    torch = "import types\nbackends = types.SimpleNamespace(mkl=types.SimpleNamespace(is_available=lambda: True))"
    files = {"torch/__init__.py": torch, "torch/nn.py": "", "other.py": "", "pack/__init__.py": "", "pack/part.py": ""}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    return lambda text: python(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{PRELOADED}{textwrap.dedent(text)}")


Run = Callable[[str], subprocess.CompletedProcess[str]]


def test_a_package_is_found_when_it_is_imported(run: Run) -> None:
    done = run("""
        names = ("torch", "other", "pack", "pack.part")
        before = preloaded._hidden.copy()
        print([name for name in names if name in sys.modules], "made.in.c" in sys.modules, "runpy" in sys.modules)
        print(importlib.util.find_spec("pack").origin == before["pack"].__file__, "pack" in sys.modules)
        import pack.part
        print([name for name in names if name in sys.modules], pack is before["pack"], pack.part is before["pack.part"])
        print(pack.__spec__.loader is pack.__loader__ is not preloaded, importlib.reload(pack) is pack)
        from torch import nn
        print([name for name in names if name in sys.modules], preloaded in sys.meta_path)
    """)
    assert done.stdout.splitlines() == [
        "[] True True",
        "True False",
        "['pack', 'pack.part'] True True",
        "True True",
        "['torch', 'other', 'pack', 'pack.part'] False",
    ]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ('os.environ["OMP_A"] = "2"; os.environ["OMP_B"] = "1"; import torch', ["OMP_A is set by"]),
        ('del os.environ["OMP_B"]; import pack, other; import torch', ["OMP_B is removed by"]),
        ('os.environ.setdefault("TORCH_TRACE", "x"); import other', []),
        ('import torch; os.environ["OMP_A"] = "2"', []),
        ('os.environ.update(RANK="1", OMP_A="2"); import torch', []),
        ('os.environ.update(KMP_INIT_AT_FORK="FALSE", TORCH_HOME="x"); import torch', []),
    ],
)
def test_rank_0_names_what_has_no_effect(program: str, said: list[str], run: Run) -> None:
    lines = run(program).stderr.splitlines()
    assert [
        line.removeprefix("warning: ").partition(" the program, which has no effect on torch")[0] for line in lines
    ] == said
