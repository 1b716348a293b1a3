# SPDX-License-Identifier: BSD-3-Clause
"""Which backends run a case of the contract every time: those in which it goes a way of its own, and at least one.

The others run it where ``--nightly`` asks for it. A case that is not named here is run by all of them every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

NIGHTLY = "it goes through the core as another case does; at least one other backend has it every time"

BACKENDS: Mapping[str, str] = {
    # 13 s of processor time, most of it for imports.
    "test_two_hosts_train_on_real_digits": "local",
    "test_a_group_restarts_alone_and_may_be_lost[2]": "local kubernetes",
    "test_a_group_restarts_alone_and_may_be_lost[3]": "local slurm",
    "test_a_lost_host_is_replaced[1]": "ssh kubernetes",
    "test_a_lost_host_is_replaced[0]": "local slurm",
    "test_a_spare_host_takes_the_place_of_a_lost_one": "local slurm",
    "test_the_job_begins_again_when_a_host_is_lost[1]": "docker",
    "test_the_job_begins_again_when_a_host_is_lost[0]": "local slurm acme_tsp",
    "test_exit_code_78_asks_for_no_restart": "local slurm kubernetes acme_tsp",
    "test_commands_restart_as_their_policy_says[APPLICATION-starts0]": "local slurm",
    "test_commands_restart_as_their_policy_says[ROLE-starts1]": "local ssh acme_tsp",
    "test_commands_restart_as_their_policy_says[REPLICA-starts2]": "local kubernetes",
    "test_a_failing_command_is_the_root_cause": "local docker slurm wrapped_local_cwd wrapped_slurm",
    "test_an_elastic_role_does_without_a_replica": "local slurm kubernetes",
    "test_a_preempted_job_goes_on[APPLICATION]": "local kubernetes",
    "test_a_preempted_job_goes_on[REPLICA]": "local slurm",
    "test_ranks_are_looked_at_and_debugged": "local slurm kubernetes",
    "test_actors_run_beside_ranks": "local",
    "test_a_function_returns_a_value_from_each_rank": "local kubernetes aws_batch wrapped_local_cwd",
    "test_a_client_attaches_during_a_run": "ssh",
    "test_an_app_ends_when_it_is_decided_though_nobody_looks[failed]": "local docker slurm aws_batch acme_tsp",
    "test_an_app_ends_when_it_is_decided_though_nobody_looks[succeeded]": "local ssh",
    "test_an_app_ends_when_it_is_decided_though_nobody_looks[lost]": "local slurm ssh aws_batch acme_tsp",
    "test_an_app_ends_when_it_is_decided_though_nobody_looks[failed hosts]": "local kubernetes",
    "test_a_command_is_told_of_the_end[0]": "local kubernetes acme_tsp",
    "test_a_command_is_told_of_the_end[3]": "local docker slurm aws_batch wrapped_local_cwd",
    "test_describe_gives_the_original_app": "local aws_batch wrapped_local_cwd wrapped_minimal",
    "test_delete_leaves_nothing[0]": "local ssh acme_tsp",
    "test_delete_leaves_nothing[1000]": "local docker slurm kubernetes",
    "test_a_failing_rank_is_the_root_cause": "local docker slurm ssh kubernetes acme_tsp wrapped_local_cwd",
    "test_a_command_has_its_arguments_and_environment[True]": "local docker slurm ssh aws_batch acme_tsp",
    "test_a_command_has_its_arguments_and_environment[False]": "local slurm kubernetes wrapped_local_cwd",
    "test_a_log_is_followed_to_its_end": "local aws_batch wrapped_local_cwd wrapped_slurm",
}
"""The names of ``Place.name``, without ``monarch_``, of each case: a test, or one with its parameters."""


def mark(item: pytest.Item, place: Any) -> None:
    """Mark a test of the contract that its backend leaves to the nightly run or cannot pass (see ``Place``)."""
    test = getattr(item, "originalname", "")
    for name in (*[found.args[0] for found in item.iter_markers("scenario")], test, item.name):
        if name in place.cannot:
            item.add_marker(pytest.mark.skip(reason=place.cannot[name]))
    backends = BACKENDS.get(item.name) or BACKENDS.get(test)
    is_others = backends is not None and place.name.removeprefix("monarch_") not in backends.split()
    if is_others or test in place.nightly:
        item.add_marker(pytest.mark.nightly(NIGHTLY))
