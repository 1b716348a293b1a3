# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The controller on replica 0: hosts, mesh, ranks, verdict."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from torchx_monarch.errors import RankExit, Verdict, others_in_words, root_cause, shell_code
from torchx_monarch.runtime.environment import World
from torchx_monarch.runtime.network import NetworkError
from torchx_monarch.runtime.rendezvous import Registration, Rendezvous, Trouble
from torchx_monarch.runtime.report import Reporter

if TYPE_CHECKING:
    from torchx_monarch.monarch_api import AgentMesh

T = TypeVar("T")

_MESH_TIMEOUT = 60.0
"""Seconds for attaching to the hosts and starting their agents."""

_STOP_MARGIN = 10.0
"""Seconds beyond the grace until a host that has not said that its ranks ended counts as lost."""

_SAID_WITHIN = 8.0
"""Seconds that the rendezvous has to say which host is lost when Monarch has found a call to fail."""


class _TroubleCame(Exception):
    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """What the controller needs to know of the job.

    Attributes:
        run_id: TORCHELASTIC_RUN_ID of the ranks.
        max_restarts: how often the ranks are started again after one has failed; one budget for the whole job.
        replacements: how many lost hosts the backend replaces.
        first_log_attempt: number of the first attempt's log folders.
        host_timeout: seconds that the hosts have to arrive.
        grace: seconds from SIGTERM to SIGKILL for ranks.
        master_addr: what ranks dial to meet rank 0.
        store_bind: the local address that its store listens on; empty for all.
        monarch_log: where Monarch says more.
    """

    run_id: str
    max_restarts: int
    replacements: int
    first_log_attempt: int
    host_timeout: float
    grace: float
    master_addr: str
    store_bind: str
    monarch_log: str


