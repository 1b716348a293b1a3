# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch nodes``: what this user's jobs have met on each machine."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from torchx_monarch.cli.ls import used_schedulers
from torchx_monarch.cli.output import print_json, print_table
from torchx_monarch.cli.status import show_when
from torchx_monarch.client.hosts import say
from torchx_monarch.schedulers.node_history import FAULTS, NodeHistory, read_history, record_jobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-s", "--scheduler", help="only this scheduler (default: all that were used from this machine)")


def run(args: argparse.Namespace) -> None:
    """Print a table of the machines where jobs have met something; as JSON of all."""
    for name, scheduler in used_schedulers(args.scheduler):
        record_jobs(name, scheduler.apps)
    nodes = read_history(args.scheduler)
    if args.json:
        print_json([asdict(node) for node in nodes])
        return
    met = [node for node in nodes if node.last]
    if met:
        heads = [fault.replace("_", " ").upper() for fault in FAULTS]
        print_table(["NODE", "JOBS", *heads, "LAST", "KNOWN BAD"], [_cells(node) for node in met])
    others = len(nodes) - len(met)
    say(f"{others} {'other ' if met else ''}machine{'s have' if others != 1 else ' has'} met nothing")


def _cells(node: NodeHistory) -> list[str]:
    counts = [
        f"{node.faults[fault]} in {node.in_jobs[fault]} job{'s' if node.in_jobs[fault] > 1 else ''}"
        if fault in node.faults
        else ""
        for fault in FAULTS
    ]
    return [node.node, str(node.jobs), *counts, show_when(node.last, None), "yes" if node.is_bad else ""]
