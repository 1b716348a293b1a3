# SPDX-License-Identifier: BSD-3-Clause
"""Register this package's schedulers when TorchX is configured to ignore entry points.

By default TorchX reads entry points and namespace packages (``TORCHX_PLUGINS_SOURCE=3``), and each command warns of a
name that both register. So this module registers names only under ``TORCHX_PLUGINS_SOURCE=1``.
"""

from __future__ import annotations

import importlib
import os

from torchx.plugins import register
from torchx.schedulers import DEFAULT_SCHEDULER_MODULES
from torchx.schedulers.api import Scheduler

if os.environ.get("TORCHX_PLUGINS_SOURCE") == "1":
    _name, _module = next(iter(DEFAULT_SCHEDULER_MODULES.items()))

    # TorchX's default scheduler is the first registered name, and TorchX registers the functions of this module in the
    # order of dir(). The name `_0_default` sorts first and keeps TorchX's own default.
    @register.scheduler(name=_name)  # type: ignore[untyped-decorator]
    def _0_default(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
        scheduler: Scheduler[dict[str, object]] = importlib.import_module(_module).create_scheduler(
            session_name, **kwargs
        )
        return scheduler

    @register.scheduler(name="monarch_local")  # type: ignore[untyped-decorator]
    def monarch_local(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
        """See ``torchx_monarch.schedulers``."""
        from torchx_monarch import schedulers

        return schedulers.monarch_local(session_name, **kwargs)

    @register.scheduler(name="monarch_docker")  # type: ignore[untyped-decorator]
    def monarch_docker(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
        """See ``torchx_monarch.schedulers``."""
        from torchx_monarch import schedulers

        return schedulers.monarch_docker(session_name, **kwargs)

    @register.scheduler(name="monarch_slurm")  # type: ignore[untyped-decorator]
    def monarch_slurm(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
        """See ``torchx_monarch.schedulers``."""
        from torchx_monarch import schedulers

        return schedulers.monarch_slurm(session_name, **kwargs)

    @register.scheduler(name="monarch_sge")  # type: ignore[untyped-decorator]
    def monarch_sge(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
        """See ``torchx_monarch.schedulers``."""
        from torchx_monarch import schedulers

        return schedulers.monarch_sge(session_name, **kwargs)

    @register.scheduler(name="monarch_ssh")  # type: ignore[untyped-decorator]
    def monarch_ssh(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
        """See ``torchx_monarch.schedulers``."""
        from torchx_monarch import schedulers

        return schedulers.monarch_ssh(session_name, **kwargs)

    @register.scheduler(name="monarch_kubernetes")  # type: ignore[untyped-decorator]
    def monarch_kubernetes(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
        """See ``torchx_monarch.schedulers``."""
        from torchx_monarch import schedulers

        return schedulers.monarch_kubernetes(session_name, **kwargs)

    @register.scheduler(name="monarch_aws_batch")  # type: ignore[untyped-decorator]
    def monarch_aws_batch(session_name: str, **kwargs: object) -> Scheduler[dict[str, object]]:
        """See ``torchx_monarch.schedulers``."""
        from torchx_monarch import schedulers

        return schedulers.monarch_aws_batch(session_name, **kwargs)
