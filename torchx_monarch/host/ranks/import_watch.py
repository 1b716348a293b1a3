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
from collections.abc import Callable, Collection, Iterable, Iterator
from os import listdir, stat  # these two are replaced
from stat import S_ISDIR
from typing import Any

_OF_A_RANK = """
RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE
MASTER_ADDR MASTER_PORT TORCH_NCCL_ASYNC_ERROR_HANDLING GLOO_SOCKET_IFNAME
"""
"""Variables that the zygote lacks, beside TORCHELASTIC_*, and that of a live allocation TORCHX_*."""

_OF_A_PROCESS = re.compile(r"/proc/(self|thread-self|\d+)/(?!(maps|cgroup|mountinfo|mounts)$)|/dev/(?!(null|zero)$)")
"""Files that differ between processes and attempts. Those left out are the same for all ranks of a host."""

_EFFECTS: tuple[tuple[Any, str, str], ...] = (
    (os, "fork", "starts a process"),
    (os, "forkpty", "starts a process"),
    (os, "posix_spawn", "starts a process"),
    (os, "posix_spawnp", "starts a process"),
    (os, "system", "starts a process"),
    (subprocess.Popen, "__init__", "starts a process"),
    (socket.socket, "connect", "opens a connection"),
    (socket.socket, "connect_ex", "opens a connection"),
    (socket, "getaddrinfo", "looks up an address"),
    (signal, "signal", "sets a signal handler"),
    (signal, "alarm", "sets a timer"),
    (signal, "setitimer", "sets a timer"),
    (os, "chdir", "changes the working folder"),
    (tempfile, "_get_candidate_names", "makes a temporary file"),  # which the first rank that ends may remove for all
)
"""Functions whose effects a fork does not get."""

_QUESTIONS: tuple[tuple[Any, str, str], ...] = (
    (socket.socket, "bind", "binds a port"),
    (os, "getsid", "asks for its session"),
    (os, "getpgid", "asks for its process group"),
    (os, "getpgrp", "asks for its process group"),
    (random, "random", "draws a random number"),
    (random, "getrandbits", "draws a random number"),
    (vars(random)["_inst"], "random", "draws a random number"),
    (vars(random)["_inst"], "getrandbits", "draws a random number"),
)
"""Functions whose results are not the same in two processes."""

_HARMLESS = {
    ("ctypes.util", "starts a process"),  # which lists the libraries of this machine
    ("platform", "starts a process"),  # uname
    ("rich.style", "draws a random number"),  # the number of the first link in a terminal
    ("numpy.testing._private.utils", "asks for the process id"),  # processor time of numpy's own tests
    ("multiprocessing.heap", "asks for the process id"),  # it notices that it is in another process
    ("tempfile", "asks for the process id"),  # the same
    ("multiprocessing.process", "draws random bytes"),  # the key of a process, which each rank draws anew
    ("multiprocess.process", "draws random bytes"),
    ("numpy.random._pickle", "draws random bytes"),  # these three seed generators, which each rank seeds anew
    ("scipy.stats._distribution_infrastructure", "draws random bytes"),
    ("sklearn.ensemble._hist_gradient_boosting.grower", "draws random bytes"),
    ("transformers.utils.hub", "draws random bytes"),  # SESSION_ID, which each rank draws anew
    ("dateutil.parser._parser", "reads the time"),  # the century
    ("ray._private.worker", "reads the time"),  # t0, which each rank reads anew
    ("lightning.__about__", "reads the time"),  # these two have the year
    ("lightning_utilities.__about__", "reads the time"),
    ("logging", "reads the time"),  # the time at which it was imported, which each rank reads anew
    ("urllib3.util.connection", "binds a port"),  # whether this machine has IPv6
}
"""Modules, and what ranks may share of their import."""

