# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks of a run execute on one host, with which interpreters, and in which environment.

Names and values of a rank's variables follow ``LocalElasticAgent._start_workers`` of torch 2.13
(``torch/distributed/elastic/agent/server/local_elastic_agent.py``).
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from torchx_monarch.command.command import Command, CommandError, TorchrunOptions
from torchx_monarch.host.ranks.leading_statements import Statement, leading_statements, program_folder
from torchx_monarch.host.ranks.preloaded_modules import is_read_at_import
from torchx_monarch.model.env_names import is_for_hosts, keep_monarch_log_private
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.world import World

_READ_EARLY = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "TORCH", "PYTORCH", "NPY_", "NUMPY_")
"""Prefixes of variables that a zygote and its modules read before a run, beside those of ``is_read_at_import``: a run
that changes one of them needs another zygote."""


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """What the ranks of a run execute on this host.

    Attributes:
        command: command of the run.
        role_environ: environment of the role.
        modules: modules that the zygote of a torchrun command imports.
        added: environment variables that the run adds.
        cwd: folder in which the ranks start; None in a batch job, whose ranks start in the host's folder and whose
            zygote knows the program.
        forks: whether ranks are forks of the zygote, if it has modules; else they are interpreters of their own.
        leading: the leading statements of the program, which the zygote executes as well.
        leading_end: the statement that ends them (``Leading``); empty without them.
    """

    command: Command
    role_environ: Mapping[str, str]
    modules: Sequence[str]
    added: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cwd: str | None = None
    forks: bool = True
    leading: tuple[Statement, ...] = ()
    leading_end: str = ""

    @property
    def environ(self) -> Mapping[str, str]:
        return {**self.role_environ, **self.added} if self.added else self.role_environ

    @property
    def added_for_imports(self) -> dict[str, str]:
        """The variables that the run adds, without those of TorchX, such as TORCHX_JOB_ID, which differ in each job."""
        return {name: value for name, value in self.added.items() if not name.startswith("TORCHX_")}

    @property
    def preload(self) -> list[str]:
        """The modules that the zygote imports; none for a program that is not Python or without torchrun."""
        is_python = self.command.kind == "torchrun" and self.command.program.mode != "exec"
        return list(self.modules) if is_python else []

    @property
    def nproc(self) -> str:
        """The number of ranks on this host, or auto, cpu, gpu or xpu, which torch resolves."""
        return self.command.options.nproc_per_node if self.command.kind == "torchrun" else "1"

    @property
    def presumed_count(self) -> int:
        """The number of ranks on this host that the environment of the zygote is for: of several if it is unknown."""
        return int(self.nproc) if self.nproc.isdigit() else 2

    def python(self) -> list[str]:
        typed = list(self.command.interpreter) or ["python"]
        if typed[0] in ("python", "python3"):
            # The host's own interpreter, as under torchrun; PATH may have another `python`, or none.
            typed[0] = sys.executable
        return [*typed, "-u"]

    def zygote_command(self) -> list[str]:
        """Return the interpreter of the zygote: the program's, or a bare one if the zygote imports nothing."""
        options, program = self.command.options, self.command.program_of(0)
        # Only torch can resolve the number of ranks and the CPUs, even if the program is not Python.
        asks_torch = options.numa_binding is not None or not options.nproc_per_node.isdigit()
        ahead = program.mode != "exec" and self.preload
        return self.python() if ahead or asks_torch else [sys.executable, "-I", "-S"]

    def program_folder(self) -> str:
        program = self.command.program_of(0)
        return program_folder(program.mode, program.target, self.cwd or os.getcwd())

    def without_leading(self) -> RunSpec:
        return dataclasses.replace(self, leading=())

    def with_leading(self) -> RunSpec:
        """Return the run with the leading statements of its program, if its ranks may share what these import."""
        program = self.command.program_of(0)
        is_one = program.target == self.command.program_of(1).target
        options = self.command.options
        # With --virtual-local-rank each rank has variables of devices of its own, which imports read.
        is_same = is_one and options.numa_binding is None and not options.virtual_local_rank
        if not (self.preload and self.forks and is_same):
            return self
        packages = {*self.preload, *(["numpy"] if "torch" in self.preload else [])}
        found = leading_statements(program.mode, program.target, self.cwd or os.getcwd(), packages)
        return dataclasses.replace(self, leading=found.statements, leading_end=found.end)

    def start_folder(self) -> str | None:
        """Return the folder in which the zygote starts; None for that of the host process.

        It is the run's folder if Python resolves a relative path at its start, else the host's, for any run.
        """
        if self.cwd is None:
            return None
        python, path = self.python()[0], self.environ.get("PYTHONPATH")
        relative = [] if not path else [entry for entry in path.split(os.pathsep) if not os.path.isabs(entry)]
        return self.cwd if relative or _is_relative(python) else None

    def start_environ(self, count: int) -> dict[str, str]:
        """Return the environment with which the zygote of a number of ranks starts; these get the others later."""
        early = {name: value for name, value in self.added_for_imports.items() if self._is_read_early(name)}
        env = {name: value for name, value in {**self.role_environ, **early}.items() if not is_for_hosts(name)}
        env.pop("TORCHELASTIC_ERROR_FILE", None)  # each rank has its own, which no import that all share may read
        keep_monarch_log_private(env)
        if count > 1:  # as torchrun does; torch reads it when it is imported
            env.setdefault("OMP_NUM_THREADS", "1")
        return env

    def why_no_python(self) -> str:
        """Return why the interpreter of the run's programs does not exist; empty if it may.

        A relative path is resolved later, in the program's folder.
        """
        python = self.python()[0]
        if self.command.program.mode == "exec" or _is_relative(python):
            return ""
        return "" if shutil.which(python, path=self.environ.get("PATH")) else f"{python!r}: {os.strerror(errno.ENOENT)}"

    def signature(self, count: int) -> object:
        """Return the value that two runs share if the zygote of one can start the ranks of the other, a number each."""
        environ, command = self.start_environ(count), self.zygote_command()
        read = {name: value for name, value in environ.items() if self._is_read_early(name)}
        added = self.added_for_imports
        shared = ([statement.text for statement in self.leading], added, self.cwd) if self.leading else ()
        return command, self.preload, shared, read, self.start_folder()

    def _is_read_early(self, name: str) -> bool:
        """Return whether the zygote or its modules may read a variable. Modules other than torch may read any."""
        return bool(set(self.preload) - {"torch"}) or name.startswith(_READ_EARLY) or is_read_at_import(name)


