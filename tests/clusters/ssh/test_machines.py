# SPDX-License-Identifier: BSD-3-Clause
"""The machines of the tests themselves: that they are as far apart as real ones."""

from __future__ import annotations

import subprocess

from tests.clusters.ssh.machine import USER
from tests.clusters.ssh.machines import DENIED, INNER, UNKNOWN, Machines
from tests.waits import until

_BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


def _ssh(*words: str) -> str:
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=2", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"{done.returncode}: {done.stderr.strip()}"


def test_machines_have_names_homes_and_boots_of_their_own_and_reach_one_another(machines: Machines) -> None:
    assert _ssh("m1", "hostname; touch file; cat /etc/hostname") == "m1\nm1"
    assert _ssh("m2", "ls file || ssh -o BatchMode=yes m1 ls file") == "file"
    assert _ssh(f"{INNER}3", "hostname") == "m3"
    assert _ssh(f"{USER}@m2", "pwd") == f"/home/{USER}"
    assert "Host key verification failed" in _ssh(UNKNOWN, "true")
    assert "Permission denied" in _ssh(DENIED, "true")
    machines["m1"].path("/root/file").unlink()


def test_a_machine_is_off_reboots_and_is_cut_off(machines: Machines) -> None:
    before, other = _ssh("m3", _BOOT_ID), _ssh("m2", _BOOT_ID)
    _ssh("m3", "touch /tmp/file file; setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
    # The client returns before what it has started has become `sleep`, or has ended.
    until(lambda: machines.processes() == ["m3: sleep 1000 "], "the only process")
    machines["m3"].power_off()
    assert "timed out" in _ssh("m3", "true")
    machines.mend()
    after = _ssh("m3", _BOOT_ID)
    assert len({before, after, other}) == 3
    until(lambda: machines.processes() == [], "the end of all processes")
    assert _ssh("m3", "ls file; ls /tmp/file || true; rm file") == "file"
    machines["m2"].unplug()
    assert "timed out" in _ssh("m2", "true")
