# SPDX-License-Identifier: BSD-3-Clause
"""Watch what modules read of their process and of its surroundings while the zygote imports them for its forks.

Files and folders, also those that do not exist, are stamped and compared before each attempt. A fork makes anew the id
of the process, the time and random bytes that are global names of modules. After an import that has asked for them,
another process executes it, with other values: if anything else differs between the two, it must not be shared. Nor
must an import that reads anything else.

``zygote_main`` runs this file: it imports the standard library alone. It replaces functions while statements are
executed. ``sys.addaudithook`` would see more, but stays: ``id`` then takes ten times as long in each rank, and
``copy.deepcopy`` twice (Python 3.11).
"""

from __future__ import annotations

import array
import base64
import builtins
import contextlib
import ctypes
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
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.machinery import FileFinder
from os import listdir, stat  # these two are replaced
from stat import S_ISDIR
from typing import Any

_OF_A_RANK = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"),
        *("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "GLOO_SOCKET_IFNAME"),
    )
)
"""Variables that the zygote lacks, beside TORCHELASTIC_*."""

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
    ("psutil._pslinux", "asks for the process id"),  # whether /proc has some files
    ("numpy.testing._private.utils", "asks for the process id"),  # processor time of numpy's own tests
    ("multiprocessing.heap", "asks for the process id"),  # these five notice that they are in another process
    ("tempfile", "asks for the process id"),
    ("filelock._api", "asks for the process id"),
    ("filelock._read_write", "asks for the process id"),
    ("fsspec.spec", "asks for the process id"),
    ("multiprocessing.process", "draws random bytes"),  # the key of a process, which each rank draws anew
    ("multiprocess.process", "draws random bytes"),
    ("numpy.random._pickle", "draws random bytes"),  # these three seed generators, which each rank seeds anew
    ("scipy.stats._distribution_infrastructure", "draws random bytes"),
    ("sklearn.ensemble._hist_gradient_boosting.grower", "draws random bytes"),
    ("transformers.utils.hub", "draws random bytes"),  # SESSION_ID, which each rank draws anew
    ("torch.distributed._composable.contract", "draws random bytes"),  # names of attributes
    ("numpy.f2py.rules", "reads the time"),  # a comment in what f2py writes
    ("dateutil.parser._parser", "reads the time"),  # the century
    ("ray._private.worker", "reads the time"),  # t0, which each rank reads anew
    ("logging", "reads the time"),  # the time at which it was imported, which each rank reads anew
    ("urllib3.util.connection", "binds a port"),  # whether this machine has IPv6
}
"""Modules, and what ranks may share of their import."""

_STANDARD = (os.path.dirname(os.__file__) + os.sep, "<frozen")
"""Beginnings of the files of Python's own modules."""

_CACHED = type(functools.lru_cache(len))

_SIMPLE = (int, str, bytes, uuid.UUID, type(None))

_AHEAD = 1_000_003.7
"""Seconds by which the clocks are ahead in the process that an import is compared with: other in all but the year."""

_ADDRESS = re.compile(r"0x[0-9a-f]+")

Caller = tuple[str, str, types.CodeType]
"""The name of a module, that with a line, and the code."""


class MustNotBeShared(BaseException):
    """Raised in a statement that ranks must execute themselves; the message says why."""


