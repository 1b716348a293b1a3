# SPDX-License-Identifier: BSD-3-Clause
"""The metrics of a job's ranks for Prometheus, of samples of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from torchx_monarch.cli.job_metrics import PREFIX
from torchx_monarch.insight.prometheus_text import Family
from torchx_monarch.insight.rank_sample import RankSample


def of_ranks(roles: Mapping[str, Sequence[RankSample]], job: str, per_rank: bool) -> list[Family]:
    """Return the metrics of the ranks of an app, for each role and attempt the sum of all ranks.

    Args:
        job: the label ``job``: the app's id.
        per_rank: whether there are metrics of each rank as well, with the labels ``rank`` and ``host``.
    """
    attempts = defaultdict[tuple[str, int], list[RankSample]](list)
    for role, samples in roles.items():
        for sample in samples:
            attempts[role, sample.attempt + 1].append(sample)
    groups = [
        ({"job": job, "role": role, "attempt": str(attempt)}, ranks) for (role, attempt), ranks in attempts.items()
    ]
    states = Family(f"{PREFIX}ranks", "number of ranks in a state")
    for labels, ranks in groups:
        for state, count in sorted(Counter(rank.state for rank in ranks).items()):
            states.add({**labels, "state": state}, count)
    found = [states]
    for name, text, value in _OF_RANKS:
        total, single = Family(f"{PREFIX}{name}", f"{text}, of all ranks"), Family(f"{PREFIX}rank_{name}", text)
        combine = max if name.endswith("_timestamp_seconds") else sum
        for labels, ranks in groups:
            measured = [(rank, number) for rank in ranks if (number := value(rank)) is not None]
            if measured:
                total.add(labels, combine(number for _, number in measured))
            for rank, number in measured:
                single.add({**labels, "rank": str(rank.rank), "host": rank.host}, number)
        found += [total, single] if per_rank else [total]
    return found


_OF_RANKS: tuple[tuple[str, str, Callable[[RankSample], float | None]], ...] = (
    ("cpu_seconds_total", "processor time of the ranks and their children", lambda rank: rank.cpu_seconds),
    ("resident_memory_bytes", "resident memory of the ranks and their children", lambda rank: rank.rss_bytes),
    ("collectives_total", "collectives that the ranks called", lambda rank: rank.collectives if rank.groups else None),
    (
        "gpu_memory_bytes",
        "memory that the ranks have on GPUs",
        lambda rank: sum(device.memory_bytes for device in rank.devices) if rank.devices else None,
    ),
    ("last_output_timestamp_seconds", "when the ranks printed something last", lambda rank: rank.last_output),
)
"""Name, meaning and value of the metrics that each rank has; None for a value that is not known."""
