# SPDX-License-Identifier: BSD-3-Clause
"""Execute the leading statements of a program (``leading_statements``) in the zygote, before its ranks are forked.

``zygote_main`` runs this file: it imports the standard library alone. A statement must not be shared by ranks if it
reads a variable of a rank, imports the user's own modules, or has an effect that a fork does not get, or must not share
(``fork_safety``). A copy of this process is forked before each import; if the import must not be shared, that copy goes
on as the zygote, and the ranks execute the statement and those after it themselves.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.machinery
import os
import signal
import site
import socket
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable
from typing import Any, NoReturn

_RANK_ZERO = {
    "lightning.fabric.utilities.rank_zero": ("RANK", "LOCAL_RANK"),
    "lightning_fabric.utilities.rank_zero": ("RANK", "LOCAL_RANK"),
    "torchmetrics.utilities.prints": ("LOCAL_RANK",),
}
"""Modules whose only use of a rank's variables at import is ``rank_zero_only.rank``, from the first of these that is
set (lightning 2.6, torchmetrics 1.9): a rank sets it anew."""

_HARMLESS = {*_RANK_ZERO, "tqdm.utils", "preloaded_modules.py"}
"""Modules that may read a rank's variables. ``tqdm`` takes from all those that begin with TQDM_."""

_REASON_BYTES = 1000
"""Bytes of a reason at most, of which a pipe takes 4096 at once (PIPE_BUF)."""

_COMPARE = b"\0"
"""What a copy of the zygote gets in the place of a reason, and answers, if it is to execute the import as well."""

_WAITER = """
import os, sys
os.write(int(sys.argv[2]), os.fsencode(sys.argv[3]))
os.close(int(sys.argv[2]))
code = os.waitstatus_to_exitcode(os.waitpid(int(sys.argv[1]), 0)[1])
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""A program that has a copy of the process that it was go on, for a reason, and ends as the copy does."""


