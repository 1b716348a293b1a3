# SPDX-License-Identifier: BSD-3-Clause
"""The GPUs of this machine, by the names that CUDA_VISIBLE_DEVICES takes."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Mapping

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Has CUDA number devices as nvidia-smi does; its default begins with the fastest one."""

_log = logging.getLogger("torchx_monarch")


def devices(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that this process may use.

    If CUDA_VISIBLE_DEVICES is set, they are its entries (as CUDA does, up to the first one that is no device), else the
    GPUs that nvidia-smi lists.
    """
    visible = environ.get(CUDA_VISIBLE_DEVICES)
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        end = next((i for i, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
        return list(dict.fromkeys(names[:end]))
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30, env=dict(environ)
        )
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        _log.warning("nvidia-smi, which lists GPUs, fails: %s", e)
        return []
    return [str(i) for i, line in enumerate(line for line in listed.stdout.splitlines() if line.startswith("GPU "))]
