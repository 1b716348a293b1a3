# SPDX-License-Identifier: BSD-3-Clause
"""Convert the options of the components ``monarch.spmd``, ``monarch.hosts`` and ``monarch.controller``.

Invalid options raise TorchX's ComponentValidationException, which its CLI prints without a traceback.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import secrets
import shlex
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, NoReturn

from torchx import specs
from torchx.components.dist import parse_nnodes
from torchx.components.structured_arg import StructuredJArgument, StructuredNameArgument
from torchx.specs.finder import ComponentValidationException

from torchx_monarch.command.allocations import check_mesh_name
from torchx_monarch.command.command import PROCESS_COUNT, CommandError, Program, is_process_count, parse
from torchx_monarch.command.component_arguments import options_among, unprotected
from torchx_monarch.command.rank_command import launcher
from torchx_monarch.command.torchrun_options import node_range
from torchx_monarch.model.role_spec import LIGHTHOUSE_PORT, LOOPBACK, METADATA_KEY, SIDECAR, SPARES

DEBUG_ENV = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_DESYNC_DEBUG": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
"""Environment variables that ``--debug`` sets, as for TorchX's dist.torchrun."""

_SPARES = re.compile(r"([^x+]+)\+(\d+)(x.*)?")
"""NNODES+SPARES[xNPROC]."""

_LIGHTHOUSE_PORTS = range(30000, 32000)
"""Below Linux's default range of ephemeral ports, and apart from those of rendezvous (``schedulers.monarch``)."""

_log = logging.getLogger("torchx_monarch")


def _refuse(message: str) -> NoReturn:
    raise ComponentValidationException(message)


@contextlib.contextmanager
def _refused(option: str, after: str = "") -> Iterator[None]:
    """Refuse the option that is parsed in the block if that fails, and say why."""
    try:
        yield
    except (KeyError, ValueError) as error:
        _refuse(f"{option}: {error.args[0]}{after}")


def parse_program(
    component: Callable[..., object], script_args: Sequence[str], m: str | None, script: str | None
) -> Program:
    """Return the program that ``-m``, ``--script`` or the first positional argument names.

    Log a warning about arguments of the program that are spelled like options of the component.
    """
    name, words = f"monarch.{component.__name__}", list(unprotected(script_args))
    if m and script:
        _refuse(f"-m {m} and --script {script} contradict each other: give one program.")
    target = m or script
    if not target:
        if not words:
            _refuse(f"No program to run: give a script (`{name} train.py`) or a module (-m pkg.mod).")
        target, *words = words
    if target.startswith("-"):
        _refuse(
            f"{target} stands where the script is expected: options of {name} come first, then the script (or "
            "-m MODULE), then the script's own arguments."
        )
    if not m and (found := launcher([target, *words])):
        _refuse(f"{name} starts the ranks itself, without `{found[0]}`: type `{name} {found[1]}`.")
    if flags := options_among(words, inspect.signature(component).parameters):
        _log.warning(
            f"{', '.join(flags)} after {target}: passed to it as its own. Options of {name} come before the "
            f"program, and those of torchx run before {name}."
        )
    return Program("module" if m else "script", target, tuple(words))


def role_name(program: Program) -> str:
    """Return the name of a program's role: letters and digits only, which every backend accepts."""
    stem = program.target.rpartition(".")[2] if program.mode == "module" else PurePath(program.target).stem
    return re.sub(r"[^a-z0-9]", "", stem.lower()).lstrip(string.digits) or "spmd"


def names(program: Program, name: str) -> tuple[str, dict[str, str]]:
    """Parse the value of ``--name``; return the app's name, and the variables of TorchX's tracker."""
    source = {"m" if program.mode == "module" else "script": program.target}
    parsed = StructuredNameArgument.parse_from(name=name, **source)
    tracking = {
        "TORCHX_TRACKING_EXPERIMENT_NAME": parsed.experiment_name,
        "TORCHX_TRACKING_RUN_NAME": parsed.run_name,
    }
    return app_name(parsed.run_name, role_name(program)), tracking


def program_words(program: Program) -> tuple[str, ...]:
    """Return a program's part of the command that runs it, after ``torchrun`` or ``python``."""
    words = (program.target, *program.args)
    return ("-m", *words) if program.mode == "module" else words


