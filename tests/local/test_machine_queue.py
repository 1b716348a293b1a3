# SPDX-License-Identifier: BSD-3-Clause
"""The queue for this machine's GPUs and slots: order, what jobs get, and faults; the driver is a stand-in."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from torchx.specs import AppState

from tests.contract.place import TORCHX
from tests.local.detached import Detached, py, sh
from tests.waits import until
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.local.machine_queue import MachineQueue, Ticket
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.rank_queries import ask_stacks
from torchx_monarch.exceptions import UnreachableError

_DRIVER = """#!/bin/sh
case "$1" in
-L) for i in 0 1 2 3; do echo "GPU $i: Fake (UUID: GPU-$i)"; done;;
--query-compute-apps*) cat {folder}/busy || exit 9;;
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
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
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
    assert fourth.take() == "waits for 1 GPU, 0 are free: b has 1,2; c has 3; other processes use 0"
    os.close(second._file)  # as if its supervisor had been killed
    (driver / "busy").rename(driver / "lost")
    assert "waits for 1 GPU until nvidia-smi says which are free: cat: " in fourth.take()
    (driver / "lost").rename(driver / "busy")
    assert fourth.take() == "" and fourth.ticket.devices == ("1",)


def test_no_job_removes_a_ticket_that_is_being_made(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLOTS", "2")
    first, flock = MachineQueue(Ticket("b", slots=2), 2), fcntl.flock
    seen = list[str]()

    def look_before_locking(file: int, operation: int) -> None:
        if not seen and "-a-" in os.readlink(f"/proc/self/fd/{file}"):
            seen.append("")
            seen[0] = first.take()
            first.ticket.holds = False
            first._write()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", look_before_locking)
    second = MachineQueue(Ticket("a", slots=2), 1)
    assert seen == [""]
    assert os.path.exists(second._path)
    assert "behind a" in first.take() and second.take() == ""
    assert first.take() == "waits for 2 slots, 0 are free: a has 2 slots"


_HOLDS_LOCK = """
import fcntl, os, sys, time
lock = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_a_job_says_which_stopped_process_holds_the_queue(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLOTS", "2")
    queue = MachineQueue(Ticket("a", slots=1), 1)
    command = [sys.executable, "-c", _HOLDS_LOCK, os.path.dirname(queue._path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            expected = f"waits for 1 slot: process {holder.pid} holds the lock of the queue"
            assert queue.take() == expected
            holder.send_signal(signal.SIGSTOP)
            until(lambda: psutil.Process(holder.pid).status() == psutil.STATUS_STOPPED, "the stop")
            assert queue.take() == f"{expected}, which is stopped: kill -CONT {holder.pid}"
            # A job that is submitted meanwhile waits, and its submission returns.
            handle = apps.run(sh("true"), slots=1)
            until(lambda: f"process {holder.pid} holds the lock" in apps.status(handle).msg, "the reason")
        finally:
            holder.kill()
    queue.close()
    apps.wait(handle)


@pytest.mark.parametrize("text", ["[" * 50_000, "{", '{"app_id": 1}'])
def test_a_damaged_ticket_is_no_job(text: str, apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLOTS", "1")
    damaged, queue = MachineQueue(Ticket("a", slots=1), 1), MachineQueue(Ticket("b", slots=1), 2)
    Path(damaged._path).write_text(text)
    assert queue.take() == ""


def test_a_number_of_slots_that_is_none_is_refused(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLOTS", "two")
    with pytest.raises(UserError, match="MONARCH_SLOTS of this machine .* is 'two'; it is a number of slots"):
        apps.run(sh("true"), slots=1)
    assert apps.scheduler.list() == []


def test_slots_are_counted(apps: Detached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_SLOTS", "3")
    first, second = (MachineQueue(Ticket(name, slots=2), at) for name, at in (("a", 1.0), ("b", 2.0)))
    assert first.take() == "" and second.take() == "waits for 2 slots, 1 is free: a has 2 slots"
    monkeypatch.setenv("MONARCH_SLOTS", "1")
    assert second.take() == "waits for 2 slots, 0 are free: a has 2 slots"
    monkeypatch.setenv("MONARCH_SLOTS", "3")
    first.close()
    assert second.take() == ""
    second.close()


def test_a_job_waits_pending_and_can_be_cancelled(driver: Path, apps: Detached) -> None:
    first = apps.run(sh("echo $$CUDA_VISIBLE_DEVICES $$CUDA_DEVICE_ORDER; exec sleep 1000"), gpus=4)
    until(lambda: apps.status(first).state is AppState.RUNNING, "its start")
    second, third = apps.run(sh("true", wrap=True), gpus=1), apps.run(sh("exit 3"), gpus=2)
    until(lambda: "behind" in apps.status(third).msg, "the queue")
    assert apps.status(second).state is AppState.PENDING
    assert apps.status(second).msg == f"waits for 1 GPU, 0 are free: {first} has 0,1,2,3"
    with pytest.raises(UnreachableError, match=f"{second} is PENDING, and no host answers: waits for 1 GPU, 0 are"):
        ask_stacks(Hosts(f"monarch_local://torchx/{second}", runner=apps.runner))
    apps.runner.cancel(f"monarch_local://torchx/{second}")
    assert apps.wait(second).state is AppState.CANCELLED
    apps.runner.cancel(f"monarch_local://torchx/{first}")
    assert apps.wait(third).state is AppState.FAILED
    assert apps.log(first)[0] == "0,1,2,3 PCI_BUS_ID\n"


@pytest.mark.parametrize(
    ("cfg", "reason"),
    [
        ({"gpus": 5}, "`gpus`.*: 5; this machine .* has 4"),
        ({"gpus": 1, "slots": 1}, "exclude each other"),
        ({"gpus": -1}, "`gpus` is -1; it is a number, 0 or more"),
        ({"gpus": 3}, "`gpus` is 3, which 2 replicas cannot share equally"),
        ({"slots": 10**6}, "`slots`.*: 1000000; this machine .* has .* MONARCH_SLOTS"),
    ],
)
def test_what_cannot_be_given_is_refused(driver: Path, apps: Detached, cfg: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        apps.run(sh("true", replicas=2 if cfg == {"gpus": 3} else 1), **cfg)
    assert apps.scheduler.list() == []


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.nightly("8 jobs run every time"))])
def test_jobs_with_faults_never_share_a_device(driver: Path, apps: Detached, count: int) -> None:
    """Kill supervisors, and the ``torchx run`` that has submitted a job, while jobs wait and run; cancel some."""
    dice = random.Random(count)
    chosen = ["orphaned"] * 2 + dice.choices(["", "", "killed", "cancelled", "orphaned"], k=count - 2)
    faults, submitters = dict[str, str](), dict[str, subprocess.Popen[str]]()
    (driver / "uses.py").write_text(_USES)
    (driver / "go").touch()
    for k, fault in enumerate(chosen):
        gpus = dice.randint(1, 4) if k else 4  # the second waits for the first
        words = [str(driver), str(driver / (f"go{k}" if fault else "go"))]
        if fault != "orphaned":
            faults[apps.run(py(_USES, *words), gpus=gpus)] = fault
            continue
        command = ["run", "--wait", "-s", "monarch_local", "-cfg", f"gpus={gpus}", "--workspace", "", "utils.sh"]
        command += [sys.executable, str(driver / "uses.py"), *words]
        submitter = subprocess.Popen([*TORCHX, *command], stdout=subprocess.PIPE, text=True, cwd=driver)
        assert submitter.stdout is not None
        handle = next(line for line in submitter.stdout if line.startswith("monarch_local://")).strip()
        faults[app_id := handle.rpartition("/")[2]] = fault
        submitters[app_id] = submitter
    ids = list(faults)
    left = [app_id for app_id in ids[2:] if faults[app_id]]
    dice.shuffle(left)
    until(lambda: apps.status(ids[0]).state is AppState.RUNNING, "the first job")
    assert apps.status(ids[1]).state is AppState.PENDING
    for app_id in (ids[1], ids[0], *left):
        if faults[app_id] == "cancelled":
            apps.runner.cancel(f"monarch_local://torchx/{app_id}")
        elif faults[app_id] == "killed":
            os.kill(apps.owner(app_id).supervisor.pid, signal.SIGKILL)
        else:
            with submitters[app_id] as submitter:
                submitter.kill()
            assert not apps.status(app_id).is_terminal()
            (driver / f"go{ids.index(app_id)}").touch()
    ends = {"killed": AppState.FAILED, "cancelled": AppState.CANCELLED}
    for app_id in ids:
        assert apps.wait(app_id).state is ends.get(faults[app_id], AppState.SUCCEEDED)
    assert not (driver / "overbooked").exists()

    def users() -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline"])
        return [process for process in found if str(driver) in str(process.info["cmdline"])]

    until(lambda: not users(), lambda: f"the end of {users()}")
