# SPDX-License-Identifier: BSD-3-Clause
"""``--numa-binding``, on a machine without GPUs: torch is told of two."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts

TOPOLOGY = """
import os
import torch.numa.binding as binding

binding._get_gpu_count = binding._get_device_count = lambda: 2  # the latter, and below, since torch 2.14
binding._get_numa_node_index_for_gpu_index = lambda *, gpu_index: 0
binding._get_numa_node_index_for_device_index = lambda *, device_index: 0
binding._get_cpu_indices_for_numa_node_MAYBE_NOT_ALLOWED = lambda *, numa_node_index: set(range(4096))
binding._get_logical_cpu_indices_sharing_same_physical_core_as = lambda *, logical_cpu_index: {logical_cpu_index}
"""

PROGRAM = """
import os, sys, torch
threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
assert all(cpus == threads[0] for cpus in threads)
print(*sorted(threads[0]))
"""


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Callable[..., Hosts]:
    (tmp_path / "prog.py").write_text(PROGRAM)

    def start(mode: str, topology: str, nproc: int = 1) -> Hosts:
        (tmp_path / "topology.py").write_text(topology)
        words = ["torchrun", "--nproc-per-node", str(nproc), "--numa-binding", mode, str(tmp_path / "prog.py")]
        environ = {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
        return Hosts(folder, words, options=("--preload", "torch,topology"), environ=environ).start()

    return start


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_ranks_are_bound_before_the_program_begins(run: Callable[..., Hosts]) -> None:
    hosts = run("exclusive", TOPOLOGY, nproc=2)
    assert hosts.wait() == [0], hosts.err()
    ranks = [hosts.logs(0) / "attempt_0" / rank / "stdout.log" for rank in "01"]
    first, second = ([int(cpu) for cpu in path.read_text().split()] for path in ranks)
    assert first + second == sorted(os.sched_getaffinity(0))
    assert 0 <= len(first) - len(second) <= 1


def test_the_index_of_a_device_goes_by_the_name_that_torch_has_for_it(run: Callable[..., Hosts]) -> None:
    """Torch 2.14 has renamed ``gpu_index``, by which the torch of the other tests knows it."""
    cpu = min(os.sched_getaffinity(0))
    stub = f"binding._get_logical_cpus_to_bind_to = lambda *, device_index, numa_options: {{{cpu}}}\n"
    hosts = run("node", TOPOLOGY + stub)
    assert hosts.wait() == [0], hosts.err()
    assert (hosts.logs(0) / "attempt_0" / "0" / "stdout.log").read_text() == f"{cpu}\n"


def test_a_torch_that_knows_of_no_binding_is_named(run: Callable[..., Hosts]) -> None:
    hosts = run("node", "import torch.numa.binding as binding\ndel binding._get_logical_cpus_to_bind_to\n")
    assert hosts.wait() == [1]
    assert re.search(r"--numa-binding=node: .*: torch \S+ cannot tell \(torch.numa", hosts.err().splitlines()[-1])
