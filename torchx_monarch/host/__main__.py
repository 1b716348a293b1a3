# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run the host process of one replica: ``python -m torchx_monarch.host [options] -- COMMAND``."""

from __future__ import annotations

import os
import sys

# `python -m` puts the working folder first in sys.path: a `monarch.py` or `types.py` of the user's must not shadow the
# modules that this process imports. (With -P, from Python 3.11 on, Python does not put it there.)
if __name__ == "__main__" and sys.path[0] == os.getcwd() and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

from typing import NoReturn  # noqa: E402


def main(argv: list[str]) -> NoReturn:
    """Run one replica of a role to its end.

    Args:
        argv: command-line arguments without the program's name: the options, ``--``, and the role's command.
    """
    from torchx_monarch.host.host_process import HostProcess
    from torchx_monarch.host.workloads import workload_of
    from torchx_monarch.model.host_spec import HostSpec

    spec = HostSpec.from_argv(argv, __doc__ or "")
    HostProcess(spec, os.environ, workload_of).main()


if __name__ == "__main__":
    main(sys.argv[1:])
