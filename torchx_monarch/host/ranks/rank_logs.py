# SPDX-License-Identifier: BSD-3-Clause
"""The destinations of the output of a run's ranks on one host: log files, of which the oldest parts are dropped under
``-cfg log_limit``, the host's output, a run log, and the files of torchrun's ``--duplicate-stdout-filters`` and
``--duplicate-stderr-filters``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

from torchx_monarch.host.ranks.rank_output import OutputPipe
from torchx_monarch.host.ranks.run_output import RunOutput, RunOutputSink
from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.insight.log_lines import TEMPLATE
from torchx_monarch.system import safe_files
from torchx_monarch.system.console import Console, WriterThread
from torchx_monarch.system.log_references import PARTS, LogReference, prefixed

_MUCH = 10 * 10**9
"""Bytes of the logs of a host after which it says so."""

_SCARCE = 2 * 10**9
"""Free bytes of a disk below which the host says so."""

_CHECK = 1 << 26
"""Bytes of logs between two looks at the disk."""


class LogSpace:
    """The space that the logs of a host's ranks may take, and take.

    Args:
        say: shows a line of the host.
        limit: bytes of each log of which three quarters at least are kept; 0 for all.
        referred: the folder of the logs to which the host's output has references; empty for none.
    """

    def __init__(self, say: Callable[[str], None], limit: int = 0, referred: str = "") -> None:
        self.limit = limit
        self.referred = referred
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._written = 0
        self._said = set[str]()

    def add(self, path: str, size: int) -> None:
        """Count bytes that were written to a log, in its thread; say it once if there are many, or the disk is full."""
        before, self._written = self._written, self._written + size
        if self._written >= _MUCH:
            hint = "" if self.limit else "; -cfg log_limit=SIZE drops the oldest of each"
            self.say("passed", f"the logs of this host's ranks have passed {_MUCH / 1e9:g} GB{hint}")
        if before // _CHECK < self._written // _CHECK:
            disk = os.statvfs(os.path.dirname(path))
            if (free := disk.f_bavail * disk.f_frsize) < _SCARCE:
                self.say("free", f"the disk of the ranks' logs has {free / 1e9:.1f} GB left: {path}")

    def say(self, reason: str, text: str) -> None:
        """Show a line, the first for its reason."""
        if reason not in self._said:
            self._said.add(reason)
            self.call(self._say, text)

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function on the event loop."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(function, *args)


class RankLog:
    """Write what a rank prints, byte for byte, in a thread; a full disk loses bytes.

    Attributes:
        writer: the thread: that of ``console``, so that references follow what they name.
        copy: another destination of references; None for none.

    Args:
        console: where ``pass_on`` writes references; None if the reader of the host's output does not know them.
        name: the log's name in references.

    Raises:
        OSError: the file cannot be opened or belongs to another user, or no more threads can be started.
    """

    def __init__(self, path: str, space: LogSpace, console: Console | None = None, name: str = "") -> None:
        self.console = console
        self.copy: RunOutputSink | None = None
        self.writer = console.writer if console is not None else WriterThread()
        self._path = path
        self._name = name
        self._space = space
        self._fd = safe_files.open_log(path)
        self._begin = self._used = os.fstat(self._fd).st_size
        self._part, self._part_size = 0, space.limit // PARTS
        self._written = self._lost = self._passed = 0
        self._lost_until = -1

    def write(self, data: bytes) -> None:
        self.writer.call(self._write, data, size=len(data))

    def pass_on(self, text: bytes, prefix: bytes, goes_on: bool) -> None:
        """Write a reference to the next bytes of the log to the console; without any, that its last line has ended.

        What has been lost, and what follows it, is written itself, as ``log_references.prefixed`` returns it.
        """
        assert self.console is not None
        start, self._passed = self._passed, self._passed + len(text)

        def line() -> bytes:
            at = self._begin + start - self._lost
            # Of what follows, a reader would see by the byte before it whether it begins a line.
            is_lost = start < self._lost_until or (start == self._lost_until and text)
            reference = b"" if is_lost else LogReference(self._name, at, len(text), prefix).line()
            shown = reference or prefixed(text or b"\n", prefix, goes_on)
            if self.copy is not None:
                self._space.call(self.copy.refer, reference, shown)
            return shown

        self.console.write_line(self, line, len(text))

    def close(self) -> None:
        """Close the log after all writes; no writes may follow."""
        self.writer.call(lambda: os.close(self._fd))
        if self.console is None:
            self.writer.end()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._part_size and self._used >= self._part_size:
                self._begin_part()
            try:
                done = os.write(self._fd, view[: self._part_size - self._used] if self._part_size else view)
            except OSError:
                self._written += len(view)
                self._lost += len(view)
                self._lost_until = self._written
                return
            self._used += done
            self._written += done
            view = view[done:]
        self._space.add(self._path, len(data))

    def _begin_part(self) -> None:
        """Give the full part its number, begin another one, and drop the oldest of more than ``PARTS``."""
        aside = f"{self._path}.new"
        try:
            fd = safe_files.open_log(aside)
            os.rename(self._path, f"{self._path}.{self._part}")
            os.rename(aside, self._path)
        except OSError:  # such as a full disk: this part is the last one, without a limit
            self._part_size = 0
            return
        os.close(self._fd)
        self._fd, self._used = fd, 0
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._path}.{self._part - PARTS + 1}")
            self._space.say("dropped", f"log_limit: the oldest output is dropped, first from {self._path}")
        self._part += 1


class FilteredFile:
    """Append the lines of one rank that contain any of some texts to a file, with a prefix; ranks may share the file.

    Follows ``DefaultLogsSpecs`` and ``PContext`` of torch 2.13 (``torch/distributed/elastic/multiprocessing/api.py``):
    one file for all ranks of an attempt on a host, for the streams that ``--tee`` shows, with the prefix that they have
    there. The empty text is in every line.
    """

    def __init__(self, path: str, texts: Sequence[str], prefix: bytes) -> None:
        self.writers = [WriterThread()]
        self._file = safe_files.open_log(path)
        self._texts = [text.encode() for text in texts]
        self._prefix = prefix
        self._goes_on = False

    def write(self, text: bytes, shown: bytes) -> None:
        """Take whole lines, or a piece of a line, which counts as a line; ``shown`` is the text with its prefixes."""
        if text == b"\n" and self._goes_on:  # the end of a line whose pieces were written before
            text = b""
        self._goes_on = not text.endswith(b"\n")
        lines = text.removesuffix(b"\n").split(b"\n") if text else []
        ended = (line + b"\n" for line in lines)
        wanted = [self._prefix + line for line in ended if any(filter_text in line for filter_text in self._texts)]
        if wanted:
            self.writers[0].write(self._file, b"".join(wanted))

    def close(self) -> None:
        self.writers[0].close(self._file)


@dataclasses.dataclass(frozen=True)
class RankLogs:
    """The destinations of the output of a run's ranks on one host.

    Attributes:
        log_dir: folder for ``attempt_N/RANK/{stdout,stderr}.log`` and ``error.json``; None for no files.
        stdout, stderr: output for prefixed lines; None to drop them.
        run_output: second destination of these lines, in a run on a live allocation; None in a batch job.
    """

    replica: int
    hostname: str
    log_dir: str | None
    run: RunSpec
    space: LogSpace
    stdout: Console | None = None
    stderr: Console | None = None
    run_output: RunOutput | None = None

    def attach(self, stdout: OutputPipe, stderr: OutputPipe, attempt: int, rank: int, local_rank: int) -> Path | None:
        """Set the destinations of a rank's output; return the folder of its logs and error file, None for no files."""
        options, directory = self.run.command.options, None
        if self.log_dir is not None:
            directory = Path(self.log_dir, f"attempt_{attempt}", str(rank))
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        shown = options.local_ranks_filter is None or local_rank in options.local_ranks_filter
        names = {"role_name": options.role, "rank": rank, "local_rank": local_rank, "hostname": self.hostname}
        template = self.run.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", TEMPLATE)
        template = options.log_line_prefix_template or template
        prefix = Template(template).safe_substitute(names)
        for name, output, console in (("stdout", stdout, self.stdout), ("stderr", stderr, self.stderr)):
            teed = getattr(options.tee, name)(local_rank)
            onto_console = shown and (teed or not getattr(options.redirects, name)(local_rank))
            sinks: list[FilteredFile | RunOutputSink] = []
            log = self._open(directory / f"{name}.log", console if onto_console else None) if directory else None
            if self.run_output is not None:
                own = prefix if teed and template == TEMPLATE else ""
                copy = RunOutputSink(self.run_output, rank, name, own)
                if log is not None and log.console is not None and self.replica == 0:  # which has the run log, too
                    log.copy = copy
                else:
                    sinks.append(copy)
            if directory and (texts := getattr(options, f"duplicate_{name}_filters")):
                # Torchrun's name. Replicas may share the folder, and machines cannot append to one file over NFS.
                own_name = f"filtered_{name}.{self.replica}.log" if self.replica else f"filtered_{name}.log"
                filtered = directory.with_name(own_name)
                # The file exists even if no stream is teed, as under torchrun.
                os.close(safe_files.open_log(filtered))
                if teed and shown:
                    sinks.append(FilteredFile(str(filtered), texts, prefix.encode()))
            output.assign(log, console if onto_console else None, prefix if teed else "", sinks)
        return directory

    def _open(self, path: Path, console: Console | None) -> RankLog:
        name = ""
        if self.space.referred and path.is_relative_to(self.space.referred):
            name = str(path.relative_to(self.space.referred).with_suffix(""))
        return RankLog(str(path), self.space, console if name else None, name)
