# SPDX-License-Identifier: BSD-3-Clause
"""Jobs that are slowed on purpose, and clean ones: ``python bench/slowness.py [--injected N] [--clean N] [--seed S]``.

Each job trains on the digits of scikit-learn (PROGRAMS), on two hosts with two ranks each, which stay for all jobs. The
steps of each rank differ at random, with a standard deviation of up to 20 %; those of clean jobs of up to 60 %, and
they take up to half a second. At a random moment one rank is slowed in a random way (KINDS) by a random factor, until
the job has given its verdict, or for half a minute. Printed are a line for each job, with the load of the machine, and
of all jobs: verdicts with the right rank and kind, the seconds from the onset to the verdict, and false alarms, which
are verdicts on clean jobs and those before the onset. A job whose steps did not become longer by MIN_EFFECT, such as by
a quota that a rank does not need, was not slow; it is counted apart. ``--cost N`` compares the steps per second of N
clean jobs with those of N jobs whose watch is off, by turns.

Kinds with a cgroup need root and version 1 of cgroups, a FUSE folder needs mfusepy and libfuse, programs of Hugging
Face and Lightning need these packages. Without them they are left out. On a machine that others use a clean job can be
slowed by them: the kind of a false alarm tells.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from words import spread

PROGRAM = """
import fcntl, mmap, os, random, socket, sys, threading, time
import torch, torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset
import torchx_monarch

FOLDER, PROGRAM, RANK = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
SECONDS, UNEVENNESS = map(float, sys.argv[3:])
torch.set_num_threads(1)
lock, block = threading.Lock(), mmap.mmap(-1, 1 << 16)
times = open(f"{FOLDER}/times", "w") if RANK == 0 else None

def hold(seconds):
    while True:
        with lock:
            time.sleep(seconds)
        time.sleep(0.001)

class Digits(Dataset):
    def __init__(self):
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
        self.open = None
    def __len__(self):
        return 1 << 18
    def __getitem__(self, index):
        wait(self)
        rows = torch.randint(len(self.images), (32,))
        return self.images[rows], self.labels[rows]

def wait(data):
    path = f"{FOLDER}/inject-{RANK}"
    if data.open is None:
        if not os.path.exists(path):
            return
        data.kind, seconds, place = open(path).read().split()
        data.seconds, data.open = float(seconds), place
        if data.kind == "flock":
            data.open = os.open(place, os.O_RDWR)
        elif data.kind in ("disk", "fuse"):
            data.open = os.open(place, os.O_RDONLY | os.O_DIRECT)
        elif data.kind == "server":
            data.open = socket.create_connection(("127.0.0.1", int(place)))
        elif data.kind == "lock":
            threading.Thread(target=hold, args=(data.seconds,), daemon=True).start()
    if data.kind == "sleep":
        time.sleep(data.seconds)
    elif data.kind == "fifo":
        with open(data.open, "rb", 0) as file:
            file.read(1)
    elif data.kind in ("disk", "fuse"):
        os.preadv(data.open, [block], len(block) * random.randrange(64))
    elif data.kind == "flock":
        fcntl.flock(data.open, fcntl.LOCK_EX)
        fcntl.flock(data.open, fcntl.LOCK_UN)
    elif data.kind == "server":
        data.open.sendall(b"x")
        data.open.recv(1)
    elif data.kind == "lock":
        lock.acquire()
        lock.release()

def ends_after(step, loss):
    # As if an accelerator computed: steps differ, as those do whose inputs have different lengths.
    time.sleep(SECONDS * random.lognormvariate(-UNEVENNESS * UNEVENNESS / 2, UNEVENNESS))
    if PROGRAM != "silent":
        torchx_monarch.progress(step, loss=loss)
    if RANK == 0:
        print(time.time(), file=times, flush=True)
    end = torch.tensor([float(os.path.exists(f"{FOLDER}/end"))])
    dist.all_reduce(end)
    return bool(end.item())

