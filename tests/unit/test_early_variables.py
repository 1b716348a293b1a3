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


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG", "PYTORCH_JIT"])
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
            exec(compile(f"import os; os.{{way}}", "/usr/lib/python3/site-packages/sklearn/__init__.py", "exec"))
        os.environ.update(OMP_D="1")
    """)
    assert [line.split()[1] for line in done.stderr.splitlines()] == ["OMP_D"]
