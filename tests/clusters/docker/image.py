# SPDX-License-Identifier: BSD-3-Clause
"""Build the image of docker/Dockerfile on the daemon of the tests, which reaches no registry and no index.

Its base is made of Debian's packages; the wheels come from where pip finds them on this machine.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

from docker.errors import BuildError

from tests.clusters import packages
from tests.clusters.docker.daemon import ROOT, Daemon

_SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
"""Debian's suites, by the Python that they have: wheels are those for this interpreter."""

_BASE_PACKAGES = "python3,python3-venv,libstdc++6,dash,coreutils,sed"

_TAG = "torchx-monarch-tests:base"


def missing() -> str:
    """Return why the image cannot be built here; empty when it can."""
    if sys.version_info[:2] not in _SUITES:
        return f"no release of Debian has Python {sys.version_info[0]}.{sys.version_info[1]} for the image's base"
    lacking = packages.missing(["mmdebstrap"], ["mmdebstrap"])
    return "not installed, and could not be: mmdebstrap" if lacking else ""


def build(daemon: Daemon, folder: Path) -> str:
    """Build the image; return its id.

    Args:
        daemon: where to build it.
        folder: an empty folder, for the sources and the wheels.

    Raises:
        AssertionError: the build has failed; holds its last lines.
        CalledProcessError: Debian's packages or the wheels cannot be had.
    """
    base, sources = folder / "base.tar", folder / "sources"
    suite = _SUITES[sys.version_info[:2]]
    # Without scripts of the packages: files suffice to run a Python.
    debian = ["mmdebstrap", "-q", "--mode=root", "--variant=extract", f"--include={_BASE_PACKAGES}", suite, str(base)]
    subprocess.run(debian, check=True, timeout=300)
    unwanted = shutil.ignore_patterns(".venv*", ".*_cache", ".git", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, sources, symlinks=True, ignore=unwanted)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:", "-c", "constraints.txt"]
    words = ["-d", "docker/wheels", ".", "setuptools"]
    subprocess.run([*pip, *words], cwd=sources, check=True, timeout=300)
    with contextlib.closing(daemon.client()) as client:
        client.api.timeout = 600  # a step that copies the environment says nothing meanwhile
        path = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        client.api.import_image_from_file(str(base), *_TAG.split(":"), changes=[path])
        try:
            image, _ = client.images.build(
                path=str(sources),
                dockerfile="docker/Dockerfile",
                buildargs={"BASE": _TAG},
                network_mode="none",
                rm=True,
                forcerm=True,
            )
        except BuildError as error:
            lines = [str(line.get("stream") or line) for line in error.build_log]
            raise AssertionError("".join(lines)[-5000:]) from error
    shutil.rmtree(folder)
    return str(image.id)
