# SPDX-License-Identifier: BSD-3-Clause
"""Extend TorchX's commands for jobs of this package: ``torchx status``, ``log``, ``cancel``, ``describe``, ``delete``.

They take the words that ``torchx monarch`` takes for a job (``last``, a name, the beginning of an id). They and
``list`` show an error of this package in a line. ``cancel`` and ``delete`` say what they have done, and ``delete``
refuses a job that runs unless ``--force`` is given; ``torchx monarch cancel`` and ``delete`` are the same commands. For
a handle of another scheduler, TorchX's own code runs, with nothing before or after it.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NoReturn

from torchx.cli.cmd_base import AppHandleSubCommand
from torchx.cli.cmd_cancel import CmdCancel as TorchXCmdCancel
from torchx.cli.cmd_delete import CmdDelete as TorchXCmdDelete
from torchx.cli.cmd_describe import CmdDescribe as TorchXCmdDescribe
from torchx.cli.cmd_list import CmdList as TorchXCmdList
from torchx.cli.cmd_log import CmdLog as TorchXCmdLog
from torchx.cli.cmd_status import CmdStatus as TorchXCmdStatus
from torchx.runner import Runner
from torchx.specs import parse_app_handle

from torchx_monarch.backends.core import torchx_api
from torchx_monarch.cli import arguments
from torchx_monarch.cli.exit_codes import UNAVAILABLE, USAGE, CommandError
from torchx_monarch.exceptions import RefusedError, UnreachableError
from torchx_monarch.model.role_spec import WorkloadKind
from torchx_monarch.schedulers import command
from torchx_monarch.schedulers.recorded_apps import LOCAL, recorded_apps
from torchx_monarch.system.untrusted_text import one_line

_SAVE_EXTRA = 60.0
"""Seconds beyond the grace period in which replica 0 says how ranks have ended."""

if TYPE_CHECKING:
    from torchx_monarch.backends.core.snapshot import AppSnapshot
    from torchx_monarch.model.state import State


def _resolve(word: str) -> str:
    """Return the handle that a word names; exit with a message if it names none."""
    try:
        return arguments.resolve(word)
    except CommandError as error:
        _exit(error)


def _exit(error: CommandError) -> NoReturn:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)


def _read_ours(handle: str, runner: Runner) -> tuple[AppSnapshot, State] | None:
    """Return a job of this package and its state; None for another scheduler's; exit if the job does not exist."""
    from torchx_monarch.schedulers.monarch import scheduler_of

    try:
        name, _, app_id = parse_app_handle(handle)
        scheduler = scheduler_of(name, runner)
    except Exception:  # TorchX's command raises it again, unless the scheduler is of another package
        return None
    found = scheduler.apps.read(app_id, brief=True)
    if found is None:
        _exit(arguments.unknown(handle))
    return found[0], found[1].state


class _NamedJob(AppHandleSubCommand):  # type: ignore[misc]
    """The base class of TorchX's commands, with a handle that may be a word for the job.

    Attributes:
        brief: as in ``TorchXCommand``.
        option: a switch for jobs of this package alone, with its help text; empty for none.
    """

    brief = False
    option: tuple[str, str] | None = None

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        subparser.add_argument("app_handle", type=str, help=arguments.HELP)
        if self.option is not None:
            subparser.add_argument(self.option[0], action="store_true", help=self.option[1], dest="is_extended")

    def read_ours(self, args: argparse.Namespace, runner: Runner) -> tuple[AppSnapshot, State] | None:
        """Return what ``_read_ours`` does; exit if the switch is given for another scheduler's job."""
        found = _read_ours(args.app_handle, runner)
        if found is None and self.option is not None and args.is_extended:
            print(f"torchx: error: unrecognized arguments: {self.option[0]}", file=sys.stderr)
            sys.exit(2)
        return found

    def run(self, args: argparse.Namespace) -> None:
        args.app_handle = _resolve(args.app_handle)
        with command.run(args, brief=self.brief):
            super().run(args)


class CmdStatus(TorchXCmdStatus, _NamedJob):  # type: ignore[misc]
    """Implement ``torchx status``."""


class CmdDescribe(TorchXCmdDescribe, _NamedJob):  # type: ignore[misc]
    def run_with_runner(self, args: argparse.Namespace, runner: Runner) -> None:
        """Show the app as it was written, and what its backend starts for each role."""
        super().run_with_runner(args, runner)
        if (found := _read_ours(args.app_handle, runner)) is not None:
            for role in found[0].roles:
                print(role.spec.describe_start(), file=sys.stderr)


