# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The lines that torchrun's ``--duplicate-stdout-filters`` and ``--duplicate-stderr-filters`` single out, in a file.

As ``DefaultLogsSpecs`` and ``PContext`` of torch 2.13 do (``torch/distributed/elastic/multiprocessing/api.py``): one
file for an attempt's ranks on a host, of the streams that ``--tee`` shows, with the prefix that they have there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torchx_monarch.system import safe_files
from torchx_monarch.system.console import write_all


def filtered_name(stream: str, replica: int) -> str:
    """The name of the file in the attempt's log folder, where every host has its own.

    torchrun's name on replica 0. The others may share the folder, and two machines cannot append to one file over NFS.
    """
    return f"filtered_{stream}.log" if replica == 0 else f"filtered_{stream}.{replica}.log"


class FilteredFile:
    """Gets those lines of one rank that hold any of the texts; every rank of the host may have one on the same path.

    Args:
        path: appended to, a line at a time.
        texts: what is looked for. The empty one is in every line.
        prefix: stands before each line that is written.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, texts: Sequence[str], prefix: bytes) -> None:
        self._file = safe_files.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._texts = [text.encode() for text in texts]
        self._prefix = prefix
        self._goes_on = False

    def write(self, text: bytes, shown: bytes) -> None:
        """Take whole lines or a piece of one, which counts as a line (see ``LineSink``)."""
        if text == b"\n" and self._goes_on:  # the end of a line whose pieces have all been here
            text = b""
        self._goes_on = not text.endswith(b"\n")
        lines = text.removesuffix(b"\n").split(b"\n") if text else []
        ended = (line + b"\n" for line in lines)
        wanted = [self._prefix + line for line in ended if any(each in line for each in self._texts)]
        if wanted:
            write_all(self._file, b"".join(wanted))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
