# SPDX-License-Identifier: BSD-3-Clause
"""Progress that a program reports: what it may say, and what its host reads."""

from __future__ import annotations

import binascii
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import torchx_monarch
from tests.waits import WITHIN
from torchx_monarch.host.ranks.rank_samples import prepare_progress, read_progress
from torchx_monarch.insight import step_progress
from torchx_monarch.insight.rank_sample import Progress, parse_progress
from torchx_monarch.insight.step_progress import HEAD, NAME, SIZE


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a rank, as which this process reports."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for name, value in (("_file", None), ("_checkpoint", (None, 0.0)), ("_first", (0, 0.0))):
        monkeypatch.setattr(step_progress, name, value)
    prepare_progress(tmp_path)
    yield tmp_path
    if step_progress._file is not None and step_progress._file >= 0:
        os.close(step_progress._file)


def test_the_host_reads_the_last_report(rank: Path) -> None:
    import torch

    assert read_progress(rank) is None is read_progress(None)
    torchx_monarch.progress(10, 110, checkpoint=5, loss=3)
    torchx_monarch.progress(
        torch.tensor(20),  # type: ignore[arg-type]
        loss=torch.tensor(0.5),  # type: ignore[arg-type]
        worse=float("nan"),
        part=Fraction(1, 4),  # type: ignore[arg-type]
        digest="7f\x1b",
    )
    found = read_progress(rank)
    assert found is not None
    assert (found.step, found.total, found.checkpoint, found.first_step) == (20, None, 5, 10)
    assert found.digest == "7f\\x1b"
    assert found.metrics == {"loss": 0.5, "part": 0.25} and found.first_time <= found.time


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"step": "1"}, TypeError),
        ({"step": None}, TypeError),
        ({"step": 1.0}, TypeError),
        ({"step": -1}, ValueError),
        ({"step": 1 << 53}, ValueError),
        ({"step": 1, "total": "many"}, TypeError),
        ({"step": 1, "checkpoint": -1}, ValueError),
        ({"step": 1, "loss": None}, TypeError),
        ({"step": 1, "loss": "low"}, TypeError),
        ({"step": 1, "digest": 7}, TypeError),
        ({"step": 1, "digest": "x" * 129}, ValueError),
        ({"step": 1, "x" * 65: 1}, ValueError),
        ({"step": 1, **{f"m{number}": 1 for number in range(17)}}, ValueError),
    ],
)
def test_a_wrong_argument_is_an_error_everywhere(arguments: dict[str, Any], error: type[Exception]) -> None:
    said = "metric loss is .*, and no number" if "loss" in arguments else "."
    with pytest.raises(error, match=said):
        torchx_monarch.progress(**arguments)


def test_the_longest_report_fits(rank: Path) -> None:
    names = [chr(0x1F600 + number) * 64 for number in range(16)]
    last, metrics = (1 << 53) - 1, dict.fromkeys(names, -1.23e-300)
    torchx_monarch.progress(last, last, checkpoint=last, digest=chr(0x1F600) * 128, **metrics)
    found = read_progress(rank)
    assert found is not None and set(found.metrics) == set(names)


def test_elsewhere_it_does_nothing_and_imports_little(tmp_path: Path) -> None:
    code = "import sys, torchx_monarch as t; t.progress(1, 2, loss=3.0); print('dataclasses' in sys.modules)"
    for error_file in ("", str(tmp_path / "error.json")):
        environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": error_file}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, check=True, timeout=WITHIN
        )
        assert done.stdout.strip() == b"False"
    assert not list(tmp_path.iterdir())


FIELDS = {
    "step": 7,
    "total": 9,
    "time": 3.0,
    "checkpoint": 1,
    "metrics": {"a": 1.0},
    "first_step": 2,
    "first_time": 1.0,
}


def framed(value: object) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return HEAD.pack(len(data), binascii.crc32(data)) + data


def test_what_was_framed_is_read() -> None:
    assert parse_progress(framed(FIELDS) + b"the end of an older report") == Progress(7, 9, 3.0, 1, {"a": 1.0}, 2, 1.0)
    names = parse_progress(framed({**FIELDS, "metrics": {f"\x1b{'x' * 99}{number}": 1.0 for number in range(99)}}))
    assert names is not None and list(names.metrics) == ["\\x1b" + "x" * 63]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * SIZE,
        framed(FIELDS)[:-1],
        framed(FIELDS)[:-2] + b"x}",
        framed(b"\xff"),
        framed(b"[" * 5000),
        framed([]),
        framed({**FIELDS, "step": -1}),
        framed({**FIELDS, "step": 1 << 60}),
        framed({**FIELDS, "time": -5.0}),
        framed({**FIELDS, "metrics": {"a": "b"}}),
        framed(b'{"step": 1, "total": null, "time": NaN}'),
    ],
)
def test_what_something_else_has_written_is_no_progress(data: bytes, tmp_path: Path) -> None:
    assert parse_progress(data) is None
    (tmp_path / NAME).write_bytes(data)
    assert read_progress(tmp_path) is None


def test_a_file_of_another_kind_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    assert read_progress(tmp_path) is None
    prepare_progress(tmp_path)
    assert (tmp_path / NAME).is_file()


def test_the_file_of_a_rank_that_reports_nothing_is_removed(rank: Path) -> None:
    assert read_progress(rank, is_end=True) is None and not (rank / NAME).exists()
    prepare_progress(rank)
    torchx_monarch.progress(1)
    assert read_progress(rank, is_end=True) is not None and (rank / NAME).exists()


@pytest.mark.parametrize(
    ("progress", "now", "seconds"),
    [
        (Progress(20, 100, 110.0, None, {}, 10, 100.0), 110.0, 80.0),
        (Progress(20, 100, 110.0, None, {}, 10, 100.0), 130.0, 60.0),
        (Progress(20, 100, 110.0, None, {}, 10, 100.0), 999.0, 0.0),
        (Progress(100, 100, 110.0, None, {}, 10, 100.0), 110.0, 0.0),
        (Progress(10, 100, 110.0, None, {}, 10, 110.0), 110.0, None),
        (Progress(20, None, 110.0, None, {}, 10, 100.0), 110.0, None),
    ],
)
def test_the_time_that_is_left(progress: Progress, now: float, seconds: float | None) -> None:
    assert progress.seconds_left(now) == seconds
