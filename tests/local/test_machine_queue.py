# SPDX-License-Identifier: BSD-3-Clause
"""The queue for this machine's GPUs and slots: order, what jobs get, and faults; the driver is a stand-in."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchx.specs import AppState

from tests.local.detached import Detached, py, sh
from tests.waits import until
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.local.machine_queue import MachineQueue, Ticket

_DRIVER = """#!/bin/sh
case "$1" in
-L) for i in 0 1 2 3; do echo "GPU $i: Fake (UUID: GPU-$i)"; done;;
--query-compute-apps*) cat {folder}/busy;;
--query-gpu*) for i in 0 1 2 3; do echo "$i, GPU-$i"; done;;
esac
"""

_USES = """
import fcntl, os, sys, time
held = []
for device in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
    held.append(open(os.path.join(sys.argv[1], f"device-{device}"), "w"))
    until = time.monotonic() + 20  # its user may have been killed just now
    while True:
        try:
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                open(os.path.join(sys.argv[1], "overbooked"), "w").close()
            time.sleep(0.01)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nvidia-smi with four GPUs; returns its folder, whose file ``busy`` has the GPUs of others."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "busy").touch()
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.write_text(_DRIVER.format(folder=tmp_path))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_jobs_get_devices_in_their_order(driver: Path, apps: Detached) -> None:
    first, second, third = (
        MachineQueue(Ticket(name, gpus), at) for name, gpus, at in (("a", 3, 1), ("b", 2, 2), ("c", 1, 3))
    )
    assert third.take() == "waits for 1 GPU behind a, which waits for 3 GPUs"
    assert first.take() == "" and first.ticket.devices == ("0", "1", "2")
    assert second.take() == "waits for 2 GPUs, 1 is free: a has 0,1,2"
    assert third.take() == "waits for 1 GPU behind b, which waits for 2 GPUs"  # which it would delay
    first.close()
    (driver / "busy").write_text("GPU-0, 4711\n")
    assert second.take() == "" and second.ticket.devices == ("1", "2")
    assert third.take() == "" and third.ticket.devices == ("3",)
    fourth = MachineQueue(Ticket("d", 1), 4)
    assert fourth.take() == "waits for 1 GPU, 0 are free: b has 1,2, c has 3; other processes use 0"
    os.close(second._file)  # as if its supervisor had been killed
    assert fourth.take() == "" and fourth.ticket.devices == ("1",)


def test_no_job_removes_a_ticket_that_is_being_made(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLOTS", "2")
    first, readers, flock = MachineQueue(Ticket("b", slots=2), 2), list[threading.Thread](), fcntl.flock

    def read_before_locking(file: int, operation: int) -> None:
        if not readers and "-a-" in os.readlink(f"/proc/self/fd/{file}"):
            readers.append(threading.Thread(target=first.take))
            readers[0].start()
            until(lambda: not readers[0].is_alive() or is_waiting.is_set(), "the other job's look at the queue")
        try:
            flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            is_waiting.set()
            flock(file, operation)

    is_waiting = threading.Event()
    monkeypatch.setattr(fcntl, "flock", read_before_locking)
    second = MachineQueue(Ticket("a", slots=2), 1)
    readers[0].join()
    assert os.path.exists(second._path)
    assert "behind a" in first.take() and second.take() == ""
    assert first.take() == "waits for 2 slots, 0 are free: a has 2 slots"


def test_slots_are_counted(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLOTS", "3")
    first, second = (MachineQueue(Ticket(name, slots=2), at) for name, at in (("a", 1.0), ("b", 2.0)))
    assert first.take() == "" and second.take() == "waits for 2 slots, 1 is free: a has 2 slots"
    first.close()
    assert second.take() == ""
    second.close()


def test_a_job_waits_pending_and_can_be_cancelled(driver: Path, apps: Detached) -> None:
    first = apps.run(sh("echo $$CUDA_VISIBLE_DEVICES; exec sleep 1000"), gpus=4)
    until(lambda: apps.status(first).state is AppState.RUNNING, "its start")
    second, third = apps.run(sh("true"), gpus=1), apps.run(sh("exit 3"), gpus=2)
    until(lambda: "behind" in apps.status(third).msg, "the queue")
    assert apps.status(second).state is AppState.PENDING
    assert apps.status(second).msg == f"waits for 1 GPU, 0 are free: {first} has 0,1,2,3"
    apps.runner.cancel(f"monarch_local://torchx/{second}")
    assert apps.wait(second).state is AppState.CANCELLED
    apps.runner.cancel(f"monarch_local://torchx/{first}")
    assert apps.wait(third).state is AppState.FAILED
    assert apps.log(first)[0] == "0,1,2,3\n"


@pytest.mark.parametrize(
    ("cfg", "reason"),
    [
        ({"gpus": 5}, "`gpus` is 5, and this machine .* has 4"),
        ({"gpus": 1, "slots": 1}, "exclude each other"),
        ({"gpus": -1}, "`gpus` is -1; it is a number, 0 or more"),
        ({"gpus": 3}, "`gpus` is 3, which 2 replicas cannot share equally"),
        ({"slots": 10**6}, "`slots` is 1000000, and this machine .* has .* MONARCH_SLOTS"),
    ],
)
def test_what_cannot_be_given_is_refused(driver: Path, apps: Detached, cfg: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        apps.run(sh("true", replicas=2 if cfg == {"gpus": 3} else 1), **cfg)
    assert apps.scheduler.list() == []


@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.nightly("12 jobs run every time"))])
def test_jobs_with_faults_never_share_a_device(driver: Path, apps: Detached, count: int) -> None:
    dice = random.Random(count)
    ids, faults = list[str](), dict[str, str]()
    for _ in range(count):
        fault = dice.choice(["", "", "", "killed", "cancelled"])
        app_id = apps.run(py(_USES, str(driver), "1000" if fault else "0.05"), gpus=dice.randint(1, 4))
        ids.append(app_id)
        faults[app_id] = fault
    left = [app_id for app_id in ids if faults[app_id]]
    while left:
        running = [app_id for app_id in left if apps.status(app_id).state is AppState.RUNNING]
        for app_id in running or dice.sample(left, 1):
            left.remove(app_id)
            if faults[app_id] == "cancelled":
                apps.runner.cancel(f"monarch_local://torchx/{app_id}")
                continue
            os.kill(apps.owner(app_id).supervisor.pid, signal.SIGKILL)
        time.sleep(0.05)
    for app_id in ids:
        state = apps.wait(app_id, 90).state
        assert (
            state
            is {"": AppState.SUCCEEDED, "killed": AppState.FAILED, "cancelled": AppState.CANCELLED}[faults[app_id]]
        )
    assert not (driver / "overbooked").exists()

    def users() -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline"])
        return [process for process in found if str(driver) in str(process.info["cmdline"])]

    until(lambda: not users(), lambda: f"the end of {users()}")
