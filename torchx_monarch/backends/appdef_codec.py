# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""An app as one word of text, for backends that keep what they are given in labels, comments or annotations."""

from __future__ import annotations

import base64
import json
import zlib

from torchx.specs import AppDef

from torchx_monarch.backends.local import appdef
from torchx_monarch.system import safe_files


def pack(app: AppDef) -> str:
    """The app as base64: JSON, compressed, since environments and arguments repeat themselves."""
    text = json.dumps(appdef.to_json(app), default=str, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack(blob: str) -> AppDef | None:
    """The inverse of ``pack``; None for what is no app, as when somebody has cut or changed it."""
    try:
        return appdef.from_json(safe_files.parse_json(zlib.decompress(base64.b64decode(blob, validate=True))))
    except (zlib.error, ValueError):  # binascii's error is a ValueError, too
        return None
