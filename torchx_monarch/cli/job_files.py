# SPDX-License-Identifier: BSD-3-Clause
"""Read the files that hosts keep beside the logs of a job: dumps of the flight recorder, and stacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from torchx_monarch.insight.recorder_dump import DumpError, RecordedCollective, read
from torchx_monarch.system import safe_files
from torchx_monarch.system.untrusted_text import one_line, printable

_DUMP = re.compile(r"/(?:run_(\d{1,9})/)?attempt_(\d{1,9})/flight_recorder/(?:[a-z]+_)?rank_(\d{1,9})$")
_STACKS = re.compile(r"/(?:run_(\d{1,9})/)?attempt_(\d{1,9})/stacks\.txt$")

_MAX_DUMPS = 4096

_MAX_BYTES = 256 * 1024
"""Most bytes of the stacks of one host that are shown."""


def read_collectives(folder: str | None) -> tuple[dict[tuple[int, int, int], list[RecordedCollective]], list[str]]:
    """Return the collectives in the dumps of a job, and why dumps could not be read.

    Args:
        folder: folder of the job's logs; None if this machine does not see it.

    Returns:
        The collectives by run (0 for a batch job), attempt (from 1) and rank, and a line for each dump that is wrong.
    """
    found: dict[tuple[int, int, int], list[RecordedCollective]] = {}
    problems: list[str] = []
    for path, match in _files(folder, "attempt_*/flight_recorder/*rank_*", _DUMP):
        try:
            collectives = read(path)
            found.setdefault((int(match[1] or 0), int(match[2]) + 1, int(match[3])), []).extend(collectives)
        except (DumpError, OSError) as error:
            problems.append(f"{one_line(str(path))}: {error}")
        if len(found) == _MAX_DUMPS:
            break
    return found, problems


def read_stacks(folder: str | None) -> list[tuple[str, str]]:
    """Return the stacks that hosts took before they stopped ranks, of the last attempt of the last run that has any.

    Returns:
        For each host the file, relative to the folder of the job's logs, and its text.
    """
    files = [
        (int(found[1] or 0), int(found[2]), path) for path, found in _files(folder, "attempt_*/stacks.txt", _STACKS)
    ]
    last = max(files, default=(0, 0, Path()))[:2]
    found = []
    for run, attempt, path in files:
        if (run, attempt) != last:
            continue
        try:
            with open(safe_files.open_file(path), "rb") as file:
                text = file.read(_MAX_BYTES).decode(errors="replace")
        except OSError:
            continue
        found.append((one_line(str(path.relative_to(folder or "."))), printable(text)))
    return found


def _files(folder: str | None, pattern: str, match: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    """Yield the files of a pattern in the folders of hosts, and in those of runs on a live allocation."""
    for where in (f"*/*/{pattern}", f"*/*/run_*/{pattern}") if folder else ():
        for path in sorted(Path(folder or ".").glob(where)):
            if found := match.search(str(path)):
                yield path, found
