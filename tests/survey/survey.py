# SPDX-License-Identifier: BSD-3-Clause
"""Examine whether ranks may share an import: compare the values that its modules hold in interpreters and in ranks."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.local.live import Live

_VALUES = Path(__file__).with_name("values.py").read_text()

_TIMEOUT = 600.0
"""Seconds that one interpreter, or one run, may take."""

CONFIGURATION = {
    "home/.config/matplotlib/matplotlibrc": "lines.linewidth: {}\n",
    "home/.keras/keras.json": '{{"backend": "torch", "epsilon": 1e-{}}}',
    "home/.config/dask/survey.yaml": "survey: {}\n",
    "home/.config/fsspec/survey.json": '{{"file": {{"survey": {}}}}}',
    "home/.config/Ultralytics/persistent_cache.json": '{{"survey": {}}}',
    "home/.cache/huggingface/token": "hf_{}",
    "home/.cache/huggingface/accelerate/default_config.yaml": "num_processes: {}\n",
    "home/.aws/config": "[default]\nregion = region-{}\n",
    "home/.config/survey.ini": "{}",
    "work/matplotlibrc": "lines.markersize: {}\n",
    "work/.numba_config.yaml": "opt: {}\n",
    "work/.env": "SURVEY={}\n",
    "work/wandb/settings": "[default]\nproject = project{}\n",
    "work/survey.ini": "{}",
}
"""Files that packages read when they are imported, with a number in each. Those in ``work`` exist later."""

ACCEPTED = {
    r"\._pid$": "fsspec compares it with the id of the process",
    r"\._lastpid$": "multiprocessing compares it with the id of the process",
    r"\._rng_pid$": "tempfile compares it with the id of the process",
    r"^filelock\..*\.process_identity": "filelock compares it with the id of the process",
    r"^joblib\._multiprocessing_helpers\.name$": "the name of a semaphore that is closed at once",
    r"^numpy\.f2py\.rules\.": "the time in a comment of sources that f2py writes",
    r"^torch\.distributed\._composable\.contract\.\w+_KEY$": "names of attributes, unlike those of any program",
    r"\.urlsplit<": "a cache that jsonschema fills in the order of a table that has none",
    r"\b(_base_)?dummy_index$": "numbers of sympy's symbols, which matter to ranks that exchange such symbols alone",
}
"""Values that ranks may share although interpreters do not: patterns of their paths, and why."""


@dataclasses.dataclass
class Finding:
    """What the survey has found of one statement.

    Attributes:
        error: why an interpreter cannot execute it; empty if it can.
        unshared: why ranks do not share it, as the host says; empty if they share it.
        seconds: processor time that sharing it spares each rank.
        wrong: the values that a rank has and an interpreter of its own would not have: by path what two interpreters
            have, and then what the ranks of two runs have.
    """

    error: str = ""
    unshared: str = ""
    seconds: float = 0.0
    wrong: dict[str, list[str | None]] = dataclasses.field(default_factory=dict)


def examine(python: str, statement: str, options: Sequence[str] = ("--preload", "auto")) -> Finding:
    """Examine one import.

    Two interpreters that differ in process, time, rank and configuration execute it, and then two ranks of each of two
    runs, between which the configuration changes. A value that differs between the interpreters must differ between two
    ranks, or else be, in each run, that of an interpreter with the same configuration.

    Args:
        python: the interpreter of the environment in which the package is installed.
        statement: the import.
        options: of the host process.
    """
    folder = Path(tempfile.mkdtemp(prefix="survey", dir="/tmp"))  # short, as paths of sockets must be
    try:
        return _Examination(folder, python, statement).finding(options)
    except _StatementError as error:
        return Finding(error=str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _StatementError(Exception):
    pass


class _Examination:
    def __init__(self, folder: Path, python: str, statement: str) -> None:
        self._folder = folder
        self._python = python
        self._statement = statement
        self._home, self._work = folder / "home", folder / "work"
        self._environ = {
            **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
            "HOME": str(self._home),
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
        }

    def finding(self, options: Sequence[str]) -> Finding:
        """Execute the statement everywhere; return what has been found."""
        self._configure(1)
        self._work.mkdir()
        for name, statement in {"bare": "", "program": self._statement}.items():
            (self._folder / f"{name}.py").write_text(f"{statement}\n{_VALUES}")
        self._want([])
        bare = self._interpreter("bare", "bare", 0)
        # A package may write files when it is imported for the first time.
        modules = sorted({*self._interpreter("program", "warm", 0)["modules"]} - {*bare["modules"], "__mp_main__"})
        self._want(modules)
        first = self._interpreter("program", "first", 0)
        self._configure(2)
        second = self._interpreter("program", "second", 1)
        values = [first["values"], second["values"]]
        differing = [path for path in {**values[0], **values[1]} if values[0].get(path) != values[1].get(path)]
        self._want(modules, differing)
        self._configure(1)
        ranks, unshared = self._runs(options)
        if unshared:
            return Finding(unshared=unshared)
        # A program that imports torch is spared that in any case.
        without = _seconds_of_torch(self._python) if "torch" in modules else bare["seconds"]
        spared = min(first["seconds"], second["seconds"]) - without - max(rank["seconds"] for rank in ranks)
        held = {path: [each.get(path) for each in [*values, *(rank["values"] for rank in ranks)]] for path in differing}
        return Finding(seconds=max(0.0, spared), wrong=_wrong(held))

    def _want(self, modules: Sequence[str], paths: Sequence[str] | None = None) -> None:
        (self._folder / "wanted.json").write_text(json.dumps({"modules": modules, "paths": paths}))

    def _configure(self, version: int) -> None:
        for name, text in CONFIGURATION.items():
            path = self._folder / name
            if version == 1 and name.startswith("work/"):
                path.unlink(missing_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(version))

    def _interpreter(self, program: str, output: str, rank: int) -> dict[str, Any]:
        """Execute a program in an interpreter of its own, where addresses are the same each time."""
        environ = {**self._environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        words = ["setarch", "-R", self._python, "-u", f"{self._folder}/{program}.py", f"{self._folder}/{output}"]
        done = subprocess.run(
            words,
            env=environ,
            cwd=self._work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
        if done.returncode:
            raise _StatementError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        return self._read(output, rank)

    def _read(self, output: str, rank: int) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self._folder / f"{output}.{rank}").read_text())
        return result

    def _runs(self, options: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
        """Execute the statement in two ranks of two runs; return their values, and why they do not share it."""
        words = [self._python, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(self._folder / "program.py")]
        live = Live(self._folder, words, options=("--grace", "5", *options), environ=self._environ)
        ranks = []
        try:
            live.ready()
            for number in (1, 2):
                self._configure(number)
                result = live.run(*words, str(self._folder / f"run{number}"), cwd=str(self._work), timeout=_TIMEOUT)
                if result.exit_code:
                    raise _StatementError(f"a rank cannot execute it: {result}")
                ranks += [self._read(f"run{number}", rank) for rank in (0, 1)]
                found = [str(event.get("unshared", "")) for event in live.events() if event["kind"] == "ranks"][-1]
                if f" {self._statement}: " in found:
                    return [], found.partition(f" {self._statement}: ")[2]
        finally:
            live.kill()
        return ranks, ""


@functools.cache
def _seconds_of_torch(python: str) -> float:
    words = [python, "-c", "import torch, time; print(time.process_time())"]
    return float(subprocess.run(words, capture_output=True, check=True, timeout=_TIMEOUT).stdout)


def _wrong(held: Mapping[str, list[str | None]]) -> dict[str, list[str | None]]:
    """Return the values that are wrong, each by the shortest of its paths."""
    found: dict[tuple[str | None, ...], str] = {}
    reordered = _reordered(held)
    for path, values in held.items():
        if _is_right(values) or any(re.search(pattern, path) for pattern in ACCEPTED) or path in reordered:
            continue
        key = tuple(values)
        found[key] = min(found.get(key, path), path, key=len)
    return {path: list(values) for values, path in sorted(found.items(), key=lambda item: item[1])}


def _reordered(held: Mapping[str, list[str | None]]) -> set[str]:
    """Return the paths of elements of lists that differ in their order alone, which is that of a set of objects."""
    lists: dict[str, list[str]] = {}
    for path in held:
        if path.endswith("]"):
            lists.setdefault(path.rpartition("[")[0], []).append(path)
    same = (
        paths
        for paths in lists.values()
        if Counter(held[path][0] for path in paths) == Counter(held[path][1] for path in paths)
    )
    return {path for paths in same for path in paths}


def _is_right(values: Sequence[str | None]) -> bool:
    first, second, *ranks = values
    if ranks[0] != ranks[1] and ranks[2] != ranks[3]:
        return True
    return ranks[0] == ranks[1] == first and ranks[2] == ranks[3] == second
