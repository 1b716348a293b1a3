# SPDX-License-Identifier: BSD-3-Clause
"""What torch tells of a host before there are ranks; ``zygote_main`` runs this file, and calls it in a fork."""

from __future__ import annotations


def count(device: str) -> int:
    """Return ``torch.distributed.run.determine_local_world_size`` for a name: auto, cpu, gpu or xpu."""
    from torch.distributed.run import determine_local_world_size

    return int(determine_local_world_size(device))


def cpus_near(gpu: int, mode: str) -> list[int]:
    """Return the CPUs to which ``torchrun --numa-binding MODE`` binds the local rank with the number ``gpu``."""
    try:
        from torch.numa.binding import AffinityMode, NumaOptions, _get_logical_cpus_to_bind_to

        options = NumaOptions(affinity_mode=AffinityMode(mode))
    except (ImportError, ValueError):
        import torch

        raise RuntimeError(f"torch {torch.__version__} cannot tell (torch.numa.binding)") from None
    # Torch 2.14 has renamed an argument of this private function.
    names = _get_logical_cpus_to_bind_to.__code__.co_varnames
    index = {"device_index" if "device_index" in names else "gpu_index": gpu}
    cpus = sorted(_get_logical_cpus_to_bind_to(**index, numa_options=options))
    if not cpus:
        raise RuntimeError(f"none of the CPUs near GPU {gpu} is among those that this process may use")
    return cpus
