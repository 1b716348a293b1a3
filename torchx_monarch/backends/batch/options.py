# SPDX-License-Identifier: BSD-3-Clause
"""The run options of batch systems, and the time limit as sbatch writes it, which is the same on all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.options import NetworkOpts

_TIME = re.compile(r"(?:(?P<days>[0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")

_FORMATS = (
    "MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS, "
    "and more than 0"
)


@dataclass
class SubmitOpts(NetworkOpts):
    """Run options of every batch system."""

    submit_args: str = ""
    """Further words for the command that submits, quoted as in a shell."""


@dataclass
class AccountOpts(SubmitOpts):
    """Run options of batch systems that limit and charge jobs."""

    time: str | None = None
    """Time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds]."""

    account: str | None = None
    """The account to charge; to LSF and Grid Engine it is a project, to HTCondor an accounting group."""


@dataclass
class BatchOpts(AccountOpts):
    """Run options of batch systems with queues."""

    queue: str = ""
    """The queue of the jobs; empty for the system's default."""


def time_limit(text: str) -> int:
    """Return the seconds of a time limit; raise UserError if it is none."""
    found = _TIME.fullmatch(text)
    if found is not None:
        days, *fields = found.groups()
        given = [int(field) for field in fields if field is not None]
        # After days come hours; else one number or the first of two are minutes.
        units = (3600, 60, 1) if days is not None or len(given) == 3 else (60, 1)
        seconds = int(days or 0) * 86400 + sum(number * unit for number, unit in zip(given, units, strict=False))
        if seconds:
            return seconds
    raise UserError(f"Run option `time` is {text}; it is {_FORMATS}")


def short_names(nodes: Iterable[str]) -> list[str]:
    """Return the names of machines without their domains, which a batch system may know or not."""
    return [node.partition(".")[0] for node in nodes]


def clock(seconds: int) -> str:
    """Return seconds as HOURS:MINUTES:SECONDS, as in ``26:03:04``."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
