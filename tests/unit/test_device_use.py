# SPDX-License-Identifier: BSD-3-Clause
"""The use of GPUs, with a stand-in for nvidia-ml-py."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from torchx_monarch.host.ranks import rank_samples
from torchx_monarch.insight.rank_sample import DeviceUse

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
