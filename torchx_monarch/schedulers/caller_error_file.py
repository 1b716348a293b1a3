# SPDX-License-Identifier: BSD-3-Clause
"""Write a root cause to the error file of the caller of ``torchx run --wait`` or ``torchx monarch exec``.

torchrun does so for its caller: its ``main`` is decorated with ``@record``, which copies the error file of the rank
that failed first to the TORCHELASTIC_ERROR_FILE of its own environment (``ErrorHandler.dump_error_file``, torch 2.13).
"""

from __future__ import annotations

import contextlib
import os

from torchx_monarch.system import safe_files

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def write_root_cause(cause: str) -> None:
    """Write the root cause of a failed job or run to the file that TORCHELASTIC_ERROR_FILE names, if it is set.

    Args:
        cause: the content of an error file; empty if the cause is unknown.
    """
    path = os.environ.get(VARIABLE)
    if not path or not cause:
        return
    with contextlib.suppress(OSError):  # the exit code and the summary still report the failure
        safe_files.write_named_file(path, cause.encode(), is_exposed=False)
