# SPDX-License-Identifier: BSD-3-Clause
"""A real Grid Engine on this machine: Debian's packages, one node with slots for all tests.

Debian's daemons have fixed folders and ports, so there is one at a time, and it is the system's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.clusters import packages
from tests.waits import WITHIN, until

_HERE = Path(__file__).parent
_ROOT = Path("/var/lib/gridengine")
_PACKAGES = ("gridengine-master", "gridengine-exec", "gridengine-client")
_ANSWERS = """\
gridengine-{0} shared/gridenginemaster string {1}
gridengine-{0} shared/gridenginecell string default
gridengine-{0} shared/gridengineconfig boolean true
"""

ENVIRON = {"SGE_ROOT": str(_ROOT), "SGE_CELL": "default"}
"""What clients need."""


def missing() -> str:
    """Why there can be no cluster here, after an attempt to install it; empty when there can."""
    if os.geteuid() != 0:
        return "Grid Engine's daemons need root"
    answers = "".join(_ANSWERS.format(part, os.uname().nodename) for part in ("common", "client", "master", "exec"))
    subprocess.run(["debconf-set-selections"], input=answers, text=True, timeout=WITHIN, check=False)
    absent = packages.missing(("qsub", "sge_qmaster", "sge_execd"), _PACKAGES)
    return f"not installed, and cannot be: {', '.join(absent)}" if absent else ""


class GridEngine:
    """Queue ``main.q`` on this machine; ``up`` starts it."""

    def up(self) -> GridEngine:
        """Start and configure the daemons."""
        host = os.uname().nodename
        (_ROOT / "default" / "common" / "host_aliases").write_text(f"{host} localhost\n")
        subprocess.run(["/etc/init.d/gridengine-master", "start"], check=True, capture_output=True, timeout=WITHIN)
        until(lambda: self._try("-sh"), "Grid Engine's master", every=0.3)
        self._try("-ah", host)
        self._try("-as", host)
        subprocess.run(["/etc/init.d/gridengine-exec", "start"], check=True, capture_output=True, timeout=WITHIN)
        until(lambda: host in self._try("-sel"), "Grid Engine's node", every=0.3)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "hostgroup").write_text(
                (_HERE / "hostgroup").read_text().replace("hostlist vm", f"hostlist {host}")
            )
            self._try("-Ahgrp", f"{folder}/hostgroup")
            self._try("-Aq", str(_HERE / "queue"))
            self._try("-Ap", str(_HERE / "pe"))
            self._try("-aattr", "queue", "pe_list", "smp", "main.q")
            self._try("-rattr", "queue", "slots", "64", "main.q")
            # Root's jobs run, and the scheduler looks at the queue every second and after each change.
            self._change(folder, "conf", {"min_uid": "0", "min_gid": "0"}, "global")
            every = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
            self._change(
                folder, "sconf", {**every, "load_adjustment_decay_time": "0:0:0", "job_load_adjustments": "NONE"}
            )
        return self

    def _try(self, *words: str) -> str:
        done = subprocess.run(
            ["qconf", *words],
            env={**os.environ, **ENVIRON},
            capture_output=True,
            text=True,
            timeout=WITHIN,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""

    def _change(self, folder: str, what: str, values: dict[str, str], name: str = "") -> None:
        text = self._try(f"-s{what}", *([name] if name else []))
        for key, value in values.items():
            text = re.sub(rf"(?m)^{key} .*$", f"{key} {value}", text)
        path = Path(folder, name or what)
        path.write_text(text)
        self._try(f"-M{what}", str(path))

    def down(self) -> None:
        """Stop the daemons."""
        self._try("-kej")
        self._try("-km")
        for name in ("sge_execd", "sge_qmaster"):
            for pid in Path("/var/run/gridengine").glob(f"*{name.removeprefix('sge_')}*.pid"):
                try:
                    os.kill(int(pid.read_text()), signal.SIGTERM)
                except (OSError, ValueError):
                    continue
