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
    from torchx_monarch.command.actors import is_actors
    from torchx_monarch.host.host_process import HostProcess
    from torchx_monarch.host.session_host import SessionHost, is_session
    from torchx_monarch.model.host_spec import HostSpec

    spec = HostSpec.from_argv(argv, __doc__ or "")
    host_class: type[HostProcess] = SessionHost if is_session(spec, os.environ) else HostProcess
    if is_actors(spec.command):
        from torchx_monarch.host.actor_host import ActorHost

        host_class = ActorHost
    host_class(spec, os.environ).main()


if __name__ == "__main__":
    main(sys.argv[1:])