class Controller:
    """Drives the attempts of a role over its hosts.

    Args:
        options: of the job.
        rendezvous: where the hosts register.
        reporter: what a person sees.
        first_output: set when a rank of this host has printed something.
        check: makes sure that hosts can be reached; raises what says why not.
    """

    def __init__(
        self,
        options: JobOptions,
        rendezvous: Rendezvous,
        reporter: Reporter,
        first_output: asyncio.Event,
        check: Callable[[Iterable[Registration]], Awaitable[None]],
    ) -> None:
        self._options = options
        self._rendezvous = rendezvous
        self._reporter = reporter
        self._first_output = first_output
        self._check = check
        # Monarch's calls block; one thread each, because a pending one must not hold up the next.
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="monarch-call")
        self._mesh: AgentMesh | None = None
        self._meshes = 0
        self._members: set[int] = set()
        self._attempt_number = 0
        self._restarts_left = options.max_restarts
        self._replacements_left = options.replacements
        self._exits: dict[int, RankExit] = {}

    async def run(self) -> Verdict:
        """Run the job to its end; never raises for what can go wrong with hosts and ranks."""
        while True:
            try:
                hosts = await self._all_hosts()
                # Hosts that have lost an earlier replica 0 have seen attempts.
                self._attempt_number = max(self._attempt_number, *(host.attempt + 1 for host in hosts))
                await self._form_mesh(hosts)
                return await self._attempts(hosts)
            except _TroubleCame as came:
                trouble = came.trouble
            self._reporter.note("failure", trouble.verdict.reason, replica=trouble.replica)
            # Replica 0 is where we are: its own trouble takes the job along.
            goes_on = trouble.lost and trouble.replica != 0 and self._replacements_left > 0
            if not goes_on:
                self._rendezvous.end()
            await self._stop_ranks({trouble.replica} if trouble.lost else set(), trouble.signal)
            if not goes_on:
                return trouble.verdict
            self._replacements_left -= 1
            self._attempt_number += 1
            text = f"replica {trouble.replica} is to be replaced, {self._replacements_left} replacements left"
            self._reporter.note("replacement", text, replica=trouble.replica)

    async def _all_hosts(self) -> list[Registration]:
        rendezvous, timeout = self._rendezvous, self._options.host_timeout

        def what() -> str:
            missing = ", ".join(str(replica) for replica in rendezvous.missing)
            total = rendezvous.present + len(rendezvous.missing)
            return f"host {rendezvous.present + 1} of {total} (replica {missing})"

        waiting = self._reporter.while_waiting(asyncio.wait_for(rendezvous.hosts(), timeout), what)
        try:
            hosts = await self._unless_trouble(waiting)
        except asyncio.TimeoutError:
            missing = ", ".join(str(replica) for replica in rendezvous.missing)
            reason = f"replica {missing} did not arrive within {timeout:g} s (--host-timeout)"
            raise _TroubleCame(Trouble(0, Verdict(1, reason), lost=False)) from None
        self._reporter.phase("hosts", f"hosts {len(hosts)}/{len(hosts)}", hosts=[host.hostname for host in hosts])
        return hosts

    async def _form_mesh(self, hosts: list[Registration]) -> None:
        from torchx_monarch.monarch_api import AgentMesh
        from torchx_monarch.runtime.agent import Agent

        try:
            addresses, number = [host.address for host in hosts], self._meshes
            self._meshes += 1
            await self._unless_trouble(self._check(hosts))
            mesh = self._in_thread(AgentMesh, addresses, Agent, number, _MESH_TIMEOUT)
            self._mesh = await self._unless_trouble(self._reporter.while_waiting(mesh, lambda: "the mesh"))
        except _TroubleCame:
            raise
        except NetworkError as error:
            raise _TroubleCame(await self._trouble_behind(str(error))) from None
        except Exception as error:
            reason = f"the mesh could not be formed: {_first_line(error)}; see {self._options.monarch_log}"
            raise _TroubleCame(await self._trouble_behind(reason)) from error
        self._members = {host.replica for host in hosts}
        self._reporter.phase("mesh", "mesh")

    async def _attempts(self, hosts: list[Registration]) -> Verdict:
        budget = self._options.max_restarts
        while cause := await self._attempt(hosts, self._attempt_number):
            for line in others_in_words(self._exits.values(), cause):
                self._reporter.line(f"also: {line}")
            if self._restarts_left == 0 or not cause.began:
                if self._restarts_left:
                    self._reporter.line("no restart: the program cannot even begin")
                return Verdict(shell_code(cause.code), cause.describe(), cause)
            self._restarts_left -= 1
            self._attempt_number += 1
            text = f"restart {budget - self._restarts_left} of {budget} after: {cause.describe()}"
            self._reporter.note("rank_restart", text, attempt=self._attempt_number, rank=cause.rank, code=cause.code)
        return Verdict(0, f"all {sum(host.nproc for host in hosts)} ranks ended with code 0")

    async def _attempt(self, hosts: list[Registration], attempt: int) -> RankExit | None:
        """Run the ranks once; None when all ended well, else the one that began the failure."""
        options = self._options
        self._exits = {}
        store = self._call(0, "store", {"address": options.store_bind}, options.host_timeout)
        port, agent_store = await self._reporter.while_waiting(store, lambda: "the interpreter of rank 0")
        sizes = tuple(host.nproc for host in hosts)
        log_attempt = options.first_log_attempt + attempt
        world = World(attempt, log_attempt, sizes, options.master_addr, port, agent_store, options.run_id)
        spares = self._restarts_left > 0 or self._replacements_left > 0
        async for _ in self._each_host("launch", {"world": world.to_json(), "spares": spares}, hosts):
            pass
        self._reporter.phase("ranks", f"ranks {world.size}/{world.size}", attempt=attempt)
        output = asyncio.ensure_future(self._report_output()) if attempt == 0 else None
        async for exits in self._each_host("watch", {}, hosts):
            await asyncio.sleep(0)  # what was printed comes before what ended
            self._note_exits(exits)
            if cause := root_cause(self._exits.values()):
                self._reporter.note("failure", cause.describe(), rank=cause.rank)
                await self._stop_ranks(set(), signal.SIGTERM)
                # Those that had failed before we stopped them have said so by now.
                return root_cause(self._exits.values())
        if output is not None:
            output.cancel()
        return None

    async def _report_output(self) -> None:
        await self._first_output.wait()
        self._reporter.phase("output", "first output")

    # -- the hosts' agents --------------------------------------------------------------------------------------------

    async def _call(self, replica: int, op: str, args: dict[str, Any], timeout: float) -> Any:
        assert self._mesh is not None
        try:
            return await self._unless_trouble(self._in_thread(self._mesh.call, replica, op, args, timeout))
        except _TroubleCame:
            raise
        except Exception as error:
            raise _TroubleCame(Trouble(replica, Verdict(1, f"host {replica}: {_first_line(error)}"))) from None

    async def _each_host(self, op: str, args: dict[str, Any], hosts: Iterable[Registration]) -> Any:
        """Call every agent; yields the answers as they come. Trouble, an error among them, raises."""
        answers: asyncio.Queue[Any] = asyncio.Queue()
        self._stream_into(answers, op, args)
        for _ in hosts:
            answer = await self._unless_trouble(answers.get())
            if isinstance(answer, Exception):
                raise _TroubleCame(await self._trouble_behind(_first_line(answer)))
            yield answer

    async def _trouble_behind(self, reason: str) -> Trouble:
        """What a host says of itself, which is better than what Monarch says of it, if some seconds later."""
        try:
            return await asyncio.wait_for(self._rendezvous.troubles.get(), _SAID_WITHIN)
        except asyncio.TimeoutError:
            return Trouble(0, Verdict(1, reason))

    def _stream_into(self, answers: asyncio.Queue[Any], op: str, args: dict[str, Any]) -> None:
        loop, mesh = asyncio.get_running_loop(), self._mesh
        assert mesh is not None

        def pump() -> None:
            for answer in mesh.stream(op, args):
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(answers.put_nowait, answer)

        threading.Thread(target=pump, name=f"monarch-{op}", daemon=True).start()

    async def _stop_ranks(self, lost: set[int], number: int) -> None:
        """Stop the ranks of every host that can be asked to; what they say of it is kept.

        A host whose agent is gone stops its ranks by itself, and one that is gone took them along.
        """
        if self._mesh is None:
            return
        answers: asyncio.Queue[Any] = asyncio.Queue()
        loop, grace = asyncio.get_running_loop(), self._options.grace
        asked = self._members - lost
        until = loop.time() + grace + _STOP_MARGIN
        self._stream_into(answers, "stop", {"signal": number, "grace": grace})
        while asked:
            try:
                answer = await self._unless_trouble(asyncio.wait_for(answers.get(), until - loop.time()))
            except _TroubleCame as came:
                if came.trouble.lost:
                    asked.discard(came.trouble.replica)
            except asyncio.TimeoutError:
                late = ", ".join(str(replica) for replica in sorted(asked))
                self._reporter.line(f"host {late} did not stop its ranks within {grace + _STOP_MARGIN:g} s")
                return
            else:
                if not isinstance(answer, Exception):
                    self._note_exits(answer)
                    asked -= {one["replica"] for one in answer}

    def _note_exits(self, exits: list[dict[str, Any]]) -> None:
        for values in exits:
            one = RankExit.from_json(values)
            self._exits[one.rank] = one

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args))

    async def _unless_trouble(self, awaitable: Awaitable[T]) -> T:
        """Await something; trouble that comes from a host meanwhile ends the wait."""
        wanted = asyncio.ensure_future(awaitable)
        trouble = asyncio.ensure_future(self._rendezvous.troubles.get())
        try:
            await asyncio.wait([wanted, trouble], return_when=asyncio.FIRST_COMPLETED)
            if wanted.done():
                if trouble.done():
                    self._rendezvous.troubles.put_nowait(trouble.result())
                return wanted.result()
            raise _TroubleCame(trouble.result())
        finally:
            for task in (wanted, trouble):
                task.cancel()


def _first_line(error: BaseException) -> str:
    """The text of an error from the other side of Monarch, without its layers."""
    text = str(error).strip()
    marker = "LinkError: "
    if marker in text:
        text = text.rpartition(marker)[2]
    return text.splitlines()[0] if text else type(error).__name__
