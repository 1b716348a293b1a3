# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch init``: make a scheduler the default of this folder, in its ``.torchxconfig``."""

from __future__ import annotations

import argparse
import configparser
import os
import re
from pathlib import Path

from torchx.runner import config
from torchx.schedulers import get_scheduler_factories

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli.output import add_json, print_json, write_output
from torchx_monarch.cli.torchx_errors import no_scheduler
from torchx_monarch.client.hosts import say
from torchx_monarch.system.untrusted_text import one_line

_SECTIONS = ("cli:run", "cli:list")
"""The sections where ``torchx run`` and ``torchx list`` look for a default scheduler; no other command has one."""

_KEY = "scheduler"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-s", "--scheduler", default="monarch_local", help="the default (default: monarch_local)")
    parser.add_argument("--force", action="store_true", help="replace another default scheduler that the file names")
    parser.add_argument("--dry-run", action="store_true", help="print the file as it would be, and write nothing")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Write the default scheduler into the ``.torchxconfig`` of the current folder, and say what was written."""
    if args.scheduler not in get_scheduler_factories():
        raise UserError(no_scheduler(args.scheduler))
    path = Path.cwd() / config.CONFIG_FILE
    try:
        before = path.read_bytes().decode()
    except FileNotFoundError:
        before = ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    try:
        found = {section: value_of(before, section, _KEY) for section in _SECTIONS}
        after = before
        for section in _SECTIONS:
            after = with_value(after, section, _KEY, args.scheduler)
    except ConfigSyntaxError as error:
        raise UserError(f"{path} is not changed: {one_line(str(error))}") from None
    others = [f"[{section}] {_KEY} = {one_line(value)}" for section, value in found.items() if value]
    if any(value not in (None, args.scheduler) for value in found.values()) and not args.force:
        raise UserError(
            f"{path} is not changed: it says {' and '.join(others)}. To replace that: torchx monarch init --force"
        )
    if not args.dry_run and after != before:
        write_output(str(path), after)
    written = [section for section, value in found.items() if value != args.scheduler]
    if args.json:
        print_json({"path": str(path), _KEY: args.scheduler, "sections": written, "dry_run": args.dry_run})
    elif args.dry_run:
        print(after, end="")
    else:
        _report(path, args.scheduler, written)
    _warn_of_other_files(path, args.scheduler)


def _report(path: Path, scheduler: str, written: list[str]) -> None:
    if not written:
        print(f"{path} names {scheduler} already; nothing was written.")
        return
    print(f"Written to {path}:")
    for section in written:
        print(f"    [{section}] {_KEY} = {scheduler}")
    print(f"Without -s, `torchx run` and `torchx list` in this folder use {scheduler} now.")
    if scheduler == "monarch_local":
        print("Next: torchx run --wait --log monarch.spmd --nproc 4 train.py")
    else:
        print(f"Next: torchx runopts {scheduler}, for the options that a section [{scheduler}] of the file may set")


def _warn_of_other_files(path: Path, scheduler: str) -> None:
    """Say so if TorchX reads another file instead of the written one, or before it."""
    try:
        first = next(map(Path, config.find_configs()), path)
        found = config.get_config(prefix="cli", name="run", key=_KEY)
    except (OSError, ValueError, configparser.Error) as error:  # TORCHXCONFIG names no file
        say(one_line(str(error)))
        return
    if first.resolve() != path.resolve() and found != scheduler:
        why = " (TORCHXCONFIG)" if "TORCHXCONFIG" in os.environ else ""
        say(f"{first} comes first for TorchX{why}, and names {one_line(found or 'no default')}; change it there")


class ConfigSyntaxError(ValueError):
    """Raised for a text that TorchX cannot read; the message names the line, or says what to write by hand."""


def value_of(text: str, section: str, key: str) -> str | None:
    """Return the value of a key; None if the text does not set it."""
    parser = configparser.RawConfigParser(default_section="")  # [DEFAULT] is a section like any other here
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # TorchX tells upper case from lower case, too
    try:
        parser.read_string(text, source=".torchxconfig")
    except configparser.Error as error:
        raise ConfigSyntaxError(" ".join(str(error).split())) from None
    return parser.get(section, key, fallback=None)


def with_value(text: str, section: str, key: str, value: str) -> str:
    """Return the text with a key set to a value, in a section that is added at the end if there is none."""
    before = value_of(text, section, key)
    if before == value:
        return text
    line_end = "\r\n" if "\r\n" in text else "\n"
    setting = f"{key} = {value}{line_end}"
    header = re.search(rf"^[ \t]*\[{re.escape(section)}\][^\n]*(?:\n|\Z)", text, re.MULTILINE)
    if header is None:
        above = f"{text.rstrip()}{line_end}{line_end}" if text.strip() else ""
        changed = f"{above}[{section}]{line_end}{setting}"
    else:
        above, below = text[: header.end()], text[header.end() :]
        if before is not None:
            old = rf"^[ \t]*{re.escape(key)}[ \t]*[=:][^\n]*\n?(?:[ \t]+\S[^\n]*\n?)*"  # with its continuation lines
            below = re.sub(old, "", below, count=1, flags=re.MULTILINE)
        changed = above + ("" if above.endswith("\n") else line_end) + setting + below
    if value_of(changed, section, key) != value:
        raise ConfigSyntaxError(f"write `{key} = {value}` into its section [{section}] yourself")
    return changed
