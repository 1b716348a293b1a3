# SPDX-License-Identifier: BSD-3-Clause
"""The modules that a program imports in its first statements: the zygote imports them once for all ranks.

The ranks have an environment of their own, in which the only packages that are installed are the test's.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.local.live import Live
from tests.ports import free_port

OPTIONS = ("--grace", "5", "--preload", "auto")

HEAD = "import os, sys\nis_ahead = 'argv' not in vars(sys)\n"
"""Stands before the text of each module: while it is imported ahead, there are no arguments."""

AHEAD = """
import os
ahead = lambda *modules: [module.__name__ for module in modules if module.is_ahead]
"""

IMPORTS = f"""
import pack.part
import other
{AHEAD}
print("ahead:", *ahead(pack, pack.part, other), flush=True)
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """The interpreter of a new virtual environment, with the packages ``pack`` and ``other``."""
    venv.create(tmp_path / "venv", symlinks=True)
    install(tmp_path, "pack/__init__.py", "")
    install(tmp_path, "pack/part.py", "")
    install(tmp_path, "other.py", "")
    return str(tmp_path / "venv" / "bin" / "python")


def install(tmp_path: Path, name: str, text: str) -> None:
    [place] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text(HEAD + text)


@pytest.fixture
def live(folder: Path, python: str) -> Iterator[Live]:
    # With the ranks' interpreter, which has no torch: or each test would begin with the import of torch by another one.
    allocation = Live(folder, [python, "-m", "torch.distributed.run", "nosuch.py"], options=OPTIONS)
    yield allocation.ready()
    allocation.kill()


@pytest.fixture
def run(output: Callable[..., list[str]]) -> Callable[..., set[str]]:
    """Runs a program on two ranks; the set of the lines that they print."""
    return lambda *args, **more: set(output(*args, **more))


