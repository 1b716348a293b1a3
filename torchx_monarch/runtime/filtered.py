# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The lines that torchrun's ``--duplicate-stdout-filters`` and ``--duplicate-stderr-filters`` single out, in a file.

As ``DefaultLogsSpecs`` and ``PContext`` of torch 2.13 do (``torch/distributed/elastic/multiprocessing/api.py``): one
file for an attempt's ranks on a host, of the streams that ``--tee`` shows, with the prefix that they have there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torchx_monarch.runtime.output import write_all


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

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, texts: Sequence[str]) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._texts = [text.encode() for text in texts]

    def write(self, prefix: bytes, lines: bytes) -> None:
        """Take whole lines.

        Args:
            prefix: stands before each that is written.
            lines: without the last line feed.
        """
        ended = (line + b"\n" for line in lines.split(b"\n"))
        wanted = [prefix + line for line in ended if any(text in line for text in self._texts)]
        if wanted:
            write_all(self._file, b"".join(wanted))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
