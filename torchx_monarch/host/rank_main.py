# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The first code of a rank: execute orders of the host, then become ``python script.py``.

Run by path, as ``python -u rank_main.py FD PARENT_PID [LABEL...]``, by any interpreter: it imports the standard library
alone. ``FD`` is one end of a socket pair on which the host sends orders as JSON lines and reads the answers:

======================================  =======================================================================
``{"op": "prepare", ...}``              set ``sys.path[0]`` as for the program and import ``modules``
``{"op": "count", "device": D}``        answer how many ranks torchrun would start for ``--nproc-per-node D``
``{"op": "store", "address": A}``       fork a process that serves a TCPStore on ``A`` until a pipe is closed; answer
                                        its pid. The order carries the pipe and a socket bound to the store's port
``{"op": "bind", "mode": M, "gpu": N}`` bind to the CPUs that ``--numa-binding M`` selects for GPU N
``{"op": "become", ...}``               answer, then exec another interpreter with this file, in folder ``cwd``, with
                                        ``env`` added to its environment; it executes all further orders
``{"op": "ready"}``                     answer when all earlier orders are done
``{"op": "run", ...}``                  set the environment and run the program; close the socket without an answer.
                                        ``cwd`` is present if the program was unknown at ``prepare``: first go there
======================================  =======================================================================

The program then has the state that ``python script.py`` gives it: the main thread, a fresh ``__main__``, ``sys.argv``,
``sys.path[0]``, signals, exit codes and tracebacks. In addition, the rank dies with its host, ``STACKS_SIGNAL`` prints
the stacks of all threads, a crash prints the Python stack, and an uncaught exception is written to
``TORCHELASTIC_ERROR_FILE`` as ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler`` writes it.
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
import gc  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import traceback  # noqa: E402
import types  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

STACKS_SIGNAL = signal.SIGRTMAX - 3
"""The signal on which a rank prints the stacks of all its threads to stderr."""

_PR_SET_PDEATHSIG = 1

_FORK_TIMEOUT = 120.0
"""Seconds within which a fork must have imported torch and returned a value from it."""


def _die_with(parent: int) -> None:
    """Have the kernel send SIGKILL when the parent's main thread ends; exit if it has already ended."""
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


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


def _prepare(order: dict[str, Any]) -> None:
    mode, target = order["mode"], order["target"]
    # CPython adds a bundle to sys.path even with -P: without it the bundle could not run.
    if mode != "exec" and (_OWNS_PATH0 or (mode == "script" and _is_bundle(target))):
        sys.path.insert(0, _path0(mode, target))
    if not order["modules"]:
        return
    # Importing torch makes 260,000 objects that stay. Scanning them for garbage again and again costs an eighth of the
    # import and most of the interpreter's shutdown. gc.freeze exempts them from collection, but not the program's own.
    gc.disable()
    for name in order["modules"]:
        try:
            __import__(name)
        except Exception:
            # The program may import the module later, and fail with a traceback of its own code, or never need it.
            continue
    gc.freeze()
    gc.enable()


def _count(device: str) -> int:
    """Return ``torch.distributed.run.determine_local_world_size`` for a name: auto, cpu, gpu or xpu."""
    from torch.distributed.run import determine_local_world_size

    return int(determine_local_world_size(device))


