# SPDX-License-Identifier: BSD-3-Clause
"""Machines that cannot be used: the message names the machine, and nothing is left on the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchx.specs.finder import ComponentValidationException

from tests.clusters.ssh.apps import STATE, Apps
from tests.clusters.ssh.machines import DENIED, UNKNOWN, Machines


def _refused(apps: Apps, *hosts: str, **cfg: Any) -> str:
    """Submit to machines that cannot be used together; return the message. Nothing may be left."""
    with pytest.raises((ComponentValidationException, ValueError)) as caught:
        apps.run(apps.role("sleep", "1000", replicas=len(hosts)), hosts=list(hosts), **cfg)
    assert apps.files() == []
    return str(caught.value)


def test_a_machine_with_an_unknown_host_key_is_refused(apps: Apps) -> None:
    said = _refused(apps, "m2", UNKNOWN)
    assert UNKNOWN in said and "host key" in said.lower(), said


def test_a_machine_that_does_not_let_the_user_in_is_named(apps: Apps) -> None:
    said = _refused(apps, "m2", DENIED)
    assert DENIED in said and "permission denied" in said.lower(), said


def test_a_machine_without_power_is_named(apps: Apps, machines: Machines) -> None:
    machines["m3"].power_off()
    said = _refused(apps, "m1", "m3")
    assert "m3: ssh: connect to host" in said, said


def test_a_name_that_nobody_knows_is_named(apps: Apps) -> None:
    said = _refused(apps, "m1", "no.such.machine.invalid")
    assert "no.such.machine.invalid" in said and "resolve" in said.lower(), said


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
