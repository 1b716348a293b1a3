# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch debug``, typed into a terminal: pdb of a rank that waits in a breakpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.hosts import Hosts, torchrun
from tests.local.terminal import Terminal
from tests.ports import free_port
from tests.waits import WITHIN, until
from torchx_monarch.backends.core import stored_apps
from torchx_monarch.model import env_names
from torchx_monarch.transport import credentials

Script = Callable[[str], str]

pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")

STREAMS = "print('streams', sys.stdin is sys.__stdin__, sys.stdout.isatty(), os.isatty(0), os.isatty(1), flush=True)"


def command(hosts: Hosts, *words: str) -> list[str]:
    main = [sys.executable, "-m", "torchx.cli.main", "monarch", "debug"]
    where = hosts.environ.get("MONARCH_RENDEZVOUS", f"unix:{hosts.folder}/r.sock")
    return [*main, "monarch_slurm://torchx/app", "--address", where, *words]


def debugger(hosts: Hosts, *words: str) -> Terminal:
    return Terminal(command(hosts, *words), hosts.folder, {"TERM": "xterm"}, (30, 100))


@pytest.fixture
def ended(folder: Path) -> Iterator[list[Hosts]]:
    """Hosts that are killed at the end."""
    started: list[Hosts] = []
    yield started
    for hosts in started:
        for process in hosts.processes.values():
            process.kill()
            process.wait()


def test_a_rank_of_another_host_is_debugged_on_this_terminal(folder: Path, script: Script, ended: list[Hosts]) -> None:
    path = script(f"""
        import torch.distributed as dist
        dist.init_process_group("gloo")
        def double(number):
            answer = 2 * number
            return answer
        def runs():
            open({str(folder / "runs")!r}, "w").close()
            while not os.path.exists({str(folder / "go")!r}):
                time.sleep(0.01)
        if rank == 1:
            breakpoint()
            double(21)
            runs()
        while not os.path.exists({str(folder / "waits")!r}):
            time.sleep(0.01)
        dist.barrier()  # rank 0 waits here, and that is no hang
        {STREAMS}
    """)
    where = f"tls:127.0.0.1:{free_port()}"
    for_hosts, for_client = (created.to_text() for created in credentials.create())
    stored = stored_apps.StoredCredentials(for_client, {"trainer": where})
    stored_apps.credentials("monarch_slurm").store("app", stored)
    environ = {"MONARCH_RENDEZVOUS": where, env_names.CREDENTIALS: for_hosts}
    hosts = Hosts(folder, torchrun(path, nproc=1, nnodes=2), 2, ("--grace", "5", "--hang-after", "2"), environ).start()
    ended.append(hosts)
    until(lambda: "rank 1 waits at " in hosts.err(), "the breakpoint")
    (folder / "waits").touch()  # not before: a busy machine may keep rank 1 from it for longer than a hang takes
    assert "Debug it: torchx monarch debug app --role trainer --rank 1" in hosts.err()
    terminal = debugger(hosts)  # rank 1 is the only one that waits
    stops_at_call = sys.version_info >= (3, 13)
    first = "-> breakpoint()" if stops_at_call else "-> double(21)"
    until(lambda: terminal.shows(first) and terminal.shows("(Pdb) "), "pdb")

    def types(keys: str, shown: str, then: str = "(Pdb) ") -> None:
        """Type keys at a prompt, and wait for the next one: keys that are typed ahead are no keys of readline's."""
        terminal.forget()
        terminal.type(keys)
        wanted = lambda: terminal.shows(shown) and terminal.plain.endswith(then)  # noqa: E731
        until(wanted, lambda: f"{shown!r} after {keys!r}, at {terminal.plain!r}")

    if stops_at_call:
        types("n\r", "-> double(21)")
    types("s\r", "double()")
    types("n\r", "answer = 2")
    types("n\r", "return answer")
    types("p ans\t\r", "42")
    types("\x1b[A\r", "42")  # the last command again
    types("import os; os.get_terminal_size(0)\r", "columns=100, lines=30")
    types("w\r", "return answer")
    assert "rank_main" not in terminal.plain and "zygote" not in terminal.plain
    types("p 'a\x03", "--KeyboardInterrupt--")
    second = debugger(hosts, "--rank", "1")
    until(lambda: second.shows("rank 1 is being debugged by another client"), "the refusal of the second")
    assert second.wait() == 69
    listed = subprocess.run(command(hosts, "--json"), check=True, stdout=subprocess.PIPE, timeout=WITHIN)
    (found,) = json.loads(listed.stdout)["breakpoints"]
    assert (found["rank"], found["function"], found["attached"]) == (1, "<module>", True)
    types("c\r", "c", then="c\r\n")
    until((folder / "runs").exists, "the program, for which pdb has set its handler of Ctrl-C")
    types("\x03", "Program interrupted")
    (folder / "go").touch()
    types("detach\r", "rank 1 goes on: its debugger was detached", then="\n")
    assert terminal.wait() == 0
    assert hosts.wait() == [0, 0], hosts.err()
    assert "streams True False False False" in hosts.out(1)
    assert "rank 1 goes on: its debugger was detached" in hosts.err() and "hang" not in hosts.err()


