# SPDX-License-Identifier: BSD-3-Clause
"""What torchrun did in each case, for one release of torch and of Python: ``recorded/torch-X-python-Y.json.xz``.

Nothing of the machine is stored: paths are placeholders, an environment is what differs from the caller's. A case is
known by its test; a hash of its command, files and environment tells one that has changed since. ``python -m
tests.conformance.record`` makes the file.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import lzma
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

Stored = dict[str, Any]
"""An outcome as it is stored: JSON."""

_ROOT = Path(__file__).parents[2]
_ENVIRON, _BYTES, _JSON = "⟦environ⟧", "⟦bytes⟧", "⟦json⟧"
"""Keys of the objects that stand for an environment, for bytes that are no text, and for a file that holds JSON."""

COMMAND = "python -m tests.conformance.record"


def path() -> Path:
    """The file for the torch and the Python that run."""
    torch = metadata.version("torch").partition("+")[0]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Path(__file__).parent / "recorded" / f"torch-{torch}-python-{python}.json.xz"


def load() -> dict[str, Stored]:
    """All cases; none when nothing is recorded for this torch and Python."""
    return json.loads(lzma.decompress(path().read_bytes())) if path().exists() else {}


def load_latest() -> tuple[str, dict[str, Stored]]:
    """All cases of this torch and Python, or else of the file that was recorded last; the name of the file."""
    found = [path()] if path().exists() else sorted(path().parent.glob("torch-*.json.xz"), key=_release)[-1:]
    return (found[0].name, json.loads(lzma.decompress(found[0].read_bytes()))) if found else ("", {})


def _release(file: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", file.name)]


def lacking() -> str:
    """What to do where nothing is recorded for this torch and Python; empty where something is."""
    return "" if path().exists() else f"{path().name} does not exist: run `{COMMAND}`, or pytest with --torchrun live"


def save(cases: Mapping[str, Stored]) -> None:
    """Replace the file."""
    text = json.dumps(cases, sort_keys=True, indent=0)
    path().parent.mkdir(exist_ok=True)
    path().write_bytes(lzma.compress(text.encode(), preset=9))


class Places:
    """This machine's paths and their placeholders.

    Args:
        folder: the test's own.
    """

    def __init__(self, folder: Path) -> None:
        library = sysconfig.get_path("stdlib")
        places = {
            str(folder): "⟦folder⟧",
            tempfile.gettempdir(): "⟦temporary⟧",
            sysconfig.get_path("purelib"): "⟦site⟧",
            library: "⟦library⟧",
            str(Path(library).with_name("python{}{}.zip".format(*sys.version_info[:2]))): "⟦library.zip⟧",
            sys.prefix: "⟦prefix⟧",
            str(_ROOT): "⟦root⟧",
            sys.version: "⟦version⟧",
        }
        self._places: list[tuple[str, str]] = []
        for place, name in places.items():
            self.add(place, name)

    def add(self, place: str, name: str) -> None:
        """Have a placeholder for another text that is this machine's, or this run's."""
        # The longest first: one may be a part of another.
        self._places = sorted([*self._places, (place, name)], key=lambda item: -len(item[0]))

    def hide(self, text: str) -> str:
        """Put placeholders in."""
        for place, name in self._places:
            text = text.replace(place, name)
        return text

    def show(self, text: str) -> str:
        """Put this machine's paths in."""
        for place, name in self._places:
            text = text.replace(name, place)
        return text


_LINE_OF_THE_LIBRARY = re.compile(rb'(File "%s/[^"\n]*", line )\d+' % re.escape(sysconfig.get_path("stdlib").encode()))


def without_lines(data: bytes) -> bytes:
    """What was printed, without the lines of Python's library in tracebacks: releases of one Python differ in them."""
    return _LINE_OF_THE_LIBRARY.sub(rb"\g<1>*", data)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {change(name): _mapped(item, change) for name, item in value.items()}
    return value


def _packed(value: Any, places: Places) -> Any:
    """JSON of a rank as it is stored."""
    if isinstance(value, dict) and {"RANK", "WORLD_SIZE", "PATH"} <= value.keys():
        own = {name: item for name, item in value.items() if os.environ.get(name) != item}
        lacks = sorted(name for name in os.environ if name not in value)
        return {_ENVIRON: {"set": _mapped(own, places.hide), "lacks": lacks}}
    if isinstance(value, list):
        return [_packed(item, places) for item in value]
    if isinstance(value, dict):
        return {places.hide(name): _packed(item, places) for name, item in value.items()}
    return places.hide(value) if isinstance(value, str) else value


