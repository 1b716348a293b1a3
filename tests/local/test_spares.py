# SPDX-License-Identifier: BSD-3-Clause
"""Spare hosts on monarch_local: their own loss harms nothing, and they take the place of a host that fails."""

from __future__ import annotations

import json

from torchx.specs import AppState

from tests.local.place import LocalPlace

FAILS = """
import os, time
def told(word):
    return os.path.exists(os.path.join({folder!r}, "told-" + word))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, "rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while attempt == 0 and not told("fail"):
    time.sleep(0.05)
if attempt == 0 and os.environ["GROUP_RANK"] == "1":
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
while not told("end"):
    time.sleep(0.05)
"""


def test_the_loss_of_a_spare_harms_nothing_and_a_bad_host_makes_way_for_the_other(place: LocalPlace) -> None:
    role = place.torchrun(
        *("--max-restarts", "1", place.program(FAILS.format(folder=str(place.folder)))),
        nproc=1,
        metadata={"monarch": {"spares": 2}},
    )
    handle = place.run(role, exclude_after=1)
    place.until(lambda: place.log(handle).count("attempt 0") == 2, "the ranks", handle)
    place.until(lambda: "spare: host 2 (" in place.log(handle), "the spares", handle)
    place.lose(handle, 2)
    place.until(lambda: "it ran no ranks" in place.log(handle), "the loss of the spare", handle)
    place.tell("fail")
    place.until(lambda: "attempt 1 rank 1 of 2" in place.log(handle, replicas=4), "the spare's rank", handle)
    assert "attempt 1 rank 1 of 2" in "".join(place.lines(handle, 3))
    status = json.loads(place.torchx("monarch", "status", "--json", handle))
    assert (status["hosts"], status["attempt"], status["spares"], status["state"]) == (2, 2, [], "RUNNING")
    (excluded,) = status["excluded"]
    assert "(replica 1) is excluded after 1 failure within 1 h, the last: rank 1" in excluded["message"]
    page = place.folder / "job.html"
    place.torchx("monarch", "report", handle, "-o", str(page))
    assert "(replica 1) is excluded after 1 failure" in page.read_text()
    place.tell("end")
    ended = place.wait(handle, AppState.SUCCEEDED)
    assert ended.num_restarts == 1
    states = [replica.state for replica in ended.roles[0].replicas]
    assert states == [AppState.SUCCEEDED, AppState.SUCCEEDED, AppState.FAILED, AppState.SUCCEEDED]
