# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch metrics``: print the metrics of a job as Prometheus reads them."""

from __future__ import annotations

import argparse
import json

from torchx_monarch.cli import job_metrics, rank_metrics
from torchx_monarch.cli.handles import add_handle
from torchx_monarch.cli.job_history import JobHistory, read_history
from torchx_monarch.cli.json_output import add_json
from torchx_monarch.cli.output_file import write_output
from torchx_monarch.cli.scheduler_access import app_id_of, opened
from torchx_monarch.client.hosts import Hosts, say
from torchx_monarch.client.rank_samples import ask_samples
from torchx_monarch.exceptions import AllocationError, RefusedError, UnreachableError
from torchx_monarch.insight.prometheus_text import Family, render
from torchx_monarch.insight.rank_sample import RankSample
from torchx_monarch.model.role_spec import WorkloadKind
from torchx_monarch.system.untrusted_text import one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``torchx monarch metrics``."""
    add_handle(parser)
    parser.add_argument("--per-rank", action="store_true", help="with metrics of each rank: as many as there are ranks")
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
    if not history.status.has_ended:
        families += _of_ranks(history, app_id, args.per_rank)
    if args.json:
        shown = json.dumps({"metrics": [family.to_json() for family in families if family.values]}, indent=1) + "\n"
    else:
        shown = render(families)
    if args.output is None:
        print(shown, end="")
    else:
        write_output(args.output, shown)


def _of_ranks(history: JobHistory, job: str, per_rank: bool) -> list[Family]:
    """Return the metrics of the ranks of all roles; none of a role whose hosts do not answer."""
    samples: dict[str, list[RankSample]] = {}
    for role in history.app.roles:
        name = role.spec.name
        if role.spec.workload in (WorkloadKind.RANKS, WorkloadKind.SESSION):
            try:
                samples[name], missing = ask_samples(Hosts(history.status.handle, name))
            except (UnreachableError, RefusedError, AllocationError) as error:
                say(f"no metrics of the ranks of {one_line(name)}: {error}")
                continue
            for replica, why in missing.items():
                say(f"no metrics of the ranks of host {replica}: {one_line(why, 300)}")
    return rank_metrics.of_ranks(samples, job, per_rank)
