# SPDX-License-Identifier: BSD-3-Clause
"""Functions that run on all ranks of a live allocation: what they return, what they raise, and what is too much."""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchx.runner import Runner
from torchx.specs import AppState

import torchx_monarch
from tests.local.live import Live
from torchx_monarch import ResultError, RunOptions, SPMDError, function

QUIET = RunOptions(output="none")


def test_each_rank_returns_a_value_on_each_of_two_hosts(live: Callable[..., Live]) -> None:
    hosts = live("torchrun", "--nnodes", "2", "--nproc-per-node", "2", "train.py", replicas=2)
    size = 1 << 20

    def train(lr: float, *, epochs: int) -> tuple[int, str, float, bytes]:
        rank = int(os.environ["RANK"])
        return rank, os.environ["WORLD_SIZE"], lr * epochs, bytes([rank]) * size

    expected = [(rank, "4", 0.5, bytes([rank]) * size) for rank in range(4)]
    assert hosts.job.run(train, 0.25, epochs=2) == expected
    assert hosts.job.run(train, 0.25, epochs=2) == expected
    options = RunOptions(env={"LR": "7"}, nproc=1, results="json")
    assert hosts.job.run(lambda: {"lr": os.environ["LR"]}, options=options) == [{"lr": "7"}, {"lr": "7"}]
    queued = RunOptions(queue=True, nproc=1)
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(hosts.job.run, lambda number=number: number, options=queued) for number in range(3)]
    assert [run.result() for run in runs] == [[0, 0], [1, 1], [2, 2]]
    first = hosts.job.runs()[0]
    assert first["state"] == "succeeded" and first["command"] == "function train"
    for replica in (0, 1):
        assert [path.name for path in (hosts.logs(replica) / "run_1").iterdir() if "value" in path.name] == []
        assert not (hosts.logs(replica) / "run_1" / "function").exists()
    assert hosts.end() == [0, 0]


def test_values_are_those_of_the_last_attempt(live: Callable[..., Live], tmp_path: Path) -> None:
    hosts = live("torchrun", "--nproc-per-node", "2", "--max-restarts", "1", "train.py")

    def train(returned: str) -> int:
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["RANK"] == "1":
            while not attempt and not os.path.exists(returned):
                pass
            assert attempt
        elif not attempt:
            atexit.register(lambda: open(returned, "w").close())
        return attempt

    assert hosts.job.run(train, str(tmp_path / "returned"), options=QUIET) == [1, 1]

    def leave(returned: str) -> int:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and os.environ["RANK"] == "0":
            os._exit(0)
        return train(returned)

    with pytest.raises(ResultError, match="no value of rank 0: it ended before the function returned") as raised:
        hosts.job.run(leave, str(tmp_path / "again"), options=QUIET)
    assert raised.value.values == {1: 1} and raised.value.result.attempts == 2
    assert hosts.end() == [0]


