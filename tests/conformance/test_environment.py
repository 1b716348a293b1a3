# SPDX-License-Identifier: BSD-3-Clause
"""The whole environment of every rank."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import pytest

from tests.conformance.differences import Difference, differs
from tests.conformance.launchers import Launchers, Outcome

DIFFERENT = {
    "MASTER_ADDR": Difference.MASTER_ADDR,
    "MASTER_PORT": Difference.MASTER_PORT,
    "MONARCH_FILE_LOG": Difference.MONARCH_LOG,
    "MONARCH_LOG_SUFFIX": Difference.MONARCH_LOG,
    "MONARCH_CHECKPOINTS": Difference.THIS_JOB,
    "MONARCH_STEPS": Difference.THIS_JOB,
    "MONARCH_THIS_JOB": Difference.THIS_JOB,
    "TORCHELASTIC_ERROR_FILE": Difference.ERROR_FILE,
    "TORCHELASTIC_RUN_ID": Difference.RUN_ID,
}
"""Variables with another value, or that torchrun does not set."""

PRELOADED = ("defaults", "odd ones")
"""Cases in which ranks get their environment in an interpreter that has imported torch: all others in a fresh one."""

Environ = dict[str, str | None]

CASES: dict[str, tuple[tuple[str, ...], Environ, int]] = {
    "defaults": ((), {"OMP_NUM_THREADS": None}, 2),
    "one rank": ((), {"OMP_NUM_THREADS": None}, 1),
    "OMP_NUM_THREADS set": ((), {"OMP_NUM_THREADS": "3"}, 2),
    "OMP_NUM_THREADS empty": ((), {"OMP_NUM_THREADS": ""}, 1),
    "role": (("--role", "a trainer"), {}, 1),
    "standalone": (("--standalone",), {}, 1),
    "c10d rendezvous": (("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "j"), {}, 1),
    "log dir": (("--log-dir", "logs", "--tee", "3"), {}, 1),
    "virtual local rank": (("--virtual-local-rank",), {"CUDA_VISIBLE_DEVICES": None}, 2),
    "virtual local rank of devices": (("--virtual-local-rank",), {"CUDA_VISIBLE_DEVICES": "3, 5"}, 2),
    "devices": ((), {"CUDA_VISIBLE_DEVICES": "5,3"}, 1),
    "PET variables": ((), {"PET_ROLE": "pet", "PET_RDZV_ID": "pet-id", "PET_SHUTDOWN_TIMEOUT": "3"}, 1),
    "NCCL error handling": ((), {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, 1),
    "what another launcher left": (
        (),
        {
            "RANK": "7",
            "LOCAL_RANK": "7",
            "WORLD_SIZE": "9",
            "MASTER_ADDR": "example.org",
            "MASTER_PORT": "1",
            "TORCHELASTIC_RESTART_COUNT": "4",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM",
        },
        1,
    ),
    "Python's own": ((), {"PYTHONHASHSEED": "3", "PYTHONPATH": "a:b", "PYTHONWARNINGS": "default"}, 1),
    "odd ones": ((), {"NOT_UTF8": "\udcff", "LINES": "a\nb", "EMPTY": "", "a-b.c": "=", "MONARCH_MINE": "1"}, 1),
}


def environments(outcome: Outcome) -> list[dict[str, str]]:
    assert outcome.code == 0, outcome.err.decode()
    return [outcome.reports[rank] for rank in sorted(outcome.reports)]


@differs(Difference.STORE)
@pytest.mark.parametrize("case", CASES)
def test_environment(case: str, both: Launchers) -> None:
    options, environ, nproc = CASES[case]
    preload = "torch" if case in PRELOADED else ""
    theirs, ours = both.script("report(dict(os.environ))", *options, nproc=nproc, environ=environ, preload=preload)
    expected = set(DIFFERENT) - ({"TORCHELASTIC_RUN_ID"} if "--rdzv-endpoint" in options else set())
    if not preload:
        expected.add("TORCHELASTIC_USE_AGENT_STORE")
    for their, our in zip(environments(theirs), environments(ours), strict=True):
        served = (their["TORCHELASTIC_USE_AGENT_STORE"], our["TORCHELASTIC_USE_AGENT_STORE"])
        assert served == ("True", "True" if preload else "False")
        different = {name for name in {*their, *our} if their.get(name) != our.get(name)}
        assert different == expected, {name: (their.get(name), our.get(name)) for name in different ^ expected}


def test_number_of_ranks_from_the_environment(both: Launchers) -> None:
    files = {"prog.py": "import os; open(os.environ['RANK'] + '.' + os.environ['WORLD_SIZE'], 'w')"}
    theirs, ours = both(["prog.py"], files, environ={"PET_NPROC_PER_NODE": "2"}, preload="")
    assert set(theirs.files) == set(ours.files) == {"prog.py", "0.2", "1.2"}


def test_more_ranks_than_devices(both: Launchers) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "3"}
    theirs, ours = both.script("mark('ran')", "--virtual-local-rank", environ=environ, preload="")
    assert (theirs.code, theirs.marks()) == (ours.code, ours.marks()) == (1, [])
    for outcome in (theirs, ours):
        assert b"CUDA_VISIBLE_DEVICES=3" in outcome.err


@differs(Difference.NUMA)
@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="compares what is said without a GPU")
def test_ranks_bound_to_the_cpus_near_no_gpu(both: Launchers) -> None:
    theirs, ours = both.script("mark('ran')", "--numa-binding", "socket")
    assert (theirs.code, theirs.marks()) == (ours.code, ours.marks()) == (1, [])
    last = theirs.err.decode().strip().splitlines()[-1]
    assert re.search("CUDA|NVIDIA|No accelerator", last) and last in ours.err.decode()
    assert b"Traceback" in theirs.err and b"Traceback" not in ours.err


@differs(Difference.RELATIVE)
def test_error_file_in_a_relative_folder(both: Launchers) -> None:
    body = "path = os.environ['TORCHELASTIC_ERROR_FILE']; report([os.path.basename(path), os.path.isabs(path)])"
    theirs, ours = both.script(body, "--log-dir", "logs", preload="")
    # torchrun makes the folder by tempfile.mkdtemp, whose path is absolute from Python 3.12 on.
    assert theirs.reports == dict.fromkeys(range(2), ["error.json", sys.version_info >= (3, 12)])
    assert ours.reports == dict.fromkeys(range(2), ["error.json", True])


def _values(outcome: Outcome, name: str) -> Any:
    return [environ.get(name) for environ in environments(outcome)]


def test_logs_switched_off(both: Launchers) -> None:
    theirs, ours = both.script("report(dict(os.environ))", "--log-dir", "/dev/null", preload="")
    assert _values(theirs, "TORCHELASTIC_ERROR_FILE") == ["", ""]
    assert _values(ours, "TORCHELASTIC_ERROR_FILE") == ["", ""]
