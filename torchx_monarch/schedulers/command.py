# SPDX-License-Identifier: BSD-3-Clause
"""What this process runs if it is the ``torchx`` command, and which errors are a user's mistakes.

``cli.torchx_errors`` shows the message of such an error instead of a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading

from torchx.specs import InvalidRunConfigException
from torchx.specs.finder import ComponentValidationException

USER_ERRORS = (ComponentValidationException, InvalidRunConfigException)
"""Base classes of all errors whose message is meant for a user."""

run_options: argparse.Namespace | None = None
"""The options of this process' ``torchx run``, as TorchX has parsed them; None in any other program."""

_SUBCOMMANDS = frozenset(
    (
        *("builtins", "cancel", "configure", "delete", "describe", "list"),
        *("log", "monarch", "run", "runopts", "status", "tracker"),
    )
)


def subcommand() -> str:
    """Return the subcommand of ``torchx`` that this process runs; empty in any other program."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if os.path.basename(sys.argv[0]) != "torchx" and getattr(main, "name", "") != "torchx.cli.main":
        return ""
    return next((word for word in sys.argv[1:] if word in _SUBCOMMANDS), "")


def keep_threads_quiet() -> None:
    """Suppress the tracebacks of threads that end with a user's mistake: ``torchx log`` raises it again."""
    before = threading.excepthook
    if not subcommand() or getattr(before, "quiet", False):
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.exc_value, USER_ERRORS):
            before(args)

    hook.quiet = True  # type: ignore[attr-defined]
    threading.excepthook = hook
