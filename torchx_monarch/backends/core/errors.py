# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions of schedulers and backends, which the torchx command shows without a traceback.

``torchx_monarch.exceptions`` shows all exceptions of this package.
"""

from __future__ import annotations

from torchx.specs.finder import ComponentValidationException

from torchx_monarch.exceptions import TorchXMonarchError


class UserError(TorchXMonarchError, ComponentValidationException, ValueError):  # type: ignore[misc]
    """Raised when a request is impossible or names something that does not exist."""


class BackendError(TorchXMonarchError, ComponentValidationException, RuntimeError):  # type: ignore[misc]
    """Raised when the place where apps run is missing, does not answer, or refuses a request."""


class SubmitError(BackendError):
    """Raised when an app could not be started; nothing is left of it."""
