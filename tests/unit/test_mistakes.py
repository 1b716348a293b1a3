# SPDX-License-Identifier: BSD-3-Clause
"""A user's mistakes: the torchx command says what is wrong, without a traceback, and ends with 1."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torchx.cli.main import main
from torchx.specs import finder

from torchx_monarch.backends.core.apps import Apps
from torchx_monarch.backends.core.backend import Capabilities
from torchx_monarch.backends.core.errors import BackendError
from torchx_monarch.backends.core.state import AppStatus
from torchx_monarch.model.state import State

Command = Callable[..., str]

RUN = "run -s monarch_local monarch.spmd"
CFG, KUBERNETES = "run -s monarch_local -cfg", "run -s monarch_kubernetes -cfg"


@pytest.fixture
def torchx(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> Command:
    """Run the torchx command in this process; what it says as it ends with 1."""
    monkeypatch.setenv("MONARCH_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        caplog.clear()
        with pytest.raises(BaseException) as ended, caplog.at_level(logging.ERROR):
            main(list(words))
        error = ended.value
        assert isinstance(error, SystemExit) and error.code, f"the command succeeds, or shows a traceback: {error!r}"
        said = capsys.readouterr()
        whole = "\n".join([said.out, said.err, *(record.getMessage() for record in caplog.records)])
        assert "Traceback" not in whole, whole
        return whole

    return run


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (f"{RUN} trian.py", "Did you mean train.py?"),
        (f"{RUN} -m package.trainr", "there is no module trainr.py in {folder}/package. Did you mean trainer.py?"),
        (f"{RUN} data", "{folder}/data is a folder without a __main__.py. Give a file in it."),
        (f"{RUN} --nprocs 4 train.py", "Did you mean --nproc?"),
        (f"{RUN} --nproc four train.py", "--nproc four: use a number from 1 to 65536, or one of auto, gpu, cpu, xpu"),
        (f"{RUN} --env A=1 --env B=2 train.py", "--env is given twice. Give all pairs at once, as in --env A=1,B=2."),
        (f"{RUN} --wait train.py", "--wait is an option of `torchx run`: type it before monarch.spmd"),
        (
            "run --nproc 2 monarch.spmd train.py",
            "--nproc is no option of `torchx run`. Options of a component come after",
        ),
        ("run --dry-run monarch.spmd train.py", "--dry-run is no option of `torchx run`. Did you mean --dryrun?"),
        (f"{RUN} --script src/train.py", "there is no file train.py in {folder}/src."),
        (RUN, "No program to run: give a script"),
        ("run -s monarch_local monarch.ft train.py", "pip install torchft-nightly, or use --lighthouse http://HOST:"),
        ("run -s monarch_local monarch.controller trian.py", "Did you mean train.py?"),
        ("run -s monarch_local monarch.spdm train.py", "Did you mean monarch.spmd?"),
        ("run -s monarch_local train.py", "To run a script: torchx run monarch.spmd --nproc 4 train.py"),
        ("run monarch_local monarch.spmd train.py", "To use it: torchx run -s monarch_local COMPONENT ..."),
        ("run -s monarch_local -cfg hang_aftr=20 monarch.spmd train.py", "Did you mean hang_after?"),
        ("run -s monarch_local -cfg on_hang=kill monarch.spmd train.py", "it is observe or restart or fail"),
        (f"{CFG} grace=abc --dryrun utils.echo", "Run option `grace` is 'abc', which is no int"),
        (f"{CFG} no_such=1 --dryrun utils.echo", "Unknown run option `no_such`. Valid options are: "),
        (f"{CFG} grace --dryrun utils.echo", "-cfg 'grace' is not of the form OPTION=VALUE,OPTION=VALUE"),
        (f"{CFG} grace=-1 --dryrun utils.echo", "grace"),
        (
            f"{CFG} on=last,stop_after=2h --dryrun monarch.spmd train.py",
            "Run option `stop_after` is 2h: with `on` it is that of the allocation",
        ),
        (
            f"{KUBERNETES} node_selector=disk --dryrun utils.echo",
            "Run option `node_selector` is 'disk', which is not of the form KEY:VALUE;KEY:VALUE",
        ),
        (
            f"{KUBERNETES} tolerations=a=b:NoSchedule --dryrun utils.echo",
            "(a value that contains = needs quotes: OPTION='A=B')",
        ),
        ("status monarch_local://torchx/x", "there is no app 'x' of monarch_local"),
        ("log monarch_local://torchx/x", "there is no app 'x' of monarch_local"),
        ("log monarch_local://torchx/x/train/0", "there is no app 'x' of monarch_local"),
        ("cancel monarch_local://torchx/x", "there is no app 'monarch_local://torchx/x'; `torchx monarch ls` lists"),
        ("status train-x7", "there is no app 'train-x7'; `torchx monarch ls` lists all"),
        ("log train-x7/train/0", "there is no app 'train-x7'"),
        ("cancel last", "no app was submitted from this machine yet"),
        ("describe last", "no app was submitted from this machine yet"),
        ("delete last", "no app was submitted from this machine yet"),
        ("monarch cancel train", "there is no app 'train'"),
        ("cancel monarch_local://torchx/x --address h:1", "--address is where --save reaches the ranks"),
        ("monarch wait", "no app was submitted from this machine yet"),
        ("monarch profile --seconds x", "'x' is not between 1 and 600 seconds"),
        ("monarch profile -o results/x.svg", "there is no folder results"),
        ("monarch statsu", "Did you mean status?"),
        ("monarch drill", "nothing says what to run: torchx monarch drill -- monarch.spmd"),
        ("monarch drill --faults rank,cpu -- monarch.spmd train.py", "there is no fault 'cpu'; there are rank, host"),
        ("monarch drill --compare /etc -- monarch.spmd train.py", "--compare /etc: give a path relative to the folder"),
        ("monarch drill --compare ../x -- monarch.spmd train.py", "--compare ../x: give a path relative to the folder"),
        ("monarch metrics", "the following arguments are required: HANDLE\n"),
        ("monarch metrics last --activity --rank 3", "argument --rank: not allowed with argument --activity"),
        ("monarch ls -n -3", "argument -n/--limit: '-3' is no number, 0 or more"),
        ("monarch drill -- utils.echo", "utils.echo runs no ranks here"),
        ("monarch drill -- monarch.spmd trian.py", "Did you mean train.py?"),
        ("monarch drill -- monarch.spmd train.py --out {folder}/out", "{folder}/out is not in the copy in which"),
        ("monarch drill -- monarch.spmd train.py", "weights is a link to /, and the program could write there"),
        ("monarch drill --data weights --data data -- monarch.spmd train.py", "--data data: it is not a path of"),
    ],
)
def test_what_to_type_instead(
    torchx: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, answer: str
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # has no torchft_lighthouse
    for name in ("train.py", "package/__init__.py", "package/trainer.py", "data/digits.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "weights").symlink_to("/")
    assert answer.format(folder=tmp_path) in torchx(*command.format(folder=tmp_path).split())


@pytest.mark.parametrize(
    ("settings", "command", "answer"),
    [
        ("[monarch_local]\ngrace = abc\n", "--dryrun utils.echo", "Run option `grace` is 'abc', which is no int"),
        ("[monarch_local]\ngrace = None\n", "--dryrun utils.echo", "`grace` is None; it is a number of seconds, 0 to"),
        ("[component:monarch.ft]\nlighthouse = head\n", "monarch.ft -j 2x1 train.py", "--lighthouse head: use http"),
    ],
)
def test_a_configuration_file(
    torchx: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, command: str, answer: str
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # has no torchft_lighthouse
    monkeypatch.setenv("TORCHXCONFIG", str(tmp_path / ".torchxconfig"))
    (tmp_path / ".torchxconfig").write_text(settings)
    (tmp_path / "train.py").touch()
    assert answer in torchx("run", "-s", "monarch_local", *command.split())


def test_a_submission_looks_at_no_component_but_its_own(
    torchx: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TorchX checks all that it loads, and reads the metadata of all packages for each of them."""
    monkeypatch.setattr(finder, "_load_components", None)
    main(["run", "-s", "monarch_local", "--dryrun", "monarch.spmd", "--nproc", "3", "train.py", "--lr", "0.1"])
    assert "'3', 'train.py', '--lr', '0.1'" in " ".join(capsys.readouterr().out.split())


