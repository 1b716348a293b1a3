# SPDX-License-Identifier: BSD-3-Clause
"""The name of the user of this process."""

from __future__ import annotations

import getpass
import os


def user_name() -> str:
    """Return the user's name; ``uid1234`` for a user without one, as in a container of OpenShift."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError before Python 3.13
        return f"uid{os.getuid()}"