def _fork() -> int:
    """Fork without Python 3.12's warning of threads: only torch's libraries have some, and their locks survive it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def _fork_store(address: str, lifeline: int, bound: int) -> dict[str, Any]:
    """Fork a process that serves a TCPStore on a bound socket until the write end of ``lifeline`` is closed.

    The process outlives this rank, like torchrun's store, which the agent serves. Forking twice makes it a child of the
    host, so that the program has no child that it did not start.

    Args:
        address: address that the store is created with; empty for 127.0.0.1.
        lifeline: descriptor of the read end of a pipe.
        bound: descriptor of a socket that is bound to the store's port.

    Returns:
        ``pid`` once the store listens, or ``error``.
    """
    answer, write_end = os.pipe()
    child = _fork()
    if child == 0:
        try:
            _become_store(address, lifeline, bound, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    os.waitpid(child, 0)
    with open(answer, "rb") as file:
        answered: dict[str, Any] = json.loads(file.read())
    return answered


def _become_store(address: str, lifeline: int, bound: int, answer: int) -> NoReturn:
    os.setsid()  # signals to the rank's process group or session must not reach this process
    if os.fork():
        os._exit(0)
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        # A backend may send these to every process of a job. The host ends the store: ranks that shut down need it.
        signal.signal(ignored, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    for name in os.listdir("/proc/self/fd"):
        # Such as the rank's channel and pipes: the host sees their end only when every process has closed them.
        if int(name) > 2 and int(name) not in (lifeline, bound, answer):
            with contextlib.suppress(OSError):
                os.close(int(name))
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write("tcpstore")  # the name in a process listing; the command line is still the rank's
    try:
        _store = _serve_store(address, bound)
    except Exception as error:
        os.write(answer, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    os.write(answer, json.dumps({"pid": os.getpid()}).encode())
    os.close(answer)
    os.read(lifeline, 1)  # returns when the pipe is closed: the host never writes to it
    os._exit(0)


def _cpus_near(gpu: int, mode: str) -> list[int]:
    """Return the CPUs to which ``torchrun --numa-binding MODE`` binds the local rank with the number ``gpu``."""
    try:
        from torch.numa.binding import AffinityMode, NumaOptions, _get_logical_cpus_to_bind_to

        options = NumaOptions(affinity_mode=AffinityMode(mode))
    except (ImportError, ValueError):
        import torch

        raise RuntimeError(f"torch {torch.__version__} cannot tell (torch.numa.binding)") from None
    # Torch 2.14 has renamed an argument of this private function.
    names = _get_logical_cpus_to_bind_to.__code__.co_varnames
    index = {"device_index" if "device_index" in names else "gpu_index": gpu}
    cpus = sorted(_get_logical_cpus_to_bind_to(**index, numa_options=options))
    if not cpus:
        raise RuntimeError(f"none of the CPUs near GPU {gpu} is among those that this process may use")
    return cpus


def _bind(cpus: list[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:
            continue  # the thread has ended


class _ForkError(Exception):
    """Raised when a function fails in a fork; the message is the fork's."""


def _in_fork(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a fork of this process and return its result, which must be a JSON value.

    torch queries the GPU driver. A process that has done so can no longer use GPUs in its own forks, nor select them
    by CUDA_VISIBLE_DEVICES. Under torchrun the launcher makes this query, not the rank.

    Raises:
        _ForkError: the function has failed or not returned within ``_FORK_TIMEOUT`` seconds.
    """
    import select

    rank, (reader, writer) = os.getpid(), os.pipe()
    child = _fork()
    if child == 0:
        try:
            _die_with(rank)
            answer = {"value": function(*args)}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        if not select.select([file], [], [], _FORK_TIMEOUT)[0]:
            os.kill(child, signal.SIGKILL)
        data = file.read()
    os.waitpid(child, 0)
    answer = json.loads(data or '{"error": "torch has not answered"}')
    if "error" in answer:
        raise _ForkError(answer["error"])
    return answer["value"]


def _serve_store(address: str, bound: int) -> Any:
    """Serve a TCPStore on a bound socket, in threads of torch; return the store, which the caller must keep alive."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.socket(fileno=bound)
    listener.listen(4096)
    host, port = address or "127.0.0.1", listener.getsockname()[1]
    descriptor = listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=True)


