# SPDX-License-Identifier: BSD-3-Clause
"""What jobs have met on machines: what is recorded of them, and which machines are left out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, Role

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.stored_apps import StoredApps
from torchx_monarch.insight.timeline import build
from torchx_monarch.model.role_spec import RoleSpec, WorkloadKind
from torchx_monarch.schedulers import monarch_htcondor, monarch_lsf, monarch_sge, monarch_slurm, monarch_ssh
from torchx_monarch.schedulers.node_history import JobOnNodes, read_history

DAY = 86400.0


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that have met something on ``b`` now and again, and on ``c`` and ``d`` once, or long ago."""
    monkeypatch.setenv("MONARCH_STATE_DIR", str(tmp_path))
    jobs: list[tuple[float, dict[str, dict[str, int]]]] = [
        *((60 + k, {"d": {"lost": 1}}) for k in (0, 1)),
        *((20 + k, {"d": {}, "b": {"lost": 1}}) for k in range(5)),
        (3, {"a": {}, "b": {"failed_alone": 2}, "c": {}}),
        (2, {"a": {}, "b": {}, "c": {"slow": 1}}),
        (1, {"b": {"failed_alone": 1, "slow": 3}}),
        *((1, {"e.example": {"lost": 1}}) for _ in range(2)),
        (100, {"a": {"lost": 1}}),
    ]
    for scheduler in ("monarch_slurm", "monarch_ssh", "monarch_lsf", "monarch_sge", "monarch_htcondor"):
        for number, (days, nodes) in enumerate(jobs):
            StoredApps(JobOnNodes, "nodes", scheduler).store(str(number), JobOnNodes(time.time() - days * DAY, nodes))


def test_what_was_met_on_each_machine() -> None:
    met = {node.node: node for node in read_history("monarch_slurm")}
    assert [*met] == ["b", "d", "e.example", "c", "a"]  # the record of a job that ended too long ago is gone
    assert [node.jobs for node in met.values()] == [8, 7, 2, 2, 2]
    assert [node.node for node in met.values() if node.is_bad] == ["b", "e.example"]
    assert met["b"].faults == {"lost": 5, "failed_alone": 3, "slow": 3}
    assert met["b"].in_jobs == {"lost": 5, "failed_alone": 2, "slow": 1}
    assert met["b"].last > met["c"].last > 0.0 == met["a"].last


@pytest.mark.parametrize("avoid", [False, True])
def test_machines_that_are_known_to_be_bad_are_left_out_on_request(avoid: bool) -> None:
    runner = Runner("torchx", {"monarch_slurm": monarch_slurm, "monarch_ssh": monarch_ssh})
    words = ["--nnodes", "2", "train.py"]
    app = AppDef("app", [Role("trainer", "", entrypoint="torchrun", args=words, num_replicas=2)])
    cfg: dict[str, Any] = {"avoid_known_bad": avoid}
    request = runner.dryrun(app, "monarch_slurm", cfg={**cfg, "exclude_nodes": "n7"}).request
    assert f"--exclude=n7{',b,e.example' * avoid}" in request.commands[0]
    commands = [
        Runner("torchx", {name: factory}).dryrun(app, name, cfg=cfg).request.commands[0]
        for name, factory in {
            "monarch_lsf": monarch_lsf,
            "monarch_sge": monarch_sge,
            "monarch_htcondor": monarch_htcondor,
        }.items()
    ]
    words = ["select[hname!='b' && hname!='e.example']", "hostname=!(b|b.*|e|e.*)"]
    words.append('requirements=!stringListIMember(split(Machine,".")[0],"b,e")')
    assert [word in command for word, command in zip(words, commands, strict=True)] == [avoid] * 3
    layout = runner.dryrun(app, "monarch_ssh", cfg={**cfg, "hosts": ["me@a", "b", "c:2222"]}).request.layout
    assert layout.machines == [["me@a", "c:2222" if avoid else "b"]]
    if avoid:
        with pytest.raises(UserError, match="has 2 replicas, and the machines of run option `hosts` are 1"):
            runner.dryrun(app, "monarch_ssh", cfg={**cfg, "hosts": ["a", "b"]})


@pytest.mark.parametrize(
    ("fields", "met"),
    [
        ({"node": "b", "fault": "lost"}, (("b", "lost"),)),
        ({"node": "b\n", "fault": "slow"}, (("b\\n", "slow"),)),
        ({"node": "b", "fault": "moved"}, ()),
        ({"node": ["b"], "fault": {}}, ()),
    ],
)
def test_events_of_machines(fields: dict[str, Any], met: tuple[tuple[str, str], ...]) -> None:
    from torchx_monarch.insight.events import checked

    event = checked({"time": 1.0, "kind": "node_fault", "message": "", "role": "t", **fields})
    assert event is not None
    assert build([event], [RoleSpec("t", workload=WorkloadKind.RANKS)], end=2.0).node_faults == met
