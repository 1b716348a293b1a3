# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Encode an AppDef as one word of text, for backends that store it in labels, comments or annotations."""

from __future__ import annotations

import base64
import json
import zlib

from torchx.specs import AppDef

from torchx_monarch.backends.local import appdef
from torchx_monarch.system import safe_files


def pack(app: AppDef) -> str:
    """Encode an app as base64 of compressed JSON; environments and arguments are repetitive and compress well."""
    text = json.dumps(appdef.to_json(app), default=str, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack(blob: str) -> AppDef | None:
    """Decode the output of ``pack``; return None if the text is no app, for example because it was cut or edited."""
    try:
        return appdef.from_json(safe_files.parse_json(zlib.decompress(base64.b64decode(blob, validate=True))))
    except (zlib.error, ValueError):  # binascii.Error is a ValueError
        return None