class LeadingImports:
    """Execute the leading statements of an order (see ``zygote_main``), and remember what they depend on.

    Attributes:
        environ: the environment before the first statement.
        output: what the statements have written to stdout and to stderr; each rank writes it when it begins.
        unshared: the first statement that ranks cannot share, where it is, and why; empty if they share all.
    """

    def __init__(self, order: dict[str, Any], path0: str, run_sibling_file: Callable[[str], dict[str, Any]]) -> None:
        self.environ = dict(os.environ)
        self.output = (b"", b"")
        self.unshared = ""
        self._statements: list[tuple[str, int, str]] = order["statements"]
        self._path = order["path"]
        self._path0 = path0
        self._installed = _InstalledModules(path0)
        self._safety = run_sibling_file("fork_safety.py")
        self._generators = self._safety["Generators"]()
        compared = run_sibling_file("import_comparison.py")["ImportedValues"]
        self._watch: Any = run_sibling_file("import_watch.py")["ImportWatch"](
            self._path, self._installed.places, _HARMLESS, functools.partial(compared, self._generators.is_renewed)
        )
        self._watch.add_stamps("folder", self._installed.places)
        self._set: dict[bytes, bytes] = {}
        self._packages: set[str] = set()
        self._guard: Any = _Guard(self._installed, self._watch.stop)
        self._bound: list[tuple[str, str, Any]] = []

    def execute(self, fork: Callable[[], int], hide: Callable[[set[str]], None]) -> list[Callable[[], None]]:
        """Execute the statements.

        Args:
            fork: forks this process; the fork ends when this process does.
            hide: hides modules from the program until it imports them.

        Returns:
            Functions for forks that make anew what they must not share.
        """
        before, main = set(sys.modules), types.ModuleType("__main__")
        executed = set[str]()
        vars(main).update(__builtins__=sys.modules["builtins"], __file__=self._path)
        sys.modules["__main__"] = main
        with _Output() as output, self._watch.replaced_functions() as restored:
            sys.meta_path.insert(0, self._guard)
            restored.callback(sys.meta_path.remove, self._guard)
            for path, line, text in self._statements:
                # What the program has no statement for is hidden from those that its ranks execute.
                if self.unshared if line else sys.modules.keys() >= {*text.removeprefix("import ").split(", ")}:
                    continue
                is_import = text.startswith(("import ", "from ", "try:"))
                is_known = text.split()[1].partition(".")[0] in sys.stdlib_module_names or text in executed
                executed.add(text)
                if not is_import or is_known:
                    why = self._execute(path, line, text, main)
                else:
                    printed, imported = output.sizes(), set(sys.modules)
                    digest = _memory_file()
                    execute = functools.partial(self._execute, path, line, text, main)
                    copy, writer, why = _fork_copy(fork, digest, functools.partial(self._watch.digest, execute))
                    if not copy:
                        output.truncate(printed)
                    else:
                        resources = self._safety["Resources"](fork)
                        why = execute()
                        if self._path0 and self._path0 not in sys.path:
                            why = why or "it takes the program's folder out of sys.path"
                        why = why or resources.what_is_new("it", self._watch.places) or self._generators.seeded_by("it")
                        new = sys.modules.keys() - imported
                        compared = functools.partial(_digest_of_copy, writer, digest)
                        why = why or self._watch.problem(new, compared) or self._out_of_order(text, main)
                        if not why and output.sizes() != printed and not sys.modules.keys().isdisjoint(_RANK_ZERO):
                            why = "it prints on rank 0 alone"
                        if why:
                            _leave_to(copy, writer, why, self._safety["children"]())
                        os.kill(copy, signal.SIGKILL)
                        os.waitpid(copy, 0)
                        os.close(writer)
                        if not line:
                            hide({name for name in new if name not in sys.stdlib_module_names})
                    os.close(digest)
                if why and line:
                    self.unshared = f"{os.path.basename(path)}:{line} {text}: {why}"
            self.output = output.read()
        new = set(sys.modules) - before
        self._packages = {name.partition(".")[0] for name in new}
        specs = (vars(sys.modules[name]).get("__spec__") for name in new if hasattr(sys.modules[name], "__dict__"))
        files = (str(spec.origin) for spec in specs if isinstance(spec, importlib.machinery.ModuleSpec))
        self._watch.add_stamps("content", files)
        return [self._generators.stop(), _renew_rank_zero, self._watch.renew]

    def _execute(self, path: str, line: int, text: str, main: types.ModuleType) -> str:
        """Execute a statement; return why it must not be shared, if that is found at once."""
        before = dict(vars(os.environ)["_data"])  # reading os.environ itself is watched
        try:
            with self._watch.watching():
                exec(compile("\n" * (line - 1) + text, path, "exec", dont_inherit=True), vars(main))
        except BaseException as error:
            return self._watch.stopped or f"{type(error).__name__}: {error}"
        now = vars(os.environ)["_data"]
        if text.startswith("os.environ"):
            self._set.update({name: value for name, value in now.items() if before.get(name) != value})
        if any(now.get(name) != value for name, value in self._set.items()):
            return "it changes a variable that the program sets"  # the program sets it again after the import
        return ""

    def _out_of_order(self, text: str, main: types.ModuleType) -> str:
        """Return why an import that ranks execute again would not do there what it has done here; empty if it would.

        The first time it may fail in the middle, or it may replace what an import before it has given the program.
        """
        nodes = list(ast.walk(ast.parse(text)))
        froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names.update(str(node.module) for node in froms)
        if failed := [name for name in names if name in self._guard.found and name not in sys.modules]:
            return f"the import of {failed[0]} fails"
        for module, name, value in self._bound:
            if getattr(sys.modules.get(module), "__dict__", {}).get(name, value) is not value:
                return f"it replaces {module}.{name}, which has been imported before"
        given = [(str(node.module), alias) for node in froms for alias in node.names]
        bound = ((module, alias.name, vars(main).get(alias.asname or alias.name)) for module, alias in given)
        self._bound += [(module, name, value) for module, name, value in bound if value is not None]
        return ""

    def is_current(self, path0: str) -> bool:
        """Return whether an interpreter of its own would import the same files now.

        Args:
            path0: the folder of the program.
        """
        importlib.invalidate_caches()
        places = [path0, *sys.path] if self._path0 else sys.path
        specs = (importlib.machinery.PathFinder.find_spec(name, places) for name in self._packages)
        return self._watch.is_current() and not any(
            spec.loader and self._installed.foreign(spec) for spec in specs if spec
        )


def _fork_copy(fork: Callable[[], int], digest: int, compare: Callable[[], bytes]) -> tuple[int, int, str]:
    """Fork a copy of this process that waits for the reason to go on in its place.

    Return the pid of the copy and the socket for the reason; in a copy that goes on 0, and the reason. If the reason is
    _COMPARE, a fork of the copy writes what ``compare`` returns into ``digest``, and ends.
    """
    ends = socket.socketpair()
    reader, writer = (end.detach() for end in ends)
    copy = fork()
    if not copy:
        os.close(writer)
        # Not until the end of the socket, which a process that the import has forked may hold open.
        while (why := os.read(reader, _REASON_BYTES)) == _COMPARE:
            if not (child := fork()):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(1, 2)
                with contextlib.suppress(BaseException):
                    os.write(digest, compare())
                os._exit(0)
            os.waitpid(child, 0)
            os.write(reader, _COMPARE)
        if not why:
            os._exit(1)
    os.close(reader)
    return (copy, writer, "") if copy else (0, -1, why.decode(errors="replace"))


