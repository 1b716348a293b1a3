# SPDX-License-Identifier: BSD-3-Clause
"""What happens in a rank before its program: start-up files of Python, and variables that torch reads when imported."""

from __future__ import annotations

import textwrap

import pytest

from tests.conformance.differences import Difference, differs
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


PRELOADS = [pytest.param("none", marks=pytest.mark.nightly("ranks import torch as under torchrun")), "torch"]


@differs(Difference.STARTUP_FILES)
@pytest.mark.parametrize("preload", ["none", "json"], ids=["", "json"])
def test_startup_files(preload: str, both: Launchers) -> None:
    words = ["--nproc-per-node", "2", "prog.py"]
    theirs, ours = both(words, STARTUP, environ={"PYTHONPATH": "lib"}, preload=preload)
    assert theirs.code == ours.code == 0, ours.err.decode()
    assert theirs.reports == {0: ["0", "2"], 1: ["1", "2"]}
    if preload != "none" and both.ranks == "fork":
        assert ours.reports == {0: [None, None], 1: [None, None]}
    else:
        assert ours.reports == theirs.reports


AT_FORK = """
import os, sys
sys.forks = []
os.register_at_fork(after_in_child=lambda: sys.forks.append(os.getpid()))
"""


@differs(Difference.AT_FORK)
def test_functions_that_a_startup_file_registers_for_forks(both: Launchers) -> None:
    files, environ = {"lib/sitecustomize.py": AT_FORK}, {"PYTHONPATH": "lib"}
    theirs, ours = both.script("report(bool(sys.forks))", files=files, environ=environ, preload="", live=True)
    assert theirs.reports == {0: False, 1: False}
    assert set(ours.reports.values()) == {both.ranks == "fork"}


SETS = """
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    import numpy
    seen = ["torch" in sys.modules]
    os.environ |= {"OMP_NUM_THREADS": "2", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_LOGS": "+dynamo"}
    from torch import distributed
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"}
    import logging, threadpoolctl, torch
    seen += [torch.get_num_threads(), *sorted({each["num_threads"] for each in threadpoolctl.threadpool_info()})]
    report([*seen, distributed.get_debug_level().name, logging.getLogger("torch._dynamo").level])
"""


@pytest.mark.parametrize("preload", PRELOADS, ids=["", "torch"])
def test_variables_that_are_set_before_torch_is_imported(preload: str, both: Launchers) -> None:
    theirs, ours = both.script(SETS, *LOGS, environ={"OMP_NUM_THREADS": "1"}, preload=preload)
    assert theirs.code == ours.code == 0, ours.err.decode()
    assert ours.reports == theirs.reports != {}
    for rank in (0, 1):
        assert ours.log(rank, "stderr.log") == theirs.log(rank, "stderr.log") == b""


@pytest.mark.parametrize("preload", PRELOADS, ids=["", "torch"])
def test_processors_that_are_chosen_before_torch_is_imported(preload: str, both: Launchers) -> None:
    body = """
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import torch, threadpoolctl
        report([torch.get_num_threads(), sorted({each["num_threads"] for each in threadpoolctl.threadpool_info()})])
    """
    theirs, ours = both.script(body, *LOGS, nproc=1, environ={"OMP_NUM_THREADS": None}, preload=preload)
    assert theirs.reports == ours.reports == {0: [1, [1]]}, ours.err.decode()


@differs(Difference.EARLY_VARIABLES)
@pytest.mark.parametrize("preload", PRELOADS, ids=["", "torch"])
def test_a_variable_that_only_an_import_of_torch_reads(preload: str, both: Launchers) -> None:
    body = """
        os.environ["PYTORCH_JIT"] = "0"
        import torch.jit
        report([torch.jit._state._enabled.enabled])
    """
    theirs, ours = both.script(body, *LOGS, preload=preload)
    assert theirs.code == ours.code == 0, ours.err.decode()
    assert theirs.reports == {0: [False], 1: [False]}
    assert ours.log(1, "stderr.log") == theirs.log(1, "stderr.log") == b""
    said = (ours.log(0, "stderr.log") or b"").decode().splitlines()
    if preload != "none" and both.ranks == "fork":
        assert ours.reports == {0: [True], 1: [True]}
        assert len(said) == 1
        assert said[0].startswith("warning: PYTORCH_JIT is set by the program, which has no effect on torch")
    else:
        assert ours.reports == theirs.reports
        assert said == []


TQDM = """
    import os
    disabled = os.environ.get("TQDM_DISABLE")
    def tqdm(): return disabled
"""


@pytest.mark.parametrize("preload", PRELOADS, ids=["", "torch"])
def test_a_module_that_torch_imports(preload: str, both: Launchers) -> None:
    body = """
        os.environ["TQDM_DISABLE"] = "1"
        seen = sorted({"torch", "numpy", "tqdm"} & set(sys.modules))
        import torch, tqdm
        report([seen, tqdm.disabled, torch.hub.tqdm(), [torch.__spec__.origin, type(torch.__loader__).__name__]])
    """
    files = {"lib/tqdm/__init__.py": textwrap.dedent(TQDM)}
    theirs, ours = both.script(body, *LOGS, files=files, environ={"PYTHONPATH": "lib"}, preload=preload)
    assert theirs.code == ours.code == 0, ours.err.decode()
    assert ours.reports == theirs.reports
    assert theirs.reports[0][:3] == [[], "1", "1"]


REGISTERS = """
import ctypes
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
text = ctypes.c_void_p(libc.strdup(b"destroyed"))
getattr(libc, "__cxa_atexit")(ctypes.cast(libc.puts, ctypes.c_void_p), text, None)
"""


def test_destructors_of_preloaded_libraries(both: Launchers) -> None:
    theirs, ours = both.script("import mod", *LOGS, files={"mod.py": REGISTERS}, preload="mod")
    assert theirs.code == ours.code == 0, ours.err.decode()
    assert ours.log(1, "stdout.log") == theirs.log(1, "stdout.log") == b"destroyed\n"
