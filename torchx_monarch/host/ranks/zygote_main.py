# SPDX-License-Identifier: BSD-3-Clause
"""The zygote of a host: an interpreter that imports the ranks' modules once, and of which every rank is a fork.

Run by path, as ``python -u zygote_main.py FD PARENT_PID NAME``, by any interpreter: it imports the standard library
alone. ``FD`` is one end of a socket pair on which the host sends orders as JSON lines and reads one answer to each:

=========================================  ====================================================================
``{"op": "import", "modules": [...]}``     import modules, with ``sys.path[0]`` as for the program of ``mode`` and
                                           ``target``; answer ``unsafe``, why ranks cannot be forked, or empty, and
                                           ``versions``, by names: of torch if that has been imported
``{"op": "lead", "statements": [...]}``    execute the leading statements of the program at ``path``, in the folder
                                           ``cwd`` unless it is null, with ``env`` added, as far as ranks can share
                                           what these do; answer ``unshared``, the first that they cannot share
``{"op": "check", "path0": P}``            answer ``current``, whether these would import the same files now in a
                                           program that puts the folder P first in ``sys.path``
``{"op": "count", "device": D}``           answer how many ranks torchrun would start for ``--nproc-per-node D``
``{"op": "cpus", "mode": M, "gpu": N}``    answer the CPUs that ``--numa-binding M`` selects for GPU N
``{"op": "fork", "processes": [...]}``     fork the processes; answer a pid or an error for each. The order carries
                                           descriptors for each, its ``files``, and a pipe of which each rank reads a
                                           byte before it goes on
=========================================  ====================================================================

A process is a rank or a store. A store is described by ``store``, the address of its TCPStore; empty for 127.0.0.1. Its
descriptors are a pipe, at whose end it ends, and a socket that listens on the store's port.

A rank is described by ``mode``, ``target`` and ``args`` of its program, ``env``, which is added to the zygote's
environment, ``cwd`` (may be missing), ``cpus`` (may be missing), ``recorder``: the socket at which the host
waits for dumps of torch's flight recorders, ``breakpoints``: the one at which it waits for ranks that are to be
debugged, and ``python``: the interpreter and flags that the rank must execute, or nothing if it goes on as a fork. Its
descriptors are the write ends of its stdout and stderr, and the file for its stacks.
"""

from __future__ import annotations

import os
import sys

# The folder of this file must not shadow the program's imports. With -P (or PYTHONSAFEPATH) Python does not add it.
if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
    del sys.path[0]

import contextlib  # noqa: E402
import ctypes  # noqa: E402
import errno  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import resource  # noqa: E402
import select  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

_RANK_MAIN = os.path.join(os.path.dirname(__file__), "rank_main.py")

_PR_SET_PDEATHSIG = 1

_FORK_TIMEOUT = 120.0
"""Seconds within which a fork must have imported torch and returned a value from it."""

_START_TIMEOUT = 60.0
"""Seconds within which forked processes must have begun."""

_MAX_DESCRIPTORS = 253
"""Largest number of descriptors in one message (SCM_MAX_FD of Linux)."""

_program: dict[str, Any] = {}
"""The names of ``rank_main``, and what orders have made: ``preloaded``, ``leading``, ``unsafe`` and ``path0``."""

_COLLECT_AFTER = gc.get_threshold()[0]

_FOR_ALL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a backend may send to every process of a job. The host decides when the zygote and the store end."""


def _die_with(parent: int) -> None:
    """Have the kernel send SIGKILL when the parent's main thread ends; exit if it has already ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _import(order: dict[str, Any]) -> dict[str, Any]:
    if not order["modules"]:
        return {"unsafe": "", "versions": {}}  # each rank executes an interpreter of its own
    safety = _program["run_sibling_file"]("fork_safety.py")
    before, generators = safety["Resources"](_fork), safety["Generators"]()
    unsafe: str = before.tracer()

    def what_is_new(module: str) -> str:
        return str(before.what_is_new(module) or generators.seeded_by(module))

    path0 = sys.path[0] if order["mode"] != "exec" and _program["set_path0"](order["mode"], order["target"]) else None
    # Importing torch makes 260,000 objects that stay. Scanning them for garbage again and again costs an eighth of the
    # import. gc.freeze exempts them from collection, which would write to every page that forks share.
    gc.set_threshold(0)  # what modules do with gc.disable and gc.enable is that of the ranks
    preloaded = _program["preloaded"] = _program["run_sibling_file"]("preloaded_modules.py")["PreloadedModules"]()
    for name in order["modules"]:
        try:
            with preloaded.importing(name):
                importlib.import_module(name)
        except Exception as error:
            # The program may import it later, and fail with a traceback of its own code, or never need it.
            if name != "torch":  # the default
                failure = f"{type(error).__name__}: {error}"
                print(f"preload=torch+{name}: {failure}; name an installed module, or preload=torch", flush=True)
        unsafe = unsafe or what_is_new(name)
    if path0 is not None:
        sys.path.remove(path0)
    _renewals.append(generators.stop())
    if not unsafe:
        _program["run_sibling_file"]("exit_functions.py")["leave_operators"]()
    gc.freeze()
    _program["unsafe"] = unsafe
    return {"unsafe": unsafe, "versions": _versions()}


