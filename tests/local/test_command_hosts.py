# SPDX-License-Identifier: BSD-3-Clause
"""Hosts of commands that run no ranks: each runs the command of its replica, and their role ends as its policy says."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.local.hosts import Hosts
from tests.waits import until
from torchx_monarch.client.rank_queries import ask_samples, ask_stacks
from torchx_monarch.insight.events import read_detailed
from torchx_monarch.model.host_result import HostResult

_OPTIONS = ("--grace", "5", "--workload", "command")

_KNOWS_REPLICA = 'replica=$(basename "$MONARCH_LOG_DIR"); echo "$replica $$" >> starts; '
"""Shell code that says in a file that the command of a replica has started, with its pid."""


class Commands(Hosts):
    """The hosts of a command of the shell, which knows its ``replica`` and may wait for a ``told`` word."""

    def __init__(self, folder: Path, text: str, replicas: int = 2, *options: str, **more: Any) -> None:
        told = f'cd {folder}; told() {{ while ! test -e "$1"; do sleep 0.05; done; }}; '
        super().__init__(folder, ["sh", "-c", told + _KNOWS_REPLICA + text], replicas, (*_OPTIONS, *options), **more)

    def tell(self, word: str) -> None:
        (self.folder / word).touch()

    def starts(self) -> dict[int, list[int]]:
        """Return the pids of the commands that have started, by replica."""
        found: dict[int, list[int]] = {replica: [] for replica in range(self.replicas)}
        path = self.folder / "starts"
        for line in path.read_text().splitlines() if path.exists() else ():
            replica, pid = map(int, line.split())
            found[replica].append(pid)
        return found

    def until_started(self, *counts: int) -> None:
        until(lambda: [len(pids) for pids in self.starts().values()] == list(counts), f"starts: {counts}")

    def until_registered(self, times: int = 1) -> None:
        until(lambda: sum(event["kind"] == "ranks" for event in self.events()) == times, "the hosts")

    def result(self, replica: int) -> HostResult:
        return HostResult.from_text((self.logs(replica) / "error.json").read_text())


def test_output_is_that_of_the_command_and_hosts_end_together(folder: Path) -> None:
    hosts = Commands(folder, 'printf "%s\\n" "a $replica" b; echo e >&2; test $replica = 0 || told go')
    hosts.start()
    hosts.until_registered()
    assert hosts.processes[0].poll() is None
    hosts.tell("go")
    assert hosts.wait() == [0, 0]
    for replica in (0, 1):
        assert (hosts.out(replica), hosts.err(replica)) == (f"a {replica}\nb\n", "e\n")
    kinds = [event["kind"] for event in hosts.events()]
    assert [kind for kind in kinds if kind != "output"] == ["hosts", "ranks", "attempt_end", "result"]
    (started,) = (event for event in read_detailed(folder / "events.jsonl") if event["kind"] == "ranks")
    assert {host["replica"]: host["pids"] for host in started["hosts"]} == hosts.starts()


@pytest.mark.parametrize("options", [(), ("--starts", "together")])
def test_a_failure_ends_all_commands_with_its_exit_code(folder: Path, options: tuple[str, ...]) -> None:
    text = "test $replica = 1 && { told go; echo oops >&2; exit 3; }; trap 'echo bye; exit 0' TERM; told never"
    hosts = Commands(folder, text, 2, *options)
    hosts.start(0)
    if not options:
        hosts.until_started(1, 0)
    hosts.start(1)
    hosts.until_registered()
    hosts.tell("go")
    assert hosts.wait() == [3, 3]
    assert hosts.out(0) == "bye\n"
    for replica in (0, 1):
        result = hosts.result(replica)
        assert result.reason.startswith("the command of replica 1 (") and result.reason.endswith("; last output: oops")
        assert (result.code, result.replica) == (3, 1)
    assert f"[monarch] FAILED: {hosts.result(0).reason}\n" in hosts.err(0)


def test_a_command_alone_fails_with_its_error_file(folder: Path) -> None:
    error = json.dumps({"message": {"message": "KeyError: x", "extraInfo": {"py_callstack": "Trace\nKeyError"}}})
    hosts = Commands(folder, f"printf %s '{error}' > $TORCHELASTIC_ERROR_FILE; kill -SEGV $$", 1)
    hosts.start()
    assert hosts.wait() == [128 + signal.SIGSEGV]
    result = hosts.result(0)
    assert result.reason.endswith(") was killed by signal 11 (SIGSEGV): KeyError: x"), result
    assert result.traceback == "Trace\nKeyError"


@pytest.mark.parametrize(("program", "code"), [("/no/such/program", 127), ("/", 126)])
def test_a_program_that_cannot_be_started(folder: Path, program: str, code: int) -> None:
    hosts = Hosts(folder, [program], options=_OPTIONS).start()
    assert hosts.wait() == [code]
    result = HostResult.from_text((hosts.logs(0) / "error.json").read_text())
    assert "could not be started: [Errno " in result.reason and f"'{program}'" in result.reason
    assert result.forbids_restart


def test_commands_that_start_together_wait_for_all(folder: Path) -> None:
    hosts = Commands(folder, "true", 2, "--starts", "together", "--host-timeout", "0.5")
    hosts.start(0)
    assert hosts.wait() == [1]
    assert hosts.starts() == {0: [], 1: []}
    assert "replica 1 did not arrive within 0.5 s (--host-timeout)" in hosts.err(0)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_command_that_succeeds_needs_no_other_host(folder: Path, missing: int) -> None:
    hosts = Commands(folder, "true", 2, "--host-timeout", "0.5")
    hosts.start(1 - missing)
    assert hosts.wait() == [0]


def test_a_replaced_replica_changes_nothing_for_the_others(folder: Path) -> None:
    hosts = Commands(folder, "told ends$replica && test -e go || exit 4", 3, "--replacements", "1")
    hosts.start()
    hosts.until_registered()
    first = hosts.starts()
    hosts.tell("ends1")
    assert hosts.processes[1].wait(60) == 4
    until(lambda: "exited with code 4; the other commands go on" in hosts.err(0), "the failure")
    (folder / "ends1").unlink()
    hosts.start(1)
    hosts.until_started(1, 2, 1)
    # The others register with the new replica 0, and it waits for them.
    hosts.lose(0)
    hosts.start(0)
    hosts.until_started(2, 2, 1)
    hosts.until_registered(2)
    hosts.tell("ends0")
    (folder / "go").touch()
    hosts.tell("ends2")
    hosts.tell("ends1")
    assert hosts.wait() == [0, 0, 0], hosts.err(0)
    assert hosts.starts()[2] == first[2]


@pytest.mark.parametrize(("code", "restarts"), [(4, "1"), (os.EX_CONFIG, "0")], ids=["no retry is left", "no retry"])
def test_a_replica_that_is_not_replaced_ends_all(folder: Path, code: int, restarts: str) -> None:
    text = f"told go; test $replica = 1 && exit {code}; told never"
    hosts = Commands(folder, text, 2, "--replacements", "1", environ={"MONARCH_RESTART": restarts})
    hosts.start()
    hosts.until_registered()
    hosts.tell("go")
    assert hosts.wait() == [code, code]


def test_a_role_does_without_some_replicas(folder: Path) -> None:
    hosts = Commands(folder, "test $replica = 0 || exit $replica; told go", 3, "--min-replicas", "2")
    hosts.start(0, 1)
    assert hosts.processes[1].wait(60) == 1
    hosts.tell("go")
    hosts.until_started(1, 1, 0)
    hosts.start(2)
    assert hosts.wait() == [2, 1, 2]


def test_clients_look_at_a_command(folder: Path) -> None:
    hosts = Commands(folder, "told go", 2)
    hosts.start()
    hosts.until_registered()
    samples, missing = ask_samples(hosts.client)
    pids = {replica: pids[0] for replica, pids in hosts.starts().items()}
    assert {sample.rank: sample.pid for sample in samples.ranks} == pids and not missing
    taken, _ = ask_stacks(hosts.client)
    assert {found.pid for found in taken} >= set(pids.values())
    os.kill(hosts.processes[1].pid, signal.SIGUSR1)  # which ends a shell
    assert hosts.wait() == [128 + signal.SIGUSR1] * 2
