# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The error file of whoever calls ``torchx run --wait``: it gets the job's root cause, as torchrun's caller does.

torchrun's ``main`` is decorated with ``@record``, which copies the error file of the rank that failed first to the
TORCHELASTIC_ERROR_FILE of its own environment (``ErrorHandler.dump_error_file`` of torch 2.13).
"""

from __future__ import annotations

import contextlib
import os

from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import NONE, AppState

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def write_root_cause(response: DescribeAppResponse) -> None:
    """Write why an app has failed to the caller's error file, if there is such a file to be written and a cause known.

    Args:
        response: the app; nothing is written unless it has failed.
    """
    path, cause = os.environ.get(VARIABLE), response.structured_error_msg
    if not path or response.state != AppState.FAILED or not cause or cause == NONE:
        return
    temporary = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):  # the command's exit code and `torchx status` tell all the same
        with open(temporary, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(cause)
        os.replace(temporary, path)
