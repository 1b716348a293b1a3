# SPDX-License-Identifier: BSD-3-Clause
"""Watch what modules read of their process and of its surroundings while the zygote imports them for its forks.

Files and folders, also those that do not exist, are stamped and compared before each attempt. The id of the process,
the time and random bytes are harmless if no module keeps them; each fork makes anew those that are global names of
modules. An import that reads anything else must not be shared.

``zygote_main`` runs this file: it imports the standard library alone. It replaces functions while statements are
executed. ``sys.addaudithook`` would see more, but stays: ``id`` then takes ten times as long in each rank, and
``copy.deepcopy`` twice (Python 3.11).
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import datetime
import functools
import gc
import io
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from os import listdir, stat  # these two are replaced
from stat import S_ISDIR
from typing import Any

_OF_A_RANK = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"),
        *("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "GLOO_SOCKET_IFNAME"),
    )
)
"""Variables that the zygote lacks, beside TORCHELASTIC_*; those of devices may differ between ranks."""

_OF_A_PROCESS = re.compile(r"/proc/(self|thread-self|\d+)/(?!(maps|cgroup|mountinfo|mounts)$)|/dev/(?!(null|zero)$)")
"""Files that differ between processes and attempts. Those left out are the same for all ranks of a host."""

_EFFECTS: tuple[tuple[Any, str, str], ...] = (
    *((os, name, "starts a process") for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")),
    (subprocess.Popen, "__init__", "starts a process"),
    (socket.socket, "connect", "opens a connection"),
    (socket.socket, "connect_ex", "opens a connection"),
    (socket, "getaddrinfo", "looks up an address"),
    (signal, "signal", "sets a signal handler"),
    (signal, "alarm", "sets a timer"),
    (signal, "setitimer", "sets a timer"),
    (os, "chdir", "changes the working folder"),
    (tempfile, "_get_candidate_names", "makes a temporary file"),  # which the first rank that ends may remove for all
    (random, "random", "draws a random number"),
    (random, "getrandbits", "draws a random number"),
)
"""Functions whose results cannot be compared, or whose effects a fork does not get."""

_HARMLESS = {
    ("ctypes.util", "starts a process"),  # which lists the libraries of this machine
    ("platform", "starts a process"),  # uname
    ("rich.style", "draws a random number"),  # the number of the first link in a terminal
    ("joblib._multiprocessing_helpers", "asks for the process id"),  # the name of a semaphore that it closes at once
}
"""Modules, and what ranks may share of their import."""

_STANDARD = (os.path.dirname(os.__file__) + os.sep, "<frozen")
"""Beginnings of the files of Python's own modules."""

_CACHED = type(functools.lru_cache(len))

Caller = tuple[str, str, types.CodeType]
"""The name of a module, that with a line, and the code."""


class MustNotBeShared(BaseException):
    """Raised in a statement that ranks must execute themselves; the message says why."""


class _ProcessId(int):
    """The id of this process as an import has asked for it."""

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return int, (int(self),)


