# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Show the output of a run on a live allocation and exit with its exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

from torchx_monarch.cli import exit_codes
from torchx_monarch.client.hosts import Hosts, say
from torchx_monarch.client.run import Collector, Records, collect_with_interrupts


def stream_and_exit(hosts: Hosts, records: Records, verbose: bool, ends: bool = True) -> NoReturn:
    """Show a run's output, and exit with its exit code.

    Args:
        hosts: the hosts of the allocation.
        records: the records of the run.
        verbose: whether to show the phases of the run as well.
        ends: whether Ctrl-C stops the run; otherwise Ctrl-C only ends this command.
    """
    collector = Collector("stream", say if verbose else None)
    try:
        result = collect_with_interrupts(hosts, records, collector) if ends else collector.collect(records)
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)
    finally:
        records.close()
    if result.exit_code != 0 and not verbose:
        cause = result.ranks.get(result.cause) if result.cause is not None else None
        if cause is not None and cause.traceback:
            say(f"traceback of rank {cause.rank}:\n{cause.traceback.rstrip()}")
        if cause is not None and cause.log_path:
            say(f"log of rank {cause.rank}: {cause.log_path}")
        say(f"run {result.run} {'STOPPED' if result.stopped else 'FAILED'}: {result.reason}")
    sys.exit(result.exit_code)
