# SPDX-License-Identifier: BSD-3-Clause
"""A short soak (see ``tests/soak``), always the same."""

from __future__ import annotations

import dataclasses

import pytest

from tests.soak.plans import Plan, cells, draw
from tests.soak.runs import Outcome, run_all

SEED = 1

#: All others are for ``make soak`` alone, which takes two seconds of processor time for each job.
_FAULTS = ("kill host", "kill rank", "kill supervisor", "folder", "cancel")


def _short(plan: Plan) -> Plan:
    """Return a job whose ranks work for half a second, with an early fault."""
    [fault] = plan.faults
    early = dataclasses.replace(fault, moment=dataclasses.replace(fault.moment, delay=min(fault.moment.delay, 0.2)))
    return dataclasses.replace(plan, faults=(early,), seconds=plan.seconds if plan.awaits_end else 0.5)


@pytest.mark.slow
@pytest.mark.nightly("7 s of processor time, of which most tests of tests/local have a part")
def test_what_jobs_say_of_their_end_is_true_and_they_leave_nothing() -> None:
    outcomes: list[Outcome] = []
    # The first small job of each kind of fault.
    plans = {
        plan.what: _short(plan)
        for plan in (draw(SEED, number) for number in range(len(cells(SEED)) - 1, -1, -1))
        if plan.what in _FAULTS and plan.replicas < 3
        if plan.faults[0].moment.phase != "end"
    }
    wrong = run_all(list(plans.values()), 3, outcomes.append, SEED)
    print(*outcomes, sep="\n")
    assert len(outcomes) == len(_FAULTS)
    assert not [str(outcome) for outcome in outcomes if outcome.wrong] + wrong
