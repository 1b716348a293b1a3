# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A short soak (see ``tests/soak``), always the same."""

from __future__ import annotations

import dataclasses

import pytest

from tests.soak.plans import draw
from tests.soak.runs import Outcome, run_all

SEED = 1

#: For ``make soak`` alone: a job that hangs is waited for, and a ``torchx run`` is slow to begin.
_LEFT_OUT = ("freeze agent", "freeze rank", "freeze supervisor", "freeze submitter", "stop submitter")

_SUDDEN = ("kill", "none", "cancel", "folder", "log")


_OTHERS = pytest.param(False, marks=pytest.mark.nightly("20 s of processor time; `make soak` has them, too"))


@pytest.mark.slow
@pytest.mark.parametrize("sudden", [True, _OTHERS])
def test_what_jobs_say_of_their_end_is_true_and_they_leave_nothing(sudden: bool) -> None:
    outcomes: list[Outcome] = []
    # The first small job of each kind of fault.
    plans = {
        plan.what: dataclasses.replace(plan, seconds=min(plan.seconds, 0.5) if not plan.is_removed else plan.seconds)
        for plan in (draw(SEED, number) for number in range(299, -1, -1))
        if plan.what.startswith(_SUDDEN) is sudden
        if len(plan.faults) == 1 and plan.what not in _LEFT_OUT and plan.hosts < 3 and not plan.torch
    }
    wrong = run_all(list(plans.values()), 3, outcomes.append, SEED)
    print(*outcomes, sep="\n")
    assert len(outcomes) > 9
    assert not [str(outcome) for outcome in outcomes if outcome.wrong] + wrong
