# SPDX-License-Identifier: BSD-3-Clause
"""Submit one torchrun job through TorchX's Runner and wait for it, as a program would: NPROC OUT SCRIPT [ARG ...].

Writes OUT/submit.json: when the submission had returned, when the end was seen, the handle, the final state.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from torchx.runner import get_runner
from torchx.specs import AppDef, Role


def main() -> int:
    nproc, out, *script = sys.argv[1:]
    args = ["--nnodes=1", f"--nproc-per-node={nproc}", *script]
    app = AppDef(name="bench", roles=[Role(name="trainer", image="", entrypoint="torchrun", args=args)])
    with get_runner() as runner:
        handle = runner.run(app, "monarch_local")
        submitted = time.time()
        status = runner.wait(handle, wait_interval=0.05)
        seen = time.time()
    state = status.state.name if status is not None else "unknown"
    result = {"submitted": submitted, "seen": seen, "handle": handle, "state": state}
    (Path(out) / "submit.json").write_text(json.dumps(result))
    print(f"{handle} {state}")
    return 0 if state == "SUCCEEDED" else 1


if __name__ == "__main__":
    sys.exit(main())