class _ProcessId(int):
    """The id of this process as an import has asked for it."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return int, (int(self),)


class ImportWatch:
    """Watch statements, each in the body of ``watching``.

    Args:
        program: path of the program, which may be edited without effect on what it imports first.
        installed: folders of packages, whose times say what is installed.
        reads_variables: modules that may read variables of a rank.
        is_renewed: says whether an object is a random generator that is seeded anew in each fork.

    Attributes:
        places: the module and line that has started a thread or opened a file or socket, by their names.
    """

    def __init__(
        self,
        program: str,
        installed: tuple[str, ...],
        reads_variables: Collection[str],
        is_renewed: Callable[[object], bool],
    ) -> None:
        self.places: dict[str, str] = {}
        self._program = program
        self._installed = installed
        self._reads_variables = reads_variables
        self._is_renewed = is_renewed
        self._problem = ""
        self._stamps: dict[tuple[str, str], object] = {}
        self._ahead = 0.0
        self._asked: list[str] = []
        self._given: list[tuple[Any, Callable[[], Any], Collection[str]]] = []
        self._objects: list[Any] = []
        self._kept: list[tuple[dict[str, Any], str, Any, Callable[[Any], Any]]] = []
        self._originals: dict[int, Any] = {}
        self._is_active = False
        self._collects = True  # the zygote's own garbage collector is off

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
            for name in ("localtime", "gmtime", "ctime", "asctime", "strftime"):
                self._replace(stack, time, name, self._see_moment)
            for name in ("now", "utcnow"):
                stack.callback(_set_of_datetime, name, vars(datetime.datetime)[name])
                _set_of_datetime(name, classmethod(functools.partial(self._see_now, vars(datetime.datetime)[name])))
            self._replace(stack, socket.socket, "bind", self._see_bind)
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
        self._is_active, self._problem, self._given, self._asked = True, "", [], []
        gc.freeze()
        try:
            yield
        finally:
            self._is_active = False
            self._objects = gc.get_objects() if self._asked else []  # what has been made since

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

    def _see_process_id(self, original: Any) -> Any:
        if "multiprocessing.util" in (callers := _callers())[1]:
            self.stop(f"{callers[0][0][1]} registers what this process alone does at its end")
        return self._give("asks for the process id", _ProcessId(original()), os.getpid)

    def _see_time(self, original: Any, *args: Any) -> Any:
        value = original(*args)
        value += type(value)(self._ahead * (10**9 if type(value) is int else 1))
        return self._give("reads the time", value, functools.partial(original, *args))

    def _see_moment(self, original: Any, *args: Any) -> Any:
        count = int(original.__name__ == "strftime")
        if len(args) > count and args[count] is not None:
            return original(*args)
        takes_parts = original.__name__ in ("asctime", "strftime")
        return original(*args[:count], time.localtime(time.time()) if takes_parts else time.time())

    def _see_now(self, original: Any, kind: type[datetime.datetime], *args: Any, **options: Any) -> Any:
        now = functools.partial(original.__get__(None, kind), *args, **options)
        if not self._is_active:
            return now()
        return self._give("reads the time", now() + datetime.timedelta(seconds=self._ahead), now)

    def _see_random(self, original: Any, *args: Any, **options: Any) -> Any:
        draw = functools.partial(original, *args, **options)
        return self._give("draws random bytes", draw(), functools.lru_cache(draw))

    def _see_bind(self, original: Any, *args: Any) -> Any:
        self._ask("binds a port")
        return original(*args)

    def _ask(self, what: str) -> tuple[list[Caller], list[str]]:
        callers, standard = _callers()
        if _HARMLESS.isdisjoint((module, what) for module in (callers[0][0], *standard)):
            self._asked.append(f"{callers[0][1]} {what}")
        return callers, standard

    def _give(self, what: str, value: Any, again: Callable[[], Any]) -> Any:
        """Return a value of this process to an import that has asked for it; another process has it ``again``."""
        callers, standard = self._ask(what)
        # What is kept of an object must be what modules keep of it.
        given = value.bytes if isinstance(value, uuid.UUID) else value
        self._given.append((given, again, {*(caller[0] for caller in callers), *standard}))
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

    def problem(self, names: Collection[str], compared: Callable[[], bytes]) -> str:
        """Return why ranks must not share the last statement; empty if they may.

        Args:
            names: the modules that it has imported.
            compared: returns the ``digest`` of another process that has executed it.
        """
        if self._problem:
            return self._problem
        for module in _globals(names):
            for name, value in list(module.items()):
                if type(value) is types.FunctionType and id(value) in self._originals:
                    module[name] = self._originals[id(value)]
        self._find_kept()
        why = self._difference(compared()) if self._asked else ""
        self._given, self._objects = [], []
        return why

    def _find_kept(self) -> None:
        """Find the global names that have values of this process."""
        for given, again, modules in self._given:
            like = _spellings(given) if isinstance(given, bytes) else ()
            for names in _globals(modules):
                for name, value in names.items():
                    if value is given or any(type(value) is type(same) and value == same for same in like):
                        self._kept.append((names, name, value, functools.partial(_again, given, again)))
        renewed = {id(value): new for _, _, value, new in self._kept}
        if renewed:  # other modules may have imported them from those
            self._kept = [
                (names, name, value, renewed[id(value)])
                for names in _globals(sys.modules)
                for name, value in names.items()
                if id(value) in renewed
            ]

    def digest(self, execute: Callable[[], object]) -> bytes:
        """Execute a statement in another process; return what it has made, a number for each value."""
        self._ahead = _AHEAD
        execute()
        return array.array("q", (hash(value) for _, _, value in self._values())).tobytes()

    def _difference(self, other: bytes) -> str:
        values, others = list(self._values()), array.array("q", other)
        renewed = {(id(names), name) for names, name, _, _ in self._kept}
        modules = {id(names): str(names.get("__name__")) for names in _globals(sys.modules)}
        for (holder, name, value), number in zip(values, others, strict=False):
            if hash(value) != number and (id(holder), name) not in renewed:
                kind = type(holder)
                shown = modules.get(id(holder), f"an object of {kind.__module__}.{kind.__qualname__}")
                return f"{self._asked[0]}, on which {shown}{f'.{name}' if id(holder) in modules else ''} depends"
        return "" if len(values) == len(others) else f"{self._asked[0]}, on which what it makes depends"

    def _values(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield the values in modules and in what the last statement has made: the holder, the name, and the value."""
        known, todo = set[int](), [self._given, self._stamps]
        for own in todo:  # what this object has made meanwhile
            if id(own) not in known and type(own) in (list, tuple, dict, set, functools.partial, type(len), _CACHED):
                todo += gc.get_referents(own)
            known.add(id(own))
        for holder in (*_globals(sys.modules), vars(os.environ)["_data"], *self._objects):
            # FileFinder has the times of folders. An identifier is a value of those that hold it.
            if not (id(holder) in known or type(holder) in (FileFinder, uuid.UUID) or self._is_renewed(holder)):
                known.add(id(holder))
                yield from ((holder, name, value) for name, value in _held(holder))

    def renew(self) -> None:
        """Give this fork values of its own in the place of those that modules keep of the process it is a fork of."""
        for names, name, value, renewed in self._kept:
            if names.get(name) is value:
                names[name] = renewed(value)
        if not self._collects:
            gc.disable()


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


