# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The environment variables through which a backend talks to the host processes that it starts.

Ranks do not get them, and an app that is submitted from within another one's replica does not inherit them.
"""

import re

FOR_HOSTS = (
    "MONARCH_RENDEZVOUS",
    "MONARCH_CREDENTIALS",
    "MONARCH_RUN_DIR",
    "MONARCH_EVENTS",
    "MONARCH_LOG_DIR",
    "MONARCH_RESTART",
    "MONARCH_STOP_FILE",
    "MONARCH_PEERS",
    "MONARCH_START",
    "MONARCH_HOST_ADDRESS",
    "MONARCH_TERMINATION_LOG",
    "MONARCH_PORT_OFFSET",
    "MONARCH_STARTS",
    "MONARCH_RESULT_KEY",
)
"""Where hosts meet and by what credentials; where sockets, events and logs go; how often it was started again; the file
that announces a stop; the address of the host's own machine; the file with a pod's last word;
where replica 0 of each role listens; what tells this start of all roles from an earlier one; how far the port of
replica 0 is shifted; where a host may note that it is not to be started again; by what key it signs its result."""

_REPLICA0 = re.compile(r"MONARCH_REPLICA0_\d+")


def replica0_variable(role: int) -> str:
    """The variable in which every replica of an app finds the host of replica 0 of a role, by the role's index."""
    return f"MONARCH_REPLICA0_{role}"


def is_for_hosts(name: str) -> bool:
    """Whether it is one of those through which a backend talks to hosts."""
    return name in FOR_HOSTS or _REPLICA0.fullmatch(name) is not None


OF_A_JOB = (*FOR_HOSTS, "MONARCH_JOB", "TORCHELASTIC_ERROR_FILE")
"""All that describes the job around a submitter, whose own job is another one."""
