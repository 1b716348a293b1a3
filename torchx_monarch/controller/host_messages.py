# SPDX-License-Identifier: BSD-3-Clause
"""The requests of the controller to the hosts, their answers, and what hosts report without a request.

All of them travel over the connection with which a host has registered. Replica 0's own host gets and returns the
objects themselves.

=============  =======================================================================================================
``request``    replica 0 to host: ``id``, ``name`` of the request and its ``fields``
``cancel``     replica 0 to host: nobody waits for the answer to ``id`` any more
``answer``     host to replica 0: ``id``, and the ``answer``, a refusal (``refused``), or the text of an ``error``
=============  =======================================================================================================

A host executes its requests side by side and answers each when it is done, so answers arrive in any order.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar, get_args

from torchx_monarch.insight.hangs import HostCollectives
from torchx_monarch.insight.profile import RankProfile
from torchx_monarch.insight.rank_sample import StepsRead
from torchx_monarch.insight.stacks import SharedStacks
from torchx_monarch.model.codec import DecodeError, decode
from torchx_monarch.model.host_facts import HostFacts
from torchx_monarch.model.job_result import RankExit
from torchx_monarch.model.run_request import RunRequest
from torchx_monarch.model.world import World
from torchx_monarch.transport import messages

AnswerT = TypeVar("AnswerT")


class Request(Generic[AnswerT]):
    """A request to a host; the parameter is the type of its answer."""

    @classmethod
    def answer_type(cls) -> Any:
        """Return the type of the answer, which ``model.codec`` decodes."""
        return get_args(cls.__dict__["__orig_bases__"][0])[0]


class Query(Request[AnswerT]):
    """A request whose execution may be cancelled."""


class HostError(Exception):
    """A host has not answered a request: its connection has ended, its answer is not valid, or it has refused."""


class HostLateError(HostError):
    """Some hosts have not answered a request in time."""

    def __init__(self, replicas: Collection[int], seconds: float) -> None:
        super().__init__(f"no answer within {seconds:g} s")
        self.replicas = replicas


@dataclasses.dataclass(eq=False)
class HostRefused(HostError):
    """A host cannot execute a request; ``code`` is the exit code of the run that needs it."""

    host: str
    reason: str
    code: int = 1

    def __str__(self) -> str:
        return f"{self.host}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class StoreOpened:
    """MASTER_ADDR, MASTER_PORT, and whether a store is already served there."""

    address: str
    port: int
    served: bool


@dataclasses.dataclass(frozen=True)
class OpenStore(Request[StoreOpened]):
    """Open the port where the ranks meet, on replica 0's host, for so many hosts (see ``RankPool.serve_store``)."""

    hosts: int


@dataclasses.dataclass(frozen=True)
class Launched:
    """The ranks that a host has started, by local rank."""

    pids: tuple[int, ...]
    imported: tuple[float, ...] = ()
    """When the import of which the ranks are forks began and ended, by the host's clock; empty if there was none."""
    unshared: str = ""
    """The first statement that the ranks do not share, and why; empty if that is not known."""
    facts: HostFacts = dataclasses.field(default_factory=dict)
    """Those that cost nothing: versions that the zygote has found, and the script."""


@dataclasses.dataclass(frozen=True)
class LaunchRanks(Request[Launched]):
    """Start the ranks of an attempt (see ``RankPool.launch``)."""

    world: World


Exits: TypeAlias = list[RankExit]
"""The exits so far of a host's ranks of this attempt."""


@dataclasses.dataclass(frozen=True)
class WatchRanks(Request[Exits]):
    """Wait until a rank of the host has failed or all have ended."""


@dataclasses.dataclass(frozen=True)
class StopRanks(Request[Exits]):
    """Send a signal to all ranks of the host, and SIGKILL ``grace`` seconds later."""

    signal: int
    grace: float


@dataclasses.dataclass(frozen=True)
class StopAtStep(Query[StepsRead]):
    """Have the ranks wait at a stop point, from 1, and answer when all do, or one has passed it; -1: only read.

    ``confirmed``: all ranks wait there, and end their loops. ``seconds`` from now the ranks must have ended; 0 leaves
    what they know of their end.
    """

    target: int = -1
    confirmed: bool = False
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class TakeStacks(Query[list[SharedStacks]]):
    """Take the stacks of the ranks of the host, or of one global rank."""

    rank: int | None
    save_as: str = dataclasses.field(default="", compare=False)
    """Title under which they are also written into the folder of the attempt; empty for not."""


