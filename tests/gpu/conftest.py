# SPDX-License-Identifier: BSD-3-Clause
"""What the tests that need a GPU share with those of tests/local."""

from tests.local.conftest import script

__all__ = ["script"]