def own_loop(model):
    dist.init_process_group("gloo")
    if PROGRAM == "fsdp2":
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, (images, labels) in enumerate(DataLoader(Digits(), batch_size=None)):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if ends_after(step, loss.item()):
            break

def trainer(model):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model
        def forward(self, images, labels):
            return {"loss": torch.nn.functional.cross_entropy(self.model(images), labels)}
    class Ends(TrainerCallback):
        def on_step_end(self, arguments, state, control, **more):
            control.should_training_stop = ends_after(state.global_step - 1, 0.0)
    options = {"per_device_train_batch_size": 1, "use_cpu": True, "ddp_backend": "gloo", "remove_unused_columns": False}
    options |= {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    collate = lambda rows: dict(zip(("images", "labels"), rows[0]))
    arguments = TrainingArguments(FOLDER, **options)
    Trainer(Model(), arguments, data_collator=collate, train_dataset=Digits(), callbacks=[Ends()]).train()

def lightning_loop(model):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model
        def training_step(self, batch, number):
            return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())
    class Ends(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, number):
            trainer.should_stop = ends_after(number, float(outputs["loss"]))
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    options = {"devices": local, "num_nodes": int(os.environ["WORLD_SIZE"]) // local, "strategy": "ddp"}
    options |= {"min_epochs": 0, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False}
    runs = lightning.Trainer(callbacks=[Ends()], use_distributed_sampler=False, **options)
    runs.fit(Module(), DataLoader(Digits(), batch_size=None))

layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)]
{"trainer": trainer, "lightning": lightning_loop}.get(PROGRAM, own_loop)(torch.nn.Sequential(*layers))
"""

PROGRAMS = {
    "digits": "import torch",
    "fsdp2": "from torch.distributed.fsdp import fully_shard",
    "silent": "import torch",
    "trainer": "from transformers import Trainer, TrainerCallback, TrainingArguments",
    "lightning": "import lightning",
}
"""DistributedDataParallel, FSDP2, a program that reports no steps, and loops of libraries; and what each imports."""

KINDS = {
    "sleep": "input",
    "fifo": "file",
    "flock": "lock",
    "server": "network",
    "lock": "lock",
    "disk": "file",
    "fuse": "file",
    "cgroup": "processor",
    "neighbour": "processor",
    "pulses": "processor",
}
"""How a rank is slowed, and the kind that is right: its input sleeps, reads a slow pipe, waits for the lock of a file,
for a server that answers slowly, for a thread's lock, or for a disk or a FUSE folder that reads slowly; or its process
has too little of a processor by a quota of its cgroup, by a busy process in its cgroup, or by SIGSTOP and SIGCONT."""

CGROUPS = {"cgroup": Path("/sys/fs/cgroup/cpu"), "disk": Path("/sys/fs/cgroup/blkio")}
CGROUPS["neighbour"] = CGROUPS["cgroup"]
FUSE = """
import sys, time, mfusepy

class Slow(mfusepy.Operations):
    def getattr(self, path, fh=None):
        return {"st_mode": 0o40755 if path == "/" else 0o100644, "st_nlink": 1, "st_size": 1 << 22}
    def read(self, path, size, offset, fh):
        time.sleep(float(sys.argv[2]))
        return bytes(size)

mfusepy.FUSE(Slow(), sys.argv[1], foreground=True)
"""
"""A folder whose files are read slowly."""

HOSTS, NPROC = 2, 2
PATIENCE = 30.0
MIN_EFFECT = 1.25
"""How many times as long as before a step takes if others wait for a rank in a fifth of the time, which is slow."""


@contextmanager
def kept_hosts(environ: dict[str, str]) -> Iterator[dict[str, str]]:
    """Have hosts for all jobs; yield the environment for commands on them, with their handle, and the programs."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sl") as folder:
        environ = {**os.environ, **environ, "MONARCH_STATE_DIR": f"{folder}/state", "TMPDIR": folder}
        words = ["torchx", "run", "-s", "monarch_local", "monarch.hosts", "-j", f"{HOSTS}x{NPROC}"]
        shown = subprocess.run(words, env=environ, capture_output=True, text=True, cwd=folder, check=True)
        environ.update(HOSTS=shown.stdout.split()[0], PROGRAMS=folder)
        for name, imports in PROGRAMS.items():  # at one place for all jobs, which share what they import
            Path(folder, f"train_{name}.py").write_text(f"{imports}\n{PROGRAM}")
        try:
            yield environ
        finally:
            subprocess.run(["torchx", "cancel", environ["HOSTS"]], env=environ, capture_output=True, check=True)


