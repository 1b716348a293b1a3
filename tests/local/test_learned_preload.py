# SPDX-License-Identifier: BSD-3-Clause
"""``-cfg preload=auto``: what the ranks of one run import, the zygote of the next run has imported ahead.

The ranks have an environment of their own, in which the only package that is installed is the test's.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torchx.specs import AppState, Role

from tests.local.detached import Detached
from tests.local.hosts import Hosts
from tests.local.live import Live
from tests.waits import until
from torchx_monarch.backends.core import state_files
from torchx_monarch.command.command import parse
from torchx_monarch.host.ranks.learned_preload import LearnedPreload
from torchx_monarch.host.ranks.rank_starter import RankStarter
from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.host.ranks.zygote import Zygotes
from torchx_monarch.model.learned_modules import LearnedModules, files_in

OPTIONS = ("--grace", "5", "--preload", "auto")

HEAD = "import os\npid = os.getpid()\n"
"""Stands before the text of each module: the process that has imported it."""

AHEAD = "ahead = lambda *modules: [each.__name__ for each in modules if each.pid != os.getpid()]"

IMPORTS = f"""
    {AHEAD}
    import own, pack.part, other
    print("ahead:", *ahead(pack, pack.part, other, own), flush=True)
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """The interpreter of a new virtual environment, with the packages ``pack`` and ``other``."""
    venv.create(tmp_path / "venv", symlinks=True)
    install(tmp_path, "pack/__init__.py", "")
    install(tmp_path, "pack/part.py", "")
    install(tmp_path, "other.py", "")
    return str(tmp_path / "venv" / "bin" / "python")


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(HEAD)


def install(tmp_path: Path, name: str, text: str) -> None:
    [place] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text(HEAD + text)


def torchrun(python: str, path: str, nproc: int = 2) -> list[str]:
    return [python, "-m", "torch.distributed.run", "--tee", "3", "--nproc-per-node", str(nproc), path]


@pytest.fixture
def live(folder: Path, python: str) -> Iterator[Live]:
    allocation = Live(folder, [], options=OPTIONS)
    yield allocation.ready()
    allocation.kill()


def printed(live: Live, *words: str, **more: object) -> set[str]:
    """What the ranks of a run have printed."""
    result = live.run(*words, **more)
    assert result.exit_code == 0, (result, live.err())
    lines = [line for rank in result.ranks for line in live.job.logs(rank, run=result.run)]
    return {re.sub(r"^\[default\d\]:", "", line) for line in lines}


def prepared(live: Live, times: int = 1) -> bool:
    return live.err().count("learned preload: imported ahead") >= times


def test_the_second_run_finds_what_the_first_has_imported(
    live: Live, python: str, script: Callable[[str], str]
) -> None:
    command = torchrun(python, script(IMPORTS))
    assert printed(live, *command) == {"ahead:"}
    until(lambda: prepared(live), "the import")
    assert "learned preload: imported ahead for the next run of the program: other, pack\n" in live.err()
    for _ in range(2):
        assert printed(live, *command) == {"ahead: pack pack.part other"}
    assert printed(live, *command, env={"MINE": "1"}) == {"ahead:"}  # which the modules may read
    assert live.end() == [0]


def test_what_another_program_has_imported_is_not_imported_for_this_one(
    live: Live, python: str, script: Callable[[str], str], tmp_path: Path
) -> None:
    printed(live, *torchrun(python, script(IMPORTS)))
    until(lambda: prepared(live), "the import")
    (tmp_path / "another.py").write_text("import os, pack\nprint(pack.pid == os.getpid())")
    assert printed(live, *torchrun(python, str(tmp_path / "another.py"))) == {"True"}


def test_modules_of_the_user_are_never_imported_ahead(
    live: Live, python: str, script: Callable[[str], str], tmp_path: Path
) -> None:
    """A tree in PYTHONPATH, one that an installed file leads to, and a package that imports the user's."""
    [place] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for name in ("tree", "linked", "path"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"in_{name}.py").write_text(HEAD)
    (place / "tree.pth").write_text(f"{tmp_path / 'tree'}\n")
    (place / "linked").symlink_to(tmp_path / "linked")
    install(tmp_path, "uses.py", "import in_tree")
    command = torchrun(
        python,
        script(f"""
            {AHEAD}
            import in_tree, in_path, linked.in_linked, pack, uses
            print(*ahead(in_tree, in_path, linked.in_linked, pack, uses), flush=True)
        """),
    )
    env = {"PYTHONPATH": str(tmp_path / "path")}
    assert printed(live, *command, env=env) == {""}
    until(lambda: prepared(live), "the import")
    assert f"uses is not imported ahead any more: it imports {tmp_path}/tree/in_tree.py, which is not" in live.err()
    assert printed(live, *command, env=env) == {"pack"}


def test_a_module_that_the_user_has_added_beside_the_program_is_the_user_s(
    live: Live, python: str, script: Callable[[str], str], tmp_path: Path
) -> None:
    command = torchrun(python, script("import other\nprint(other.__file__, flush=True)"))
    printed(live, *command)
    until(lambda: prepared(live), "the import")
    (tmp_path / "other.py").write_text("")
    assert printed(live, *command) == {str(tmp_path / "other.py")}


def test_a_package_that_is_installed_again_is_imported_again(
    live: Live, python: str, script: Callable[[str], str], tmp_path: Path
) -> None:
    install(tmp_path, "pack/__init__.py", "version = 1")
    command = torchrun(python, script("import pack\nprint(pack.pid != os.getpid())\nprint(pack.version, flush=True)"))
    assert printed(live, *command) == {"False", "1"}
    until(lambda: prepared(live), "the import")
    assert printed(live, *command) == {"True", "1"}
    install(tmp_path, "pack/__init__.py", "version = 22")
    install(tmp_path, "pack-22.dist-info/METADATA", "")
    assert printed(live, *command) == {"False", "22"}
    until(lambda: prepared(live, 2), "the import")
    assert printed(live, *command) == {"True", "22"}