class ImportWatch:
    """Watch statements, each in the body of ``watching``.

    Args:
        program: path of the program, which may be edited without effect on what it imports first.
        installed: folders of packages, whose times say what is installed.
        reads_variables: modules that may read variables of a rank.

    Attributes:
        places: the module and line that has started a thread or opened a file or socket, by their names.
    """

    def __init__(self, program: str, installed: tuple[str, ...], reads_variables: Collection[str]) -> None:
        self.places: dict[str, str] = {}
        self._program = program
        self._installed = installed
        self._reads_variables = reads_variables
        self._problem = ""
        self._stamps: dict[tuple[str, str], object] = {}
        self._times: dict[int, tuple[Any, Callable[[Any], Any], Sequence[Caller]]] = {}
        self._process_ids: list[tuple[int, Sequence[str], Sequence[Caller]]] = []
        self._tokens: list[tuple[bytes, Callable[[], Any], Sequence[Caller]]] = []
        self._kept: list[tuple[dict[str, Any], str, Any, Callable[[Any], Any]]] = []
        self._originals: dict[int, Any] = {}
        self._variables: dict[str, str] = {}
        self._is_active = False
        self._collects = True  # the zygote's own garbage collector is off
        self._began = 0

    # -- what is watched -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def replaced_functions(self) -> Iterator[None]:
        """Replace the functions that are watched, in the body of a ``with`` statement."""
        with contextlib.ExitStack() as stack:
            for owner, name, what in _EFFECTS:
                self._replace(stack, owner, name, functools.partial(self._see_effect, what))
            # Python 3.10's paths keep functions of their own, which are those of the import of pathlib.
            of_paths = [vars(pathlib)["_normal_accessor"]] if sys.version_info < (3, 11) else []
            for owner in (builtins, io, os, *of_paths):
                self._replace(stack, owner, "open", self._see_open)
            for owner in (os, *of_paths):
                for kind, name in (("stat", "stat"), ("listing", "listdir"), ("listing", "scandir")):
                    self._replace(stack, owner, name, functools.partial(self._see_path, kind))
            for owner, name in ((os, "getpid"), (threading, "get_native_id")):
                self._replace(stack, owner, name, self._see_process_id)
            for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"):
                self._replace(stack, time, name, self._see_time)
                self._replace(stack, time, f"{name}_ns", self._see_time)
            made = ((os, "urandom"), (os, "getrandom"), (random, "_urandom"), (uuid, "uuid1"), (uuid, "uuid4"))
            for owner, name in made:
                self._replace(stack, owner, name, self._see_random)
            self._replace(stack, gc, "enable", lambda _: vars(self).update(_collects=True))
            self._replace(stack, gc, "disable", lambda _: vars(self).update(_collects=False))
            self._replace(stack, gc, "isenabled", lambda _: self._collects)
            self._replace(stack, threading.Thread, "start", self._see_thread)
            self._replace(stack, socket.socket, "__init__", self._see_socket)
            generator, watch = vars(random)["_inst"], self

            class Generator(random.Random):
                def random(self) -> float:
                    return float(watch._see_draw(super().random))

                def getrandbits(self, count: int) -> int:
                    return int(watch._see_draw(super().getrandbits, count))

            class Environ(os.environ.__class__):  # type: ignore[name-defined, misc]
                def __getitem__(self, name: Any) -> Any:
                    text = os.fsdecode(name)
                    if text in _OF_A_RANK or text.startswith("TORCHELASTIC_"):
                        watch._see_variable(text)
                    return super().__getitem__(name)

                def __iter__(self) -> Iterator[Any]:
                    watch._see_variable("all variables")
                    return iter(super().__iter__())

            for value, watched in ((generator, Generator), (os.environ, Environ), (os.environb, Environ)):
                stack.callback(setattr, value, "__class__", value.__class__)
                value.__class__ = watched
            yield

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the body of a ``with`` statement."""
        before = dict(vars(os.environ)["_data"])  # reading os.environ itself is watched
        self._is_active, self._began, self._problem = True, int(time.time()), ""
        try:
            yield
        finally:
            self._is_active = False
            changed = [item for item in vars(os.environ)["_data"].items() if before.get(item[0]) != item[1]]
            self._variables = {os.fsdecode(name): os.fsdecode(value) for name, value in changed}

    def stop(self, what: str) -> None:
        """Stop the statement, which must not be shared."""
        self._problem = self._problem or what
        raise MustNotBeShared(what)

    def _replace(self, stack: contextlib.ExitStack, owner: Any, name: str, see: Callable[..., Any]) -> None:
        original, is_own = getattr(owner, name), name in vars(owner)

        @functools.wraps(original)
        def watched(*args: Any, **options: Any) -> Any:
            return see(original, *args, **options) if self._is_active else original(*args, **options)

        self._originals[id(watched)] = original
        setattr(owner, name, watched)
        stack.callback(setattr, owner, name, original) if is_own else stack.callback(delattr, owner, name)

    def _see_effect(self, what: str, original: Any, *args: Any, **options: Any) -> Any:
        callers, standard = _callers()
        if _HARMLESS.isdisjoint((module, what) for module in (callers[0][0], *standard)):
            self.stop(f"{callers[0][1]} {what}")
        return original(*args, **options)

    def _see_draw(self, original: Any, *args: Any) -> Any:
        return self._see_effect("draws a random number", original, *args) if self._is_active else original(*args)

    def _see_open(self, original: Any, *args: Any, **options: Any) -> Any:
        given = {**dict(zip(("file", "how"), args, strict=False)), **options}
        file, how = given.get("file", given.get("path")), given.get("how", given.get("flags", given.get("mode", "r")))
        path = "" if isinstance(file, int) else _absolute(file)
        if path and not (path.endswith(".py") and path.startswith(self._installed)):  # the source of a module
            self.places[path] = place = _callers()[0][0][1]
            if _OF_A_PROCESS.match(path):
                self.stop(f"{place} opens {path}")
            if "a" in how if isinstance(how, str) else how & os.O_APPEND:
                self.stop(f"{place} adds to {path}")
            if not ({*how} & {*"wx"} if isinstance(how, str) else how & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                self._stamp("content", path)
        return original(*args, **options)

    def _see_path(self, kind: str, original: Any, path: Any = ".", **options: Any) -> Any:
        if not isinstance(path, int):
            # importlib.metadata lists all folders of sys.path for the packages that are there.
            is_search = kind == "listing" and "importlib.metadata" in _callers()[1]
            self._stamp("packages" if is_search else kind, _absolute(path or "."))
        return original(path, **options)

    def _stamp(self, kind: str, path: str) -> None:
        is_installed = kind != "content" and path.startswith(self._installed)
        is_ignored = is_installed or path == self._program or path.startswith(("/proc/", "/sys/", "/dev/"))
        if not is_ignored and (kind, path) not in self._stamps:
            self._stamps[kind, path] = _stamp(kind, path)

    def add_stamps(self, kind: str, paths: Iterable[str]) -> None:
        """Stamp files, or ``folder``s by the time at which something in them was added or removed."""
        self._stamps.update({(kind, path): _stamp(kind, path) for path in paths})

    def _see_process_id(self, original: Any) -> int:
        value, (callers, standard) = _ProcessId(original()), _callers()
        if "multiprocessing.util" in standard:
            self.stop(f"{callers[0][1]} registers what this process alone does at its end")
        if (callers[0][0], "asks for the process id") not in _HARMLESS:
            self._process_ids.append((value, (callers[0][0], *standard), callers))
        return value

    def _see_time(self, original: Any, *args: Any) -> Any:
        value = original(*args)
        self._times[id(value)] = value, lambda _: original(*args), _callers()[0]
        return value

    def _see_random(self, original: Any, *args: Any, **options: Any) -> Any:
        draw, callers = functools.partial(original, *args, **options), _callers()[0]
        value = draw()
        if len(_bytes_of(value)) < 8:  # a part of a value, which could not be recognized
            self.stop(f"{callers[0][1]} draws a random number")
        self._tokens.append((_bytes_of(value), functools.lru_cache(draw), callers))
        return value

    def _see_thread(self, original: Any, thread: threading.Thread) -> Any:
        self.places[thread.name] = _callers()[0][0][1]
        return original(thread)

    def _see_socket(self, original: Any, made: socket.socket, *args: Any, **options: Any) -> None:
        original(made, *args, **options)
        self.places[os.readlink(f"/proc/self/fd/{made.fileno()}")] = _callers()[0][0][1]

    def _see_variable(self, what: str) -> None:
        module, place, code = _callers()[0][0]
        is_search = what not in code.co_consts and _takes_some(code, place)
        if self._is_active and module not in self._reads_variables and not is_search:
            self.stop(f"{place} reads {what}")

    # -- what must not be shared ---------------------------------------------------------------------------------------

    def is_current(self) -> bool:
        """Return whether the files and folders that the statements have read are the same now."""
        return all(_stamp(*key) == stamp for key, stamp in self._stamps.items())

    def problem(self, names: Collection[str]) -> str:
        """Return why ranks must not share the last statement, which has imported modules; empty if they may."""
        own = [name for name in names if name.partition(".")[0] not in sys.stdlib_module_names]
        why = self._problem or self._kept_time(_globals(own)) or self._kept_process_id() or self._kept_token()
        if self._kept and not why:  # other modules may have imported them from those
            renewed = {id(value): new for _, _, value, new in self._kept}
            self._kept = [
                (names, name, value, renewed[id(value)])
                for names in _globals(sys.modules)
                for name, value in names.items()
                if id(value) in renewed
            ]
        return why

    def renew(self) -> None:
        """Give this fork values of its own in the place of those that modules keep of the process it is a fork of."""
        for names, name, value, renewed in self._kept:
            if names.get(name) is value:
                names[name] = renewed(value)
        if not self._collects:
            gc.disable()

    def _kept_time(self, modules: Collection[dict[str, Any]]) -> str:
        """Find times among the global names of modules; give these the functions that they have imported watched."""
        now, day = time.time(), time.strftime("%Y-%m-%d")
        days = re.compile(f"{day}|{day.replace('-', '')}")

        def moved(old: datetime.datetime) -> datetime.datetime:
            return old + datetime.timedelta(seconds=time.time() - now)

        for names in modules:
            for name, value in list(names.items()):
                kind = type(value)
                if kind is types.FunctionType and id(value) in self._originals:
                    names[name] = self._originals[id(value)]
                elif (kind is float or kind is int) and id(value) in self._times:
                    self._kept.append((names, name, value, self._times[id(value)][1]))
                elif kind is int and self._began <= value <= now + 1:
                    self._kept.append((names, name, value, lambda _: int(time.time())))
                elif kind is datetime.datetime and any(self._began <= found <= now + 1 for found in _seconds(value)):
                    self._kept.append((names, name, value, moved))
                elif kind is str and days.search(value) and name[:2] != "__":
                    return f"{names['__name__']}.{name} may be the time of its import"
        for time_, _, callers in self._times.values():
            for names, path, value in self._reachable(callers):
                if value is time_ and len(path) > 1:
                    return f"{callers[0][1]} takes the time, which {_named(names, path)} keeps"
        self._times.clear()
        return ""

    def _reachable(self, callers: Sequence[Caller]) -> Iterator[tuple[dict[str, Any], tuple[str, ...], Any]]:
        """Yield what modules hold, and the variables that have changed: names, the path from there, and the value."""
        yield from (({"__name__": "os"}, ("environ", name), value) for name, value in self._variables.items())
        yield from _held_by(callers)

    def _kept_process_id(self) -> str:
        text = re.compile(rf"(?<![\w.]){os.getpid()}(?![\w.])")
        asked = {id(value): (asking, callers[0][1]) for value, asking, callers in self._process_ids}
        everybody = [caller for _, _, callers in self._process_ids for caller in callers]
        places = {module: place for module, place, _ in everybody}
        for names, path, value in self._reachable(everybody):
            if id(value) in asked:
                asking, place = asked[id(value)]
                if any(_compares(module, path) for module in asking):
                    continue  # it notices that it is in another process
                if len(path) > 1:
                    return f"{place} asks for the process id, which {_named(names, path)} keeps"
                self._kept.append((names, path[0], value, lambda _: os.getpid()))
            elif type(value) is str and text.search(value) and places:
                return f"{places.get(names['__name__'], 'it')} asks for the process id, which {_named(names, path)} has"
        self._process_ids.clear()
        return ""

    def _kept_token(self) -> str:
        for token, draw, callers in self._tokens:
            old = _spellings(token)
            for names, path, value in self._reachable(callers):
                like = [spelling for spelling in old if type(spelling) is type(value)]
                if value in like or (type(value) is str and any(spelling in value for spelling in like)):
                    if len(path) > 1:
                        return f"{callers[0][1]} draws random bytes, which {_named(names, path)} keeps"
                    self._kept.append((names, path[0], value, functools.partial(_respelled, old, draw)))
        self._tokens.clear()
        return ""


def _callers() -> tuple[list[Caller], list[str]]:
    """Return who has called the watched function that called this one.

    Returns:
        The modules that are not Python's own, from the one that has called it to the one that is imported, and
        Python's own modules in between.
    """
    frame: types.FrameType | None = sys._getframe(2)
    callers, standard = list[Caller](), list[str]()
    while frame is not None:
        file, name = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if file.startswith(_STANDARD) and f"-packages{os.sep}" not in file:
            if not callers:
                standard.append(name)
        elif file != __file__:
            callers.append((name, f"{name}:{frame.f_lineno}", frame.f_code))
            if frame.f_code.co_name == "<module>":
                break
        frame = frame.f_back
    # A thread may execute Python's own modules alone.
    return callers or [("it", "it:0", sys._getframe().f_code)], standard


def _globals(modules: Collection[str]) -> list[dict[str, Any]]:
    """Return the global names of modules."""
    found = (sys.modules.get(name) for name in list(modules))
    return [vars(module) for module in found if issubclass(type(module), types.ModuleType)]


def _absolute(path: Any) -> str:
    text = os.fsdecode(path)
    return text if text.startswith(os.sep) else os.path.join(os.getcwd(), text)


def _stamp(kind: str, path: str) -> object:
    try:
        if kind == "listing":
            return sorted(listdir(path))
        if kind == "packages":
            return sorted(name for name in listdir(path) if name.endswith((".dist-info", ".egg-info", ".egg")))
        found = stat(path)
    except OSError as error:
        return error.errno
    is_mode = kind != "folder" and S_ISDIR(found.st_mode)
    return found.st_mode if is_mode else (found.st_mtime_ns, found.st_size, found.st_ino)


def _held_by(callers: Sequence[Caller]) -> Iterator[tuple[dict[str, Any], tuple[str, ...], Any]]:
    """Yield what modules hold: the global names of the module, the path from there, and the value."""
    own, seen, todo = {caller[0] for caller in callers}, set[int](), list[tuple[dict[str, Any], tuple[str, ...], Any]]()
    for names in _globals(own):
        todo += [(names, (name,), value) for name, value in names.items() if name[:2] != "__"]
    while todo:
        names, path, value = todo.pop()
        yield names, path, value
        kind, parts = type(value), list[tuple[Any, Any]]()
        if len(path) > 3 or id(value) in seen or issubclass(kind, (types.ModuleType, uuid.UUID)):
            continue
        seen.add(id(value))
        with contextlib.suppress(Exception):  # objects may do anything when they are asked for their attributes
            if kind in (list, tuple, set, frozenset):
                parts = list(enumerate(value))
            elif kind is dict:
                parts = [*value.items(), *((key, key) for key in value)]
            elif kind is types.FunctionType:
                parts = [("", value.__defaults__), ("", value.__kwdefaults__), ("", value.__closure__)]
            elif kind in (types.CellType, _CACHED):
                parts = [("", part) for part in gc.get_referents(value)]
            elif not isinstance(value, type) or value.__module__ in own:
                slots = [
                    (name, getattr(value, name)) for name in getattr(kind, "__slots__", ()) if hasattr(value, name)
                ]
                parts = [*slots, *getattr(value, "__dict__", {}).items()]
        todo += [(names, (*path, str(key)), part) for key, part in parts]


def _named(names: dict[str, Any], path: Sequence[str]) -> str:
    return ".".join((names["__name__"], *path))


@functools.lru_cache
def _functions(module: str) -> list[types.CodeType]:
    """Return the code of the functions of a module, also of those in classes; none if there is no source."""
    found = list[types.CodeType]()
    with contextlib.suppress(Exception), open(vars(sys.modules[module])["__file__"], "rb") as file:
        found.append(compile(file.read(), "", "exec", dont_inherit=True))
    for code in found:
        found += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return found[1:]


def _compares(module: str, path: Sequence[str]) -> bool:
    """Return whether a function of a module reads a process id that is kept at a path, and that of its process."""
    return any(
        "getpid" in code.co_names and any(name in (*code.co_names, *code.co_consts) for name in path)
        for code in _functions(module)
    )


def _takes_some(code: types.CodeType, place: str) -> bool:
    """Return whether code that goes through all variables takes those alone that begin with a prefix of its own."""
    line = int(place.rpartition(":")[2])
    parts = [part for part in code.co_consts if isinstance(part, types.CodeType) and part.co_firstlineno == line]
    return any(
        "startswith" in part.co_names and any(type(prefix) is str and prefix.endswith("_") for prefix in part.co_consts)
        for part in (code, *parts)
    )


def _bytes_of(value: Any) -> bytes:
    return bytes(value.bytes if isinstance(value, uuid.UUID) else value)


def _spellings(token: bytes) -> tuple[Any, ...]:
    """Return what random bytes may look like in a module."""
    whole = (uuid.UUID(bytes=token), str(uuid.UUID(bytes=token))) if len(token) == 16 else ()
    text = base64.urlsafe_b64encode(token).rstrip(b"=").decode()
    return token, int.from_bytes(token, "big"), token.hex(), text, *whole


def _respelled(old: tuple[Any, ...], draw: Callable[[], Any], value: Any) -> Any:
    for before, after in zip(old, _spellings(_bytes_of(draw())), strict=True):
        if type(before) is type(value):
            value = value.replace(before, after) if type(value) is str else after if value == before else value
    return value


def _seconds(value: datetime.datetime) -> list[float]:
    """Return the time of a value, which may be that of UTC without saying so."""
    with contextlib.suppress(OverflowError, ValueError):
        return [value.timestamp(), value.replace(tzinfo=datetime.timezone.utc).timestamp()]
    return []
