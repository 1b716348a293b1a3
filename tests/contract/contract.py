# SPDX-License-Identifier: BSD-3-Clause
"""What every backend does, as tests: each scenario of ``table.SCENARIOS``, written once.

A backend's test folder has a ``test_contract.py`` with a subclass of ``Contract`` that names the backend's ``Place``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torchx.runner import Runner
from torchx.schedulers.api import Stream
from torchx.specs import AppDef, AppState, InvalidRunConfigException, RetryPolicy, Role
from torchx.specs.finder import ComponentValidationException

import torchx_monarch
from tests.contract.groups import Groups
from tests.contract.place import TORCHX, Place
from tests.local.terminal import Terminal
from tests.waits import WITHIN, until
from torchx_monarch.backends.core import stored_apps, torchx_api
from torchx_monarch.backends.core.apps import Apps
from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.cli.debug import list_breakpoints
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.rank_queries import ask_samples, ask_stacks
from torchx_monarch.command.allocations import hold_for_runs
from torchx_monarch.exceptions import RefusedError, SPMDError, UnreachableError
from torchx_monarch.model.role_spec import mark_sidecar
from torchx_monarch.schedulers import job_status
from torchx_monarch.transport.credentials import ClientCredentials

_ROOT = Path(__file__).parents[2]

_WEIRD = "a,b=c 'q' \"d\" $HOME $(HOME) `x` \\ %j\nline2\t."
"""The value of a variable. Roles write ``$`` as ``$$``, because of TorchX's macros."""

_NAMES = """
import glob, os, signal, sys, time
rank, group = os.environ["RANK"], os.environ["GROUP_RANK"]
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
"""

_MEETS = """
env = os.environ
print("rank", rank, "of", env["WORLD_SIZE"], "on", os.uname().nodename, env["MASTER_ADDR"], flush=True)
print("weird", repr(env["WEIRD"]), file=sys.stderr, flush=True)
"""

_EXPOSES = """
def words(path):
    try:
        return open(path, "rb").read()
    except OSError:  # that process is gone
        return b""
print("secret", os.environ.get("MONARCH_CREDENTIALS"), flush=True)
lines = map(words, glob.glob("/proc/[0-9]*/cmdline"))
# TorchX's own scheduler for Slurm, which another test may use at this time, has the environment there.
shown = b"".join(line for line in lines if b"--export=ALL," not in line)
secrets = (os.environ["TOKEN"], "eyJhdXRob3JpdHki")  # the credentials of every job begin with the latter
print("exposed", any(value.encode() in shown for value in secrets), flush=True)
"""

_SAVES = """
def stop(number, frame):
    time.sleep(1)
    os.write(1, f"saved {rank}\\n".encode())  # print is not reentrant
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
"""

_WAITS = """
ends = told("go")  # before the line for which the test waits
print("attempt", attempt, "rank", rank, flush=True)
if not ends:
    while not told("go"):
        time.sleep(0.2)
    while not told("lose" + group):
        time.sleep(0.2)
    if os.environ["LOCAL_RANK"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)  # the host
    time.sleep(1000)
"""
"""Ends at once where ``Place.tell("go")`` was called before; otherwise waits to be lost or ended."""

_STEPS = """
import torchx_monarch
if told("go"):
    print("attempt", attempt, "rank", rank, flush=True)
else:
    for step in torchx_monarch.steps(range(1_000_000)):
        if step == 0:
            print("attempt", attempt, "rank", rank, flush=True)
        time.sleep(0.001 * (1 + int(rank)))
    print("saved at", step, flush=True)
"""
"""Saves at the step at which all ranks stop, once all have begun their loops: SIGTERM ends a rank that has not."""

_READS = """
def read_data():
    while not told("go"):
        time.sleep(0.1)
read_data()
if rank == "1":
    answer = 42
    breakpoint()
"""

_SPAWNS = """
if rank == "0":
    from monarch.actor import Actor, endpoint
    from torchx_monarch import this_job
    class Where(Actor):
        @endpoint
        def is_here(self):
            return os.getpid()
    actors = this_job().state().workers.spawn_procs().spawn("where", Where)
    print("actors of rank 0 on", len(list(actors.is_here.call().get(timeout=240))), "hosts", flush=True)
while not told("go"):
    time.sleep(0.1)
"""

_CLIENT = """
import os, sys
from monarch.actor import Actor, endpoint
from torchx_monarch import SPMDJob

class Where(Actor):
    @endpoint
    def is_here(self):
        return os.getpid()

handle, address = sys.argv[1:]
workers = SPMDJob.attach(handle, address=address).state(cached_path=None).workers
print(len(list(workers.spawn_procs().spawn("where", Where).is_here.call().get(timeout=240))), flush=True)
os._exit(0)
"""
"""A Monarch client of a job, which prints on how many hosts its actors are."""

_HANGS = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
def skips_a_collective():
    time.sleep(1000)
if rank == "1":
    skips_a_collective()
dist.all_reduce(torch.ones(1))
"""

_FAILS_WHEN_TOLD = """
while not told("go"):
    time.sleep(0.1)
sys.exit(3)
"""

_IS_LOST = """
while not told("go"):
    time.sleep(0.1)
os.kill(os.getppid(), signal.SIGKILL)  # the host
"""

_FAILS = """
if rank == "3":
    raise ValueError("boom")
time.sleep(1000)
"""

_FAILS_ONCE = """
fails, first = sys.argv[1] == sys.argv[2], not told("again")
print("start", flush=True)
while not told("fail" if fails and first else "go"):
    time.sleep(0.1)
