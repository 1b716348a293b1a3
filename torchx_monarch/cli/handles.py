# SPDX-License-Identifier: BSD-3-Clause
"""Which app the user means: a handle, an app's id or name, the beginning of one, or ``last``.

The apps are those of this machine's records, which were submitted with its state directory. No scheduler is asked, so
that an app is found within milliseconds, whatever cannot be reached.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from dataclasses import dataclass

from torchx_monarch.backends.core import state_files, stored_apps
from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.insight.summary import show_duration
from torchx_monarch.schedulers import NAMES
from torchx_monarch.system.untrusted_text import one_line

LOCAL = "monarch_local"

LAST = "last"
"""The word for the app that was submitted last."""

HELP = "the app: its handle, its id or name, the beginning of one, or 'last'"

_CANDIDATES = 8
"""Apps that a message lists at most."""


def add_handle(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Define the argument ``handle`` of a sub-command; ``resolve`` is applied to it before the sub-command runs."""
    text = HELP if required else f"{HELP} (default: last)"
    parser.add_argument("handle", nargs=None if required else "?", default=LAST, metavar="HANDLE", help=text)


def resolve(word: str) -> str:
    """Return the handle of the app that a word names.

    An id or a name counts before the beginning of another one, and a name that several apps have means the newest. A
    handle is returned as it is: it may be of an app that another machine has submitted.

    Raises:
        CommandError: no app is named so, or several begin so.
    """
    if "://" in word:
        return word
    apps = recorded_apps()
    if word == LAST:
        if not apps:
            raise CommandError("no app was submitted from this machine yet", exit_codes.UNKNOWN_APP)
        return apps[0].handle
    for named in ([app for app in apps if app.app_id == word], [app for app in apps if word in app.words]):
        if named:
            return named[0].handle
    found = [app for app in apps if any(app_word.startswith(word) for app_word in app.words)] if word else []
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


# -- the apps of this machine ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedApp:
    """An app of this machine's records; its name is empty if they lack it."""

    scheduler: str
    app_id: str
    name: str
    submitted: float

    @property
    def handle(self) -> str:
        """The app's TorchX handle."""
        return f"{self.scheduler}://torchx/{self.app_id}"

    @property
    def words(self) -> set[str]:
        """The words that name the app: its id, also without a namespace or queue (``default:app-x7``), and its name."""
        return {self.app_id, self.app_id.rpartition(":")[2], self.name} - {""}


def recorded_apps() -> list[RecordedApp]:
    """Return all apps, the newest first; raise CommandError if the state directory cannot be read."""
    found, folder = [], state_files.state_dir()
    links = {name: os.path.join(folder, name.removeprefix("monarch_"), state_files.BATCH_IDS) for name in NAMES}
    try:
        app_ids = state_files.app_ids()
        linked = {(name, app_id) for name, path in links.items() for app_id in state_files.names_in(path)}
    except OSError as error:
        raise CommandError(f"the records of apps cannot be read: {error}", exit_codes.UNAVAILABLE) from None
    for app_id in app_ids:
        paths = state_files.app_paths(app_id)
        if os.path.lexists(paths.status):  # written last
            found.append(_app(LOCAL, app_id, paths.app))
    known = stored_apps.apps_with_credentials()
    for scheduler, app_id in known:
        found.append(_app(scheduler, app_id, stored_apps.credentials(scheduler).path(app_id)))
    for scheduler, app_id in linked - set(known):  # a submitter that was killed has stored no credentials
        found.append(_app(scheduler, app_id, os.path.join(links[scheduler], app_id)))
    return sorted(found, key=lambda app: (app.submitted, app.app_id), reverse=True)


def _app(scheduler: str, app_id: str, file: str) -> RecordedApp:
    submitted = 0.0
    with contextlib.suppress(OSError):
        submitted = os.lstat(file).st_mtime
    name = "" if scheduler == LOCAL else stored_apps.load_credentials(scheduler, app_id).name
    if not name:  # TorchX makes most ids of the name and a random suffix (torchx.schedulers.ids.make_unique)
        name = app_id.rpartition("-")[0].rpartition(":")[2]
    return RecordedApp(scheduler, app_id, name, submitted)


def used_schedulers() -> list[str]:
    """Return the names of the schedulers that have run an app of this machine's records, the local one first."""
    return [LOCAL, *sorted({app.scheduler for app in recorded_apps()} - {LOCAL})]
