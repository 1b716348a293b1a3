# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What ``monarch.spmd`` makes of the options that people type: the parts of a plain torchrun app.

Everything a user can get wrong raises TorchX's ComponentValidationException, which its CLI prints without a traceback.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NoReturn

from torchx import specs
from torchx.components.dist import parse_nnodes
from torchx.components.structured_arg import StructuredJArgument
from torchx.specs.finder import ComponentValidationException

from torchx_monarch.command.command import PROCESS_COUNTS, is_process_count
from torchx_monarch.command.meshes import check_mesh_name
from torchx_monarch.command.torchrun_options import Streams, node_range

DEBUG_ENV = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_DESYNC_DEBUG": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
}
"""What ``--debug`` sets, as dist.torchrun's does."""

_DEFAULT_J = "1x2"
_FALLBACK_NAME = "spmd"


def _refuse(message: str) -> NoReturn:
    raise ComponentValidationException(message)


@dataclass(frozen=True)
class Launch:
    """The program of the ranks.

    Attributes:
        target: a script, or a module when ``module`` is set.
        args: the program's own arguments.
    """

    target: str
    args: tuple[str, ...]
    module: bool

    @classmethod
    def of(cls, script_args: Sequence[str], m: str | None, script: str | None) -> Launch:
        """The program that ``-m``, ``--script`` or else the first positional argument names."""
        if m and script:
            _refuse(f"-m {m} and --script {script} contradict each other: give one program.")
        if m:
            return cls(m, tuple(script_args), module=True)
        if script:
            return cls(script, tuple(script_args), module=False)
        if not script_args:
            _refuse("No program to run: give a script (`monarch.spmd --nproc 4 train.py`) or a module (-m pkg.mod).")
        if script_args[0].startswith("-"):
            _refuse(
                f"{script_args[0]} stands where the script is expected: options of monarch.spmd come first, then the "
                "script (or -m MODULE), then the script's own arguments."
            )
        return cls(script_args[0], tuple(script_args[1:]), module=False)

    @property
    def role(self) -> str:
        """The role's name: letters and digits only, which every backend takes as it is."""
        stem = self.target.rpartition(".")[2] if self.module else PurePath(self.target).stem
        return re.sub(r"[^a-z0-9]", "", stem.lower()).lstrip(string.digits) or _FALLBACK_NAME

    @property
    def words(self) -> tuple[str, ...]:
        """The end of the torchrun command."""
        return (*(("-m",) if self.module else ()), self.target, *self.args)


@dataclass(frozen=True)
class Shape:
    """How many nodes, and how many processes on each.

    Attributes:
        nnodes: as torchrun takes it: a number, or MIN:MAX.
        nproc: as torchrun takes it: a number, or auto, gpu, cpu, xpu.
    """

    nnodes: str
    nproc: str

    @classmethod
    def of(cls, j: str | None, nnodes: str | None, nproc: str | None, h: str | None) -> Shape:
        """Join ``-j [NNODESx]NPROC``, ``--nnodes`` and ``--nproc``; each may be left out, none may contradict another.

        As in dist.torchrun a bare ``-j N`` is N processes on one node, or, with a named resource, N nodes with a
        process for each of its GPUs.
        """
        shape = cls._from_j(j or _DEFAULT_J, h)
        if j:
            for option, given, meant in (("--nnodes", nnodes, shape.nnodes), ("--nproc", nproc, shape.nproc)):
                if given is not None and given != meant:
                    _refuse(f"{option} {given} contradicts -j {j}, which means {option} {meant}: give one of them.")
        shape = cls(nnodes or shape.nnodes, nproc or shape.nproc)
        if not is_process_count(shape.nproc):
            _refuse(f"--nproc {shape.nproc}: use a number above 0, or one of {', '.join(PROCESS_COUNTS)}.")
        try:
            node_range(shape.nnodes)
        except ValueError as error:
            _refuse(f"--nnodes {shape.nnodes}: {error}.")
        return shape

    @classmethod
    def _from_j(cls, j: str, h: str | None) -> Shape:
        try:
            if h is not None and j.isdigit():
                j = str(StructuredJArgument.parse_from(h, j))
            _, _, nproc, nnodes = parse_nnodes(j)
        except ValueError as error:
            _refuse(f"-j {j}: {error}")
        return cls(nnodes, str(nproc))

    @property
    def min_replicas(self) -> int:
        """The fewest nodes."""
        return node_range(self.nnodes)[0]

    @property
    def replicas(self) -> int:
        """The most nodes."""
        return node_range(self.nnodes)[1]


