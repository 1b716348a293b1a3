# SPDX-License-Identifier: BSD-3-Clause
"""Assign GPUs to replicas: values of CUDA_VISIBLE_DEVICES, in the order of roles and replicas."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Mapping, Sequence

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

_log = logging.getLogger("torchx_monarch")


def devices(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes.

    If CUDA_VISIBLE_DEVICES is set, they are its entries (as CUDA does, up to the first one that is no device), else the
    GPUs that nvidia-smi lists.
    """
    visible = environ.get(CUDA_VISIBLE_DEVICES)
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        end = next((i for i, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
        return names[:end]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30, env=dict(environ)
        )
    except (OSError, subprocess.SubprocessError) as e:
        _log.warning("no GPU can be assigned: %s", e)
        return []
    return [str(i) for i, line in enumerate(line for line in listed.stdout.splitlines() if line.startswith("GPU "))]


def assign(roles: Sequence[tuple[int, int]], available: Sequence[str]) -> list[list[str | None]] | None:
    """Divide the devices between replicas.

    Args:
        roles: for each role, its number of replicas and the GPUs that each of them requests.

    Returns:
        For each role and replica the value of CUDA_VISIBLE_DEVICES, None if the role requests no GPU. None instead of
        the list if there are fewer devices than requested.
    """
    if sum(replicas * max(gpus, 0) for replicas, gpus in roles) > len(available):
        return None
    rest = iter(available)
    return [
        [",".join(next(rest) for _ in range(gpus)) if gpus > 0 else None for _ in range(replicas)]
        for replicas, gpus in roles
    ]
