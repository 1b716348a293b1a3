# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch trace``: write the timeline of a job as a file that Perfetto opens."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from torchx_monarch.backends.core.state_files import path_name
from torchx_monarch.cli.handles import add_handle
from torchx_monarch.cli.jobs import opened_job
from torchx_monarch.cli.output import STDOUT, add_json, add_output, print_json, write_output
from torchx_monarch.client.hosts import say
from torchx_monarch.insight.chrome_trace import trace
from torchx_monarch.insight.recorder_dump import DumpError, RecordedCollective, read
from torchx_monarch.insight.timeline import Timeline
from torchx_monarch.system.untrusted_text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)
    add_output(parser)
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="with the collectives that torch's flight recorder has of ranks that failed or were stopped",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Write the trace."""
    with opened_job(args.handle) as job:
        facts = job.read(whole_log=True)
    collectives = None
    if args.collectives:
        collectives = read_dumps(facts.status.log_folder, facts.timeline)
        if not collectives:
            say("this machine has no dump of the flight recorder of this job")
    written = trace(facts.timeline, facts.status.name, collectives, from_log=facts.status.from_log)
    write_output(args.output, json.dumps(written))
    if args.json and args.output not in STDOUT:
        print_json({"path": os.path.abspath(args.output), "events": len(written["traceEvents"])})


def read_dumps(folder: str | None, timeline: Timeline) -> dict[int, list[RecordedCollective]]:
    """Return the collectives in the dumps of ranks, by the index of a rank's span; say which dumps are wrong.

    Args:
        folder: folder of the job's logs; None if this machine does not see it.
    """
    found: dict[int, list[RecordedCollective]] = {}
    for at, rank in enumerate(timeline.spans if folder else ()):
        if rank.kind == "rank":
            attempt = timeline.attempt_folder(timeline.spans[rank.parent or 0])
            dumps = Path(folder or ".", path_name(rank.role), str(rank.replica), attempt, "flight_recorder")
            for path in sorted(dumps.glob(f"*rank_{rank.number}")):
                try:
                    found.setdefault(at, []).extend(read(path))
                except (DumpError, OSError) as error:
                    say(f"{one_line(str(path))}: {error}")
    return found
