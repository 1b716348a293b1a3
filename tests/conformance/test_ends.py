# SPDX-License-Identifier: BSD-3-Clause
"""Every way in which a program can end: exit code, last words, error file."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from typing import Any

import pytest

from tests.conformance.differences import Difference, differs
from tests.conformance.launchers import LOGS, Launchers, Outcome

SUCCEEDS = {
    "falls off its end": "print('done')",
    "empty": "",
    "sys.exit()": "sys.exit()",
    "sys.exit(None)": "sys.exit(None)",
    "sys.exit(0)": "sys.exit(0)",
    "sys.exit(256)": "sys.exit(256)",
    "os._exit(0)": "print('lost?', flush=True); os._exit(0)",
    "SIGPIPE is ignored": "import signal; os.kill(os.getpid(), signal.SIGPIPE); print('here')",
    "order of exit": """
        import atexit, threading, weakref
        atexit.register(print, 'first registered')
        atexit.register(print, 'last registered')
        class Thing:
            def __del__(self): print('deleted')
        thing = Thing()
        threading.Thread(target=lambda: (time.sleep(0.2), print('thread ends'))).start()
        import time
        print('end of script')
    """,
    "atexit that fails": "import atexit; atexit.register(lambda: 1 / 0); print('end')",
    "exception in a thread": "import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
    "daemon thread": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "unraisable": "class T:\n    def __del__(self): raise ValueError('in del')\nt = T()\ndel t",
    "stdout closed": "print('before'); sys.stdout.close()",
    "descriptor 1 closed": "print('before'); os.close(1)",
    "stdout replaced": "import io; sys.stdout = io.StringIO(); print('unseen')",
    "warning": "import warnings; warnings.warn('watch out'); warnings.warn('old', DeprecationWarning)",
    "resource warning": "import warnings; warnings.simplefilter('always'); open(__file__)",
    "coroutine never awaited": "async def f(): pass\nf()",
    "pdb.post_mortem": "import pdb\ntry:\n    1 / 0\nexcept Exception:\n    pdb.post_mortem()",
    "traceback.print_exc": "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()",
    "logging": "import logging; logging.basicConfig(); logging.warning('w'); logging.getLogger('x').error('e')",
}
"""Programs whose exit code is 0: ranks of one job."""

FAILS = {
    "sys.exit(3)": "sys.exit(3)",
    "sys.exit(True)": "sys.exit(True)",
    "sys.exit(-1)": "sys.exit(-1)",
    "sys.exit(2**70)": "sys.exit(2**70)",
    "sys.exit of a text": "sys.exit('a message')",
    "sys.exit of an object": "sys.exit(['a', 1])",
    "SystemExit with a code of its own": "e = SystemExit(); e.code = 9; raise e",
    "a kind of SystemExit": "class Stop(SystemExit): pass\nraise Stop(4)",
    "exit() of site": "exit(6)",
    "os._exit(5)": "os._exit(5)",
    "os._exit(300)": "os._exit(300)",
    "ValueError": "def f():\n    raise ValueError('boom')\nf()",
    "exception without a text": "raise RuntimeError",
    "exception in two lines": "raise RuntimeError('first\\nsecond \\u00e9 \\udcff')",
    "exception with a cause": "try:\n    {}['x']\nexcept KeyError as e:\n    raise ValueError('why') from e",
    "exception in the handling of one": "try:\n    {}['x']\nexcept KeyError:\n    [][1]",
    "exception with notes": "e = ValueError('x')\nif hasattr(e, 'add_note'): e.add_note('a note')\nraise e",
    "exception that cannot be shown": "class E(Exception):\n    def __str__(self): raise TypeError('no')\nraise E()",
    "BaseException": "class E(BaseException): pass\nraise E('base')",
    "GeneratorExit": "raise GeneratorExit",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "AssertionError": "assert 1 == 2, 'unequal'",
    "MemoryError": "'x' * (1 << 62)",
    "failed import": "import nosuchmodule",
    "assertion in a lambda": "(lambda: 1 / 0)()",
    "SIGTERM": "import signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGINT": "import signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(1)",
    "SIGKILL": "import signal; os.kill(os.getpid(), signal.SIGKILL)",
    "SIGHUP": "import signal; os.kill(os.getpid(), signal.SIGHUP)",
    "SIGUSR1": "import signal; os.kill(os.getpid(), signal.SIGUSR1)",
    "a signal's own exit code": "sys.exit(143)",
    "os.execv": "os.execv('/bin/sh', ['sh', '-c', 'echo $RANK $WORLD_SIZE; exit 11'])",
    "atexit after an exception": "import atexit; atexit.register(print, 'at exit'); raise ValueError('x')",
    "atexit that exits": "import atexit; atexit.register(lambda: os._exit(8))",
    "thread goes on after an exception": """
        import threading, time
        def work():
            time.sleep(0.3)
            print('work done')
        threading.Thread(target=work).start()
        raise ValueError('main ends')
    """,
    "hook of its own": """
        def hook(kind, error, trace):
            import traceback
            print('hook', kind.__name__, error, len(traceback.extract_tb(trace)), sys.exc_info() == (None,) * 3)
        sys.excepthook = hook
        raise ValueError('x')
    """,
    "hook that looks at sys.last_value": """
        sys.excepthook = lambda *_: print(repr(sys.last_value), sys.last_traceback.tb_lineno)
        raise ValueError('x')
    """,
    "hook that fails": """
        def hook(*_): raise TypeError('in the hook')
        sys.excepthook = hook
        raise ValueError('x')
    """,
    "hook that exits": "sys.excepthook = lambda *_: sys.exit(12)\nraise ValueError('x')",
    "hook that leaves": "sys.excepthook = lambda *_: os._exit(13)\nraise ValueError('x')",
    "hook deleted": "del sys.excepthook\nraise ValueError('x')",
    "hook for KeyboardInterrupt": "sys.excepthook = lambda *a: print(a[0].__name__)\nraise KeyboardInterrupt",
    "descriptors 1 and 2 closed, then an exception": "os.close(1); os.close(2); raise ValueError('x')",
    "stderr is None": "sys.stderr = None; raise ValueError('x')",
    "flush fails": "sys.stdout = open('/dev/full', 'w'); print('x')",
    "warning as an error": "import warnings; warnings.simplefilter('error'); warnings.warn('x')",
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    1 / 0\nasyncio.run(f())",
    "exception group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)]) if sys.version_info > (3, 11) else 0",
    "breakpoint": "breakpoint()\nprint('after')",
    "input": "input('name? ')",
    "exec of code": "exec(compile('raise ValueError(3)', 'generated', 'exec'))",
    "main of a module": "import runpy; runpy.run_path('other.py', run_name='__main__')",
    "deleted while it runs": "os.unlink('prog.py'); raise ValueError('x')",
    "working folder deleted": "import shutil; os.mkdir('d'); os.chdir('d'); os.rmdir('../d'); raise ValueError('x')",
    "a __main__ of its own": "import types; sys.modules['__main__'] = types.ModuleType('x'); raise ValueError('x')",
    "a child's exit code": "import subprocess; sys.exit(subprocess.call(['sh', '-c', 'kill -9 $$']))",
}


@differs(Difference.EXIT_CODE)
def expected_code(theirs: Outcome) -> int:
    """What a shell says of a rank that ends as torchrun saw it end."""
    code = theirs.rank_code()
    assert theirs.code == (1 if code else 0)
    return code if code >= 0 else 128 - code


@differs(Difference.BREAKPOINT)
@pytest.mark.parametrize("name", FAILS)
def test_end(name: str, both: Launchers) -> None:
    theirs, ours = both.script(FAILS[name], *LOGS, nproc=1, files={"other.py": "print(__name__)\n1 / 0\n"}, preload="")
    if name == "breakpoint":
        assert (expected_code(theirs), ours.code, ours.log(0, "stdout.log")) == (1, 0, b"after\n")
        return
    assert ours.code == expected_code(theirs) > 0, ours.err.decode()
    if name == "sys.exit(2**70)" and (3, 12) <= sys.version_info < (3, 13, 5):
        return  # Python does not clear an error, and prints it according to whether `threading` has been imported
    for stream in ("stdout.log", "stderr.log"):
        assert _without_addresses(ours.log(0, stream)) == _without_addresses(theirs.log(0, stream))


def test_ends_that_succeed(both: Launchers) -> None:
    theirs, ours = both.each(list(SUCCEEDS.values()), *LOGS, preload="")
    assert theirs.code == ours.code == 0, ours.err.decode()
    for rank, name in enumerate(SUCCEEDS):
        for stream in ("stdout.log", "stderr.log"):
            assert _without_addresses(ours.log(rank, stream)) == _without_addresses(theirs.log(rank, stream)), name


GROUP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(4)
dist.all_reduce(ones)
"""
ENDS_OF_A_GROUP = {
    "": 5,
    "sys.exit()": 1,
    "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()": 1,
    "import ctypes; cpp = ctypes.CDLL('libstdc++.so.6'); cpp._ZNSt8ios_base15sync_with_stdioEb(False)\n"
    "cpp._ZNSo5writeEPKcl(ctypes.byref(ctypes.c_char.in_dll(cpp, '_ZSt4cout')), b'not flushed', ctypes.c_long(11))": 1,
}
"""How a rank ends, and how many of them do."""


