# SPDX-License-Identifier: BSD-3-Clause
"""The run options of all backends, their description for TorchX, and the checks of an app before its submission."""

from __future__ import annotations

import copy
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torchx
from torchx.schedulers.api import StructuredOpts
from torchx.specs import AppDef, RetryPolicy, VolumeMount, runopts

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.state_files import path_name
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.system.processes import why_too_large

_log = logging.getLogger("torchx_monarch")

_MAX_ROLE_NAME = 255
"""Bytes of the name of a folder on Linux: the logs of a role's replicas are in one of its name."""

_MAX_APP_NAME = 100
"""Characters of an app's name in an id: TorchX's random suffix and this package's prefixes need some of the 255."""

_described: dict[object, runopts] = {}

_describing = threading.Lock()
"""Python 3.11 fails now and then if two threads parse source text ("AST constructor recursion depth mismatch")."""


@dataclass
class MonarchOpts(StructuredOpts):  # type: ignore[misc]
    """Run options of every ``monarch_*`` scheduler; each backend's options inherit them."""

    grace: int = 30
    """Seconds between SIGTERM and SIGKILL when ranks are ended."""

    host_timeout: int = 300
    """Seconds after which the job fails if the hosts of a role have not all joined."""

    lease: int = 30
    """Seconds without a heartbeat after which a host counts as lost, also if it is stopped or hung."""

    hang_after: int = 300
    """Seconds that ranks wait in a collective before the rank that has not called it is named, or that a rank waits
    inside the kernel; 0 for never. Collectives need torch preloaded and `ranks=fork`, the defaults."""

    on_hang: str = "observe"
    """`observe`: hangs are reported. `restart`: the ranks are started again, within torchrun's `--max-restarts`.
    `fail`: the job ends."""

    on_slow: str = ""
    """A shell command that replica 0 runs when it finds that a rank, a host or all ranks are slow, with the verdict as
    JSON on stdin."""

    slow_hosts: str = "observe"
    """`observe`: hosts that are slow are reported. `replace`: the ranks are started again without a host that lacks
    processor time, is blocked on files or gets its data late, on one of the `spares`."""

    debug_wait: int = 300
    """Seconds for which a rank waits in `breakpoint()` for `torchx monarch debug`; 0: it does not wait."""

    preflight: str = "off"
    """`on`: before ranks start, compare the hosts and fail the job if one differs; `warn`: only say so."""

    preload: str = "auto"
    """Modules, separated by `+`, that one interpreter per host imports for all ranks. `auto`: torch, and what the
    program imports in its first statements; `auto+NAME` adds more. `none`: each rank imports everything."""

    ranks: str = "fork"
    """`fork`: ranks are forks of the interpreter that has imported the modules of `preload`. `fresh`: each rank is an
    interpreter of its own, as under torchrun."""

    retry_on: str = ""
    """Exit codes after which ranks are restarted, within torchrun's `--max-restarts`: numbers and names of signals,
    separated by `+` (`1+134+SIGKILL`); empty for any. Except on Kubernetes and AWS Batch it is for hosts, too, within
    `max_retries`."""

    same_step_limit: int = 3
    """For programs that report their steps: number of failures in a row at the same step after which ranks are not
    restarted; 0 for any number."""

    stop_after: str = ""
    """Time after which the hosts stop the job, `90m` or `2h`, so that programs with `torchx_monarch.steps` save;
    `max_retries` starts it again. Empty: never."""

    log_limit: str = ""
    """How much of the output of each rank is kept in each of its log files, `500M` or `2G`: three quarters of it at
    least, the newest. Empty: all of it."""

    spares: int = 0
    """Spare hosts of each role of ranks: a spare takes the place of a host that is lost or fails again and again. `-j
    4+1x8` says the same."""

    exclude_after: int = 3
    """Number of failures of one host within an hour after which another is used in its place; 0: never."""

    on_end: str = ""
    """A shell command that is run once when the job has ended, with its end as JSON on stdin."""


@dataclass
class NetworkOpts(MonarchOpts):
    """Run options of schedulers whose hosts communicate over a network."""

    rendezvous_port: int = 0
    """Port on which replica 0 listens for the other hosts; 0 for a random one per job."""

    ports: str = ""
    """The range LOW-HIGH of ports for Monarch and for code that hosts pass on, for firewalls; empty for any."""

    bind: str = ""
    """Address or interface on which hosts listen; empty for all."""

    rejoin_timeout: int = 60
    """Seconds for which a host that has lost replica 0 tries to reach its replacement."""

    insecure_plain_tcp: bool = False
    """Use no TLS between the hosts. Anyone who can reach one of their ports can run code there."""


@dataclass
class QueueOpts(StructuredOpts):  # type: ignore[misc]
    """Run options of schedulers whose jobs may wait for a machine."""

    gpus: int = 0
    """GPUs of a machine that the job waits for, in the order of submission; 0: it starts at once."""

    slots: int = 0
    """The same without GPUs: how many of the machine's slots the job waits for."""