@dataclasses.dataclass(frozen=True)
class ProfileRanks(Query[list[RankProfile]]):
    """Profile the ranks of the host, those of the global ``ranks`` alone unless it is empty (see ``rank_stacks``)."""

    ranks: tuple[int, ...]
    seconds: float
    idle: bool


@dataclasses.dataclass(frozen=True)
class ReadCollectives(Query[HostCollectives]):
    """Read the state of the collectives of the host's ranks; with ``details`` all of it, else the longest wait.

    With ``seconds``, also the pace of the ranks in the last so many seconds, with at most ``calls`` of each group.
    """

    details: bool
    seconds: float = dataclasses.field(default=0.0, compare=False)
    calls: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True)
class SampleRanks(Query[str]):
    """Take a sample of each rank of the host: ``RankSamples.to_text``, which replica 0 passes on and does not read."""


@dataclasses.dataclass(frozen=True)
class TakeFacts(Query[HostFacts]):
    """Take the facts that the pre-flight compares."""


@dataclasses.dataclass(frozen=True)
class RunBegun:
    """What a host knows of a run that it has prepared for, the same on all hosts but for the number of its ranks.

    ``first_log_attempt`` is the number of the first attempt's log folders, ``kernel_timeout`` the seconds for which a
    rank may wait inside the kernel, 0 for no limit.
    """

    nproc: int
    run_id: str
    max_restarts: int
    grace: float
    first_log_attempt: int = 0
    kernel_timeout: float = 0.0


@dataclasses.dataclass(frozen=True)
class BeginRun(Request[RunBegun]):
    """Prepare for a run; without fields, for that of a batch job. A repetition for the same run changes nothing."""

    number: int = 0
    token: str = ""
    """Identifies the run even after a restart of replica 0."""
    request: RunRequest = RunRequest(None, None)


@dataclasses.dataclass(frozen=True)
class ReadOutput(Query[str]):
    """Wait for output of a run on the host, and return it as records, JSON lines; nothing after the last."""

    token: str


@dataclasses.dataclass(frozen=True)
class FinishRun(Request[None]):
    """End the run and all its processes, and prepare for the next run."""

    token: str


@dataclasses.dataclass(frozen=True)
class ProbeFile(Request[bool]):
    """Find out whether the host sees a file."""

    path: str


@dataclasses.dataclass(frozen=True)
class WorkerLoopEnded:
    """Why a worker loop has ended, and whether its client has shut it down."""

    reason: str
    shut_down: bool = False


@dataclasses.dataclass(frozen=True)
class RunWorkerLoop(Query[WorkerLoopEnded]):
    """Run a Monarch worker loop for a client until the request is cancelled (see ``host.worker_loops``)."""

    token: str


@dataclasses.dataclass(frozen=True)
class GetWorkerLoop(Query[str]):
    """Wait until the worker loop of a client listens; the answer is the address with which the client attaches."""

    token: str


@dataclasses.dataclass(frozen=True)
class SignalReceived:
    """Report a signal that the host process has received (see ``host_events.signalled``)."""

    number: int
    announced: bool | None
    saves: bool = False


@dataclasses.dataclass(frozen=True)
class CheckpointPart:
    """What a host has of a checkpoint: the files of its own ranks, or of those of another replica.

    Attributes:
        attempt: that of the ranks; the files of two attempts make no checkpoint together.
        replica: the one whose ranks have written it.
        ranks: these ranks.
        all_ranks: those that take part; empty for all of ``world``.
        persist, persist_every, shared: as ranks have said (``training.checkpoint.Written``).
    """

    step: int
    attempt: int
    replica: int
    ranks: tuple[int, ...]
    all_ranks: tuple[int, ...]
    world: int
    size: int
    persist: str
    persist_every: float
    shared: bool


@dataclasses.dataclass(frozen=True)
class CheckpointParts:
    """Report all parts of checkpoints that a host has, and the address from which other hosts fetch them."""

    parts: tuple[CheckpointPart, ...]
    address: str


@dataclasses.dataclass(frozen=True)
class ListCheckpoints(Request[CheckpointParts]):
    """Find the parts of checkpoints that the host has, also those that its ranks have completed just now."""


