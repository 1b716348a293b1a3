# SPDX-License-Identifier: BSD-3-Clause
"""Print the versions of Python, torch, CUDA and NCCL as JSON, without importing torch, in the program's interpreter.

It imports nothing of this package, which the program's interpreter may lack.
"""

import json
import platform
import re
from importlib import metadata


def versions() -> dict:  # type: ignore[type-arg]
    """Return the versions by name."""
    found = {"python": platform.python_version()}
    try:
        torch = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return found
    found["torch"] = torch.version
    try:
        with open(str(torch.locate_file("torch/version.py"))) as file:
            cuda = re.search(r"^cuda\b[^=]*= *'([^']+)'", file.read(), re.M)
    except OSError:
        cuda = None
    if cuda:
        found["CUDA"] = cuda[1]
    for major in ("13", "12", "11"):
        try:
            found["NCCL"] = metadata.version("nvidia-nccl-cu" + major)
            break
        except metadata.PackageNotFoundError:
            pass
    return found


if __name__ == "__main__":
    print(json.dumps(versions()))
