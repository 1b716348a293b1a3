# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Write a job's root cause to the error file of the process that called ``torchx run --wait``, as torchrun does.

torchrun's ``main`` is decorated with ``@record``, which copies the error file of the rank that failed first to the
TORCHELASTIC_ERROR_FILE of its own environment (``ErrorHandler.dump_error_file`` of torch 2.13).
"""

from __future__ import annotations

import contextlib
import os

from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import NONE, AppState

from torchx_monarch.system import safe_files

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def write_root_cause(response: DescribeAppResponse) -> None:
    """Write the root cause of a failed app to the file that TORCHELASTIC_ERROR_FILE names.

    Args:
        response: the app. Nothing is written unless it has failed with a known cause and the variable is set.
    """
    path, cause = os.environ.get(VARIABLE), response.structured_error_msg
    if not path or response.state != AppState.FAILED or not cause or cause == NONE:
        return
    with contextlib.suppress(OSError):  # the exit code and `torchx status` still report the failure
        safe_files.replace_file(path, cause.encode())
