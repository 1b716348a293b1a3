# SPDX-License-Identifier: BSD-3-Clause
"""The network of the pods of the tests' kubelet."""

from __future__ import annotations

import subprocess
import threading
import uuid

from tests.network.namespaces import ip


class Network:
    """Addresses for pods: each has a namespace, on a switch in a namespace of its own.

    Attributes:
        switch: the namespace of the switch, from which all pods are reached.
    """

    def __init__(self) -> None:
        self._name = f"tk{uuid.uuid4().hex[:6]}"
        self.switch = f"{self._name}s"
        self._count = 0
        self._lock = threading.Lock()
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        ip("-n", self.switch, "addr", "add", "10.97.255.254/16", "dev", "bridge0")
        ip("-n", self.switch, "link", "set", "bridge0", "up")
        ip("-n", self.switch, "link", "set", "lo", "up")

    def add(self) -> tuple[str, str]:
        """A namespace and its address."""
        with self._lock:
            self._count += 1
            number = self._count
        name, port = f"{self._name}p{number}", f"port{number}"
        address = f"10.97.{number // 250}.{number % 250 + 1}"
        ip("netns", "add", name)
        ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("-n", self.switch, "link", "set", port, "master", "bridge0", "up")
        ip("-n", name, "addr", "add", f"{address}/16", "dev", "eth0")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", "eth0", "up")
        return name, address

    def remove(self, name: str = "") -> None:
        """Remove one namespace, or all that is left."""
        subprocess.run(["ip", "netns", "delete", name or self.switch], check=False, timeout=240, capture_output=True)