def torchrun_args(
    program: Program, role: str, shape: Shape, tee: str, max_restarts: int, log_dir: str | None, more: str = ""
) -> list[str]:
    """Return the arguments of the torchrun command of a role that runs a program.

    Args:
        more: further options of torchrun, as they are typed.
    """
    args = ["--nnodes", shape.nnodes, "--nproc-per-node", shape.nproc, "--role", role, "--tee", tee]
    if max_restarts:
        args += ["--max-restarts", str(max_restarts)]
    if log_dir:
        args += ["--log-dir", log_dir]
    with _refused(f"--torchrun {more}", "."):
        args += [*shlex.split(more), *program_words(program)]
    try:
        command = parse(["torchrun", *args])
    except CommandError as error:
        _refuse(str(error))
    if command is None or command.program.target != program.target:
        _refuse(f"--torchrun {more}: give options of torchrun alone, such as --torchrun '--redirects 3'.")
    return args


@dataclass(frozen=True)
class Shape:
    """The number of nodes, and of processes per node.

    Attributes:
        nnodes: value of torchrun's ``--nnodes``: a number, or MIN:MAX.
        nproc: value of torchrun's ``--nproc-per-node``: a number, or auto, gpu, cpu, xpu.
        spares: number of spare nodes beside these; None if the options do not say.
    """

    nnodes: str
    nproc: str
    spares: int | None = None

    @classmethod
    def parse(cls, j: str | None, nnodes: str | None, nproc: str | None, h: str | None) -> Shape:
        """Combine ``-j [NNODES[+SPARES]x]NPROC`` with ``--nnodes`` and ``--nproc``, which take precedence if given.

        As in dist.torchrun, ``-j N`` without ``x`` means N processes on one node or, with a named resource ``h``, N
        nodes with one process per GPU.
        """
        shape = cls._from_j(j or "1x2", h)
        shape = cls(nnodes or shape.nnodes, nproc or shape.nproc, shape.spares)
        if not is_process_count(shape.nproc):
            _refuse(f"{f'--nproc {nproc}' if nproc else f'-j {j}, processes'}: use {PROCESS_COUNT}.")
        with _refused(f"--nnodes {nnodes}" if nnodes else f"-j {j}", "."):
            node_range(shape.nnodes)
        return shape

    @classmethod
    def _from_j(cls, j: str, h: str | None) -> Shape:
        given, spares = j, None
        if found := _SPARES.fullmatch(j):
            if not found[3] and h is None:
                _refuse(f"-j {j}: spare nodes are given as NNODES+SPARESxNPROC, such as 4+1x8.")
            j, spares = found[1] + (found[3] or ""), int(found[2])
        with _refused(f"-j {given}"):
            if h is not None and j.isdigit():
                j = str(StructuredJArgument.parse_from(h, j))
            _, _, nproc, nnodes = parse_nnodes(j)
        return cls(nnodes, str(nproc), spares)

    @property
    def min_replicas(self) -> int:
        return node_range(self.nnodes)[0]

    @property
    def role_metadata(self) -> dict[str, Any]:
        """The metadata of the role: its spare nodes, if the options name a number."""
        return {} if self.spares is None else {METADATA_KEY: {SPARES: self.spares}}

    @property
    def replicas(self) -> int:
        """The maximum number of nodes."""
        return node_range(self.nnodes)[1]


def hosts(j: str, h: str | None) -> Shape:
    """Parse ``-j`` of ``monarch.hosts``, NNODES[+SPARES]xNPROC.

    NPROC 0 means that torch is imported no sooner than for the first run.
    """
    without_ranks = re.fullmatch(r"((\d+:)?\d+(\+\d+)?x)?0", j)  # Shape.parse refuses 0 processes
    shape = Shape.parse(f"{without_ranks[1] or ''}1" if without_ranks else j, None, None, h)
    if shape.min_replicas != shape.replicas:
        _refuse(f"-j {j}: an allocation has a fixed number of nodes; use NNODESxNPROC, such as 2x8.")
    return replace(shape, nproc="0") if without_ranks else shape


