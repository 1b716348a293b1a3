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
from typing import TYPE_CHECKING, Any

from torchx.cli.cmd_base import AppHandleSubCommand
from torchx.cli.cmd_cancel import CmdCancel as TorchXCmdCancel
from torchx.cli.cmd_delete import CmdDelete as TorchXCmdDelete
from torchx.cli.cmd_describe import CmdDescribe as TorchXCmdDescribe
from torchx.cli.cmd_list import CmdList as TorchXCmdList
from torchx.cli.cmd_log import CmdLog as TorchXCmdLog
from torchx.cli.cmd_status import CmdStatus as TorchXCmdStatus
from torchx.runner import Runner
from torchx.specs import parse_app_handle

from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.cli import arguments
from torchx_monarch.cli.exit_codes import FAILED, UNAVAILABLE, USAGE, CommandError
from torchx_monarch.exceptions import RefusedError, UnreachableError
from torchx_monarch.model.role_spec import WorkloadKind
from torchx_monarch.schedulers import command
from torchx_monarch.schedulers.recorded_apps import LOCAL, recorded_apps
from torchx_monarch.system.untrusted_text import one_line

_SAVE_EXTRA = 60.0
"""Seconds beyond the grace period in which replica 0 says how ranks have ended."""

if TYPE_CHECKING:
    from torchx_monarch.backends.core.apps import Apps
    from torchx_monarch.backends.core.snapshot import AppSnapshot
    from torchx_monarch.model.state import State


def _read_ours(handle: str, runner: Runner, option: str = "") -> tuple[Apps[Any], AppSnapshot, State] | None:
    """Return a job of this package with its state and the apps of its scheduler; None for another scheduler's job.

    Args:
        option: what the user has typed that is for jobs of this package alone; empty for nothing.

    Raises:
        CommandError: the job does not exist, or is another scheduler's and the option is for none of these.
    """
    from torchx_monarch.schedulers.monarch import scheduler_of

    try:
        name, _, app_id = parse_app_handle(handle)
        apps = scheduler_of(name, runner).apps
    except BackendError:
        raise
    except Exception:  # TorchX's command raises it again, unless the scheduler is of another package
        if option:
            raise CommandError(f"torchx: error: unrecognized arguments: {option}", 2) from None
        return None
    found = apps.read(app_id, brief=True)
    if found is None:
        raise arguments.unknown(handle)
    return apps, found[0], found[1].state


class _NamedJob(AppHandleSubCommand):  # type: ignore[misc]
    """The base class of TorchX's commands, with a handle that may be a word for the job.

    Attributes:
        brief: as in ``TorchXCommand``.
    """

    brief = False

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        subparser.add_argument("app_handle", type=str, help=arguments.HELP)

    def run(self, args: argparse.Namespace) -> None:
        with command.run(args, brief=self.brief):
            args.app_handle = arguments.resolve(args.app_handle)
            super().run(args)


class CmdStatus(TorchXCmdStatus, _NamedJob):  # type: ignore[misc]
    """Implement ``torchx status``."""


class CmdDescribe(TorchXCmdDescribe, _NamedJob):  # type: ignore[misc]
    def run_with_runner(self, args: argparse.Namespace, runner: Runner) -> None:
        """Show the app as it was written, and what its backend starts for each role."""
        super().run_with_runner(args, runner)
        if (found := _read_ours(args.app_handle, runner)) is not None:
            for role in found[1].roles:
                print(role.spec.describe_start(), file=sys.stderr)


