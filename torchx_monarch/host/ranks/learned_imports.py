# SPDX-License-Identifier: BSD-3-Clause
"""Report which installed modules a program has imported, and import them ahead of its next run.

The zygote runs this file if it learns (``-cfg preload=auto``), and its forks use it: it imports the standard library
alone.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import site
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

_OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
)
"""Variables that the zygote lacks: a module that reads one when it is imported gets another value in a rank."""


class InstalledModules:
    """The modules in the folders into which packages are installed (``site-packages``).

    What lies in an entry of PYTHONPATH, or in the folder that the program puts first in ``sys.path``, is the user's
    own, even inside a folder of installed packages.

    Attributes:
        times: when each of these folders was changed, as packages are installed and removed (``times_of``).
    """

    def __init__(self, program_folder: str = "") -> None:
        roots = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
        if site.ENABLE_USER_SITE:
            roots.append(site.getusersitepackages())
        self._places = _folders(*roots)
        self.times = times_of(self._places)
        own = _folders(*filter(None, [*os.environ.get("PYTHONPATH", "").split(os.pathsep), program_folder]))
        self._own = tuple(path for path in own if path.startswith(self._places))
        self._standard = _folders(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))

    def imported_since(self, before: set[str]) -> list[str]:
        """Return the names of installed modules that have been imported, in the order of import.

        It looks at the paths alone, in a fraction of a millisecond: ``offers`` makes sure before an import.
        """
        found = ((name, _spec_of(name)) for name in list(sys.modules) if name not in before)
        return [name for name, spec in found if spec and spec.name == name and self._is_installed(str(spec.origin))]

    def offers(self, name: str) -> bool:
        """Return whether a module would be imported from where packages are installed."""
        parent = name.rpartition(".")[0]
        if parent and parent not in sys.modules:
            return False  # to find the module would import the packages around it
        try:
            spec = importlib.util.find_spec(name)
        except Exception:
            return False
        return spec is not None and spec.has_location and self._holds(os.path.realpath(str(spec.origin)))

    def foreign(self, names: Sequence[str]) -> str:
        """Return the file of the first of some imported modules that is neither installed nor Python's own."""
        for spec in map(_spec_of, names):
            if spec and spec.has_location and isinstance(spec.origin, str):
                path = os.path.realpath(spec.origin)
                is_installed = self._is_installed(path) or self._is_installed(spec.origin)
                if not self._holds(path) and (is_installed or not path.startswith(self._standard)):
                    return spec.origin
        return ""

    def _is_installed(self, path: str) -> bool:
        return path.startswith(self._places)

    def _holds(self, path: str) -> bool:
        return self._is_installed(path) and not path.startswith(self._own)


def import_ahead(
    order: dict[str, Any],
    installed: InstalledModules,
    what_is_new: Callable[[str], str],
    begin: Callable[[str], None],
) -> dict[str, Any]:
    """Import the modules that were learned, up to the first one that must not be imported ahead.

    The order has ``learned``, the names; ``variables``, those that the program sets; and ``folder``, the one that the
    program puts first in ``sys.path``. ``what_is_new`` returns what an import has added that forbids forks, empty if
    nothing; ``begin`` is called before each import.

    Returns:
        ``wrong``, why the last module must not be imported ahead, empty if all may be; ``ahead``, the names of all
        modules that were imported, without those in packages; ``times``, as of ``InstalledModules``.
    """
    first, handlers, own = set(sys.modules), _signal_handlers(), names_in(order["folder"])
    wrong, environ = "", dict(os.environ)

    def why_wrong(name: str, new: Sequence[str], reads: Collection[str]) -> str:
        # Packages set defaults for others, such as KMP_INIT_AT_FORK, as they do in the program.
        read = [name for name in sorted(reads) if name in _OF_A_RANK or os.environ.get(name) == environ.get(name)]
        if why := what_is_new(name):
            return why
        if read:
            which = "" if read[0] in _OF_A_RANK else ", which the program sets"
            return f"it reads {read[0]} when it is imported{which}"
        if _signal_handlers() != handlers:
            return "it sets a signal handler when it is imported"
        if file := installed.foreign(new):
            return f"it imports {file}, which is not an installed module"
        taken = sorted({module.partition(".")[0] for module in new} & own)
        return f"it imports {taken[0]}, and so does the program from its own folder" if taken else ""

    with _recorded_reads({*_OF_A_RANK, *order["variables"]}) as reads:
        for name in order["learned"]:
            if wrong or name in sys.modules or not installed.offers(name):
                continue
            begin(name)
            before = set(sys.modules)
            try:
                importlib.import_module(name)
            except Exception as error:
                wrong = f"it cannot be imported before the program: {type(error).__name__}: {error}"
            else:
                wrong = why_wrong(name, [module for module in sys.modules if module not in before], reads)
    ahead = sorted({module.partition(".")[0] for module in sys.modules if module not in first})
    return {"wrong": wrong, "ahead": ahead, "times": installed.times}