def test_ends_with_a_group_that_is_not_destroyed(both: Launchers) -> None:
    """A process aborts if Python ends a thread of Gloo that waits for the GIL, as when the end follows too soon.

    So do ranks of torchrun, in one run of three with Python 3.12 and 3.13 on two busy processors.
    """
    bodies = [GROUP + end for end, number in ENDS_OF_A_GROUP.items() for _ in range(number)]
    theirs, ours = both.each(bodies, *LOGS)
    assert ours.code == 0, ours.err.decode()
    assert ours.log(7, "stdout.log") == b"not flushed"
    assert theirs.code == 1 or theirs.log(7, "stdout.log") == b"not flushed"


def _without_addresses(output: bytes | None) -> str:
    assert output is not None
    return re.sub(r"0x[0-9a-f]+", "ADDRESS", output.decode())


@differs(Difference.CALL_STACK)
def test_recursion_ends_a_few_frames_sooner(both: Launchers) -> None:
    body = """
        depth = 0
        def f():
            global depth
            depth += 1
            f()
        try:
            f()
        except RecursionError:
            report(depth)
    """
    theirs, ours = both.script(body, nproc=1, preload="")
    assert 0 < theirs.reports[0] - ours.reports[0] < 10


def _record(error: Any) -> Any:
    """A torchelastic error file without what is never twice the same."""
    message = json.loads(error)["message"]
    extra = message["extraInfo"]
    assert re.fullmatch(r"\d+", extra["timestamp"])
    trace = extra["py_callstack"].splitlines()
    return message["message"], trace[0], [line for line in trace if "prog.py" in line], trace[-1]


