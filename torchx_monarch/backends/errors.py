# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a user has got wrong."""

from __future__ import annotations

from torchx.specs.finder import ComponentValidationException


class UserError(ComponentValidationException, ValueError):  # type: ignore[misc]
    """What was asked for is not there or cannot be done. The torchx command shows the message without a traceback."""