def test_ranks_go_on_when_their_debuggers_are_gone(folder: Path, script: Script, ended: list[Hosts]) -> None:
    path = script(f"""
        if rank != 1:
            breakpoint()
        else:
            import pdb
            pdb.set_trace(header="hello")
        while rank == 2 and not os.path.exists({str(folder / "go")!r}):
            time.sleep(0.01)
        {STREAMS}
        breakpoint()
    """)
    options = ("--grace", "5", "--preload", "", "--ranks", "fresh")
    hosts = Hosts(folder, torchrun(path, nproc=3), options=options).start()
    ended.append(hosts)
    until(lambda: hosts.err().count("waits at ") == 3, "the breakpoints")
    terminals = [debugger(hosts, "--rank", str(rank)) for rank in range(3)]
    for terminal in terminals:
        until(lambda shown=terminal: shown.shows("(Pdb) "), "pdb")
        assert terminal.is_raw
    assert "hello" in terminals[1].plain
    terminals[0].type("import os; os._ex")  # what is typed by half is not executed
    terminals[0].kill()
    terminals[1].type("\x1d")
    until(lambda: not terminals[1].is_raw, "the terminal to be as before")
    assert terminals[1].wait() == 0
    terminals[2].type("c\r")
    until(lambda: terminals[2].shows("(Pdb) c\r\n"), "the program to go on")
    os.kill(terminals[2].pid, signal.SIGTERM)
    until(lambda: not terminals[2].is_raw, "the terminal to be as before")
    assert terminals[2].wait() == 128 + signal.SIGTERM
    broken = "goes on: the connection of its debugger broke"
    until(lambda: all(f"rank {rank} {broken}" in hosts.err() for rank in (0, 2)), "the loss of the debuggers")
    (folder / "go").touch()
    until(lambda: hosts.out().count("streams True False False False") == 3, "all to go on")
    assert "rank 1 goes on: its debugger was detached" in hosts.err()
    until(lambda: hosts.err().count("waits at ") == 6, "the next breakpoints")
    both = debugger(hosts)
    until(lambda: both.shows("name one of them"), "the list")
    assert both.wait() == 64 and "<module>" in both.plain
    quits = debugger(hosts, "--rank", "0")
    until(lambda: quits.shows("(Pdb) "), "pdb")
    quits.type("q\r")
    assert quits.wait() == 0
    assert hosts.wait() == [1]
    assert "BdbQuit" in hosts.out() + hosts.err()


def test_a_rank_waits_in_vain_once(folder: Path, script: Script, ended: list[Hosts]) -> None:
    path = script("""
        for _ in range(1000):
            breakpoint()
        if os.fork() == 0:
            try:
                breakpoint()
            except BaseException as error:  # its stdin is empty
                print(type(error).__name__, flush=True)
            os._exit(0)
        os.wait()
        os.environ["PYTHONBREAKPOINT"] = "os.getpid"
        print("own", breakpoint() == os.getpid(), flush=True)
    """)
    options = ("--grace", "5", "--preload", "", "--debug-wait", "0.1")
    hosts = Hosts(folder, torchrun(path, nproc=1), options=options).start()
    ended.append(hosts)
    assert hosts.wait() == [0], hosts.err()
    assert hosts.err().count("waits at ") == 1
    assert "rank 0 goes on: no debugger was attached within 0.1 s (-cfg debug_wait)" in hosts.err()
    assert "(Pdb) " in hosts.out() and "own True" in hosts.out()
