# SPDX-License-Identifier: BSD-3-Clause
"""Extend ``torchx run``: parse the arguments of this package's components, and suggest names of components.

TorchX uses this class instead of its own because the entry point has the name of its command. It changes the words
after the component's name and nothing else. Components of other packages are passed on as typed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.machinery
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torchx.cli.cmd_run import CmdRun as TorchXCmdRun

from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.schedulers import command, is_ours

_OWN = "monarch."
"""How the names of this package's components begin, as setup.cfg registers them."""

_MODULE = "torchx_monarch.components"

_wrong = functools.partial(CommandError, exit_code=2)


class CmdRun(TorchXCmdRun):  # type: ignore[misc]
    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        super().add_arguments(subparser)
        parse_known_args = subparser.parse_known_args

        def parse(words: Any = None, namespace: Any = None) -> Any:
            parsed, unknown = parse_known_args(words, namespace)
            if unknown and any(word.startswith(_OWN) for word in parsed.component_name_and_args):
                from torchx_monarch.command.component_arguments import no_run_option

                print(no_run_option(unknown[0]), file=sys.stderr)
                sys.exit(2)
            return parsed, unknown

        subparser.parse_known_args = parse  # type: ignore[assignment, method-assign]

    def torchx_json_from_stdin(self, args: argparse.Namespace | None = None) -> dict[str, Any]:
        """Read the JSON of ``--stdin``, and make its options those of the command, as if they were typed."""
        given: dict[str, Any] = super().torchx_json_from_stdin(args)
        for name in ("wait", "log", "dryrun"):
            setattr(args, name, bool(given.get(name)))
        return given

    def run(self, args: argparse.Namespace) -> None:
        with command.run(args, sys.stderr):
            if not args.stdin:
                typed = args.component_name_and_args
                args.component_name_and_args = component_words(typed, args.scheduler, is_run=not args.dryrun)
            super().run(args)


def component_words(typed: list[str], scheduler: str, is_run: bool = True) -> list[str]:
    """Return a component and its arguments in a form that TorchX parses with the same meaning.

    Raises:
        CommandError: they are wrong, or they are to run on this machine and their program is not there.
    """
    from torchx.runner import config

    typed = typed[1:] if typed[:1] == ["--"] else typed
    if typed and not typed[0].startswith("-"):
        component, words = typed[0], typed[1:]
    else:
        component, words = config.get_config(prefix="cli", name="run", key="component") or "", typed
    if ":" in component or not (component.startswith("monarch") or is_ours(scheduler)):
        return typed
    # TorchX finds a component by its name among all that are installed, each of which it checks; by its module it
    # checks that one alone. Defaults of a .torchxconfig belong to the name.
    package, _, name = component.rpartition(".")
    is_by_name = f"{package}." != _OWN or component in config.load_sections("component")
    found_as = component if is_by_name else f"{_MODULE}:{name}"
    function = _function_of(found_as, component)
    if function is None or not component.startswith(_OWN):
        return typed

    from torchx_monarch.command.component_arguments import ComponentArgumentError, component_arguments

    try:
        parsed = component_arguments(component, function, words)
    except ComponentArgumentError as error:
        raise _wrong(str(error)) from None
    if parsed is None:
        return [component, "--help"]
    if scheduler == "monarch_local" and is_run:
        image = parsed.options.get("image", "")
        folder = image if os.path.isdir(image) else os.getcwd()
        if "m" in parsed.options:
            _require_module(parsed.options["m"], folder)
        elif parsed.script:
            _require_script(os.path.join(folder, parsed.script))
        if component == f"{_OWN}ft" and shutil.which("torchft_lighthouse") is None:
            given = {*parsed.options, *config.load_sections("component").get(component, ())}
            if not given & {"lighthouse", "env"}:  # env may name another PATH
                advice = "pip install torchft-nightly, or use --lighthouse http://HOST:PORT"
                raise _wrong(f"torchft_lighthouse is not on PATH: {advice}")
    return [found_as, *parsed.words]


def _require_script(path: str) -> None:
    """Check that a script exists, for a job that runs in a folder of this machine.

    Only that of a Python file is checked, and a folder: torchrun can run other programs, and TorchX can replace macros
    in a path.
    """
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        raise _wrong(f"{path} is a folder without a __main__.py. Give a file in it.")
    if path.endswith(".py") and "$" not in path and not os.path.exists(path):
        _missing(path, "file")


def _require_module(module: str, folder: str) -> None:
    """Check that a module exists if its package is in the folder in which the job runs."""
    package, dot, name = module.rpartition(".")
    path = os.path.join(folder, *package.split("."), name)
    suffixes = ("", *importlib.machinery.all_suffixes())
    if dot and os.path.isdir(os.path.dirname(path)) and not any(os.path.exists(path + suffix) for suffix in suffixes):
        _missing(f"{path}.py", "module")


def _missing(path: str, kind: str) -> NoReturn:
    from torchx_monarch.model.spelling import did_you_mean

    folder, name = os.path.split(os.path.abspath(path))
    beside = os.listdir(folder) if os.path.isdir(folder) else ()
    raise _wrong(f"there is no {kind} {name} in {folder}.{did_you_mean(name, beside)}")


def _function_of(found_as: str, component: str) -> Callable[..., Any] | None:
    """Return the function of a component; None if TorchX is to report what is wrong with it.

    Args:
        found_as: its name, or its module and the name of its function.
    """
    from torchx.schedulers import get_scheduler_factories
    from torchx.specs import finder

    if component.endswith(".py"):  # TorchX would import ``train`` and look for its function ``py``
        raise _wrong(f"{component} is no component. To run a script: torchx run monarch.spmd --nproc 4 {component}")
    try:
        function: Callable[..., Any] = finder.get_component(found_as).fn
        return function
    except finder.ComponentNotFoundException:
        from torchx_monarch.model.spelling import did_you_mean

        if component in get_scheduler_factories():
            raise _wrong(f"{component} is a scheduler. To use it: torchx run -s {component} COMPONENT ...") from None
        hint = did_you_mean(component, finder.get_components())
        raise _wrong(f"there is no component {component}.{hint} `torchx builtins` lists them.") from None
    except finder.ComponentValidationException:
        return None
