# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on examples/process_backend.py."""

from examples.process_backend import ProcessBackend, create_scheduler
from tests.contract.contract import Contract
from tests.contract.place import Place, left_to_others


class ProcessPlace(Place):
    name = "processes"
    factory = staticmethod(create_scheduler)
    nightly = left_to_others("test_a_rank_that_others_wait_for_is_the_root_cause")
    is_registered = False
    cannot = {
        **dict.fromkeys(("lost host replaced", "spare host", "retries", "preemption"), "it restarts none"),
        "cancel while pending": "processes start immediately",
        "status and log long after, elsewhere": "its state is in memory",
        "test_a_log_is_read_by_times_streams_and_expressions": "its logs have no times",
        "missing tool says what to install": "it needs nothing beside this package",
    }

    def credentials(self, handle: str) -> tuple[str, str]:
        return (app := ProcessBackend.apps[handle.rpartition("/")[2]]).env["MONARCH_CREDENTIALS"], str(app.request)


class TestContract(Contract):
    kind = ProcessPlace
