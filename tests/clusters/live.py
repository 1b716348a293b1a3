# SPDX-License-Identifier: BSD-3-Clause
"""What is tried of allocations and controller scripts on every backend whose hosts are on a network."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence

import pytest
from torchx.specs import AppDef, AppStatus, Role

from tests.local.monarch_programs import CONTROLLER
from torchx_monarch import SPMDError, SPMDJob
from torchx_monarch.command.meshes import waiting

SAYS = """
    import os, sys
    rank = int(os.environ["RANK"])
    print("rank", rank, "on", os.uname().nodename, flush=True)
    sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 and rank == int(os.environ["WORLD_SIZE"]) - 1 else 0)
"""
"""The last rank ends with the code that is its argument, if there is one."""


def runs_twice_and_after_a_failure(job: SPMDJob, script: str, places: Sequence[str]) -> None:
    """Of ``SAYS``, which is the allocation's own command as well.

    Args:
        job: the allocation.
        script: where that is on its hosts.
        places: the name of the host of each rank.
    """
    for _ in range(2):
        result = job.run_spmd(output="store")
        shown = {rank: one.stdout for rank, one in result.output.items()}
        assert shown == {k: f"[default{k}]:rank {k} on {place}\n" for k, place in enumerate(places)}
        with pytest.raises(SPMDError) as caught:
            job.run_spmd([script, "7"], output="none")
        cause = caught.value.root_cause
        assert caught.value.result.exit_code == 7 and cause is not None and cause.hostname == places[-1]
    assert list(job.status().hosts.values()) == list(dict.fromkeys(places))


def controller(role: Callable[..., Role]) -> list[Role]:
    """Two roles; a script on replica 0 of the first uses the hosts of both.

    Args:
        role: makes one, by its entrypoint, name, replicas and env.
    """
    env = {"WHO": "me"}
    meshes = [role("x", name="trainers", replicas=2, env=env), role("x", name="loaders", env=env)]
    script = ("python", "-c", textwrap.dedent(CONTROLLER), "3")
    return list(waiting(AppDef("app", meshes), 0.0, script).roles)


def had_all_meshes(said: str, status: AppStatus) -> None:
    """That it did, by its log and the app's status."""
    assert "trainers [(0, 'me', False), (1, 'me', False)]" in said, said
    assert "loaders [(0, 'me', False)]" in said
    assert json.loads(status.structured_error_msg)["message"]["errorCode"] == 3
