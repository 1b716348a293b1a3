# SPDX-License-Identifier: BSD-3-Clause
"""The requests of the controller to the hosts, their answers, and what hosts report without a request.

All of them travel over the connection with which a host has registered: a request as a name and a JSON object
(``host_requests``), an answer or report as a JSON object with its ``type``. The leader's own host gets and returns the
objects themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, get_args

from torchx_monarch.insight.hangs import RankCollectives
from torchx_monarch.insight.rank_sample import RankSample
from torchx_monarch.insight.stacks import ProcessStacks
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.model.host_facts import HostFacts
from torchx_monarch.model.job_result import RankExit
from torchx_monarch.model.run_request import RunRequest
from torchx_monarch.model.world import World


@dataclasses.dataclass(frozen=True)
class HostAnswer:
    """An answer with the replica of the host that has sent it."""

    replica: int


@dataclasses.dataclass(frozen=True)
class OpenStore:
    """Open the port where the ranks meet, on replica 0's host (see ``RankPool.serve_store``)."""

    bind: str
    advertised: str
    hosts: int


@dataclasses.dataclass(frozen=True)
class StoreOpened:
    """The answer to ``OpenStore``: MASTER_ADDR, MASTER_PORT, and whether a store is already served there."""

    address: str
    port: int
    served: bool


@dataclasses.dataclass(frozen=True)
class LaunchRanks:
    """Start the ranks of an attempt (see ``RankPool.launch``)."""

    world: World


@dataclasses.dataclass(frozen=True)
class Launched(HostAnswer):
    """The answer to ``LaunchRanks``.

    Attributes:
        pids: the process ids of the ranks, by local rank.
        imported: when the import of which the ranks are forks began and ended, in seconds since the epoch by the
            host's clock; empty if there was none.
    """

    pids: tuple[int, ...]
    imported: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class WatchRanks:
    """Wait until a rank of the host has failed or all have ended."""


@dataclasses.dataclass(frozen=True)
class StopRanks:
    """Send a signal to all ranks of the host, and SIGKILL ``grace`` seconds later."""

    signal: int
    grace: float


@dataclasses.dataclass(frozen=True)
class RanksExited(HostAnswer):
    """The answer to ``WatchRanks`` and ``StopRanks``: the exits so far of the ranks of this attempt."""

    exits: tuple[RankExit, ...]


@dataclasses.dataclass(frozen=True)
class TakeStacks:
    """Take the stacks of the ranks of the host.

    Attributes:
        rank: the only global rank that is asked; None for all.
        native: whether py-spy reads them as well.
        save_as: title under which they are also written into the folder of the attempt; empty for not.
    """

    rank: int | None
    native: bool
    save_as: str = ""


@dataclasses.dataclass(frozen=True)
class StacksTaken(HostAnswer):
    """The answer to ``TakeStacks``."""

    stacks: tuple[ProcessStacks, ...]


@dataclasses.dataclass(frozen=True)
class ReadCollectives:
    """Read the state of the collectives of the host's ranks.

    Attributes:
        details: whether the answer has all of it, and not only the longest wait.
    """

    details: bool


@dataclasses.dataclass(frozen=True)
class CollectivesRead(HostAnswer):
    """The answer to ``ReadCollectives``.

    Attributes:
        longest_wait: seconds for which a rank has waited in a collective; 0 if none waits.
        ranks: the ranks that run; empty unless details were asked for.
    """

    longest_wait: float
    ranks: tuple[RankCollectives, ...]


@dataclasses.dataclass(frozen=True)
class SampleRanks:
    """Take a sample of each rank of the host.

    Attributes:
        groups: whether the ranks are asked for the state of their collectives.
    """

    groups: bool = True


@dataclasses.dataclass(frozen=True)
class RanksSampled(HostAnswer):
    """The answer to ``SampleRanks``."""

    samples: tuple[RankSample, ...]


@dataclasses.dataclass(frozen=True)
class TakeFacts:
    """Take the facts that the pre-flight compares (see ``model.host_facts``)."""


@dataclasses.dataclass(frozen=True)
class FactsTaken(HostAnswer):
    """The answer to ``TakeFacts``."""

    facts: HostFacts


@dataclasses.dataclass(frozen=True)
class BeginRun:
    """Prepare for a run on a live allocation; a repetition for the same run changes nothing.

    Attributes:
        number: number of the run.
        token: identifies the run even after a restart of replica 0.
        request: the client's request.
    """

    number: int
    token: str
    request: RunRequest


@dataclasses.dataclass(frozen=True)
class RunBegun(HostAnswer):
    """The answer to ``BeginRun``.

    Attributes:
        nproc: number of ranks on the host.
        run_id: TORCHELASTIC_RUN_ID of the ranks.
        max_restarts: how often the ranks are restarted after a failure.
        grace: seconds from SIGTERM to SIGKILL for the ranks.
    """

    nproc: int
    run_id: str
    max_restarts: int
    grace: float


@dataclasses.dataclass(frozen=True)
class FinishRun:
    """End the run and all its processes, and prepare for the next run."""

    token: str


