# SPDX-License-Identifier: BSD-3-Clause
"""The run options of the Docker backend."""

from __future__ import annotations

from dataclasses import dataclass

from torchx.schedulers.docker_scheduler import Opts

from torchx_monarch.backends.core.options import NetworkOpts


@dataclass
class DockerOpts(NetworkOpts, Opts):  # type: ignore[misc]
    """The run options of TorchX's ``local_docker``, those of all network backends, and ``init``."""

    init: bool = True
    """Have docker-init be process 1 of each container, which passes signals on and reaps orphans; False where the
    daemon lacks it."""
