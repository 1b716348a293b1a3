# SPDX-License-Identifier: BSD-3-Clause
"""A machine with an OpenSSH server: namespaces, folders, names and users of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.clusters import packages
from tests.network import namespaces
from tests.network.namespaces import ip
from tests.waits import until

ROOT = Path(__file__).parents[3]
USER = "al.ice-2"
"""A user of every machine beside root."""

_UID = 61001
_UP_WITHIN = 60.0
_DOWN_WITHIN = 60.0

_BOOT = """set -e
hostname {name}
for path in {kept}; do mkdir -p "{root}$path"; mount --rbind "$path" "{root}$path"; done
for path in root home var/tmp etc/ssh; do mount --rbind "{root}/$path" "/$path"; done
for file in {files}; do [ ! -e "/etc/$file" ] || mount --bind "{root}/etc/$file" "/etc/$file"; done
mount --bind "{root}/boot_id" /proc/sys/kernel/random/boot_id
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 shm /dev/shm
mkdir /run/sshd
mount --rbind "{root}/tmp" /tmp
cd /
exec /usr/sbin/sshd -D -e
"""
"""/tmp comes last: the machine's files are below it. Mounts are of the machine's own namespace, so none outlives it."""

_SSHD = """HostKey /etc/ssh/host_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
"""

_FILES: Mapping[str, str] = {
    "passwd": f"root:x:0:0:root:/root:/bin/bash\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
    f"{USER}:x:{_UID}:{_UID}::/home/{USER}:/bin/sh\n",
    "group": f"root:x:0:\n{USER}:x:{_UID}:\nnogroup:x:65534:\n",
    "shadow": f"root:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n{USER}:*:19000:0:99999:7:::\n",
    "resolv.conf": "nameserver 127.0.0.1\n",
}


def kept(shared: Path) -> list[Path]:
    """Return the folders that a machine shares with this one although they may lie in a home: our programs, Python.

    Args:
        shared: a folder that all machines write to.
    """
    paths = {ROOT, Path(sys.prefix), Path(sys.base_prefix), Path(os.path.realpath(sys.executable)).parents[1], shared}
    own = [Path("/root"), Path("/home"), Path("/tmp"), Path("/var/tmp"), Path("/run")]
    within = [path for path in paths if any(folder in path.parents for folder in own)]
    return sorted(path for path in within if not any(other in path.parents for other in within))


class Machine:
    """One machine; ``boot`` starts it.

    Args:
        name: its host name.
        namespace: name of its network namespace.
        switch: the namespace of the switch, which has ``bridge0``.
        number: of its Ethernet address.
        addresses: its own, with the length of the prefix.
        root: where its folders are.
        shared: a folder that all machines and this one write to.
    """

    def __init__(
        self, name: str, namespace: str, switch: str, number: int, addresses: Sequence[str], root: Path, shared: Path
    ) -> None:
        self.name = name
        self.root = root
        self._namespace, self._switch, self._number, self._addresses = namespace, switch, number, addresses
        self._shared = shared
        self._process: subprocess.Popen[bytes] | None = None

    def install(self, hosts: str, keys: Mapping[str, Path], authorized: str, known_hosts: str) -> None:
        """Write its files.

        Args:
            hosts: text of its /etc/hosts.
            keys: ``host``: the private key of its server; ``user``: the one of its users.
            authorized: the public keys that may log in.
            known_hosts: what its users know of other machines.
        """
        for folder in ("root", "home", "var/tmp", "tmp", "etc/ssh"):
            (self.root / folder).mkdir(parents=True)
        self.root.chmod(0o755)
        (self.root / "root").chmod(0o711)  # Python may be installed there, and another user needs it as well
        for folder in ("tmp", "var/tmp"):
            (self.root / folder).chmod(0o1777)
        files = {**_FILES, "hosts": hosts, "hostname": f"{self.name}\n", "machine-id": f"{uuid.uuid4().hex}\n"}
        for file, text in files.items():
            (self.root / "etc" / file).write_text(text)
        ssh = self.root / "etc" / "ssh"
        (ssh / "sshd_config").write_text(_SSHD)
        shutil.copy(keys["host"], ssh / "host_key")
        for home, user in ((self.root / "root", 0), (self.root / "home" / USER, _UID)):
            own = home / ".ssh"
            own.mkdir(parents=True, mode=0o700)
            shutil.copy(keys["user"], own / "id_ed25519")
            (own / "authorized_keys").write_text(authorized)
            (own / "known_hosts").write_text(known_hosts)
            for path in (*((home,) if user else ()), own, *own.iterdir()):
                os.chown(path, user, user)

    # -- power ---------------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Switch it on; return when its server answers."""
        assert self._process is None
        (self.root / "boot_id").write_text(f"{uuid.uuid4()}\n")
        shutil.rmtree(self.root / "tmp")  # as systemd does it
        (self.root / "tmp").mkdir()
        (self.root / "tmp").chmod(0o1777)
        namespaces.plug_in(self._namespace, self._switch, self._port, *self._addresses)
        # The Ethernet address stays, as other machines remember it.
        ip("-n", self._namespace, "link", "set", "eth0", "address", f"02:00:00:00:00:{self._number:02x}")
        folders = kept(self._shared)
        script = _BOOT.format(
            name=self.name,
            root=self.root,
            kept=" ".join(f"'{path}'" for path in folders),
            files=" ".join([*_FILES, "hosts", "hostname", "machine-id"]),
        )
        env = {"PATH": packages.PATH, "LANG": "C.UTF-8"}
        words = [*self._entering, "unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]
        with open(self.root / "console", "ab") as console:
            self._process = subprocess.Popen(
                [*words, "--mount-proc", "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=env,
                start_new_session=True,
            )
        process = self._process

        def listens() -> bool:
            said = (self.root / "console").read_text(errors="replace")[-2000:]
            assert process.poll() is None, f"{self.name}: {said}"
            listed = subprocess.run([*self._entering, "ss", "-tlnH"], capture_output=True, text=True, timeout=60)
            return ":22 " in listed.stdout

        until(listens, f"the server of {self.name}", _UP_WITHIN)

    @property
    def _port(self) -> str:
        """Its link's end at the switch."""
        return f"port{self._number}"

    @property
    def _entering(self) -> tuple[str, ...]:
        return ("nsenter", f"--net=/run/netns/{self._namespace}")

    def power_off(self) -> None:
        """Have its power fail: others hear nothing more of it, and no connection is closed."""
        process, self._process = self._process, None
        # With the port its other end goes.
        subprocess.run(["ip", "-n", self._switch, "link", "delete", self._port], capture_output=True, timeout=240)
        if process is not None:
            process.kill()  # the first process dies with it, and with that one all others
            process.wait(_DOWN_WITHIN)
        until(lambda: not namespaces.kill_all(self._namespace), f"{self.name} to go off", _DOWN_WITHIN)
        # The sockets of the dead, which would send what they have left, go with the namespace.
        subprocess.run(["ip", "netns", "delete", self._namespace], capture_output=True, timeout=240)

    def reboot(self) -> None:
        """Switch it off and on."""
        self.power_off()
        self.boot()

    @property
    def is_on(self) -> bool:
        """Whether it runs."""
        return self._process is not None

    # -- what is on it -------------------------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The pid of its first process, as this machine counts."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command on it, as its administrator at the console; return what it prints."""
        there = ["nsenter", f"--target={self.first}", "--all", "--", *words]
        done = subprocess.run(there, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, f"{self.name}: {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def processes(self) -> dict[int, str]:
        """Return pid, as this machine counts, and command line of all its processes but those of its ssh server."""
        found = {}
        for pid in namespaces.processes(self._namespace):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                # One that is ending, or has ended, has no command line any more.
                if line and not line.startswith(("sshd:", "/usr/sbin/sshd", "unshare ")):
                    found[pid] = line
        return found

    def path(self, path: str | Path) -> Path:
        """Return where a file of its /root, /home, /tmp or /var/tmp is for this machine."""
        return self.root / str(path).lstrip("/")
