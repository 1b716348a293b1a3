# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on examples/task_spooler.py, as a package of somebody else registers it."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchx.specs import AppState

from examples.task_spooler import create_scheduler
from tests.contract.contract import Contract
from tests.contract.place import BatchPlace
from tests.waits import WITHIN
from torchx_monarch import serve

_REGISTERS = """
from torchx.plugins import register

@register.scheduler(name="acme_tsp")
def acme_tsp(session_name, **kwargs):
    from examples.task_spooler import create_scheduler
    return create_scheduler(session_name, **kwargs)
"""


def tsp(*words: str) -> str:
    return subprocess.run(["tsp", *words], capture_output=True, text=True, timeout=WITHIN, check=False).stdout


class TaskSpoolerPlace(BatchPlace):
    name = "acme_tsp"
    factory = staticmethod(create_scheduler)
    install = "task-spooler"
    cannot = {"preemption": "task-spooler does not preempt"}

    @contextlib.contextmanager
    def pending(self) -> Iterator[str]:
        blocker = tsp("sleep", "1000").strip()
        try:
            yield self.run(self.role("true", replicas=2), submit_args=f"-D {blocker}")
        finally:
            tsp("-k", blocker)

    def shown(self) -> str:
        return tsp()


class TestContract(Contract):
    kind = TaskSpoolerPlace

    @pytest.fixture(autouse=True)
    def queue(self, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
        if shutil.which("tsp") is None:
            pytest.skip("tsp is not installed (Debian: task-spooler)")
        plugins = tmp_path / "plugins"
        (plugins / "torchx_plugins" / "schedulers").mkdir(parents=True)
        (plugins / "torchx_plugins" / "schedulers" / "acme.py").write_text(_REGISTERS)
        monkeypatch.setenv("PYTHONPATH", str(plugins))
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setenv("TS_SOCKET", str(tmp_path / "tsp.socket"))  # a queue of its own
        tsp("-S", "16")
        yield
        tsp("-K")

    def test_a_command_is_told_once_of_all_roles(self, place: TaskSpoolerPlace, tmp_path: Path) -> None:
        end = tmp_path / "end.json"
        later = place.role("sh", "-c", "sleep 1; exit 3", name="later")
        handle = place.run(place.role("true"), later, place.role("true", name="last"), on_end=f"cat >> {end}")
        place.wait(handle, AppState.FAILED)
        place.until(lambda: end.exists() and end.read_text(), "the command", handle)
        told = json.loads(end.read_text())
        assert (told["id"], told["state"], told["exit_code"]) == (handle.rpartition("/")[2], "FAILED", 3)
        assert "later/0" in told["message"]

    def test_a_scheduler_of_another_package_is_known_by_its_class(
        self, place: TaskSpoolerPlace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "acme_tsp" in place.torchx("monarch", "doctor", "-s", "acme_tsp")
        refused = place.torchx("monarch", "status", "nobody://torchx/x", code=64)
        assert "acme_tsp" in refused and "monarch_local" in refused

        def reached(*_: object, **__: object) -> None:
            raise KeyError

        monkeypatch.setattr(place.runner, "dryrun", reached)
        with pytest.raises(KeyError):
            serve("torchrun train.py", "acme_tsp", runner=place.runner)
