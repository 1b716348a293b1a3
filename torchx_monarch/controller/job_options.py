# SPDX-License-Identifier: BSD-3-Clause
"""The options of a job that its controller needs."""

from __future__ import annotations

import dataclasses

from torchx_monarch.controller.elastic import NodeRange
from torchx_monarch.model.host_spec import HostSpec


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """The options of a job that its controller needs.

    Attributes:
        spec: the command line of replica 0's host.
        run_id: TORCHELASTIC_RUN_ID of the ranks.
        grace: seconds from SIGTERM to SIGKILL for ranks.
        max_restarts: number of restarts after a rank has failed; one budget for the whole job.
        first_log_attempt: number of the first attempt's log folders.
        master_addr: address by which ranks dial rank 0, unless the user names one.
        store_bind: local address on which rank 0's store listens, unless the user names one; empty for all.
        report_timeout: seconds to wait for a host's own report after it has refused a request.
    """

    spec: HostSpec
    sizes: NodeRange
    run_id: str
    grace: float
    max_restarts: int = 0
    first_log_attempt: int = 0
    master_addr: str = ""
    store_bind: str = ""
    report_timeout: float = 1.0
