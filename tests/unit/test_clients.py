# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the submitting machine keeps of a job's credentials."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from torchx_monarch.backends.core import client_credentials
from torchx_monarch.transport import credentials


def test_is_for_its_owner_alone_until_the_app_is_deleted() -> None:
    text = credentials.create()[1].to_text()
    before = os.umask(0)
    try:
        client_credentials.keep("monarch_batch", "queue:app/1", text, {"r": "tls:@HOST:1"})
    finally:
        os.umask(before)
    path = Path(client_credentials.path("monarch_batch", "queue:app/1"))
    assert client_credentials.kept("monarch_batch", "queue:app/1") == (text, {"r": "tls:@HOST:1"})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in list(path.parents)[:2])
    client_credentials.forget("monarch_batch", "queue:app/1")
    client_credentials.forget("monarch_batch", "queue:app/1")
    assert not path.exists()
    assert client_credentials.kept("monarch_batch", "queue:app/1") == ("", {})
