# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch metrics``: print the metrics of a job as Prometheus reads them."""

from __future__ import annotations

import argparse
import json

from torchx_monarch.cli import job_metrics
from torchx_monarch.cli.handles import add_handle
from torchx_monarch.cli.job_history import read_history
from torchx_monarch.cli.json_output import add_json
from torchx_monarch.cli.output_file import write_output
from torchx_monarch.cli.scheduler_access import app_id_of, opened
from torchx_monarch.insight.prometheus_text import render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``torchx monarch metrics``."""
    add_handle(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="a file to replace at once, as in the folder of node_exporter's textfile collector (default: print)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Print the metrics."""
    scheduler_name, app_id = app_id_of(args.handle)
    with opened(scheduler_name) as scheduler:
        history = read_history(scheduler, args.handle, app_id)
    families = job_metrics.of_job(history.status, history.timeline, app_id)
    if args.json:
        shown = json.dumps({"metrics": [one.to_json() for one in families if one.values]}, indent=1) + "\n"
    else:
        shown = render(families)
    if args.output is None:
        print(shown, end="")
    else:
        write_output(args.output, shown)