@dataclasses.dataclass(frozen=True)
class PartSource:
    """Where hosts fetch a part; ``is_needed``: whether the host cannot do without it."""

    part: CheckpointPart
    addresses: tuple[str, ...]
    is_needed: bool = True


@dataclasses.dataclass(frozen=True)
class RestoreCheckpoint(Request[str]):
    """Give the ranks of the next attempt a whole checkpoint, or none without ``sources``, and remove later ones.

    The answer is why that cannot be done, empty if it is.
    """

    sources: tuple[PartSource, ...]


@dataclasses.dataclass(frozen=True)
class KeepCheckpoints(Query[None]):
    """Keep whole checkpoints, by their steps and attempts, remove earlier ones, and fetch a copy of a part.

    The host reports what it has then: an answer, for which others are waited for, would be older than later reports.
    """

    whole: tuple[tuple[int, ...], ...]
    copy: PartSource | None


@dataclasses.dataclass(frozen=True)
class PersistCheckpoint(Request[str]):
    """Copy parts of a checkpoint, by their replicas, into a folder of the user; for none, remove what is there.

    With ``publish`` all hosts have copied theirs: make a whole checkpoint of these parts. The answer is why that cannot
    be done, empty if it is.
    """

    step: int
    attempt: int
    replicas: tuple[int, ...]
    folder: str
    publish: bool = False


Report: TypeAlias = SignalReceived | CheckpointParts

Handler: TypeAlias = Callable[[Request[Any]], Awaitable[Any]]
"""Executes a request and returns its answer; it raises nothing but ``HostRefused``."""

REQUESTS: dict[str, type[Request[Any]]] = {
    request.__name__: request for kind in (Request, Query) for request in kind.__subclasses__() if request is not Query
}


def encode_request(number: int, request: Request[Any]) -> bytes:
    """Return the message of a request; raise ``ProtocolError`` if it is too long."""
    fields = {"name": type(request).__name__, "fields": request}
    return messages.encode({"type": "request", "id": number, **fields})


def decode_request(message: messages.Message) -> Request[Any]:
    """Return the request of a message; raise ``DecodeError`` if it is none, or a field has the wrong type."""
    name = str(message.get("name"))
    if name not in REQUESTS:
        raise DecodeError(f"unknown request {name!r:.40}")
    return decode(REQUESTS[name], message.get("fields"), name)


_REPORTS = {report.__name__: report for report in get_args(Report)}


def decode_report(message: Mapping[str, Any]) -> Report | None:
    """Return the report of a message, whose type is its name; None if it is no report."""
    name = str(message.get("type"))
    found: Report | None = decode(_REPORTS[name], message, name) if name in _REPORTS else None
    return found


class HostCall(Generic[AnswerT]):
    """A request to some hosts: an iterator of their answers, or errors, with their replicas, as they arrive.

    Attributes:
        waiting: the replicas whose hosts have not answered.
    """

    def __init__(self, number: int, request: Request[AnswerT], replicas: Iterable[int]) -> None:
        self.number = number
        self.waiting = set(replicas)
        self.answers: asyncio.Queue[tuple[int, AnswerT | HostError]] = asyncio.Queue()
        self._answer_type = request.answer_type()

    def __aiter__(self) -> HostCall[AnswerT]:
        return self

    async def __anext__(self) -> tuple[int, AnswerT | HostError]:
        if not self.waiting and self.answers.empty():
            raise StopAsyncIteration
        return await self.answers.get()

    def put(self, replica: int, answer: AnswerT | HostError) -> None:
        """Add the answer of a host, unless it has answered before."""
        if replica in self.waiting:
            self.waiting.discard(replica)
            self.answers.put_nowait((replica, answer))

    def expire(self, seconds: float) -> None:
        """Wait no longer for the hosts that have not answered within some seconds."""
        late = HostLateError(sorted(self.waiting), seconds)
        for replica in late.replicas:
            self.put(replica, late)

    def receive(self, replica: int, message: messages.Message) -> None:
        """Add the answer, refusal or error in a message of a host."""
        answer: AnswerT | HostError
        try:
            if "error" in message:
                answer = HostError(str(message["error"])[:1000])
            elif "refused" in message:
                answer = decode(HostRefused, message["refused"], "the refusal")
            else:
                answer = decode(self._answer_type, message.get("answer"), "the answer")
        except ValueError as error:
            answer = HostError(str(error)[:1000])
        self.put(replica, answer)
