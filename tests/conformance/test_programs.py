# SPDX-License-Identifier: BSD-3-Clause
"""Every way to name a program, and programs that cannot be run."""

from __future__ import annotations

import io
import os
import py_compile
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.differences import Difference, differs
from tests.conformance.launchers import LOGS, REPORT, Launchers

OBSERVE = (
    REPORT
    + """
import importlib.util, inspect, pickle
module = sys.modules["__main__"]
class Thing: pass
spec = module.__spec__
report({
    "argv": sys.argv,
    "original argv": sys.orig_argv,
    "cwd": os.getcwd(),
    "path": sys.path,
    "safe": getattr(sys.flags, "safe_path", None),
    "flags": repr(sys.flags),
    "main": {n: repr(getattr(module, n, "absent")) for n in ("__name__", "__file__", "__package__", "__cached__",
        "__doc__", "__annotations__", "__path__")},
    "spec": spec and [spec.name, spec.origin, spec.parent, spec.cached, spec.has_location],
    "loader": [type(module.__loader__).__name__, getattr(module.__loader__, "path", None)],
    "name": __name__,
    "thing": [Thing.__module__, module.Thing is Thing, type(pickle.loads(pickle.dumps(Thing()))) is Thing],
    "code": sys._getframe().f_code.co_filename,
    "imported": [n for n in sys.modules if n.startswith(("pkg", "beside"))],
    "beside": importlib.util.find_spec("beside") is not None,
    "json": json.__file__,
})
"""
)