def test_error_file_of_record(both: Launchers) -> None:
    body = """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError("recorded")
        main()
    """
    theirs, ours = both.script(body, *LOGS, nproc=1)
    assert ours.code == expected_code(theirs) == 1
    assert _record(ours.log(0, "error.json")) == _record(theirs.log(0, "error.json"))
    assert (ours.error["message"], ours.error["extraInfo"]["py_callstack"]) != ("", "")
    assert "recorded" in theirs.error["message"]
    assert "recorded" in ours.error["message"]


@differs(Difference.UNRECORDED)
def test_error_file_without_record(both: Launchers) -> None:
    theirs, ours = both.script("raise ValueError('x')", *LOGS, nproc=1, preload="")
    assert theirs.log(0, "error.json") is None
    message, *_, last = _record(ours.log(0, "error.json"))
    assert message == last == "ValueError: x"


@differs(Difference.FAULTHANDLER)
def test_crash_shows_where(both: Launchers) -> None:
    theirs, ours = both.script("import ctypes; ctypes.string_at(0)", *LOGS, nproc=1, preload="")
    assert ours.code == expected_code(theirs) == 139
    assert theirs.log(0, "stderr.log") == b""
    assert b"Fatal Python error: Segmentation fault" in (ours.log(0, "stderr.log") or b"")


def test_script_that_uses_faulthandler(both: Launchers) -> None:
    body = """
        import ctypes, faulthandler, signal
        log = open(f"crash", "w")
        faulthandler.enable(log, all_threads=False)
        faulthandler.register(signal.SIGUSR1, log)
        signal.raise_signal(signal.SIGUSR1)
        faulthandler.dump_traceback_later(0.1, file=log)
        import time
        time.sleep(2)  # a busy machine lets the thread that writes wait
        ctypes.string_at(0)
    """
    theirs, ours = both.script(body, *LOGS, nproc=1, preload="")
    assert ours.code == expected_code(theirs) == 139
    assert ours.log(0, "stderr.log") == theirs.log(0, "stderr.log") == b""

    def crash(outcome: Outcome) -> list[str]:
        return [line for line in outcome.files["crash"].decode().splitlines() if "prog.py" in line or "Fatal" in line]

    assert crash(ours) == crash(theirs) != []


HOPELESS = {
    "EX_CONFIG": "sys.exit(78)",
    "cannot begin": "def f(:",
    "no group": "import torch.distributed as dist; dist.init_process_group('gloo', init_method='none://')",
}


@differs(Difference.RESTARTS)
@pytest.mark.parametrize(("case", "attempts"), [("EX_CONFIG", 1), ("cannot begin", 1), ("no group", 2)])
def test_attempts_after_a_failure_without_hope(case: str, attempts: int, both: Launchers) -> None:
    preload = "torch" if case == "no group" else ""
    theirs, ours = both.script(HOPELESS[case], *LOGS, "--max-restarts", "2", nproc=1, preload=preload)
    assert ours.code == theirs.rank_code()
    made = [{path.split("/")[2] for path in outcome.files if path.startswith("logs/")} for outcome in (theirs, ours)]
    assert made == [{f"attempt_{number}" for number in range(count)} for count in (3, attempts)]


TIMER = """
import signal, time
import torch.distributed.elastic.timer as timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=30):
    mark("kept")
with timer.expires(after=0.2):
    time.sleep(30)
"""


@differs(Difference.TIMERS)
def test_timer_that_expires(both: Launchers) -> None:
    # torchrun leaves its pipe there, and our sockets have short paths.
    environ = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TMPDIR": tempfile.gettempdir()}
    theirs, ours = both.script(TIMER, nproc=1, environ=environ)
    assert theirs.marks() == ours.marks() == ["0 kept"], ours.err
    assert (theirs.code, ours.code) == (-9, 137)
    assert b"(SIGKILL): its timer '" in ours.err.splitlines()[-1]
