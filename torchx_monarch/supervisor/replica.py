# SPDX-License-Identifier: BSD-3-Clause
"""One replica under the supervisor: the process to start, its pipes and logs, and the record of its latest start."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from torchx_monarch.backends.core.snapshot import ReplicaSnapshot
from torchx_monarch.backends.core.state import HOST_EXTRA
from torchx_monarch.model.backoff import Backoff
from torchx_monarch.model.codec import Seconds
from torchx_monarch.model.env_names import LOG_REFERENCES, SAVE
from torchx_monarch.model.host_result import HostResult, no_retry_reason
from torchx_monarch.model.job_result import describe_code
from torchx_monarch.model.role_spec import RoleSpec
from torchx_monarch.model.state import State
from torchx_monarch.supervisor import log_files
from torchx_monarch.system import error_files, log_references, processes, safe_files
from torchx_monarch.system.untrusted_text import one_line

#: The maximum capacity of a pipe of an unprivileged process.
_PIPE_BYTES = 1024 * 1024

#: The exit status of shells for a command that was not found.
EXIT_NOT_STARTED = 127


@dataclass
class ReplicaRecord:
    """One replica, in its latest start.

    Attributes:
        exit_code: as in ``subprocess``, -N for signal N; None while it runs, or if no process observed the end.
        error: the content of its error file, or of a substitute made from the exit code, as JSON text; None without
            failure.
        started, ended: seconds since the epoch; None if that has not happened.
    """

    id: int
    state: State = State.PENDING
    pid: int | None = None
    exit_code: int | None = None
    restarts: int = 0
    error: str | None = None
    started: Seconds | None = None
    ended: Seconds | None = None

    def snapshot(self, role: str, **more: Any) -> ReplicaSnapshot:
        """Return the snapshot of a replica, with further fields, or fields that differ from the record's."""
        times = {"started": self.started or 0.0, "ended": self.ended or 0.0}
        fields = {"exit_code": self.exit_code, "restarts": self.restarts, "state": self.state}
        return ReplicaSnapshot(role, self.id, **{**fields, **times, **more})