_SHARED = {
    "filelock",  # it notices that it is in another process
    "fsspec",  # the same
    "networkx",  # variables that begin with its name
    "numba",  # these three, the same
    "preloaded_modules.py",
    "tqdm",
    "joblib._multiprocessing_helpers",  # the name of a semaphore that it closes at once
    "numpy.f2py.rules",  # the time, in a comment of what f2py writes
    "psutil",  # processor time of this machine
    "sympy.core.symbol",  # a random number, in symbols that are unlike those of another process
    "torch.distributed._composable.contract",  # names of attributes
}
"""Packages and modules of which ranks may share all values."""

_STANDARD = (os.path.dirname(os.__file__) + os.sep, "<frozen")
"""Beginnings of the files of Python's own modules."""

_AHEAD = 1_000_003.7
"""Seconds by which the clocks are ahead in the process that an import is compared with: other in all but the year."""


_SPELLED = (bytes, str, int, uuid.UUID)
"""Types of what modules make of random bytes."""


class _MustNotBeShared(BaseException):
    """Raised in a statement that ranks must execute themselves."""


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
        values: the class ``ImportedValues``, but for its first argument.

    Attributes:
        places: the module and line that has started a thread or opened a file or socket, by their names.
        stopped: why the last statement has been stopped; empty if it has not.
    """

    def __init__(
        self,
        program: str,
        installed: tuple[str, ...],
        reads_variables: Collection[str],
        values: Callable[[list[Any], list[Any], Collection[str]], Any],
    ) -> None:
        self.places: dict[str, str] = {}
        self.stopped = ""
        self._program = program
        self._installed = installed
        self._reads_variables = reads_variables
        self._values = values
        self._stamps: dict[tuple[str, str], object] = {}
        self._is_compared = False
        self._asked = ""
        self._given: list[tuple[Any, Callable[[], Any]]] = []
        self._made: list[Any] = []
        self._kept: list[tuple[dict[str, Any], str, Any, Callable[[], Any], int]] = []
        self._originals: dict[int, Any] = {}
        self._is_active = False

    # -- what is watched -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def replaced_functions(self) -> Iterator[contextlib.ExitStack]:
        """Replace the functions that are watched, in the body of a ``with`` statement; give what restores them."""
        with contextlib.ExitStack() as stack:
            for owner, name, what in _EFFECTS:
                self._replace(stack, owner, name, functools.partial(self._see_effect, what))
            for owner, name, what in _QUESTIONS:
                self._replace(stack, owner, name, functools.partial(self._see_question, what))
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
                _set_of_datetime(name, classmethod(functools.partial(self._see_time, vars(datetime.datetime)[name])))
            made = ((os, "urandom"), (os, "getrandom"), (random, "_urandom"), (uuid, "uuid1"), (uuid, "uuid4"))
            for owner, name in made:
                self._replace(stack, owner, name, self._see_random)
            if vars(uuid).get("_generate_time_safe"):
                self._replace(stack, uuid, "_generate_time_safe", _in_a_thread)
            self._replace(stack, threading.Thread, "start", self._see_thread)
            self._replace(stack, socket.socket, "__init__", self._see_socket)
            stack.callback(setattr, sys, "argv", vars(sys).pop("argv"))  # another run may have other arguments
            stack.callback(delattr, sys, "__getattr__")
            vars(sys)["__getattr__"] = self._see_attribute
            watch = self

            class Environ(os.environ.__class__):  # type: ignore[name-defined, misc]
                def __getitem__(self, name: Any) -> Any:
                    watch._see_variable(os.fsdecode(name))
                    return super().__getitem__(name)

                def __iter__(self) -> Iterator[Any]:
                    if watch._is_active:
                        watch._ask("reads all variables")
                    return iter(super().__iter__())

            for environ in (os.environ, os.environb):
                stack.callback(setattr, environ, "__class__", environ.__class__)
                environ.__class__ = Environ
            yield stack

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the body of a ``with`` statement."""
        self._is_active, self.stopped, self._given, self._asked = True, "", [], ""
        gc.freeze()
        try:
            yield
        finally:
            self._is_active = False
            if self._asked:
                sys.path_importer_cache.clear()  # Python writes bytecode into the folders that the first process lists
                self._made = gc.get_objects()  # since they were frozen

    def stop(self, what: str) -> None:
        """Stop the statement, which must not be shared."""
        self.stopped = self.stopped or what
        raise _MustNotBeShared(what)

    def _replace(self, stack: contextlib.ExitStack, owner: Any, name: str, see: Callable[..., Any]) -> None:
        original, is_own = getattr(owner, name), name in vars(owner)
        # A built-in function is no method of a class that has it as an attribute, nor is a method that is bound.
        first = 0 if hasattr(original, "__get__") else 1

        @functools.wraps(original)
        def watched(*args: Any, **options: Any) -> Any:
            call = functools.partial(see, original) if self._is_active else original
            return call(*args[first:], **options)

        replacement = types.MethodType(watched, original) if first else watched
        self._originals[id(replacement)] = original
        setattr(owner, name, replacement)
        stack.callback(setattr, owner, name, original) if is_own else stack.callback(delattr, owner, name)

    def _see_effect(self, what: str, original: Any, *args: Any, **options: Any) -> Any:
        if where := _where(what):
            self.stop(where)
        return original(*args, **options)

    def _see_question(self, what: str, original: Any, *args: Any) -> Any:
        self._ask(what)
        return original(*args)

    def _see_attribute(self, name: str) -> Any:
        if name == "argv" and self._is_active:
            self.stop(f"{_caller()[1]} reads sys.argv")
        raise AttributeError(f"module 'sys' has no attribute {name!r}")

    def _see_open(self, original: Any, *args: Any, **options: Any) -> Any:
        given = {**dict(zip(("file", "how"), args, strict=False)), **options}
        file, how = given.get("file", given.get("path")), given.get("how", given.get("flags", given.get("mode", "r")))
        path = "" if isinstance(file, int) else _absolute(file)
        if path and not (path.endswith(".py") and path.startswith(self._installed)):  # the source of a module
            self.places[path] = place = _caller()[1]
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
            is_search = kind == "listing" and "importlib.metadata" in _caller()[2]
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
        return self._give("asks for the process id", _ProcessId(original()), os.getpid)

    def _see_time(self, original: Any, *args: Any, **options: Any) -> Any:
        now = functools.partial(original, *args, **options)
        if not self._is_active:
            return now()
        value, ahead = now(), {float: _AHEAD, int: int(_AHEAD * 1e9)}
        value += ahead.get(type(value), datetime.timedelta(seconds=_AHEAD)) * self._is_compared
        return self._give("reads the time", value, now)

    def _see_moment(self, original: Any, *args: Any) -> Any:
        count = int(original.__name__ == "strftime")
        if len(args) > count and args[count] is not None:
            return original(*args)
        takes_parts = original.__name__ in ("asctime", "strftime")
        return original(*args[:count], time.localtime(time.time()) if takes_parts else time.time())

    def _see_random(self, original: Any, *args: Any, **options: Any) -> Any:
        draw = functools.partial(original, *args, **options)
        return self._give("draws random bytes", draw(), functools.lru_cache(draw))

    def _ask(self, what: str) -> None:
        self._asked = self._asked or _where(what)

    def _give(self, what: str, value: Any, again: Callable[[], Any]) -> Any:
        """Return a value of this process to an import that has asked for it; another process has it ``again``."""
        self._ask(what)
        self._given.append((value, again))
        return value

    def _see_thread(self, original: Any, thread: threading.Thread) -> Any:
        self.places[thread.name] = _caller()[1]
        return original(thread)

    def _see_socket(self, original: Any, made: socket.socket, *args: Any, **options: Any) -> None:
        original(made, *args, **options)
        self.places[os.readlink(f"/proc/self/fd/{made.fileno()}")] = _caller()[1]

    def _see_variable(self, name: str) -> None:
        is_missing = self._is_active and os.fsencode(name) not in vars(os.environ)["_data"]
        if is_missing and (name in _OF_A_RANK.split() or name.startswith(("TORCHELASTIC_", "TORCHX_"))):
            module, place, _ = _caller()
            if module not in self._reads_variables:
                self.stop(f"{place} reads {name}")

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
        if self.stopped:
            return self.stopped
        for module in _globals(names):
            for name, value in list(module.items()):
                if type(value) in (types.FunctionType, types.MethodType) and id(value) in self._originals:
                    module[name] = self._originals[id(value)]
        self._find_kept()
        different = ""
        if self._asked:
            renewed = {(id(names), name) for names, name, *_ in self._kept}
            different = self._imported().difference(compared(), renewed)
        self._given, self._made = [], []
        return different and f"{self._asked}, on which {different} depends"

    def _find_kept(self) -> None:
        """Find the global names that have values of this process."""
        renewed: dict[Any, tuple[Callable[[], Any], int]] = {id(kept[2]): kept[3:] for kept in self._kept}
        for given, again in self._given:
            forms = enumerate(_spellings(given))
            renewed |= {(type(form), form) if number else id(given): (again, number) for number, form in forms}
        self._kept = [
            (names, name, value, *renew)
            for names in (_globals(sys.modules) if renewed else ())
            for name, value in names.items()
            if (renew := renewed.get(id(value)) or (type(value) in _SPELLED and renewed.get((type(value), value))))
        ]

    def digest(self, execute: Callable[[], object]) -> bytes:
        """Execute a statement in another process, with other values; return the ``digest`` of what it has made."""
        self._is_compared = True
        os.setsid()
        variables = vars(os.environ)["_data"]  # the additional one is the first: a loop may leave the last in a name
        variables |= {b"ROLE_RANK": b"0", **{name: variables.pop(name) for name in list(variables)}}
        execute()
        variables.pop(b"ROLE_RANK", b"")
        return bytes(self._imported().digest())

    def _imported(self) -> Any:
        return self._values(self._made, [self._given, self._stamps], _SHARED)

    def renew(self) -> None:
        """Give this fork values of its own in the place of those that modules keep of the process it is a fork of."""
        for names, name, value, again, number in self._kept:
            if names.get(name) is value:
                names[name] = _spellings(again())[number]


