# SPDX-License-Identifier: BSD-3-Clause
"""The destinations of the output of a run's ranks on one host: log files, the host's own output, and a run log."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from string import Template

from torchx_monarch.host.ranks.filtered_output import FilteredFile, filtered_name
from torchx_monarch.host.ranks.rank_process import RankProcess
from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.insight.log_lines import TEMPLATE
from torchx_monarch.insight.run_log import RunLog, RunLogSink, SinkGroup
from torchx_monarch.system import safe_files
from torchx_monarch.system.console import Console, LineSink


@dataclasses.dataclass(frozen=True)
class RankLogs:
    """The destinations of the output of a run's ranks on one host.

    Attributes:
        replica: id of the host's replica.
        hostname: name of the machine.
        log_dir: folder for ``attempt_N/RANK/{stdout,stderr}.log`` and ``error.json``; None for no files.
        run: what the ranks execute.
        stdout: output for prefixed stdout lines; None to drop them.
        stderr: output for prefixed stderr lines; None to drop them.
        run_log: second destination of these lines, in a run on a live allocation; None in a batch job.
        stamped: whether the time is written before each of these lines.
    """

    replica: int
    hostname: str
    log_dir: str | None
    run: RunSpec
    stdout: Console | None = None
    stderr: Console | None = None
    run_log: RunLog | None = None
    stamped: bool = False

    def attach(self, process: RankProcess, attempt: int, rank: int, local_rank: int) -> Path | None:
        """Set the destinations of a rank's output, which is held until ``RankProcess.release``.

        Args:
            process: the process of the rank.
            attempt: N of the folder ``attempt_N``.
            rank: global rank.
            local_rank: rank within the host.

        Returns:
            The folder of the rank's logs and error file; None for no files.

        Raises:
            OSError: a log file cannot be opened.
        """
        options, directory = self.run.command.options, None
        if self.log_dir is not None:
            directory = Path(self.log_dir, f"attempt_{attempt}", str(rank))
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        shown = options.local_ranks_filter is None or local_rank in options.local_ranks_filter
        names = {"role_name": options.role, "rank": rank, "local_rank": local_rank, "hostname": socket.gethostname()}
        template = self.run.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", TEMPLATE)
        template = options.log_line_prefix_template or template
        prefix = Template(template).safe_substitute(names)
        out = (process.stdout, options.tee.stdout, options.redirects.stdout, options.duplicate_stdout_filters)
        err = (process.stderr, options.tee.stderr, options.redirects.stderr, options.duplicate_stderr_filters)
        for name, console, (output, tee, redirect, texts) in (
            ("stdout", self.stdout, out),
            ("stderr", self.stderr, err),
        ):
            teed = tee(local_rank)
            onto_console = shown and (teed or not redirect(local_rank))
            path = str(directory / f"{name}.log") if directory else None
            sinks: list[LineSink] = []
            if self.run_log is not None:
                own = prefix if teed and template == TEMPLATE else ""
                sinks.append(RunLogSink(self.run_log, rank, name, own, self.stamped))
            if texts and directory:
                filtered = directory.with_name(filtered_name(name, self.replica))
                # The file exists even if no stream is teed, as under torchrun.
                os.close(safe_files.open_log(filtered))
                if teed and shown:
                    sinks.append(FilteredFile(str(filtered), texts, prefix.encode()))
            sink = sinks[0] if len(sinks) == 1 else SinkGroup(sinks) if sinks else None
            output.assign(path, console if onto_console else None, prefix if teed else "", sink, self.stamped)
        return directory

    def last_attempt(self) -> int:
        """Return the highest N of the existing folders ``attempt_N``; -1 if there are none."""
        return max(safe_files.numbered(self.log_dir, "attempt_"), default=-1) if self.log_dir else -1
