# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What happens in a rank before its program: start-up files of Python, and variables that torch reads when imported."""

from __future__ import annotations

import pytest

from tests.conformance.differences import Difference
from tests.conformance.launchers import LOGS, Launchers

STARTUP = {
    "lib/sitecustomize.py": """
import os, sys
sys.startup = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")][:2]
""",
    "prog.py": """
import json, os, sys
with open(os.path.join(os.environ["OBSERVED"], os.environ["RANK"]), "w") as file:
    json.dump(sys.startup, file)
""",
}


@pytest.mark.parametrize("preload", ["none", "json"], ids=["", "json"])
def test_startup_files(preload: str, both: Launchers) -> None:
    words = ["--nproc-per-node", "2", "prog.py"]
    theirs, ours = both(words, STARTUP, environ={"PYTHONPATH": "lib"}, preload=preload)
    assert theirs.code == ours.code == 0, ours.err.decode()
    assert theirs.reports == {0: ["0", "2"], 1: ["1", "2"]}
    if preload != "none" and both.ranks == "fork":
        assert Difference.STARTUP_FILES
        assert ours.reports == {0: [None, None], 1: [None, None]}
    else:
        assert ours.reports == theirs.reports


SETS = """
    os.environ["OMP_NUM_THREADS"] = "3"
    os.environ["OMP_NUM_THREADS"] = "2"
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    import torch
    report(torch.get_num_threads())
"""


@pytest.mark.parametrize("preload", ["none", "torch"], ids=["", "torch"])
def test_variables_that_torch_reads_when_it_is_imported(preload: str, both: Launchers) -> None:
    theirs, ours = both.script(SETS, *LOGS, environ={"OMP_NUM_THREADS": "1"}, preload=preload)
    assert theirs.code == ours.code == 0, ours.err.decode()
    assert theirs.reports == {0: 2, 1: 2}
    assert ours.log(1, "stderr.log") == theirs.log(1, "stderr.log") == b""
    said = (ours.log(0, "stderr.log") or b"").decode().splitlines()
    if preload != "none" and both.ranks == "fork":
        assert Difference.EARLY_VARIABLES
        assert ours.reports == {0: 1, 1: 1}
        assert len(said) == 1
        assert said[0].startswith("warning: OMP_NUM_THREADS is set by the program, which has no effect on torch")
    else:
        assert ours.reports == theirs.reports
        assert said == []


REGISTERS = """
import ctypes
libc = ctypes.CDLL(None)
getattr(libc, "__cxa_atexit")(ctypes.cast(libc.puts, ctypes.c_void_p), b"destroyed", None)
"""


def test_destructors_of_preloaded_libraries(both: Launchers) -> None:
    theirs, ours = both.script("import mod", *LOGS, files={"mod.py": REGISTERS}, preload="mod")
    assert theirs.code == ours.code == 0, ours.err.decode()
    assert theirs.log(1, "stdout.log") == b"destroyed\n"
    if both.ranks == "fork":
        assert Difference.DESTRUCTORS
        assert ours.log(1, "stdout.log") == b""
    else:
        assert ours.log(1, "stdout.log") == b"destroyed\n"
