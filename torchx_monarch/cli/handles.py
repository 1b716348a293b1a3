# SPDX-License-Identifier: BSD-3-Clause
"""Which app the user means: a handle, an app's id or name, the beginning of one, or ``last``.

The apps are those of this machine's records (``schedulers.recorded_apps``).
"""

from __future__ import annotations

import argparse
import time

from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.insight.summary import show_duration
from torchx_monarch.schedulers.recorded_apps import LAST, named, recorded_apps
from torchx_monarch.system.untrusted_text import one_line

HELP = "the app: its handle, its id or name, the beginning of one, or 'last'"

_CANDIDATES = 8
"""Apps that a message lists at most."""


def add_handle(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Define the argument ``handle`` of a sub-command; ``resolve`` is applied to it before the sub-command runs."""
    text = HELP if required else f"{HELP} (default: last)"
    parser.add_argument("handle", nargs=None if required else "?", default=LAST, metavar="HANDLE", help=text)


def resolve(word: str) -> str:
    """Return the handle of the app that a word names (``named``).

    A handle is returned as it is: it may be of an app that another machine has submitted.

    Raises:
        CommandError: no app is named so, or several begin so.
    """
    if "://" in word:
        return word
    if word == LAST:
        if not (apps := recorded_apps()):
            raise CommandError("no app was submitted from this machine yet", exit_codes.UNKNOWN_APP)
        return apps[0].handle
    found = named(word)
    if len(found) == 1:
        return found[0].handle
    if found:
        ages = [show_duration(time.time() - app.submitted) for app in found[:_CANDIDATES]]
        lines = [f"  {one_line(app.handle)}  submitted {age} ago" for app, age in zip(found, ages, strict=False)]
        message = f"{one_line(word)!r} may be one of {len(found)} apps; type more of its id:"
        raise CommandError("\n".join([message, *lines]), exit_codes.USAGE)
    raise unknown(word)


def unknown(word: str) -> CommandError:
    """Return the error for a word that names no app, with the apps whose names are similar."""
    import difflib

    apps = [app for app in recorded_apps() if app.handle != word]  # which its scheduler does not know any more
    words = {app_word for app in apps for app_word in app.words}
    alike = {*difflib.get_close_matches(word.rpartition("/")[2], words, _CANDIDATES)}
    near = [f"  {one_line(app.handle)}" for app in apps if app.words & alike][:_CANDIDATES]
    text = f"there is no app {one_line(word)!r}"
    if near:
        return CommandError("\n".join([f"{text}; similar ones:", *near]), exit_codes.UNKNOWN_APP)
    return CommandError(f"{text}; `torchx monarch ls` lists all", exit_codes.UNKNOWN_APP)