def _unpacked(value: Any, places: Places) -> Any:
    if isinstance(value, dict) and value.keys() == {_ENVIRON}:
        stored = value[_ENVIRON]
        rest = {name: variable for name, variable in os.environ.items() if name not in stored["lacks"]}
        return {**rest, **_mapped(stored["set"], places.show)}
    if isinstance(value, list):
        return [_unpacked(item, places) for item in value]
    if isinstance(value, dict):
        return {places.show(name): _unpacked(item, places) for name, item in value.items()}
    return places.show(value) if isinstance(value, str) else value


def pack_bytes(data: bytes, places: Places) -> Any:
    """Bytes as they are stored."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {_BYTES: base64.b64encode(data).decode()}
    if text.startswith("{"):
        try:
            return {_JSON: _packed(json.loads(text), places)}
        except ValueError:
            pass
    return places.hide(text)


def unpack_bytes(stored: Any, places: Places) -> bytes:
    """The reverse."""
    if isinstance(stored, str):
        return places.show(stored).encode()
    if _BYTES in stored:
        return base64.b64decode(stored[_BYTES])
    return json.dumps(_unpacked(stored[_JSON], places)).encode()


def pack(outcome: Mapping[str, Any], given: Mapping[str, bytes], places: Places) -> Stored:
    """An outcome's fields as they are stored; files that still are as they were given, by name alone."""
    files = {name: data for name, data in outcome["files"].items() if given.get(name) != data}
    return {
        "codes": outcome["codes"],
        "out": pack_bytes(outcome["out"], places),
        "err": pack_bytes(outcome["err"], places),
        "files": {places.hide(name): pack_bytes(data, places) for name, data in files.items()},
        "given": sorted(outcome["files"].keys() - files.keys()),
        "reports": {str(rank): _packed(report, places) for rank, report in outcome["reports"].items()},
        "error": _packed(outcome["error"], places),
        "notes": outcome["notes"],
    }


def unpack(stored: Stored, given: Mapping[str, bytes], places: Places) -> dict[str, Any]:
    """The reverse."""
    files = {places.show(name): unpack_bytes(data, places) for name, data in stored["files"].items()}
    return {
        "codes": stored["codes"],
        "out": unpack_bytes(stored["out"], places),
        "err": unpack_bytes(stored["err"], places),
        "files": {**files, **{name: given[name] for name in stored["given"]}},
        "reports": {int(rank): _unpacked(report, places) for rank, report in stored["reports"].items()},
        "error": _unpacked(stored["error"], places),
        "notes": stored["notes"],
    }


def fingerprint(
    words: Sequence[str],
    files: Mapping[str, str | bytes],
    environ: Mapping[str, str | None],
    steps: list[Callable[..., object] | None],
    rest: list[object],
    places: Places,
) -> str:
    """What tells that a case is no more the one that was recorded.

    Args:
        words: torchrun's command line.
        files: of the working folder.
        environ: what is set and unset.
        steps: functions that take part in it, by their source.
        rest: whatever else it depends on.
    """
    contents = {
        name: hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()
        for name, text in files.items()
    }
    values = {name: value and places.hide(value) for name, value in environ.items()}
    sources = [step and inspect.getsource(step) for step in steps]
    all_of_it = [[places.hide(word) for word in words], sorted(contents.items()), sorted(values.items()), sources, rest]
    return hashlib.sha256(json.dumps(all_of_it).encode()).hexdigest()[:16]


class Recording:
    """The cases of a test run.

    Args:
        live: whether torchrun is run, instead of what is recorded of it.
        folder: where a run that records leaves its cases; None for one that does not.
    """

    def __init__(self, live: bool, folder: Path | None) -> None:
        self._folder = folder
        self._cases = {} if live or folder else load()
        if not live and folder is None and "CI" in os.environ and (lacks := lacking()):
            raise LookupError(lacks)
        self.live = live or folder is not None or not self._cases
        """Also where nothing is recorded for this torch and Python."""

    def find(self, name: str, hashed: str) -> Stored:
        """What is recorded of a case.

        Raises:
            LookupError: nothing, or of another case of that name; the message says what to do.
        """
        found = self._cases.get(name)
        if found is None or found["case"] != hashed:
            what = "has changed since it was recorded" if found else "is not recorded"
            raise LookupError(f"{name}: what torchrun does {what} in {path().name}; run `{COMMAND} -k {name!r}`")
        outcome: Stored = found["outcome"]
        return outcome

    def keep(self, name: str, hashed: str, outcome: Stored) -> None:
        """Leave a case for ``record``, when this run is one of it."""
        if self._folder is not None:
            file = self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.json"
            file.write_text(json.dumps({"name": name, "case": hashed, "outcome": outcome}))