def _digest_of_copy(copy: int, digest: int) -> bytes:
    """Have a copy of this process execute the last statement; return what it has made."""
    os.write(copy, _COMPARE)
    os.read(copy, len(_COMPARE))
    return os.pread(digest, os.fstat(digest).st_size, 0)


def _leave_to(copy: int, writer: int, why: str, children: set[str]) -> NoReturn:
    """Have a copy go on once this process has given back what an import has taken: ports, locks, memory.

    The host knows this process by its pid: it becomes a small one that ends as the copy does.
    """
    for child in children - {str(copy)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
    for number in os.listdir("/proc/self/fd"):
        if int(number) > 2:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.set_inheritable(int(number), int(number) == writer)  # threads of the import may still use it
    reason = why.encode(errors="replace").replace(b"\0", b" ")[:_REASON_BYTES]
    words: list[str | bytes] = ["-I", "-S", "-c", _WAITER, str(copy), str(writer), reason, *sys.orig_argv[-1:]]
    os.execv(sys.executable, [sys.executable, *words])


def _renew_rank_zero() -> None:
    """Have the modules of _RANK_ZERO in this rank take its variables."""
    for name, variables in _RANK_ZERO.items():
        if name in sys.modules:
            numbers = (os.environ[variable] for variable in variables if variable in os.environ)
            vars(sys.modules[name])["rank_zero_only"].rank = int(next(numbers, 0))


class _Guard:
    """Stop an import of a module that is neither installed nor Python's own before it is executed."""

    def __init__(self, installed: _InstalledModules, stop: Callable[[str], None]) -> None:
        self.found = set[str]()
        self._installed = installed
        self._stop = stop

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        finders: list[Any] = [finder for finder in sys.meta_path if not isinstance(finder, _Guard)]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and (file := self._installed.foreign(spec)):
            self._stop(f"it imports {file}, which is not an installed module")
        if spec is not None:
            self.found.add(name)
        return spec


class _Output:
    """Keep what is written to stdout and stderr in the body of a ``with`` statement."""

    def __enter__(self) -> _Output:
        self._files = [_memory_file() for _ in range(2)]
        self._original = [os.dup(number) for number in (1, 2)]
        for number, file in enumerate(self._files, 1):
            os.dup2(file, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number, original in enumerate(self._original, 1):
            os.dup2(original, number)
        for descriptor in (*self._original, *self._files):
            os.close(descriptor)

    def sizes(self) -> list[int]:
        return [os.fstat(file).st_size for file in self._files]

    def truncate(self, sizes: list[int]) -> None:
        for file, size in zip(self._files, sizes, strict=True):
            os.ftruncate(file, size)

    def read(self) -> tuple[bytes, bytes]:
        out, err = (os.pread(file, size, 0) for file, size in zip(self._files, self.sizes(), strict=True))
        return out, err


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("output")
    with tempfile.TemporaryFile(buffering=0) as file:  # a Python for any glibc has no memfd_create
        return os.dup(file.fileno())


class _InstalledModules:
    """The modules in the folders into which packages are installed (``site-packages``).

    What lies in an entry of PYTHONPATH without such packages, or in the folder that the program puts first in
    ``sys.path``, is the user's own, even inside a folder of installed packages.
    """

    def __init__(self, program_folder: str) -> None:
        roots = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
        if site.ENABLE_USER_SITE:
            roots.append(site.getusersitepackages())
        # Other environments, to which a .pth file or PYTHONPATH leads.
        roots += [folder for folder in sys.path if folder != program_folder and _has_packages(folder)]
        roots.append(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))  # this package: it may be editable
        self.places = _folders(*roots)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        own = _folders(program_folder, *(path for path in paths if not _has_packages(path)))
        self._own = tuple(path for path in own if path.startswith(self.places))
        self._standard = _folders(sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))

    def foreign(self, spec: importlib.machinery.ModuleSpec) -> str:
        """Return the file or folder of a module that is neither installed nor Python's own; else empty."""
        paths = [spec.origin] if spec.has_location else spec.submodule_search_locations or ()
        for path in filter(None, paths):
            real = os.path.realpath(path)
            is_installed = real.startswith(self.places) and not real.startswith(self._own)
            if not is_installed and (real.startswith(self.places) or not real.startswith(self._standard)):
                return str(path)
        return ""


def _has_packages(folder: str) -> bool:
    with contextlib.suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    return False


def _folders(*paths: str | None) -> tuple[str, ...]:
    """Return folders with a slash at the end, also with links resolved."""
    found = [path for path in paths if path]
    return tuple(dict.fromkeys(f"{path.rstrip(os.sep)}{os.sep}" for path in (*found, *map(os.path.realpath, found))))
