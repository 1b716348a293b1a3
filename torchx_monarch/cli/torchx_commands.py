# SPDX-License-Identifier: BSD-3-Clause
"""Extend TorchX's commands for one job: ``torchx status``, ``log``, ``cancel``, ``describe`` and ``delete``.

They take the words that ``torchx monarch`` takes for a job (``last``, a name, the beginning of an id). For jobs of this
package's schedulers, ``cancel`` and ``delete`` say what they have done, and ``delete`` refuses a job that runs unless
``--force`` is given. ``torchx monarch cancel`` and ``delete`` are the same commands.
"""

from __future__ import annotations

import argparse
import sys

from torchx.cli.cmd_base import AppHandleSubCommand
from torchx.cli.cmd_cancel import CmdCancel as TorchXCmdCancel
from torchx.cli.cmd_delete import CmdDelete as TorchXCmdDelete
from torchx.cli.cmd_describe import CmdDescribe as TorchXCmdDescribe
from torchx.cli.cmd_log import CmdLog as TorchXCmdLog
from torchx.cli.cmd_status import CmdStatus as TorchXCmdStatus
from torchx.runner import Runner
from torchx.specs import AppStatus

from torchx_monarch.cli import handles
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.schedulers import registered


def _resolve(word: str) -> str:
    """Return the handle that a word names; exit with a message if it names none."""
    try:
        return handles.resolve(word)
    except CommandError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


class _NamedJob(AppHandleSubCommand):  # type: ignore[misc]
    """The base class of TorchX's commands, with a handle that may be a word for the job."""

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        """Define the handle."""
        subparser.add_argument("app_handle", metavar="HANDLE", help=handles.HELP)

    def run(self, args: argparse.Namespace) -> None:
        args.app_handle = _resolve(args.app_handle)
        super().run(args)


class CmdStatus(TorchXCmdStatus, _NamedJob):  # type: ignore[misc]
    """Implement ``torchx status``."""


class CmdDescribe(TorchXCmdDescribe, _NamedJob):  # type: ignore[misc]
    """Implement ``torchx describe``."""


class CmdCancel(TorchXCmdCancel, _NamedJob):  # type: ignore[misc]
    """Implement ``torchx cancel``."""

    def run_with_runner(self, args: argparse.Namespace, runner: Runner) -> None:
        """Cancel the job, and say so."""
        status = _status_of_ours(args.app_handle, runner)
        super().run_with_runner(args, runner)
        if status is not None and status.is_terminal():
            print(f"{args.app_handle} had ended before: {status.state.name}", file=sys.stderr)
        elif status is not None:
            print(f"cancelled {args.app_handle}", file=sys.stderr)


class CmdDelete(TorchXCmdDelete, _NamedJob):  # type: ignore[misc]
    """Implement ``torchx delete``."""

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        super().add_arguments(subparser)
        subparser.add_argument("--force", action="store_true", help="end the job first, if it has not ended")

    def run_with_runner(self, args: argparse.Namespace, runner: Runner) -> None:
        """Delete the job, and say so; refuse one that has not ended."""
        status = _status_of_ours(args.app_handle, runner)
        if status is not None and not status.is_terminal() and not args.force:
            print(
                f"{args.app_handle} is {status.state.name}, and delete would end it and remove its logs.\n"
                f"To do so: torchx delete --force {args.app_handle}\n"
                f"To end it and keep its logs: torchx cancel {args.app_handle}",
                file=sys.stderr,
            )
            sys.exit(1)
        super().run_with_runner(args, runner)
        if status is not None:
            print(f"deleted {args.app_handle} and its logs", file=sys.stderr)


class CmdLog(TorchXCmdLog):  # type: ignore[misc]
    """Implement ``torchx log``, whose identifier may go on with a role and replicas."""

    def run(self, args: argparse.Namespace) -> None:
        if "://" not in args.identifier:
            word, slash, rest = args.identifier.partition("/")
            args.identifier = f"{_resolve(word)}{slash}{rest}"
        super().run(args)


def _status_of_ours(handle: str, runner: Runner) -> AppStatus | None:
    """Return the status of a job; None for one of TorchX's own schedulers; raise CommandError if it does not exist."""
    if handle.partition("://")[0] not in registered():
        return None
    if (status := runner.status(handle)) is None:
        raise handles.unknown(handle)
    return status
