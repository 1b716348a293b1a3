# SPDX-License-Identifier: BSD-3-Clause
"""Read the dump of torch's flight recorder of one rank: a pickle of plain values, which a rank has written.

A pickle may name any function for its reader to call; this reader refuses names.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import pickletools
from collections.abc import Mapping
from typing import Any, NoReturn

from torchx_monarch.system import safe_files
from torchx_monarch.system.untrusted_text import one_line

MAX_BYTES = 16 * 1024 * 1024
"""Largest dump that is read; one of torch's default size, 2000 collectives without stacks, has 0.6 MB."""

_MAX_ENTRIES = 20_000
_MAX_NAME = 200


class DumpError(Exception):
    """Raised when a file is no dump of the flight recorder, or too large; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class RecordedCollective:
    """A collective in a dump.

    Attributes:
        group: torch's name of its process group.
        number: its sequence number in the group.
        completed: when it had completed; None if it has not, or the recorder does not know (Gloo).
    """

    name: str
    group: str
    number: int
    sizes: str
    called: float
    completed: float | None
    has_completed: bool


class _PlainUnpickler(pickle.Unpickler):
    """Refuse whatever is not a plain value: all others need a class or a function by name, or a persistent id."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise DumpError(f"it names {one_line(f'{module}.{name}', _MAX_NAME)}")


def read(path: str | os.PathLike[str]) -> list[RecordedCollective]:
    """Return the collectives of a dump, the oldest first; raise DumpError, or OSError if it cannot be read."""
    with open(safe_files.open_file(path), "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise DumpError(f"it has more than {MAX_BYTES >> 20} MiB")
    return parse(data)


def parse(data: bytes) -> list[RecordedCollective]:
    """Return the collectives of the bytes of a dump, the oldest first; raise DumpError if they are none."""
    try:
        # ``Unpickler`` makes room for as many memorized values as the largest index says.
        if any(
            "PUT" in code.name and isinstance(index, int) and index > len(data)
            for code, index, _ in pickletools.genops(data)
        ):
            raise DumpError("it is no dump of the flight recorder: an index in it is too large")
        dump = _PlainUnpickler(io.BytesIO(data)).load()
        return [_collective(entry) for entry in dump["entries"][-_MAX_ENTRIES:]]
    except DumpError:
        raise
    except Exception as error:  # operations of a pickle meet operands of any type
        raise DumpError(f"it is no dump of the flight recorder: {type(error).__name__}") from None


def _collective(entry: Mapping[str, Any]) -> RecordedCollective:
    completed = entry["time_discovered_completed_ns"]
    return RecordedCollective(
        name=one_line(entry["profiling_name"], _MAX_NAME),
        group=one_line(entry["process_group"][0], _MAX_NAME),
        number=_whole(entry["collective_seq_id"]),
        sizes=_sizes(entry["input_sizes"]),
        called=_whole(entry["time_created_ns"]) / 1e9,
        completed=None if completed is None else _whole(completed) / 1e9,
        has_completed=entry["retired"] is True or entry["state"] == "completed",
    )


def _whole(value: object) -> int:
    if not isinstance(value, int) or abs(value) >= 1 << 63:
        raise DumpError("a number is no number")
    return value


def _sizes(value: object) -> str:
    """Return shapes as text, ``[2, 3] [7]``; shapes of a wrong type are left out: lists may contain each other."""
    shapes = (
        [shape for shape in value[:8] if isinstance(shape, list) and len(shape) <= 16]
        if isinstance(value, list)
        else []
    )
    return " ".join(str(shape) for shape in shapes if all(isinstance(dim, int) and abs(dim) < 1 << 63 for dim in shape))
