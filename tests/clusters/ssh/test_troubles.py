# SPDX-License-Identifier: BSD-3-Clause
"""Machines that cannot be used or are lost: the message names the machine, and nothing is left on the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppState, RetryPolicy
from torchx.specs.finder import ComponentValidationException

from tests.clusters.ssh.apps import STATE, Apps
from tests.clusters.ssh.machines import DENIED, UNKNOWN, Machines


def _refused(apps: Apps, *hosts: str, **cfg: Any) -> str:
    """Submit to machines that cannot be used together; return the message. Nothing may be left."""
    with pytest.raises((ComponentValidationException, ValueError)) as caught:
        apps.run(apps.role("sleep", "1000", replicas=len(hosts)), hosts=list(hosts), **cfg)
    assert apps.files() == []
    return str(caught.value)


@pytest.mark.parametrize(
    ("machine", "why"), [(UNKNOWN, "host key"), (DENIED, "permission denied"), ("no.such.machine.invalid", "resolve")]
)
def test_a_machine_that_cannot_be_reached_is_named(apps: Apps, machine: str, why: str) -> None:
    said = _refused(apps, "m2", machine)
    assert machine in said and why in said.lower(), said


def test_a_machine_without_power_is_named(apps: Apps, machines: Machines) -> None:
    machines["m3"].power_off()
    said = _refused(apps, "m1", "m3")
    assert "m3: ssh: connect to host" in said, said


def test_a_wrong_python_is_named(apps: Apps, tmp_path: Path) -> None:
    said = _refused(apps, "m1", "m2", python="/nonexistent/python")
    assert "/nonexistent/python" in said and "m1" in said, said
    said = _refused(apps, "m1", "m2", python="/usr/bin/env -i /usr/bin/false")
    assert "m1" in said, said


def test_a_full_disk_is_named(apps: Apps, machines: Machines) -> None:
    there = machines["m2"]
    there.run("mkdir", "-p", STATE)
    there.run("mount", "-t", "tmpfs", "-o", "size=16k", "small", STATE)
    try:
        there.run("sh", "-c", f"cat /dev/zero > {STATE}/filler || true")
        said = _refused(apps, "m1", "m2")
        assert "m2" in said and "no space left" in said.lower(), said
    finally:
        there.run("umount", STATE)


_SLEEPS = """
    import os, time
    print("rank", os.environ["RANK"], flush=True)
    time.sleep(1000)
"""


def test_the_job_fails_with_the_name_of_a_machine_without_power(apps: Apps, machines: Machines) -> None:
    apps.hosts = ["m1", "m2"]
    handle = apps.run(apps.torchrun(apps.program(_SLEEPS), nproc=1), hosts=apps.hosts, lease=5)
    apps.until(lambda: apps.log(handle).count("]:rank") == 2, "the ranks", handle)
    machines["m2"].power_off()
    # The other machine ends by itself, without any client.
    apps.until(lambda: not apps.running("m1"), "the end of the other machine's processes", handle)
    status = apps.wait(handle, AppState.FAILED)
    assert "m2" in status.msg + status.structured_error_msg, status
    machines.mend()
    assert apps.status(handle).state is AppState.FAILED


def test_a_job_of_before_a_reboot_has_failed_and_stays_so(apps: Apps, machines: Machines) -> None:
    role = apps.role("sh", "-c", "echo up; exec sleep 1000", max_retries=1, retry_policy=RetryPolicy.REPLICA)
    handle = apps.run(role, hosts=["m2"])
    apps.until(lambda: "up\n" in apps.lines(handle), "the start", handle)
    machines["m2"].reboot()
    status = apps.wait(handle, AppState.FAILED)
    assert "m2" in status.msg and "reboot" in status.msg, status
    assert apps.lines(handle) == ["up\n"] and not apps.running("m2")
