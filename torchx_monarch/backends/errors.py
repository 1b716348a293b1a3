# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions of schedulers, which TorchX's command line reports without a traceback.

``torchx_monarch.exceptions`` shows all exceptions of this package.
"""

from __future__ import annotations

from torchx.specs.finder import ComponentValidationException

from torchx_monarch.exceptions import TorchXMonarchError


class BackendError(TorchXMonarchError, ComponentValidationException, RuntimeError):  # type: ignore[misc]
    """Raised when a backend cannot do what was asked: it is unreachable, fails, or refuses a request.

    The torchx command shows the message without a traceback.
    """


class UserError(TorchXMonarchError, ComponentValidationException, ValueError):  # type: ignore[misc]
    """Raised when a request is impossible or names something that does not exist.

    The torchx command shows the message without a traceback.
    """