def _next_order(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive an order and its file descriptors. The host sends one order at a time and waits for each answer."""
    line, passed = b"", []
    while not line.endswith(b"\n"):
        data, descriptors, _, _ = socket.recv_fds(channel, 65536, 2, socket.MSG_CMSG_CLOEXEC)
        if not data:
            # The host has ended or does not need this interpreter. Skip the clean-up: torch's takes a while.
            os._exit(0)
        line += data
        passed += descriptors
    return json.loads(line), passed


def _serve_orders(channel: socket.socket) -> dict[str, Any]:
    """Execute orders until ``run``; return that order."""
    while True:
        order, passed = _next_order(channel)
        op = order["op"]
        if op == "run":
            channel.close()
            return order
        answer: dict[str, Any] = {"op": op}
        try:
            if op == "prepare":
                _prepare(order)
            elif op == "count":
                answer["count"] = _in_fork(_count, order["device"])
            elif op == "bind":
                _bind(_in_fork(_cpus_near, order["gpu"], order["mode"]))
            elif op == "store":
                answer.update(_fork_store(order["address"], *passed))
        except _ForkError as error:
            answer["error"] = str(error)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        for descriptor in passed:
            os.close(descriptor)
        channel.sendall(json.dumps(answer).encode() + b"\n")
        if op == "become":
            os.chdir(order["cwd"])
            os.environ.update(order["env"])
            _exec(order["python"][0], [*order["python"][1:], __file__, *sys.argv[1:]])


def _exec(target: str, args: list[str]) -> NoReturn:
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
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        # A preload imported multiprocessing, whose __init__ gave ``__main__`` this second name. Spawned children refer
        # to the script's classes by it, and this process looks them up there when it unpickles their results.
        sys.modules["__mp_main__"] = main
    if mode == "module":
        import runpy

        sys.argv = ["-m", *args]
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what `python -m` itself calls
        return
    if mode == "code":
        sys.argv = ["-c", *args]
        exec(compile(target, "<string>", "exec", dont_inherit=True), vars(main))
        return
    sys.argv = [target, *args]
    path = _absolute(target)
    if _is_bundle(path):
        import runpy

        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    compiled = SourcelessFileLoader("__main__", path) if path.endswith(".pyc") else None
    loader = compiled or SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader, __spec__=None, __package__=None)
    code = compiled.get_code("__main__") if compiled else _script_code(path, path)
    assert code is not None
    exec(code, vars(main))


def _record(error: BaseException, began: bool) -> None:
    """Write the torchelastic error file (``rank_errors.record``)."""
    with contextlib.suppress(OSError):  # a failure here must not hide the program's error
        _run_sibling_file("rank_errors.py")["record"](error, began)


def _program_began(trace: types.TracebackType | None) -> bool:
    """Return whether a line of the program ran: a frame that is neither of this file nor of CPython's ``-m``."""
    return any(
        frame.f_code.co_filename != __file__
        and not frame.f_code.co_filename.startswith("<frozen")
        and frame.f_globals.get("__name__") != "runpy"  # frozen only since Python 3.11
        for frame, _ in traceback.walk_tb(trace)
    )


def _without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _without_own_frames_for(hook: Callable[..., object] | None) -> Callable[..., None]:
    """Return a ``sys.excepthook`` that removes the frames of this file and calls ``hook``.

    If ``hook`` is None (deleted) or fails, it does what CPython does.
    """

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


def _run_sibling_file(name: str) -> dict[str, Any]:
    """Run a file of this folder, which is not in ``sys.path``; return its global names."""
    path = os.path.join(os.path.dirname(__file__), name)
    names: dict[str, Any] = {"__name__": name}
    exec(_script_code(path, path), names)
    return names


def main() -> None:
    """Execute the orders of the host (descriptor and pid are on the command line), then run the program."""
    _die_with(int(sys.argv[2]))
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    order = _serve_orders(socket.socket(fileno=int(sys.argv[1])))
    mode, target, args = order["mode"], order["target"], order["args"]
    os.environ.update(order["env"])
    if "cwd" in order:
        os.chdir(order["cwd"])
        _prepare({"mode": mode, "target": target, "modules": ()})
    if mode == "exec":
        _exec(target, args)
    sys.orig_argv = [sys.executable, *order["orig_argv"]]
    if "torch" in sys.modules and os.environ.get("RANK") == "0":
        _run_sibling_file("early_variables.py")["watch"]()
    try:
        _run(mode, target, args)
    except SystemExit as error:
        # CPython raises SystemExit for a missing script or module; a program may raise it with a message.
        began = _program_began(error.__traceback__)
        if not began or isinstance(error.code, str):
            _record(error, began)
        raise
    except BaseException as error:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        if not isinstance(error, KeyboardInterrupt):
            _record(error, _program_began(error.__traceback__))
        # Re-raised, so that the interpreter ends as usual: exit code 1, or death by SIGINT for KeyboardInterrupt.
        # Re-raising adds the frames of this file to the traceback again; the hook removes them.
        sys.excepthook = _without_own_frames_for(getattr(sys, "excepthook", None))
        raise


if __name__ == "__main__":
    main()
