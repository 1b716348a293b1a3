# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that do what they can to hang or crash their host, or to have it say what is not true."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.local.hosts import NO_PRELOAD, Hosts, torchrun
from torchx_monarch.model.host_result import HostResult
from torchx_monarch.system import safe_files


def test_an_error_file_that_cannot_be_read(folder: Path) -> None:
    """Neither the rank's own nor what it puts in the place of its host's: exit code and rank stay right."""
    (folder / "prog.py").write_text("""
import os
path = os.environ["TORCHELASTIC_ERROR_FILE"]
if os.environ["RANK"] == "1":
    os.mkfifo(path)
    hosts = os.path.join(path.partition("/attempt_")[0], "error.json")
    for path in (hosts, hosts + ".tmp"):
        os.mkfifo(path)
    os._exit(3)
import time
time.sleep(600)
""")
    hosts = Hosts(folder, torchrun(str(folder / "prog.py")), options=NO_PRELOAD).start()
    assert hosts.wait() == [3]
    assert re.search(
        r"FAILED: rank 1 \(local rank 1 on .*\) exited with code 3: its error file is unreadable: it is a FIFO ",
        hosts.err(),
    )
    left = safe_files.read_json(str(hosts.logs(0) / "error.json"))
    assert left["message"]["errorCode"] == 3 and "rank 1" in left["message"]["message"]


def test_a_rank_cannot_stop_the_next_attempt_from_being_logged(folder: Path) -> None:
    """A FIFO where the next attempt's log is to be would be opened for ever; exit code and rank stay right."""
    (folder / "prog.py").write_text("""
import os
log = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
later = log.replace("attempt_0", "attempt_1")
if "attempt_0" in log:
    os.makedirs(os.path.join(later, "error.json", "x"))
    os.mkfifo(os.path.join(later, "stdout.log"))
    os.symlink("/dev/full", os.path.join(later, "stderr.log"))
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
os._exit(3)
""")
    command = torchrun(str(folder / "prog.py"), nproc=1, restarts=1)
    hosts = Hosts(folder, command, options=NO_PRELOAD).start()
    assert hosts.wait() == [3]
    assert re.search(r"FAILED: rank 0 \(.*\) exited with code 3;", hosts.err())
    assert (hosts.logs(0) / "attempt_1" / "0" / "stdout.log").read_text() == "attempt 1\n"


def test_stacks_are_not_written_through_a_link(folder: Path) -> None:
    (victim := folder / "victim").mkdir()
    (folder / "prog.py").write_text(f"""
import os, time
attempt = os.path.dirname(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))
if os.environ["RANK"] == "1":
    os.rename(attempt, attempt + ".moved")
    os.symlink({str(victim)!r}, attempt)
    os._exit(3)
time.sleep(600)
""")
    hosts = Hosts(folder, torchrun(str(folder / "prog.py")), options=NO_PRELOAD).start()
    assert hosts.wait() == [3]
    assert not list(victim.iterdir())


def test_what_a_rank_says_stays_in_its_line(folder: Path) -> None:
    forged = "[monarch] FAILED: the network of host 7 is broken (0.01 s)"
    message = folder / "message"
    (folder / "prog.py").write_text(f"""
import shutil
shutil.copy({str(message)!r}, {str(message)!r} + ".seen")
raise ValueError('boom\\n{forged}\\x1b[2J\\r\\u2028x')
""")
    environ = {"MONARCH_TERMINATION_LOG": str(message)}
    hosts = Hosts(folder, torchrun(str(folder / "prog.py"), nproc=1), options=NO_PRELOAD, environ=environ).start()
    assert hosts.wait() == [1]
    said = (hosts.logs(0) / "err").read_bytes().decode()  # read_text would take a carriage return for a line end
    ours = [line for line in said.split("\n") if not line.startswith("[trainer0]:")]
    assert all(line.startswith("[monarch] ") for line in ours if line), ours
    [failed] = [line for line in ours if line.startswith("[monarch] FAILED: ")]
    assert "ValueError: boom\\n[monarch] FAILED: the network" in failed
    assert not any("\x1b" in line for line in ours)
    left = json.loads((hosts.logs(0) / "error.json").read_text())["message"]
    assert left["message"].isprintable() and "\x1b" not in left["extraInfo"]["py_callstack"]
    # Kubernetes takes the end of the log for an empty one, if a rank kills its host.
    assert message.with_suffix(".seen").read_text() == "{}" and HostResult.from_text(message.read_text()).code == 1
    events = hosts.events()
    assert [event["message"] for event in events if event["message"].startswith("[monarch]")] == []
    assert all(event["message"].isprintable() for event in events)