class Replica:
    """One replica, as the supervisor manages it.

    Attributes:
        record: its entry in the status file.
        stopping: whether the supervisor has asked it to stop, so that its end is not a failure.
        final: whether it must not be retried: its command cannot be started, or it has asked for no restart.
        failure: why it failed, in words; "" while it has not failed.
        retries: how often this process has restarted it.
    """

    def __init__(
        self,
        role_index: int,
        spec: RoleSpec,
        command: Sequence[str],
        cwd: str,
        record: ReplicaRecord,
        log_dir: str,
        env: Mapping[str, str],
        selector: selectors.BaseSelector,
    ) -> None:
        self.role_index = role_index
        self.spec = spec
        self.record = record
        self.stopping = False
        self.final = False
        self.failure = ""
        self.retries = 0
        self.backoff = Backoff()
        self.log = log_files.ReplicaLog(log_dir)
        self._command, self._cwd = command, cwd
        self.env = dict(env)
        self._selector = selector
        self._pipes: dict[IO[bytes], str] = {}
        self._error_file = self.env["TORCHELASTIC_ERROR_FILE"]

    @property
    def name(self) -> str:
        return f"{self.spec.name}/{self.record.id}"

    @property
    def alive(self) -> bool:
        return self.record.state is State.RUNNING

    @property
    def succeeded(self) -> bool:
        return self.record.state is State.SUCCEEDED

    @property
    def _stop_file(self) -> str:
        """A file that exists once this start was asked to stop: any other SIGTERM means preemption."""
        name = f"stop.{self.role_index}.{self.record.id}.{self.record.restarts}"
        return os.path.join(self.env["MONARCH_RUN_DIR"], name)

    @property
    def marks(self) -> list[bytes]:
        """Environment entries that every process of this replica has, unless it has removed them."""
        return [processes.mark(name, self.env[name]) for name in (processes.MARKER, "MONARCH_LOG_DIR")]

    def start(self) -> bool:
        """Start the process; if that fails, return False: the replica has ended with EXIT_NOT_STARTED."""
        self.stopping = self.final = False
        self.failure = ""
        self.record.pid = self.record.exit_code = self.record.error = self.record.ended = None
        self.record.started = time.time()
        error_files.set_aside(self._error_file, self.record.restarts)
        env = {
            **self.env,
            "MONARCH_RESTART": str(self.record.restarts),
            "MONARCH_STOP_FILE": self._stop_file,
        }
        pipes: dict[str, tuple[int, int]] = {}
        try:
            for stream in (log_files.STDOUT, log_files.STDERR):
                pipes[stream] = os.pipe()
            (_, stdout), (_, stderr) = pipes.values()
            env[LOG_REFERENCES] = log_references.pipes(stdout, stderr)
            process = processes.spawn(
                self._command, env, self._cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )
        except (OSError, ValueError) as e:  # ValueError: a null byte in an argument
            for end, _ in pipes.values():
                os.close(end)
            self.final = True
            self._ended(EXIT_NOT_STARTED, f"replica {self.name} could not be started: {e}{processes.limit_hint(e)}")
            return False
        finally:
            for _, end in pipes.values():
                os.close(end)
        self.record.pid, self.record.state = process.pid, State.RUNNING
        for stream, (end, _) in pipes.items():
            os.set_blocking(end, False)
            pipe = os.fdopen(end, "rb", 0)
            self._pipes[pipe] = stream
            self._selector.register(pipe, selectors.EVENT_READ, self)
        return True

    def read(self, pipe: IO[bytes]) -> None:
        """Read what one of its pipes holds."""
        # A pipe of an earlier start may still be in the batch of events that the selector has returned.
        if pipe in self._pipes:
            self._drain(pipe, 4 * log_files.CHUNK)

    def _drain(self, pipe: IO[bytes], limit: int) -> None:
        while limit > 0:
            try:
                data = os.read(pipe.fileno(), log_files.CHUNK)
            except BlockingIOError:
                return
            if not data:  # all writers are gone
                self._close_pipe(pipe)
                return
            self.log.feed(self._pipes[pipe], data)
            limit -= len(data)

    def _close_pipe(self, pipe: IO[bytes]) -> None:
        self._selector.unregister(pipe)
        del self._pipes[pipe]
        pipe.close()

    def close_pipes(self) -> None:
        """Read what is left in the pipes and close them, even if other processes still hold the write ends."""
        for pipe in list(self._pipes):
            # Read at most a pipe's capacity: an orphan process may write without end.
            self._drain(pipe, _PIPE_BYTES)
            if pipe in self._pipes:
                self._close_pipe(pipe)

    def exited(self, code: int) -> None:
        """Record that its process has ended."""
        for pipe in list(self._pipes):
            self._drain(pipe, _PIPE_BYTES)
        text = f"replica {self.name} (pid {self.record.pid}) {describe_code(code)}"
        if self.stopping and code:
            text += " after a stop request"
        elif code and (why := no_retry_reason(code, self.read_error())):
            self.final = True
            if self.spec.max_retries:
                text += f"; not started again: {why}"
        self._ended(code, text)

    def _ended(self, code: int, text: str) -> None:
        self.record.exit_code, self.record.ended = code, time.time()
        if code == 0:
            self.record.state = State.SUCCEEDED
            return
        self.record.error = self.read_error()
        self.log.say(text)
        self.record.state = State.CANCELLED if self.stopping else State.FAILED
        if not self.stopping:
            self.failure = text
            if lines := HostResult.from_text(self.record.error).reason.strip().splitlines():
                self.failure += f": {one_line(lines[0], 500)}"
            if self.record.error is None:
                # `torchx status` shows the short form, and thereby the exit code.
                substitute = HostResult(code, text, failed_at=self.record.ended, is_short=True)
                self.record.error = substitute.to_text()

    def read_error(self) -> str | None:
        """Return the known fields of its error file as JSON; None if the file is missing or unreadable."""
        try:
            found = error_files.read(self._error_file)
        except error_files.UnreadableError:
            return None
        return None if found is None else json.dumps(found)

    def prepare_restart(self) -> None:
        """Prepare another start: kill what is left of the last start, and note the restart in the logs."""
        processes.kill_until_gone(lambda: processes.adopted(self.marks))
        self.close_pipes()
        self.log.end_lines()
        self.record.restarts += 1
        self.retries += 1
        self.record.state = State.PENDING
        self.log.say(f"replica {self.name} is restarted (restart {self.record.restarts})")

    def terminate(self, hosts: Sequence[int], saves: bool) -> None:
        """Ask the replica to stop, once: send SIGTERM to its hosts, or to its process group if it has none."""
        pid = self.record.pid
        if self.stopping or pid is None or not self.alive:
            return
        self.stopping = True
        with contextlib.suppress(OSError):  # on a full disk, the host reports a preemption in its log instead
            # Slurm may have signalled the host already, which would take an empty file for a cancellation.
            safe_files.replace_file(self._stop_file, SAVE.encode() if saves else b"")
        # A stopped process handles SIGTERM only after SIGCONT: systemd and Slurm send both as well.
        for number in (signal.SIGTERM, signal.SIGCONT):
            processes.kill(hosts or [-pid], number)

    def kill(self) -> None:
        """Kill the replica and all that it has started."""
        pid = self.record.pid
        if pid is not None and self.alive:
            self.stopping = True
            family = [*processes.descendants(pid, self.env[processes.MARKER]), *processes.adopted(self.marks)]
            processes.kill([pid, *family])


def living(replicas: Iterable[Replica]) -> dict[int, Replica]:
    """Return the replicas that run, by the pid of their process."""
    return {replica.record.pid: replica for replica in replicas if replica.alive and replica.record.pid is not None}


def stop(
    replicas: Iterable[Replica],
    grace: float,
    call_at: Callable[[float, Callable[[], None]], None],
    *,
    saves: bool = False,
) -> None:
    """Stop replicas: send SIGTERM, and SIGKILL after the grace period. A second call may shorten that.

    Args:
        grace: seconds from SIGTERM to SIGKILL; 0 for SIGKILL without SIGTERM.
        call_at: calls a function when ``time.monotonic()`` reaches a time.
        saves: whether ranks may first come to an agreed stop.
    """
    running = living(replicas)
    hosts = processes.hosts(running) if grace > 0 else {}
    for pid, replica in running.items():
        if grace <= 0:
            replica.kill()
        else:
            replica.terminate(hosts[pid], saves)
            call_at(time.monotonic() + grace + (HOST_EXTRA if hosts[pid] else 0.0), replica.kill)
