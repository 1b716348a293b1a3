# SPDX-License-Identifier: BSD-3-Clause
"""Have the ``torchx`` command say in a line what TorchX itself only says with a traceback.

That is so for a handle or a scheduler that does not exist, a ``.torchxconfig`` with a mistake, a default scheduler
without its daemon, Ctrl-C, and mistakes that this package's schedulers report: TorchX catches those only in ``torchx
run`` (``torchx.cli.cmd_run.CmdRun._run_inner``), and not all. Any other exception is shown as before.
"""

from __future__ import annotations

import argparse
import configparser
import re
import sys
from traceback import walk_tb
from types import TracebackType

_OF_DOCKER = ("docker", "requests", "urllib3")
"""The packages whose exceptions mean that TorchX's default scheduler has no Docker daemon."""


def install() -> None:
    """Install the ``sys.excepthook`` of the ``torchx`` command; once for a process."""
    before = sys.excepthook
    if getattr(before, "is_torchx_errors", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = explain(error)
        if text:
            print(text, file=sys.stderr)
        else:
            before(kind, error, trace)

    hook.is_torchx_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def explain(error: BaseException) -> str:
    """Return what is wrong and what to type instead; empty for an exception that is not a user's mistake."""
    from torchx.schedulers import get_default_scheduler_name
    from torchx.specs.api import MalformedAppHandleException, UnknownSchedulerException

    from torchx_monarch.cli.exit_codes import CommandError
    from torchx_monarch.schedulers import no_scheduler
    from torchx_monarch.schedulers.command import USER_ERRORS, subcommand

    command = subcommand()
    modules = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    if isinstance(error, configparser.Error) or (isinstance(error, UnicodeDecodeError) and "configparser" in modules):
        return f"TorchX cannot read a .torchxconfig, of this folder or of the home folder: {error}"
    if not command:
        return ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, (*USER_ERRORS, CommandError)):
        return str(error)
    if isinstance(error, MalformedAppHandleException):
        return f"{error}. `torchx monarch ls` lists handles"
    if isinstance(error, UnknownSchedulerException):
        found = re.search(r"backend: (\S+) does", str(error))
        return no_scheduler(found[1] if found else "of this name")
    package = (getattr(error, "name", "") if isinstance(error, ModuleNotFoundError) else type(error).__module__) or ""
    default = get_default_scheduler_name()
    if package.partition(".")[0] in _OF_DOCKER and getattr(_options(error), "scheduler", "") == default:
        return (
            f"{default}, which TorchX uses without -s, has no Docker here: {error}\n"
            f"To use this machine instead: torchx {command} -s monarch_local ...\n"
            "To make that the default of this folder: torchx monarch init"
        )
    return ""


def _options(error: BaseException) -> argparse.Namespace | None:
    """Return the options of the command that an exception has ended, as TorchX has parsed them."""
    found = (frame.f_locals.get("args") for frame, _ in walk_tb(error.__traceback__))
    return next((options for options in found if isinstance(options, argparse.Namespace)), None)
