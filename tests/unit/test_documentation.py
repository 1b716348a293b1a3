# SPDX-License-Identifier: BSD-3-Clause
"""Links, generated pages and pictures are right, what pages say is so, and the site can be read offline."""

from __future__ import annotations

import asyncio
import errno
import html.parser
import json
import os
import re
import runpy
import shlex
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchx.cli.main import main
from torchx.runner import get_runner
from torchx.specs import AppDef, Role

from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.transport import connections
from torchx_monarch.transport.connections import Address

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_MEASURED = ROOT / "bench" / "recorded" / "launch.json"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])

_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_VARIABLES = re.compile(r'"((?:MONARCH|XDG|TORCHX_PLUGINS)_[A-Z_]+)"')


def prose(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, by GitHub's rule."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.*?)#* *$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        number = next(n for n in range(99) if (f"{slug}-{n}" if n else slug) not in found)
        found.add(f"{slug}-{number}" if number else slug)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), target


def test_links_lead_somewhere_on_pypi() -> None:
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]()
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert len(links) == len(re.findall(r"\]\([^)]+\)", (ROOT / "README.md").read_text()))
    assert all(re.match(r"https://[\w./-]+$", link) for link in links)


def test_the_map_of_the_architecture_names_files_that_exist() -> None:
    named = re.findall(r"`([\w/]+/\w+\.py)`", (DOCS / "architecture" / "README.md").read_text())
    assert len(named) > 10
    assert [name for name in named if not any((top / name).exists() for top in (ROOT, ROOT / "torchx_monarch"))] == []


# -- generated pages and pictures --------------------------------------------------------------------------------------


def test_generated_pages_are_those_of_the_code() -> None:
    from docs.tools.reference import FOLDER, PAGES

    for name, make in PAGES.items():
        assert (FOLDER / name).read_text() == make(), f"{name} is out of date: make docs-pages"


def test_plots_and_tables_are_those_of_the_measurement() -> None:
    chart = runpy.run_path(str(ROOT / "bench" / "chart.py"))
    measured = json.loads(_MEASURED.read_text())
    for name, picture in chart["pictures"](measured).items():
        assert (DOCS / "pictures" / name).read_text() == picture, f"{name} is out of date: python bench/chart.py"
    text = (DOCS / "explanation" / "benchmarks.md").read_text()
    assert chart["page"](text, measured) == text, "benchmarks.md is out of date: python bench/chart.py"


def test_the_page_of_variables_has_those_of_the_code() -> None:
    page = (DOCS / "reference" / "environment.md").read_text()
    named = {name for path in (ROOT / "torchx_monarch").rglob("*.py") for name in _VARIABLES.findall(path.read_text())}
    assert named
    assert not [name for name in named if f"`{name}" not in page]


# -- the site ----------------------------------------------------------------------------------------------------------


class _Loads(html.parser.HTMLParser):
    """Collect what a browser fetches by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "object"):
            self.found += [of.get("src") or of.get("data") or ""]
        elif tag == "link" and not {"canonical", "next", "prev", "alternate"} & set((of.get("rel") or "").split()):
            self.found += [of.get("href") or ""]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Build the site as ``make docs`` does: any warning, as of a link to nowhere, is an error."""
    pytest.importorskip("mkdocstrings", reason="pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert not built.returncode, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    yield folder


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text())
        for target in loads.found:
            assert not re.match(r"(\w+:)?//", target), f"{page.relative_to(site)}: {target}"
            path = (page.parent / target.partition("?")[0].partition("#")[0]).resolve()
            assert page.name == "404.html" or not target or target.startswith("data:") or path.exists(), target
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


PAGE = (DOCS / "explanation" / "security.md").read_text()
SETUP = (DOCS / "how_to" / "set_up_security.md").read_text()
WHERE = Address("tls", "node0", 26599)


def of_tls(error: ssl.SSLError, **attributes: str) -> ssl.SSLError:
    vars(error).update(attributes)
    return error


@pytest.mark.parametrize(
    "error",
    [
        of_tls(ssl.SSLCertVerificationError(), verify_message="certificate has expired"),
        of_tls(ssl.SSLError(), reason="WRONG_VERSION_NUMBER"),
        socket.gaierror(-2, "Name or service not known"),
        asyncio.TimeoutError(),
        ConnectionAbortedError("SSL handshake is taking longer"),
        ConnectionResetError(),
        OSError(errno.ECONNREFUSED, "Connection refused"),
        OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_reason_why_there_is_no_connection_is_explained(error: BaseException) -> None:
    text = str(connections.explain(error, WHERE))
    assert text.startswith("node0:26599: ")
    assert text[len("node0:26599: ") :].replace("'node0'", "'...'").partition(":")[0] in PAGE


def test_every_option_of_the_network_is_explained() -> None:
    for option in ("--bind", "--advertise", "--ports", "--rejoin-timeout"):
        HostSpec.from_argv([option, "1", "--", "python", "x"])
        assert f"`{option} " in SETUP


HOW_TO = Path(__file__).parents[2] / "docs" / "how_to"
MIGRATIONS = sorted(HOW_TO.glob("from_*.md"))
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
CODE = {page.name: re.findall(r"`([^`]+)`", BLOCK.sub("", page.read_text())) for page in MIGRATIONS}


@pytest.mark.parametrize("page", [page.name for page in MIGRATIONS if "torchx run -s" in page.read_text()])
def test_commands_can_be_submitted(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = {code for code in CODE[page] if code.startswith("torchx run -s ")}
    commands |= set(re.findall(r"^ {4}(torchx run -s .*)$", (HOW_TO / page).read_text(), re.MULTILINE))
    if page == "from_sbatch.md":
        options = {code for code in CODE[page] if code.startswith("-cfg ")}
        commands |= {f"torchx run -s monarch_slurm {words} monarch.spmd train.py" for words in options}
    assert commands
    for command in commands:
        words = shlex.split(command.removeprefix("torchx run "))
        main(["run", "--dryrun", *words])
        assert "=== SCHEDULER REQUEST ===" in capsys.readouterr().out, command


def test_constructors_are_taken() -> None:
    from torchx_monarch import MonarchJob

    app = AppDef("app", [Role("trainers", image="my/image", num_replicas=4)])
    ours = [code for code in CODE["from_monarch_job.md"] if code.startswith("MonarchJob(")]
    assert len(ours) >= 3
    for code in ours:
        assert isinstance(eval(code, {"MonarchJob": MonarchJob, "app": app}), MonarchJob)
    for block in BLOCK.findall((HOW_TO / "from_monarch_job.md").read_text()):
        compile(block, "from_monarch_job.md", "exec")


def test_every_option_of_local_cwd_has_a_place() -> None:
    with get_runner() as runner:
        theirs, ours = (
            {name for name, _ in runner.scheduler_run_opts(scheduler)} for scheduler in ("local_cwd", "monarch_local")
        )
    text = " ".join(CODE["from_torchx.md"])
    assert not [name for name in theirs - ours if f"-cfg {name}=" not in text]
