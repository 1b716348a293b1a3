# SPDX-License-Identifier: BSD-3-Clause
"""Stand-ins for the commands of PBS, LSF and HTCondor: ``commands.py NAME [arguments]``. Standard library only.

They take the options that the backends give, print what the systems' manuals show (OpenPBS 23.06, Spectrum LSF 10.1,
HTCondor 23), and run the tasks as processes of this machine, at once. The queue is the folder of BATCH_FOLDER: a file
for each task, as long as it waits or runs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SYSTEMS = {
    "pbs": ("qsub", "qstat", "qselect", "qdel"),
    "lsf": ("bsub", "bjobs", "bkill"),
    "htcondor": ("condor_submit", "condor_q", "condor_rm", "condor_vacate_job"),
}

_KILL_DELAY = 10
"""Seconds from SIGTERM to SIGKILL."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_FOLDER = Path(os.environ.get("BATCH_FOLDER", "/nonexistent"))


def install(folder: Path) -> None:
    """Write the commands into a folder."""
    folder.mkdir()
    for name in sum(SYSTEMS.values(), ()):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {name} "$@"\n')
        path.chmod(0o755)


# -- the queue ---------------------------------------------------------------------------------------------------------


def _path(task: str) -> Path:
    return _FOLDER / f"{task}.json"


def _write(task: str, record: dict[str, Any]) -> None:
    new = _FOLDER / f"{task}.{os.getpid()}"
    new.write_text(json.dumps(record))
    new.replace(_path(task))


def _tasks() -> dict[str, dict[str, Any]]:
    """Return what waits and runs, by ``JOB.NUMBER``, in order."""
    found = {}
    for path in _FOLDER.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # it has ended
            found[path.stem] = json.loads(path.read_text())
    return dict(sorted(found.items(), key=lambda item: [int(number) for number in item[0].split(".")]))


def _submit(
    name: str, commands: Sequence[Sequence[str]], outputs: Sequence[str], first: int, variable: str, held: str | bool
) -> int:
    """Queue a job with a task for each command, start it unless it is held, and return its number.

    ``held`` may be the state in which the job stays.
    """
    with open(_FOLDER / "last", "a+") as last:
        fcntl.flock(last, fcntl.LOCK_EX)
        last.seek(0)
        job = int(last.read() or "100") + 1
        last.truncate(0)
        last.write(str(job))
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # which the runners inherit
    for number, (command, output) in enumerate(zip(commands, outputs, strict=True), first):
        task = f"{job}.{number}"
        environ = {**os.environ, **({variable: str(number)} if variable else {})}
        record: dict[str, Any] = {"name": name, "command": list(command), "environ": environ, "output": output}
        if held:
            _write(task, {**record, "state": "held" if held is True else held, "runner": 0})
            continue
        runner = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, "run", task],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        record |= {"state": "queued", "runner": runner.pid}
        _write(task, record)
        assert runner.stdin is not None
        with runner.stdin:  # whose end lets it begin
            runner.stdin.write(json.dumps(record).encode())
    return job