def test_the_root_causes_exception_is_raised(live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = live("torchrun", "--nproc-per-node", "3", "train.py")

    class DivergedError(ValueError):
        pass

    class LockedError(ValueError):
        def __init__(self, step: int, why: str) -> None:
            super().__init__(f"{why} at {step}")  # so that it cannot be made again of its args

    def fail(kind: type[Exception], *args: Any, held: bool = False) -> None:
        if os.environ["RANK"] == "1":
            error = kind(*args)
            if held:
                error.lock = threading.Lock()  # type: ignore[attr-defined]
            raise error
        threading.Event().wait()

    with pytest.raises(DivergedError, match="loss is nan") as raised:
        hosts.job.run(fail, DivergedError, "loss is nan", options=QUIET)
    cause = raised.value.__cause__
    assert isinstance(cause, SPMDError) and cause.result.cause == 1
    assert "rank 1 (local rank 1 on" in str(cause)
    first, here, *_, last = cause.tracebacks[1].splitlines()
    assert first.startswith("Traceback") and f'"{__file__}"' in here and last.endswith("DivergedError: loss is nan")
    json = RunOptions(output="none", results="json")
    calls: list[tuple[Any, ...]] = [
        (LockedError, 3, "locked"),
        (DivergedError, "locked at 3"),
        (ValueError, "locked at 3"),
    ]
    for args, held, options in zip(calls, (False, True, False), (QUIET, QUIET, json), strict=True):
        with pytest.raises(SPMDError, match=r"rank 1 .*\n.*\n(.*\n)*.*locked at 3"):
            hosts.job.run(fail, *args, held=held, options=options)
    with pytest.raises(SPMDError, match="rank 0 .* exited with code 7"):
        hosts.job.run(lambda: os._exit(7), options=RunOptions(nproc=1))
    with pytest.raises(ModuleNotFoundError, match="named 'nosuch'. Ranks import it from the workspace") as missing:
        hosts.job.run(print, _Executes("import nosuch"), options=RunOptions(nproc=1, output="none"))
    assert 'File "<string>", line 1, in <module>' in str(missing.value.__cause__)  # the line that imports it
    assert hosts.job.run(lambda: None) == [None] * 3
    monkeypatch.setattr("torchx_monarch.client.function.sys", SimpleNamespace(**{**vars(sys), "version_info": (3, 9)}))
    with pytest.raises(RuntimeError, match="Python 3.9 has sent this function: use it for the ranks, too"):
        hosts.job.run(lambda: None, options=QUIET)
    assert hosts.end() == [0]


class _Executes:
    """An object that executes code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, (self.code,)


def test_a_value_that_cannot_be_brought_leaves_the_others(live: Callable[..., Live]) -> None:
    hosts = live("torchrun", "--nproc-per-node", "2", "train.py")
    limit = function.MAX_VALUE_BYTES

    def give(what: str) -> Any:
        if os.environ["RANK"] == "1":
            return "fine"
        return {
            "generator": (_ for _ in ()),
            "large": bytes(limit),
            "unknown": _Executes("import nosuch"),
            "object": object,
        }[what]

    for what, encoding, why in (
        ("generator", "pickle", "it returned a generator that cannot be sent as a pickle: cannot pickle"),
        (
            "large",
            "pickle",
            "it returned a bytes of 16.0 MiB; the limit is 16 MiB. Save it to a file, and return the path",
        ),
        ("unknown", "pickle", "its value cannot be read: ModuleNotFoundError(\"No module named 'nosuch'\""),
        ("object", "json", "it returned a type that cannot be sent as JSON: Object of type type is not JSON"),
    ):
        with pytest.raises(ResultError) as raised:
            hosts.job.run(give, what, options=RunOptions(results=encoding))  # type: ignore[arg-type]
        assert f"has no value of rank 0: {why}" in str(raised.value)
        assert raised.value.values == {1: "fine"} and raised.value.missing.keys() == {0}
        assert pickle.loads(pickle.dumps(raised.value)).missing == raised.value.missing
    assert hosts.end() == [0]


def test_hostile_ranks_get_no_further_than_their_value(live: Callable[..., Live], tmp_path: Path) -> None:
    hosts = live("torchrun", "--nproc-per-node", "1", "train.py")
    victim = tmp_path / "victim"

    def forge(content: bytes | None, link: str, size: int = 0) -> None:
        path = os.path.join(os.path.dirname(os.environ["MONARCH_FUNCTION"]), "value_0")
        if content is None:
            os.symlink(link, path) if link else os.mkfifo(path)
        else:
            with open(path, "wb") as file:
                file.write(content + bytes(size))
        os._exit(0)

    harmful = b"pickle\n" + pickle.dumps(_Executes(f"open({str(victim)!r}, 'w')"))
    for content, link, size, why in (
        (harmful, "", 0, "it ended before the function returned"),
        (b"none\n\x1b[2Jgone", "", 0, r"it returned \x1b[2Jgone"),
        (b"json\n{", "", 0, "its value cannot be read"),
        (b"", "", 0, "it ended before"),
        (b"json\n", "", function.MAX_VALUE_BYTES + 100, "its host cannot read"),
        (None, "/etc/passwd", 0, "its host cannot read"),
        (None, "", 0, "its host cannot read"),
    ):
        with pytest.raises(ResultError) as raised:
            hosts.job.run(forge, content, link, size, options=RunOptions(results="json"))
        assert why in str(raised.value) and "\x1b" not in str(raised.value)
    assert not victim.exists()
    assert hosts.job.run(lambda: 3, options=RunOptions(results="json")) == [3]
    assert hosts.end() == [0]


def train(lr): ...  # type: ignore[no-untyped-def]


def test_bad_calls_are_refused_before_hosts_are_asked() -> None:
    job = torchx_monarch.SPMDJob("monarch_local://torchx/app")
    lock = threading.Lock()
    for run in (job.run, torchx_monarch.run):
        with pytest.raises(TypeError, match="function='train.py' cannot be called: give a function"):
            run("train.py")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="argument 1 of print, a lock, cannot be pickled"):
            run(print, 0, lock)
        with pytest.raises(TypeError, match="cannot be pickled, with the values that it uses from outside"):
            run(lambda: lock)
        with pytest.raises(
            ValueError, match="print and its arguments are 5.0 MiB as a pickle; the limit is 4 MiB. Pass"
        ):
            run(print, bytes(5 << 20))
    with pytest.raises(TypeError, match="argument file of print, a lock, cannot be pickled"):
        job.run(print, file=lock)
    with pytest.raises(TypeError, match="argument file of print, a lock, cannot be pickled"):
        torchx_monarch.run(print, kwargs={"file": lock})
    with pytest.raises(TypeError, match=r"^train\(lr\): missing a required argument: 'lr'$"):
        job.run(train)
    with pytest.raises(TypeError, match=r"argument 'env'. An option of the run: options=RunOptions\(env=...\)"):
        job.run(train, 0.1, env={})
    with pytest.raises(TypeError, match="run has no option nprocs. Did you mean nproc"):
        torchx_monarch.run(train, 0.1, nprocs=4)
    with pytest.raises(TypeError, match=r"run has no option epochs. For an argument of train: kwargs={'epochs': ...}"):
        torchx_monarch.run(train, 0.1, epochs=4)
    for run in (job.run, torchx_monarch.run):
        with pytest.raises(TypeError, match=r"options={'timeout': 1}: give RunOptions\(...\)"):
            run(train, 0.1, options={"timeout": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scheduler_cfg='slots=1': give a dict"):
        torchx_monarch.run(train, 0.1, scheduler_cfg="slots=1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="env='A=1': give a dict"):
        RunOptions(env="A=1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="results='yaml' is none of pickle, json"):
        RunOptions(results="yaml")  # type: ignore[arg-type]


PROGRAM = """
import argparse
import io
import multiprocessing
import sys
import torchx_monarch
from own import scale

class Fit:
    def __init__(self, loss):
        self.loss = loss

class Config:
    def __init__(self, lr):
        self.lr = lr

def rate(config):
    return scale(config.lr)

def train(config):
    argparse.ArgumentParser().parse_args()
    if config.lr < 0:
        raise ArithmeticError("negative")
    import torch.distributed
    torch.distributed.init_process_group("gloo")
    fits = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(fits, Fit(torch.distributed.get_rank()))
    torch.distributed.destroy_process_group()
    torch.save(config, io.BytesIO())
    rates = [multiprocessing.get_context(how).Pool(1).map(rate, [config]) for how in ("fork", "spawn")]
    assert rates[0] == rates[1] and sys.argv == ["src/prog.py"]
    return Fit(sum(fit.loss for fit in fits) * rates[0][0])

def main(lr):
    try:
        cfg = {"preload": "torch" if lr > 0 else "none"}
        fits = torchx_monarch.run(train, Config(lr), scheduler_cfg=cfg, nnodes=1, nproc=2)
        print([isinstance(fit, Fit) and fit.loss for fit in fits])
    except ArithmeticError as error:
        print(repr(error))

if __name__ == "__main__":
    main(0.5)
    child = multiprocessing.get_context("spawn").Process(target=main, args=[-1])
    child.start()
    child.join()
"""


def test_a_script_runs_its_own_function(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "own.py").write_text("def scale(number): return 2 * number")
    (tmp_path / "src" / "prog.py").write_text(PROGRAM)
    command = [sys.executable, "src/prog.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines() == ["[1.0, 1.0]", "ArithmeticError('negative')"], done.stderr
    for app in (apps := runner.list("monarch_local")):
        runner.wait(app.app_handle, wait_interval=0.1)
    states = [runner.status(app.app_handle) for app in apps]
    assert {status and status.state for status in states} == {AppState.SUCCEEDED, AppState.CANCELLED}
