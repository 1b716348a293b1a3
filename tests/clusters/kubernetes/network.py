# SPDX-License-Identifier: BSD-3-Clause
"""The network of the pods of the tests' kubelet."""

from __future__ import annotations

import subprocess
import threading
import uuid

from tests.network import namespaces
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
        namespaces.switch(self.switch)
        ip("-n", self.switch, "addr", "add", "10.97.255.254/16", "dev", "bridge0")
        ip("-n", self.switch, "link", "set", "lo", "up")

    def add(self) -> tuple[str, str]:
        """A namespace and its address."""
        with self._lock:
            self._count += 1
            number = self._count
        name = f"{self._name}p{number}"
        address = f"10.97.{number // 250}.{number % 250 + 1}"
        namespaces.plug_in(name, self.switch, f"port{number}", f"{address}/16")
        return name, address

    def remove(self, name: str = "") -> None:
        """Remove one namespace, or all that is left."""
        subprocess.run(["ip", "netns", "delete", name or self.switch], check=False, timeout=240, capture_output=True)