def _versions() -> dict[str, str]:
    found, torch = {"python": sys.version.split()[0]}, sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
        if cuda := torch.version.cuda:
            found["CUDA"] = str(cuda)
            with contextlib.suppress(Exception):  # a build without NCCL
                found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _lead(order: dict[str, Any]) -> dict[str, Any]:
    if _program["unsafe"]:
        return {}  # each rank executes an interpreter of its own
    run_sibling_file = _program["run_sibling_file"]
    if order["cwd"] is not None:
        os.chdir(order["cwd"])
    os.environ.update(order["env"])
    is_set = _program["set_path0"](order["mode"], order["target"])
    preloaded = _program["preloaded"]
    preloaded.hide()
    _program["path0"] = path0 = sys.path[0] if is_set else ""
    leading = run_sibling_file("leading_imports.py")["LeadingImports"](order, path0, run_sibling_file)
    _program["leading"] = leading
    _renewals.extend(leading.execute(_fork, preloaded.hide_again))
    gc.freeze()
    return {"unshared": leading.unshared}


def _fork() -> int:
    """Fork a process that ends when this one does.

    Python 3.12 warns of threads: OpenBLAS has some, and ends them before the fork.
    """
    parent = os.getpid()  # that of an earlier copy of the zygote, perhaps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        _die_with(parent)
    return child


def _in_fork(name: str, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Call a function in a fork of this process; return an answer with its result, a JSON value, by a name.

    torch queries the GPU driver. A process that has done so can no longer use GPUs in its own forks, nor select them
    by CUDA_VISIBLE_DEVICES.
    """
    reader, writer = os.pipe()
    child = _fork()
    if child == 0:
        try:
            answer = {name: function(*args)}
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
    result: dict[str, Any] = json.loads(data or '{"error": "torch has not answered"}')
    return result


def _count(device: str) -> int:
    """Return ``torch.distributed.run.determine_local_world_size`` for a name: auto, cpu, gpu or xpu."""
    from torch.distributed.run import determine_local_world_size

    return int(determine_local_world_size(device))


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


def _serve_store(address: str, listener: int) -> Any:
    """Serve a TCPStore on a listening socket, in threads of torch; return the store, to be kept alive by the caller."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    bound = socket.socket(fileno=listener)
    host, port = address or "127.0.0.1", bound.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach(), use_libuv=True)


# -- forks -------------------------------------------------------------------------------------------------------------


