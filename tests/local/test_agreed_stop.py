# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that use ``steps`` end at one step and save, however the job is stopped. Hosts kill those that do not come."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppState, Role

from tests.fork_server import run_torchx
from tests.local.detached import Detached
from tests.local.hosts import NO_PRELOAD, Hosts, torchrun
from tests.waits import WITHIN, until
from torchx_monarch.cli.jobs import opened_job
from torchx_monarch.cli.status import render
from torchx_monarch.insight import events

#: Ranks of unequal speed; each begins a step only when all have begun the one before, as if they reduced gradients.
TRAIN = """
import torchx_monarch as tm
folder, world = sys.argv[1], int(os.environ["WORLD_SIZE"])
saved = f"{folder}/saved"
start = int(open(saved).read()) if os.path.exists(saved) else 0
for step in tm.steps(range(start, 1_000_000)):
    time.sleep(0.01 * (1 + rank % 3))
    open(f"{folder}/{attempt}.{step}.{rank}", "w").close()
    while not all(os.path.exists(f"{folder}/{attempt}.{step}.{other}") for other in range(world)):
        time.sleep(0.001)
    if step == start + 5:
        print("running pid", os.getpid(), flush=True)
if rank == 0:
    open(saved, "w").write(str(step + 1))
print(f"saved {rank} {step} {tm.time_left() is not None}", flush=True)
"""

#: Loops of their own, which the callbacks of the page end. ``Stop`` is that of the page.
FRAMEWORKS = {
    "transformers": """
import itertools, torch, transformers, torchx_monarch as tm
{callback}
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, labels=None):
        print("running", flush=True)
        time.sleep(0.01)
        return {{"loss": (self.layer(x) - labels).pow(2).mean()}}
options = dict(output_dir=sys.argv[1], report_to=[], use_cpu=True, save_strategy="no", num_train_epochs=1000)
rows = [{{"x": torch.rand(2), "labels": torch.rand(1)}} for _ in range(1000)]
arguments = transformers.TrainingArguments(**options)
trainer = transformers.Trainer(Model(), arguments, train_dataset=rows, callbacks=[Stop()])
trainer.train()
assert os.path.exists(f"{{sys.argv[1]}}/checkpoint-{{trainer.state.global_step}}")
print(f"saved {{rank}} {{trainer.state.global_step - 1}} True", flush=True)
""",
    "lightning": """
import itertools, lightning, torch, torchx_monarch as tm
{callback}
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        print("running", flush=True)
        time.sleep(0.01)
        return self.layer(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
options = dict(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = lightning.Trainer(max_epochs=1000, callbacks=[Stop()], **options)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.rand(1000, 2)))
print(f"saved {{rank}} {{trainer.global_step - 1}} True", flush=True)
""",
}

SAVED = re.compile(r"saved (\d) (\d+) True")


@pytest.fixture
def train(script: Callable[[str], str], tmp_path: Path) -> list[str]:
    """The program, and the folder where its ranks meet."""
    (tmp_path / "steps").mkdir()
    return [script(TRAIN), str(tmp_path / "steps")]


def running(hosts: Hosts, ranks: int) -> Hosts:
    until(lambda: "".join(map(hosts.out, hosts.processes)).count("running") == ranks, "the ranks")
    return hosts


def saved_at(text: str, ranks: int) -> int:
    """Return the step at which all ranks have saved."""
    found = {int(rank): int(step) for rank, step in SAVED.findall(text)}
    assert sorted(found) == list(range(ranks)) and len(set(found.values())) == 1, text
    return found[0]


_ALSO = pytest.mark.nightly("between the two that always run")
_ANOTHER = pytest.mark.nightly("another way to the same wait")


