# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch init``: make a scheduler the default of this folder, in its ``.torchxconfig``."""

from __future__ import annotations

import argparse
import configparser
from pathlib import Path

from torchx.runner import config
from torchx.schedulers import get_scheduler_factories

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli.output import print_json
from torchx_monarch.client.hosts import say
from torchx_monarch.schedulers import no_scheduler
from torchx_monarch.system.untrusted_text import one_line

_SECTIONS = ("cli:run", "cli:list")
"""The sections where ``torchx run`` and ``torchx list`` look for a default scheduler; no other command has one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-s", "--scheduler", default="monarch_local", help="the default (default: monarch_local)")


def run(args: argparse.Namespace) -> None:
    if args.scheduler not in get_scheduler_factories():
        raise UserError(no_scheduler(args.scheduler))
    path = Path.cwd() / config.CONFIG_FILE
    found = configparser.RawConfigParser()
    try:
        found.read(path, encoding="utf-8")
        has_default = all(found.get(name, "scheduler", fallback="") == args.scheduler for name in _SECTIONS)
        if not has_default:
            if sections := [f"[{name}]" for name in _SECTIONS if found.has_section(name)]:
                raise UserError(
                    f"{path} is not changed: it has {' and '.join(sections)}. Write `scheduler = {args.scheduler}` "
                    f"into its sections {' and '.join(f'[{name}]' for name in _SECTIONS)} yourself"
                )
            with path.open("a", encoding="utf-8") as file:
                file.write("\n" if file.tell() else "")
                file.write("\n".join(f"[{name}]\nscheduler = {args.scheduler}\n" for name in _SECTIONS))
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        raise UserError(f"{path} is not changed: {one_line(str(error))}") from None
    if args.json:
        print_json({"path": str(path), "scheduler": args.scheduler, "written": not has_default})
    else:
        print(f"{'nothing was written: ' if has_default else ''}the default of {path} is {args.scheduler}")
        print(f"Without -s, `torchx run` and `torchx list` in this folder use {args.scheduler} now.")
    used = config.get_config(prefix="cli", name="run", key="scheduler")
    if used != args.scheduler:  # of the home folder, or of TORCHXCONFIG
        say(f"another .torchxconfig comes first for TorchX, and names {one_line(used or 'no default')}: change that")