sys.exit(3 if fails and first else 0)
"""

_WRAPPED = {"monarch": {"wrap": True}}
"""Metadata of commands that have hosts on all backends."""


class Contract(Groups):
    """The tests.

    Attributes:
        kind: the backend's ``Place``.
        made_by: the fixture that makes it; empty if it is made here.
    """

    kind: ClassVar[type[Place]]
    made_by: ClassVar[str] = ""
    pytestmark: ClassVar[list[pytest.MarkDecorator]] = []

    def __init_subclass__(cls) -> None:
        # Else a daemon for all tests would start within a test, to which it is a process left behind.
        cls.pytestmark = [pytest.mark.usefixtures(cls.made_by)] if cls.made_by else []

    @pytest.fixture
    def place(self, leaves_nothing: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
        if self.made_by:
            yield request.getfixturevalue(self.made_by)
            return
        place = self.kind(tmp_path)
        yield place
        place.close()

    @pytest.mark.slow
    @pytest.mark.scenario("two hosts, digits")
    def test_two_hosts_train_on_real_digits(self, place: Place) -> None:
        checkpoints = str(place.folder / "checkpoints")
        train = ("--epochs", "4", "--min-accuracy", "0.8", "--checkpoint-dir", checkpoints)
        handle = place.submit_script(_ROOT / "examples" / "digits.py", *train)
        place.wait(handle, AppState.SUCCEEDED, 240)
        (role,) = place.status(handle).roles
        assert "2 ranks on" in place.log(handle, role.role)

    @pytest.mark.scenario("lost host replaced")
    @pytest.mark.parametrize("lost", [1, 0])
    def test_a_lost_host_is_replaced(self, place: Place, lost: int) -> None:
        role = place.torchrun(_program(place, _WAITS), max_retries=1, retry_policy=RetryPolicy.REPLICA)
        handle = _lose(place, role, lost)
        log = place.log(handle)
        # The lost replica's log from before is still a part of its log.
        assert (log.count("attempt 0"), log.count("attempt 1")) == (4, 4), log

    @pytest.mark.scenario("spare host")
    def test_a_spare_host_takes_the_place_of_a_lost_one(self, place: Place) -> None:
        role = place.torchrun(_program(place, _WAITS), metadata={"monarch": {"spares": 1}})
        handle = _lose(place, role, 1)
        for replica, attempts in enumerate(("01", "0", "1")):
            printed = "".join(place.lines(handle, replica))
            first = 2 * min(replica, 1)
            for attempt in "01":
                for rank in (first, first + 1):
                    assert printed.count(f"attempt {attempt} rank {rank}") == (attempt in attempts), printed
        states = place.states(handle)
        assert states["trainer/0"] == states["trainer/2"] == AppState.SUCCEEDED

    @pytest.mark.scenario("retries")
    @pytest.mark.parametrize("lost", [1, 0])
    def test_the_job_begins_again_when_a_host_is_lost(self, place: Place, lost: int) -> None:
        # The other host ends late: a backend that restarts the lost one immediately must wait for it.
        program = _program(place, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _WAITS)
        handle = _lose(place, place.torchrun(program, max_retries=1), lost)
        assert place.log(handle).count("attempt 0") == 8, place.log(handle)

    @pytest.mark.scenario("retries")
    @pytest.mark.scenario("log follow, since, until")
    def test_a_failing_command_is_restarted_and_its_log_followed(self, place: Place) -> None:
        handle = place.run(place.role("sh", "-c", "echo start; sleep 0.5; exit 3", max_retries=2))
        followed = place.lines(handle, should_tail=True)
        assert [line for line in followed if not line.startswith("[monarch]")] == ["start\n"] * 3
        status = place.wait(handle, AppState.FAILED)
        assert status.num_restarts == 2 and "code 3" in status.msg, status
        found = Apps[AppSnapshot](place.backend, place.name).read(handle.rpartition("/")[2])
        assert found is not None
        told = job_status.build(handle, *found)
        # From the first start on, of which each took half a second; Kubernetes tells times in whole seconds.
        assert told.elapsed is not None and told.elapsed >= 1, told

    @pytest.mark.scenario("retries")
    def test_exit_code_78_asks_for_no_restart(self, place: Place) -> None:
        # The job's own lines show the last line of a rank that fails.
        prints = 'print("once\\nbye", flush=True)'
        program = _program(place, f'if rank == "0":\n    time.sleep(1000)\n{prints}\nsys.exit(78)')
        handle = place.run(place.torchrun(program, nproc=1, max_retries=2))
        status = place.wait(handle, AppState.FAILED)
        assert (status.num_restarts, place.log(handle).count("once")) == (0, 1), place.everything(handle)
        assert json.loads(status.structured_error_msg)["message"]["errorCode"] == 78

    @pytest.mark.scenario("retry policies of commands")
    @pytest.mark.parametrize(
        ("policy", "starts"),
        [(RetryPolicy.APPLICATION, [2, 2, 2]), (RetryPolicy.ROLE, [2, 2, 1]), (RetryPolicy.REPLICA, [1, 2, 1])],
    )
    def test_commands_restart_as_their_policy_says(self, place: Place, policy: RetryPolicy, starts: list[int]) -> None:
        more: dict[str, Any] = {"max_retries": 1, "retry_policy": policy}
        words = ("${replica_id}", "1")  # replica 1 of this role fails once
        roles = [_command(place, _FAILS_ONCE, *words, replicas=2, **more)]
        roles.append(_command(place, _FAILS_ONCE, "0", "1", name="other", **more))
        handle = place.run(*roles)

        def started() -> list[int]:
            of_roles = [("trainer", 0), ("trainer", 1), ("other", 0)]
            return [[line.strip() for line in place.lines(handle, k, role)].count("start") for role, k in of_roles]

        place.until(lambda: started() == [1, 1, 1], "all commands", handle)
        place.tell("again")
        place.tell("fail")
        place.until(lambda: started() == starts, lambda: f"the restarts: {started()}", handle)
        place.tell("go")
        status = place.wait(handle, AppState.SUCCEEDED)
        assert (status.num_restarts, started()) == (1, starts), place.everything(handle)

    @pytest.mark.scenario("root cause in status")
    def test_a_failing_command_is_the_root_cause(self, place: Place) -> None:
        fails = "echo out; echo oops >&2; test ${replica_id} = 0 || exit 3; exec sleep 1000"
        handle = place.run(place.role("sh", "-c", fails, replicas=2, metadata=_WRAPPED))
        status = place.wait(handle, AppState.FAILED)
        error = json.loads(status.structured_error_msg)["message"]
        assert error["message"].startswith("the command of replica 1 ("), error
        assert error["message"].endswith(" exited with code 3; last output: oops") and error["errorCode"] == 3
        assert set(place.states(handle).values()) == {AppState.FAILED}
        assert f"[monarch] FAILED: {error['message']}" in place.log(handle)
        lines = [line.strip() for line in place.lines(handle, 1) if not line.startswith("[monarch]")]
        assert sorted(lines) == ["oops", "out"], place.everything(handle)

    @pytest.mark.scenario("elastic role")
    def test_an_elastic_role_does_without_a_replica(self, place: Place) -> None:
        ends = "int(sys.argv[1]) and sys.exit(3)\nwhile not told('go'):\n    time.sleep(0.1)"
        handle = place.run(_command(place, ends, "${replica_id}", replicas=2, min_replicas=1))
        place.until(lambda: place.states(handle)["trainer/1"] is AppState.FAILED, "the failure", handle)
        place.tell("go")
        place.wait(handle, AppState.SUCCEEDED)
        assert place.states(handle) == {"trainer/0": AppState.SUCCEEDED, "trainer/1": AppState.FAILED}

    @pytest.mark.scenario("preemption")
    @pytest.mark.parametrize("policy", [RetryPolicy.APPLICATION, RetryPolicy.REPLICA])
    def test_a_preempted_job_goes_on(self, place: Place, policy: RetryPolicy) -> None:
        saves = _STEPS if policy is RetryPolicy.REPLICA else _SAVES + _WAITS
        role = place.torchrun(_program(place, saves), max_retries=1, retry_policy=policy)
        handle = place.run(role, grace=place.long_grace)
        place.until(lambda: place.log(handle).count("attempt 0") == 4, "the first attempt", handle)
        place.tell("go")
        place.preempt(handle, 1)
        status = place.wait(handle, AppState.SUCCEEDED)
        log = place.log(handle)
        # Under REPLICA the other host may restart as well.
        assert status.num_restarts <= (1 if policy is RetryPolicy.APPLICATION else 2)
        # All ranks had the grace period, and all have begun again.
        lost = 0 if place.keeps_preempted_logs else 2
        saved = re.findall(r"saved (?:at )?(\d+)", log)
        assert (len(saved), log.count("attempt ")) == (4 - lost, 8 - lost), log
        assert policy is RetryPolicy.APPLICATION or len(set(saved)) == 1, log
        assert "preempted" in log or not place.names_preemptions, log

    @pytest.mark.scenario("cancel while pending")
    def test_cancel_while_pending(self, place: Place) -> None:
        with place.pending() as handle:
            place.until(lambda: place.status(handle).state is AppState.PENDING, "the queue", handle)
            _read(place, {handle: AppState.PENDING})
            place.runner.cancel(handle)
        place.wait(handle, AppState.CANCELLED)
        time.sleep(0.5)
        assert place.status(handle).state is AppState.CANCELLED
        assert set(place.states(handle).values()) == {AppState.CANCELLED}

    @pytest.mark.scenario("cancel while running")
    def test_cancel_while_running(self, place: Place) -> None:
        reader = place.role("sh", "-c", "echo up; exec sleep 1000", name="reader")
        first = place.role("true", name="first")  # its end is not the job's
        handle = place.run(first, place.torchrun(_program(place, _SAVES + _WAITS)), reader, grace=place.long_grace)
        place.until(lambda: place.log(handle).count("attempt 0") == 4, "the ranks", handle)
        place.until(lambda: "up\n" in place.lines(handle, role="reader"), "the reader", handle)
        place.until(lambda: place.states(handle)["first/0"] is AppState.SUCCEEDED, "the end of the first role", handle)
        assert place.status(handle).state is AppState.RUNNING
        states = place.states(handle)
        assert states.pop("first/0") is AppState.SUCCEEDED and set(states.values()) == {AppState.RUNNING}
        followed: list[str] = []
        log = place.runner.log_lines(handle, "trainer", 0, should_tail=True)
        follower = threading.Thread(target=followed.extend, args=[log])
        follower.start()
        place.until(lambda: any("attempt 0" in line for line in followed), "the follower", handle)
        place.cancel(handle)
        status = place.wait(handle, AppState.CANCELLED)
        states = place.states(handle)
        assert states.pop("first/0") is AppState.SUCCEEDED and set(states.values()) == {AppState.CANCELLED}
        assert status.num_restarts == 0
        # The ranks had their grace period, the log ends with the app, and stays.
        follower.join(WITHIN * place.patience)
        assert not follower.is_alive()
        assert followed == place.lines(handle)
        assert place.log(handle).count("saved") == 4, place.log(handle)
        assert place.lines(handle, role="reader")[0] == "up\n"
        place.runner.cancel(handle)
        assert place.status(handle).state is AppState.CANCELLED

    @pytest.mark.scenario("stacks of running ranks")
    @pytest.mark.scenario("breakpoint on another host")
    @pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")
    def test_ranks_are_looked_at_and_debugged(self, place: Place) -> None:
        handle = place.run(place.torchrun(_program(place, _READS), nproc=1))
        place.until(lambda: place.status(handle).state is AppState.RUNNING, "the hosts", handle)
        with place.reached(handle) as address:
            hosts = Hosts(handle, address=address, runner=place.runner)

            def reading() -> set[int]:
                with contextlib.suppress(UnreachableError, RefusedError):  # the hosts have just started
                    return {process.rank for process in ask_stacks(hosts)[0] if "read_data" in str(process.threads)}
                return set()

            place.until(lambda: reading() == {0, 1}, "the ranks", handle)
            words = ["--address", address] if address else []

            def are_shown_once() -> bool:
                told = place.torchx("monarch", "stacks", handle, *words)
                return told.startswith("ranks 0-1: main thread\n") and "in read_data" in told

            place.until(are_shown_once, "both ranks on the same line", handle)
            samples, _ = ask_samples(hosts)
            assert [(sample.rank, sample.state, sample.rss_bytes > 0) for sample in samples.ranks] == [
                (rank, "running", True) for rank in (0, 1)
            ]
            how = ["--rank", "1", "--seconds", "1", "--idle", "-o", "-"]
            assert "read_data (" in place.torchx("monarch", "profile", handle, *words, *how)
            place.tell("go")
            place.until(lambda: [waiting.rank for waiting in list_breakpoints(hosts)] == [1], "the breakpoint", handle)
            command = [*TORCHX, "monarch", "debug", handle, *words]
            environ = {"TERM": "xterm", "TORCHX_PLUGINS_SOURCE": place.plugins_source}
            terminal = Terminal(command, place.folder, environ, (30, 100))
            place.until(lambda: terminal.shows("(Pdb) "), lambda: f"pdb: {terminal.plain}", handle)
            terminal.type("p answer * 100\r")
            place.until(lambda: terminal.shows("4200"), "its answer", handle)
            terminal.type("c\r")
            assert terminal.wait() == 0, terminal.plain
        place.wait(handle, AppState.SUCCEEDED)

    @pytest.mark.scenario("actors beside ranks")
    @pytest.mark.scenario("attach to a batch job")
    def test_actors_run_beside_ranks(self, place: Place) -> None:
        handle = place.run(place.torchrun(_program(place, _SPAWNS), nproc=1))
        if place.is_registered:  # another process knows the scheduler
            place.until(lambda: place.status(handle).state is AppState.RUNNING, "the hosts", handle)
            assert _attach(place, handle, *place.client(handle)) == 2
        place.tell("go")
        place.wait(handle, AppState.SUCCEEDED)
        assert "actors of rank 0 on 2 hosts" in place.log(handle)

    @pytest.mark.scenario("function on hosts that stay")
    def test_a_function_returns_a_value_from_each_rank(self, place: Place) -> None:
        held = hold_for_runs(AppDef("app", [place.torchrun(_program(place, "raise SystemExit('not this')"))]))
        handle = place.run(*held.roles)
        place.until(lambda: place.status(handle).state is AppState.RUNNING, "the hosts", handle)

        def train(lr: float, *, epochs: int) -> tuple[int, float, bytes]:
            rank = int(os.environ["RANK"])
            if lr < 0 and rank == 3:
                raise ArithmeticError(lr)
            return rank, lr * epochs, bytes(100_000)

        with place.reached(handle) as address:
            job = torchx_monarch.SPMDJob(handle, address=address, runner=place.runner)
            place.until(lambda: job.status().ready, "the hosts", handle)
            assert job.run(train, 0.5, epochs=3) == [(rank, 1.5, bytes(100_000)) for rank in range(4)]
            with pytest.raises(ArithmeticError) as raised:
                job.run(train, -1, epochs=3)
            cause = raised.value.__cause__
            assert isinstance(cause, SPMDError) and cause.result.cause == 3 and raised.value.args == (-1,)
        place.runner.cancel(handle)

    @pytest.mark.scenario("attach during a run")
    def test_a_client_attaches_during_a_run(self, place: Place) -> None:
        if not place.is_registered:
            pytest.skip("another process does not know the scheduler")
        held = hold_for_runs(
            AppDef("app", [place.torchrun(_program(place, "while not told('go'): time.sleep(0.1)"), nproc=1)])
        )
        handle = place.run(*held.roles)
        place.until(lambda: place.status(handle).state is AppState.RUNNING, "the hosts", handle)
        where = place.client(handle)
        with place.reached(handle) as address:
            job = torchx_monarch.SPMDJob(handle, address=address, runner=place.runner)
            place.until(lambda: job.status().ready, "the hosts", handle)
            run = job.run_spmd_async(output="none")
            assert _attach(place, handle, *where) == 2
            place.tell("go")
            assert run.result(WITHIN * place.patience).exit_code == 0
            assert _attach(place, handle, *where) == 2
        place.runner.cancel(handle)

    @pytest.mark.scenario("list once each")
    @pytest.mark.scenario("status and log long after, elsewhere")
    def test_other_processes_see_it_all(self, place: Place) -> None:
        handle = place.run(place.role("sh", "-c", "echo $$WORD; exit 3", env={"WORD": "seen"}))
        place.wait(handle, AppState.FAILED)
        told = json.loads(place.torchx("status", "--json", handle))
        assert (told["state"], told["num_restarts"]) == ("FAILED", 0)
        assert "replica trainer/0" in told["msg"] or "role trainer" in told["msg"], told
        assert "code 3" in told["msg"]
        assert "seen\n" in place.torchx("log", f"{handle}/trainer/0")
        told_of_all = json.loads(place.torchx("monarch", "status", "--json", handle))
        assert [told_of_all[name] for name in ("state", "exit_code", "hosts", "phase")] == ["FAILED", 3, 1, None]
        assert told_of_all["submitted"] <= told_of_all["ended"] and told_of_all["roles"][0]["role"] == "trainer"
        assert "seen\n" in place.torchx("monarch", "logs", handle.rpartition("/")[2])
        assert "'metadata': {'team': 'a b'}" in place.torchx("describe", handle)
        assert [entry for entry in place.listed() if entry[0] == handle] == [(handle, AppState.FAILED)]
        if not place.list_cfg:  # the command takes none
            (line,) = [line for line in place.torchx("list", "-s", place.name).splitlines() if handle in line]
            assert "FAILED" in line
            jobs = json.loads(place.torchx("monarch", "ls", "-s", place.name, "--json"))
            (job,) = [job for job in jobs if job["handle"] == handle]
            assert (job["state"], job["name"]) == ("FAILED", told_of_all["name"]) and job["submitted"]
        place.torchx("cancel", handle)
        assert place.status(handle).state is AppState.FAILED
        place.torchx("delete", handle)
        place.until(lambda: place.runner.status(handle) is None, "its end", handle)
        assert place.torchx("status", handle, code=1)

    @pytest.mark.scenario("reading changes nothing")
    def test_reading_changes_nothing(self, place: Place) -> None:
        """One that waits is read in ``test_cancel_while_pending``."""
        running, cancelled = (place.run(place.role("sh", "-c", "echo up; exec sleep 1000")) for _ in range(2))
        states = {cancelled: AppState.CANCELLED}
        states[place.run(place.role("sh", "-c", "exit 0"))] = AppState.SUCCEEDED
        states[place.run(place.role("sh", "-c", "exit 3"))] = AppState.FAILED
        for handle in (running, cancelled):
            place.until(lambda: place.lines(handle) == ["up\n"], "the program", handle)  # noqa: B023
        place.runner.cancel(cancelled)
        for handle, state in states.items():
            place.wait(handle, state)
        _read(place, {running: AppState.RUNNING, **states})
        place.runner.cancel(running)

    @pytest.mark.scenario("ends by itself")
    @pytest.mark.parametrize("decision", ["failed", "succeeded", "lost", "failed hosts"])
    def test_an_app_ends_when_it_is_decided_though_nobody_looks(self, place: Place, decision: str) -> None:
        """The process that has submitted it is dead by then."""
        program = _program(place, _IS_LOST if decision == "lost" else _FAILS_WHEN_TOLD)
        other = place.role("sleep", "1000", name="other")
        if decision == "succeeded":
            mark_sidecar(other)
        first = {
            "failed": lambda: place.role("sh", "-c", "sleep 1; exit 3"),
            "succeeded": lambda: place.role("true"),
            "lost": lambda: place.torchrun(program, nproc=1, replicas=1),
            "failed hosts": lambda: place.torchrun(program, nproc=1, replicas=1),
        }[decision]()
        if decision == "failed hosts":
            other = place.torchrun(_program(place, "time.sleep(1000)"), nproc=1, name="other")
        handle = place.submit_and_die(first, other)
        place.tell("go")
        place.wait(handle, AppState.SUCCEEDED if decision == "succeeded" else AppState.FAILED)
        assert place.status(handle).roles[1].replicas[0].state is not AppState.RUNNING

    @pytest.mark.scenario("command at the end")
    @pytest.mark.parametrize("code", [0, 3])
    def test_a_command_is_told_of_the_end(self, place: Place, code: int) -> None:
        program = _program(place, f"sys.exit({code} or os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')")
        words = ("--max-restarts", str(int(not code)), program)
        roles = [place.torchrun(*words, nproc=1, replicas=1), place.role("true", name="side")]
        end = place.folder / "end.json"  # in a container there is no such folder, but the last words are shown
        short = 'sed \'s/"message.*"restarts/"restarts/\''  # a failure's line has 200 characters
        handle = place.run(*roles, name="told", on_end=f"tee {end} | {short} >&2; exit 5")
        state = AppState.FAILED if code else AppState.SUCCEEDED
        place.wait(handle, state)

        def said() -> str:
            return (
                f"{place.status(handle).msg} {place.log(handle, replicas=1)} {end.read_text() if end.exists() else ''}"
            )

        place.until(lambda: f'"state": "{state.name}"' in said(), "the command", handle)
        assert f'"restarts": {int(not code)}' in said()
        assert place.status(handle).state is state

    @pytest.mark.scenario("describe gives the original app")
    @pytest.mark.parametrize("replicas", [1, 3])
    def test_describe_gives_the_original_app(self, place: Place, replicas: int) -> None:
        env = {"WEIRD": _WEIRD.replace("$", "$$"), "ID": "${app_id}"}
        role = place.torchrun(
            "train.py", "--lr", "0.1", "${replica_id}", replicas=replicas, env=env, metadata={"x": {"y": [1]}}
        )
        handle = place.run(role)
        app = _described(place, handle)
        assert (app.metadata, app.roles) == ({"team": "a b"}, [role])
        place.runner.cancel(handle)

    @pytest.mark.scenario("delete leaves nothing")
    @pytest.mark.parametrize("seconds", [0, 1000])
    def test_delete_leaves_nothing(self, place: Place, seconds: int) -> None:
        program = _program(place, f"print('up', flush=True)\ntime.sleep({seconds})")
        handle = place.run(place.torchrun(program, nproc=1))
        place.until(lambda: place.log(handle).count("up") == 2, "the ranks", handle)
        if not seconds:
            place.wait(handle, AppState.SUCCEEDED)
        client = Path(stored_apps.credentials(place.name).path(handle.rpartition("/")[2]))
        if place.backend.has_network:
            assert ClientCredentials.from_text(json.loads(client.read_text())["credentials"])
        with Runner("torchx", place.schedulers) as runner:
            runner.delete(handle)
        with contextlib.suppress(AssertionError):
            until(lambda: not place.left(handle), "what is left to go", WITHIN * place.patience, every=0.1)
        assert list(place.left(handle)) == []
        assert place.runner.status(handle) is None
        assert handle not in dict(place.listed())
        assert not client.exists()

    @pytest.mark.scenario("root cause in status")
    def test_a_failing_rank_is_the_root_cause(self, place: Place) -> None:
        handle = place.run(place.torchrun("--max-restarts", "1", _program(place, _FAILS)))
        status = place.wait(handle, AppState.FAILED)
        assert status.num_restarts == 1
        error = json.loads(status.structured_error_msg)["message"]
        assert error["message"].startswith("rank 3 (local rank 1 on "), error
        assert error["message"].endswith("ValueError: boom")
        assert error["errorCode"] == 1
        assert "ValueError: boom" in error["extraInfo"]["py_callstack"]
        assert "code 1" in status.msg
        assert set(place.states(handle).values()) == {AppState.FAILED}
        assert "FAILED: rank 3" in place.log(handle)
        # The last screen of `torchx run --wait`.
        scheduler: Any = torchx_api.scheduler_of(place.runner, place.name)
        app, state = scheduler.apps.read(handle.rpartition("://torchx/")[2])
        shown = job_status.build(handle, app, state).summary().lines()
        # TorchX's local_cwd tells no times.
        assert re.fullmatch(f"FAILED( after .+ s)?: {re.escape(handle)}", shown[0])
        assert shown[1].startswith("  cause:  rank 3 (local rank 1 on ") and "ValueError: boom" in shown[1]
        assert shown[2].startswith("  raised: ")
        assert "  ran:    2 hosts x 2 ranks, 1 restart" in shown
        assert shown[-2] == f"  next:   torchx log {handle}/trainer/1" and len(shown) <= 7
        if place.is_registered:
            page = place.folder / "job.html"
            told = json.loads(place.torchx("monarch", "report", handle, "-o", str(page), "--json"))
            assert ("restart 1 of 1 after: rank 3" in page.read_text()) is place.keeps_events
            assert "ValueError: boom" in page.read_text()
            times = told["roles"]["trainer"]
            assert sum(times["phases"].values()) == pytest.approx(told["seconds"], rel=0.02), times
            seen = {"hosts", "ranks", "running", "stopping"} if place.keeps_events else {"unknown"}
            assert set(times["phases"]) - {"submit", "queued", "first output", "end"} == seen, times

    @pytest.mark.nightly(
        "it imports torch, and goes through the hosts alone, which tests/local/test_hangs.py has every time"
    )
    @pytest.mark.scenario("root cause in status")
    def test_a_rank_that_others_wait_for_is_the_root_cause(self, place: Place) -> None:
        role = place.torchrun(_program(place, _HANGS), nproc=1, env={"OMP_NUM_THREADS": "1"})
        handle = place.run(role, preload="torch", hang_after=1, on_hang="fail")
        status = place.wait(handle, AppState.FAILED)
        error = json.loads(status.structured_error_msg)["message"]["message"]
        assert error.startswith("hang: rank 1 has not called gloo:all_reduce, number 1 of group 0"), error
        assert "in skips_a_collective (local rank " in error, error
        assert "in skips_a_collective" in place.log(handle)

    @pytest.mark.scenario("environment arrives whole")
    def test_ranks_meet_and_have_their_environment(self, place: Place) -> None:
        role = place.torchrun(_program(place, _MEETS), env={"WEIRD": _WEIRD.replace("$", "$$")})
        handle = place.run(role, preflight="warn")  # a busy machine may look unfit
        place.wait(handle, AppState.SUCCEEDED)
        assert "[monarch] pre-flight: " in place.log(handle, replicas=1)
        masters = set()
        for replica in (0, 1):
            log = "".join(place.lines(handle, replica))
            node = place.hostname(handle, replica).partition(".")[0] if place.names_hosts else ""
            for rank in (2 * replica, 2 * replica + 1):
                (line,) = [line for line in log.splitlines() if f"rank {rank} of 4 on {node}" in line]
                masters.add(line.split()[-1])
            assert log.count(f"weird {_WEIRD!r}") == 2, log
            assert "INSECURE" not in log
        assert len(masters) == 1
        assert place.states(handle) == {"trainer/0": AppState.SUCCEEDED, "trainer/1": AppState.SUCCEEDED}

    @pytest.mark.scenario("environment arrives whole")
    @pytest.mark.scenario("list once each")
    @pytest.mark.scenario("describe gives the original app")
    @pytest.mark.parametrize("wrap", [True, False])
    def test_a_command_has_its_arguments_and_environment(self, place: Place, wrap: bool) -> None:
        value = "a,b='c' \"d\" $e `f` \\ g\n  h=i; j"
        shows = 'printf "%s|" "$$VALUE" "$$MINE" "$$1" "$$2" ${replica_id} "$$PYTHONUNBUFFERED"; echo'
        env = {"VALUE": value.replace("$", "$$"), "MINE": "mine is '${replica_id}'"}
        more: dict[str, Any] = {"env": env, "metadata": {"monarch": {"wrap": wrap}}}
        roles = [place.role("sh", "-c", shows, "x", "it's", "r ${replica_id}/'", replicas=2, **more)]
        roles.append(place.role("true", name="other"))
        handle = place.run(*roles)
        place.wait(handle, AppState.SUCCEEDED)
        assert _described(place, handle).roles == roles
        spec = place.backend.snapshot(handle.rpartition("/")[2]).roles[0].spec  # type: ignore[union-attr]
        assert (spec.runs_hosts, spec.unwrapped) == (wrap, "" if wrap else "its metadata has 'wrap': False")
        assert [entry for entry in place.listed() if entry[0] == handle] == [(handle, AppState.SUCCEEDED)]
        for k in (0, 1):
            printed = [line for line in place.lines(handle, k) if not line.startswith("[monarch] result ")]
            lines = "".join(printed).splitlines()
            # Some logs lack the blanks at the beginning of a line.
            expected = f"{value}|mine is '{k}'|it's|r {k}/'|{k}|1|".splitlines()
            assert [line.strip() for line in lines] == [line.strip() for line in expected]

    @pytest.mark.scenario("credentials not on show")
    def test_credentials_are_not_on_show(self, place: Place) -> None:
        handle = place.run(place.torchrun(_program(place, _EXPOSES), env={"TOKEN": "to" + "ken123"}))
        place.wait(handle, AppState.SUCCEEDED)
        secret, shown = place.credentials(handle)
        log = place.log(handle)
        assert (log.count("secret None"), log.count("exposed False")) == (4, 4), log
        assert len(secret) > 500
        assert secret not in shown + log + str(place.described(handle)) + str(place.status(handle))

    @pytest.mark.scenario("log follow, since, until")
    def test_a_log_is_read_by_times_streams_and_expressions(self, place: Place) -> None:
        before = datetime.now(timezone.utc)
        text = (
            'import torchx_monarch\ntorchx_monarch.progress(7, 9)\nprint("early", rank, flush=True)\n'
            'while not told("go"):\n    time.sleep(0.1)\nprint("late", flush=True)\n'
        )
        program = _program(place, text + 'print("to stderr", file=sys.stderr, flush=True)')
        handle = place.run(place.torchrun(program))
        place.until(lambda: place.log(handle).count("early") == 4, "the ranks", handle)
        with place.reached(handle) as address:
            words = ("--address", address) if address else ()
            told = json.loads(place.torchx("monarch", "status", "--json", "last", *words))
        assert [told[name] for name in ("handle", "state", "phase")] == [handle, "RUNNING", "running"]
        assert [told[name] for name in ("attempt", "hosts", "ranks")] == [1, 2, 4] and told["last_output"]
        assert {(rank["state"], rank["progress"]["step"]) for rank in told["activity"]} == {("running", 7)}
        time.sleep(0.5)  # the times of lines are right to a tenth of a second
        middle = datetime.now(timezone.utc)
        time.sleep(0.5)
        place.tell("go")
        place.wait(handle, AppState.SUCCEEDED)
        lines = place.lines(handle)
        assert place.lines(handle, since=before) == place.lines(handle, until=datetime.now()) == lines
        assert place.lines(handle, since=datetime.now()) == place.lines(handle, until=before) == []
        first, last = place.lines(handle, until=middle), place.lines(handle, since=middle)
        assert first + last == lines
        assert "early" in "".join(first) and "late" not in "".join(first)
        app_id = handle.rpartition("/")[2]
        apps: Apps[AppSnapshot] = Apps(place.backend, place.name)
        app = place.backend.snapshot(app_id)
        assert app is not None
        timed = list(apps.replica_log(app, "trainer", 0))
        assert "".join(found.text for found in timed) == "".join(lines)
        assert all(0 < a.time <= b.time for a, b in zip(timed, timed[1:], strict=False))
        assert "".join(found.text for found in apps.replica_log(app, "trainer", 0, tail=2)).endswith(
            "".join(lines[-2:])
        )
        assert len(place.lines(handle, 1, regex="early 2")) == 1
        with pytest.raises(ValueError, match=r"\(\(\(.*is no regular expression"):
            place.lines(handle, regex="(((")
        if place.backend.capabilities.separate_streams:
            assert not any("to stderr" in line for line in place.lines(handle, streams=Stream.STDOUT))
            assert not any("early" in line for line in place.lines(handle, streams=Stream.STDERR))
            assert any("early" in line for line in place.lines(handle, streams=Stream.STDOUT))
            assert any("to stderr" in line for line in place.lines(handle, streams=Stream.STDERR))
        else:
            with pytest.raises(ValueError, match="both streams of a replica as one; stdout alone"):
                place.lines(handle, streams=Stream.STDOUT)

    @pytest.mark.scenario("log follow, since, until")
    def test_a_log_is_followed_to_its_end(self, place: Place) -> None:
        handle = place.run(place.role("sh", "-c", "for i in 1 2 3; do echo line $$i; sleep 0.5; done"))
        assert place.lines(handle, should_tail=True) == ["line 1\n", "line 2\n", "line 3\n"]
        place.wait(handle, AppState.SUCCEEDED)
        with pytest.raises(ValueError, match="has no role 'nobody'; its roles are trainer"):
            place.lines(handle, role="nobody")
        with pytest.raises(ValueError, match="has no replica 1"):
            place.lines(handle, 1)

    @pytest.mark.scenario("bad options named")
    def test_bad_options_are_named(self, place: Place) -> None:
        before = place.listed()
        for cfg, words in (*place.bad_options, *place.own_bad_options):
            with pytest.raises((InvalidRunConfigException, ComponentValidationException, ValueError), match=words):
                place.run(place.role("true", replicas=2), **cfg)
        assert place.listed() == before

    def test_doctor_finds_no_fault(self, place: Place) -> None:
        options = place.runner.scheduler_run_opts(place.name).resolve(dict(place.cfg))
        results = [*place.backend.checks(place.backend.options.from_cfg(options))]
        assert [result.line() for result in results if result.level != "ok"] == []

    @pytest.mark.scenario("missing tool says what to install")
    def test_a_missing_tool_is_named(self, place: Place) -> None:
        assert place.install in place.message_without_client()


class QueueContract(Contract):
    """The tests of a backend whose jobs can wait for slots of a machine."""

    @pytest.mark.scenario("queue for a machine")
    def test_a_job_waits_for_its_turn(self, place: Place) -> None:
        role = place.role("sh", "-c", "echo up; exec sleep 1000", replicas=2)
        first, second = (place.run(role, slots=len(os.sched_getaffinity(0))) for _ in range(2))
        place.until(lambda: place.log(first).count("up") == 2, "the first job", first)
        place.until(lambda: "are free" in place.status(second).msg, "the queue", second)
        status = place.status(second)
        assert status.state is AppState.PENDING and f"{first.rpartition('/')[2]} has " in status.msg, status
        place.runner.cancel(first)
        place.until(lambda: place.log(second).count("up") == 2, "the second job", second)
        place.cancel(second)
        place.wait(second, AppState.CANCELLED)


def _described(place: Place, handle: str) -> AppDef:
    """Return the app as ``describe`` has it, without the Runner's variables."""
    app = place.described(handle)
    for role in app.roles:
        role.env = {name: value for name, value in role.env.items() if not name.startswith("TORCHX_")}
    return app


