# SPDX-License-Identifier: BSD-3-Clause
"""Machines with OpenSSH servers on a network, and a client's configuration of ssh that knows them.

Everything is their own: folders, keys, names, addresses, processes. Nothing of the system's is touched, and ``down``
leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.clusters import packages
from tests.clusters.ssh.machine import Machine
from tests.network import namespaces
from tests.waits import WITHIN

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "ip", "ss", "nsenter", "unshare")
PACKAGES = ("openssh-server", "openssh-client", "iproute2", "util-linux")

CONNECT_TIMEOUT = "TEST_SSH_CONNECT_TIMEOUT"
"""A variable with the seconds in which a machine is to answer, for tests that ask often while one is off."""

UNKNOWN = "unknown-key"
"""A name of the first machine by which the client does not know its host key."""

DENIED = "denied"
"""A name of the first machine with a user whom it does not let in."""

INNER = "inner"
"""What the names of the machines begin with that are reached through the first one."""


def missing() -> str:
    """Why there can be no machines here, after an attempt to install what they need; empty when there can."""
    namespaces = ("--net", "--uts", "--mount", "--pid", "--fork")
    return packages.unavailable("a machine of namespaces", namespaces, PROGRAMS, PACKAGES)


class Machines:
    """Machines m1, m2, ...; ``up`` starts them.

    Each has two addresses: one that this machine reaches, and one that only the others do.

    Args:
        count: how many.

    Attributes:
        shared: a folder that all machines and this one have, by the same path.
        bin: a folder for the front of PATH, with an ``ssh`` that reads the client's configuration.
    """

    def __init__(self, count: int) -> None:
        self._name = f"th{uuid.uuid4().hex[:6]}"
        self._net = random.randrange(1, 256)  # 10.96.0 has the services of tests/clusters/kubernetes
        self._lab = Path(tempfile.mkdtemp(prefix=self._name, dir="/tmp"))
        self._lab.chmod(0o755)
        self.shared = self._lab / "shared"
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        self.bin = self._lab / "bin"
        self._switch = f"{self._name}s"
        self.names = [f"m{number + 1}" for number in range(count)]
        self._machines = {
            name: Machine(
                name,
                f"{self._name}{name}",
                self._switch,
                number,
                (f"{self.address(name)}/24", f"{self.address(name, inner=True)}/24"),
                self._lab / name,
                self.shared,
            )
            for number, name in enumerate(self.names, 1)
        }

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines.values())

    def address(self, name: str, inner: bool = False) -> str:
        """Return a machine's address: the one that this machine reaches, or the inner one."""
        return f"10.{95 if inner else 96}.{self._net}.{name.removeprefix('m')}"

    # -- up ------------------------------------------------------------------------------------------------------------

    def up(self) -> Machines:
        """Start all of it."""
        self._keys()
        namespaces.switch(self._switch)
        namespaces.plug_in_here(f"{self._name}r", self._switch, f"10.96.{self._net}.254/24")
        for machine in self:
            machine.boot()
        return self

    def _keys(self) -> None:
        keys = self._lab / "keys"
        keys.mkdir(mode=0o700)
        for name in ("client", "users", *self.names):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(keys / name)]
            subprocess.run(words, check=True, capture_output=True, timeout=60)
        public = {path.stem: path.read_text() for path in keys.glob("*.pub")}
        known = "".join(
            f"{name},{self.address(name)},{self.address(name, inner=True)} {' '.join(public[name].split()[:2])}\n"
            for name in self.names
        )
        hosts = "127.0.0.1 localhost\n" + "".join(f"{self.address(name)} {name}\n" for name in self.names)
        (self._lab / "known_hosts").write_text(known)
        for machine in self:
            both = {"host": keys / machine.name, "user": keys / "users"}
            machine.install(hosts, both, public["client"] + public["users"], known)
        self.config.write_text("\n".join(self._client_config()) + "\n")
        self.bin.mkdir()
        ssh = self.bin / "ssh"
        program = shutil.which("ssh", path=packages.PATH)
        within = f"${{{CONNECT_TIMEOUT}:+-o ConnectTimeout=${CONNECT_TIMEOUT}}}"
        ssh.write_text(f'#!/bin/sh\nexec {program} -F {self.config} {within} "$@"\n')
        ssh.chmod(0o755)

    @property
    def config(self) -> Path:
        """The client's ssh_config."""
        return self._lab / "ssh_config"

    def _client_config(self) -> Iterator[str]:
        for name in self.names:
            yield f"Host {name}\n  HostName {self.address(name)}"
            if name != self.names[0]:
                jump = f"  HostName {self.address(name, inner=True)}\n  ProxyJump {self.names[0]}"
                yield f"Host {INNER}{name.removeprefix('m')}\n{jump}"
        yield f"Host {UNKNOWN}\n  HostName {self.address(self.names[0])}\n  HostKeyAlias {UNKNOWN}"
        yield f"Host {DENIED}\n  HostName {self.address(self.names[0])}\n  User nobody"
        yield "Host *\n  User root\n  IdentitiesOnly yes\n  IdentityAgent none\n  GlobalKnownHostsFile /dev/null"
        yield f"  IdentityFile {self._lab}/keys/client\n  UserKnownHostsFile {self._lab}/known_hosts"
        yield "  KexAlgorithms curve25519-sha256"  # the one that OpenSSH prefers takes 90 ms of CPU time a connection

    # -- use -----------------------------------------------------------------------------------------------------------

    @property
    def environ(self) -> dict[str, str]:
        """The variables that a client needs."""
        return {"PATH": f"{self.bin}:{os.environ.get('PATH', os.defpath)}"}

    def mend(self) -> None:
        """Switch on what is off."""
        for machine in self:
            if not machine.is_on:
                machine.boot()

    def processes(self) -> list[str]:
        """Return what runs on the machines, beside their ssh servers: the machine and the command line."""
        return [f"{machine.name}: {line}" for machine in self if machine.is_on for line in machine.processes().values()]

    def end_processes(self) -> list[str]:
        """Wait for the end of what runs on the machines; kill and return what then still does."""
        until = time.monotonic() + WITHIN
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        for machine in self:
            for pid in machine.processes() if machine.is_on else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return left

    # -- down ----------------------------------------------------------------------------------------------------------

    def down(self) -> None:
        """End and remove all of it."""
        for machine in self:
            machine.power_off()
        for words in (["netns", "delete", self._switch], ["link", "delete", f"{self._name}r"]):
            subprocess.run(["ip", *words], check=False, timeout=240, capture_output=True)
        shutil.rmtree(self._lab, ignore_errors=True)

    def left(self) -> list[str]:
        """Return what there still is of it after ``down``: namespaces, links, files."""
        found = []
        for command in (["ip", "netns", "list"], ["ip", "-o", "link"]):
            listed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
            found += [line for line in listed.splitlines() if self._name in line]
        return [*found, *(str(path) for path in (self._lab,) if path.exists())]
