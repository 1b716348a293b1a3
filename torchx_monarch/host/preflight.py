# SPDX-License-Identifier: BSD-3-Clause
"""Take the facts of this host that the pre-flight compares (``model.host_facts``)."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import inspect
import json
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.model.host_facts import HostFacts, ProgramFile

_TIMEOUT = 10.0
"""Seconds for the program's interpreter, and for nvidia-smi, which takes some where no process holds the driver."""

_GPU_HELD = 1024
"""MiB in use on a GPU from which a message is worth it: the driver itself and a display server take some hundred."""

_SHARED = "/dev/shm"


def take_facts(run: RunSpec) -> HostFacts:
    """Return the facts of this host for a run. It blocks for the start of an interpreter, some 0.1 s."""
    began = time.monotonic()
    versions, problem = _versions(run)
    paths, program, gpus = _paths(run), _program(run), _held_gpus(run.environ)
    shared = -1
    with contextlib.suppress(OSError):
        disk = os.statvfs(_SHARED)
        shared = disk.f_bavail * disk.f_frsize
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = -1 if soft == resource.RLIM_INFINITY else soft
    return HostFacts(versions, problem, program, paths, time.time(), time.monotonic() - began, shared, files, gpus)


def facts_at_launch(run: RunSpec, versions: Mapping[str, str]) -> HostFacts:
    """Return the facts that cost nothing: versions that are known, that of the driver, and the script."""
    problem = "" if versions or not run.preload else "the import has failed"
    return HostFacts({**versions, **_driver()}, problem, program=_program(run))


def _driver() -> dict[str, str]:
    with contextlib.suppress(OSError):
        driver = re.search(r"Kernel Module\D+([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        if driver:
            return {"NVIDIA driver": driver[1]}
    return {}


def _versions(run: RunSpec) -> tuple[dict[str, str], str]:
    """Return versions by name, and why the program's interpreter did not tell its own; empty if it did."""
    found = _driver()
    if run.command.program.mode == "exec":
        return found, ""
    # Without the working folder in its path, whose modules the import of these would take.
    code = f"import sys; sys.path[:] = filter(None, sys.path)\n{inspect.getsource(print_versions)}\nprint_versions()"
    command = [*run.python(), "-c", code]
    try:
        done = subprocess.run(
            command,
            cwd=run.cwd,
            env=run.start_environ(1),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        if done.returncode == 0:
            # The last line: what a sitecustomize of the user's prints precedes it.
            versions = json.loads(done.stdout.strip().splitlines()[-1])
            return {**{str(name): str(value) for name, value in versions.items()}, **found}, ""
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        reason = f"no answer in {_TIMEOUT:g} s"
    except (OSError, ValueError, LookupError, AttributeError) as error:
        reason = str(error)
    return found, f"{command[0]}: {reason}"


def print_versions() -> None:
    """Print the versions of Python, torch, CUDA and NCCL as JSON without importing torch, in the program's interpreter.

    That may lack this package, and is not older than Python 3.8.
    """
    import contextlib
    import json
    import platform
    import re
    from importlib import metadata

    found = {"python": platform.python_version()}
    packages = [("torch", "torch"), *(("NCCL", f"nvidia-nccl-cu{major}") for major in (11, 12, 13))]
    for name, package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(package)
    if "torch" in found:
        path = str(metadata.distribution("torch").locate_file("torch/version.py"))
        with contextlib.suppress(OSError), open(path) as file:
            if cuda := re.search(r"^cuda\b[^=]*= *'([^']+)'", file.read(), re.M):
                found["CUDA"] = cuda[1]
    print(json.dumps(found))


def _script(run: RunSpec) -> str:
    """Return the path of the script of a run; empty for a module or another program."""
    program = run.command.program_of(0)
    return os.path.join(run.cwd or os.getcwd(), program.target) if program.mode == "script" else ""


def _paths(run: RunSpec) -> dict[str, str]:
    """Return the folder, the script and the PYTHONPATH of a run, each with the reason why it cannot be read."""
    cwd = run.cwd or os.getcwd()
    entries = [os.path.join(cwd, entry) for entry in run.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {path: _why_unreadable(path) for path in filter(None, (cwd, _script(run), *entries))}


def _why_unreadable(path: str) -> str:
    try:
        if os.path.isdir(path):
            with os.scandir(path) as entries:
                next(entries, None)
        else:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _program(run: RunSpec) -> ProgramFile | None:
    path = _script(run)
    if path and os.path.isfile(path):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            content = file.read()
            return ProgramFile(path, len(content), hashlib.sha256(content).hexdigest())
    return None


def _held_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a text for each NVIDIA GPU of the ranks with memory in use; no rank of this job has started yet."""
    if not glob.glob("/dev/nvidia[0-9]*") or shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(output, environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(output: str, visible: str | None) -> tuple[str, ...]:
    """Return a text for each GPU with memory in use."""
    held = []
    chosen = None if visible is None else [device.strip() for device in visible.split(",")]
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not fields[2].isdigit() or int(fields[2]) < _GPU_HELD:
            continue
        if chosen is None or fields[0] in chosen or any(device and fields[1].startswith(device) for device in chosen):
            held.append(f"GPU {fields[0]}: {fields[2]} of {fields[3]} MiB are in use")
    return tuple(held)
