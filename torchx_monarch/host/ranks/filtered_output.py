# SPDX-License-Identifier: BSD-3-Clause
"""Write the lines that match torchrun's ``--duplicate-stdout-filters`` or ``--duplicate-stderr-filters`` to a file.

Follows ``DefaultLogsSpecs`` and ``PContext`` of torch 2.13 (``torch/distributed/elastic/multiprocessing/api.py``): one
file for all ranks of an attempt on a host, for the streams that ``--tee`` shows, with the prefix that they have there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchx_monarch.system import safe_files
from torchx_monarch.system.console import WriterThread


def filtered_name(stream: str, replica: int) -> str:
    """Return the name of this host's file in the attempt's log folder.

    Replica 0 uses torchrun's name. Other replicas may share the folder and add their number to the name: two machines
    cannot append to one file over NFS.

    Args:
        stream: ``stdout`` or ``stderr``.
        replica: id of the host's replica.
    """
    return f"filtered_{stream}.log" if replica == 0 else f"filtered_{stream}.{replica}.log"


class FilteredFile:
    """Append the lines of one rank that contain any of some texts to a file; all ranks of a host may share the file.

    Args:
        path: path of the file, which is created when missing.
        texts: texts to search for; the empty text is in every line.
        prefix: written before each line.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, texts: Sequence[str], prefix: bytes) -> None:
        self.writers = [WriterThread()]
        self._file = safe_files.open_log(path)
        self._texts = [text.encode() for text in texts]
        self._prefix = prefix
        self._goes_on = False

    def write(self, text: bytes, shown: bytes) -> None:
        """Take whole lines, or a piece of a line, which counts as a line (see ``LineSink``)."""
        if text == b"\n" and self._goes_on:  # the end of a line whose pieces were written before
            text = b""
        self._goes_on = not text.endswith(b"\n")
        lines = text.removesuffix(b"\n").split(b"\n") if text else []
        ended = (line + b"\n" for line in lines)
        wanted = [self._prefix + line for line in ended if any(filter_text in line for filter_text in self._texts)]
        if wanted:
            self.writers[0].write(self._file, b"".join(wanted))

    def close(self) -> None:
        """Close the file."""
        self.writers[0].close(self._file)
