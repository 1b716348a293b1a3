# SPDX-License-Identifier: BSD-3-Clause
"""Check that a release is ready, and write what GitHub shows of it: ``python -m tools.release vX.Y.Z``.

The tag, setup.cfg, CITATION.cff and CHANGELOG.md must name one version. The section of CHANGELOG.md becomes
release-notes.md, with links that work outside the repository.
"""

from __future__ import annotations

import configparser
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """Return what keeps this tag from being released."""
    if not re.fullmatch(r"v\d+\.\d+\.\d+", tag):
        return [f"the tag is {tag!r}; give vX.Y.Z"]
    version, found = tag[1:], []
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    cited = re.search(r"^version: (.*)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    for file, named in (("setup.cfg", setup["metadata"]["version"]), ("CITATION.cff", cited[1] if cited else "none")):
        if named != version:
            found.append(f"{file} has the version {named}, and the tag is {tag}")
    if not notes(version, root):
        found.append(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`")
    if f"\n[{version}]: " not in (root / "CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md has no link [{version}] at its end")
    return found


def notes(version: str, root: Path = ROOT) -> str:
    """Return the section of a version in CHANGELOG.md, with links to the files of its tag; empty without one."""
    text = (root / "CHANGELOG.md").read_text()
    section = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## \[|^\[|\Z)", text, re.M | re.S)
    if section is None:
        return ""
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    blob = f"{setup['metadata']['url']}/blob/v{version}/"
    return re.sub(r"\]\((?!https?:|#)", f"]({blob}", section[1]).strip() + "\n"


def main() -> None:
    """Exit with the problems, or write release-notes.md."""
    tag = sys.argv[1] if len(sys.argv) > 1 else ""
    if found := problems(tag):
        sys.exit("\n".join(found))
    (ROOT / "release-notes.md").write_text(notes(tag[1:]))


if __name__ == "__main__":
    main()
