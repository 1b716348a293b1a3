# SPDX-License-Identifier: BSD-3-Clause
"""Detect that the user gives standard input to a command whose job does not read it.

A job is detached from the command that submits it, and may run on other machines, so its ranks have an empty standard
input. The command neither reads nor waits for its own: a pipe may never end, and in ``while read …; do torchx run …;
done`` the rest belongs to the loop.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import termios

WARNING = "standard input is not forwarded to the job: its ranks have an empty one. Pass the data as a file."


def has_unread_input(fd: int = 0) -> bool:
    """Return whether somebody has given content to this process in particular, of which nothing was read.

    - A file counts if it has content and nobody has read from it. A shell that reads a script or a loop's lines from it
      has moved its position.
    - A pipe or a socket counts if bytes wait in it, and the parent process does not have the same one as its own
      standard input. What cron, CI runners and ``curl … | sh`` give to a script is not meant for the commands in it.
    """
    try:
        given = os.fstat(fd)
        if stat.S_ISREG(given.st_mode):
            return given.st_size > 0 and os.lseek(fd, 0, os.SEEK_CUR) == 0
        if not stat.S_ISFIFO(given.st_mode) and not stat.S_ISSOCK(given.st_mode):
            return False
        if os.path.samestat(given, os.stat(f"/proc/{os.getppid()}/fd/0")):
            return False
        return bool(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0] > 0)
    except OSError:  # it is closed, or the parent process is another user's
        return False