class Job:
    """A job of the program, on hosts that are there."""

    def __init__(
        self, folder: Path, program: str, environ: dict[str, str], seconds: float = 0.03, unevenness: float = 0.0
    ) -> None:
        self.folder = folder
        self._hosts = Path(environ["MONARCH_STATE_DIR"], "apps", environ["HOSTS"].rpartition("/")[2])
        self._since = time.time()
        words = ["torchx", "run", "-s", "monarch_local", "-cfg", f"on={environ['HOSTS']}", "--wait", "monarch.spmd"]
        words += ["-j", f"{HOSTS}x{NPROC}", f"{environ['PROGRAMS']}/train_{program}.py", str(folder), program]
        words += [str(seconds), str(unevenness)]
        with open(folder / "output", "w") as output:
            self.process = subprocess.Popen(words, env=environ, stdout=output, stderr=output, cwd=environ["PROGRAMS"])

    def verdicts(self) -> list[dict[str, Any]]:
        events = map(json.loads, (self._hosts / "events.jsonl").read_text().splitlines())
        return [event for event in events if event["kind"] == "slow" and event["time"] > self._since]

    def pid(self, rank: int) -> int:
        """Return the process of a rank in the newest attempt on the hosts."""
        newest = max((self._hosts / "attempts").iterdir(), key=lambda path: path.name)
        hosts = [host for line in newest.read_text().splitlines() for host in json.loads(line).get("hosts", ())]
        return int(next(host["pids"] for host in hosts if host["first_rank"] == rank - rank % NPROC)[rank % NPROC])

    def times(self) -> list[float]:
        """Return when steps were done."""
        path = self.folder / "times"
        return [float(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def step(self) -> float:
        """Return the seconds of a step, once some were done."""
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and self.process.poll() is None:
            if len(times := self.times()) > 40:
                return (times[40] - times[20]) / 20
            time.sleep(0.2)
        sys.exit((self.folder / "output").read_text())

    def end(self) -> None:
        """End the program."""
        (self.folder / "end").touch()
        if self.process.wait(120):
            sys.exit((self.folder / "output").read_text())


def pace(times: list[float], since: float, until: float) -> float:
    """Return the mean seconds of the steps that were done in a span of time; infinite if there were too few."""
    done = [at for at in times if since <= at <= until]
    return (done[-1] - done[0]) / (len(done) - 1) if len(done) > 1 else math.inf


@contextmanager
def slowed(  # noqa: C901 - one small function for each way
    job: Job, kind: str, rank: int, step: float, factor: float
) -> Iterator[None]:
    """Slow a rank by a factor of the seconds of a step in each step."""
    seconds = step * factor
    ended, place = threading.Event(), str(job.folder / "place")

    def repeat(work: Callable[[], None]) -> None:
        def run() -> None:
            while not ended.is_set():
                work()

        threading.Thread(target=run, daemon=True).start()

    def fill() -> None:
        with suppress(BrokenPipeError), open(place, "wb", 0) as file:  # which waits for the reader
            time.sleep(seconds)
            file.write(b"x")
        time.sleep(0.005)  # until the reader has closed it

    def hold() -> None:
        with open(place, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(seconds)
        time.sleep(0.002)

    def pulse() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        time.sleep(step)

    def answer() -> None:
        with suppress(ConnectionError):
            while (request := connection.recv(1)) and not ended.is_set():
                time.sleep(seconds)
                connection.sendall(request)

    pid, cgroup = job.pid(rank), CGROUPS.get(kind, Path()) / f"slowness-{os.getpid()}"
    started: list[subprocess.Popen[bytes]] = []
    if kind == "fifo":
        os.mkfifo(place)
        repeat(fill)
    elif kind == "flock":
        Path(place).touch()
        repeat(hold)
    elif kind == "server":
        server = socket.create_server(("127.0.0.1", 0))
        place = str(server.getsockname()[1])
    elif kind == "pulses":
        repeat(pulse)
    elif kind == "fuse":
        os.mkdir(place)
        command = [sys.executable, "-c", FUSE, place, str(seconds)]
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        while not os.path.ismount(place):
            time.sleep(0.05)
        place = f"{place}/data"
    elif kind == "disk":
        Path(place).write_bytes(os.urandom(1 << 22))
        os.sync()
        cgroup.mkdir()
        device = os.stat(place).st_dev
        # Linux keeps no limit of a few operations a second.
        limit = f"{os.major(device)}:{os.minor(device)} {round((1 << 16) / (step + seconds))}"
        (cgroup / "blkio.throttle.read_bps_device").write_text(limit)
        (cgroup / "cgroup.procs").write_text(str(pid))
    elif kind in ("cgroup", "neighbour"):
        cgroup.mkdir()
        used = _processor_seconds(pid)
        time.sleep(2.0)
        used = (_processor_seconds(pid) - used) / 2.0
        quota = 100000 * used / (1 + factor)
        if kind == "neighbour":  # which has as much of it as the rank
            quota *= 2
            started.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            (cgroup / "cgroup.procs").write_text(str(started[0].pid))
        (cgroup / "cpu.cfs_quota_us").write_text(str(max(1000, int(quota))))
        (cgroup / "cgroup.procs").write_text(str(pid))
    if KINDS[kind] != "processor":
        aside = job.folder / "aside"
        aside.write_text(f"{kind} {seconds} {place}")
        aside.rename(job.folder / f"inject-{rank}")
    if kind == "server":
        connection = server.accept()[0]
        threading.Thread(target=answer, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        for process in started:  # a FUSE folder is unmounted
            process.terminate()
            process.wait()
        if kind == "pulses":
            time.sleep(2 * step + seconds)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        elif kind in CGROUPS:
            with suppress(ProcessLookupError):
                (CGROUPS[kind] / "cgroup.procs").write_text(str(pid))
            cgroup.rmdir()
        (job.folder / f"inject-{rank}").unlink(missing_ok=True)


def _processor_seconds(pid: int) -> float:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / 100


def trial(
    choice: random.Random, injects: bool, programs: list[str], kinds: list[str], runs: float, environ: dict[str, str]
) -> dict[str, Any]:
    """Run a job; return what has been injected, and the first verdict."""
    program, kind, rank = choice.choice(programs), choice.choice(kinds), choice.randrange(HOSTS * NPROC)
    onset, factor = choice.uniform(5, 15), choice.uniform(0.5, 2.5)
    seconds = 0.03 if injects else 0.03 * 16 ** choice.random()
    unevenness = choice.uniform(0.0, 0.2 if injects else 0.6)
    told: dict[str, Any] = {"program": program, "kind": kind if injects else "", "rank": rank}
    told["unevenness"] = round(unevenness, 2)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sl") as folder:
        job = Job(Path(folder), program, environ, seconds, unevenness)
        step = job.step()
        time.sleep(onset if injects else runs)
        at, verdicts = time.time(), []
        if injects:
            with slowed(job, kind, rank, step, factor):
                at = time.time()
                while not (verdicts := job.verdicts()) and time.time() < at + PATIENCE:
                    time.sleep(0.3)
                effect = pace(job.times(), at, time.time()) / pace(job.times(), at - onset, at)
                job.process.send_signal(signal.SIGINT)
                job.process.wait(120)
                told |= {"factor": round(factor, 2), "effect": round(min(effect, 99.0), 2)}
        else:
            job.end()
            verdicts = job.verdicts()
    told |= {"load": round(os.getloadavg()[0], 1), "step": round(step, 3)}
    for event in verdicts[:1]:
        told.update(after=round(event["time"] - at, 1), found=event["slowness"], message=event["message"])
    return told


def by_turns(injected: int, clean: int) -> list[bool]:
    """Return for each job whether it is slowed: both sorts come by turns, as the load of the machine changes."""
    places = [(at / count, injects) for injects, count in ((True, injected), (False, clean)) for at in range(count)]
    return [injects for _, injects in sorted(places)]


def is_right(told: dict[str, Any], *, kind: bool = True) -> bool:
    found = told.get("found")
    if found is None or told["after"] < 0 or found["ranks"] != [told["rank"]]:
        return False
    return not kind or found["kind"] == KINDS[told["kind"]]


def cost(jobs: int) -> None:
    """Print the steps per second with the watch and without it."""
    speeds: dict[str, list[float]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sl") as customized:
        patch = "import torchx_monarch.controller.slow_watch as watch\nwatch.FIRST_PACE = 1e9\n"
        Path(customized, "sitecustomize.py").write_text(patch)
        with kept_hosts({}) as on, kept_hosts({"PYTHONPATH": customized}) as off:
            for _ in range(jobs):
                for variant, environ in (("on", on), ("off", off)):
                    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sl") as folder:
                        job = Job(Path(folder), "digits", environ)
                        job.step()
                        time.sleep(30)
                        now = time.time()
                        speeds[variant].append(1 / pace(job.times(), now - 20, now))
                        job.end()
    for variant, found in speeds.items():
        print(f"watch {variant}: {spread(found, 2)} steps a second")
    ratio = statistics.median(speeds["off"]) / statistics.median(speeds["on"])
    print(f"slower by {100 * (ratio - 1):.2f} %")


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background ignores
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the hosts end, too
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--injected", type=int, default=20)
    parser.add_argument("--clean", type=int, default=20)
    parser.add_argument("--clean-seconds", type=float, default=30.0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--program", choices=PROGRAMS, action="append")
    parser.add_argument("--cost", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    can = {kind: os.access(cgroup / "cgroup.procs", os.W_OK) for kind, cgroup in CGROUPS.items()}
    can["fuse"] = importlib.util.find_spec("mfusepy") is not None and os.access("/dev/fuse", os.W_OK)
    kinds = args.kind or [kind for kind in KINDS if can.get(kind, True)]
    programs = args.program or [name for name, text in PROGRAMS.items() if importlib.util.find_spec(text.split()[1])]
    choice, told = random.Random(args.seed), list[dict[str, Any]]()
    with kept_hosts({}) as environ:
        for injects in by_turns(args.injected, args.clean):
            told.append(trial(random.Random(choice.random()), injects, programs, kinds, args.clean_seconds, environ))
            print(json.dumps(told[-1]), flush=True)
    injected = [job for job in told if job["kind"] and job["effect"] >= MIN_EFFECT]
    if injected:
        within = [job for job in injected if is_right(job) and job["after"] <= 15]
        ranks = [job for job in injected if is_right(job, kind=False)]
        print(
            f"injected {len(injected)}: right rank {len(ranks)}, rank and kind {sum(map(is_right, injected))}, "
            f"of these within 15 s {len(within)}; before the onset {sum(job.get('after', 0) < 0 for job in injected)}; "
            f"not slowed {sum(bool(job['kind']) for job in told) - len(injected)}"
        )
        if ranks:
            print(f"seconds to the verdict: {spread([job['after'] for job in ranks], 1)}")
    if clean := [job for job in told if not job["kind"]]:
        print(f"clean {len(clean)}: false alarms {sum('found' in job for job in clean)}")
    if args.cost:
        cost(args.cost)


if __name__ == "__main__":
    main()
