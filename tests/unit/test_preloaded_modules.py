# SPDX-License-Identifier: BSD-3-Clause
"""What a host preloads of a program, the modules that a rank finds preloaded, and the variables that torch reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waits import WITHIN
from torchx_monarch.host.ranks import preloaded_modules
from torchx_monarch.host.ranks.fork_safety import Generators
from torchx_monarch.host.ranks.leading_statements import NOT_IN_TORCH, Leading, leading_statements
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
    "a decorated function": "@f\ndef g(): pass",
    "a default that calls": "def g(x=f()): pass",
    "a class whose base is computed": "class C(f()): pass",
    "a class that does something": "class C:\n    f()",
    "a class with a decorator": "@f\nclass C: pass",
    "a class with a decorated function": "class C:\n    @f\n    def g(self): pass",
    "a class of another kind": "class C(metaclass=M): pass",
    "a class that sees its subclasses": "class C:\n    def __init_subclass__(cls): f()",
    "a call with another effect": "x = logging.basicConfig()",
    "a variable that an import may set": "import os\nx = os.environ['X']",
    "modules": "from sys import modules as m\nx = len(m)",
    "a name that is no longer Python's": "def int(x): f()\nx = int(1)",
    "a condition": "if True: pass",
    "an attempt that catches all": "try:\n    import late\nexcept: pass",
    "an attempt that does something": "try:\n    import late\n    f()\nexcept ImportError: pass",
    "an attempt with the user's module": "try:\n    import fast\nexcept ImportError: pass",
    "the program itself": "if __name__ == '__main__': f()",
    "a name that is computed": "x = f()",
    "an attribute": "torch.x = 1",
    "a variable that is computed": "os.environ['X'] = f()",
    "a variable of another name": "environ['X'] = '1'",
    "a variable that torch reads when it is imported": "os.environ['PYTORCH_ALLOC_CONF'] = 'x'",
    "a default that is computed": "os.environ.setdefault('X', f())",
    "the user's extension module": "import fast",
    "a relative import": "from . import x",
    "Monarch": "from monarch.actor import Actor",
}


@pytest.mark.parametrize("what", ENDS)
def test_the_first_statement_that_may_change_an_import_ends_them(what: str, tmp_path: Path) -> None:
    (tmp_path / "fast.abi3.so").touch()
    (tmp_path / "prog.py").write_text(f"import sklearn\n{ENDS[what]}\nimport pandas")
    found = leading_statements("script", "prog.py", str(tmp_path), ())
    assert lines_of(found) == [("prog.py", 1, "import sklearn")]
    assert found.end.startswith(("prog.py:2 ", "prog.py:3 "))


PURE = """
import abc, dataclasses, functools, re
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, TypeVar
import torch
from torch import nn
T = TypeVar("T")
DTYPES: dict[str, Any] = {"half": torch.float16, "n": len("abc"), "f": f"{torch}", "g": lambda: f()}
WORDS, _word = "a,b".split(","), re.compile("a")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
try:
    __version__ = version("mine")
except Exception:
    __version__ = "0"
@dataclasses.dataclass(frozen=True)
class Config:
    \"""Settings.\"""
    sizes: list[int] = field(default_factory=list)
    name: str = "x"
    @property
    def both(self) -> tuple[str, int]: return f()
    @both.setter
    def both(self, value: str = __version__): ...
class Model(nn.Module, metaclass=abc.ABCMeta):
    class Part(Config): pass
    limit: int
    @staticmethod
    @functools.lru_cache(maxsize=8)
    def g(): f()
    @torch.no_grad()
    async def forward(self, x: torch.Tensor | None, *args: "T"): f()
"""


def test_definitions_and_values_change_no_import(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{PURE}\nif __name__ == '__main__': f()")
    (tmp_path / "prog.py").write_text(f"import mine\n{PURE}\nimport pandas\nf()")
    found = leading_statements("script", "prog.py", str(tmp_path), ("torch",))
    assert found.end.startswith(f"prog.py:{len(PURE.splitlines()) + 4} f(): ")
    assert lines_of(found)[-1][2] == "import pandas"


LATER = """
import torch.distributed.tensor.parallel
from torch.distributed import checkpoint
if torch.cuda.is_available():
    import torch.distributed.pipelining
"""


def test_what_torch_does_not_import_is_imported_ahead_of_the_statements_that_import_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LATER)
    (tmp_path / "prog.py").write_text("import pandas\nprint()\nimport mine, torch.distributed.fsdp\nimport datasets")
    found = leading_statements("script", "prog.py", str(tmp_path), ("torch",))
    ahead = "import torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor"
    named = ("", 0, f"{ahead}, torch.distributed.tensor.parallel")
    assert lines_of(found) == [("prog.py", 1, "import pandas"), named]
    assert leading_statements("script", "prog.py", str(tmp_path), ("torch",)) is found  # not read again
    (tmp_path / "mine.py").write_text(f"{LATER}os.environ['TORCH_COMPILE_DISABLE'] = '1'")
    assert lines_of(leading_statements("script", "prog.py", str(tmp_path), ("torch",))) == [
        ("prog.py", 1, "import pandas")
    ]
    (tmp_path / "prog.py").write_text("import torch\nprint()\nfrom torch.nn.attention import varlen\ntorch.compile")
    assert lines_of(leading_statements("script", "prog.py", str(tmp_path), ("torch",))) == [
        ("prog.py", 1, "import torch"),
        ("", 0, "import torch._dynamo, torch.nn.attention.varlen"),
        ("", 0, "import torch._inductor.compile_fx"),
    ]


