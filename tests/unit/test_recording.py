# SPDX-License-Identifier: BSD-3-Clause
"""The recording of what torchrun does: what counts as a change of a case, and what happens without a recording."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import recording
from tests.conformance.record import _lasting
from tests.conformance.recording import Recording


def case(codes: tuple[int, ...] = (143,), err: str = "", hashed: str = "0a") -> dict[str, Any]:
    return {"case": hashed, "outcome": {"codes": list(codes), "err": err}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (case((143,)), case((137,))),
        (case(err="  exitcode  : 11 (pid: 123)"), case(err="  exitcode  : 12 (pid: 123)")),
        (case(err="  exitcode  : -15 (pid: 123)"), case(err="  exitcode  : -11 (pid: 123)")),
        (case(err='{"errorCode": 143}'), case(err='{"errorCode": 137}')),
        (case(hashed="11"), case(hashed="12")),
        (case(err="one"), case(err="two")),
    ],
)
def test_what_is_a_change(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert _lasting(before) != _lasting(after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (case(err="  exitcode  : 11 (pid: 123)"), case(err="  exitcode  : 11 (pid: 4567)")),
        (case(err="\nrank 1\nrank 0\n"), case(err="\nrank 0\nrank 1\n")),
        (case(err="after 10.25 s at 0x7f12"), case(err="after 11.5 s at 0x7e34")),
    ],
)
def test_what_is_none(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert _lasting(before) == _lasting(after)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of recordings, with none for this torch."""
    monkeypatch.setattr(recording, "path", lambda: tmp_path / "torch-2.13.0-python-3.11.json.xz")
    for torch in ("2.8.0", "2.12.1"):
        path = tmp_path / f"torch-{torch}-python-3.11.json.xz"
        path.write_bytes(lzma.compress(json.dumps({"case": {"of": torch}}).encode()))
    return tmp_path


def test_a_new_release_is_compared_with_the_one_before(recorded: Path) -> None:
    assert recording.load() == {}
    assert recording.load_latest() == ("torch-2.12.1-python-3.11.json.xz", {"case": {"of": "2.12.1"}})


def test_without_a_recording_the_real_torchrun_runs_but_not_under_ci(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert recording.lacking().startswith("torch-2.13.0-python-3.11.json.xz does not exist: run `python -m tests.conf")
    assert Recording(live=False, folder=None).live
    monkeypatch.setenv("CI", "true")
    with pytest.raises(LookupError, match="--torchrun live"):
        Recording(live=False, folder=None)
    assert Recording(live=True, folder=None).live and Recording(live=False, folder=recorded).live
