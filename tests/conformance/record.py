# SPDX-License-Identifier: BSD-3-Clause
"""Record what torchrun does in each case of the conformance tests, and show what is new: ``python -m
tests.conformance.record [pytest's options]``.

With options (``-k NAME``) other cases stay as they are. A case in which nothing differs but the order of lines and
numbers that are no exit codes (processes, ports, times) stays as it is, too. What is recorded for the first time with a
release of torch or of Python is compared with what was recorded last.
"""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conformance import recording
from tests.conformance.recording import Stored

_LINES_OF_A_DIFFERENCE = 20


def _lasting(case: Stored) -> list[str]:
    """What is to be the same in two runs of a case, as lines in an order of their own."""
    text = json.dumps(case, indent=0, sort_keys=True, ensure_ascii=False).replace("\\n", "\n")
    # Names that are made up in each run: addresses, and folders and ids of runs.
    text = re.sub(
        r"0x[0-9a-f]+|torchelastic_\w+|\b(none|id|job)_\w{8}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(_\w+)?",
        "*",
        text,
    )
    text = re.sub(r"((?:errorCode|exit_?code)\W*?:\s*-?)\d+|\d{2,}(\.\d+)?", _masked, text)
    return sorted([*text.splitlines(), f"codes: {case['outcome']['codes']}", f"case: {case['case']}"])


def _masked(found: re.Match[str]) -> str:
    """A number as it is compared: an exit code as it is."""
    return found[0] if found[1] else "*"


def main(options: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--record-torchrun", folder]
        ran = subprocess.run([*command, *(options or ["-n", "2"]), str(Path(__file__).parent)], check=False)
        made = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    if ran.returncode not in (0, 1):  # 1: some have failed, and left nothing
        return ran.returncode
    new = {case.pop("name"): case for case in made}
    against, old = recording.load_latest()
    is_first = against != recording.path().name
    if is_first and against:
        print(f"compared with {against}:")
    kept = {} if is_first or (ran.returncode == 0 and not options) else dict(old)
    for name, case in sorted(new.items()):
        if name not in old:
            print(f"new: {name}")
        elif (before := _lasting(old[name])) != (after := _lasting(case)):
            print(f"changed: {name}")
            lines = [line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[:2] != "@@"]
            print("\n".join(f"    {line[:200]}" for line in lines[2 : 2 + _LINES_OF_A_DIFFERENCE]))
        elif not is_first:
            case = old[name]
        kept[name] = case
    for name in [] if is_first and options else sorted(old.keys() - kept.keys()):
        print(f"gone: {name}")
    if is_first or kept != old:
        recording.save(kept)
    print(f"{recording.path()}: {len(kept)} cases, {recording.path().stat().st_size // 1024} kB")
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
