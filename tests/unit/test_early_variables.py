# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The variables that torch reads when it is imported: the list against the torch that is installed, and the warning."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from torchx_monarch.host.ranks import early_variables
from torchx_monarch.host.ranks.early_variables import is_read_at_import

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


def test_each_is_named_once() -> None:
    done = python(f"""
        import os, runpy
        os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        runpy.run_path({early_variables.__file__!r})["watch"]()
        os.environ["OMP_NUM_THREADS"] = "4"
        os.environ["OMP_NUM_THREADS"] = "5"
        os.environ.setdefault("TORCH_LOGS", "dynamo")
        os.environ["MKL_NUM_THREADS"] = "1"
        os.environ["TORCH_HOME"] = "x"
        if os.fork() == 0:
            os.environ["OMP_DYNAMIC"] = "1"
            os._exit(0)
        os.wait()
        print(os.popen("echo $OMP_NUM_THREADS $TORCH_LOGS $TORCH_HOME").read().strip())
        print(isinstance(os.environ, os._Environ))
    """)
    assert done.stdout == "5 dynamo x\nTrue\n"
    assert [line.split()[:5] for line in done.stderr.splitlines()] == [
        ["warning:", name, "is", "set", "by"] for name in ("OMP_NUM_THREADS", "TORCH_LOGS")
    ]


def test_defaults_of_installed_packages_are_not_the_programs() -> None:
    done = python(f"""
        import os, runpy
        runpy.run_path({early_variables.__file__!r})["watch"]()
        for way in ('environ["OMP_A"] = "1"', 'environ.setdefault("OMP_B", "1")', 'environ.update(OMP_C="1")'):
            code = compile(f"import os; os.{{way}}", "/usr/lib/python3/site-packages/sklearn/__init__.py", "exec")
            exec(code, {{"__name__": "sklearn"}})
        os.environ.update(OMP_D="1")
    """)
    assert [line.split()[1] for line in done.stderr.splitlines()] == ["OMP_D"]


def test_a_program_that_is_installed_is_told_as_any_other() -> None:
    done = python(f"""
        import runpy
        runpy.run_path({early_variables.__file__!r})["watch"]()
        exec(compile("import os; os.environ['OMP_A'] = '1'", "/usr/lib/python3/site-packages/tool/__main__.py", "exec"))
    """)
    assert done.stderr.split()[1] == "OMP_A"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('os.environ.pop("OMP_NUM_THREADS")', "removed"),
        ('del os.environ["OMP_NUM_THREADS"]', "removed"),
        ("os.environ.clear()", "removed"),
        ('os.unsetenv("OMP_NUM_THREADS")', "removed"),
        ('os.environb[b"OMP_NUM_THREADS"] = b"4"', "set"),
        ('os.putenv("OMP_NUM_THREADS", "4")', "set"),
        ('os.environ.pop("OMP_DYNAMIC", None)', ""),
        ('os.putenv("OMP_NUM_THREADS", "1")', ""),
        ('os.environb[b"OMP_NUM_THREADS"] = b"1"', ""),
    ],
)
def test_every_way_to_change_one_is_told(change: str, said: str) -> None:
    done = python(f"""
        import os, runpy
        os.environ.clear()  # clear() is also told of what the machine has set
        os.environ["OMP_NUM_THREADS"] = "1"
        runpy.run_path({early_variables.__file__!r})["watch"]()
        {change}
    """)
    lines = done.stderr.splitlines()
    assert len(lines) == bool(said)
    assert not said or f"OMP_NUM_THREADS is {said} by the program, which has no effect on torch" in lines[0]
    assert not said or "-cfg preload=none, or ranks=fresh" in lines[0]
