# SPDX-License-Identifier: BSD-3-Clause
"""What Monarch's documentation does with a job, as one program (docs/source/api/monarch.job.rst, docstrings)."""

from __future__ import annotations

from typing import Any

DOCUMENTED = """
import json, os, sys
from monarch.actor import Actor, current_rank, endpoint
from monarch.job import ProcessJob, exec_command, job_load, job_loads
from torchx_monarch import MonarchJob

class HelloActor(Actor):
    def __init__(self, word):
        self.word = word
    @endpoint
    def hello(self):
        print("Hello from Monarch", flush=True)
        return self.word, current_rank().rank, os.getpid()

def values(mesh):
    return [value for _, value in mesh]

job = {JOB}
first = job.state()
trainers = first.trainers.spawn_procs(per_host={"gpus": 2})
answers = values(trainers.spawn("hello", HelloActor, "t").hello.call().get(timeout=240))
try:
    first.nothing
except AttributeError as error:
    unknown = str(error)

again = job_load(".monarch/job_state.pkl")
copied = job_loads(job.dumps())
loaders = again.state().dataloaders
dataloaders = loaders.spawn_procs().spawn("hello", HelloActor, "d").hello.call().get(timeout=240)
code = exec_command(first.trainers, ["bash", "-c", "exit $((4 + MONARCH_RANK_hosts))"]).get(timeout=240)
same = job.apply_id == again.apply_id == copied.apply_id
alive = [job.active, again.can_run(job), again.can_run({OTHER})]
job.kill()
{SETTLE}
print(json.dumps({
    "sizes": [trainers.sizes, loaders.sizes],
    "answers": sorted((word, rank) for word, rank, _ in answers),
    "processes": len({pid for *_, pid in answers}),
    "dataloaders": [(word, rank) for word, rank, _ in values(dataloaders)],
    "unknown": unknown, "code": code, "same": same, "alive": alive, "dead": [job.active, again.can_run(job)],
}))
"""
"""{JOB} and {OTHER} are constructors: of the job, and of another with fewer hosts. {SETTLE} is empty or SETTLE."""

SETTLE = """
import time
until = time.monotonic() + 60
while again.can_run(job) and time.monotonic() < until:
    time.sleep(0.05)
"""
"""Waits for the processes of Monarch's own ProcessJob, whose ``kill`` returns before they have ended."""

EXPECTED: dict[str, Any] = {
    "sizes": [{"hosts": 2, "gpus": 2}, {"hosts": 1}],
    "answers": [["t", rank] for rank in range(4)],
    "processes": 4,
    "dataloaders": [["d", 0]],
    "unknown": "'nothing' is not a valid host mesh name. Available names: dataloaders, trainers",
    "code": 5,
    "same": True,
    "alive": [True, True, False],
    "dead": [False, False],
}
"""What it prints, whatever kind of job it has."""

CONTROLLER = """
import json, os, sys
from monarch.actor import Actor, current_rank, endpoint
from torchx_monarch import this_job

class Host(Actor):
    @endpoint
    def place(self):
        return current_rank().rank, os.environ["WHO"], "MONARCH_CREDENTIALS" in os.environ

if __name__ == "__main__":
    state = this_job().state()
    for name in ("trainers", "loaders"):
        procs = getattr(state, name).spawn_procs(per_host={"gpus": 1})
        places = procs.spawn("host", Host).place.call().get(timeout=240)
        print(name, sorted(place for _, place in places), flush=True)
    sys.exit(int(sys.argv[1]))
"""
"""What a script of monarch.controller prints of the meshes trainers and loaders, and its exit code."""
