# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch preload``: print or clear what ``-cfg preload=auto`` has learned on this machine."""

from __future__ import annotations

import argparse
import os
import sys

from torchx_monarch.backends.core import state_files
from torchx_monarch.cli.output import add_json, print_json, print_table
from torchx_monarch.client.hosts import say
from torchx_monarch.model.learned_modules import LearnedModules, files_in
from torchx_monarch.system.untrusted_text import one_line

_FIELDS = ("app", "role", "program", "names", "dropped", "variables")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("app", nargs="?", help="name of the jobs, without their random suffix (default: all)")
    add_json(parser)
    parser.add_argument("--clear", action="store_true", help="forget it")


def run(args: argparse.Namespace) -> None:
    """Print or clear what was learned."""
    read = ((path, LearnedModules.read(path)) for path in files_in(os.path.join(state_files.state_dir(), "learned")))
    found = [(path, modules) for path, modules in read if modules.app and args.app in (None, modules.app)]
    if args.clear:
        for path, _ in found:
            try:
                os.unlink(path)
            except OSError as error:
                say(f"cannot remove {path}: {error.strerror}")
                sys.exit(1)
    if args.json:
        shown = ("app", "role", "program") if args.clear else _FIELDS
        print_json([{name: getattr(modules, name) for name in shown} for _, modules in found])
    elif not args.clear:
        rows = []
        for _, modules in found:
            packages = ", ".join(sorted({name.partition(".")[0] for name in modules.names}))
            program = map(one_line, (modules.app, modules.role, modules.program))
            rows.append([*program, str(len(modules.names)), packages])
        print_table(["APP", "ROLE", "PROGRAM", "MODULES", "OF"], rows)
        for _, modules in found:
            for name, why in modules.dropped.items():
                print(f"{one_line(modules.app)}: {name} is not imported ahead: {one_line(why)}")
