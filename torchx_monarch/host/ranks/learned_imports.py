# SPDX-License-Identifier: BSD-3-Clause
"""Record which installed modules a program imports, and import them ahead of its next start, in the state that it had.

Only what a program imports by itself is recorded, with the environment variables and warning filters at that moment:
what these modules import follows. The zygote imports them in the same order, and notes the variables that they read. A
rank whose program is in another state when it imports one begins again as an interpreter of its own.

The zygote and its forks run this file: it imports the standard library alone.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import json
import locale
import os
import re
import signal
import site
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

_OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"),
)
"""Variables that the zygote lacks: a module that reads one when it is imported gets another value in a rank."""

_FOLDER = "working folder"
"""Stands among the variables that a module has read for the folder in which it was imported."""

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that ``preloaded_modules`` observes when the program imports torch or numpy."""


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

    def find(self, name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that would be imported from where packages are installed, as a finder does."""
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        is_installed = spec is not None and spec.has_location and self._holds(os.path.realpath(str(spec.origin)))
        return spec if is_installed else None

    def foreign(self, names: Iterable[str]) -> str:
        """Return the file of the first of some imported modules that is neither installed nor Python's own."""
        for name in names:
            spec = getattr(sys.modules[name], "__dict__", {}).get("__spec__")  # a lazy module may import for attributes
            if isinstance(spec, importlib.machinery.ModuleSpec) and spec.has_location and isinstance(spec.origin, str):
                path = os.path.realpath(spec.origin)
                is_installed = path.startswith(self._places) or spec.origin.startswith(self._places)
                if not self._holds(path) and (is_installed or not path.startswith(self._standard)):
                    return spec.origin
        return ""

    def _holds(self, path: str) -> bool:
        return path.startswith(self._places) and not path.startswith(self._own)


class ProgramState:
    """What modules may see of the program that imports them, beside their names, since this object was created."""

    def __init__(self) -> None:
        self._environ, self._place, self._effects = dict(os.environ), _place(), _effects()
        self._folder = _working_folder()

    def moved(self) -> bool:
        """Return whether ``sys.path``, the working folder or the locale has changed."""
        return self._place != _place()

    def can_begin_again(self) -> bool:
        """Return whether this process has neither written nor opened anything."""
        return bool(self._effects) and self._effects == _effects()

    def forget_effects(self) -> None:
        """Let what this process has written and opened until now not count."""
        self._effects = _effects()

    def ignore_effects_of(self, loader: Any) -> None:
        """Let what a module writes and opens when it is imported not count."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            can_begin_again = self.can_begin_again()
            execute(module)
            if can_begin_again:
                self.forget_effects()

        loader.exec_module = exec_module

    def begin_again(self, execute: Callable[[], None]) -> None:
        """Call a function that executes another program, in the environment and folder of the beginning."""
        os.environ.clear()
        os.environ.update(self._environ)
        os.chdir(self._folder)
        execute()

    def environ(self) -> dict[str, str | None]:
        """Return the variables that have been changed, None for one that was removed."""
        names = self._environ.keys() | os.environ.keys()
        return {name: os.environ.get(name) for name in names if self._environ.get(name) != os.environ.get(name)}


def import_ahead(
    order: Mapping[str, Any],
    preloaded: Any,
    what_is_new: Callable[[str], str],
    begin: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, dict[str, str | None]]]:
    """Import the modules that were learned, and find those that must not be imported ahead.

    The order has ``learned``, as ``Recorder`` writes it; ``cwd``, the working folder of the program; and ``folder``,
    the one that it puts first in ``sys.path``. ``what_is_new`` returns what an import has added that forbids forks,
    empty if nothing; ``begin`` is called before each import.

    Returns:
        ``wrong``, why modules must not be imported ahead; ``ahead``, the names of all modules that were imported,
        without those in packages; ``times``, as of ``InstalledModules``. Second, the variables that each import has
        read, with their values.
    """
    installed, own = InstalledModules(order["folder"]), names_in(order["folder"])
    wrong, ahead, reads_of = dict[str, str](), set[str](), dict[str, dict[str, str | None]]()
    plain, folder = set(preloaded.imports), os.getcwd()
    with contextlib.suppress(OSError):
        os.chdir(order["cwd"])
    state, handlers = ProgramState(), _signal_handlers()
    preloaded.hide(renews=False)

    def why_wrong(name: str, new: Iterable[str], entry: Mapping[str, Any], reads: Mapping[str, object]) -> str:
        if why := what_is_new(name):
            return why
        late = [] if entry["begins_again"] else sorted(entry["environ"].keys() & reads.keys())
        for variable in [*sorted(reads.keys() & {*_OF_A_RANK}), *late]:
            which = "" if variable in _OF_A_RANK else ", which the program sets"
            return f"it reads {variable} when it is imported{which}"
        if _signal_handlers() != handlers:
            return "it sets a signal handler when it is imported"
        if state.moved():
            return "it changes sys.path, the working folder or the locale when it is imported"
        if file := installed.foreign(new):
            return f"it imports {file}, which is not an installed module"
        taken = sorted({_top(module) for module in new} & own)
        return f"it imports {taken[0]}, and so does the program from its own folder" if taken else ""

    with _recorded_reads() as reads:
        for entry in order["learned"]:
            name, filters = entry["name"], _parsed_filters(entry["filters"])
            parent = name.rpartition(".")[0]
            if filters is None:
                break  # nor is the state known in which the following ones are imported
            if name in sys.modules or (parent and parent not in sys.modules):
                continue
            if not installed.find(name, getattr(sys.modules.get(parent), "__path__", None)):
                continue
            given = {variable: value for variable, value in entry["environ"].items() if variable not in _THREADS}
            before = set(sys.modules)
            if name not in plain:
                begin(name)
            try:
                with preloaded.importing(name, given, filters):
                    found = {**os.environ, _FOLDER: os.getcwd()}
                    reads.clear()
                    importlib.import_module(name)
                    read = {variable: found.get(variable) for variable in reads}
            except Exception as error:
                wrong[name] = f"it cannot be imported before the program: {type(error).__name__}: {error}"
                continue
            if name in plain:
                continue
            new = [module for module in sys.modules if module not in before]
            ahead.update(map(_top, new))
            reads_of[name] = read
            if why := why_wrong(name, new, entry, read):
                wrong[name] = why
                if what_is_new(name):
                    break  # the same would be said of all that follow
                handlers, state = _signal_handlers(), ProgramState()
    os.chdir(folder)
    return {"wrong": wrong, "ahead": sorted(ahead), "times": installed.times}, reads_of


class Recorder:
    """In a rank: write which installed modules its program imports, in which state, a JSON line each, into a file.

    Args:
        path: the file.
        is_first: whether this rank writes what its program imports. Others write only in which state they differ.
        folder: the folder that the program puts first in ``sys.path``.
        reads: of the modules that were imported ahead, the variables that they have read, with their values.
        again: executes the program in an interpreter of its own.
    """

    def __init__(
        self,
        path: str,
        is_first: bool,
        folder: str,
        preloaded: Any,
        reads: Mapping[str, Mapping[str, str | None]],
        again: Callable[[], None],
    ) -> None:
        self._path = path
        self._preloaded = preloaded
        self._reads = reads
        self._again = again
        self._own = (os.getpid(), _thread.get_ident())
        self._state = ProgramState()
        self._filters = list(warnings.filters)
        self._importing = ""
        preloaded.showing = self._show
        if is_first:
            self._installed = InstalledModules(folder)
            preloaded.searching = self._search

    def _search(self, name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
        """Write that the program imports a module, unless another installed one does; return its spec then."""
        importing = getattr(sys.modules.get(self._importing), "__spec__", None)
        if getattr(importing, "_initializing", False) or _top(name) in sys.stdlib_module_names:
            return None
        if self._own != (os.getpid(), _thread.get_ident()) or self._state.moved():
            return None
        spec = self._installed.find(name, path)
        if spec is not None and spec.loader is not None:
            self._importing = name
            filters = _format_filters() if warnings.filters != self._filters else ""
            again = self._state.can_begin_again()
            self._write(name=name, environ=self._state.environ(), filters=filters, begins_again=again)
            self._state.ignore_effects_of(spec.loader)
        return spec

    def _show(self, name: str) -> None:
        """Begin the program again if a module was imported ahead in another state than the program has."""
        if name not in self._reads:
            return
        present = {**os.environ, _FOLDER: _working_folder()}
        differing = [read for read, value in self._reads[name].items() if present.get(read) != value]
        why = f"the program has another {differing[0]} than before" if differing else ""
        if self._preloaded.imports[name].filters[0] != warnings.filters:
            why = "the program's warning filters are others than before"
        if self._state.moved():
            why = "the program has changed sys.path, its working folder or its locale"
        if not why:
            return
        self._write(name=name, differs=why)
        if self._state.can_begin_again() and self._own == (os.getpid(), _thread.get_ident()):
            self._state.begin_again(self._again)
        with contextlib.suppress(OSError, ValueError):
            advice = "run it again, or with -cfg preload=torch"
            print(f"warning: {name} was imported ahead, but {why}; {advice}", file=sys.stderr, flush=True)

    def _write(self, **line: object) -> None:
        can_begin_again = self._state.can_begin_again()
        with contextlib.suppress(OSError):  # the program is none the worse
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.write(file, json.dumps(line).encode() + b"\n")
            os.close(file)
        if can_begin_again:
            self._state.forget_effects()


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


def _place() -> tuple[object, ...]:
    return (*sys.path, _working_folder(), locale.setlocale(locale.LC_ALL))


def _working_folder() -> str:
    with contextlib.suppress(OSError):  # it has been removed
        return os.getcwd()
    return ""


def _effects() -> tuple[str, ...]:
    """Return how much this process has written, and its open descriptors; empty if the kernel does not say."""
    with contextlib.suppress(OSError), open("/proc/self/io") as file:
        return (next(line for line in file if line.startswith("wchar")), *os.listdir("/proc/self/fd"))
    return ()


def _format_filters() -> str:
    def plain(part: Any) -> Any:
        if isinstance(part, type):
            return f"{part.__module__}:{part.__qualname__}"
        return [part.pattern, part.flags] if isinstance(part, re.Pattern) else part

    return json.dumps([[*map(plain, each)] for each in warnings.filters])


def _parsed_filters(text: str) -> list[Any] | None:
    """Return what ``_format_filters`` has written, the present filters for nothing, None if a class is not there."""

    def compiled(part: Any) -> Any:
        return re.compile(*part) if isinstance(part, list) else part

    def category(name: str) -> Any:
        module, _, path = name.partition(":")
        return functools.reduce(getattr, path.split("."), sys.modules[module])

    try:
        return (
            [
                (action, compiled(message), category(kind), compiled(module), line)
                for action, message, kind, module, line in json.loads(text)
            ]
            if text
            else list(warnings.filters)
        )
    except (ValueError, TypeError, LookupError, AttributeError, re.error):
        return None


def _folders(*paths: str | None) -> tuple[str, ...]:
    """Return folders with a slash at the end, also with links resolved."""
    found = [path for path in paths if path]
    return tuple(dict.fromkeys(f"{path.rstrip(os.sep)}{os.sep}" for path in (*found, *map(os.path.realpath, found))))


def _top(name: str) -> str:
    return name.partition(".")[0]


def _signal_handlers() -> list[Any]:
    return [signal.getsignal(number) for number in sorted(signal.valid_signals())]


@contextlib.contextmanager
def _recorded_reads() -> Iterator[set[str]]:
    """Yield the names of variables that are looked up in ``os.environ``, also by ``in``; and ``_FOLDER``."""
    reads, kind, getcwd = set[str](), os.environ.__class__, os.getcwd

    class _ReadEnviron(kind):  # type: ignore[valid-type, misc]
        def __getitem__(self, name: str) -> str:
            reads.add(name)
            return str(super().__getitem__(name))

    def recorded_getcwd() -> str:
        reads.add(_FOLDER)
        return getcwd()

    os.environ.__class__, os.getcwd = _ReadEnviron, recorded_getcwd
    try:
        yield reads
    finally:
        os.environ.__class__, os.getcwd = kind, getcwd
