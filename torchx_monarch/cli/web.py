# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch web``: live pages about this user's jobs on this machine, for a browser.

The pages read as the commands do, and change nothing. Starlette and uvicorn (the extra ``web``) answer the requests: an
open page holds a connection for its events, which costs no thread there. Each job has one watcher, however many pages
show it. Logs and stacks are the output of ``torchx monarch logs`` and ``stacks``.

Other users of the machine can reach the port, and so can any page that the browser shows. Therefore each request needs
the token of the link, which a cookie keeps, and this machine as its host; and it must not come from another site.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import secrets
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli import compare
from torchx_monarch.cli.jobs import opened_job
from torchx_monarch.cli.ls import read_jobs
from torchx_monarch.cli.report import page_of
from torchx_monarch.cli.status import shape_of, show_when
from torchx_monarch.exceptions import TorchXMonarchError
from torchx_monarch.insight.report_page import templates
from torchx_monarch.schedulers.recorded_apps import recorded_apps
from torchx_monarch.system.untrusted_text import one_line, printable

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise UserError(f"torchx monarch web needs {error.name}: pip install 'torchx-monarch[web]'") from None

_JOBS = 100
"""Jobs that the first page lists."""

_LINES = 1000
"""Lines of a log that a page shows at first."""

_INTERVAL = 2.0
"""Seconds between two readings of a job that a page shows."""

_MAX_LINE = 1 << 20
"""Bytes of a line of a command's output."""

