# SPDX-License-Identifier: BSD-3-Clause
"""The program of a rank: become ``python script.py``, in a fork of the zygote or in an interpreter of its own.

``zygote_main`` runs this file in every rank that is forked. It also executes it by path, for a rank with an interpreter
of its own, as ``python -u rank_main.py BREAKPOINTS MODE TARGET [ARGUMENT...]``, by any interpreter: it imports the
standard library alone. ``BREAKPOINTS`` is the socket at which the host waits for ranks that are to be debugged.

Beside what ``python`` does, ``STACKS_SIGNAL`` has the stacks of all threads written where the host reads them, a crash
prints the Python stack, and an uncaught exception is written to ``TORCHELASTIC_ERROR_FILE`` as
``torch.distributed.elastic.multiprocessing.errors.ErrorHandler`` writes it.
"""

from __future__ import annotations

import os
import sys

# The folder of this file must not shadow the program's imports. With -P (or PYTHONSAFEPATH) Python does not add it.
_OWNS_PATH0 = not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated
if _OWNS_PATH0 and __name__ == "__main__":
    del sys.path[0]

import contextlib  # noqa: E402
import faulthandler  # noqa: E402
import functools  # noqa: E402
import io  # noqa: E402
import signal  # noqa: E402
import traceback  # noqa: E402
import types  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

STACKS_SIGNAL = signal.SIGRTMAX - 3
"""The signal on which a rank writes the stacks of all its threads to the file that its host reads them from."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14

OWN_FILES = tuple(
    os.path.join(os.path.dirname(__file__), name) for name in ("rank_main.py", "rank_recorder.py", "zygote_main.py")
)
"""The files whose frames are below the program's on the stack."""

_FUNCTION_FILE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "function.py")
"""The program ``torchx_monarch.function``, which calls a function of the user's."""


def show_stacks() -> None:
    """Have a crash print the Python stack, and ``STACKS_SIGNAL`` write those of all threads.

    They go to the file of ``receive_stacks_file``, which an interpreter of its own has from the zygote, else to stderr.
    """
    faulthandler.enable()
    number = _stacks_descriptor()
    try:
        os.set_inheritable(number, False)  # the programs that the rank starts do not get it
    except OSError:
        number = 2
    faulthandler.register(STACKS_SIGNAL, file=number, all_threads=True)


def receive_stacks_file(descriptor: int, host: int, executes: bool) -> None:
    """Have this process write its stacks to the host's file, and let the host, by its pid, read them with a debugger.

    Where Yama restricts ptrace, the host's children, such as py-spy, may read this process. If it ``executes`` another
    interpreter, that calls ``show_stacks``; until then the signal would end it.
    """
    if descriptor != _stacks_descriptor():
        os.dup2(descriptor, _stacks_descriptor(), inheritable=executes)
        os.close(descriptor)
    import ctypes  # the zygote has imported it; an interpreter of its own does without

    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, host, 0, 0, 0)
    if executes:
        faulthandler.unregister(STACKS_SIGNAL)
    else:
        show_stacks()


def _stacks_descriptor() -> int:
    """Return the highest number that a descriptor may have, at most 1023.

    A program that closes all that it finds, and opens others, gets lower numbers for these. So nothing writes stacks
    into a file of the program's.
    """
    limit = os.sysconf("SC_OPEN_MAX")
    return (min(limit, 1024) if limit > 0 else 1024) - 1


def set_command_line(words: Sequence[str]) -> None:
    """Have process listings show a command line and the present environment as those of this process."""
    import ctypes
    import struct

    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    line = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(b"%s=%s\0" % variable for variable in os.environb.items())
    text = ctypes.create_string_buffer(line + variables)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(text))  # the kernel reads it until the process has ended
    start, middle, end = (ctypes.addressof(text) + length for length in (0, len(line), len(line) + len(variables)))
    with open("/proc/self/stat", "rb") as file:
        numbers = file.read().rpartition(b")")[2].split()  # the third and following fields of proc(5)
    code, data, stack, (old_start, old_end) = (
        [int(number) for number in numbers[first - 3 : last - 2]]
        for first, last in ((26, 27), (45, 47), (28, 28), (48, 49))
    )
    # struct prctl_mm_map: without its last three members, the vector and the executable file remain as they are.
    described = struct.pack("12Q2I", *code, *data, libc.sbrk(0), *stack, start, middle, middle, end, 0, 0, 0xFFFFFFFF)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, described, ctypes.c_ulong(len(described)), 0) != 0:
        # The kernel was built without CONFIG_CHECKPOINT_RESTORE: use the room of the command line that there is.
        room = old_end - old_start
        ctypes.memmove(old_start, line[: room - 1].ljust(room, b"\0"), room)


def set_path0(mode: str, target: str) -> bool:
    """Insert ``sys.path[0]`` as ``python`` does for a program; return whether it does."""
    # CPython adds a bundle to sys.path even with -P: without it the bundle could not run.
    if not (_OWNS_PATH0 or (mode == "script" and _is_bundle(target))):
        return False
    sys.path.insert(0, _path0(mode, target))
    return True