class CmdCancel(TorchXCmdCancel, _NamedJob):  # type: ignore[misc]
    brief = True

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        super().add_arguments(subparser)
        help_text = "first let ranks that use torchx_monarch.steps end at one step and save (jobs of torchx-monarch)"
        subparser.add_argument("--save", action="store_true", help=help_text)
        arguments.add_address(subparser)

    def run_with_runner(self, args: argparse.Namespace, runner: Runner) -> None:
        if args.address and not args.save:
            raise CommandError("--address is where --save reaches the ranks; without --save leave it out", USAGE)
        found = _read_ours(args.app_handle, runner, "--save" if args.save else "")
        if found is None:
            super().run_with_runner(args, runner)
            return
        apps, app, state = found
        if args.save and not state.is_terminal:
            _save_and_cancel(args.app_handle, apps, app, runner, args.address)
            return
        super().run_with_runner(args, runner)
        if state.is_terminal:
            # One that can never start is still in the queue of a batch system, where TorchX's command leaves it.
            apps.cancel(app.app_id)
            print(f"{args.app_handle} had ended before: {state.name}", file=sys.stderr)
        else:
            print(f"cancelled {args.app_handle}", file=sys.stderr)


def _save_and_cancel(handle: str, apps: Apps[Any], app: AppSnapshot, runner: Runner, address: str) -> None:
    from torchx_monarch.client.connection import Target, ask

    reasons, is_stopped = list[str](), False
    roles = [role.spec.name for role in app.roles if role.spec.workload is WorkloadKind.RANKS]
    if not roles:
        reason = f"not cancelled: {handle} has no ranks of its own that could save"
        raise CommandError(f"{reason}. To end it without saving: torchx cancel {handle}", USAGE)
    try:
        for role in roles:
            target = Target.from_handle(handle, role, "" if reasons else address, runner)
            answer = ask(target, {"type": "stop", "save": True}, app.grace + _SAVE_EXTRA)
            reasons.append(one_line(str(answer.get("reason"))))
            is_stopped = is_stopped or answer.get("stopped") is True
    except (UnreachableError, RefusedError) as error:
        advice = f"To end it without saving: torchx cancel {handle}"
        raise CommandError(f"not cancelled: {error}. {advice}", UNAVAILABLE) from None
    if not is_stopped:
        print(f"{handle} has ended by itself: {'; '.join(reasons)}", file=sys.stderr)
        return
    reason = "; ".join(["cancelled", *dict.fromkeys(reasons)])
    apps.cancel(app.app_id, reason=reason)
    print(f"{handle} is {reason}", file=sys.stderr)


class CmdDelete(TorchXCmdDelete, _NamedJob):  # type: ignore[misc]
    brief = True

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        super().add_arguments(subparser)
        help_text = "end the job first, if it has not ended (jobs of torchx-monarch)"
        subparser.add_argument("--force", action="store_true", help=help_text)

    def run_with_runner(self, args: argparse.Namespace, runner: Runner) -> None:
        found = _read_ours(args.app_handle, runner, "--force" if args.force else "")
        if found is not None and not found[2].is_terminal and not args.force:
            raise CommandError(
                f"{args.app_handle} is {found[2].name}, and delete would end it and remove its logs.\n"
                f"To do so: torchx delete --force {args.app_handle}\n"
                f"To end it and keep its logs: torchx cancel {args.app_handle}",
                FAILED,
            )
        super().run_with_runner(args, runner)
        if found is not None:
            print(f"deleted {args.app_handle} and its logs", file=sys.stderr)


class CmdLog(TorchXCmdLog):  # type: ignore[misc]
    """Implement ``torchx log``, whose identifier may go on with a role and replicas."""

    def run(self, args: argparse.Namespace) -> None:
        try:
            with command.run(args, sys.stdout):
                if "://" not in args.identifier:
                    word, slash, rest = args.identifier.partition("/")
                    args.identifier = f"{arguments.resolve(word)}{slash}{rest}"
                super().run(args)
        except KeyboardInterrupt:
            if args.identifier.partition("://")[0] not in {LOCAL, *(app.scheduler for app in recorded_apps())}:
                raise
            sys.exit(130)


class CmdList(TorchXCmdList):  # type: ignore[misc]
    def run(self, args: argparse.Namespace) -> None:
        with command.run(args):
            super().run(args)