def _attach(place: Place, handle: str, words: Sequence[str], address: str) -> int:
    """Run ``_CLIENT`` in a process of its own, and return the number of hosts (see ``Place.client``)."""
    (place.folder / "client.py").write_text(_CLIENT)
    command = [*words, sys.executable, "client.py", handle, address]
    env = {**os.environ, "TORCHX_PLUGINS_SOURCE": place.plugins_source}
    done = subprocess.run(command, cwd=place.folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{place.everything(handle)}"
    return int(done.stdout.splitlines()[-1])


def _command(place: Place, code: str, *args: str, **more: Any) -> Role:
    """Return a role of Python code that is a command with a host, and not that of a rank."""
    code = f"import os, sys, time\n{place.hears}\n{code}"
    return place.role("sh", "-c", 'exec "$0" "$@"', "python", "-c", code, *args, metadata=_WRAPPED, **more)


def _program(place: Place, text: str) -> str:
    return place.program(_NAMES + place.hears + textwrap.dedent(text))


def _read(place: Place, states: Mapping[str, AppState]) -> None:
    """Ask all that can be asked about apps, in a process that has not submitted them: everything stays as it is."""
    words = ("monarch", "ls", "-s", place.name)
    if is_listed := place.is_registered and not place.list_cfg:
        place.torchx(*words)  # starts the server that runs the tests' commands
    before: object = None

    def is_at_rest() -> bool:  # another job, which holds this one PENDING, may be starting
        nonlocal before
        earlier, before = before, place.facts()
        return before == earlier

    until(is_at_rest, "the place to come to rest", WITHIN, every=1.0)
    with place.requested_changes() as changes, Runner("torchx", place.schedulers) as reader:
        for handle, state in states.items():
            status = reader.status(handle)
            assert status is not None
            assert status.state is state or (state is AppState.PENDING and not status.is_terminal())
            assert reader.describe(handle) is not None
            for role in status.roles if state is not AppState.PENDING else ():
                list(reader.log_lines(handle, role.role, 0))

        def are_listed() -> bool:  # TorchX's slurm lists from Slurm's accounting, which learns of a job later
            return states.keys() <= {entry.app_handle for entry in reader.list(place.name, cfg=place.list_cfg)}

        until(are_listed, "the list", WITHIN, every=1.0)
    assert changes == []
    if is_listed:
        place.torchx(*words)
    until(lambda: place.facts() == before, "nothing but what was there before", WITHIN)


def _lose(place: Place, role: Role, lost: int) -> str:
    """Run ``_WAITS`` on two hosts, lose one of them, and wait for success after one restart; return the handle.

    A role with metadata has a spare host, which must be there before: the job ends if too few hosts are left.
    """
    cfg: dict[str, Any] = {"rejoin_timeout": 120} if place.backend.has_network else {}
    handle = place.run(role, **cfg)
    place.until(lambda: place.log(handle).count("attempt 0") == 4, "the first attempt", handle)
    if role.metadata:
        place.until(lambda: "spare: host 2 (" in place.log(handle), "the spare host", handle)
    place.tell("go")
    place.lose(handle, lost)
    status = place.wait(handle, AppState.SUCCEEDED)
    assert status.num_restarts == 1, place.everything(handle)
    return handle
