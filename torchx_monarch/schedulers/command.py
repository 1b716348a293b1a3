# SPDX-License-Identifier: BSD-3-Clause
"""Have the ``torchx`` command report a user's mistake by its message and exit code 1 instead of a traceback.

TorchX's command line catches such errors only in ``torchx run`` (``torchx.cli.cmd_run.CmdRun._run_inner``). It catches
neither those of ``-cfg``, which it parses earlier (``_run_from_cli_args``), nor those of ``log``, ``list``, ``cancel``
and the other subcommands. While such an error propagates, TorchX leaves its runner's context and so closes the
schedulers. ``MonarchScheduler.close`` then calls ``exit_on_user_error``.
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


def exit_on_user_error() -> None:
    """Exit the ``torchx`` command with the message of the user's mistake that is being handled, if any.

    Raises:
        SystemExit: a user's mistake is being handled; carries its message, for exit code 1.
    """
    error = sys.exc_info()[1]
    if isinstance(error, USER_ERRORS) and subcommand():
        raise SystemExit(str(error)) from None


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
