# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch completion``: print the script by which a shell completes commands, options and handles.

The script runs ``torchx`` with argcomplete's variables in the environment. TorchX does not know argcomplete, but asks
each sub-command to define its arguments before it parses its own: ``complete`` answers the shell then.
"""

from __future__ import annotations

import argparse

from torchx_monarch.cli.output import add_json, print_json

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS, help='in ~/.bashrc: eval "$(torchx monarch completion bash)"')
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Print the script."""
    from argcomplete.shell_integration import shellcode

    script = shellcode(["torchx"], shell=args.shell)
    print_json({"shell": args.shell, "script": script}) if args.json else print(script)


_is_completing = False


def complete() -> None:
    """Answer a shell that completes a command line of ``torchx``, and end this process."""
    global _is_completing
    if _is_completing:  # the parser that is made here asks all sub-commands for their arguments, too
        return
    _is_completing = True
    import argcomplete
    from torchx.cli.main import create_parser, get_sub_cmds

    argcomplete.autocomplete(create_parser(get_sub_cmds()), always_complete_options=False)
