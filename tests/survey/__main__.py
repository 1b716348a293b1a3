# SPDX-License-Identifier: BSD-3-Clause
"""The survey of shared imports: ``python -m tests.survey [options]``.

Each import of tests/survey/packages.txt is examined in an environment of its own (see ``survey``), one after the other,
and its result is written into docs/reference/shared_imports.md. Exit code 1 if ranks hold a value that they must not
share; it is then printed, with what two interpreters and two ranks of two runs have.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.survey.survey import Finding, examine

_ROOT = Path(__file__).parents[2]
_PACKAGES = Path(__file__).with_name("packages.txt")
_PAGE = _ROOT / "docs" / "reference" / "shared_imports.md"
_BEGIN, _END = "<!-- survey: begin -->\n", "<!-- survey: end -->\n"
_RESULT = re.compile(r"`([\w.-]+)`( \d+\.\d| \([^)]+\)| \| .*(?= \|$)|)", re.MULTILINE)


class _Package(NamedTuple):
    """A line of packages.txt: ``NAME==VERSION  # STATEMENT``, where ``import NAME`` is the default.

    ``# NAME: RESULT`` is one that an environment without CUDA lacks, and what has been found of it elsewhere."""

    name: str
    statement: str
    elsewhere: str


def _packages() -> Iterator[_Package]:
    for line in _PACKAGES.read_text().splitlines():
        if found := re.fullmatch(r"# ([\w-]+): (.+)", line):
            yield _Package(found[1], "", found[2])
        elif found := re.fullmatch(r"([\w-]+)==\S+(?: +# (.+))?", line):
            yield _Package(found[1], found[2] or f"import {found[1].replace('-', '_')}", "")


def _environment(folder: Path) -> str:
    """Return the interpreter of the environment, which is made unless it has the packages."""
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    if not installed.exists() or installed.read_text() != _PACKAGES.read_text():
        print(f"installing {_PACKAGES} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=300)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(_PACKAGES)]
        subprocess.run(pip, check=True, timeout=3600)
        installed.write_text(_PACKAGES.read_text())
    return str(python)


def _result(package: _Package, found: Finding, environment: Path) -> str:
    """Return what the page says after the name of a package: its seconds, or in another cell why it is not shared."""
    if package.elsewhere.startswith("yes, "):
        return f" ({package.elsewhere[5:]})"
    if package.elsewhere or found.error:
        return f" | {package.elsewhere.removeprefix('no: ') or f'not examined: {found.error}'}"
    if found.unshared:
        why = re.sub(rf"{environment}/lib/[^/]+/site-packages/", "", found.unshared)
        return f" | {re.sub('/proc/[0-9]+/', '/proc/PID/', why)}"
    if found.wrong:
        return f" | wrongly shared: all ranks have one {', '.join(f'`{path}`' for path in found.wrong)}"
    return f" {found.seconds:.1f}" if found.seconds >= 0.05 else ""


def _write(name: str, result: str) -> None:
    """Put the result of a package into the page, in the order of names: those that are shared into one paragraph."""
    text = _PAGE.read_text()
    begin, end = text.index(_BEGIN) + len(_BEGIN), text.index(_END)
    results = dict(_RESULT.findall(text[begin:end])) | {name: result}
    known = {package.name for package in _packages()}
    names = sorted(results.keys() & known, key=str.lower)
    shared = ", ".join(f"`{name}`{results[name]}" for name in names if not results[name].startswith(" | "))
    table = "".join(f"| `{name}`{results[name]} |\n" for name in names if results[name].startswith(" | "))
    aside = _PAGE.with_suffix(".new")
    aside.write_text(f"{text[:begin]}Shared: {shared}.\n\n| not shared | because |\n|---|---|\n{table}{text[end:]}")
    aside.replace(_PAGE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.survey", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="a package of the list; may be repeated")
    parser.add_argument("--from", metavar="NAME", dest="first", help="begin with this package, after an interruption")
    parser.add_argument("--environment", type=Path, default=_ROOT / ".venv-survey", help="where they are installed")
    args = parser.parse_args()
    packages = list(_packages())
    names = [package.name for package in packages]
    if unknown := {*(args.only or ()), *filter(None, [args.first])} - {*names}:
        parser.error(f"{', '.join(sorted(unknown))}: not in {_PACKAGES}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end what the examination has started
    python, wrong = _environment(args.environment.resolve()), 0
    with tempfile.TemporaryDirectory(prefix="survey") as state:
        os.environ["MONARCH_STATE_DIR"] = state
        for package in packages[names.index(args.first) if args.first else 0 :]:
            if args.only and package.name not in args.only:
                continue
            found = Finding() if package.elsewhere else examine(python, package.statement)
            result = _result(package, found, args.environment.resolve())
            _write(package.name, result)
            print(f"{package.name}{result}", flush=True)
            for path, values in found.wrong.items():
                print(f"    {path}: {values}", flush=True)
            wrong += bool(found.wrong)
    print(f"{wrong} imports are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