def lines_of(found: Leading) -> list[tuple[str, int, str]]:
    """Return the statements with the names of their files."""
    return [(os.path.basename(path), line, text) for path, line, text in found.statements]


OWN = {
    "mine/__init__.py": "import os\nfrom mine.base import f\nos.environ['A'] = '1'\nlate = 1",
    "mine/base.py": "from transformers import Trainer\ndef f(x: Trainer = None): ...",
    "mine/data.py": "from . import base, late\nfrom .base import f\nimport datasets, logging\nl = logging.getLogger()",
    "mine/late.py": "import never",
    "mine/ends.py": "import scipy\nf()\nimport never",
}


@pytest.mark.parametrize(
    ("mode", "target"),
    [("script", "prog.py"), ("module", "mine.prog"), ("module", "prog")],
    ids=["script", "part", "module"],
)
def test_the_users_own_modules_are_read_as_python_would_execute_them(mode: str, target: str, tmp_path: Path) -> None:
    files = {**OWN, "prog.py": "import torch\nfrom mine import data\nimport peft\nimport mine.ends\nimport never"}
    files["mine/prog.py"] = files["prog.py"]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = leading_statements(mode, target, str(tmp_path), ("torch",))
    package = [
        ("__init__.py", 1, "import os"),
        ("base.py", 1, "from transformers import Trainer"),
        ("__init__.py", 3, "os.environ['A'] = '1'"),
    ]
    begins, first = [*package], [("prog.py", 1, "import torch")]
    begins = package + first if target == "mine.prog" else first + package
    assert lines_of(found) == [
        *begins,
        ("data.py", 3, "import datasets"),
        ("data.py", 3, "import logging"),
        ("prog.py", 3, "import peft"),
        ("ends.py", 1, "import scipy"),
    ]
    assert found.end.startswith("mine/ends.py:2 f()")


_UNLISTED = """
import json, pkgutil, sys, torch, torch.distributed
loaded = [name for name in json.loads(sys.argv[1]) if name in sys.modules]
packages = (torch, torch.distributed)
names = [f"{package.__name__}.{part.name}" for package in packages for part in pkgutil.iter_modules(package.__path__)]
print(json.dumps([loaded, [name for name in names if name not in sys.modules and "._" not in name]]))
"""


def test_what_torch_does_not_import_is_as_listed() -> None:
    command = [sys.executable, "-c", _UNLISTED, json.dumps(NOT_IN_TORCH)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WITHIN)
    loaded, others = json.loads(done.stdout)
    assert loaded == [] and "torch.distributed.fsdp" in others


@pytest.mark.nightly("a minute of processor time: each module of torch is imported; they change with torch alone")
def test_other_modules_of_torch_import_little() -> None:
    command = [sys.executable, "-c", _UNLISTED, "[]"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WITHIN)
    for name in set(json.loads(done.stdout)[1]) - {*NOT_IN_TORCH}:
        text = f"import sys, torch; before = len(sys.modules)\ntry:\n  import {name}\nexcept BaseException: sys.exit(0)"
        run = [sys.executable, "-W", "ignore", "-c", f"{text}\nprint(len(sys.modules) - before)"]
        said = subprocess.run(run, capture_output=True, text=True, timeout=WITHIN, check=False).stdout.split()
        assert not said or int(said[-1]) < 200, name


def test_modules_that_torch_does_not_import_are_worth_a_zygote(tmp_path: Path) -> None:
    for text, leads in (
        ("import torch\nimport torch.distributed.checkpoint as dcp", True),
        ("from torch.distributed import fsdp, device_mesh", True),
        ("from torch.distributed.fsdp import fully_shard", True),
        ("import torch.nn as nn\nfrom torch.utils.data import DataLoader", False),
        ("import torch.distributed as dist", False),
    ):
        (tmp_path / "prog.py").write_text(text)
        found = leading_statements("script", "prog.py", str(tmp_path), ("torch",)).statements
        assert bool(found) == leads, text


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
    assert [lines[1:] for lines in lines_of(leading_statements("script", "prog.py", str(tmp_path), ("torch",)))] == [
        (3, "import os"),
        (3, "import torch as t"),
        (4, "os.environ['HF_HOME'] = '/a'"),
        (6, "os.environ.setdefault('B', 'c')"),
        (7, "from transformers import Trainer, pipeline as p"),
    ]
    (tmp_path / "prog.py").write_text(text.replace("transformers", "torch"))
    assert leading_statements("script", "prog.py", str(tmp_path), ("torch",)).statements == ()


@pytest.mark.parametrize(
    "text", ["import (", "import sklearn\0", "(" * 10_000, ""], ids=["", "null", "nested", "empty"]
)
def test_what_is_no_program_has_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(text)
    assert leading_statements("script", "prog.py", str(tmp_path), ()).statements == ()
    assert leading_statements("script", str(tmp_path), "/", ()).statements == ()
    assert leading_statements("module", "nosuch", str(tmp_path), ()).statements == ()
    assert leading_statements("code", "import sklearn", "/", ()).statements == ()


def test_objects_are_not_asked_whether_they_are_generators() -> None:
    class Lazy:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

    generators = Generators()
    try:
        assert not generators.is_renewed(Lazy())
    finally:
        generators.stop()
