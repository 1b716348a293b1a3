# SPDX-License-Identifier: BSD-3-Clause
"""A cluster for tests: a real API server, and stand-ins for what no package of Debian's has (see ``stand_ins.py``).

Or any other that TEST_KUBECONFIG names; TEST_IMAGE is then an image, which its nodes have or can pull, of torch,
scikit-learn and torchx-monarch as it is here, with ``python``, ``torchrun`` and ``sh`` on the PATH. The user of that
kubeconfig must be allowed to make namespaces: everything that the tests make is in namespaces of their own
(``tests-...``), which they delete again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clusters import packages
from tests.clusters.kubernetes import server
from tests.network import namespaces

ROOT = Path(__file__).parents[3]

WIRE = os.environ.get("TEST_KUBE_WIRE", "real") if os.environ.get("TEST_KUBECONFIG") else "api-server"
"""What a test of here is in docs/reference/backends.md; ``make kubernetes-up`` says that its cluster has stand-ins."""


def missing() -> str:
    """Why there can be no cluster here; empty when there can. Builds the server where that is possible."""
    if os.environ.get("TEST_KUBECONFIG"):
        return "" if os.environ.get("TEST_IMAGE") else f"TEST_KUBECONFIG without TEST_IMAGE: see {__file__}"
    return namespaces.missing() or server.missing()


class Cluster:
    """Starts with ``up``, and dies with this process.

    Attributes:
        foreign: the kubeconfig of one that is not ours; empty for ours.
        image: what the pods are to be made of.
        patience: how many times as long things may take there.
    """

    def __init__(self) -> None:
        # Not in /tmp, which its pods do not see.
        self.folder = Path(tempfile.mkdtemp(prefix="tmkube", dir="/var/tmp"))
        self.foreign = os.environ.get("TEST_KUBECONFIG", "")
        self.image = os.environ.get("TEST_IMAGE") or "this-machine"
        self.patience = 5.0 if self.foreign else 1.0  # images are pulled, and backoffs are Kubernetes' own
        self.server = server.Server(self.folder)

    @property
    def kubeconfig(self) -> Path:
        """For clients."""
        return Path(self.foreign) if self.foreign else self.folder / "admin.yaml"

    def up(self) -> Cluster:
        """Start all of it."""
        if self.foreign:
            return self
        try:
            self.server.up()
            self._stand_ins()
        except BaseException:
            self.down()
            raise
        return self

    def _stand_ins(self) -> None:
        with open(self.folder / "stand-ins.log", "wb") as log:
            # Of what runs in the background the tests that look for their own processes are to see nothing.
            env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHX_MONARCH_")}
            command = [sys.executable, "-m", "tests.clusters.kubernetes.stand_ins", str(self.folder)]
            self.server.processes["stand-ins"] = subprocess.Popen(
                [*self.server.owner, *command, str(self.server.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**env, "PYTHONPATH": str(ROOT)},
            )
        self.server.wait("stand-ins", (self.folder / "proxy.port").exists)
        proxy = f"https://127.0.0.1:{(self.folder / 'proxy.port').read_text()}"
        self.server.kubeconfig(proxy, "admin")

    @property
    def stand_ins(self) -> Path | None:
        """The folder of the stand-ins, whose pods are on this machine; None of a real cluster."""
        return None if WIRE == "real" else self.kubeconfig.parent

    def network(self, uid: str = "") -> str:
        """The file of the network namespace of a pod of stand-ins, or of one from which all of them are reached."""
        assert self.stand_ins is not None
        return f"/run/netns/{(self.stand_ins / (f'pods/{uid}' if uid else '') / 'network').read_text()}"

    def log(self) -> str:
        """What the stand-ins have complained of."""
        return (self.folder / "stand-ins.log").read_text() if not self.foreign else ""

    def down(self) -> None:
        """End and remove all of it; fails when something is left."""
        self.server.down()
        packages.until_ended(str(self.folder))
        shutil.rmtree(self.folder)
