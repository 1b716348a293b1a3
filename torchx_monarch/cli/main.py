# SPDX-License-Identifier: BSD-3-Clause
"""The ``torchx monarch`` command and the table of its sub-commands."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any, NoReturn

from torchx.cli.cmd_base import SubCommand

SUB_COMMANDS = {
    "doctor": "what is installed, and whether a scheduler can be used",
    "init": "make a monarch_ scheduler the default of this folder",
    "ls": "the jobs and allocations of all schedulers",
    "status": "all that is known of a job, once or until its end",
    "explain": "what happened to a job, for people and programs, in 32 KB at most",
    "logs": "the output of all ranks of a job, in the order of time",
    "exec": "run a command on an allocation's hosts",
    "follow": "the output of a run that was begun elsewhere, and its exit code",
    "ps": "the runs of an allocation",
    "stop": "give an allocation's hosts back, or end one run",
    "wait": "wait for the end of a job, and exit with its exit code",
    "cancel": "end a job and keep its logs, as torchx cancel does",
    "delete": "remove a job that has ended, with its logs, as torchx delete does",
    "prune": "remove jobs that ended long ago, or have large logs",
    "debug": "the pdb of a rank that waits in breakpoint(), on this terminal",
    "stacks": "where the ranks of a job are: their stacks, equal ones together",
    "profile": "what ranks do with their time, as a flame graph or for speedscope",
    "metrics": "what a job has reported over time, as CSV or JSON",
    "compare": "two jobs: their curves over each other, and in what they differ",
    "nodes": "what your jobs have met on each machine",
    "report": "a page about a job: what ran, why it ended, and where its time went",
    "mcp": "a server of the Model Context Protocol, for coding agents",
    "web": "live pages about the jobs of this machine, for a browser",
    "drill": "let one thing after another fail in a program, and compare what it computes",
    "top": "a job and its ranks on one screen, again and again",
}
"""The sub-commands with their help. Each is the module of its name in this package, with ``add_arguments`` and ``run``,
or a class of ``_CLASSES``."""

_CLASSES = {
    "follow": ("exec", "CmdFollow"),
    "ps": ("exec", "CmdPs"),
    "stop": ("exec", "CmdStop"),
    "stacks": ("profile", "CmdStacks"),
    "wait": ("status", "CmdWait"),
    "cancel": ("torchx_commands", "CmdCancel"),
    "delete": ("torchx_commands", "CmdDelete"),
}
"""The module and the class of the sub-commands that share a module."""

_WITHOUT_JSON = ("cancel", "delete", "mcp", "web")

_OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing to stdout. Those of sockets and limits, which name no file either, say nothing of the output."""


def load(name: str) -> Any:
    """Import the module of a sub-command; return it, or an instance of its class."""
    module, class_name = _CLASSES.get(name, (name, ""))
    found = importlib.import_module(f"torchx_monarch.cli.{module}")
    return getattr(found, class_name)() if class_name else found


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Define the arguments of a sub-command, with ``--json`` for nearly all."""
    load(name).add_arguments(parser)
    if name not in _WITHOUT_JSON:
        from torchx_monarch.cli.output import add_json

        add_json(parser)


class _SubCommandParser(argparse.ArgumentParser):
    """A parser that imports its sub-command when it parses: ``torchx --help`` defines all and uses none."""

    sub_command = ""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        if self.sub_command:
            add_arguments(self.sub_command, self)
            self.sub_command = ""
        return super().parse_known_args(args, namespace)


class CmdMonarch(SubCommand):  # type: ignore[misc]
    """Implement ``torchx monarch`` with the sub-commands of ``SUB_COMMANDS``."""

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        version = f"torchx-monarch {metadata.version('torchx-monarch')}"
        subparser.add_argument("--version", action="version", version=version, help="print the version")
        commands = subparser.add_subparsers(
            title="commands", required=True, metavar="COMMAND", dest="sub_command", parser_class=_SubCommandParser
        )
        for name, text in SUB_COMMANDS.items():
            commands.add_parser(name, help=text, description=text).sub_command = name
        refuse = subparser.error

        def error(message: str) -> NoReturn:
            from torchx_monarch.model.spelling import did_you_mean

            typed = re.search(r"invalid choice: '(.*?)'", message)
            refuse(f"{message}{did_you_mean(typed[1], SUB_COMMANDS) if typed else ''}")

        # argparse suggests names itself from Python 3.14 on, if it is asked to.
        subparser.error = error  # type: ignore[method-assign]

    def run(self, args: argparse.Namespace) -> None:
        from torchx.specs import InvalidRunConfigException, MalformedAppHandleException
        from torchx.specs.api import UnknownSchedulerException

        from torchx_monarch.backends.core.errors import UserError
        from torchx_monarch.cli import exit_codes
        from torchx_monarch.cli.arguments import resolve, unknown
        from torchx_monarch.client.hosts import UnknownAppError, say
        from torchx_monarch.exceptions import TorchXMonarchError
        from torchx_monarch.system.termination import signal_of

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a locale may lack the characters of curves
        try:
            try:
                if getattr(args, "handle", None) is not None:
                    args.handle = resolve(args.handle)
                load(args.sub_command).run(args)
            except UnknownAppError:
                raise unknown(args.handle) from None
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt as error:
            sys.exit(128 + signal_of(error))
        except (MalformedAppHandleException, UnknownSchedulerException) as error:
            say(f"{error}. `torchx monarch ls` lists what there is.")
            sys.exit(exit_codes.USAGE)
        except (UserError, InvalidRunConfigException) as error:
            say(str(error))
            sys.exit(exit_codes.USAGE)
        except TorchXMonarchError as error:
            say(str(error))
            sys.exit(getattr(error, "exit_code", exit_codes.UNAVAILABLE))
        except OSError as error:  # of stdout: nobody reads it any more (a run continues on the hosts), or a full disk
            if error.filename is not None or error.errno not in _OF_OUTPUT:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own end
            if isinstance(error, BrokenPipeError):
                sys.exit(exit_codes.BROKEN_PIPE)
            say(f"cannot write the output: {error.strerror or error}")
            sys.exit(exit_codes.OUTPUT)


def main() -> None:
    """Run ``python -m torchx_monarch.cli.main``: `torchx monarch` without the other commands of TorchX."""
    command, parser = CmdMonarch(), argparse.ArgumentParser("torchx monarch")
    command.add_arguments(parser)
    command.run(parser.parse_args())


if __name__ == "__main__":
    main()