def test_a_module_that_reads_what_the_program_sets_is_dropped(
    live: Live, python: str, script: Callable[[str], str], tmp_path: Path
) -> None:
    install(tmp_path, "pack/__init__.py", "os.environ.setdefault('DEFAULT', '1')")
    install(tmp_path, "other.py", "home = os.environ.get('MY_HOME')")
    path = script(f"""
        {AHEAD}
        os.environ["MY_HOME"] = "/a"
        import pack, other
        print(other.home, *ahead(pack, other), flush=True)
    """)
    assert printed(live, *torchrun(python, path)) == {"/a"}
    until(lambda: prepared(live), "the import")
    assert printed(live, *torchrun(python, path)) == {"/a pack"}
    assert "other is not imported ahead any more: it reads MY_HOME when it is imported, which the program" in live.err()


UNSAFE = {
    "a thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='mine', daemon=True).start()",
        "other runs a thread (mine)",
    ),
    "a variable of ranks": ("import os\nrank = os.environ.get('LOCAL_RANK')", "it reads LOCAL_RANK when it is"),
    "a signal": ("import signal\nsignal.signal(signal.SIGUSR1, print)", "it sets a signal handler"),
    "a crash": (
        "import os, signal, sys\n'zygote_main' in sys.argv[0] and os.kill(os.getpid(), signal.SIGSEGV)",
        "was killed by signal 11 (SIGSEGV)",
    ),
    "an exit": ("import sys\n'zygote_main' in sys.argv[0] and sys.exit(3)", "exited with code 3"),
    "an error": ("import sys\nassert 'zygote_main' not in sys.argv[0], 'no'", "AssertionError: no"),
}


@pytest.mark.parametrize("what", UNSAFE)
def test_a_module_that_ranks_cannot_share_is_dropped(
    live: Live, python: str, script: Callable[[str], str], tmp_path: Path, what: str
) -> None:
    install(tmp_path, "other.py", UNSAFE[what][0])
    command = torchrun(python, script(IMPORTS))
    printed(live, *command)
    until(lambda: prepared(live), "the import")
    for _ in range(2):
        assert printed(live, *command) == {"ahead: pack pack.part"}
    [line] = [line for line in live.err().splitlines() if "is not imported ahead any more" in line]
    assert "learned preload: other is not imported ahead any more: " in line and UNSAFE[what][1] in line


ENDS = {
    "sys.exit(3)": (3, ["pack"]),
    "raise ValueError('mine')": (1, ["pack"]),
    "os._exit(4)": (4, []),
    "os.kill(os.getpid(), signal.SIGKILL)": (137, []),
    "os.fork() or sys.exit(0)\nos.wait()\nimport other\nsys.exit(5)": (5, ["pack", "other"]),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_it_would_and_what_it_has_imported_is_kept_for_the_next_job(
    folder: Path, python: str, script: Callable[[str], str], tmp_path: Path, end: str
) -> None:
    command = torchrun(python, script(f"import pack, own\n{end}"), nproc=1)
    hosts = Hosts(folder, command, options=OPTIONS, environ={"MONARCH_LEARNED_DIR": str(tmp_path / "learned")}).start()
    code, names = ENDS[end]
    assert hosts.wait() == [code], hosts.err()
    files = [json.loads(path.read_text()) for path in (tmp_path / "learned").glob("*")]
    assert [file["names"] for file in files] == [names] * bool(names)


def test_a_job_on_this_machine_learns_for_the_next_of_its_name(
    apps: Detached, python: str, script: Callable[[str], str]
) -> None:
    path = script("import pack\nprint('ahead' if pack.pid != os.getpid() else 'not yet', flush=True)")
    for expected in ("not yet", "ahead", "ahead"):
        role = Role("trainer", image="", entrypoint=python, args=torchrun(python, path, nproc=1)[1:])
        app_id = apps.run(role, name="mine", preload="auto")
        assert apps.wait(app_id).state == AppState.SUCCEEDED
        assert expected in "".join(apps.log(app_id, "trainer"))
    [file] = files_in(os.path.join(state_files.state_dir(), "learned"))
    modules = LearnedModules.read(file)
    assert (modules.app, modules.role, modules.program) == ("mine", "trainer", f"script {path}")
    assert modules.names == ("pack",)


def test_a_module_whose_import_takes_too_long_is_dropped(
    python: str, script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "other.py", "import time\ntime.sleep(600)")
    monkeypatch.setattr("torchx_monarch.host.ranks.zygote._LEARNED_TIMEOUT", 1.0)
    said: list[str] = []

    async def prepare() -> tuple[str, ...]:
        command = parse(torchrun(python, script("")), {})
        assert command is not None
        learned = LearnedPreload(str(tmp_path / "imported"), said.append)
        learned.modules.learn(["pack", "other"])
        mask = os.umask(0o022)
        zygotes = Zygotes(said.append)
        os.umask(mask)
        starter = RankStarter(RunSpec(command, dict(os.environ), ("json",)), zygotes, said.append, learned=learned)
        starter.count = 1
        await starter.prepare_next()
        for zygote in list(zygotes._zygotes):
            zygotes.discard(zygote)
        return learned.modules.names

    assert asyncio.run(prepare()) == ("pack",)
    assert (
        "other is not imported ahead any more: the zygote" in said[0] and "has not answered 'import' for 1 s" in said[0]
    )
