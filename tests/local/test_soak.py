# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A short soak (see ``tests/soak``), always the same."""

from __future__ import annotations

from tests.soak.plans import draw
from tests.soak.runs import Outcome, run_all

SEED = 1


def test_what_jobs_say_of_their_end_is_true_and_they_leave_nothing() -> None:
    outcomes: list[Outcome] = []
    # The first job of each kind of fault, as far as they are quick.
    plans = {
        plan.what: plan
        for plan in (draw(SEED, number) for number in range(99, -1, -1))
        if not plan.torch and len(plan.blows) == 1
    }
    wrong = run_all(list(plans.values()), 3, outcomes.append)
    print(*outcomes, sep="\n")
    assert len(outcomes) > 15
    assert not [str(outcome) for outcome in outcomes if outcome.wrong] + wrong
