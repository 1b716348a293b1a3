# SPDX-License-Identifier: BSD-3-Clause
"""An image of docker/Dockerfile runs a job: nothing of this machine is mounted into it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.clusters.docker import image
from tests.clusters.docker.apps import NAME, Apps
from tests.clusters.docker.daemon import Daemon

pytestmark = [pytest.mark.slow, pytest.mark.image]

SUMS = """\
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print("sum", int(total), "of", dist.get_world_size(), "in", os.getcwd(), "by", sys.prefix, flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def built(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Id of the image; skips the test where it cannot be built."""
    reason = image.missing()
    if not reason:
        try:
            return image.build(daemon, tmp_path_factory.mktemp("image"))
        except subprocess.CalledProcessError as error:
            reason = f"Debian's packages or the wheels cannot be downloaded: {error}"
    (pytest.fail if "CI" in os.environ else pytest.skip)(reason)


def test_a_job_of_two_hosts(apps: Apps, built: str, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(SUMS)
    words = ["-j", "2x2", "--image", built, "--memMB", "2000", "--env", "OMP_NUM_THREADS=1", "train.py"]
    said = apps.torchx("run", "-s", NAME, "--workspace", f"file://{code}", "monarch.spmd", *words)
    handle = apps.adopt(said.split()[-1])
    apps.wait(handle)
    assert "".join(apps.log(handle, "train")).count("sum 10 of 4 in /app by /opt/venv") == 4, apps.everything(handle)
