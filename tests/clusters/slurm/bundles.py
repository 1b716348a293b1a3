# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""OCI bundles whose root filesystem is empty: this machine's programs are mounted into it, read-only."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).parents[3]

_PROGRAMS = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/passwd")

PYTHON = str(Path(sys.executable).parent)
"""The folder of a Python with this package."""


def make(folder: Path, path: str, programs: bool = True, env: Mapping[str, str] | None = None) -> Path:
    """Make a bundle, as ``crun spec`` does: namespaces of its own, also for the network, and a read-only root.

    Args:
        folder: where; it does not exist.
        path: the PATH in the container.
        programs: whether it has programs at all.
        env: more variables of the image.
    """
    (folder / "rootfs").mkdir(parents=True)
    shown = {*(_PROGRAMS if programs else ()), *((str(_ROOT), sys.prefix, sys.base_prefix) if programs else ())}
    # Folders before what is in them; crun makes what is mounted on.
    binds = [each for each in sorted(shown) if Path(each).exists()]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "mode=1777"]},
        *({"destination": each, "type": "bind", "source": each, "options": ["rbind", "ro"]} for each in binds),
    ]
    config = {
        "ociVersion": "1.0.0",
        "process": {
            "terminal": True,
            "user": {"uid": 0, "gid": 0},
            "args": ["sh"],
            "env": [f"PATH={path}", *(f"{name}={value}" for name, value in (env or {}).items())],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "container",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": each} for each in ("pid", "network", "ipc", "uts", "mount")]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
