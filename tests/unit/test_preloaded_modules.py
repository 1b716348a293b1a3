# SPDX-License-Identifier: BSD-3-Clause
"""What a host preloads of a program, the modules that a rank finds preloaded, and the variables that torch reads."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from torchx_monarch.host.ranks import preloaded_modules
from torchx_monarch.host.ranks.leading_statements import leading_statements
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


ENDS = {
    "a call": "print(1)",
    "a definition": "def f(): pass",
    "a condition": "if True: pass",
    "an attempt": "try:\n    import late\nexcept ImportError: pass",
    "a name that is computed": "x = f()",
    "an attribute": "torch.x = 1",
    "a variable that is computed": "os.environ['X'] = f()",
    "a variable of another name": "environ['X'] = '1'",
    "a variable that torch reads when it is imported": "os.environ['PYTORCH_ALLOC_CONF'] = 'x'",
    "a default that is computed": "os.environ.setdefault('X', f())",
    "the user's module": "import mine",
    "a part of the user's package": "from package.part import x",
    "a relative import": "from . import x",
    "Monarch": "from monarch.actor import Actor",
}


@pytest.mark.parametrize("what", ENDS)
def test_the_first_statement_that_may_change_an_import_ends_them(what: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "prog.py").write_text(f"import sklearn\n{ENDS[what]}\nimport pandas")
    found = leading_statements("script", "prog.py", str(tmp_path), ())
    assert found.statements == ((1, "import sklearn"),)
    assert found.end.startswith("prog.py:2 ")


def test_imports_and_constants_are_leading_up_to_the_last_import_of_interest(tmp_path: Path) -> None:
    text = '''"""Train."""
from __future__ import annotations
import os, torch as t
os.environ["HF_HOME"] = "/a"
SIZES = {"a": (1, -2.0), "b": [1 << 3, "x"]}
os.environ.setdefault("B", "c")
from transformers import (
    Trainer,
    pipeline as p,
)
import torch.nn
'''
    (tmp_path / "prog.py").write_text(text)
    assert leading_statements("script", "prog.py", str(tmp_path), ("torch",)).statements == (
        (3, "import os"),
        (3, "import torch as t"),
        (4, "os.environ['HF_HOME'] = '/a'"),
        (6, "os.environ.setdefault('B', 'c')"),
        (7, "from transformers import Trainer, pipeline as p"),
    )
    (tmp_path / "prog.py").write_text(text.replace("transformers", "torch"))
    assert leading_statements("script", "prog.py", str(tmp_path), ("torch",)).statements == ()


def test_a_module_has_leading_statements_if_its_packages_are_empty(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    init = tmp_path / "package" / "__init__.py"
    (tmp_path / "package" / "prog.py").write_text("import sklearn")
    for text, found in (("", ((1, "import sklearn"),)), ("import mine", ())):
        init.write_text(text)
        assert leading_statements("module", "package.prog", str(tmp_path), ()).statements == found
    assert leading_statements("module", "nosuch", str(tmp_path), ()).statements == ()


@pytest.mark.parametrize(
    "text", ["import (", "import sklearn\0", "(" * 10_000, ""], ids=["", "null", "nested", "empty"]
)
def test_what_is_no_program_has_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(text)
    assert leading_statements("script", "prog.py", str(tmp_path), ()).statements == ()
    assert leading_statements("script", str(tmp_path), "/", ()).statements == ()
    assert leading_statements("code", "import sklearn", "/", ()).statements == ()
