# SPDX-License-Identifier: BSD-3-Clause
"""Hooks of MkDocs: have the files of the repository to which pages link be pages of the site, too.

Pages link to ``../../examples/digits.py`` and the like, as they are read on GitHub. Here each such file becomes a page
below ``repository/``, so that the site is complete without the repository: Markdown as it is, a notebook as its cells
and stored outputs, any other file as a listing.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FOLDER = "repository"

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")
_LANGUAGES = {".py": "python", ".sh": "bash", ".yml": "yaml", ".yaml": "yaml", ".toml": "toml", ".cfg": "ini"}
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def source_of(uri: str) -> Path:
    """Return the file of the repository that a page of the site is made from."""
    inside = PurePosixPath(uri)
    if inside.parts[0] == FOLDER:
        path = ROOT.joinpath(*inside.parts[1:])
        return path if path.exists() else path.with_suffix("")
    return DOCS.joinpath(*inside.parts)


def uri_of(path: Path) -> str:
    """Return the page or file of the site that a file of the repository becomes."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    uri = f"{FOLDER}/{path.relative_to(ROOT).as_posix()}"
    return uri if path.suffix == ".md" else f"{uri}.md"


def outside(markdown: str, source: Path) -> list[Path]:
    """Return the files outside docs/ to which the text of a page links."""
    targets = [(source.parent / link).resolve() for link in _LINK.findall(markdown)]
    return [path for path in targets if path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS)]


def relink(markdown: str, source: Path) -> str:
    """Return the text of a page with its links as they are in the site."""
    here = PurePosixPath(uri_of(source)).parent

    def mend(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        if not target.is_file() or not target.is_relative_to(ROOT):
            return match[1]
        return os.path.relpath(uri_of(target), here)

    return _LINK.sub(mend, markdown)


def notebook(text: str) -> str:
    """Return the cells of a notebook and their stored outputs as Markdown."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", ()):
            shown = output.get("text") or output.get("data", {}).get("text/plain") or output.get("traceback", ())
            plain = _ESCAPE.sub("", "".join(shown)).rstrip()
            if plain:
                parts.append(f"```text\n{plain}\n```")
    return "\n\n".join(parts) + "\n"


def listing(path: Path) -> str:
    """Return the Markdown of the page of a file outside docs/."""
    text = path.read_text()
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return notebook(text)
    name = path.relative_to(ROOT).as_posix()
    return f"# {name}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file to which pages link, those of added pages included."""
    waiting = [source_of(file.src_uri) for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        for path in outside(source.read_text(), source) if source.suffix == ".md" else ():
            if path not in seen:
                seen.add(path)
                waiting.append(path)
                files.append(File.generated(config, uri_of(path), content=listing(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Mend the links of a page."""
    return relink(markdown, source_of(page.file.src_uri))


def on_page_content(html: str, **_: Any) -> str:
    """Show the two colons before a block of code, as docstrings have them, as one."""
    return html.replace("::</p>", ":</p>")
