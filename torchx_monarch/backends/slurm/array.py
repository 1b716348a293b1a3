# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Job arrays: which tasks one has, and what each of them is called.

``0,3,7-20:2%4``, as sbatch has it: indices, ranges with a step, and how many array tasks may run at a time. Each array
task is one whole run of the app's role. They count in ascending order, whatever order they are written in, for so Slurm
starts them: with n replicas, the array task at position e has the replicas e*n to e*n+n-1 of the app.

An array's tasks are jobs with ids of their own, the last of them with the array's: so we call them ``123_7`` wherever
Slurm is asked for one, for what is asked for ``123`` is meant for all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIGHEST = 4_000_000
"""The highest index that any cluster can have (slurm.conf(5), MaxArraySize)."""

_ITEM = re.compile(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?")
_ID = re.compile(r"([0-9]+)(?:_([0-9]+))?")


def parse(text: str) -> tuple[list[int], int | None]:
    """Read sbatch's ``--array``.

    Returns:
        The indices in ascending order, and how many of the array tasks may run at a time; None for all.

    Raises:
        ValueError: it is no such thing, or means nothing; the message says what is wrong with which part.
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
    """The indices that Slurm says (``4-9%2``) or was told; none where it says none."""
    try:
        return parse(text or "")[0]
    except ValueError:  # such as N/A
        return []


def split(app_id: str) -> tuple[str, int | None] | None:
    """The job's id and, for the handle of one array task, its index: ``123_7``; None when it is no id of Slurm's."""
    match = _ID.fullmatch(app_id)
    return (match[1], int(match[2]) if match[2] else None) if match else None


def own_id(environ: Mapping[str, str]) -> str:
    """What Slurm and the app's handle call the array task that this process runs in."""
    return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"


def names(app_id: str, indices: Sequence[int]) -> str:
    """Several array tasks in one word for Slurm's commands."""
    return f"{app_id}_[{','.join(map(str, indices))}]"