def _run(task: str) -> None:
    """Run a task to its end, and again after each SIGUSR1, which takes it away from its machine."""
    record, again = json.loads(sys.stdin.read()), True

    def end(number: int, _: object) -> None:
        nonlocal again
        again = number == signal.SIGUSR1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        signal.alarm(_KILL_DELAY)

    def kill(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    while again:
        again = False
        with open(record["output"], "a") as output:
            child = subprocess.Popen(
                record["command"],
                env=record["environ"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS),
            )
        _write(task, {**record, "state": "running", "child": child.pid})
        for number, handler in ((signal.SIGTERM, end), (signal.SIGUSR1, end), (signal.SIGALRM, kill)):
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        child.wait()
        signal.alarm(0)
        _write(task, record)
    _path(task).unlink()


def lose_node(words: list[str]) -> None:
    """Take away the machine of a task that runs, with all that runs there; the system gives the job up."""
    (task,) = words
    record = _tasks()[task]
    os.kill(record["runner"], signal.SIGKILL)
    os.killpg(record["child"], signal.SIGKILL)
    _path(task).unlink()


def _signal(task: str, number: int) -> bool:
    """Signal a task, or remove one that is held; return whether it was there."""
    record = _tasks().get(task)
    if record is None:
        return False
    if record["runner"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(record["runner"], number)
    else:
        _path(task).unlink(missing_ok=True)
    return True


def _parser(*options: str) -> argparse.ArgumentParser:
    """Return a parser that ends the command if it gets anything but these options."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for option in options:
        parser.add_argument(option)
    return parser


# -- PBS ---------------------------------------------------------------------------------------------------------------

_PBS_ROW = "{:<30} {:<15} {:<15} {:<15} {:>8} {:>4} {:>5} {:>6} {:>5} {} {:>5}"
_PBS_STATES = {
    "held": ("H", "Job held by root on Fri Nov 27 05:00:00 2026"),
    "impossible": ("Q", "Can Never Run: Insufficient amount of resource: ncpus (R: 1000 A: 4 T: 4)"),
    "queued": ("Q", " -- "),
    "running": ("R", "Job run at Fri Nov 27 at 05:00 on (node1:ncpus=1)"),
}


def qsub(words: list[str]) -> None:
    options, command = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = _parser("-N", "-l", "-j", "-o", "-q", "-A")
    parser.add_argument("-V", action="store_true", required=True)
    parser.add_argument("-h", dest="held", action="store_true")
    given = parser.parse_args(options)
    held = "impossible" if "ncpus=1000" in given.l else given.held
    print(f"{_submit(given.N, [command], [given.o], 0, '', held)}.pbs")


def qstat(words: list[str]) -> None:
    assert words[0] == "-u" and words[2:] == ["-w", "-s"], words
    if tasks := _tasks():
        names = ("Job ID", "Username", "Queue", "Jobname", "SessID", "NDS", "TSK", "Memory", "Time", "S", "Time")
        print("\npbs: ", _PBS_ROW.format(*names), _PBS_ROW.format(*["-----"] * 9, "-", "-----"), sep="\n")
    for task, record in tasks.items():
        job, (state, comment) = task.partition(".")[0], _PBS_STATES[record["state"]]
        values = (f"{job}.pbs", words[1], "workq", record["name"][:15], "--", 1, 1, "--", "--", state, "--")
        print(_PBS_ROW.format(*values), f"   {comment}", sep="\n")


def qselect(words: list[str]) -> None:
    assert words[0] == "-N" and len(words) == 2, words
    for task, record in _tasks().items():
        if record["name"] == words[1]:
            print(f"{task.partition('.')[0]}.pbs")


def qdel(words: list[str]) -> None:
    unknown = [job for job in words if not _signal(f"{job}.0", signal.SIGTERM)]
    for job in unknown:
        print(f"qdel: Unknown Job Id {job}.pbs", file=sys.stderr)
    sys.exit(153 if unknown else 0)


# -- LSF ---------------------------------------------------------------------------------------------------------------

_LSF_STATES = {
    "held": ("PSUSP", "Job was suspended by the user while pending;"),
    "queued": ("PEND", "New job is waiting for scheduling;"),
    "running": ("RUN", ""),
}


def bsub(words: list[str]) -> None:
    parser = _parser("-J", "-o", "-q", "-n", "-gpu", "-P", "-W")
    parser.add_argument("-R", action="append")
    parser.add_argument("-H", dest="held", action="store_true")
    parser.add_argument("command")
    given = parser.parse_args(words)
    name, tasks = re.fullmatch(r"(.*)\[1-(\d+)\]", given.J).groups()  # type: ignore[union-attr]
    commands, outputs = [["/bin/sh", "-c", given.command]] * int(tasks), [given.o] * int(tasks)
    job = _submit(name, commands, outputs, 1, "LSB_JOBINDEX", given.held)
    print(f"Job <{job}> is submitted to default queue <normal>.")


def bjobs(words: list[str]) -> None:
    assert words == ["-json", "-o", "jobid jobindex stat job_name pend_reason"], words
    rows = []
    for task, record in _tasks().items():
        job, _, index = task.partition(".")
        stat, reason = _LSF_STATES[record["state"]]
        name = f"{record['name']}[{index}]"
        rows.append({"JOBID": job, "JOBINDEX": index, "STAT": stat, "JOB_NAME": name, "PEND_REASON": reason})
    if not rows:
        sys.exit("No unfinished job found")
    print(json.dumps({"COMMAND": "bjobs", "JOBS": len(rows), "RECORDS": rows}, indent=2))


def bkill(words: list[str]) -> None:
    finished = False
    for job in words:
        if _signal(job.replace("[", ".").rstrip("]"), signal.SIGTERM):
            print(f"Job <{job}> is being terminated")
        else:
            finished = True
            print(f"Job <{job}>: Job has already finished", file=sys.stderr)
    sys.exit(255 if finished else 0)


# -- HTCondor ----------------------------------------------------------------------------------------------------------

_HTCONDOR_STATES: dict[str, dict[str, object]] = {
    "held": {"JobStatus": 5, "HoldReason": "submitted on hold at user's request", "HoldReasonCode": 15},
    "queued": {"JobStatus": 1},
    "running": {"JobStatus": 2},
}


def _unquoted(text: str) -> list[str]:
    """Return arguments in HTCondor's new syntax."""
    assert text[0] == text[-1] == '"', text
    text = re.sub(r"\$\((\w+)\)", lambda macro: {"DOLLAR": "$"}[macro[1]], text[1:-1].replace('""', '"'))
    found = re.findall(r"'((?:[^']|'')*)'|(\S+)", text)
    return [quoted.replace("''", "'") or plain for quoted, plain in found]


def condor_submit(words: list[str]) -> None:
    assert words[0] == "-terse" and words[-2] == "-queue", words
    given, tasks = dict(word.split("=", 1) for word in words[1:-2]), int(words[-1])
    assert (given["transfer_executable"], given["should_transfer_files"], given["getenv"]) == ("False", "NO", "True")
    (variable,) = re.findall(r'"(\w+)=\$\(ProcId\)"', given["environment"])
    commands = [[given["executable"], *_unquoted(given["arguments"])]] * tasks
    outputs = [given["output"].replace("$(ProcId)", str(number)) for number in range(tasks)]
    job = _submit(given["batch_name"], commands, outputs, 0, variable, given.get("hold") == "True")
    print(f"{job}.0 - {job}.{tasks - 1}")


def condor_q(words: list[str]) -> None:
    assert words[:2] == ["-json", "-attributes"], words
    ads = []
    for task, record in _tasks().items():
        job, _, number = task.partition(".")
        ad = {"ClusterId": int(job), "ProcId": int(number), "JobBatchName": record["name"]}
        ads.append({**ad, **_HTCONDOR_STATES[record["state"]]})
    if ads:
        print(json.dumps(ads, indent=2))


def condor_rm(words: list[str]) -> None:
    _act(words, signal.SIGTERM, "marked for removal")


def condor_vacate_job(words: list[str]) -> None:
    _act(words, signal.SIGUSR1, "vacated")


def _act(words: Sequence[str], number: int, done: str) -> None:
    failed = False
    for word in words:
        tasks = [task for task in _tasks() if word in (task, task.partition(".")[0])]
        if not [task for task in tasks if _signal(task, number)]:
            failed = True
            print(f"Job {word} not found", file=sys.stderr)
        else:
            print(f"Job {word} {done}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        _run(sys.argv[2])
    else:
        command: Callable[[list[str]], None] = globals()[sys.argv[1]]
        command(sys.argv[2:])
