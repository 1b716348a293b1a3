# SPDX-License-Identifier: BSD-3-Clause
"""What a script finds in its interpreter and its process, expression by expression."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.differences import Difference, differs
from tests.conformance.launchers import Launchers

EXPRESSIONS = {
    "argv": "sys.argv",
    "original argv": "sys.orig_argv",
    "working folder": "os.getcwd()",
    "path": "sys.path",
    "interpreter": "[sys.executable, sys.prefix, sys.base_prefix, sys.version]",
    "flags": "repr(sys.flags)",
    "warn options": "[sys.warnoptions, sys._xoptions]",
    "meta path": "[getattr(one, '__name__', type(one).__name__) for one in sys.meta_path]",
    "path hooks": "[getattr(one, '__name__', '') for one in sys.path_hooks]",
    "names in __main__": "sorted(set(vars(module)) - {'EXPRESSIONS'})",
    "__main__": "{n: repr(getattr(module, n, 'absent')) for n in ('__name__', '__file__', '__package__', '__doc__',"
    " '__spec__', '__cached__', '__annotations__')}",
    "__main__ is the script": "[module.f is f, f.__module__, f.__globals__ is vars(module), f.__code__.co_filename]",
    "loader of __main__": "[type(module.__loader__).__name__, module.__loader__.name, module.__loader__.path]",
    "__mp_main__ is __main__": "sys.modules['__mp_main__'] is module",
    "builtins of __main__": "repr(module.__builtins__)",
    "source of a function": "inspect.getsource(f)",
    "module of a function": "inspect.getmodule(f) is module",
    "pickle of a function": "pickle.loads(pickle.dumps(f)) is f",
    "modules of ours": "[n for n in sys.modules if 'monarch' in n or 'rank_main' in n]",
    "modules": "sorted(n for n in sys.modules if not n.startswith('_'))",
    "call stack": "[os.path.basename(one.filename) for one in inspect.stack()][2:]",
    "threads": "[one.name for one in threading.enumerate()]",
    "main thread": "threading.current_thread() is threading.main_thread()",
    "handlers of signals": "{n: repr(signal.getsignal(n)) for n in range(1, 32) if n not in (9, 19)}",
    "signals ignored by the process": "status('SigIgn')",
    "signals blocked": "status('SigBlk') + sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "signals caught": "[n for n in range(1, 65) if int(status('SigCgt')[0], 16) >> (n - 1) & 1]",
    "wakeup descriptor": "signal.set_wakeup_fd(-1)",
    "timers": "[signal.getitimer(n) for n in (0, 1, 2)]",
    "exception hooks": "[sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__,"
    " threading.excepthook is threading.__excepthook__, sys.displayhook is sys.__displayhook__,"
    " sys.breakpointhook is sys.__breakpointhook__]",
    "trace and profile": "[sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()]",
    "current exception": "repr(sys.exc_info())",
    "garbage collection": "[gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)]",
    "frozen objects": "gc.get_freeze_count() > 1000",
    "faulthandler": "faulthandler.is_enabled()",
    "recursion": "[sys.getrecursionlimit(), sys.getswitchinterval()]",
    "encodings": "[(s.encoding, s.errors, s.newlines) for s in (sys.stdin, sys.stdout, sys.stderr)]"
    " + [sys.getdefaultencoding(), sys.getfilesystemencoding(), locale.getpreferredencoding()]",
    "locale": "[locale.setlocale(n) for n in range(6)]",
    "buffering": "[(s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)]",
    "streams": "[sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.stdin is sys.__stdin__,"
    " [(s.name, s.mode, s.fileno(), s.isatty()) for s in (sys.stdin, sys.stdout, sys.stderr)]]",
    "stdin": "sys.stdin.read()",
    "descriptors": "sorted(int(n) for n in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + n))",
    "descriptors for children": "subprocess.check_output(['ls', '/proc/self/fd'], close_fds=False, text=True)",
    "kinds of streams": "[stat.S_IFMT(os.fstat(n).st_mode) for n in (0, 1, 2)]",
    "flags of streams": "[fcntl.fcntl(n, fcntl.F_GETFL) & (os.O_APPEND | os.O_NONBLOCK) for n in (0, 1, 2)]",
    "session and group": "[os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()]",
    "terminal": "open('/dev/tty')",
    "umask": "os.umask(0o22)",
    "limits": "{n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith('RLIMIT')}",
    "priority": "[os.getpriority(0, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))]",
    "no new privileges": "status('NoNewPrivs') + status('Seccomp')",
    "dies with its parent": "pdeathsig()",
    "out of memory score": "open('/proc/self/oom_score_adj').read()",
    "command line": "open('/proc/self/cmdline').read().split(chr(0))",
    "environment of the process": "dict(line.partition('=')[::2] for line in"
    " open('/proc/self/environ').read().split(chr(0)) if line) == dict(os.environ)",
    "name of the process": "open('/proc/self/comm').read()",
    "children": "open('/proc/thread-self/children').read()",
    "warnings": "[repr(one) for one in warnings.filters]",
    "logging": "[logging.root.level, repr(logging.root.handlers), repr(logging.lastResort)]",
    "start method": "multiprocessing.get_start_method(allow_none=True)",
    "start methods": "multiprocessing.get_all_start_methods()",
    "event loop": "repr(asyncio.get_event_loop_policy())[:60]",
    "exit functions": "atexit._ncallbacks()",
    "hash seed": "hash('a') if sys.flags.hash_randomization == 0 else 'random'",
    "random numbers": "random.random() != random.random()",
    "byte code is written": "[sys.dont_write_bytecode, sys.pycache_prefix]",
    "temporary folder": "tempfile.gettempdir()",
    "audit and tracing": "[tracemalloc.is_tracing(), sys.get_coroutine_origin_tracking_depth()]",
    "integer digits": "sys.get_int_max_str_digits()",
    "breakpoint": "breakpoint()",
    "input": "input()",
}

DIFFERENT = {
    "call stack": Difference.CALL_STACK,
    "signals caught": Difference.FAULTHANDLER,
    "faulthandler": Difference.FAULTHANDLER,
    "descriptors": Difference.STACKS,
    "kinds of streams": Difference.STREAMS,
    "dies with its parent": Difference.DEATH_WITH_HOST,
    "breakpoint": Difference.BREAKPOINT,
    "meta path": Difference.BREAKPOINT,
}
"""What a script finds otherwise than under torchrun."""

PRELOADED = {
    "modules",
    "warnings",
    "exit functions",
    "frozen objects",
}
"""What is besides otherwise when torch has been imported ahead."""

SCRIPT = '''
import asyncio, atexit, ctypes, faulthandler, fcntl, gc, inspect, json, locale, logging, multiprocessing, os, pickle
import random, resource, signal, stat, subprocess, sys, tempfile, threading, tracemalloc, warnings
module = sys.modules["__main__"]

def f(x):
    """A function."""
    return x

def status(name):
    return [line.split()[1] for line in open("/proc/self/status") if line.startswith(name + ":")]

def pdeathsig():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))
    return number.value

def observe(expression):
    try:
        return json.loads(json.dumps(eval(expression)))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

if __name__ == "__main__":
    EXPRESSIONS = json.loads(os.environ["EXPRESSIONS"])
    seen = {name: observe(expression) for name, expression in EXPRESSIONS.items()}
    with open(os.path.join(os.environ["OBSERVED"], os.environ["RANK"]), "w") as file:
        json.dump(seen, file)
'''

Seen = list[dict[str, Any]]

_seen: dict[str, tuple[Seen, Seen]] = {}


@pytest.fixture
def seen(both: Launchers) -> Callable[[str], tuple[Seen, Seen]]:
    """What each rank sees under torchrun and here; observed once."""

    def observe(preload: str) -> tuple[Seen, Seen]:
        if preload not in _seen:
            args = ['--x=a b"c,$d', "", "é\n", "--nnodes", "7", "r${local_rank}"]
            theirs, ours = both(
                ["--nproc-per-node", "2", "sub dir/prog.py", *args],
                {"sub dir/prog.py": SCRIPT},
                environ={"EXPRESSIONS": json.dumps(EXPRESSIONS)},
                preload=preload,
                live=True,
            )
            assert theirs.code == ours.code == 0, theirs.err + ours.err
            _seen[preload] = list(theirs.reports.values()), list(ours.reports.values())
        return _seen[preload]

    return observe


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_interpreter(name: str, both: Launchers, seen: Callable[[str], tuple[Seen, Seen]]) -> None:
    different = DIFFERENT if both.ranks == "fresh" else {**DIFFERENT, "frozen objects": Difference.SHARED_BY_FORKS}
    for theirs, ours in zip(*seen(""), strict=True):
        if name in different:
            assert ours[name] != theirs[name]
        else:
            assert ours[name] == theirs[name]


@differs(Difference.PRELOAD)
def test_preload_changes_no_more_than_it_must(both: Launchers, seen: Callable[[str], tuple[Seen, Seen]]) -> None:
    for theirs, ours in zip(*seen("torch"), strict=True):
        different = {name for name in EXPRESSIONS if ours[name] != theirs[name]} - {*DIFFERENT}
        assert different == (PRELOADED if both.ranks == "fork" else set()), [
            (name, theirs[name], ours[name]) for name in different ^ PRELOADED
        ]