def report_at_end(path: str, installed: InstalledModules) -> Callable[[], None]:
    """Return a function for the end of the program that writes which installed modules it has imported, as JSON, and
    which environment variables it has changed."""
    before, own_pid, environ = set(sys.modules), os.getpid(), dict(os.environ)

    def report() -> None:
        if os.getpid() != own_pid:  # a fork of the program
            return
        with contextlib.suppress(Exception):  # a failure here must not change the end of the program
            with open(f"{path}.tmp", "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                names = environ.keys() | os.environ.keys()
                changed = sorted(name for name in names if environ.get(name) != os.environ.get(name))
                file.write(json.dumps({"names": installed.imported_since(before), "variables": changed}))
            os.replace(f"{path}.tmp", path)

    return report


def names_in(folder: str) -> set[str]:
    """Return the names of the modules and packages in a folder; one without ``__init__.py`` does not come before an
    installed package."""
    suffixes, names = importlib.machinery.all_suffixes(), set[str]()
    with contextlib.suppress(OSError):
        for entry in os.listdir(folder or os.devnull):
            name, dot, suffix = entry.partition(".")
            inits = (os.path.join(folder, entry, f"__init__{module_suffix}") for module_suffix in suffixes)
            if (f".{suffix}" in suffixes) if dot else any(map(os.path.exists, inits)):
                names.add(name)
    return names


def times_of(folders: Iterable[str]) -> dict[str, int]:
    """Return when something was last added to or removed from folders, those that exist, in nanoseconds."""
    times = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            times[folder] = os.stat(folder).st_mtime_ns
    return times


def _folders(*paths: str | None) -> tuple[str, ...]:
    """Return folders with a slash at the end, also with links resolved."""
    found = [path for path in paths if path]
    return tuple(dict.fromkeys(f"{path.rstrip(os.sep)}{os.sep}" for path in (*found, *map(os.path.realpath, found))))


def _spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    module = sys.modules.get(name)
    spec = getattr(module, "__dict__", {}).get("__spec__")  # attributes of a lazy module may import others
    return spec if isinstance(spec, importlib.machinery.ModuleSpec) else None


def _signal_handlers() -> list[Any]:
    return [signal.getsignal(number) for number in sorted(signal.valid_signals())]


@contextlib.contextmanager
def _recorded_reads(names: Collection[str]) -> Iterator[set[str]]:
    """Yield a set to which each of some variables is added that is looked up in ``os.environ``, also by ``in``."""
    reads, kind = set[str](), os.environ.__class__

    class _ReadEnviron(kind):  # type: ignore[valid-type, misc]
        def __getitem__(self, name: str) -> str:
            if name in names:
                reads.add(name)
            return str(super().__getitem__(name))

    os.environ.__class__ = _ReadEnviron
    try:
        yield reads
    finally:
        os.environ.__class__ = kind
