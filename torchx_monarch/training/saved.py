# SPDX-License-Identifier: BSD-3-Clause
"""Whole checkpoints in a folder of the user: find the newest, and add one that takes its name only when it is whole.

``FOLDER/step_N`` is a whole checkpoint. It is written as ``FOLDER/.step_N.TOKEN.part/step_N``, beside which everyone
who takes part leaves a file when its own files are complete; then it is renamed. The token differs from start to start:
a part that an earlier start has left must not count for this one. Two checkpoints stay; what else lies in the folder,
also a ``step_N`` without our list of its files, is never touched. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

FILES = ".torchx_monarch.json"
"""Name of the file in a whole checkpoint with the sizes of its files; one without it is not ours."""

_KEPT = 2

_WHOLE = re.compile(r"step_(0|[1-9]\d{0,15})")
_PART = re.compile(r"\.step_(\d{1,16})\.([\w-]{1,80})\.part")


class NotWholeError(Exception):
    """A checkpoint cannot be made from its parts; the message says why."""


def step_name(step: int) -> str:
    """Return the name of the folder with the files of a step."""
    return f"step_{step}"


def part_folder(folder: Path, step: int, token: str) -> Path:
    """Return where a checkpoint is written: it is to have a folder ``step_N`` and a file of each that takes part."""
    return folder / f".{step_name(step)}.{re.sub(r'[^-_a-zA-Z0-9]', '_', token)[-80:]}.part"


def sizes(folder: str | os.PathLike[str]) -> dict[str, int]:
    """Return the sizes of all files below a folder by their paths in it.

    Raises:
        NotWholeError: something in it is neither a file nor a folder, or has a name that is no text.
    """
    found = {}
    for path, folders, names in os.walk(folder):
        for name in (*folders, *names):
            full = os.path.join(path, name)
            is_file, is_folder = os.path.isfile(full), os.path.isdir(full)
            if os.path.islink(full) or not (is_file or is_folder) or not name.isprintable():
                raise NotWholeError(f"{full!r} is no ordinary file")
            if is_file:
                found[os.path.relpath(full, folder)] = os.stat(full).st_size
    return found


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the whole checkpoint with the highest step, and why others with a higher step are not whole."""
    damaged = []
    for _, path in _ours(folder):
        if why := _why_damaged(path):
            damaged.append(f"{path}: {why}")
        else:
            return path, damaged
    return None, damaged


def publish(folder: Path, step: int, token: str, parts: Mapping[str, Mapping[str, int]]) -> Path:
    """Make a whole checkpoint of the parts, whose sizes of files are given by name; return its path.

    Raises:
        NotWholeError: a file is missing, or two parts have different files of one name.
        OSError: the folder cannot be written.
    """
    aside, whole = part_folder(folder, step, token), folder / step_name(step)
    written, expected = aside / whole.name, dict[str, int]()
    for part, files in parts.items():
        for name, size in files.items():
            if expected.setdefault(name, size) != size:
                raise NotWholeError(f"{part} and another part wrote {name}: give each file a name of its own")
            if (found := _size(written / name)) != size:
                has = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise NotWholeError(f"{name} of {part} {has} in {folder}: all hosts must see one folder there")
    aside_files = aside / f"{FILES}.{os.getpid()}"
    aside_files.write_text(json.dumps(expected))
    os.replace(aside_files, written / FILES)
    with contextlib.suppress(FileNotFoundError):
        os.rename(whole, aside / "before")  # an earlier run of this step
    os.rename(written, whole)
    remove_parts(folder, aside.name.split(".")[2], step)
    for _, old in [entry for entry in _ours(folder) if entry[1] != whole][_KEPT - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    return whole


def remove_parts(folder: Path, token: str, step: int = -1) -> None:
    """Remove what nobody finishes: of other starts than the one of a token, and of steps up to this one."""
    for match in filter(None, map(_PART.fullmatch, _names(folder))):
        if match[2] != token or int(match[1]) <= step:
            shutil.rmtree(folder / match[0], ignore_errors=True)


def _ours(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints that this module has made, the highest step first."""
    found = [(int(match[1]), folder / match[0]) for match in map(_WHOLE.fullmatch, _names(folder)) if match]
    return sorted(((step, path) for step, path in found if (path / FILES).is_file()), reverse=True)


def _names(folder: Path) -> Collection[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()


def _why_damaged(path: Path) -> str:
    try:
        expected = json.loads((path / FILES).read_text())
        wrong = [name for name, size in expected.items() if _size(path / name) != size]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"the list of its files cannot be read: {error}"
    return f"{wrong[0]} is missing or has another size" if wrong else ""


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
