# SPDX-License-Identifier: BSD-3-Clause
"""The verdict on what slows a job: who (``pace.find_suspect``), since when, by how much, and in what.

In what follows from stacks that were taken of ranks that may be slow, and at the same moments of ranks that may wait
for them (``explain``).
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torchx_monarch.insight.pace import Pace, Suspect, mean
from torchx_monarch.insight.stacks import Frame, ProcessStacks, rank_ranges
from torchx_monarch.insight.summary import show_duration
from torchx_monarch.model.codec import Seconds
from torchx_monarch.system.error_files import path_in_library
from torchx_monarch.system.untrusted_text import one_line

_MAX_LINE = 500

_MIN_MORE = 0.1
"""By which part of the time more than others a rank must do something for it to be the reason."""

_MIN_WAIT = 0.4
"""Which part of the time that a rank loses it must wait for a processor for that to be the reason."""


class Kind(str, enum.Enum):
    """In what slow ranks lose the time."""

    INPUT = "input"
    PROCESSOR = "processor"
    FILE = "file"
    NETWORK = "network"
    LOCK = "lock"
    COLLECTIVE = "collective"
    PROGRAM = "program"


_WORDS = {
    Kind.INPUT: "in its input",
    Kind.PROCESSOR: "waiting for a processor",
    Kind.FILE: "blocked on a file",
    Kind.NETWORK: "waiting for the network",
    Kind.LOCK: "waiting for a lock",
    Kind.COLLECTIVE: "in a collective",
    Kind.PROGRAM: "in its program",
}

MACHINE_KINDS = (Kind.PROCESSOR, Kind.FILE, Kind.NETWORK)
"""The kinds that another machine may not have."""


@dataclasses.dataclass(frozen=True)
class Slowness:
    """Who slows a job: the verdict.

    Attributes:
        ranks: the global ranks, ascending; empty for all.
        host: the name of their host; empty if they are on several.
        replica: that of the host; None if they are on several.
        whole_host: whether they are all ranks of that host, and several.
        behind: by how much more time they take for the same work than the others, or all for theirs than before: 0.38.
        share: the share of the time that is lost.
        since, step: when it began, and after which step; None if the program tells none.
        place: where they lose the time: ``data.py:41``; empty if that is not known.
        path: the file on which they are blocked, or whose lock they wait for; else empty.
        lost: the seconds that were lost until the verdict was shown (``shown``).
        message: the verdict as one line, then.
    """

    kind: Kind
    ranks: tuple[int, ...]
    host: str
    replica: int | None
    whole_host: bool
    behind: float
    share: float
    since: Seconds
    step: int | None = None
    place: str = ""
    path: str = ""
    lost: float = 0.0
    message: str = ""

    def shown(self, now: float) -> Slowness:
        """Return the verdict with what was lost until a time, and as a line."""
        lost = max(0.0, now - self.since) * self.share
        return dataclasses.replace(self, lost=round(lost, 3), message=self._describe(lost))

    def who(self) -> str:
        """Return the ranks for a person: ``rank 5 (node7)``, ``host node7 (ranks 8-15)``, ``all ranks``."""
        if not self.ranks:
            return "all ranks"
        if self.whole_host:
            return f"host {self.host} ({rank_ranges(self.ranks)})"
        return rank_ranges(self.ranks) + (f" ({self.host})" if self.host else "")

    def _describe(self, lost: float) -> str:
        began = time.strftime("%H:%M:%S", time.localtime(self.since)) if self.step is None else f"step {self.step:,}"
        beside = f"{100 * self.behind:.0f} % {'behind the others' if self.ranks else 'slower than before'}"
        what = _WORDS[self.kind] if len(self.ranks) == 1 else _WORDS[self.kind].replace("its", "their")
        where = ": ".join(filter(None, (what, ", ".join(filter(None, (self.path, os.path.basename(self.place)))))))
        return one_line(
            f"slow since {began}: {self.who()}, {beside}, {where}; {show_duration(lost)} lost so far", _MAX_LINE
        )


class Activity(NamedTuple):
    """What a rank does: the kind, the place in its program, and the path of the file for which it waits, if any."""

    kind: Kind
    place: str
    path: str = ""


def explain(
    suspect: Suspect,
    paces: Sequence[Pace],
    own: Sequence[Activity],
    theirs: Sequence[Activity],
    hosts: Mapping[int, tuple[int, str]],
) -> Slowness:
    """Return the verdict on ranks that are slow.

    Args:
        own: what the suspects did at some moments.
        theirs: what ranks that may wait for them did then. What suspects do more often counts: while others wait, a
            suspect may do what all have to do.
        hosts: the replica of each rank, and the name of its host.
    """
    usual = {kind: 0.75 for kind in (Kind.COLLECTIVE, Kind.PROGRAM)}  # where there is nobody to compare with
    more = {kind: _part(own, kind) - (_part(theirs, kind) if theirs else usual.get(kind, 0.0)) for kind in Kind}
    kind = max(more, key=lambda kind: more[kind])
    if more[kind] < _MIN_MORE:
        kind = Kind.COLLECTIVE if theirs or not own else max(Kind, key=lambda kind: _part(own, kind))
    named = {hosts[rank] for rank in suspect.ranks}
    replica, host = named.pop() if len(named) == 1 else (None, "")
    places = Counter((activity.place, activity.path) for activity in own if activity.kind is kind)
    place, path = places.most_common(1)[0][0] if places else ("", "")
    if kind is Kind.COLLECTIVE and len(set(hosts.values())) > 1:
        kind = Kind.NETWORK  # a rank that is late though it is in a collective like the others gets its data later
    if lacks_processor(suspect, paces):
        kind, place, path = Kind.PROCESSOR, "", ""
    behind = suspect.share / max(0.01, 1 - suspect.share)
    whole_host = suspect.replica is not None
    return Slowness(
        kind, suspect.ranks, host, replica, whole_host, behind, suspect.share, suspect.since, suspect.step, place, path
    )


def _part(activities: Sequence[Activity], kind: Kind) -> float:
    return mean(float(activity.kind is kind) for activity in activities)


def lacks_processor(suspect: Suspect, paces: Sequence[Pace]) -> bool:
    """Return whether ranks waited longer for a processor in the paces that have decided than others, or than before.

    It must be much of what they lose.
    """
    last, past = paces[-suspect.paces :], paces[: -suspect.paces]

    def waits_of(paces: Sequence[Pace], ranks: Iterable[int]) -> float:
        return mean(pace.waits.get(rank, 0.0) for rank in ranks for pace in paces)

    everybody = last[-1].waits.keys()
    usual = waits_of(last, everybody - set(suspect.ranks)) if suspect.ranks else waits_of(past, everybody)
    return waits_of(last, suspect.ranks or everybody) - usual >= _MIN_WAIT * suspect.share


_NETWORK_CALLS = ("sendto", "recvfrom", "sendmsg", "recvmsg", "connect", "accept")

_INPUT = re.compile(
    r"_*(?:(?:get|load|read|fetch|make|next|prepare|decode|sample|iter)_)?"
    r"(?:item|batch|batches|data|dataset|sample|input|image|example|shard|record|iter|next|getitem|collate|fetch)s?_*"
)
"""Names of functions that give a program its input."""

_INPUT_FILE = re.compile(r"(?:.*_)?(?:data|dataset|input|loader|dataloader)s?\.py")


def activity(processes: Sequence[ProcessStacks]) -> Activity:
    """Return what a rank does.

    Args:
        processes: its own process, and those that it has started, such as workers of a DataLoader.
    """
    own = _activity_of(next((process for process in processes if not process.child), processes[0]))
    if own.kind is Kind.INPUT:
        for process in processes:
            if process.child and (found := _activity_of(process)).kind in (Kind.FILE, Kind.NETWORK):
                return found
    return own


def _activity_of(process: ProcessStacks) -> Activity:
    frames, wait = process.threads[0].frames if process.threads else (), process.wait
    top = frames[0].file if frames else ""
    own = [frame for frame in frames if not path_in_library(frame.file)]
    place = f"{own[0].file}:{own[0].line}" if own else ""
    is_file = wait.path.startswith("/") and not wait.path.startswith(("/dev/", "/proc/", "/memfd:"))
    if wait.state in ("T", "t"):
        return Activity(Kind.PROCESSOR, "stopped by a signal")
    if wait.call in ("flock", "fcntl"):
        return Activity(Kind.LOCK, place, wait.path)
    if is_file:
        return Activity(Kind.FILE, place, wait.path)
    if "/torch/distributed/" in top or (wait.call == "futex" and "/torch/autograd/" in top):
        return Activity(Kind.COLLECTIVE, place)
    if wait.call in _NETWORK_CALLS:
        return Activity(Kind.NETWORK, place)
    if wait.call == "futex" and own and own[0] is frames[0]:
        return Activity(Kind.LOCK, place)
    if any("/torch/utils/data/" in frame.file for frame in frames):
        return Activity(Kind.INPUT, place)
    if wait.call == "futex" and "/torch/" not in top:
        return Activity(Kind.LOCK, place)
    if wait.state == "D":
        return Activity(Kind.FILE, place)
    if any(map(_gives_input, own)):
        return Activity(Kind.INPUT, place)
    return Activity(Kind.PROGRAM, place)


def _gives_input(frame: Frame) -> bool:
    is_input_file = _INPUT_FILE.fullmatch(os.path.basename(frame.file)) is not None
    return _INPUT.fullmatch(frame.function) is not None or (is_input_file and frame.function != "<module>")