@dataclasses.dataclass(frozen=True)
class RunFinished(HostAnswer):
    """The answer to ``FinishRun``, before which the host has sent all output of the run."""


@dataclasses.dataclass(frozen=True)
class ProbeFile:
    """Look whether the host sees a file with a text."""

    path: str
    text: str


@dataclasses.dataclass(frozen=True)
class FileProbed(HostAnswer):
    """The answer to ``ProbeFile``: whether the host sees it."""

    seen: bool


@dataclasses.dataclass(frozen=True)
class FetchCode:
    """Get code from the leader unless the host has it (see ``host.code_distribution``)."""

    tree: str


@dataclasses.dataclass(frozen=True)
class CodeFetched(HostAnswer):
    """The answer to ``FetchCode``."""


@dataclasses.dataclass(frozen=True)
class RunWorkerLoop:
    """Run a Monarch worker loop for a client until the request is cancelled (see ``host.worker_loops``).

    Attributes:
        token: identifies the client.
    """

    token: str


@dataclasses.dataclass(frozen=True)
class WorkerLoopEnded(HostAnswer):
    """The answer to ``RunWorkerLoop``: why the worker loop has ended by itself, or that its client has shut it down."""

    reason: str
    shut_down: bool = False


@dataclasses.dataclass(frozen=True)
class GetWorkerLoop:
    """Wait until the worker loop of a client listens."""

    token: str


@dataclasses.dataclass(frozen=True)
class WorkerLoopReady(HostAnswer):
    """The answer to ``GetWorkerLoop``: the address with which the client attaches."""

    address: str


@dataclasses.dataclass(frozen=True)
class Refused(HostAnswer):
    """The answer to any request that the host cannot execute.

    Attributes:
        host: the host's name, for messages; empty if the reason concerns several hosts.
        reason: why it cannot.
        code: exit code of the run that needs the request.
    """

    host: str
    reason: str
    code: int


@dataclasses.dataclass(frozen=True)
class SignalReceived:
    """Report a signal that the host process has received.

    Attributes:
        number: the signal.
        announced: whether the backend has announced it; None for a backend that cannot.
    """

    number: int
    announced: bool | None


@dataclasses.dataclass(frozen=True)
class RunOutput:
    """Report records of a run on a live allocation.

    Attributes:
        token: identifies the run.
        records: JSON lines.
    """

    token: str
    records: str


_RankRequest: TypeAlias = OpenStore | LaunchRanks | WatchRanks | StopRanks | TakeStacks | ReadCollectives | SampleRanks
_RankAnswer: TypeAlias = StoreOpened | Launched | RanksExited | StacksTaken | CollectivesRead | RanksSampled
_LoopRequest: TypeAlias = RunWorkerLoop | GetWorkerLoop
_LoopAnswer: TypeAlias = WorkerLoopEnded | WorkerLoopReady
Request: TypeAlias = _RankRequest | _LoopRequest | TakeFacts | BeginRun | FinishRun | ProbeFile | FetchCode
Answer: TypeAlias = _RankAnswer | _LoopAnswer | FactsTaken | RunBegun | RunFinished | FileProbed | CodeFetched | Refused
Report: TypeAlias = SignalReceived | RunOutput
Handler: TypeAlias = Callable[[Request], Awaitable[Answer]]

_REQUESTS: dict[str, type[Request]] = {message_type.__name__: message_type for message_type in get_args(Request)}
_ANSWERS: dict[str, type[Answer]] = {message_type.__name__: message_type for message_type in get_args(Answer)}
_REPORTS: dict[str, type[Report]] = {message_type.__name__: message_type for message_type in get_args(Report)}


def encode_request(request: Request) -> tuple[str, dict[str, Any]]:
    """Return the name and the JSON object with which a request travels."""
    return type(request).__name__, dataclasses.asdict(request)


def decode_request(name: str, fields: Mapping[str, Any]) -> Request:
    """Return the request of a name and a JSON object.

    Raises:
        DecodeError: there is no such request, or a field has the wrong type.
    """
    if name not in _REQUESTS:
        raise DecodeError(f"unknown request {name!r:.40}")
    return decode(_REQUESTS[name], fields, name)


def encode_message(message: Answer | Report) -> dict[str, Any]:
    """Return the JSON object with which an answer or a report travels."""
    return {"type": type(message).__name__, **dataclasses.asdict(message)}


def decode_answer(message: Mapping[str, Any]) -> Answer:
    """Return the answer of a JSON object.

    Raises:
        DecodeError: there is no such answer, or a field has the wrong type.
    """
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in _ANSWERS:
        raise DecodeError(f"unknown answer {kind!r:.40}")
    return decode(_ANSWERS[kind], message, kind)


def decode_report(message: Mapping[str, Any]) -> Report | None:
    """Return the report of a JSON object; None if it is no report, but a heartbeat.

    Raises:
        DecodeError: a field has the wrong type.
    """
    kind = message.get("type")
    return decode(_REPORTS[kind], message, kind) if isinstance(kind, str) and kind in _REPORTS else None
