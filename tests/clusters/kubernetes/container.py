# SPDX-License-Identifier: BSD-3-Clause
"""Process 1 of a pod of the tests' kubelet: sets up what the pod sees of this machine, and runs the command.

Started in namespaces of its own: ``python -I -S container.py SPEC``, SPEC a JSON file with ``hostname``, ``hosts`` and
``termination_log`` (files of this machine that the pod sees as /etc/hosts and its termination log), ``outer`` (an empty
folder), ``mounts`` (pairs of a folder of this machine and one of the pod), ``command``, ``env``.
"""

import json
import os
import signal
import socket
import stat
import subprocess
import sys


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def main() -> None:
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    socket.sethostname(spec["hostname"])
    mount("--bind", spec["hosts"], "/etc/hosts")
    # A /tmp of its own, in which only what is mounted there can be seen of this machine's.
    mount("--bind", "/tmp", spec["outer"])
    mount("-t", "tmpfs", "tmpfs", "/tmp")
    # A /dev of its own: where this machine's had the file for the termination message, two clusters would share it.
    mount("-t", "tmpfs", "tmpfs", "/dev")
    for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
        os.mknod(f"/dev/{name}", stat.S_IFCHR, os.makedev(1, minor))
        os.chmod(f"/dev/{name}", 0o666)
    os.symlink("/proc/self/fd", "/dev/fd")
    os.mkdir("/dev/shm")
    mount("-t", "tmpfs", "tmpfs", "/dev/shm")
    os.mkdir("/dev/pts")
    mount("-t", "devpts", "-o", "newinstance,ptmxmode=0666", "devpts", "/dev/pts")
    os.symlink("pts/ptmx", "/dev/ptmx")
    for source, goal in spec["mounts"]:
        if source.startswith("/tmp/"):
            source = spec["outer"] + source[4:]
        elif source == goal:
            continue
        os.makedirs(goal, exist_ok=True)
        mount("--bind", source, goal)
    # As kubelet does it: a file that is mounted, over which none can be renamed.
    os.close(os.open("/dev/termination-log", os.O_CREAT))
    mount("--bind", spec["termination_log"], "/dev/termination-log")
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            os.chdir("/")
            os.execvpe(spec["command"][0], spec["command"], spec["env"])
        except OSError as error:
            os.write(2, f"exec: {spec['command'][0]!r}: {error.strerror}\n".encode())
            os._exit(128)
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


main()
