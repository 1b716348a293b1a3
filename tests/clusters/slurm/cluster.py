# SPDX-License-Identifier: BSD-3-Clause
"""A real Slurm on this machine: munge, mariadb, slurmdbd, slurmctld, and nodes that are namespaces with a slurmd each.

Everything is the cluster's own: folder, keys, sockets, ports, database, network, names. Nothing of the system's is
touched, and ``down`` leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.clusters import packages
from tests.network import namespaces
from tests.ports import free_port
from tests.waits import until
from torchx_monarch.transport.connections import Address

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "slurmdbd",
    "sbatch",
    "mariadbd",
    "mariadb-install-db",
    "ip",
    "gcc",
)
PACKAGES = ("slurm-wlm", "slurmdbd", "munge", "mariadb-server", "iproute2", "gcc", "libc6-dev")

GRACE = 60
"""Seconds that a preempted job has to end by itself."""

_UP_WITHIN = 300.0
_DOWN_WITHIN = 60.0


def missing() -> str:
    """Why there can be no cluster here, after an attempt to install it; empty when there can."""
    kinds = ("--net", "--uts", "--mount")
    return packages.unavailable("a Slurm cluster of namespaces", kinds, PROGRAMS, PACKAGES)


class SlurmCluster:
    """A partition ``main`` of nodes n1, n2, ...; ``up`` starts it.

    Jobs of the partition ``urgent``, of the same nodes, preempt those of ``main``, which have ``GRACE`` seconds.

    Args:
        nodes: how many.
        away: how many more, of the partition ``away``, Slurm believes to be switched off: jobs there wait for ever.
    """

    def __init__(self, nodes: int, away: int = 0) -> None:
        self._away = away
        self.nodes = [f"n{number + 1}" for number in range(nodes)]
        self._name = f"ts{uuid.uuid4().hex[:6]}"
        self._net = f"10.98.{random.randrange(256)}"
        self._lab = Path(tempfile.mkdtemp(prefix=self._name, dir="/tmp"))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = {name: free_port() for name in ("ctld", "dbd")}
        # Daemons must not carry what marks the processes of a test.
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHX_MONARCH_")}
        self._env["PATH"] = packages.PATH
        self._env["SLURM_CONF"] = str(self.conf)

    @property
    def conf(self) -> Path:
        """What clients need as SLURM_CONF."""
        return self._lab / "slurm.conf"

    @property
    def pyxis_notes(self) -> Path:
        """Where the stand-in for pyxis notes the options of each task: IMAGE|MOUNTS|WORKDIR."""
        return self._lab / "pyxis.notes"

    # -- up ------------------------------------------------------------------------------------------------------------

    def up(self) -> SlurmCluster:
        """Start all of it."""
        self._lab.chmod(0o755)
        for folder in ("state", "spool", "log", "munge", "db"):
            (self._lab / folder).mkdir(mode=0o755)
        self._pyxis()
        self._network()
        self._munge()
        self._database()
        self.controller()
        for node in self.nodes:
            self.start_node(node)
        self._wait(
            "idle nodes",
            lambda: (
                len(self.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split()) == len(self.nodes)
            ),
        )
        return self

    def _pyxis(self) -> None:
        """Build and configure the stand-in for pyxis."""
        version = re.findall(r"\d+", self.run("slurmd", "-V"))
        number = (int(version[0]) << 16) + (int(version[1]) << 8) + int(version[2])
        plugin, source = self._lab / "pyxis.so", Path(__file__).with_name("pyxis.c")
        words = [
            "gcc",
            "-shared",
            "-fPIC",
            "-Wall",
            "-Werror",
            f"-DSLURM_VERSION={number}",
            "-o",
            str(plugin),
            str(source),
        ]
        subprocess.run(words, capture_output=True, timeout=120, check=True)
        (self._lab / "plugstack.conf").write_text(f"required {plugin} {self.pyxis_notes}\n")

    def _network(self) -> None:
        switch, names = self.namespace("s"), {"labctl": f"{self._net}.254"}
        namespaces.switch(switch)
        namespaces.plug_in_here(f"{self._name}r", switch, f"{self._net}.254/24")
        for number, node in enumerate(self.nodes, 1):
            names[node] = f"{self._net}.{number}"
            namespaces.plug_in(self.namespace(node), switch, f"port{node}", f"{names[node]}/24")
        hosts = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names.items())
        (self._lab / "hosts").write_text(hosts)

    def address(self, node: int) -> str:
        """By which this machine reaches node N."""
        return f"{self._net}.{node}"

    def reached(self, there: Address) -> str:
        """HOST:PORT of a node by its address: this machine does not know the cluster's names."""
        return f"{self.address(int(there.host.removeprefix('n')))}:{there.port}"

    def namespace(self, node: str) -> str:
        """Name of a node's network namespace."""
        return f"{self._name}{node}"

    def _munge(self) -> None:
        folder = self._lab / "munge"
        folder.chmod(0o711)
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        options = {
            "key-file": key,
            "socket": self._munge_socket,
            "pid-file": folder / "pid",
            "log-file": folder / "log",
        }
        words = [f"--{name}={value}" for name, value in {**options, "seed-file": folder / "seed"}.items()]
        self._daemon("munged", "munged", "-F", "--num-threads=4", *words)
        self._wait("munge", lambda: self._succeeds("munge", "-S", str(self._munge_socket), "-n"))

    @property
    def _munge_socket(self) -> Path:
        return self._lab / "munge" / "sock"

    def _database(self) -> None:
        folder, sock = self._lab / "db", self._lab / "db" / "sock"
        install = ["mariadb-install-db", "--no-defaults", f"--datadir={folder}", "--user=root", "--skip-test-db"]
        install += ["--auth-root-authentication-method=normal", "--skip-name-resolve"]
        subprocess.run(install, env=self._env, capture_output=True, timeout=120, check=True)
        small = ["--innodb-buffer-pool-size=128M", "--innodb-log-file-size=16M", "--innodb-flush-log-at-trx-commit=0"]
        where = [f"--datadir={folder}", f"--socket={sock}", f"--pid-file={folder}/pid", "--skip-networking"]
        self._daemon("mariadbd", "mariadbd", "--no-defaults", "--user=root", "--skip-log-bin", *where, *small)
        select = ("mariadb", "--no-defaults", "-S", str(sock), "-e", "select 1")
        self._wait("the database", lambda: self._succeeds(*select))
        conf = self._lab / "slurmdbd.conf"
        conf.touch(mode=0o600)
        conf.write_text(
            f"AuthType=auth/munge\nAuthInfo=socket={self._munge_socket}\nDbdHost=localhost\nDbdPort={self._ports['dbd']}\n"
            f"SlurmUser=root\nStorageType=accounting_storage/mysql\nStorageHost=localhost\nStorageUser=root\n"
            f"StorageLoc=slurm_acct_db\nLogFile={self._lab}/log/slurmdbd.log\nPidFile={self._lab}/slurmdbd.pid\n"
        )
        self._configure(accounting=True, min_job_age=300)
        self._daemon("slurmdbd", "slurmdbd", "-D", env={"MYSQL_UNIX_PORT": str(sock)})
        self._wait("slurmdbd", lambda: self._succeeds("sacctmgr", "-n", "show", "cluster"))
        self.run("sacctmgr", "-i", "add", "cluster", "lab")

    def controller(self, accounting: bool = True, min_job_age: int = 300) -> None:
        """Start slurmctld, or start it again with another configuration.

        Args:
            accounting: whether there is a database of jobs, for ``sacct``.
            min_job_age: seconds that it remembers jobs that have ended.
        """
        self._stop("slurmctld")
        self._configure(accounting, min_job_age)
        words = "hostname labctl; exec slurmctld -D"
        self._daemon("slurmctld", "unshare", "--uts", "sh", "-c", words)
        self._wait("slurmctld", lambda: self._succeeds("scontrol", "ping") and self._succeeds("squeue"))

    def start_node(self, node: str) -> None:
        """Start a node's slurmd. ``ip netns exec`` would hide /sys/fs/cgroup, without which slurmd does not start."""
        (self._lab / "spool" / node).mkdir(exist_ok=True)
        words = f"mount --bind {self._lab}/hosts /etc/hosts; hostname {node}; exec slurmd -D -N {node}"
        within = ("nsenter", f"--net=/run/netns/{self.namespace(node)}", "unshare", "--uts", "--mount")
        self._daemon(node, *within, "sh", "-c", words)

    def _configure(self, accounting: bool, min_job_age: int) -> None:
        lab, sock = self._lab, self._munge_socket
        storage = "AccountingStorageType=accounting_storage/none\n"
        if accounting:
            storage = (
                "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=localhost\n"
                # AuthInfo does not count for this one connection.
                f"AccountingStoragePort={self._ports['dbd']}\nAccountingStoragePass={sock}\n"
            )
        away = ""
        if self._away:
            away = f"NodeName=away[1-{self._away}] NodeAddr=127.0.0.1 CPUs=4 RealMemory=6000 State=DOWN\n"
            away += f"PartitionName=away Nodes=away[1-{self._away}] State=UP\n"
        self.conf.write_text(
            f"ClusterName=lab\nSlurmctldHost=labctl({self._net}.254)\nSlurmUser=root\nSlurmdUser=root\n"
            f"AuthType=auth/munge\nAuthInfo=socket={sock}\nCryptoType=crypto/munge\n"
            f"SlurmctldPort={self._ports['ctld']}\nSlurmdPort=16818\nStateSaveLocation={lab}/state\n"
            f"SlurmdSpoolDir={lab}/spool/%n\nSlurmctldPidFile={lab}/slurmctld.pid\nSlurmdPidFile={lab}/slurmd.%n.pid\n"
            f"SlurmctldLogFile={lab}/log/slurmctld.log\nSlurmdLogFile={lab}/log/slurmd.%n.log\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\n"
            "MpiDefault=none\nSwitchType=switch/none\nSelectType=select/cons_tres\nSelectTypeParameters=CR_Core_Memory\n"
            # Jobs of several components are started by the backfill scheduler, once in 30 s by default.
            "SchedulerType=sched/backfill\nSchedulerParameters=bf_interval=1,bf_continue,sched_interval=1,"
            "sched_min_interval=50000,batch_sched_delay=0,bf_min_age_reserve=0\n"
            f"ReturnToService=2\nSlurmdTimeout=60\nInactiveLimit=0\nKillWait=5\nMinJobAge={min_job_age}\nCompleteWait=0\n"
            "SlurmdParameters=config_overrides\nJobRequeue=1\nLaunchParameters=use_interactive_step\n"
            f"{storage}"
            f"NodeName=n[1-{len(self.nodes)}] NodeAddr={self._net}.[1-{len(self.nodes)}] CPUs=4 RealMemory=6000\n"
            f"{away}PartitionName=main Nodes=n[1-{len(self.nodes)}] Default=YES State=UP OverSubscribe=NO "
            f"PriorityTier=1 GraceTime={GRACE}\n"
            f"PartitionName=urgent Nodes=n[1-{len(self.nodes)}] PriorityTier=2 PreemptMode=OFF\n"
            "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
        )

    def _daemon(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> None:
        log = open(self._lab / "log" / f"{name}.out", "ab")  # noqa: SIM115
        with log:
            self._daemons[name] = subprocess.Popen(
                command,
                env={**self._env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._lab,
                start_new_session=True,
            )

    # -- use -----------------------------------------------------------------------------------------------------------

    def run(self, *command: str) -> str:
        """Run a command of Slurm's; what it prints."""
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def _succeeds(self, *command: str) -> bool:
        # Without a timeout sacctmgr tries for minutes.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run(command, env=self._env, capture_output=True, timeout=5).returncode == 0
        return False

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        def shown() -> str:
            logs = (f"{path}:\n{path.read_text()[-2000:]}" for path in (self._lab / "log").iterdir())
            return "\n".join([what, *logs])

        until(condition, shown, _UP_WITHIN)

    def lose_node(self, node: str) -> None:
        """As when its power fails: it is silent, its processes are gone, and the administrator's monitoring says so."""
        namespaces.ip("-n", self.namespace("s"), "link", "set", f"port{node}", "down")
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait(_DOWN_WITHIN)
        namespaces.kill_all(self.namespace(node))
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def restore_node(self, node: str) -> None:
        """Make it a member again."""
        namespaces.ip("-n", self.namespace("s"), "link", "set", f"port{node}", "up")
        self.start_node(node)
        # Refused where the node has become a member by itself, when its slurmd registered.
        self._succeeds("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self._wait(
            f"{node} to be idle",
            lambda: self.run("sinfo", "-h", "-p", "main", "-n", node, "-o", "%t").strip() == "idle",
        )

    # -- down ----------------------------------------------------------------------------------------------------------

    def _stop(self, name: str) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(_DOWN_WITHIN)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(_DOWN_WITHIN)

    def down(self) -> None:
        """End and remove all of it."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
        for name in reversed(list(self._daemons)):
            self._stop(name)
        for name in map(self.namespace, ("s", *self.nodes)):
            namespaces.kill_all(name)
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=240, capture_output=True)
        subprocess.run(["ip", "link", "delete", f"{self._name}r"], check=False, timeout=240, capture_output=True)
        shutil.rmtree(self._lab, ignore_errors=True)

    def left(self) -> list[str]:
        """What there still is of it after ``down``: processes, namespaces, links."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.fsencode(self._lab) in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                        found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        for command in (["ip", "netns", "list"], ["ip", "-o", "link"]):
            listed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
            found += [line for line in listed.splitlines() if self._name in line]
        return [*found, *(str(path) for path in (self._lab,) if path.exists())]
