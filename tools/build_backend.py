# SPDX-License-Identifier: BSD-3-Clause
"""setuptools' build backend, with source archives that two builds of the same sources make with equal bytes.

setuptools 84 takes SOURCE_DATE_EPOCH for wheels alone: its source archives hold the time of the build, and owner and
modes of the files on the disk.
"""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def build_sdist(sdist_directory: str, config_settings: dict[str, object] | None = None) -> str:
    """Build a source archive; return its name. With SOURCE_DATE_EPOCH that is the time of all that is in it."""
    name: str = build_meta.build_sdist(sdist_directory, config_settings)
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is not None:
        _normalize(Path(sdist_directory, name), int(epoch))
    return name


def _normalize(archive: Path, epoch: int) -> None:
    """Write an archive again, in the order of names, with one time, owner and mode."""
    aside = archive.with_suffix(".part")
    with (
        tarfile.open(archive) as found,
        open(aside, "wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as written,
    ):
        for member in sorted(found.getmembers(), key=lambda member_info: member_info.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            written.addfile(member, found.extractfile(member) if member.isreg() else None)
    aside.replace(archive)