def _path0(mode: str, target: str) -> str:
    """Return ``sys.path[0]`` as CPython sets it for ``-m``, ``-c``, a bundle and a script (links resolved)."""
    if mode == "module":
        return os.getcwd()
    if mode == "code":
        return ""
    return _absolute(target) if _is_bundle(target) else os.path.dirname(os.path.realpath(target))


def _absolute(target: str) -> str:
    """Make the path of a program absolute as CPython does: without normalising it."""
    return os.getcwd() if target == "." else os.path.join(os.getcwd(), target)


def _is_bundle(path: str) -> bool:
    """Return whether Python would run the ``__main__.py`` inside: for a folder, or a zip file of any name."""
    if os.path.isdir(path):
        return True
    import zipimport

    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return False
    return True


def exec_program(target: str, args: Sequence[str]) -> NoReturn:
    """Exec a program that is not Python; exit as a shell does, with 127 if it is not found and 126 if it cannot run."""
    # Python ignores these two signals, and ignored signals stay ignored across exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.disable()
    faulthandler.unregister(STACKS_SIGNAL)
    try:
        os.execvp(target, [target, *args])
    except OSError as error:
        print(f"cannot execute {target!r}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _script_code(path: str, shown: str) -> types.CodeType:
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        # The message and exit code of `python nosuch.py`.
        message = f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        print(message, file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    return compile(source, shown, "exec", dont_inherit=True)


def _run(mode: str, target: str, args: list[str]) -> None:
    """Run a program as CPython's ``Modules/main.c`` runs ``script.py``, ``-m mod`` and ``-c code``."""
    main = sys.modules["__main__"]
    if vars(main).get("__file__") in OWN_FILES:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).clear()  # of leading statements, whose modules may hold it: dill does
    vars(main).update(vars(types.ModuleType("__main__")), __builtins__=sys.modules["builtins"], __annotations__={})
    if "__mp_main__" in sys.modules:
        # A preload imported multiprocessing, whose __init__ gave ``__main__`` this second name. Spawned children refer
        # to the script's classes by it, and this process looks them up there when it unpickles their results.
        sys.modules["__mp_main__"] = main
    sys.argv = [{"module": "-m", "code": "-c"}.get(mode, target), *args]
    if mode == "module" or (mode == "script" and _is_bundle(_absolute(target))):
        import runpy

        name = target if mode == "module" else "__main__"
        # What CPython itself calls.
        runpy._run_module_as_main(name, alter_argv=mode == "module")  # type: ignore[attr-defined]
        return
    if mode == "code":
        source = compile(target, "<string>", "exec", dont_inherit=True)
        if sys.version_info >= (3, 13):
            import linecache

            # CPython does so for tracebacks; its first releases of 3.13 find the source by the name alone.
            linecache._register_code(source if hasattr(linecache, "_make_key") else "<string>", target, "<string>")
        exec(source, vars(main))
        return
    path = _absolute(target)
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    compiled = SourcelessFileLoader("__main__", path) if path.endswith(".pyc") else None
    loader = compiled or SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader, __spec__=None, __package__=None)
    code = compiled.get_code("__main__") if compiled else _script_code(path, path)
    assert code is not None
    exec(code, vars(main))


def _record(error: BaseException, began: bool) -> None:
    with contextlib.suppress(OSError):  # a failure here must not hide the program's error
        run_sibling_file("rank_errors.py")["record"](error, began)


def _program_began(trace: types.TracebackType | None) -> bool:
    """Return whether a line of the program ran: a frame that is neither of our files nor of CPython's ``-m``."""
    return any(
        frame.f_code.co_filename not in OWN_FILES
        and not frame.f_code.co_filename.startswith("<frozen")
        and frame.f_globals.get("__name__") != "runpy"  # frozen only since Python 3.11
        for frame, _ in traceback.walk_tb(trace)
    )


