# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How the ends of replicas decide their role's, and the ends of roles their app's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, Role

from torchx_monarch.backends.outcome import RolePolicy, awaited
from torchx_monarch.command.rewrite import hold
from torchx_monarch.components import controller
from torchx_monarch.model.sidecars import is_sidecar, mark
from torchx_monarch.schedulers import monarch_local

MARKED = {"monarch": {"sidecar": True}}


@pytest.mark.parametrize(
    ("policy", "failed", "tolerated"),
    [
        (RolePolicy(3), set(), True),
        (RolePolicy(3), {2}, False),
        (RolePolicy(3, 3), {2}, False),
        (RolePolicy(3, 2), {2}, True),
        (RolePolicy(3, 2), {1, 2}, False),
        (RolePolicy(3, 2), {0}, False),
        (RolePolicy(3, 0), {1, 2}, True),
    ],
)
def test_which_failures_a_role_tolerates(policy: RolePolicy, failed: set[int], tolerated: bool) -> None:
    assert policy.tolerates(failed) is tolerated
    assert policy.succeeded({0, 1, 2} - failed, failed) is tolerated
    assert not policy.succeeded({0} - failed, failed) or len(failed) == 2


@dataclass
class One:
    name: str
    policy: RolePolicy


def test_an_app_waits_for_all_roles_but_sidecars() -> None:
    main, other, sidecar = One("a", RolePolicy(1)), One("b", RolePolicy(2)), One("c", RolePolicy(1, sidecar=True))
    assert awaited([main, other, sidecar]) == [main, other]
    assert awaited([sidecar, main]) == [main]
    assert awaited([sidecar]) == [sidecar]


def test_a_mark_is_kept_and_read() -> None:
    role = Role("r", "image", metadata={"kubernetes": {"x": 1}})
    assert not is_sidecar(role)
    mark(role)
    assert is_sidecar(role) and role.metadata == {"kubernetes": {"x": 1}, **MARKED}
    assert RolePolicy.of(role) == RolePolicy(1, None, True)
    kept = Role("r", "image", metadata={"monarch": {"sidecar": False}})
    mark(kept)
    assert not is_sidecar(kept)


@pytest.mark.parametrize("ours", [{"sidecar": "yes"}, "sidecar", 1])
def test_a_mark_that_says_nothing_is_refused(ours: Any) -> None:
    with pytest.raises(ValueError, match="role 'r': its metadata 'monarch' is .*'sidecar': True"):
        is_sidecar(Role("r", "image", metadata={"monarch": ours}))


def test_hosts_that_wait_end_with_those_of_the_first_role() -> None:
    meshes = controller("main.py", meshes={"trainers": "1", "loaders": "2"}, image="")
    assert [is_sidecar(role) for role in meshes.roles] == [False, True]
    roles = [Role(name, "", entrypoint="torchrun", args=["a.py"]) for name in ("a", "b")]
    assert [is_sidecar(role) for role in hold(AppDef("app", roles)).roles] == [False, True]
    assert not any(role.metadata for role in roles)


def test_the_local_request_says_which_roles_are_sidecars() -> None:
    roles = [Role("a", "", entrypoint="sh", args=["-c", "true"], num_replicas=3, min_replicas=2)]
    roles.append(Role("b", "", entrypoint="sh", args=["-c", "true"], metadata=MARKED))
    with Runner("torchx", {"monarch_local": monarch_local}) as runner:
        request = runner.dryrun(AppDef("app", roles), "monarch_local").request
    assert [role.policy for role in request.roles] == [RolePolicy(3, 2), RolePolicy(1, sidecar=True)]