def _zipped(**files: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, text in files.items():
            # Of no time, and so the same in every run.
            file.writestr(zipfile.ZipInfo(name.replace("__dot__", ".")), text)
    return buffer.getvalue()


FILES: dict[str, str | bytes] = {
    "prog.py": OBSERVE,
    "sub dir/prog.py": OBSERVE,
    "no_suffix": OBSERVE,
    "prog.sh.txt": OBSERVE,
    "é.py": OBSERVE,
    "crlf.py": OBSERVE.replace("\n", "\r\n"),
    "bom.py": b"\xef\xbb\xbf" + OBSERVE.encode(),
    "latin.py": b"# coding: latin-1\nword = '\xe9'\nassert len(word) == 1\n" + OBSERVE.encode(),
    "shebang.py": "#!/usr/bin/env nonsense\n'the docstring'\n" + OBSERVE,
    "future.py": "'doc'\nfrom __future__ import annotations\nx: Undefined = 3\n" + OBSERVE,
    "annotated.py": "x: int = 3\n" + OBSERVE,
    "-dash.py": OBSERVE,
    "folder/__main__.py": OBSERVE,
    "folder/beside.py": "",
    "app.zip": _zipped(__main____dot__py=OBSERVE, beside__dot__py=""),
    "app.pyz": b"#!/usr/bin/env python3\n" + _zipped(__main____dot__py=OBSERVE),
    "app.bin": _zipped(__main____dot__py=OBSERVE),
    "pkg/__init__.py": "",
    "pkg/mod.py": OBSERVE,
    "pkg/of0.py": OBSERVE,
    "of 0/prog.py": OBSERVE,
    "pkg/deep/__init__.py": "",
    "pkg/deep/__main__.py": OBSERVE,
    "space/mod.py": OBSERVE,
    "lib/beside.py": "",
    "lib/libmod.py": OBSERVE,
    "shadow/random.py": "raise ImportError('the wrong random')",
    "shadow/prog.py": OBSERVE,
}
EXECUTABLE = f"#!{sys.executable}\n"


def _prepare(work: Path) -> None:
    (work / "link.py").symlink_to("sub dir/prog.py")
    (work / "linked").symlink_to("sub dir")
    (work / "folder link").symlink_to("folder")
    (work / "tool").write_text(EXECUTABLE + OBSERVE)
    (work / "tool").chmod(0o755)
    py_compile.compile(str(work / "prog.py"), str(work / "compiled.pyc"), doraise=True)


GOOD: dict[str, tuple[list[str], dict[str, str | None]]] = {
    "script": (["prog.py"], {}),
    "script by ./": (["./prog.py"], {}),
    "script in a folder": (["sub dir/prog.py"], {}),
    "script by way of ..": (["sub dir/../prog.py"], {}),
    "script by its full path": (["{work}/prog.py"], {}),
    "script without a suffix": (["no_suffix"], {}),
    "script with another suffix": (["prog.sh.txt"], {}),
    "script with an accent": (["é.py"], {}),
    "script with Windows line ends": (["crlf.py"], {}),
    "script with a byte order mark": (["bom.py"], {}),
    "script in Latin-1": (["latin.py"], {}),
    "script with a shebang": (["shebang.py"], {}),
    "script with a future import": (["future.py"], {}),
    "script with annotations": (["annotated.py"], {}),
    "script after --": (["--", "prog.py", "--", "-x"], {}),
    "script by a link": (["link.py"], {}),
    "script in a linked folder": (["linked/prog.py"], {}),
    "compiled script": (["compiled.pyc"], {}),
    "script in a folder that shadows the library": (["shadow/prog.py"], {}),
    "folder": (["folder"], {}),
    "folder with a slash": (["./folder/"], {}),
    "folder by a link": (["folder link"], {}),
    "folder with PYTHONSAFEPATH": (["folder"], {"PYTHONSAFEPATH": "1"}),
    "zip": (["app.zip"], {}),
    "zipapp": (["app.pyz"], {}),
    "zip of any name": (["app.bin"], {}),
    "module": (["-m", "pkg.mod"], {}),
    "module of a namespace": (["-m", "space.mod"], {}),
    "package": (["--module", "pkg.deep", "-m", "x"], {}),
    "module on PYTHONPATH": (["-m", "libmod"], {"PYTHONPATH": "lib"}),
    "script with PYTHONPATH": (["prog.py"], {"PYTHONPATH": "lib:{work}/pkg"}),
    "script with PYTHONSAFEPATH": (["prog.py"], {"PYTHONSAFEPATH": "1"}),
    "module with PYTHONSAFEPATH": (["-m", "libmod"], {"PYTHONSAFEPATH": "1", "PYTHONPATH": "lib"}),
    "macro": (["prog.py", "x=${local_rank}", "$local_rank", "$$", "${other}", "$(pwd)", "%d"], {}),
    "macro in a script's name": (["of ${local_rank}/prog.py", "$$"], {}),
    "macro in a module's name": (["-m", "pkg.of${local_rank}"], {}),
    "interpreter of choice": (["prog.py"], {"PYTHON_EXEC": "{work}/tool-python"}),
    "PYTHONOPTIMIZE": (["prog.py"], {"PYTHONOPTIMIZE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}),
    "no python": (["--no-python", "./tool", "a b", "${local_rank}"], {}),
    "no python, by PATH": (["--no-python", "python", "-B", "prog.py", "x"], {}),
}


@pytest.mark.parametrize("case", GOOD)
def test_program(case: str, both: Launchers, tmp_path: Path) -> None:
    words, environ = GOOD[case]
    work = str(tmp_path / "work")

    def prepare(folder: Path) -> None:
        _prepare(folder)
        # No link: beside it Python finds no pyvenv.cfg, and the folders that it then searches differ by distribution.
        tool = folder / "tool-python"
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        tool.chmod(0o755)

    theirs, ours = both(
        [word.replace("{work}", work) for word in words],
        FILES,
        environ={name: value and value.replace("{work}", work) for name, value in environ.items()},
        prepare=prepare,
        preload="",
    )
    assert theirs.code == 0, theirs.err.decode()
    assert ours.code == 0, ours.err.decode()
    assert ours.reports == theirs.reports != {}
    assert ours.files.keys() == theirs.files.keys()


def _unreadable(work: Path) -> None:
    (work / "secret.py").write_text("")
    (work / "secret.py").chmod(0)


BAD: dict[str, tuple[list[str], Callable[[Path], None] | None]] = {
    "syntax error": (["syntax.py"], None),
    "tabs": (["tabs.py"], None),
    "missing module": (["-m", "nosuch"], None),
    "missing package": (["-m", "no.such"], None),
    "package without __main__": (["-m", "pkg"], None),
    "folder without __main__": (["empty"], None),
    "module that fails to import": (["-m", "broken.mod"], None),
    "syntax error in an import": (["imports.py"], None),
    "unreadable script": (["secret.py"], _unreadable),
}

BAD_FILES: dict[str, str | bytes] = {
    "syntax.py": "x = = 1\n",
    "tabs.py": "if 1:\n\tx = 1\n        y = 2\n",
    "pkg/__init__.py": "",
    "empty/other.py": "",
    "broken/__init__.py": "import nosuchmodule\n",
    "broken/mod.py": "",
    "imports.py": "import syntax\n",
}


@pytest.mark.parametrize("case", BAD)
def test_program_that_cannot_run(case: str, both: Launchers) -> None:
    words, prepare = BAD[case]
    if case == "unreadable script" and os.getuid() == 0:
        pytest.skip("root may read everything")
    theirs, ours = both([*LOGS, *words], BAD_FILES, prepare=prepare, preload="")
    assert ours.code == theirs.rank_code() > 0
    assert ours.log(0, "stderr.log") == theirs.log(0, "stderr.log") != b""


# Not a null byte: releases of CPython differ on it (3.11.2 ends the source there, 3.11.4 refuses it).
NO_TEXT: dict[str, str | bytes] = {
    "not UTF-8": b"x = '\xff'\n",
    "unknown coding": "# coding: nonsense\n",
}


@differs(Difference.NO_TEXT)
@pytest.mark.parametrize("case", NO_TEXT)
def test_script_that_is_no_text(case: str, both: Launchers) -> None:
    theirs, ours = both([*LOGS, "prog.py"], {"prog.py": NO_TEXT[case]}, preload="")
    assert ours.code == theirs.rank_code() == 1
    for outcome in (theirs, ours):
        assert b"SyntaxError: " in (outcome.log(0, "stderr.log") or b"")
    assert ours.log(0, "stderr.log") != theirs.log(0, "stderr.log")


@differs(Difference.MISSING_SCRIPT)
@pytest.mark.parametrize("script", ["nosuch.py", "no/such.py"])
def test_script_that_is_missing(script: str, both: Launchers) -> None:
    theirs, ours = both([*LOGS, "--nproc-per-node", "2", script], {}, preload="")
    assert ours.code == theirs.rank_code() == 2
    assert b"can't open file '%s/%s'" % (os.getcwdb(), script.encode()) in (theirs.log(0, "stderr.log") or b"")
    assert b"can't open file '%s/%s'" % (os.getcwdb(), script.encode()) in ours.err
    assert ours.log(0, "stderr.log") is None


def test_as_many_executables_as_cpus(both: Launchers) -> None:
    words = ["--nproc-per-node", "cpu", "--no-python", "sh", "-c", "touch $RANK.of.$WORLD_SIZE"]
    theirs, ours = both(words, {}, preload="", live=True)
    assert theirs.code == ours.code == 0
    assert ours.files == theirs.files != {}


@differs(Difference.EXECUTABLE)
@pytest.mark.parametrize(("program", "code"), [("./nosuch", 127), ("./syntax.py", 126)])
def test_executable_that_cannot_run(program: str, code: int, both: Launchers) -> None:
    theirs, ours = both([*LOGS, "--no-python", program], BAD_FILES, preload="")
    assert (theirs.code, ours.code) == (1, code)
    assert f"'{program}'" in theirs.err.decode().splitlines()[-1]
    assert f"cannot execute '{program}'" in (ours.log(0, "stderr.log") or b"").decode()