def groups(j: str, group_hosts: int, min_groups: int, h: str | None) -> tuple[int, Shape]:
    """Parse ``-j GROUPSxNPROC`` of ``monarch.ft``; return the number of groups and the shape of each."""
    if not re.fullmatch("[1-9][0-9]{0,3}" + ("(x[1-9][0-9]{0,3})?" if h else "x[1-9][0-9]{0,3}"), j):
        _refuse(f"-j {j}: use GROUPSxNPROC, such as 4x8, with at most 9999 of each.")
    shape = Shape.parse(j, None, None, h)
    count = shape.replicas
    if group_hosts < 1:
        _refuse(f"--group_hosts {group_hosts}: use a number above 0.")
    if not 1 <= min_groups <= count:
        _refuse(f"--min_groups {min_groups}: -j {j} has {count} groups; use 1 to {count}.")
    return count, Shape(str(group_hosts), shape.nproc)


def lighthouse(
    own: str | None, min_groups: int, heartbeat_timeout_ms: int, image: str
) -> tuple[str, specs.Role | None]:
    """Return the address of torchft's lighthouse: the user's ``own`` or, with its role, one that is started.

    That is on the loopback interface, with a drawn port.
    Hosts of several machines have it listen for all of them (``rewrite``). The times are those of torchft's README.
    """
    if own is not None:
        found = re.fullmatch(r"https?://[^\s/]+:([0-9]{1,5})/?", own)
        if not found or not 0 < int(found[1]) < 65536:
            _refuse(f"--lighthouse {own}: use http://HOST:PORT.")
        return own, None
    if not 200 <= heartbeat_timeout_ms <= 3600_000:
        allowed = "200 to 3600000; groups send a heartbeat every 100 ms"
        _refuse(f"--heartbeat_timeout_ms {heartbeat_timeout_ms}: use {allowed}.")
    port = secrets.choice(_LIGHTHOUSE_PORTS)
    return f"http://{LOOPBACK}:{port}", specs.Role(
        name="lighthouse",
        image=image,
        entrypoint="torchft_lighthouse",
        args=shlex.split(
            f"--bind {LOOPBACK}:{port} --min_replicas {min_groups} --quorum_tick_ms 100 --join_timeout_ms 10000 "
            f"--heartbeat_timeout_ms {heartbeat_timeout_ms}"
        ),
        max_retries=100,
        retry_policy=specs.RetryPolicy.REPLICA,
        resource=specs.resource(cpu=1, gpu=0, memMB=1024),
        metadata={METADATA_KEY: {SIDECAR: True, LIGHTHOUSE_PORT: port}},
    )


def app_name(run_name: str, role: str) -> str:
    """Convert ``run_name`` to a name that can be part of a path; return ``role`` if no characters remain."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", run_name).strip("-.") or role


def resource(h: str | None, cpu: int, gpu: int, mem_mb: int) -> specs.Resource:
    """Return the named resource ``h``; without it, the resource of the given sizes."""
    with _refused(f"-h {h}"):
        return specs.resource(cpu=cpu, gpu=gpu, memMB=mem_mb, h=h)


def mounts(options: Sequence[str] | None) -> list[specs.BindMount | specs.VolumeMount | specs.DeviceMount]:
    """Parse ``--mounts``; return an empty list for None."""
    parsed: list[specs.BindMount | specs.VolumeMount | specs.DeviceMount]
    after = ". Use type=bind|volume|device,src=SOURCE,dst=TARGET[,readonly]."
    with _refused(f"--mounts {','.join(options or ())}", after):
        try:
            parsed = specs.parse_mounts(list(options or ()))
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is missing") from None
    return parsed


def require_counts(**options: int) -> None:
    for name, value in options.items():
        if value < 0:
            _refuse(f"--{name} {value}: use 0 or more.")


def mesh_sizes(meshes: Mapping[str, str]) -> dict[str, int]:
    """Parse ``--meshes NAME=N,NAME=N``; return the number of hosts of each mesh."""
    for name, hosts in meshes.items():
        if not re.fullmatch("[1-9][0-9]{0,4}", hosts):
            _refuse(f"--meshes {name}={hosts}: use a number of hosts above 0.")
        with _refused(f"--meshes {name}={hosts}"):
            check_mesh_name(name)
    return {name: int(hosts) for name, hosts in meshes.items()}
