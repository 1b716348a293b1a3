# SPDX-License-Identifier: BSD-3-Clause
"""What ``torchx monarch drill`` says of a run, by what was observed in it and in the undisturbed one."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from torchx_monarch.cli import drill, main
from torchx_monarch.cli.drill import differ
from torchx_monarch.cli.drill_run import Key, Record
from torchx_monarch.exceptions import TorchXMonarchError
from torchx_monarch.insight.rank_sample import Progress
from torchx_monarch.model.state import State


def report(first: int, step: int, digest: str = "a", **metrics: float) -> Progress:
    return Progress(step, None, float(step), None, metrics, first, float(first), digest)


def record(*attempts: tuple[int, Progress], **fields: object) -> Record:
    made: list[tuple[Key, Progress]] = [(("train", rank), progress) for rank, progress in attempts]
    found = Record("monarch_local://torchx/x", State.SUCCEEDED, attempts=made, restarts=1, struck=30)
    found.reports = {(key, progress.step): progress for key, progress in made}
    return replace(found, **fields)  # type: ignore[arg-type]


PLAIN = record((0, report(1, 60)), (1, report(1, 60)), results={"final": "1"})
BEFORE = (0, report(1, 30)), (1, report(1, 31))


@pytest.mark.parametrize(
    ("attempts", "fields", "kinds"),
    [
        ([*BEFORE, (0, report(26, 60)), (1, report(26, 60))], {"expected": 25}, []),
        ([*BEFORE, (0, report(26, 60)), (1, report(26, 60))], {"expected": 27}, []),
        ([*BEFORE, (0, report(26, 60)), (1, report(26, 60))], {"expected": 28}, ["older"]),
        ([*BEFORE, (0, report(26, 60)), (1, report(1, 60))], {"expected": 25}, ["beginning"]),
        ([*BEFORE, (0, report(1, 60)), (1, report(1, 60))], {}, ["beginning"]),
        ([*BEFORE, (0, report(26, 60, "b")), (1, report(26, 60, "b"))], {}, ["result"]),
        ([*BEFORE, (0, report(26, 60)), (1, report(26, 60, "b"))], {}, ["some"]),
        ([*BEFORE, (0, report(26, 60)), (1, report(26, 59))], {}, ["end"]),
        ([*BEFORE, (0, report(26, 60)), (1, report(26, 60))], {"results": {}}, ["result"]),
        ([(0, report(1, 60))], {}, ["end"]),
        ([*BEFORE], {"state": State.FAILED}, ["failed"]),
        ([*BEFORE], {"struck": None}, ["missed"]),
        ([*BEFORE], {"restarts": 0}, ["missed"]),
    ],
)
def test_what_differs(attempts: list[tuple[int, Progress]], fields: dict[str, object], kinds: list[str]) -> None:
    found = record(*attempts, **{"results": PLAIN.results, **fields})
    assert [difference.kind for difference in differ(PLAIN, found, "rank")] == kinds


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dist.torchrun"], "dist.torchrun: exactly one of --script and -m must be specified"),
        (["dist.dpp", "-m", "train"], "dist.dpp.*Did you mean dist.ddp"),
    ],
)
def test_a_component_that_cannot_be_run(words: list[str], said: str) -> None:
    main.add_arguments("drill", parser := argparse.ArgumentParser())
    with pytest.raises(TorchXMonarchError, match=said):
        drill.run(parser.parse_args(["--", *words]))


def test_a_run_that_survives_a_full_disk_needs_no_restart() -> None:
    assert differ(PLAIN, replace(PLAIN, restarts=0), "disk") == []


def test_the_first_number_that_differs_is_named_but_not_one_that_always_does() -> None:
    steps = [report(1, 20, lr=0.5, speed=1.0), report(1, 40, lr=0.3, speed=1.0), report(1, 60, lr=0.1, speed=1.0)]
    plain = record((0, steps[-1]))
    plain.reports = {(("train", 0), progress.step): progress for progress in steps}
    steps = [report(1, 20, lr=0.5, speed=2.0), report(26, 40, lr=0.5, speed=2.0), report(26, 60, "b", lr=0.4)]
    found = record((0, steps[0]), (0, steps[-1]))
    found.reports = {(("train", 0), progress.step): progress for progress in steps}
    (difference,) = differ(plain, found, "rank")
    assert difference.text == "the digest of rank 0 differs, first seen in step 40: lr is 0.5, not 0.3"


def test_the_steps_that_were_done_again() -> None:
    found = record(*BEFORE, (0, report(26, 40)), (1, report(26, 41)), (0, report(39, 60)), (1, report(36, 60)))
    assert found.redone == 12
