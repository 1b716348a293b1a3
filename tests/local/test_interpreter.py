# SPDX-License-Identifier: BSD-3-Clause
"""A command that means another Python environment than the submitter's: its ranks run in that one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torchx.specs import AppDef, AppState, Role

from tests.local.detached import Detached
from tests.waits import WITHIN
from torchx_monarch import serve

PROGRAM = "import sys\nprint('prefix', sys.prefix, sys.argv[1:], flush=True)"

LINES = {
    "path": "{b}/bin/torchrun p.py",
    "relative": "./b/bin/torchrun p.py",
    "script": "./set-up.sh torchrun p.py",
    "scriptpython": "bash ./set-up.sh python p.py",
    "runner": "env PATH={b}/bin:/bin timeout 99 torchrun p.py",
    "longpath": "{b}/shell/torchrun p.py",
    "named": "{b}/bin/python -m torch.distributed.run p.py",
}
"""Commands as lists of words."""

STRINGS = {
    "stringpath": "{b}/bin/torchrun p.py",
    "activated": ". {b}/bin/activate && torchrun p.py",
    "module": ". {b}/bin/activate && exec python -m torch.distributed.run p.py",
    "exported": "export PATH={b}/bin:$$PATH; torchrun p.py",
    "assigned": "PATH=b/bin:$$PATH exec torchrun p.py",
    "python": "PATH={b}/bin:$$PATH nice -n 1 python p.py",
    "environment": "PATH={b}/other:{b}/bin:$$PATH torchrun p.py",
}

OWN = {
    "words": ["torchrun", "p.py"],
    "string": ["sh", "-c", "timeout 99 torchrun p.py"],
    "several": ["sh", "-c", "cd . && torchrun p.py"],
    "renamed": ["bash", "-c", "exec -a other torchrun p.py"],
    "piped": ["sh", "-c", "torchrun p.py | grep prefix"],  # a reader of the ranks' own output, and of no reference
}
"""Commands of the submitter's environment."""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment with a torchrun as pip makes it, and others beside it."""
    made = tmp_path / "b"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True, timeout=WITHIN)
    scripts = {
        made / "bin" / "torchrun": f"#!{made}/bin/python3\nraise SystemExit('this is read, and not run')\n",
        made / "other" / "torchrun": "#!/usr/bin/env -S python3 -u\n",
        made / "shell" / "torchrun": f"#!/bin/sh\n'''exec' {made}/bin/python \"$0\" \"$@\"\n",
        made / "shell" / "python": f'#!/bin/sh\nexec {made}/bin/python "$@"\n',
        made / "unknown" / "torchrun": "#!/bin/sh\n",
        tmp_path / "set-up.sh": f'#!/bin/sh\n. {made}/bin/activate\nexec "$@"\n',
    }
    for path, text in scripts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "p.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return made


def role(name: str, words: list[str]) -> Role:
    return Role(name, image="", entrypoint=words[0], args=words[1:])


SIMILAR = {"relative", "scriptpython", "stringpath", "module", "exported", "assigned", "string", "renamed"}
"""Commands that are read in the way of another one; how each is read is in tests/unit/test_rewrite.py."""


@pytest.mark.parametrize("left_out", [SIMILAR, pytest.param(set[str](), marks=pytest.mark.nightly("similar commands"))])
def test_ranks_run_in_the_environment_that_the_command_means(
    apps: Detached, environment: Path, left_out: set[str]
) -> None:
    means_b = {name: line.format(b=environment).split() for name, line in LINES.items()}
    means_b |= {name: ["sh", "-c", string.format(b=environment)] for name, string in STRINGS.items()}
    commands = {name: words for name, words in (means_b | OWN).items() if name not in left_out}
    app_id = apps.run(*(role(name, words) for name, words in commands.items()), preload="none")
    status = apps.wait(app_id)
    logs = {name: apps.log(app_id, name) for name in commands}
    assert status.state is AppState.SUCCEEDED, (status, logs)
    found = {name: next(line for line in lines if line.startswith("prefix")).split()[1] for name, lines in logs.items()}
    assert found == {name: str(environment) if name in means_b else sys.prefix for name in commands}
    assert f"[monarch] the ranks' interpreter is {environment}/bin/python3\n" in logs["activated"]


def test_a_torchrun_whose_environment_is_not_known_is_refused(apps: Detached, environment: Path) -> None:
    for name, why in (
        ("no", "cannot read {}: No such file"),
        ("unknown", "the Python interpreter of {} is not known"),
    ):
        torchrun = f"{environment}/{name}/torchrun"
        app_id = apps.run(role("r", [torchrun, "p.py"]), preload="none")
        assert apps.wait(app_id).state is AppState.FAILED
        assert why.format(torchrun) in "".join(apps.log(app_id))


def test_runs_of_an_allocation_too(leaves_nothing: None, environment: Path, capfd: pytest.CaptureFixture[str]) -> None:
    app = AppDef("app", [role("r", ["./set-up.sh", "torchrun", "p.py", "held"])])
    with serve(app, scheduler_cfg={"preload": "none"}, start_timeout=WITHIN) as job:
        job.run_spmd()
        job.run_spmd([f"{environment}/bin/torchrun", "p.py", "given"])
    said = capfd.readouterr().out
    assert f"prefix {environment} ['held']" in said and f"prefix {environment} ['given']" in said
