# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch trace``: write the timeline of a job as a file that Perfetto opens."""

from __future__ import annotations

import argparse
import json
import os

from torchx_monarch.cli.handles import add_handle
from torchx_monarch.cli.job_files import read_collectives
from torchx_monarch.cli.jobs import opened_job
from torchx_monarch.cli.output import STDOUT, add_json, add_output, print_json, write_output
from torchx_monarch.client.hosts import say
from torchx_monarch.insight.chrome_trace import trace


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
        collectives, problems = read_collectives(facts.status.log_folder)
        for problem in problems:
            say(problem)
        if not collectives:
            say("this machine has no dump of the flight recorder of this job")
    written = trace(facts.timeline, facts.status.name, collectives, from_log=facts.status.from_log)
    write_output(args.output, json.dumps(written))
    if args.json and args.output not in STDOUT:
        print_json({"path": os.path.abspath(args.output), "events": len(written["traceEvents"])})