def _where(what: str) -> str:
    """Return the place that has called a watched function, and what for; empty if that is harmless."""
    module, place, standard = _caller()
    is_harmless = any((name, what) in _HARMLESS for name in (module, *standard))
    return "" if is_harmless or {module, module.partition(".")[0]} & _SHARED else f"{place} {what}"


def _caller() -> tuple[str, str, list[str]]:
    """Return who has called the watched function that called this one.

    Returns:
        The name of the first module that is not Python's own, the same with the line, and Python's own modules before.
    """
    frame: types.FrameType | None = sys._getframe(1)
    standard = list[str]()
    while frame is not None:
        file, name = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if file.startswith(_STANDARD) and f"-packages{os.sep}" not in file:
            standard.append(name)
        elif file != __file__:
            return name, f"{name}:{frame.f_lineno}", standard
        frame = frame.f_back
    return "it", "it:0", standard  # a thread may execute Python's own modules alone


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


def _spellings(given: Any) -> tuple[Any, ...]:
    """Return a value, and what else it may look like in a module if it is an identifier or random bytes."""
    token = given.bytes if isinstance(given, uuid.UUID) else given
    if not isinstance(token, bytes):
        return (given,)
    whole = (uuid.UUID(bytes=token), str(uuid.UUID(bytes=token))) if len(token) == 16 else ()
    text = base64.urlsafe_b64encode(token).rstrip(b"=").decode()
    return given, token, int.from_bytes(token, "big"), token.hex(), text, *whole


def _in_a_thread(function: Callable[[], Any]) -> Any:
    """Call libuuid in a thread, with which the random number ends that tells ``uuid1`` of processes apart.

    Forks of a process whose main thread has called it share that number, and may have the same identifier.
    """
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def _set_of_datetime(name: str, function: Any) -> None:
    """Set a method of ``datetime.datetime``, which Python does not allow."""
    gc.get_referents(vars(datetime.datetime))[0][name] = function
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
