# SPDX-License-Identifier: BSD-3-Clause
"""What the kernel says of processes that were killed for want of memory, and NVIDIA's library of the use of GPUs."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_errors import exit_of
from tests.unit.test_sync_store import write
from torchx_monarch.host.ranks import rank_samples
from torchx_monarch.insight.rank_sample import DeviceUse
from torchx_monarch.system.cgroups import OutOfMemory

V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job/step\n0::/\n",
    "sys/fs/cgroup/memory/job/step/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
    "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "536870912\n",
}
V2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/step/memory.events": "low 0\noom 7\noom_kill {kills}\noom_group_kill 0\n",
    "sys/fs/cgroup/job/step/memory.max": "536870912\n",
    "sys/fs/cgroup/job/memory.max": "max\n",
}
NO_LIMIT = {**V2, "sys/fs/cgroup/job/step/memory.max": "max\n", "proc/meminfo": "MemTotal: 2097152 kB\n"}
IN_CONTAINER = {  # /proc names the machine's path, /sys/fs/cgroup is the container's own
    "proc/self/cgroup": "4:memory:/docker/0123\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill {kills}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "536870912\n",
}
MACHINE = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/cgroup.procs": "1\n",
    "proc/vmstat": "oom_kill {kills}\n",
    "proc/meminfo": "MemTotal:       2097152 kB\nMemFree: 1 kB\n",
}
KILLED = (
    "probably for want of memory: the kernel's OOM killer has killed 1 process of its cgroup since the ranks were "
    "started"
)
OF_512 = f"{KILLED} (the memory limit of its cgroup is 512 MiB)"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (V1, OF_512),
        (V2, OF_512),
        (IN_CONTAINER, OF_512),
        (NO_LIMIT, KILLED),
        (MACHINE, ""),
        ({}, ""),
    ],
)
def test_only_kills_since_the_start_count(tmp_path: Path, files: dict[str, str], says: str) -> None:
    write(tmp_path, {name: text.format(kills=3) for name, text in files.items()})
    memory = OutOfMemory(tmp_path)
    assert memory.evidence() == ""
    write(tmp_path, {name: text.format(kills=4) for name, text in files.items()})
    assert memory.evidence() == says
    assert OutOfMemory(tmp_path).evidence() == ""
    if says:  # such as workers of a DataLoader, and then a rank that somebody else has killed
        write(tmp_path, {name: text.format(kills=6) for name, text in files.items()})
        assert "has killed 3 processes of" in memory.evidence()


def test_kills_of_others_on_the_machine_do_not_count_where_the_cgroup_counts(tmp_path: Path) -> None:
    write(tmp_path, {name: text.format(kills=3) for name, text in {**MACHINE, **V2}.items()})
    memory = OutOfMemory(tmp_path)
    write(tmp_path, {"proc/vmstat": "oom_kill 9\n"})
    assert memory.evidence() == ""


def test_a_rank_says_it() -> None:
    assert exit_of(1, -9, out_of_memory=OF_512).describe().endswith(f"was killed by signal 9 (SIGKILL): {OF_512}")


Named = types.SimpleNamespace


@pytest.fixture(autouse=True)
def fresh() -> None:
    rank_samples._nvml.cache_clear()


def pynvml(**changes: Any) -> types.ModuleType:
    processes = [[Named(pid=7, usedGpuMemory=100), Named(pid=8, usedGpuMemory=None)], [Named(pid=8, usedGpuMemory=5)]]
    module = types.ModuleType("pynvml")
    vars(module).update(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=processes.__getitem__,
        nvmlDeviceGetName=lambda index: f"GPU\n{index}".encode(),
        nvmlDeviceGetUtilizationRates=lambda index: Named(gpu=50),
        nvmlDeviceGetMemoryInfo=lambda index: Named(total=1000),
    )
    vars(module).update(changes)
    return module


def test_each_device_belongs_to_the_processes_that_have_memory_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", pynvml())
    assert rank_samples.device_use({1: [1, 7], 8: [8], 9: [9]}) == {
        1: (DeviceUse(0, r"GPU\n0", 0.5, 100, 1000),),
        8: (DeviceUse(0, r"GPU\n0", 0.5, 0, 1000), DeviceUse(1, r"GPU\n1", 0.5, 5, 1000)),
    }


def fails(*arguments: object) -> None:
    raise RuntimeError("Driver Not Loaded")


@pytest.mark.parametrize("module", [None, pynvml(nvmlInit=fails), pynvml(nvmlDeviceGetName=fails)])
def test_no_devices_are_no_error(module: types.ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert rank_samples.device_use({7: [7]}) == {} == rank_samples.device_use({7: [7]})
