# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Errors that the user has caused."""

from __future__ import annotations

from torchx.specs.finder import ComponentValidationException


class UserError(ComponentValidationException, ValueError):  # type: ignore[misc]
    """Raised when a request is impossible or names something that does not exist.

    The torchx command shows the message without a traceback.
    """