def hosts(j: str, h: str | None) -> tuple[int, str]:
    """What ``-j`` of ``monarch.hosts`` means: the nodes, and the processes on each."""
    if j.endswith("x0") or j == "0":  # no rank program: nothing to keep ready
        nodes = j.removesuffix("0").removesuffix("x") or "1"
        if not nodes.isdigit() or not int(nodes):
            _refuse(f"-j {j}: use NNODESxNPROC, such as 2x8.")
        return int(nodes), "0"
    shape = Shape.of(j, None, None, h)
    if shape.min_replicas != shape.replicas:
        _refuse(f"-j {j}: hosts that wait are all there or none; use NNODESxNPROC, such as 2x8.")
    return shape.replicas, shape.nproc


def app_name(run_name: str, role: str) -> str:
    """``run_name`` as a name that can be part of a path; ``role`` when nothing of it is left."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", run_name).strip("-.") or role


def resource(h: str | None, cpu: int, gpu: int, mem_mb: int) -> specs.Resource:
    """The named resource ``h``, or else the one that the numbers describe."""
    try:
        return specs.resource(cpu=cpu, gpu=gpu, memMB=mem_mb, h=h)
    except KeyError as error:
        _refuse(f"-h {h}: {error.args[0]}")


def mounts(options: Sequence[str] | None) -> list[specs.BindMount | specs.VolumeMount | specs.DeviceMount]:
    """The mounts that ``--mounts`` describes."""
    parsed: list[specs.BindMount | specs.VolumeMount | specs.DeviceMount]
    try:
        parsed = specs.parse_mounts(list(options or ()))
    except (KeyError, ValueError) as error:
        _refuse(
            f"--mounts {','.join(options or ())}: {error.args[0]}. "
            "Use type=bind|volume|device,src=SOURCE,dst=TARGET[,readonly]."
        )
    return parsed


def tee(text: str) -> str:
    """``text`` when it is a value of torchrun's ``--tee``."""
    try:
        Streams.parse(text)
    except ValueError as error:
        _refuse(f"--tee {text}: {error}.")
    return text


def require_counts(**options: int) -> None:
    """Refuse an option whose value is no count."""
    for name, value in options.items():
        if value < 0:
            _refuse(f"--{name} {value}: use 0 or more.")


def mesh_sizes(meshes: Mapping[str, str]) -> dict[str, int]:
    """How many hosts each mesh has, of ``--meshes NAME=N,NAME=N``."""
    sizes = {}
    for name, hosts in meshes.items():
        if not hosts.isdigit() or int(hosts) < 1:
            _refuse(f"--meshes {name}={hosts}: use a number of hosts above 0.")
        try:
            check_mesh_name(name)
        except ValueError as error:
            _refuse(f"--meshes {name}={hosts}: {error}")
        sizes[name] = int(hosts)
    return sizes


def misplaced(script_args: Sequence[str], options: Collection[str]) -> list[str]:
    """Which of the script's arguments are spelled like ``options`` of the component (``nproc``: ``--nproc``)."""
    flags = {f"--{name}" for name in options} | {f"-{name}" for name in options if len(name) == 1}
    return [flag for argument in script_args if (flag := argument.partition("=")[0]) in flags]