@pytest.mark.parametrize(
    ("stopped", "also_ranks"),
    [
        pytest.param([0], False, marks=_ALSO),
        ([1], False),
        pytest.param([0, 1], False, marks=_ALSO),
        ([0, 1], True),
    ],
)
def test_a_signal_to_some_hosts_or_all(folder: Path, train: list[str], stopped: list[int], also_ranks: bool) -> None:
    """Slurm sends it to all processes of a job that it takes away."""
    hosts = running(Hosts(folder, torchrun(*train, nnodes=2), replicas=2, options=NO_PRELOAD).start(), 4)
    for pid in hosts.rank_pids() if also_ranks else ():
        os.kill(pid, signal.SIGTERM)
    for replica in stopped:
        hosts.processes[replica].terminate()
    assert hosts.wait() == [143, 143]
    step = saved_at(hosts.out(0) + hosts.out(1), 4)
    assert f"received SIGTERM; stopped at step {step:,}, saved" in hosts.err().splitlines()[-1], hosts.err()


@pytest.mark.nightly("minutes: 200 stops, of which two are tried every time")
def test_two_hundred_stops(folder: Path, train: list[str]) -> None:
    for number in range(200):
        place = folder / str(number)
        place.mkdir()
        hosts = running(Hosts(place, torchrun(*train, nnodes=2), replicas=2, options=NO_PRELOAD).start(), 4)
        hosts.processes[number % 2].terminate()
        assert hosts.wait() == [143, 143]
        saved_at(hosts.out(0) + hosts.out(1), 4)
        for file in Path(train[1]).iterdir():
            file.unlink()


@pytest.mark.nightly("up to half a minute of imports, of packages that the tests do not install")
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_loops_of_frameworks_end_by_a_callback(
    folder: Path, tmp_path: Path, script: Callable[[str], str], name: str
) -> None:
    pytest.importorskip(name)
    page = Path(__file__).parents[2] / "docs" / "how_to" / "stop.md"
    callbacks = page.read_text().rpartition("```python\n")[2].partition("```")[0].split("\n\n\n")
    (callback,) = (text for text in callbacks if f"{name}." in text)
    program = script(FRAMEWORKS[name].format(callback=callback))
    hosts = Hosts(folder, torchrun(program, str(tmp_path)), options=("--grace", "60", "--preload", "")).start()
    until(lambda: hosts.out().count("running") > 20, "steps")
    hosts.processes[0].terminate()
    assert hosts.wait() == [143]
    step = saved_at(hosts.out(), 2)
    assert f"stopped at step {step:,}, saved" in hosts.err().splitlines()[-1], hosts.err()


def test_a_rank_that_does_not_come(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        import torchx_monarch as tm
        for step in tm.steps(range(1_000_000)):
            time.sleep(0.001)
            if step == 8 - rank:
                print("running", flush=True)
                time.sleep(1000)  # rank 0 as in a collective, which the other has not called
    """)
    options = ("--grace", "2", "--preload", "")
    hosts = running(Hosts(folder, torchrun(path), options=options).start(), 2)
    hosts.processes[0].terminate()
    assert hosts.wait() == [143]
    assert "; not saved: rank 1 did not come to the step within 1.6 s" in hosts.err().splitlines()[-1], hosts.err()


def test_a_rank_that_fails_to_save(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        import torchx_monarch as tm
        for step in tm.steps(range(1_000_000)):
            time.sleep(0.001)
            if step == 5:
                print("running", flush=True)
        assert rank, "no space"
    """)
    hosts = running(Hosts(folder, torchrun(path), options=NO_PRELOAD).start(), 2)
    hosts.processes[0].terminate()
    assert hosts.wait() == [143]
    assert "; not saved: rank 0 (" in hosts.err().splitlines()[-1] and "no space" in hosts.err().splitlines()[-1]


def test_ranks_in_a_loop_end_at_once_when_another_has_failed(folder: Path, script: Callable[[str], str]) -> None:
    """Also one that waits in a call, where Python handles no signal: nobody waits for the end of the grace period."""
    path = script("""
        import torchx_monarch as tm
        for step in tm.steps(range(10)):
            if rank == 1:
                print("running", flush=True)
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
                time.sleep(100000)
            while not os.path.exists(sys.argv[0] + ".go"):
                time.sleep(0.001)
            sys.exit(3)
    """)
    hosts = running(Hosts(folder, torchrun(path), options=("--grace", "100000", "--preload", "")).start(), 1)
    Path(f"{path}.go").touch()
    assert hosts.wait() == [3]
    ended = next(event for event in events.read_detailed(folder / "events.jsonl") if event["kind"] == "attempt_end")
    assert {rank["rank"]: rank["code"] for rank in ended["exits"]} == {0: 3, 1: -signal.SIGTERM}


