# SPDX-License-Identifier: BSD-3-Clause
"""The live pages of ``torchx monarch web``, over HTTP and in a real browser."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import psutil
import pytest

from docs.tools import browser
from tests.local.detached import Detached, sh
from tests.waits import WITHIN, until

HOSTILE = "<script>document.title = 'taken'</script>"


class Site:
    """A server, and a browser without JavaScript.

    Args:
        link: what the server has printed.
    """

    def __init__(self, link: str) -> None:
        self.link = link
        self.connections: list[http.client.HTTPConnection] = []
        address = urlsplit(link)
        self.place = address.netloc
        self._query = address.query
        self.cookie = ""

    def answer(self, path: str, **headers: str) -> http.client.HTTPResponse:
        """Request a path; the answer is still to be read."""
        connection = http.client.HTTPConnection(self.place, timeout=WITHIN)
        self.connections.append(connection)
        connection.request("GET", path, headers={"Cookie": self.cookie, **headers})
        return connection.getresponse()

    def leave(self, number: int | None = None) -> None:
        """Close the connection of a page that is open, by default of all."""
        for connection in self.connections[number:]:
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    def enter(self) -> None:
        """Open the link."""
        answer = self.answer(f"/?{self._query}")
        assert answer.status == 307 and "token" not in answer.headers["Location"]
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        self.cookie = cookie.partition(";")[0]

    def text(self, path: str, **query: str) -> str:
        answer = self.answer(f"{path}?{urlencode(query)}")
        assert answer.status == 200 and "default-src 'none'" in answer.headers["Content-Security-Policy"]
        return answer.read().decode()


@pytest.fixture
def server(leaves_nothing: None) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torchx_monarch.cli.main", "web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.terminate()


@pytest.fixture
def site(server: subprocess.Popen[str]) -> Iterator[Site]:
    assert server.stdout is not None
    site = Site(server.stdout.readline().strip())
    yield site
    site.leave()


def events(answer: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the texts of server-sent events until the last."""
    for line in answer:
        if line.startswith(b"event: end"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def test_only_who_has_the_link_gets_pages(site: Site) -> None:
    assert site.answer("/").status == site.answer("/?token=guessed").status == 403
    site.enter()
    assert "No job was submitted" in site.text("/")
    assert site.answer("/", Host="attacker.example").status == 400
    assert site.answer("/", **{"Sec-Fetch-Site": "cross-site"}).status == 403
    assert "no job &#39;monarch_local://torchx/other&#39; of this user" in site.text(
        "/job", handle="monarch_local://torchx/other"
    )
    assert site.answer("/nosuch").status == 404


def test_a_job_its_logs_and_its_stacks_live(
    apps: Detached, server: subprocess.Popen[str], site: Site, tmp_path: Path
) -> None:
    site.enter()
    loop = f"until test -e {tmp_path}/end; do sleep 0.1; done"
    app_id = apps.run(sh(f'echo "{HOSTILE}"; echo second; {loop}; echo last', wrap=True))
    handle = f"monarch_local://torchx/{app_id}"
    until(lambda: "second" in "".join(apps.log(app_id)), "the output")
    assert urlencode({"handle": handle}) in site.text("/")
    shown = site.text("/job", handle=handle)
    assert "RUNNING" in shown and '<script src="/web.js"' in shown and shown.count("<script") == 1

    followed = site.text("/logs", handle=handle)
    assert "second" not in followed  # a browser with JavaScript reads the logs once
    link = re.search(r'<noscript>.*url=/logs\?(.*?)"', followed)
    assert link is not None
    logs = site.answer(f"/logs?{unescape(link[1])}").read().decode()
    assert "&lt;script&gt;" in logs and "<script" not in logs and "second" in logs
    found = site.text("/logs", handle=handle, q="SECOND", plain="1")
    assert "second\n" in found and "script&gt;" not in found
    assert "&#39;x&#39; is no list of ranks" in site.text("/logs", handle=handle, rank="x", plain="1")
    changes = events(site.answer(f"/changes?{urlencode({'handle': handle})}"))
    lines = events(site.answer(f"/lines?{urlencode({'handle': handle})}"))
    assert "RUNNING" in next(changes)
    assert HOSTILE in next(line for line in lines if "script" in line)
    site.answer(f"/lines?{urlencode({'handle': handle})}").readline()
    site.leave(-1)  # a page that is closed leaves no process behind
    (tmp_path / "end").touch()
    assert list(lines)[-1] == "[r/0] last" and "SUCCEEDED" in list(changes)[-1]
    until(lambda: not psutil.Process(server.pid).children(), "the end of what reads logs")
    assert "has ended" in site.text("/stacks", handle=handle)
    assert "select two jobs" in site.text("/compare", handle=handle)
    unknown = site.answer(f"/compare?{urlencode({'handle': [handle, 'x']}, doseq=True)}").read().decode()
    assert "no job &#39;x&#39;" in unknown
    both = site.answer(f"/compare?{urlencode({'handle': [handle, handle]}, doseq=True)}").read().decode()
    assert "<h1>Two jobs</h1>" in both and both.count(handle) == 2


def test_in_a_browser(apps: Detached, site: Site, tmp_path: Path) -> None:
    if (path := browser.find()) is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium); the pages were not opened in a browser")
    app_id = apps.run(sh(f'echo "{HOSTILE}"; until test -e {tmp_path}/end; do sleep 0.1; done', wrap=True))
    query = urlencode({"handle": f"monarch_local://torchx/{app_id}"})
    with browser.started(path) as opened:
        opened.open(site.link, 390, 800)
        assert opened.evaluate("document.title") == "Jobs" and "token" not in opened.evaluate("location.href")
        assert opened.evaluate("document.querySelector('td').offsetHeight < 120")  # no letter has a line of its own
        for width, dark in ((1200, True), (390, False)):
            opened.open(f"http://{site.place}/job?{query}", width, 800, dark)
            assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
            opened.open(f"http://{site.place}/logs?{query}", width, 800, dark)
            until(lambda: HOSTILE in opened.evaluate("document.getElementById('lines').innerText"), "the output")
            assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
        opened.open(f"http://{site.place}/job?{query}", 1200, 800)
        (tmp_path / "end").touch()
        until(lambda: "SUCCEEDED" in opened.evaluate("document.title"), "the end on the page")
        assert not opened.complaints