@pytest.mark.filterwarnings("ignore:.*socket:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_workspace_without_a_docker_daemon(torchx: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent")
    offline = "-cfg validate_spec=False,namespace=n"
    said = torchx(*f"run -s monarch_kubernetes {offline} monarch.spmd --image i x.py".split())
    assert "Docker" in said and "--workspace ''" in said
    gc.collect()  # Docker's client leaves its socket open


@pytest.mark.parametrize(
    ("component", "warning"),
    [
        (
            "monarch.spmd -j 2x8 x.py",
            "role x: each host is for 8 ranks and asks for 2 CPUs, no GPU and 1024 MB of memory. Give --gpu 8, or "
            "--cpu 8 for ranks without GPUs, and --memMB",
        ),
        ("monarch.spmd -j 2x8 --gpu 4 --cpu 32 --memMB 64000 x.py", "asks for 32 CPUs, 4 GPUs and 64000 MB"),
        ("monarch.spmd -j 2x8 --gpu 8 --cpu 4 x.py", "4 CPUs, 8 GPUs and 1024 MB"),
        ("monarch.spmd -j 2x8 --gpu 8 --memMB 4096 x.py", ""),
        ("monarch.spmd -j 2x8 --cpu 8 --memMB 4096 x.py", ""),
        ("monarch.spmd --nproc 2 x.py", ""),
        ("monarch.ft -j 2x8 x.py", "role group0, group1: each host is for 8 ranks and asks for 2 CPUs, no GPU"),
        (
            "monarch.hosts -j 2x8 --gpu 8",
            "role hosts: each host is for 8 ranks and asks for 2 CPUs, 8 GPUs and 1024 MB",
        ),
        ("monarch.hosts -j 2x0", ""),
        ("utils.echo", ""),
    ],
)
def test_a_submission_warns_of_few_resources(
    torchx: Command, component: str, warning: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    main(f"run -s monarch_slurm --dryrun {component}".split())
    warnings = [record.getMessage() for record in caplog.records if "each host" in record.getMessage()]
    assert len(warnings) == bool(warning) and warning in "".join(warnings)


def test_a_dry_run_needs_no_cluster(
    torchx: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"DOCKER_HOST": "unix:///nonexistent", "KUBECONFIG": "/nonexistent"}.items():
        monkeypatch.setenv(name, value)
    offline = "-cfg validate_spec=False,namespace=n"
    main(f"run -s monarch_kubernetes {offline} --dryrun monarch.spmd --image i x.py".split())
    assert "kind: Job" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["cancel --save", "delete --force"])