def test_a_job_whose_steps_are_done_has_succeeded(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        import torchx_monarch as tm
        for step in tm.steps(range(2)):
            pass
        print("running", flush=True)
        while not os.path.exists(sys.argv[0] + ".go"):
            time.sleep(0.001)
    """)
    hosts = running(Hosts(folder, torchrun(path), options=NO_PRELOAD).start(), 2)
    hosts.processes[0].terminate()
    until(lambda: "the ranks end at one step" in hosts.err(), "the stop")
    Path(f"{path}.go").touch()
    assert hosts.wait() == [0] and "SUCCEEDED" in hosts.err()


def run(apps: Detached, train: list[str], **cfg: Any) -> tuple[str, Callable[[], str]]:
    """Run the program on two hosts; its id, and what returns its output."""
    command = torchrun(*train, nnodes=2)
    role = Role("r", "", entrypoint=command[0], args=command[1:], num_replicas=2, max_retries=int(bool(cfg)))
    app_id = apps.run(role, preload="none", **cfg)

    def output() -> str:
        return "\n".join(line for replica in (0, 1) for line in apps.log(app_id, k=replica))

    until(lambda: output().count("running") >= 4, "the ranks")
    return app_id, output


def test_cancel_save(apps: Detached, train: list[str]) -> None:
    app_id, output = run(apps, train)
    done = run_torchx("cancel", "--save", apps.handle(app_id), "--address", "unix:/nonexistent")
    assert "not cancelled: /nonexistent: No such file or directory" in done.stderr, done.stderr
    for command, *options in (["status"], ["explain"], ["report", "-o", "-"]):
        done = run_torchx("monarch", command, apps.handle(app_id), *options, "--address", "unix:/nonexistent")
        assert done.stderr == "[monarch] /nonexistent: No such file or directory\n" and not done.returncode
    done = run_torchx("cancel", "--save", apps.handle(app_id))
    status = apps.wait(app_id)
    step = saved_at(output(), 4)
    said = f"cancelled; the job was stopped by its client; stopped at step {step:,}, saved"
    assert (status.state, status.msg) == (AppState.CANCELLED, said)
    assert done.stderr.endswith(f"{apps.handle(app_id)} is {said}\n") and done.returncode == 0


def test_cancel_save_when_all_steps_are_done(apps: Detached, script: Callable[[str], str]) -> None:
    path = script("""
        import torchx_monarch as tm
        list(tm.steps(range(2)))
        print("running", flush=True)
        while not os.path.exists(sys.argv[0] + ".go"):
            time.sleep(0.001)
    """)
    command = torchrun(path)
    app_id = apps.run(Role("r", "", entrypoint=command[0], args=command[1:]), preload="none")
    until(lambda: "\n".join(apps.log(app_id)).count("running") == 2, "the ranks")
    words = [sys.executable, "-m", "torchx.cli.main", "cancel", "--save", apps.handle(app_id)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as cancel:
        until(lambda: "the ranks end at one step" in "\n".join(apps.log(app_id)), "the request")
        Path(f"{path}.go").touch()
        assert f"{apps.handle(app_id)} has ended by itself: all 2 ranks ended with code 0" in cancel.communicate()[1]
    assert apps.wait(app_id).state is AppState.SUCCEEDED


def test_cancel_save_without_steps(apps: Detached, script: Callable[[str], str]) -> None:
    command = torchrun(script("print('running', flush=True)\ntime.sleep(1000)"))
    app_id = apps.run(Role("r", "", entrypoint=command[0], args=command[1:]), preload="none")
    until(lambda: "\n".join(apps.log(app_id)).count("running") == 2, "the ranks")
    done = run_torchx("cancel", "--save", apps.handle(app_id))
    said = "cancelled; the job was stopped by its client; not saved: its program uses no torchx_monarch.steps"
    assert done.stderr == f"{apps.handle(app_id)} is {said}\n" and done.returncode == 0
    assert apps.wait(app_id).state is AppState.CANCELLED


@pytest.mark.parametrize("is_interrupted", [True, pytest.param(False, marks=_ANOTHER)])
def test_cancel_while_another_client_saves(
    apps: Detached, script: Callable[[str], str], *, is_interrupted: bool
) -> None:
    path = script("""
        import torchx_monarch as tm
        for step in tm.steps(range(2)):
            print("running", flush=True)
            time.sleep(1000)
    """)
    command = torchrun(path)
    app_id = apps.run(Role("r", "", entrypoint=command[0], args=command[1:]), preload="none", grace=30)
    until(lambda: "\n".join(apps.log(app_id)).count("running") == 2, "the ranks")
    words = [sys.executable, "-m", "torchx.cli.main", "cancel", "--save", apps.handle(app_id)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as saving:
        until(lambda: "the ranks end at one step" in "\n".join(apps.log(app_id)), "the request")
        if is_interrupted:
            saving.send_signal(signal.SIGINT)
            assert saving.wait(WITHIN) == 130
        apps.scheduler.cancel(app_id)
        assert apps.wait(app_id).state is AppState.CANCELLED
        said = saving.communicate(timeout=WITHIN)[1]
    assert is_interrupted or "not saved" in said and saving.returncode == 0, said
    assert "SIGKILL" not in "\n".join(apps.log(app_id))


@pytest.mark.nightly("the same as a signal to all hosts, by the supervisor")
def test_a_machine_that_shuts_down(apps: Detached, train: list[str]) -> None:
    app_id, output = run(apps, train)
    os.kill(apps.owner(app_id).supervisor.pid, signal.SIGTERM)
    assert apps.wait(app_id).state is AppState.CANCELLED
    saved_at(output(), 4)


def test_cancel_does_not_save(apps: Detached, train: list[str]) -> None:
    app_id, output = run(apps, train)
    apps.scheduler.cancel(app_id)
    assert apps.wait(app_id).state is AppState.CANCELLED
    assert "saved" not in output()


def test_a_job_that_stops_after_a_time_goes_on_with_retries(apps: Detached, train: list[str]) -> None:
    app_id, output = run(apps, train, stop_after="2s")
    status = apps.wait(app_id)
    assert (status.state, status.num_restarts) == (AppState.FAILED, 1)
    assert re.search(r": 2 s have passed \(stop_after\); stopped at step [\d,]+, saved$", status.msg), status.msg
    first, last = sorted({int(step) for _, step in SAVED.findall(output())})
    assert len(SAVED.findall(output())) == 8 and first < last
    with opened_job(apps.handle(app_id)) as job:
        account = job.read().status.account
    assert account is not None and (account.steps, account.redone) == (last + 1, 0)
    assert account.goodput is not None and 0 < account.goodput < 1


def test_the_account_of_a_restart(apps: Detached, script: Callable[[str], str]) -> None:
    path = script("""
        import torchx_monarch as tm
        last = tm.last_checkpoint()
        start = int((last / "step").read_text()) + 1 if last else 0
        for step in tm.steps(range(start, 20)):
            time.sleep(0.01)
            if step == 14 and not attempt:
                sys.exit(3)
            if step % 10 == 9:
                with tm.checkpoint(step) as folder:
                    (folder / "step").write_text(str(step))
    """)
    command = torchrun(path, nproc=1, restarts=1)
    app_id = apps.run(Role("r", "", entrypoint=command[0], args=command[1:]), preload="none")
    assert apps.wait(app_id).state is AppState.SUCCEEDED
    with opened_job(apps.handle(app_id)) as job:
        status = job.read().status
    account = status.account
    assert account is not None and (account.steps, account.redone) == (20, 4)  # 10 to 13
    (since,) = account.since_checkpoint
    assert since is not None and 0.04 <= since < WITHIN
    assert {"start", "restart", "redone"} <= account.lost.keys() and "20 done, 4 redone" in render(status)