class _Forks:
    """Fork the processes of an order: ranks, and the store where they meet.

    A middle process forks them all and ends, so that they become children of the host, which is their subreaper: the
    host learns their exact exit codes, and the kernel kills the ranks when it dies. The processes close the descriptors
    of the order, and the channel to the host.
    """

    def __init__(self, processes: list[dict[str, Any]], passed: list[int], channel: socket.socket) -> None:
        self._processes = processes
        self._passed = passed
        self._channel = channel
        self._middle = 0
        self._reader, self._writer = os.pipe()

    def fork(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """Fork the processes; return, in a rank, its description, and in the zygote a pid or an error for each."""
        try:
            middle = _fork()
        except OSError:
            os.close(self._reader)
            os.close(self._writer)
            raise
        if middle == 0:
            number = self._fork_all()
            if "store" in self._processes[number]:
                try:
                    self._become_store(number)
                finally:
                    os._exit(1)
            self._begin(number)
            return self._processes[number], []
        os.close(self._writer)
        os.waitpid(middle, 0)
        return None, self._answers()

    def _fork_all(self) -> int:
        """Fork all processes and end; return, in each of them, its number."""
        self._middle = os.getpid()
        try:
            for number in range(len(self._processes)):
                if os.fork() == 0:
                    return number
        except BaseException as error:
            self._report(number, error=_reason(error))
        os._exit(0)

    def _begin(self, number: int) -> None:
        """Make this process that of a rank, and report its pid; end if something fails."""
        rank, host = self._processes[number], int(sys.argv[2])
        try:
            os.setsid()
            out, err, stacks = (self._passed[index] for index in rank["files"])
            go = self._passed[-1]
            os.dup2(out, 1)
            os.dup2(err, 2)
            for closed in {*self._passed, self._channel.detach(), self._reader} - {stacks, go}:
                os.close(closed)
            _program["receive_stacks_file"](stacks, host, bool(rank["python"]))
            _show_preloaded()
            # The leading statements may have changed variables that the zygote had.
            had = _program["leading"].environ if "leading" in _program else {}
            os.environ.update({name: value for name, value in rank["env"].items() if had.get(name) != value})
            if "cwd" in rank:
                os.chdir(rank["cwd"])
            if "cpus" in rank:
                os.sched_setaffinity(0, rank["cpus"])
            for ignored, handler in _handlers.items():
                if signal.getsignal(ignored) is signal.SIG_IGN:  # no module has set another handler
                    signal.signal(ignored, handler)
            if not rank["python"]:
                _renew_state()
            while os.getppid() == self._middle:
                time.sleep(0.0005)  # until the middle process has forked the other ranks
            _die_with(host)
            if rank["python"] and shutil.which(rank["python"][0]) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._report(number, pid=os.getpid())
            os.close(self._writer)
        except BaseException as error:
            self._report(number, error=_reason(error))
            os._exit(1)
        if not os.read(go, 1):
            os._exit(1)  # the host does not know this process: the zygote has ended before it could tell
        os.close(go)
        if rank["python"]:
            program = [rank["mode"], rank["target"], *rank["args"]]
            _program["exec_program"](
                rank["python"][0], [*rank["python"][1:], _RANK_MAIN, rank["breakpoints"], *program]
            )

    def _become_store(self, number: int) -> NoReturn:
        """Serve a TCPStore, report the pid when it does, and end when the pipe is closed."""
        lifeline, listener = (self._passed[index] for index in self._processes[number]["files"])
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for standard in range(3):
                os.dup2(null, standard)
            for name in os.listdir("/proc/self/fd"):
                # Such as the zygote's channel and pipes: the host sees their end only when every process has closed
                # them.
                if int(name) > 2 and int(name) not in (lifeline, listener, self._writer):
                    with contextlib.suppress(OSError):
                        os.close(int(name))
            _program["set_command_line"](["torchx-monarch", "tcpstore"])
            with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
                file.write("tcpstore")
            _show_preloaded()
            _store = _serve_store(self._processes[number]["store"], listener)
        except BaseException as error:
            self._report(number, error=_reason(error))
            os._exit(1)
        self._report(number, pid=os.getpid())
        os.close(self._writer)
        os.read(lifeline, 1)  # returns when the pipe is closed: the host never writes to it
        os._exit(0)

    def _report(self, number: int, **answer: Any) -> None:
        os.write(self._writer, json.dumps({"number": number, **answer}).encode() + b"\n")

    def _answers(self) -> list[dict[str, Any]]:
        """Read the answers of the processes until all have begun: the pipe is closed then."""
        data, until = b"", time.monotonic() + _START_TIMEOUT
        missing = f"it has not begun within {_START_TIMEOUT:g} s"
        while select.select([self._reader], [], [], max(0.0, until - time.monotonic()))[0]:
            more = os.read(self._reader, 65536)
            if not more:
                missing = "it was killed before it had begun"
                break
            data += more
        os.close(self._reader)
        answers: list[dict[str, Any]] = [{"error": missing} for _ in self._processes]
        for line in data.splitlines():
            answer = json.loads(line)
            answers[answer["number"]] = answer
        return answers


def _show_preloaded() -> None:
    if "leading" in _program:
        _program["preloaded"].show()


def _reason(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    if error.errno == errno.EMFILE:
        return f"{error.strerror} (RLIMIT_NOFILE is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: ulimit -n)"
    if error.errno == errno.EAGAIN:  # of fork
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        shown = "unlimited" if limit == resource.RLIM_INFINITY else limit
        return f"the limit of processes (ulimit -u: {shown}, or pids.max of the container) is reached"
    return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)


def _renew_state() -> None:
    """Give a fork the state that an interpreter of its own would have."""
    if not gc.get_threshold()[0]:  # no module has set another
        gc.set_threshold(_COLLECT_AFTER)
    # Folders may have changed since the zygote has listed them.
    if "importlib.metadata" in sys.modules:
        importlib.invalidate_caches()
    else:
        sys.path_importer_cache.clear()  # without the import of that module, as Python 3.13 does it there
    time.tzset()
    if threading := sys.modules.get("threading"):
        threading.main_thread()._set_native_id()  # Python leaves it that of the process that has forked this one
    # Python's own generator seeds itself after a fork. Those of GPUs have a constant default seed, which torch.seed()
    # would replace.
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch.random"):
        torch.default_generator.seed()
    for renew in _renewals:
        renew()
    if "logging" in sys.modules:
        start = time.time() if sys.version_info < (3, 13) else time.time_ns()
        vars(sys.modules["logging"])["_startTime"] = start  # from which relativeCreated of a record counts
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None  # the rank may have another TMPDIR
    for process in filter(None, map(sys.modules.get, ("multiprocessing.process", "multiprocess.process"))):
        process.current_process().authkey = os.urandom(32)
        with contextlib.suppress(OSError):  # the folder has been removed
            vars(process)["ORIGINAL_DIR"] = os.getcwd()


# -- orders ------------------------------------------------------------------------------------------------------------

_renewals: list[Callable[[], None]] = []
"""Functions for forks that seed random generators of the modules that have been imported."""

_handlers: dict[signal.Signals, Any] = {}
"""The handlers that the zygote was started with, of the signals that it ignores."""


def _next_order(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive an order and its file descriptors. The host sends one order at a time and waits for each answer."""
    line, passed, is_cut = b"", [], 0
    while not line.endswith(b"\n"):
        data, descriptors, flags, _ = socket.recv_fds(channel, 65536, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            # The host has ended or does not need this interpreter. Skip the clean-up: torch's takes a while.
            os._exit(0)
        line += data
        passed += descriptors
        is_cut |= flags & socket.MSG_CTRUNC
    return {**json.loads(line), "is_cut": is_cut}, passed


def _serve_orders(channel: socket.socket) -> dict[str, Any]:
    """Execute orders for ever; return only in ranks, with their description."""

    while True:
        order, passed = _next_order(channel)
        op = order["op"]
        answer: dict[str, Any] = {}
        try:
            if op == "import":
                answer = _import(order)
            elif op == "lead":
                answer = _lead(order)
            elif op == "check":
                answer["current"] = "leading" not in _program or _program["leading"].is_current(order["path0"])
            elif op == "count":
                answer = _in_fork(op, _count, order["device"])
            elif op == "cpus":
                answer = _in_fork(op, _cpus_near, order["gpu"], order["mode"])
            elif order["is_cut"]:  # there was no room for all descriptors
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            elif op == "fork":
                rank, answer["processes"] = _Forks(order["processes"], passed, channel).fork()
                if rank is not None:
                    return rank
        except Exception as error:
            answer["error"] = _reason(error)
        for descriptor in passed:
            os.close(descriptor)
        channel.sendall(json.dumps(answer).encode() + b"\n")


def main() -> None:
    """Execute the orders of the host; in a rank, run its program."""
    _die_with(int(sys.argv[2]))
    for number in _FOR_ALL:
        _handlers[number] = signal.signal(number, signal.SIG_IGN)
    _program.update(__name__="rank_main", __file__=_RANK_MAIN)
    with open(_RANK_MAIN) as file:
        exec(compile(file.read(), _RANK_MAIN, "exec", dont_inherit=True), _program)
    _program["show_stacks"]()
    rank = _serve_orders(socket.socket(fileno=int(sys.argv[1])))
    if rank["mode"] == "exec":
        _program["exec_program"](rank["target"], rank["args"])
    _program["replace_set_trace"](rank["breakpoints"])
    send_failure = _program["run_sibling_file"]("rank_recorder.py")["watch"](rank["recorder"])
    _program["preloaded"].hide()
    first = list[str]()
    if path0 := _program.get("path0"):
        first = sys.path[: sys.path.index(path0)]  # of packages that put folders before the program's
        del sys.path[: len(first) + 1]  # the leading statements may have been another program's
    _program["set_path0"](rank["mode"], rank["target"])
    sys.path[:0] = first
    if "leading" in _program:
        for descriptor, output in enumerate(_program["leading"].output, 1):
            with open(descriptor, "wb", closefd=False) as file:
                file.write(output)
    _program["run_program"](rank["mode"], rank["target"], rank["args"], send_failure)


if __name__ == "__main__":
    main()