_HEADERS = {
    # No text of a job can become code, and no other site can show a page in its own.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=0, help="the port on 127.0.0.1 (default: a free one)")


def run(args: argparse.Namespace) -> None:
    """Serve the pages until Ctrl-C."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", args.port))
        except (OSError, OverflowError) as failure:
            raise UserError(f"cannot listen on port {args.port} of 127.0.0.1: {failure}; give another --port") from None
        listener.listen()  # a browser that opens the link at once waits for the server
        site = _Site(listener.getsockname()[1])
        print(site.link, flush=True)
        config = uvicorn.Config(site.app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listener])


class _Site:
    """The pages.

    Attributes:
        link: the address of the first page, with the token.
        app: answers the requests.
    """

    def __init__(self, port: int) -> None:
        self._token = secrets.token_urlsafe(32)
        self._cookie = f"torchx_monarch_{port}"  # cookies do not know ports
        self._watchers: dict[str, _Watcher] = {}
        pages = {
            "/": self._jobs,
            "/job": self._job,
            "/compare": self._compare,
            "/changes": self._changes,
            "/logs": self._logs,
            "/lines": self._lines,
            "/stacks": self._stacks,
            "/web.js": self._script,
        }
        self.link = f"http://127.0.0.1:{port}/?token={self._token}"
        self.app = Starlette(
            routes=[Route(path, self._checked(page)) for path, page in pages.items()],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])],
        )

    def _checked(self, page: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            given = request.query_params.get("token") or request.cookies.get(self._cookie, "")
            if not secrets.compare_digest(given.encode(), self._token.encode()):
                return PlainTextResponse("Open the link that torchx monarch web has printed.", 403)
            if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
                return PlainTextResponse("This page is not for other sites.", 403)
            if "token" in request.query_params:  # it must not stay in the history of the browser
                redirect = RedirectResponse(request.url.remove_query_params("token"))
                redirect.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
                return redirect
            try:
                found = await page(request)
            except TorchXMonarchError as failure:
                found = _page("message", title="torchx-monarch", text=one_line(str(failure), 2000))
            found.headers.update(_HEADERS)
            return found

        return answer

    # -- jobs ----------------------------------------------------------------------------------------------------------

    async def _jobs(self, request: Request) -> Response:
        jobs, older = await asyncio.to_thread(read_jobs, None, _JOBS)
        return _page("jobs", title="Jobs", jobs=jobs, older=older)

    async def _compare(self, request: Request) -> Response:
        handles = [_own(handle) for handle in request.query_params.getlist("handle")]
        if len(handles) != 2:
            raise UserError("select two jobs to compare")
        return HTMLResponse(await asyncio.to_thread(lambda: compare.page_of(compare.read_both(*handles))))

    async def _job(self, request: Request) -> Response:
        return HTMLResponse(await anext(self._watcher(request).pages()))

    async def _changes(self, request: Request) -> Response:
        return _events(self._watcher(request).pages())

    def _watcher(self, request: Request) -> _Watcher:
        handle = _handle(request)
        return self._watchers.setdefault(handle, _Watcher(handle))

    # -- logs and stacks -----------------------------------------------------------------------------------------------

    async def _logs(self, request: Request) -> Response:
        query, handle = request.query_params, _handle(request)
        shown: dict[str, Any] = {"handle": handle, "rank": query.get("rank", ""), "search": query.get("q", "")}
        if "plain" in query:  # a browser without JavaScript; others get the lines from ``_lines``
            shown["lines"] = deque([line async for line in _log_lines(request, follow=False)], _LINES)
        shown["plain"] = urlencode({**query, "plain": 1})
        return _page("logs", title=f"Logs of {one_line(handle)}", query=urlencode({"handle": handle}), **shown)

    async def _lines(self, request: Request) -> Response:
        return _events(_log_lines(request, follow=True))

    async def _stacks(self, request: Request) -> Response:
        handle = _handle(request)
        text = "\n".join([line async for line in _command("stacks", handle)])
        query = urlencode({"handle": handle})
        return _page("message", title=f"Stacks of {one_line(handle)}", text=printable(text), query=query)

    async def _script(self, request: Request) -> Response:
        script = resources.files("torchx_monarch.insight").joinpath("web.js").read_text(encoding="utf-8")
        return Response(script, media_type="text/javascript")


def _handle(request: Request) -> str:
    """Return the handle of the job that a request names (``_own``)."""
    return _own(request.query_params.get("handle", ""))


def _own(handle: str) -> str:
    """Return a handle; raise UserError if this user has submitted no job of it."""
    if handle not in (app.handle for app in recorded_apps()):
        raise UserError(f"there is no job {handle!r} of this user on this machine")
    return handle


class _Watcher:
    """Read one job again and again while pages show it."""

    def __init__(self, handle: str) -> None:
        self._handle = handle
        self._readers = 0
        self._page = ""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def pages(self) -> AsyncIterator[str]:
        """Yield the page of the job as it is, and then whenever it has changed, until the job has ended."""
        if self._task is None or self._task.done():
            self._page, self._task = "", asyncio.create_task(self._watch())
        task, shown = self._task, ""
        self._readers += 1
        try:
            while True:
                changed = self._changed
                if self._page not in ("", shown):
                    shown = self._page
                    yield shown
                elif task.done():
                    task.result()  # raises what has ended it
                    return
                else:
                    await changed.wait()
        finally:
            self._readers -= 1

    async def _watch(self) -> None:
        query = urlencode({"handle": self._handle})
        try:
            with contextlib.ExitStack() as stack:
                job = await asyncio.to_thread(stack.enter_context, opened_job(self._handle))
                watch = job.watch(_INTERVAL, 0.0)
                while facts := await asyncio.to_thread(next, watch, None):
                    self._page = page_of(facts, query)
                    self._wake()
                    if not self._readers:
                        return
        finally:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _log_lines(request: Request, *, follow: bool) -> AsyncIterator[str]:
    """Yield the lines of a job's logs that a request asks for, as text."""
    rank, search = request.query_params.get("rank", ""), request.query_params.get("q", "").casefold()
    words = ["--json", *([f"--rank={rank}"] if rank else []), *(["--follow"] if follow else [])]
    async for line in _command("logs", _handle(request), *words, *([] if search else ["-n", str(_LINES)])):
        try:
            found = json.loads(line)
            place = f"{found['role']}/{found['replica']}" + (f":{found['rank']}" if found["rank"] is not None else "")
            text = f"[{place}] {found['text']}"
        except ValueError:  # a message of the command
            text = line
        if search in text.casefold():
            yield printable(text)


async def _command(*words: str) -> AsyncIterator[str]:
    """Yield the lines that a sub-command of ``torchx monarch`` prints; kill it when nobody reads them any more."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "torchx_monarch.cli.main",
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=_MAX_LINE,
    )
    assert process.stdout is not None
    try:
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                line = b"(a line of more than 1 MiB is left out)\n"
            if not line:
                return
            yield line.decode(errors="replace").rstrip("\n")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _events(texts: AsyncIterator[str]) -> Response:
    """Return server-sent events with texts, and one of the kind ``end`` after the last."""

    async def events() -> AsyncIterator[str]:
        with contextlib.suppress(TorchXMonarchError):
            async for text in texts:
                yield f"data: {json.dumps(text)}\n\n"
        yield "event: end\ndata:\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@functools.cache
def _templates() -> Environment:
    environment = templates()
    environment.filters["line"] = one_line
    environment.filters["shape"] = shape_of
    environment.filters["date"] = lambda seconds: show_when(seconds, None) if seconds else ""
    return environment


def _page(kind: str, **values: Any) -> Response:
    return HTMLResponse(_templates().get_template("web.html").render(kind=kind, **{"query": "", **values}))
