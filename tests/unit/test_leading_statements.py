# SPDX-License-Identifier: BSD-3-Clause
"""Which first statements of a program are executed before its ranks are forked."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchx_monarch.host.ranks.leading_statements import leading_statements

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
    assert leading_statements("script", "prog.py", str(tmp_path), ()) == ((1, "import sklearn"),)


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
    assert leading_statements("script", "prog.py", str(tmp_path), ("torch",)) == (
        (3, "import os"),
        (3, "import torch as t"),
        (4, "os.environ['HF_HOME'] = '/a'"),
        (6, "os.environ.setdefault('B', 'c')"),
        (7, "from transformers import Trainer, pipeline as p"),
    )
    (tmp_path / "prog.py").write_text(text.replace("transformers", "torch"))
    assert leading_statements("script", "prog.py", str(tmp_path), ("torch",)) == ()


def test_a_module_has_leading_statements_if_its_packages_are_empty(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    init = tmp_path / "package" / "__init__.py"
    (tmp_path / "package" / "prog.py").write_text("import sklearn")
    for text, found in (("", ((1, "import sklearn"),)), ("import mine", ())):
        init.write_text(text)
        assert leading_statements("module", "package.prog", str(tmp_path), ()) == found
    assert leading_statements("module", "nosuch", str(tmp_path), ()) == ()


@pytest.mark.parametrize(
    "text", ["import (", "import sklearn\0", "(" * 10_000, ""], ids=["", "null", "nested", "empty"]
)
def test_what_is_no_program_has_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "prog.py").write_text(text)
    assert leading_statements("script", "prog.py", str(tmp_path), ()) == ()
    assert leading_statements("script", str(tmp_path), "/", ()) == ()
    assert leading_statements("code", "import sklearn", "/", ()) == ()
