# SPDX-License-Identifier: BSD-3-Clause
"""Run one torchrun job as Monarch itself does it, with serve() and run_spmd(): NPROC SCRIPT [ARG ...]."""

from __future__ import annotations

import sys

from monarch.job.spmd import serve


def main() -> None:
    nproc, *script = sys.argv[1:]
    job = serve(["torchrun", "--standalone", f"--nproc-per-node={nproc}", *script], scheduler="local_cwd")
    try:
        job.run_spmd()
    finally:
        job.kill()


if __name__ == "__main__":
    main()