def test_a_scheduler_whose_client_is_not_installed(
    torchx: Command, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = BackendError("monarch_kubernetes needs kubernetes")
    monkeypatch.setattr("torchx_monarch.schedulers.monarch.scheduler_of", Mock(side_effect=missing))
    said = torchx(*words.split(), "monarch_kubernetes://torchx/x")
    assert str(missing) in said and "unrecognized" not in said


@pytest.mark.parametrize("waits", [True, False])
def test_an_app_that_does_not_end_when_it_is_cancelled(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    stopped: list[str] = []
    backend: Any = SimpleNamespace(
        capabilities=Capabilities(waits_for_cancel=waits), stop=lambda app, outcome, grace: stopped.append(app.app_id)
    )
    apps: Apps[Any] = Apps(backend, "monarch_local")
    app = SimpleNamespace(app_id="train-1", grace=30.0)
    monkeypatch.setattr(apps, "read", lambda app_id, brief: (app, AppStatus(State.RUNNING)))
    monkeypatch.setattr(apps, "wait", lambda app_id, timeout: False)
    if waits:
        with pytest.raises(
            BackendError, match=r"app train-1 was asked to end, but has not ended within \d+ s; `torchx"
        ):
            apps.cancel("train-1", waits=True)
    else:
        apps.cancel("train-1", waits=True)
    assert stopped == ["train-1"]
