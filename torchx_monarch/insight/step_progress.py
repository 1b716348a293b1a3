# SPDX-License-Identifier: BSD-3-Clause
"""In the program of a rank: ``torchx_monarch.progress``, and the file through which it tells the host.

The file lies beside the error file of the rank: ``attempt_N/RANK/progress``. The host makes it before the rank starts.
It has at most ``SIZE`` bytes: ``HEAD`` with the length and the checksum of what follows, a JSON object with the fields
of ``rank_sample.Progress``. Another file has what was reported before (``insight.metrics``). Standard library only:
every rank imports it.
"""

from __future__ import annotations

import binascii
import json
import math
import operator
import os
import struct
import time
from typing import Any

from torchx_monarch.insight.metrics import MAX_METRICS, MAX_NAME, MetricsFile

NAME = "progress"
"""Name of the file."""

HEAD = struct.Struct("!II")

SIZE = 1 << 14

MAX_DIGEST = 128
"""Characters of the digest of what the program has computed."""

MAX_STEP = 1 << 53
"""Steps are less than this, which every reader of JSON represents exactly."""


def progress(
    step: int, total: int | None = None, *, checkpoint: int | None = None, digest: str = "", **metrics: float
) -> None:
    """Report the progress of the program: ``torchx monarch status`` shows the step, the time left and the metrics.

    Call it in a rank after each step, or now and then; it takes 10 to 30 microseconds. Without our hosts, such as under
    torchrun or in a notebook, and with ``--log-dir /dev/null``, it does nothing.

    A job that fails again and again at the same step is not restarted any more (``-cfg same_step_limit``).

    Args:
        step: the step that the program has finished; 0 or more.
        total: the last step; None if the program does not know.
        checkpoint: the step that the last checkpoint contains; None if there is none, or no other one than before.
        digest: a text of up to 128 characters that is equal where the program has computed the same, such as a hash of
            the weights: ``torchx monarch drill`` compares it with that of an undisturbed run.
        metrics: up to 16 numbers by name, such as the loss. One that is not finite is left out.

    Raises:
        TypeError: a step is no integer, the digest is no text, or a metric is no number.
        ValueError: a step is negative or 2**53 or more, the digest is too long, or there are too many metrics, or one
            with a name longer than 64 characters.
    """
    if len(metrics) > MAX_METRICS or any(len(name) > MAX_NAME for name in metrics):
        raise ValueError(f"give at most {MAX_METRICS} metrics, with names of at most {MAX_NAME} characters")
    if not isinstance(digest, str):
        raise TypeError(f"digest is {type(digest).__name__}: give a str")
    if len(digest) > MAX_DIGEST:
        raise ValueError(f"digest has {len(digest)} characters: give at most {MAX_DIGEST}")
    numbers = {name: number for name, value in metrics.items() if math.isfinite(number := _number(name, value))}
    _report(
        _step("step", step),
        None if total is None else _step("total", total),
        None if checkpoint is None else _step("checkpoint", checkpoint),
        digest,
        numbers,
    )


def set_checkpoint(step: int) -> None:
    """Have the next report name the step of the last checkpoint."""
    global _checkpoint
    _checkpoint = step, time.time()


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except Exception as error:  # a tensor raises others than ``float``
        raise TypeError(f"metric {name} is {type(value).__name__}, and no number: {error}") from None


def _step(name: str, value: Any) -> int:
    step = operator.index(value)
    if not 0 <= step < MAX_STEP:
        raise ValueError(f"{name} is {step}: give 0 or more, and less than 2**53")
    return step


# -- the file ----------------------------------------------------------------------------------------------------------

_file: int | None = None
"""The file; -1 if there is none, None before the first call."""

_first: tuple[int, float] = (0, 0.0)
_checkpoint: tuple[int | None, float] = (None, 0.0)
_metrics: MetricsFile | None = None


def _open() -> int:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return -1
    try:
        # Not created: torchrun has no such file, and there nobody reads it.
        return os.open(os.path.join(os.path.dirname(path), NAME), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return -1


def _report(step: int, total: int | None, checkpoint: int | None, digest: str, metrics: dict[str, float]) -> None:
    global _file, _first, _checkpoint, _metrics
    now = time.time()
    if _file is None:
        _file, _first = _open(), (step, now)
        if _file >= 0:
            _metrics = MetricsFile(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))
    if checkpoint not in (None, _checkpoint[0]):
        _checkpoint = checkpoint, now
    if _metrics is not None:
        _metrics.add(step, now, metrics, _checkpoint[0])
    if _file < 0:
        return
    shown = {
        "step": step,
        "total": total,
        "time": now,
        "checkpoint": _checkpoint[0],
        "checkpoint_time": _checkpoint[1],
        "digest": digest,
        "metrics": metrics,
        "first_step": _first[0],
        "first_time": _first[1],
    }
    data = json.dumps(shown).encode()
    try:
        os.pwrite(_file, HEAD.pack(len(data), binascii.crc32(data)) + data, 0)
    except OSError:
        _file = -1  # a full disk, or a program that has closed all descriptors