class CmdCancel(TorchXCmdCancel, _NamedJob):  # type: ignore[misc]
    brief = True
    option = (
        "--save",
        "first let ranks that use torchx_monarch.steps end at one step and save (jobs of torchx-monarch)",
    )

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        super().add_arguments(subparser)
        arguments.add_address(subparser)

    def run_with_runner(self, args: argparse.Namespace, runner: Runner) -> None:
        found = self.read_ours(args, runner)
        if args.is_extended and found is not None and not found[1].is_terminal:
            _save_and_cancel(args.app_handle, found[0], runner, args.address)
            return
        super().run_with_runner(args, runner)
        if found is not None and found[1].is_terminal:
            # One that can never start is still in the queue of a batch system, where TorchX's command leaves it.
            scheduler, _, app_id = parse_app_handle(args.app_handle)
            torchx_api.scheduler_of(runner, scheduler).apps.cancel(app_id)
            print(f"{args.app_handle} had ended before: {found[1].name}", file=sys.stderr)
        elif found is not None:
            print(f"cancelled {args.app_handle}", file=sys.stderr)


def _save_and_cancel(handle: str, app: AppSnapshot, runner: Runner, address: str) -> None:
    from torchx_monarch.client.connection import Target, ask

    reasons, is_stopped = list[str](), False
    roles = [role.spec.name for role in app.roles if role.spec.workload is WorkloadKind.RANKS]
    if not roles:
        reason = f"not cancelled: {handle} has no ranks of its own that could save"
        _exit(CommandError(f"{reason}. To end it without saving: torchx cancel {handle}", USAGE))
    try:
        for role in roles:
            target = Target.from_handle(handle, role, "" if reasons else address, runner)
            answer = ask(target, {"type": "stop", "save": True}, app.grace + _SAVE_EXTRA)
            reasons.append(one_line(str(answer.get("reason"))))
            is_stopped = is_stopped or answer.get("stopped") is True
    except (UnreachableError, RefusedError) as error:
        _exit(CommandError(f"not cancelled: {error}. To end it without saving: torchx cancel {handle}", UNAVAILABLE))
    if not is_stopped:
        print(f"{handle} has ended by itself: {'; '.join(reasons)}", file=sys.stderr)
        return
    reason = "; ".join(["cancelled", *dict.fromkeys(reasons)])
    scheduler, _, app_id = parse_app_handle(handle)
    torchx_api.scheduler_of(runner, scheduler).apps.cancel(app_id, reason=reason)
    print(f"{handle} is {reason}", file=sys.stderr)


class CmdDelete(TorchXCmdDelete, _NamedJob):  # type: ignore[misc]
    brief = True
    option = "--force", "end the job first, if it has not ended (jobs of torchx-monarch)"

    def run_with_runner(self, args: argparse.Namespace, runner: Runner) -> None:
        found = self.read_ours(args, runner)
        if found is not None and not found[1].is_terminal and not args.is_extended:
            print(
                f"{args.app_handle} is {found[1].name}, and delete would end it and remove its logs.\n"
                f"To do so: torchx delete --force {args.app_handle}\n"
                f"To end it and keep its logs: torchx cancel {args.app_handle}",
                file=sys.stderr,
            )
            sys.exit(1)
        super().run_with_runner(args, runner)
        if found is not None:
            print(f"deleted {args.app_handle} and its logs", file=sys.stderr)


class CmdLog(TorchXCmdLog):  # type: ignore[misc]
    """Implement ``torchx log``, whose identifier may go on with a role and replicas."""

    def run(self, args: argparse.Namespace) -> None:
        if "://" not in args.identifier:
            word, slash, rest = args.identifier.partition("/")
            args.identifier = f"{_resolve(word)}{slash}{rest}"
        try:
            with command.run(args, sys.stdout):
                super().run(args)
        except KeyboardInterrupt:
            if args.identifier.partition("://")[0] not in {LOCAL, *(app.scheduler for app in recorded_apps())}:
                raise
            sys.exit(130)


class CmdList(TorchXCmdList):  # type: ignore[misc]
    def run(self, args: argparse.Namespace) -> None:
        with command.run(args):
            super().run(args)