def _without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback from the program on, or from the function on that our module calls."""
    while trace is not None and trace.tb_frame.f_code.co_filename in OWN_FILES:
        trace = trace.tb_next
    inner = trace
    while inner is not None and inner.tb_frame.f_globals.get("__name__") == "runpy":
        inner = inner.tb_next
    if inner is None or inner.tb_frame.f_code.co_filename != _FUNCTION_FILE:
        return trace
    while inner is not None and inner.tb_frame.f_code.co_filename == _FUNCTION_FILE:
        inner = inner.tb_next
    return inner or trace


def _without_own_frames_for(hook: Callable[..., object] | None) -> Callable[..., None]:
    """Return a ``sys.excepthook`` that removes our frames and calls ``hook``; without one it does as CPython does."""

    def show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        error.__traceback__ = sys.last_traceback = _without_own_frames(trace)
        if hook is None:
            del sys.excepthook
            print("sys.excepthook is missing", file=sys.stderr)
            sys.__excepthook__(kind, error, error.__traceback__)
            return
        sys.excepthook = hook
        try:
            hook(kind, error, error.__traceback__)
        except SystemExit:
            raise
        except BaseException as failure:
            failure.__traceback__ = _without_own_frames(failure.__traceback__)
            print("Error in sys.excepthook:", file=sys.stderr)
            sys.__excepthook__(type(failure), failure, failure.__traceback__)
            print("\nOriginal exception was:", file=sys.stderr)
            sys.__excepthook__(kind, error, error.__traceback__)

    return show


def _distrust_young_bytecode() -> None:
    """Have the program use the bytecode of its own modules only if that was written 2 s or more after their last edit.

    Python compares the size of a source file and its mtime in whole seconds: two edits within a second may look the
    same, and runs follow each other faster. Unlike mtime, ctime cannot be set. Installed modules are not edited, and
    may all have been copied at the same moment.
    """
    from _frozen_importlib_external import SourceFileLoader, cache_from_source

    path_stats, standard = SourceFileLoader.path_stats, os.path.dirname(os.__file__) + os.sep
    installed = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

    def checked(loader: SourceFileLoader, path: str) -> Mapping[str, Any]:
        stats = path_stats(loader, path)
        if not path.startswith(standard) and not any(folder in path for folder in installed):
            with contextlib.suppress(OSError, NotImplementedError):
                if os.stat(cache_from_source(path)).st_ctime < os.stat(path).st_ctime + 2:
                    return {**stats, "size": -1}  # Python takes the bytecode as that of another file, and replaces it
        return stats

    SourceFileLoader.path_stats = checked  # type: ignore[assignment, method-assign]


def run_sibling_file(name: str) -> dict[str, Any]:
    """Run a file of this folder, which is not in ``sys.path``; return its global names."""
    path = os.path.join(os.path.dirname(__file__), name)
    names: dict[str, Any] = {"__name__": name, "__file__": path}
    exec(_script_code(path, path), names)
    return names


def replace_set_trace(path: str) -> None:
    """Have ``pdb.set_trace``, which ``breakpoint()`` calls by default, wait for a debugger, at the host's socket file.

    It is replaced now, or when the program imports ``pdb``.
    """
    own, rank, debugger = os.getpid(), int(os.environ["RANK"]), dict[str, Any]()

    def replace(module: types.ModuleType) -> None:
        found = getattr(module, "__file__", None) or ""
        if os.path.dirname(found) != os.path.dirname(os.__file__):
            return  # a pdb.py of the program's

        @functools.wraps(module.set_trace)
        def set_trace(*, header: str | None = None, **more: Any) -> None:
            if not debugger:
                debugger.update(run_sibling_file("rank_debugger.py"))
            # A process that the rank has forked has no debugger: its stdin is empty, as that of the rank.
            host = path if os.getpid() == own else ""
            debugger["stop_at"](sys._getframe(1), host, rank, OWN_FILES, header, more)

        module.set_trace = set_trace  # type: ignore[attr-defined]

    if "pdb" in sys.modules:
        replace(sys.modules["pdb"])
    else:
        sys.meta_path.insert(0, _PdbFinder(replace))


class _PdbFinder:
    """Call a function with ``pdb`` when it is imported; find no module otherwise."""

    def __init__(self, imported: Callable[[types.ModuleType], None]) -> None:
        self._imported = imported

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "pdb":
            return None
        sys.meta_path.remove(self)
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec = next((found for found in specs if found is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                self._imported(module)

            loader.exec_module = exec_module
        return spec


def run_program(
    mode: str,
    target: str,
    args: list[str],
    on_failure: Callable[[int], None] = lambda code: None,
) -> None:
    """Run the program of a rank in this interpreter, in its environment and folder, after ``set_path0``.

    ``on_failure`` is called if it has ended by an exception or with another exit code than 0, with that code: -n for
    death by signal n.
    """
    flag = {"module": ["-m"], "code": ["-c"]}.get(mode, [])
    sys.orig_argv = [sys.executable, "-u", *flag, target, *args]
    set_command_line(sys.orig_argv)
    _distrust_young_bytecode()
    try:
        _run(mode, target, args)
    except SystemExit as error:
        # CPython raises SystemExit for a missing script or module; a program may raise it with a message.
        began = _program_began(error.__traceback__)
        if not began or isinstance(error.code, str):
            _record(error.with_traceback(_without_own_frames(error.__traceback__)), began)
        code = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
        if code:
            on_failure(code)
        raise
    except BaseException as error:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        if not isinstance(error, KeyboardInterrupt):
            _record(error, _program_began(error.__traceback__))
        on_failure(-signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
        # Re-raised, so that the interpreter ends as usual: exit code 1, or death by SIGINT for KeyboardInterrupt.
        # Re-raising adds our frames to the traceback again; the hook removes them.
        sys.excepthook = _without_own_frames_for(getattr(sys, "excepthook", None))
        raise


if __name__ == "__main__":
    show_stacks()
    replace_set_trace(sys.argv[1])
    set_path0(*sys.argv[2:4])
    run_program(sys.argv[2], sys.argv[3], sys.argv[4:])