def _is_relative(python: str) -> bool:
    return os.sep in python and not os.path.isabs(python)


def with_interpreter(command: Command, spec: HostSpec, environ: Mapping[str, str], cwd: str) -> Command:
    """Return a command with the interpreter that its torchrun or Python means on this host.

    A torchrun with a folder means the interpreter of its first line.

    Raises:
        CommandError: the interpreter of torchrun is not known.
    """
    path = environ.get("PATH")
    typed = command.interpreter[0] if command.interpreter else command.torchrun
    found = typed if os.sep in typed else shutil.which(typed, path=path) if spec.interpreter == "path" else None
    if not found:
        return command
    found = os.path.join(cwd, found)
    python = found if command.interpreter else _python_of_torchrun(found, path)
    if _environment(python) == _environment(sys.executable):
        return command
    return dataclasses.replace(command, interpreter=(python, *command.interpreter[1:]))


def _python_of_torchrun(torchrun: str, path: str | None) -> str:
    try:
        with open(torchrun, errors="replace") as file:
            first_line = file.readline(4096)
    except OSError as error:
        raise CommandError(f"cannot read {torchrun}: {error.strerror}") from None
    words = first_line.removeprefix("#!").split() if first_line.startswith("#!") else []
    named = [word for word in words if os.path.basename(word).startswith("python")]  # also after /usr/bin/env
    # Tools that switch between environments, and pip where a path is long, make scripts of a shell.
    beside = os.path.join(os.path.dirname(torchrun), "python")
    if python := shutil.which(named[0] if named else beside, path=path):
        return python
    raise CommandError(
        f"the Python interpreter of {torchrun} is not known; write `PYTHON -m torch.distributed.run` with its path"
    )


def _environment(python: str) -> tuple[str, str]:
    return os.path.realpath(os.path.dirname(python)), os.path.realpath(python)


def env_number(environ: Mapping[str, str], variable: str, default: float) -> float:
    """Return an environment variable, or a default, as a number of 0 or more.

    Raises:
        CommandError: the value is not such a number.
    """
    text = environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise CommandError(f"{variable}={text!r} is not a number of 0 or more")
    return value


def rank_environment(
    world: World, options: TorchrunOptions, replica: int, local_rank: int, base: Mapping[str, str], error_file: str
) -> dict[str, str]:
    """Return the variables to add to ``base``, the environment of the role, for one rank.

    Raises:
        ValueError: with ``--virtual-local-rank`` there are fewer visible devices than ranks, as in torchrun.
    """
    place = world.place(replica)
    rank = place.first_rank + local_rank
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(place.group_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": options.role,
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(place.nproc),
        "GROUP_WORLD_SIZE": str(world.host_count),
        "ROLE_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(world.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_RUN_ID": world.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(world.agent_store),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if options.virtual_local_rank:
        # ROCm ignores CUDA_VISIBLE_DEVICES if HIP_VISIBLE_DEVICES is set, which torchrun observes since torch 2.15.
        names = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in base]
        device = str(local_rank)
        if names:
            devices = base[names[0]].split(",")
            if local_rank >= len(devices):
                raise ValueError(f"local rank {local_rank} has no device of its own in {names[0]}={base[names[0]]}")
            device = devices[local_rank].strip()
        env.update({"LOCAL_RANK": "0", **dict.fromkeys([*names, "CUDA_VISIBLE_DEVICES"], device)})
    return env
