# SPDX-License-Identifier: BSD-3-Clause
"""The destinations of the output of a run's ranks on one host: log files, the host's output, a run log, and the files
of torchrun's ``--duplicate-stdout-filters`` and ``--duplicate-stderr-filters``."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from string import Template

from torchx_monarch.host.ranks.rank_log import LogSpace, RankLog
from torchx_monarch.host.ranks.rank_output import OutputPipe
from torchx_monarch.host.ranks.run_output import RunOutput, RunOutputSink
from torchx_monarch.host.ranks.run_spec import RunSpec
from torchx_monarch.insight.log_lines import TEMPLATE
from torchx_monarch.system import safe_files
from torchx_monarch.system.console import Console, WriterThread


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
        names = {"role_name": options.role, "rank": rank, "local_rank": local_rank, "hostname": socket.gethostname()}
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
