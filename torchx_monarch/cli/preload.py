# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch preload``: print or clear what ``-cfg preload=auto`` has learned on this machine."""

from __future__ import annotations

import argparse
import os
import sys

from torchx_monarch.backends.core import state_files
from torchx_monarch.cli.output import add_json, print_json, print_table
from torchx_monarch.client.hosts import say
from torchx_monarch.model.learned_modules import LearnedFile
from torchx_monarch.system.untrusted_text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``torchx monarch preload``."""
    parser.add_argument("app", nargs="?", help="name of the jobs, without their random suffix (default: all)")
    add_json(parser)
    parser.add_argument("--clear", action="store_true", help="forget it")


def run(args: argparse.Namespace) -> None:
    """Print or clear what was learned."""
    folder = os.path.join(state_files.state_dir(), "learned")
    found = [file for file in LearnedFile.all_in(folder) if args.app in (None, file.app)]
    learned = [(file, {} if args.clear else vars(file.read())) for file in found]
    if args.clear:
        for file in found:
            try:
                os.unlink(file.path)
            except OSError as error:
                say(f"cannot remove {file.path}: {error.strerror}")
                sys.exit(1)
    if args.json:
        print_json([{"app": file.app, "role": file.role, "program": file.program, **more} for file, more in learned])
    elif not args.clear:
        rows = []
        for file, more in learned:
            packages = ", ".join(sorted({name.partition(".")[0] for name in more["names"]}))
            rows.append([*map(one_line, (file.app, file.role, file.program)), str(len(more["names"])), packages])
        print_table(["APP", "ROLE", "PROGRAM", "MODULES", "OF"], rows)
        for file, more in learned:
            for name, why in more["dropped"].items():
                print(f"{one_line(file.app)}: {name} is not imported ahead: {one_line(why)}")
