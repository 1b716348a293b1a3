# SPDX-License-Identifier: BSD-3-Clause
"""Test all backends and write docs/reference/backends.md: ``python -m tests.contract [BACKEND ...] [-n 5 ...]``.

Words that are no backend are options of pytest. Columns of backends that are not named stay as they are.
"""

from __future__ import annotations

import sys

import pytest

from tests.contract.scenarios import BACKENDS
from tests.contract.table import PAGE, folder

if __name__ == "__main__":
    named = [word for word in sys.argv[1:] if word in BACKENDS] or BACKENDS
    options = [word for word in sys.argv[1:] if word not in BACKENDS]
    paths = [str(folder(backend)) for backend in named]
    sys.exit(pytest.main([*paths, "-m", "scenario", "--backends-table", str(PAGE), *options]))
