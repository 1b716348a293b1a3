# SPDX-License-Identifier: BSD-3-Clause
"""Extend ``torchx run``: parse the arguments of this package's components, suggest names, explain TorchX's errors.

TorchX uses this class instead of its own because the entry point has the name of its command. It changes the words
after the component's name and nothing else. Components of other packages are passed on as typed.
"""

from __future__ import annotations

import argparse
import configparser
import inspect
import os
import re
import sys
from collections.abc import Callable
from traceback import walk_tb
from types import TracebackType
from typing import Any, NoReturn

from torchx.cli.cmd_run import CmdRun as TorchXCmdRun

from torchx_monarch.schedulers import command as torchx_command
from torchx_monarch.system.untrusted_text import one_line

_OWN = "monarch."
"""How the names of this package's components begin, as setup.cfg registers them."""

_OF_DOCKER = ("docker", "requests", "urllib3")
"""The packages whose exceptions mean that TorchX's default scheduler has no Docker daemon."""


class CmdRun(TorchXCmdRun):  # type: ignore[misc]
    """Implement ``torchx run``."""

    def run(self, args: argparse.Namespace) -> None:
        """Run a component; exit with a message if its name, its arguments or its script are wrong."""
        if not args.stdin:
            args.component_name_and_args = _checked(args)
        torchx_command.run_options = args
        try:
            super().run(args)
        finally:
            torchx_command.run_options = None

    def torchx_json_from_stdin(self, args: argparse.Namespace | None = None) -> dict[str, Any]:
        """Return what ``--stdin`` reads, which says in the place of the options whether the command waits."""
        found: dict[str, Any] = super().torchx_json_from_stdin(args)
        if args is not None:
            args.wait, args.log = found.get("wait", False), found.get("log", False)
        return found


def _checked(args: argparse.Namespace) -> list[str]:
    """Return the component and its arguments in a form that TorchX parses with the same meaning.

    Raises:
        SystemExit: the component does not exist, its arguments are wrong, or its script does not exist.
    """
    from torchx.runner import config

    typed: list[str] = args.component_name_and_args
    typed = typed[1:] if typed[:1] == ["--"] else typed
    if typed and not typed[0].startswith("-"):
        component, words = typed[0], typed[1:]
    else:
        component, words = config.get_config(prefix="cli", name="run", key="component") or "", typed
    if not component or ":" in component:
        return typed
    function = _function_of(component)
    if function is None or not component.startswith(_OWN):
        return typed

    from torchx_monarch.command.component_arguments import ComponentArgumentError, component_arguments

    parameters = inspect.signature(function).parameters.values()
    options = {
        parameter.name: parameter.annotation
        for parameter in parameters
        if parameter.kind is not parameter.VAR_POSITIONAL
    }
    try:
        parsed = component_arguments(component, words, options, program=len(options) < len(parameters))
    except ComponentArgumentError as error:
        _exit(str(error))
    if parsed is None:
        return [component, "--help"]
    if args.scheduler == "monarch_local" and not args.dryrun:
        _require_script(parsed.script, parsed.options.get("image", ""))
    return [component, *parsed.words]


def _require_script(script: str, image: str) -> None:
    """Check that a script exists, for a job that runs in a folder of this machine.

    Args:
        script: its path as typed. Only that of a Python file is checked: torchrun can run other programs, and TorchX
            can replace macros in a path.
        image: the folder in which the job runs, if it is one; else the job runs in the current folder.
    """
    path = os.path.join(image if os.path.isdir(image) else os.getcwd(), script)
    if not script.endswith(".py") or "$" in script or os.path.exists(path):
        return
    from torchx_monarch.model.spelling import did_you_mean

    folder, name = os.path.split(os.path.abspath(path))
    try:
        beside = os.listdir(folder)
    except OSError as error:
        _exit(f"there is no file {script}: {folder}: {error.strerror}")
    _exit(f"there is no file {name} in {folder}.{did_you_mean(name, beside)}")


def _function_of(component: str) -> Callable[..., Any] | None:
    """Return the function of a component; None if TorchX is to report what is wrong with it.

    Raises:
        SystemExit: the component does not exist.
    """
    from torchx.specs import finder

    if component.endswith(".py"):  # TorchX would import ``train`` and look for its function ``py``
        _exit(f"{component} is no component. To run a script: torchx run monarch.spmd --nproc 4 {component}")
    try:
        function: Callable[..., Any] = finder.get_component(component).fn
        return function
    except finder.ComponentNotFoundException:
        from torchx_monarch.model.spelling import did_you_mean

        hint = did_you_mean(component, finder.get_components())
        _exit(f"there is no component {component}.{hint} `torchx builtins` lists them.")
    except finder.ComponentValidationException:
        return None


def _exit(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


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
    from torchx.schedulers import get_default_scheduler_name, get_scheduler_factories
    from torchx.specs.api import MalformedAppHandleException, UnknownSchedulerException

    from torchx_monarch.model.spelling import did_you_mean
    from torchx_monarch.schedulers.command import USER_ERRORS, subcommand

    command = subcommand()
    if isinstance(error, configparser.Error):
        return f"TorchX cannot read a .torchxconfig, of this folder or of the home folder: {error}"
    if isinstance(error, (OSError, UnicodeDecodeError)) and _is_of_configuration(error):
        return f"TorchX cannot read its configuration: {_unreadable_file() or error}"
    if not command:
        return ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, USER_ERRORS):  # outside of the runner's context, see ``schedulers.command``
        return str(error)
    if isinstance(error, MalformedAppHandleException):
        return f"{error}.{_handle_like(str(error).partition(' ')[0])} `torchx monarch ls` lists handles"
    if isinstance(error, UnknownSchedulerException):
        found = re.search(r"backend: (\S+) does", str(error))
        name, schedulers = found[1] if found else "of this name", list(get_scheduler_factories())
        return f"there is no scheduler {name}.{did_you_mean(name, schedulers)} Schedulers are: {', '.join(schedulers)}"
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


def _is_of_configuration(error: BaseException) -> bool:
    """Return whether TorchX was reading its configuration files when an exception was raised."""
    return any(frame.f_globals.get("__name__") == "torchx.runner.config" for frame, _ in walk_tb(error.__traceback__))


def _unreadable_file() -> str:
    """Return which configuration file is not text in UTF-8, and why; empty if each is, or if there is none."""
    from torchx.runner import config

    from torchx_monarch.backends.core.errors import UserError
    from torchx_monarch.schedulers.run_options import read_config

    try:
        for path in config.find_configs():
            read_config(path)
    except UserError as error:
        return str(error)
    except OSError:
        pass
    return ""


def _handle_like(word: str) -> str:
    """Return a suggestion of the handle whose app's id or name is most like a word; empty if none is near."""
    from torchx_monarch.cli.handles import known_apps
    from torchx_monarch.model.spelling import nearest

    handles = {name: app.handle for app in reversed(known_apps()) for name in app.words}
    near = nearest(word, handles)
    return f" Did you mean {one_line(handles[near])}?" if near else ""
