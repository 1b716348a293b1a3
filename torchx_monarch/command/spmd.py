# SPDX-License-Identifier: BSD-3-Clause
"""Convert the options of the components ``monarch.spmd``, ``monarch.hosts`` and ``monarch.controller``.

Invalid options raise TorchX's ComponentValidationException, which its CLI prints without a traceback.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, NoReturn

from torchx import specs
from torchx.components.dist import parse_nnodes
from torchx.components.structured_arg import StructuredJArgument, StructuredNameArgument
from torchx.specs.finder import ComponentValidationException

from torchx_monarch.command.command import PROCESS_COUNTS, is_process_count
from torchx_monarch.command.component_arguments import unprotected
from torchx_monarch.command.meshes import check_mesh_name
from torchx_monarch.command.torchrun_options import Streams, node_range
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


def _refuse(message: str) -> NoReturn:
    raise ComponentValidationException(message)


@contextlib.contextmanager
def _refused(option: str, after: str = "") -> Iterator[None]:
    """Refuse the option that is parsed in the block if that fails, and say why."""
    try:
        yield
    except (KeyError, ValueError) as error:
        _refuse(f"{option}: {error.args[0]}{after}")


@dataclass(frozen=True)
class Launch:
    """The program of the ranks: a script, or a module."""

    target: str
    args: tuple[str, ...]
    module: bool

    @classmethod
    def parse(cls, script_args: Sequence[str], m: str | None, script: str | None) -> Launch:
        """Build the program from ``-m``, ``--script`` or the first positional argument."""
        words = unprotected(script_args)
        if m and script:
            _refuse(f"-m {m} and --script {script} contradict each other: give one program.")
        if m:
            return cls(m, words, module=True)
        if script:
            return cls(script, words, module=False)
        if not words:
            _refuse("No program to run: give a script (`monarch.spmd --nproc 4 train.py`) or a module (-m pkg.mod).")
        if words[0].startswith("-"):
            _refuse(
                f"{words[0]} stands where the script is expected: options of monarch.spmd come first, then the "
                "script (or -m MODULE), then the script's own arguments."
            )
        return cls(words[0], words[1:], module=False)

    @property
    def role(self) -> str:
        """The name of the role, made from the program: letters and digits only, which every backend accepts."""
        stem = self.target.rpartition(".")[2] if self.module else PurePath(self.target).stem
        return re.sub(r"[^a-z0-9]", "", stem.lower()).lstrip(string.digits) or "spmd"

    def names(self, name: str) -> tuple[str, dict[str, str]]:
        """Parse the value of ``--name``; return the run's name, and the variables of TorchX's tracker."""
        names = StructuredNameArgument.parse_from(name=name, **{"m" if self.module else "script": self.target})
        tracking = {
            "TORCHX_TRACKING_EXPERIMENT_NAME": names.experiment_name,
            "TORCHX_TRACKING_RUN_NAME": names.run_name,
        }
        return names.run_name, tracking

    @property
    def words(self) -> tuple[str, ...]:
        """The program's part of the torchrun command."""
        return (*(("-m",) if self.module else ()), self.target, *self.args)

    def torchrun_args(self, role: str, shape: Shape, streams: str, max_restarts: int, log_dir: str | None) -> list[str]:
        """Return the arguments of the torchrun command of a role that runs the program."""
        return [
            *("--nnodes", shape.nnodes),
            *("--nproc-per-node", shape.nproc),
            *("--role", role),
            *("--tee", tee(streams)),
            *(("--max-restarts", str(max_restarts)) if max_restarts else ()),
            *(("--log-dir", log_dir) if log_dir else ()),
            *self.words,
        ]


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
        """Combine ``-j [NNODES[+SPARES]x]NPROC``, ``--nnodes`` and ``--nproc``, each of which may be None.

        As in dist.torchrun, ``-j N`` without ``x`` means N processes on one node or, with a named resource ``h``, N
        nodes with one process per GPU.
        """
        shape = cls._from_j(j or "1x2", h)
        if j:
            for option, given, meant in (("--nnodes", nnodes, shape.nnodes), ("--nproc", nproc, shape.nproc)):
                if given is not None and given != meant:
                    _refuse(f"{option} {given} contradicts -j {j}, which means {option} {meant}: give one of them.")
        shape = cls(nnodes or shape.nnodes, nproc or shape.nproc, shape.spares)
        if not is_process_count(shape.nproc):
            _refuse(f"--nproc {shape.nproc}: use a number above 0, or one of {', '.join(PROCESS_COUNTS)}.")
        with _refused(f"--nnodes {shape.nnodes}", "."):
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
        """The minimum number of nodes."""
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
        _refuse(f"-j {j}: hosts that wait are all there or none; use NNODESxNPROC, such as 2x8.")
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
        _refuse(f"--heartbeat_timeout_ms {heartbeat_timeout_ms}: use 200 to 3600000; groups send one every 100 ms.")
    port = secrets.choice(_LIGHTHOUSE_PORTS)
    return f"http://{LOOPBACK}:{port}", specs.Role(
        name="lighthouse",
        image=image,
        entrypoint="torchft_lighthouse",
        args=[
            *("--bind", f"{LOOPBACK}:{port}", "--min_replicas", str(min_groups)),
            *("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
            *("--heartbeat_timeout_ms", str(heartbeat_timeout_ms)),
        ],
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
        parsed = specs.parse_mounts(list(options or ()))
    return parsed


def tee(text: str) -> str:
    """Return ``text`` unchanged if it is a valid value of torchrun's ``--tee``."""
    with _refused(f"--tee {text}", "."):
        Streams.parse(text)
    return text


def require_counts(**options: int) -> None:
    """Check that options, given by name, are not negative."""
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


def misplaced_options(script_args: Sequence[str], options: Collection[str]) -> list[str]:
    """Return the script's arguments that are spelled like ``options`` of the component (``nproc``: ``--nproc``)."""
    flags = {f"--{name}" for name in options} | {f"-{name}" for name in options if len(name) == 1}
    return [flag for argument in script_args if (flag := argument.partition("=")[0]) in flags]
