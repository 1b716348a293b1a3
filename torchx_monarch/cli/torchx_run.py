# SPDX-License-Identifier: BSD-3-Clause
"""Extend ``torchx run``: parse the arguments of this package's components, and suggest names of components.

TorchX uses this class instead of its own because the entry point has the name of its command. It changes the words
after the component's name and nothing else. Components of other packages are passed on as typed.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torchx.cli.cmd_run import CmdRun as TorchXCmdRun

from torchx_monarch.schedulers import command

_OWN = "monarch."
"""How the names of this package's components begin, as setup.cfg registers them."""


class CmdRun(TorchXCmdRun):  # type: ignore[misc]
    """Implement ``torchx run``."""

    def run(self, args: argparse.Namespace) -> None:
        """Run a component; exit with a message if its name, its arguments or its script are wrong."""
        if not args.stdin:
            args.component_name_and_args = _checked(args)
        command.run_options = args
        try:
            super().run(args)
        finally:
            command.run_options = None

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