@pytest.fixture
def output(live: Live, python: str, tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a program on two ranks; the lines that they print."""

    def run(text: str, name: str = "prog.py", **more: object) -> list[str]:
        (tmp_path / name).write_text(text)
        words = [python, "-m", "torch.distributed.run", "--tee", "3", "--nproc-per-node", "2", str(tmp_path / name)]
        result = live.run(*words, **more)
        assert result.exit_code == 0, (result, live.err())
        lines = [line for rank in result.ranks for line in live.job.logs(rank, run=result.run)]
        return [re.sub(r"^\[default\d\]:", "", line) for line in lines]

    return run


def test_ranks_share_what_their_program_imports_first(run: Callable[..., set[str]]) -> None:
    everything = {"ahead: pack pack.part other"}
    assert run(IMPORTS) == everything
    assert run(IMPORTS.replace("ahead:", "again:")) == {"again: pack pack.part other"}  # an edit of the rest
    assert run(IMPORTS, env={"MINE": "1"}) == everything
    hidden = "import sys\nprint(any(name in sys.modules for name in ('pack', 'other')), flush=True)"
    assert run(hidden, "another.py") == {"False"}


def test_what_a_module_does_when_it_is_imported_is_done_for_each_rank(
    output: Callable[..., list[str]], tmp_path: Path
) -> None:
    install(
        tmp_path,
        "other.py",
        "import random, sys\nown = random.Random()\nos.environ['MINE'] = 'changed'\nprint('out')\n"
        "print('err', file=sys.stderr)",
    )
    text = "print(os.environ['MINE'], ahead(other), flush=True)\nprint('drawn', other.own.random(), flush=True)"
    lines = output(f"import other\n{AHEAD}\n{text}", env={"MINE": "mine"})
    drawn = {line for line in lines if line.startswith("drawn")}
    assert len(drawn) == 2
    assert sorted(set(lines) - drawn) == ["changed ['other']", "err", "out"] and len(lines) == 8


def test_a_module_finds_the_variables_that_the_program_sets(run: Callable[..., set[str]], tmp_path: Path) -> None:
    install(tmp_path, "other.py", "home, default = os.environ['MY_HOME'], os.environ['DEFAULT']")
    text = f"""
import os
os.environ["MY_HOME"] = "/a"
os.environ.setdefault("DEFAULT", "b")
import other
{AHEAD}
print(other.home, other.default, *ahead(other), flush=True)
"""
    assert run(text) == {"/a b other"}
    assert run(text, env={"DEFAULT": "c", "MY_HOME": "d"}) == {"/a c other"}


def test_an_import_turns_the_garbage_collector_off_in_each_rank(run: Callable[..., set[str]], tmp_path: Path) -> None:
    install(tmp_path, "other.py", "import gc\nwas = gc.isenabled()\ngc.disable()")
    install(tmp_path, "pack/part.py", "import gc\nwas = gc.isenabled()\ngc.enable()")
    text = f"import gc, other\n{AHEAD}\nprint(other.was, gc.isenabled(), *ahead(other), flush=True)"
    assert run(text) == {"True False other"}
    text = f"import gc, other, pack.part\n{AHEAD}\nprint(pack.part.was, gc.isenabled(), *ahead(pack.part), flush=True)"
    assert run(text) == {"False True pack.part"}


def test_rank_zero_of_known_modules_is_each_rank_s_own(run: Callable[..., set[str]], tmp_path: Path) -> None:
    install(tmp_path, "torchmetrics/__init__.py", "")
    for name in ("__init__.py", "prints.py"):
        install(tmp_path, f"torchmetrics/utilities/{name}", "")
    prints = "def rank_zero_only(): pass\nrank_zero_only.rank = int(os.environ.get('LOCAL_RANK', 0))"
    install(tmp_path, "torchmetrics/utilities/prints.py", prints)
    text = f"from torchmetrics.utilities import prints\n{AHEAD}\nprint(prints.rank_zero_only.rank, len(ahead(prints)))"
    assert run(text) == {"0 1", "1 1"}


def test_code_that_searches_the_variables_for_its_own_is_imported_ahead(
    run: Callable[..., set[str]], tmp_path: Path
) -> None:
    """Among them are variables that the host has for itself."""
    search = (
        "for name, value in dict(os.environ).items():\n    if name.startswith('MINE_'):\n        found.append(value)"
    )
    install(tmp_path, "other.py", f"found = []\n{search}")
    text = f"import other\n{AHEAD}\nprint(other.found, *ahead(other), flush=True)"
    assert run(text, env={"MINE_A": "a"}) == {"['a'] other"}


def test_packages_of_another_environment_are_imported_ahead(run: Callable[..., set[str]], tmp_path: Path) -> None:
    """One to which a file in this environment leads, and one in PYTHONPATH."""
    [place] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for name in ("linked", "path"):
        (tmp_path / name / f"{name}-1.0.dist-info").mkdir(parents=True)
        (tmp_path / name / f"in_{name}.py").write_text(HEAD)
    (place / "linked.pth").write_text(f"{tmp_path / 'linked'}\n")
    text = f"import in_linked\nimport in_path\n{AHEAD}\nprint(*ahead(in_linked, in_path), flush=True)"
    assert run(text, env={"PYTHONPATH": str(tmp_path / "path")}) == {"in_linked in_path"}


def test_this_package_may_lie_anywhere(run: Callable[..., set[str]], tmp_path: Path) -> None:
    """As in an editable install."""
    [place] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (place / "editable.pth").write_text(str(Path(__file__).parents[2]))
    assert run(f"import torchx_monarch\n{IMPORTS}") == {"ahead: pack pack.part other"}


def test_modules_of_the_user_are_never_imported_ahead(run: Callable[..., set[str]], tmp_path: Path) -> None:
    """In a tree that an installed file leads to, in one that is linked, in PYTHONPATH, and beside the program."""
    [place] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for name in ("tree", "linked", "path"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"in_{name}.py").write_text(f"{HEAD}print('imported', flush=True)")
    (tmp_path / "own.py").write_text(HEAD)
    (place / "tree.pth").write_text(f"{tmp_path / 'tree'}\n")
    (place / "linked").symlink_to(tmp_path / "linked")
    install(tmp_path, "uses.py", "import in_tree")
    for name in ("in_tree", "in_path", "linked.in_linked", "own", "uses"):
        text = f"import pack\nimport {name} as mine\nimport other\n{AHEAD}\nprint(ahead(pack, mine, other), flush=True)"
        lines = run(text, env={"PYTHONPATH": str(tmp_path / "path")})
        assert lines - {"imported"} == {"['pack']"}, name


def test_an_attempt_to_import_is_made_once_for_all(run: Callable[..., set[str]], tmp_path: Path) -> None:
    text = """
import pack
try:
    import nosuch, other
except ImportError:
    nosuch = None
try:
    from other import name
except (ImportError, AttributeError):
    import other as nosuch
"""
    text += f"import pack.part\n{AHEAD}\nprint(*ahead(pack, pack.part, nosuch), flush=True)"
    assert run(text) == {"pack pack.part other"}
    install(tmp_path, "other.py", "import pack.part\nraise ImportError('half way')")  # has had an effect
    text = text.replace("import other as nosuch", "nosuch = pack")
    assert run(text) == {"pack pack"}


def test_modules_of_torch_are_imported_ahead_of_what_ranks_execute(
    run: Callable[..., set[str]], tmp_path: Path
) -> None:
    install(tmp_path, "torch/__init__.py", "__version__ = '2'\nclass version:\n    cuda = None")
    install(tmp_path, "torch/distributed/__init__.py", "class TCPStore:\n    def __init__(*args, **options): pass")
    install(tmp_path, "torch/distributed/fsdp.py", "")
    install(tmp_path, "other.py", "rank = os.environ.get('RANK')")
    (tmp_path / "mine.py").write_text("import sys\nfound = list(sys.modules)\nfrom torch.distributed import fsdp")
    for first in ("other", "pack"):  # one that ranks cannot share
        text = f"import {first}\nimport mine\nimport pack\n{AHEAD}"
        shown = "print('torch.distributed.fsdp' in mine.found, *ahead(mine.fsdp, pack), flush=True)"
        expected = "torch.distributed.fsdp" if first == "other" else "torch.distributed.fsdp pack"
        assert run(f"{text}\n{shown}") == {f"False {expected}"}


def test_what_wrapped_models_import_is_imported_ahead(live: Live, tmp_path: Path) -> None:
    text = """
import sys
import torch
executed = []
sys.addaudithook(lambda event, args: executed.append(args[0]) if event == "exec" else None)
import torch._dynamo
print(len(executed), flush=True)
"""
    (tmp_path / "prog.py").write_text(text)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "prog.py")]
    result = live.run(*words)
    assert [list(live.job.logs(rank, run=result.run)) for rank in result.ranks] == [["0"], ["0"]]


def test_what_an_import_gives_the_program_is_not_what_a_later_one_has_replaced(
    run: Callable[..., set[str]], tmp_path: Path
) -> None:
    install(tmp_path, "pack/part.py", "def f():\n    return 'own'")
    install(tmp_path, "other.py", "import pack.part\npack.part.f = lambda: 'replaced'")
    text = f"""
from pack.part import f
import other
import pack.part
{AHEAD}
print(f(), pack.part.f(), *ahead(pack.part, other), flush=True)
"""
    assert run(text) == {"own replaced pack.part"}
    assert run(text.replace("from pack.part import f\n", "import pack.part\nf = str\n")) == {
        " replaced pack.part other"
    }


KEEPS = """
import datetime, secrets, threading, time, uuid
from time import time as now
identifier, text, dated = uuid.uuid4(), str(uuid.uuid4()), uuid.uuid1().hex
data, token, url, number = os.urandom(16), secrets.token_hex(8), secrets.token_urlsafe(), secrets.randbits(128)
pid, began, nanoseconds, ticks = os.getpid(), now(), time.time_ns(), time.perf_counter()
late = time.time()
thread, processor, clock = threading.get_native_id(), time.process_time(), time.clock_gettime_ns(time.CLOCK_MONOTONIC)
entropy = os.getrandom(16)
day, utc = datetime.datetime.now(), datetime.datetime.now(datetime.timezone.utc)
class Timer:
    clock = time.perf_counter
class Lazy:
    def __getattr__(self, name):
        os._exit(3)
lazy = Lazy()
padding = [bytes(100) for _ in range(time.time_ns() % 97)]
kinds = [type(f"Kind{number}", (), {}) for number in range(50)]
table, order = {id(kind): kind.__name__ for kind in kinds}, [kind.__name__ for kind in set(kinds)]
del padding
"""
"""A module that keeps values of its process; what else it holds differs between processes by addresses alone."""

NAMES = (
    "identifier",
    "text",
    "dated",
    "data",
    "token",
    "url",
    "number",
    "pid",
    "began",
    "nanoseconds",
    "ticks",
    "day",
    "utc",
    "thread",
    "processor",
    "clock",
    "entropy",
)


def test_values_of_its_process_that_a_module_keeps_are_those_of_each_rank(
    output: Callable[..., list[str]], tmp_path: Path
) -> None:
    install(tmp_path, "pack/part.py", KEEPS)
    install(tmp_path, "other.py", "import pack.part\nfrom pack.part import identifier, text\npack.part.late = None")
    text = f"""
import pack.part as part
import other
{AHEAD}
import json, time, uuid
same = [other.identifier, other.text, part.pid, part.now] == [part.identifier, part.text, os.getpid(), time.time]
same &= part.late is part.__doc__ is None and part.Timer().clock() > part.ticks
values = {{name: str(value) for name, value in vars(part).items() if name in {sorted(NAMES)!r}}}
values["sequence"] = uuid.uuid1().clock_seq
print(json.dumps([len(ahead(other, part)), same, values]), flush=True)
"""
    processes = [json.loads(line) for _ in range(2) for line in output(text)]
    assert [process[:2] for process in processes] == [[2, True]] * 4
    count = {name: len({process[2][name] for process in processes}) for name in (*NAMES, "sequence")}
    at_once = {"began", "day", "utc", "sequence"}  # two processes may read the time at once, or draw the same number
    assert all(count.pop(name) > 2 for name in at_once)
    assert count == dict.fromkeys(count, 4)


READS = {
    "a file": "with open('settings') as file:\n    value = file.read()",
    "a file that is not there": "value = str(os.path.exists('more'))",
    "a file of pathlib's that is not there": "import pathlib\nvalue = str(pathlib.Path('more').is_file())",
    "a folder": "value = '+'.join(sorted(os.listdir('plugins')))",
    "a search in a folder": "import glob\nvalue = str(len(glob.glob('plugins/*.py')))",
}


def test_what_an_import_has_read_of_files_is_read_again_once_it_changes(
    run: Callable[..., set[str]], tmp_path: Path
) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "settings").write_text("old")
    for number, what in enumerate(READS):
        install(tmp_path, f"reads{number}.py", READS[what])
    names = [f"reads{number}" for number in range(len(READS))]
    imports = "".join(f"import {name}\n" for name in names)
    text = (
        f"{imports}{AHEAD}\nprint(*[module.value for module in ({', '.join(names)})], len(ahead({', '.join(names)})))"
    )
    assert run(text, cwd=str(tmp_path)) == {"old False False  0 5"}
    (tmp_path / "output").touch()  # what a run leaves behind changes no import
    assert run(text, cwd=str(tmp_path)) == {"old False False  0 5"}
    (tmp_path / "settings").write_text("new")
    (tmp_path / "more").touch()
    (tmp_path / "plugins" / "a.py").touch()
    assert run(text, cwd=str(tmp_path)) == {"new True True a.py 1 5"}


def test_a_restart_reads_an_edited_program_and_configuration_again(folder: Path, python: str, tmp_path: Path) -> None:
    install(tmp_path, "other.py", f"with open({str(tmp_path / 'settings')!r}) as file:\n    value = file.read()")
    (tmp_path / "settings").write_text("old")
    program, first = tmp_path / "prog.py", 'import os\nos.environ["MODE"] = "a"\n'
    program.write_text(f"""{first}import other
{AHEAD}
print(other.value, os.environ.get("MODE"), *ahead(other), flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    import pathlib, sys
    program = pathlib.Path(sys.argv[0])
    program.write_text(program.read_text().removeprefix({first!r}))
    program.with_name("settings").write_text("new")
    sys.exit(1)
""")
    command = [python, "-m", "torch.distributed.run", "--tee", "3", "--nproc-per-node", "1", "--max-restarts", "1"]
    hosts = Hosts(folder, [*command, str(program)], options=OPTIONS).start()
    assert hosts.wait() == [0], hosts.err()
    assert hosts.out().splitlines() == ["[default0]:old a other", "[default0]:new None other"]


CHANGES = {
    "a module beside the program": ("helper.py", "version = 22"),
    "an edit of the same length": ("venv/lib/{python}/site-packages/helper.py", f"{HEAD}version = 3"),
    "another package": ("venv/lib/{python}/site-packages/optional.py", "version = 4"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_is_imported_again(run: Callable[..., set[str]], tmp_path: Path, change: str) -> None:
    install(tmp_path, "helper.py", "version = 1")
    install(
        tmp_path,
        "other.py",
        "try:\n    from optional import version\nexcept ImportError:\n    from helper import version",
    )
    text = f"import other\n{AHEAD}\nprint(other.version, *ahead(other), flush=True)"
    assert run(text) == {"1 other"}
    [place] = (tmp_path / "venv" / "lib").glob("python*")
    name, content = CHANGES[change]
    changed = tmp_path / name.format(python=place.name)
    changed.write_text(content)
    if "site-packages" in name:
        # Python compares mtime in whole seconds, and the first run can take less.
        os.utime(changed, (time.time() + 2,) * 2)
    assert {line.split()[0] for line in run(text)} == {content.rpartition(" ")[2]}


UNSAFE = {
    "a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "a variable of ranks": "rank = os.environ.get('LOCAL_RANK')",
    "a variable of jobs": "job = os.environ.get('TORCHX_JOB_ID')",
    "all variables": "found = [name for name in os.environ if not name.startswith('MINE_')]",
    "a variable of ranks, caught": "try:\n    os.environ['RANK']\nexcept BaseException:\n    pass",
    "arguments": "import sys\nfirst = sys.argv[0]",
    "a signal": "import signal\nsignal.signal(signal.SIGUSR1, print)",
    "a temporary folder": "import tempfile\nfolder = tempfile.TemporaryDirectory()",
    "the working folder": "os.chdir('/')",
    "a seed": "import random\nrandom.seed(7)",
    "a child": "import atexit, subprocess\nchild = subprocess.Popen(['sleep', '60'])\natexit.register(child.kill)",
    "a fork": (
        "own = os.getpid()\nif not os.fork():\n    import time\n    while os.getppid() == own:\n"
        "        time.sleep(0.1)\n    os._exit(0)"
    ),
    "a token in a class": "import uuid\nclass Session:\n    token = uuid.uuid4().hex",
    "a token that is a key": "import uuid\nkey = uuid.uuid4().hex\nnames = {key: 1}",
    "a token that is a default": "import secrets\ndef connect(token=secrets.token_hex()):\n    pass",
    "a token in a closure": "import uuid\ndef make(own):\n    return lambda: own\nidentify = make(uuid.uuid4())",
    "a token that is cached": (
        "import functools, uuid\n@functools.lru_cache\ndef identify():\n    return str(uuid.uuid4())\nidentify()"
    ),
    "a process id in a slot": "class Owner:\n    __slots__ = ('pid',)\nowner = Owner()\nowner.pid = os.getpid()",
    "a process id in a text": "name = f'lock-{os.getpid()}'",
    "a process id in a list": "owners = [os.getpid()]",
    "a token in a variable": "import uuid\nos.environ['MINE'] = str(uuid.uuid4())",
    "a time in a class": "import time\nclass Timer:\n    began = time.monotonic()",
    "the date": "import time\nname = time.strftime('run-%Y%m%d-%H%M')",
    "random letters": "import secrets\nname = ''.join(secrets.choice('abcdefgh') for _ in range(8))",
    "a random number": "import random\nnumber = random.randint(0, 1 << 60)",
    "a file of the process": "with open('/proc/self/stat') as file:\n    pass",
    "bytes of a variable of ranks": "rank = os.environb.get(b'RANK')",
    "a timer": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 1000)",
    "an alarm": "import signal\nsignal.alarm(1000)",
    "an end of its own": "from multiprocessing.util import Finalize\nFinalize(None, dict, exitpriority=1)",
    "a device": "with open('/dev/urandom', 'rb') as file:\n    file.read(8)",
    "a log": "with open(__file__ + '.log', 'a') as file:\n    file.write('imported')",
    "a connection": "import socket\nsocket.socket().connect_ex(('127.0.0.1', 9))",
    "a child that has ended": "import subprocess\nsubprocess.run(['true'])",
    "a token in a text": "import uuid\nname = f'{os.getpid()}-{uuid.uuid4()}'",
    "a part of a token": "import uuid\nname = str(uuid.uuid4())[:8]",
    "a digest of a process id": "import hashlib\nname = hashlib.md5(str(os.getpid()).encode()).hexdigest()",
    "a time in a text": "import time\nname = f'run-{int(time.time())}'",
    "a time of datetime's": "import datetime\nclass Run:\n    name = datetime.datetime.now().strftime('%b%d_%H-%M-%S')",
    "a time in the future": "import time\nuntil = time.time() + 3600",
    "a generator with a seed": "import random, time\nchoice = random.Random(time.time_ns())",
    "a token in a queue": "import collections, uuid\nnames = collections.deque([uuid.uuid4()])",
    "a session": "session = os.getsid(0)",
    "a process group in a text": "name = f'group-{os.getpgrp()}'",
    "arguments that may be missing": "import sys\nhas_arguments = hasattr(sys, 'argv')",
    "a free port": "import socket\nwith socket.socket() as own:\n    own.bind(('', 0))\n    name = own.getsockname()",
    "an exit": "import sys\n'argv' in vars(sys) or sys.exit(3)",
    "an error": "import sys\nassert 'argv' in vars(sys), 'no'",
}

SIMILAR = {
    "a variable of ranks, caught",
    "a variable of jobs",
    "a token in a text",
    "a token that is a default",
    "a token that is cached",
    "a process id in a text",
    "a process id in a list",
    "a part of a token",
    "a time in a class",
    "a time of datetime's",
    "a time in the future",
    "random letters",
    "a random number",
    "a timer",
    "bytes of a variable of ranks",
    "a child that has ended",
}
"""Those of them that are seen in the way of another one."""


@pytest.mark.parametrize("runs", [1, pytest.param(2, marks=pytest.mark.nightly("the second one is as the first"))])
def test_ranks_import_for_themselves_what_they_cannot_share(
    run: Callable[..., set[str]], tmp_path: Path, runs: int
) -> None:
    install(tmp_path, "last.py", "")
    for number, what in enumerate(what for what in UNSAFE if runs > 1 or what not in SIMILAR):
        install(tmp_path, f"unsafe{number}.py", UNSAFE[what])
        imports = f"import pack\nimport unsafe{number} as other\nimport last\n{AHEAD}"
        text = f"{imports}\nprint(ahead(pack, other, last), flush=True)"
        assert [run(text) for _ in range(runs)] == [{"['pack']"}] * runs, what


def test_what_a_rejected_import_has_taken_is_free_for_the_ranks(
    output: Callable[..., list[str]], live: Live, tmp_path: Path
) -> None:
    """The port is that of one rank: the other fails to bind it, unless it comes after the end of the first."""
    port = free_port()
    bind = f"server = socket.create_server(('127.0.0.1', {port}))\n    bound = True\nexcept OSError:\n    bound = False"
    install(tmp_path, "other.py", f"import socket\ntry:\n    {bind}")
    text = f"import pack\nimport other\n{AHEAD}\nprint(ahead(pack, other), other.bound, flush=True)"
    for _ in range(2):
        assert "['pack'] True" in output(text)
    unshared, _ = [event["unshared"] for event in live.events() if event["kind"] == "ranks"]
    assert unshared.startswith("prog.py:2 import other: other:5 keeps socket:[")


def test_the_reason_names_the_arguments(output: Callable[..., list[str]], live: Live, tmp_path: Path) -> None:
    install(tmp_path, "other.py", "import sys\nfirst = sys.argv[0]")
    output("import other")
    assert [event["unshared"] for event in live.events() if event["kind"] == "ranks"] == [
        "prog.py:1 import other: other:4 reads sys.argv"
    ]


def test_ranks_with_interpreters_of_their_own_execute_all_imports(folder: Path, python: str, tmp_path: Path) -> None:
    """A module of ``preload`` that runs a thread forbids forks."""
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    install(tmp_path, "threaded.py", thread)
    (tmp_path / "prog.py").write_text(f"import pack\n{AHEAD}\nassert not ahead(pack)\nassert os.environ['RANK'] == '0'")
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "1", str(tmp_path / "prog.py")]
    hosts = Hosts(folder, command, options=("--grace", "5", "--preload", "auto,threaded")).start()
    assert hosts.wait() == [0], hosts.err()


def test_an_import_that_ends_its_process_is_left_to_the_ranks(
    run: Callable[..., set[str]], live: Live, tmp_path: Path
) -> None:
    install(tmp_path, "other.py", "import sys\n'argv' in vars(sys) or os._exit(3)")
    text = f"import pack\nimport other\n{AHEAD}\nprint(ahead(pack, other), flush=True)"
    assert run(text) == {"[]"}
    assert "exited with code 3 while it executed the first imports of the program; the ranks execute them" in live.err()


def test_an_import_may_put_a_folder_before_that_of_the_program(run: Callable[..., set[str]], tmp_path: Path) -> None:
    """As ray does."""
    install(tmp_path, "other.py", "import sys\nsys.path.insert(0, '/first')\nsys.path.append('/last')")
    text = f"import other, sys\n{AHEAD}\nprint(*sys.path[:2], sys.path[-1], type(other).__name__, *ahead(other))"
    assert run(text) == {f"/first {tmp_path} /last module other"}


def test_modules_hold_the_main_module_of_the_program(run: Callable[..., set[str]], tmp_path: Path) -> None:
    """As dill does, which pickles functions and classes of the program by it."""
    install(tmp_path, "other.py", "import __main__ as main")
    text = f"import other, sys\n{AHEAD}\nprint(other.main is sys.modules['__main__'], vars(other.main) is globals(),"
    assert run(f"{text} 'pack' in globals(), *ahead(other))\nimport pack") == {"True True False other"}


def test_a_handler_that_a_c_library_sets_is_that_of_each_rank(run: Callable[..., set[str]], tmp_path: Path) -> None:
    """faulthandler sets it without signal.signal."""
    install(tmp_path, "other.py", "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR1)")
    text = f"import other\n{AHEAD}\nimport signal\nos.kill(os.getpid(), signal.SIGUSR1)\nprint('alive', *ahead(other))"
    assert "alive" in run(text)
