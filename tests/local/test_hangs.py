# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that wait in a collective for one that does not call it: which one is named, and what is done about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.local.hang_programs import HANGS, allocation, run
from tests.local.hosts import Hosts
from tests.local.test_stacks import torchrun
from tests.waits import until
from torchx_monarch.model.host_result import HostResult


def hangs(hosts: Hosts) -> list[dict[str, Any]]:
    return [event for event in hosts.events() if event["kind"] == "hang"]


def test_runs_that_hang_fail_with_the_rank_that_others_wait_for(folder: Path) -> None:
    hosts, path = allocation(folder)
    try:
        hosts.ready()
        for how in ("skips", "operations", "first", "chain", "gil", "stopped"):
            result, _ = run(hosts, path, how)
            assert HANGS[how] in result.reason and result.exit_code == 1, how
            assert result.reason.startswith("hang: rank 3 ") and "(local rank 1 on " in result.reason
        count = len(hangs(hosts))
        result, _ = run(hosts, path, "uneven")
        assert (result.exit_code, len(hangs(hosts))) == (0, count)
        hosts.end()
    finally:
        hosts.kill()
    first, *_, stopped = hangs(hosts)
    assert (first["ranks"], first["waiting"], first["group"], first["number"]) == ([3], [0, 1, 2], "0", 4)
    assert (first["operation"], first["fault"], stopped["fault"]) == ("gloo:all_reduce", "missing", "silent")
    assert "is at /" in first["place"] and first["place"].endswith("in hangs")
    assert stopped["place"].endswith(": stopped (SIGSTOP)")
    stacks = (hosts.logs(1) / "run_1" / "attempt_0" / "stacks.txt").read_text()
    assert "while ranks hang" in stacks and "before SIGTERM" in stacks and "in hangs" in stacks


def test_a_hang_is_observed_until_it_is_over_and_ranks_are_restarted_if_asked_for(
    folder: Path, script: Callable[[str], str]
) -> None:
    path = script("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if rank == 1 and attempt == 0:
            while not os.path.exists(os.environ["GO"]):
                time.sleep(0.01)
        dist.all_reduce(torch.ones(3))
        print("done", flush=True)
        dist.destroy_process_group()
    """)
    options = ("--grace", "5", "--hang-after", "1")
    observed = Hosts(folder, torchrun(path), options=options, environ={"GO": str(folder / "go")}).start()

    def is_seen() -> bool:
        assert observed.processes[0].poll() is None, observed.err()
        return bool(hangs(observed))

    until(is_seen, "the hang")
    (folder / "go").touch()
    assert observed.wait() == [0]
    assert "hang: rank 1 has not called gloo:all_reduce, number 1 of group 0" in observed.err()

    (folder / "go").unlink()
    (folder / "events.jsonl").unlink()
    # The second attempt is to be no hang on a busy machine either.
    more = ("--grace", "5", "--hang-after", "5", "--on-hang", "restart", "--retry-on", "77")
    restarted = Hosts(folder, torchrun(path, restarts=1), options=more, environ={"GO": str(folder / "go")}).start()
    assert restarted.wait() == [0], restarted.err()
    assert restarted.out().count("done") == 2 + 2 and len(hangs(restarted)) == 1
    kinds = [event["kind"] for event in restarted.events()]
    assert kinds.index("hang") < kinds.index("failure") < kinds.index("rank_restart")
    assert "restart 1 of 1 after: hang: rank 1 has not called gloo:all_reduce" in restarted.err()


def test_a_job_that_is_to_fail_by_a_hang_has_it_in_its_error_file(folder: Path, script: Callable[[str], str]) -> None:
    path = script("""
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if rank == 0:
            dist.all_reduce(torch.ones(3))
        time.sleep(1000)
    """)
    options = ("--grace", "5", "--hang-after", "1", "--on-hang", "fail")
    hosts = Hosts(folder, torchrun(path, restarts=3), options=options).start()
    assert hosts.wait() == [1]
    assert "no restart: the ranks hung (on_hang=fail)" in hosts.err()
    result = HostResult.from_text((hosts.logs(0) / "error.json").read_text())
    assert result.code == 1 and result.reason.startswith("hang: rank 1 has not called gloo:all_reduce, number 1 of")
    assert result.log.endswith("attempt_0/1/stderr.log")
