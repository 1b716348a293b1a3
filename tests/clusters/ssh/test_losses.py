# SPDX-License-Identifier: BSD-3-Clause
"""Machines that reboot, lose their power, or are cut off while a job runs."""

from __future__ import annotations

from torchx.specs import AppState, RetryPolicy

from tests.clusters.ssh.apps import Apps
from tests.clusters.ssh.machines import Machines

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