def _held(holder: Any) -> list[tuple[Any, Any]]:
    """Return the names and values that an object holds, other than objects that the garbage collector knows."""
    kind, parts = type(holder), list[tuple[Any, Any]]()
    with contextlib.suppress(Exception):  # objects may do anything when they are asked
        if issubclass(kind, dict):
            # The key of a weak reference may be the address of its object.
            items = [item for item in list(dict.items(holder)) if type(item[1]) is not weakref.ref]
            parts = [(name, part) for name, value in items for part in (name, value)]
        elif issubclass(kind, random.Random):
            parts = [("", repr(holder.getstate()))]
        elif hasattr(kind, "random_raw"):  # a generator of numpy's
            parts = [("", repr(holder.state))]
        else:
            parts = [("", part) for part in gc.get_referents(holder)]
    found = list[tuple[Any, Any]]()
    for name, part in parts:
        if issubclass(type(part), _SIMPLE):
            found.append((name, part))
        elif type(part) in (tuple, dict, frozenset) and not gc.is_tracked(part):
            found += [(name, value) for _, value in _held(part)]
        elif not gc.is_tracked(part) and type(part) is not types.CodeType:
            with contextlib.suppress(Exception):
                found.append((name, _state(part)))
    # Sets have the order of addresses.
    return sorted(found, key=lambda item: hash(item[1])) if issubclass(kind, (set, frozenset)) else found


def _state(value: Any) -> Any:
    """Return what an object of a C library consists of, as far as it says that."""
    if hasattr(value, "digest"):
        return value.digest()
    with contextlib.suppress(TypeError):
        return memoryview(value).tobytes()
    return _ADDRESS.sub("", repr(value))


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


def _again(given: Any, again: Callable[[], Any], value: Any) -> Any:
    """Return what another process has in the place of a value that was given to an import, however it is spelled."""
    if not isinstance(given, bytes):
        return again()
    spellings = zip(_spellings(given), _spellings(_bytes_of(again())), strict=True)
    return next(after for before, after in spellings if type(before) is type(value) and before == value)


def _set_of_datetime(name: str, function: Any) -> None:
    """Set a method of ``datetime.datetime``, which Python does not allow."""
    gc.get_referents(vars(datetime.datetime))[0][name] = function
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
