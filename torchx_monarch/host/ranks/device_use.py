# SPDX-License-Identifier: BSD-3-Clause
"""Read the use of GPUs by processes of this host: from NVIDIA's driver, through nvidia-ml-py if it is installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Mapping
from typing import Any

from torchx_monarch.insight.rank_sample import DeviceUse
from torchx_monarch.system.untrusted_text import one_line


class Devices:
    """The GPUs of this host; none without nvidia-ml-py or NVIDIA's driver.

    The driver is asked from the first call of ``use`` on, which takes a tenth of a second.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._is_open = False

    def use(self, families: Mapping[int, Collection[int]]) -> dict[int, tuple[DeviceUse, ...]]:
        """Return the GPUs on which processes have memory. In a container the driver may hide their process ids.

        Args:
            families: for each process that is asked for, itself and the processes that it has started.
        """
        try:
            nvml = self._opened()
            return {} if nvml is None else _use(nvml, families)
        except Exception:  # of a driver that has been unloaded, or forbids it: ranks run all the same
            return {}

    def _opened(self) -> Any:
        if not self._is_open:
            self._is_open = True
            with contextlib.suppress(ImportError):
                nvml = importlib.import_module("pynvml")
                nvml.nvmlInit()
                self._nvml = nvml
        return self._nvml


def _use(nvml: Any, families: Mapping[int, Collection[int]]) -> dict[int, tuple[DeviceUse, ...]]:
    found: dict[int, list[DeviceUse]] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        used = {
            process.pid: process.usedGpuMemory or 0 for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)
        }
        owners = {root: [pid for pid in family if pid in used] for root, family in families.items()}
        if not any(owners.values()):
            continue
        name = nvml.nvmlDeviceGetName(device)
        shown = one_line(name if isinstance(name, str) else name.decode(errors="replace"), 100)
        busy, total = nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100, nvml.nvmlDeviceGetMemoryInfo(device).total
        for root, pids in owners.items():
            if pids:
                memory = sum(used[pid] for pid in pids)
                found.setdefault(root, []).append(DeviceUse(index, shown, busy, memory, total))
    return {root: tuple(devices) for root, devices in found.items()}
