# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parse the indices of job arrays, and name array tasks for Slurm's commands.

sbatch's syntax is ``0,3,7-20:2%4``: indices, ranges with a step, and how many array tasks may run at a time. Each array
task runs the app's one role once, with all its replicas. Array tasks are ordered by ascending index, however they are
written, because Slurm starts them in that order: with n replicas per array task, the array task at position e has the
replicas e*n to e*n+n-1 of the app.

Slurm gives each array task a job id, and the last one the id of the array. Commands for one array task therefore use
``123_7``: a command for ``123`` would apply to the whole array.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIGHEST = 4_000_000
"""The highest index that any cluster allows (slurm.conf(5), MaxArraySize)."""

_ITEM = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")
_ID = re.compile(r"([0-9]+)(?:_([0-9]+))?")


def parse(text: str) -> tuple[list[int], int | None]:
    """Parse the value of sbatch's ``--array``.

    Returns:
        The indices in ascending order, and how many array tasks may run at a time; None for all.

    Raises:
        ValueError: the value is malformed or contradictory; the message names the part and what is wrong with it.
    """
    items, percent, throttle = text.partition("%")
    if percent and not (re.fullmatch("[0-9]+", throttle) and int(throttle)):
        raise ValueError(f"{throttle!r} after `%` is not how many array tasks may run at a time, 1 or more")
    found: set[int] = set()
    for item in items.split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is neither an index nor a range")
        low, high, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if high < low:
            raise ValueError(f"the range {item!r} counts down")
        if step == 0:
            raise ValueError(f"the step of {item!r} is 0")
        if high > HIGHEST:
            raise ValueError(f"{high} is over {HIGHEST}, the highest index of any cluster")
        found.update(range(low, high + 1, step))
    return sorted(found), int(throttle) if percent else None


def tasks(text: str | None) -> list[int]:
    """Parse the indices that Slurm prints or was given (``4-9%2``); return an empty list if there are none."""
    try:
        return parse(text or "")[0]
    except ValueError:  # such as N/A
        return []


def split(app_id: str) -> tuple[str, int | None] | None:
    """Split ``123_7`` into a job's id and an array task's index, None for ``123``; return None if it is no such id."""
    match = _ID.fullmatch(app_id)
    return (match[1], int(match[2]) if match[2] else None) if match else None


def own_id(environ: Mapping[str, str]) -> str:
    """Return the id, such as ``123_7``, of the array task that this process runs in."""
    return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"


def names(app_id: str, indices: Sequence[int]) -> str:
    """Return one argument for Slurm's commands that names several array tasks: ``123_[4,7]``."""
    return f"{app_id}_[{','.join(map(str, indices))}]"
