# SPDX-License-Identifier: BSD-3-Clause
"""Times before now, as people type them."""

from __future__ import annotations

import argparse
import re
import time
from datetime import datetime, timezone

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def since(text: str) -> datetime:
    """Parse the value of ``--since``: a duration before now (``90s``, ``10m``, ``2h``, ``1d``), or a time (ISO 8601).

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text)
    try:
        if parts:
            when = datetime.fromtimestamp(time.time() - float(parts[1]) * _UNITS[parts[2] or "s"], timezone.utc)
        else:
            when = datetime.fromisoformat(text.replace("Z", "+00:00"))
        when.timestamp()  # which a time of the first and last years does not have
        return when
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a duration (90s, 10m, 2h, 1d) nor a time (2026-11-22T14:30)"
        ) from None
