# SPDX-License-Identifier: BSD-3-Clause
"""Machines with a network between them, each a network namespace of this one, on a switch in a namespace of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from tests.waits import WITHIN


def missing() -> str:
    """Why there can be no namespaces here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (Debian: iproute2)"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, timeout=WITHIN)
    return probe.stderr.strip() if probe.returncode else ""


def ip(*words: str) -> None:
    """Run ``ip``; fails the test with what it says."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def switch(namespace: str) -> None:
    """Make a namespace with a switch, ``bridge0``."""
    ip("netns", "add", namespace)
    ip("-n", namespace, "link", "add", "bridge0", "type", "bridge")
    ip("-n", namespace, "link", "set", "bridge0", "up")


def plug_in(namespace: str, switch: str, port: str, *addresses: str) -> None:
    """Make a namespace whose ``eth0``, with addresses and the lengths of their prefixes, is at a port of a switch."""
    ip("netns", "add", namespace)
    ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
    for address in addresses:
        ip("-n", namespace, "addr", "add", address, "dev", "eth0")
    ip("-n", namespace, "link", "set", "lo", "up")
    ip("-n", namespace, "link", "set", "eth0", "up")


def plug_in_here(link: str, switch: str, address: str) -> None:
    """Connect this machine, by a link of this name."""
    ip("link", "add", link, "type", "veth", "peer", "name", "client", "netns", switch)
    ip("-n", switch, "link", "set", "client", "master", "bridge0", "up")
    ip("addr", "add", address, "dev", link)
    ip("link", "set", link, "up")


def processes(namespace: str) -> list[int]:
    """Return the pids of what runs in a network namespace."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=240)
    return [int(pid) for pid in listed.stdout.split()]


def kill_all(namespace: str) -> bool:
    """Kill what runs in a network namespace; return whether anything did."""
    found = processes(namespace)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


@contextlib.contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Be in a network namespace, named by its file, with this thread: what is opened inside stays there."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(namespace, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        assert libc.setns(there, 0) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert libc.setns(home, 0) == 0, os.strerror(ctypes.get_errno())
        os.close(there)
        os.close(home)


class Network:
    """Machines 0, 1, ... with the addresses 10.99.0.1, 10.99.0.2, ... and nothing else that they could reach.

    Args:
        machines: how many.
    """

    def __init__(self, machines: int) -> None:
        self._name = f"tm{uuid.uuid4().hex[:6]}"
        self._made: list[str] = []
        try:
            self._made.append(self._switch)
            switch(self._switch)
            for machine in range(machines):
                self._made.append(name := self.namespace(machine))
                plug_in(name, self._switch, f"port{machine}", f"{self.address(machine)}/24")
        except BaseException:
            self.remove()
            raise

    @property
    def _switch(self) -> str:
        return f"{self._name}s"

    def namespace(self, machine: int) -> str:
        """Name of a machine's namespace."""
        return f"{self._name}m{machine}"

    def address(self, machine: int) -> str:
        """Its address."""
        return f"10.99.0.{machine + 1}"

    def within(self, machine: int) -> tuple[str, ...]:
        """Words that run a command on it."""
        return ("nsenter", f"--net=/run/netns/{self.namespace(machine)}", "--")

    def cut(self, machine: int) -> None:
        """Cut its link at the switch: nothing comes and nothing goes, and no connection is closed."""
        ip("-n", self._switch, "link", "set", f"port{machine}", "down")

    def adapt(self, machine: int) -> None:
        """The opposite of ``cut``."""
        ip("-n", self._switch, "link", "set", f"port{machine}", "up")

    def listening(self, machine: int) -> list[int]:
        """TCP ports on which something on it listens."""
        command = [*self.within(machine), "ss", "-tlnH"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
        return sorted(int(line.split()[3].rpartition(":")[2]) for line in done.stdout.splitlines())

    def listeners(self, machine: int) -> list[tuple[int, int]]:
        """The port and the process of each of them."""
        command = [*self.within(machine), "ss", "-tlnpH"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
        found = []
        for line in done.stdout.splitlines():
            pid = re.search(r"pid=(\d+)", line)
            assert pid, line
            found.append((int(line.split()[3].rpartition(":")[2]), int(pid[1])))
        return sorted(set(found))

    def entered(self, machine: int) -> contextlib.AbstractContextManager[None]:
        """Be on a machine with this thread: what is opened inside stays there."""
        return entered(f"/run/netns/{self.namespace(machine)}")

    def remove(self) -> None:
        """Remove all of it; the kernel takes the links along. Fails the test when something cannot be removed."""
        for name in self._made:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["ip", "netns", "delete", name], check=False, timeout=240)
        assert not (left := [name for name in self._made if os.path.exists(f"/run/netns/{name}")]), left


# In CI a machine without is a mistake, and the tests say so by failing.
requires_namespaces = pytest.mark.skipif(bool(missing()) and "CI" not in os.environ, reason=missing() or "-")