@dataclass
class AvoidOpts(StructuredOpts):  # type: ignore[misc]
    """Run options of schedulers that can keep a job off some machines."""

    avoid_known_bad: bool = False
    """Use no machine on which two of your last five jobs have lost a host, failed alone or been slow
    (`torchx monarch nodes`)."""

    def __post_init__(self) -> None:
        self.left_out: Sequence[str] = ()
        """The names of these machines."""


def check_queue(options: QueueOpts) -> None:
    """Check the options of the queue; raise UserError if they are wrong."""
    for name in ("gpus", "slots"):
        if options[name] < 0:
            raise UserError(f"Run option `{name}` is {options[name]}; it is a number, 0 or more")
    if options.gpus and options.slots:
        raise UserError("Run options `gpus` and `slots` exclude each other: a job waits for one of them")


def run_options(kind: type[StructuredOpts]) -> runopts:
    """Return a copy of ``kind.as_runopts()``, with the help texts of inherited options, which TorchX leaves out.

    The result is cached: TorchX parses the source text of the class, and one submission asks a dozen times.
    """
    with _describing:
        if kind not in _described:
            options = kind.as_runopts()
            texts: dict[str, str] = {}
            bases: list[Any] = [base for base in kind.__mro__ if issubclass(base, StructuredOpts)]
            for base in bases:
                texts = {**base.get_docstrings(), **texts}
            for name, option in options:
                option.help = texts.get(name, option.help)
            _described[kind] = options
        return copy.deepcopy(_described[kind])


def safe_name(name: str) -> str:
    """Return the name of an app, changed and cut as far as a folder, a handle or a container requires."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "-" for c in name)
    return safe[:_MAX_APP_NAME].lstrip("-._") or "app"


def dns_label(name: str) -> str:
    """Return a name of the characters of a DNS label, which may be empty."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def role_labels(roles: Iterable[str], size: int) -> list[str]:
    """Return DNS labels for roles, of at most ``size`` characters, and of some more where two would be the same."""
    short = [dns_label(role)[:size].strip("-") or "role" for role in roles]
    return short if len(set(short)) == len(short) else [f"{label}-{index}" for index, label in enumerate(short)]


def check_roles(app: AppDef) -> None:
    """Check the names of an app's roles, by which status and logs identify them, how they are retried, and their sizes.

    Raises:
        UserError: two roles have one name, a name is too long for a folder, a retry policy is none, or arguments and
            variables are too large for a process.
    """
    for name, count in Counter(role.name for role in app.roles).items():
        if count > 1:
            raise UserError(f"two roles of app {app.name!r} are called {name!r}; each role needs a name of its own")
        if (length := len(path_name(name))) > _MAX_ROLE_NAME:
            raise UserError(
                f"role {name[:20]!r}…: as a folder its name has {length} bytes; it can have {_MAX_ROLE_NAME}"
            )
    for role in app.roles:
        if not isinstance(role.retry_policy, RetryPolicy):
            wrong = f"its retry_policy is {role.retry_policy!r}, and not RetryPolicy.APPLICATION, ROLE or REPLICA"
            raise UserError(f"role {role.name!r}: {wrong}")
        if reason := why_too_large(role.args, role.env):
            raise UserError(f"role {role.name!r}: {reason}. Put what is larger into a file")


def check_images(app: AppDef, specs: Sequence[RoleSpec]) -> None:
    """Check that each role that runs hosts names an image that may have this package.

    Raises:
        UserError: a role has no image, or the default image of TorchX's components, which lacks this package.
    """
    for role, spec in zip(app.roles, specs, strict=True):
        if not spec.runs_hosts:
            continue
        if not role.image:
            reason = "it names none"
        elif is_default_image(role.image):
            reason = f"TorchX's default image, {role.image}, has not"
        else:
            continue
        raise UserError(
            f"role {role.name!r} needs an image that has torchx-monarch, and {reason}. Name one with --image, or for "
            "all runs in .torchxconfig ([component:monarch.spmd] image = my/image). To build one, in the repository of "
            "torchx-monarch: docker build -f docker/Dockerfile -t my/image ."
        )


def warn_of_mounts(app: AppDef, scheduler: str) -> None:
    """Warn of the mounts of roles that run in no container, but not of a path that is mounted under its own name.

    TorchX's ``local_cwd`` and ``slurm`` leave mounts out without a word. A refusal would keep an app that is written
    for containers from a trial on this machine.
    """
    for role in app.roles:
        paths = [
            mount.dst_path
            for mount in role.mounts
            if isinstance(mount, VolumeMount) or os.path.normpath(mount.src_path) != os.path.normpath(mount.dst_path)
        ]
        if paths:
            reason = f"because {scheduler} runs it in no container"
            _log.warning("role %r: nothing is mounted at %s, %s", role.name, " and ".join(paths), reason)


def is_default_image(image: str) -> bool:
    """Return whether an image is the default one of TorchX's components, of whatever version."""
    return image.partition(":")[0] == str(torchx.IMAGE).partition(":")[0]


def compiled(regex: str | None) -> re.Pattern[str]:
    """Compile a regular expression, by default one that matches everywhere; raise UserError if it is not valid."""
    try:
        return re.compile(regex or "")
    except re.error as error:
        raise UserError(f"{regex!r} is no regular expression: {error}") from error
