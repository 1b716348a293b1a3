# SPDX-License-Identifier: BSD-3-Clause
"""Name the environment variables that a backend sets for the host processes that it starts.

Ranks do not inherit them. An app that is submitted from inside a replica of another app does not inherit them either.
"""

import re
from collections.abc import MutableMapping, Sequence

CREDENTIALS = "MONARCH_CREDENTIALS"
"""The variable that carries a job's credentials to its hosts: the text itself, or ``file:PATH`` (see
``transport.credentials``)."""

RANK0_HOST = "TORCHX_RANK0_HOST"
"""The variable with the host of the first role's replica 0 (TorchX's macro ``rank0_env``)."""

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names the network interface for ranks' connections by Gloo."""

LOG_REFERENCES = "MONARCH_LOG_REFERENCES"
"""The variable that is set if the reader of a host's output knows ``system.log_references``."""

FOR_HOSTS = (
    "MONARCH_RENDEZVOUS",  # address of the rendezvous
    CREDENTIALS,
    "MONARCH_RUN_DIR",  # folder for sockets
    "MONARCH_EVENTS",  # the events file
    "MONARCH_LOG_DIR",  # folder for logs
    LOG_REFERENCES,
    "MONARCH_RESTART",  # how often the backend has restarted the host
    "MONARCH_STOP_FILE",  # a file that exists once the host is asked to stop, with SAVE or without content
    "MONARCH_PEERS",  # addresses of replica 0 of each role
    "MONARCH_NODE",  # name of the host's machine, where the host does not know it
    "MONARCH_HOST_ADDRESS",  # address of the host's machine
    "MONARCH_TERMINATION_LOG",  # file for the termination message of a pod
    "MONARCH_STARTS",  # file in which the host may record that it must not be restarted
    "MONARCH_RESULT_KEY",  # key with which the host signs its result
)
"""The variables that a backend sets for host processes."""


def keep_monarch_log_private(environ: MutableMapping[str, str]) -> None:
    """Have a process that starts with this environment, or imports Monarch later, log Monarch's errors to its stderr.

    By default Monarch logs to /tmp/USER/monarch_log.log, one predictable path for all processes of the user, which it
    opens when it is imported. Another user who makes that folder first can put a symbolic link or a FIFO there. No
    option selects another file. But Monarch logs to stderr when it cannot create the file, and this suffix makes the
    file name too long to create; any other suffix would be as predictable.
    """
    environ["MONARCH_LOG_SUFFIX"] = "to-stderr" * 32
    environ.setdefault("MONARCH_FILE_LOG", "error")


MONARCH_NOISE = re.compile(rb"(Monarch internal logs are being written to|unable to create log file in) .*")
"""Lines that Monarch prints of its log file whenever it is imported."""

_REPLICA0 = re.compile(r"MONARCH_REPLICA0_\d+")


def replica0_variable(role: int) -> str:
    """Return the name of the variable in which every replica of an app finds the host of a role's replica 0."""
    return f"MONARCH_REPLICA0_{role}"


def replica0_variables(hosts: Sequence[str]) -> dict[str, str]:
    """Return the variables with the host of each role's replica 0, given these hosts in the order of the roles."""
    return {RANK0_HOST: hosts[0], **{replica0_variable(role): host for role, host in enumerate(hosts)}}


SAVE = "save"
"""The content of MONARCH_STOP_FILE if ranks may first come to an agreed stop: nobody has cancelled the job."""


def is_for_hosts(name: str) -> bool:
    """Return whether a variable is set by a backend for its host processes."""
    return name in FOR_HOSTS or _REPLICA0.fullmatch(name) is not None


THIS_JOB = "MONARCH_THIS_JOB"
"""The variable with which a rank or a client script finds the hosts of its job (see ``client.this_job``)."""

BATCH_JOB = "MONARCH_BATCH_JOB"
"""Monarch's variable of a client script that runs in the job whose hosts it uses."""

JOB_VARIABLES = (*FOR_HOSTS, "MONARCH_JOB", THIS_JOB, BATCH_JOB, "TORCHELASTIC_ERROR_FILE")
"""All variables that describe the job around a submitter. A job that it submits must not inherit them."""
