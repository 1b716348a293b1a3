# SPDX-License-Identifier: BSD-3-Clause
"""Signals to a command that waits, with a backend that cannot kill."""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchx.cli import cmd_run
from torchx.cli.main import main

from torchx_monarch.backends.core.backend import Capabilities
from torchx_monarch.schedulers import command as command_module
from torchx_monarch.schedulers.foreground import Foreground


class ImpatientTerminal(io.StringIO):
    """A stderr that sends this process SIGINT before the call that prints a line has returned; each time once more."""

    def flush(self) -> None:
        """Send SIGINT as many times as there are lines."""
        for _ in range(self.getvalue().count("\n")):
            signal.raise_signal(signal.SIGINT)


class Plain:
    """The apps of a backend: one ends when it is cancelled."""

    def __init__(self, kills: bool = False) -> None:
        self.backend = SimpleNamespace(capabilities=Capabilities(kills=kills), folder=lambda app_id: None)
        self.cancelled = 0
        self.graces: list[float | None] = []
        self.reasons: list[str] = []

    def wait(self, app_id: str, timeout: float) -> bool:
        return bool(self.cancelled)

    def cancel(self, app_id: str, grace: float | None = None, reason: str = "") -> None:
        self.cancelled += 1
        self.graces.append(grace)
        self.reasons.append(reason)

    def read(self, app_id: str) -> None:
        return None


@pytest.fixture(autouse=True)
def _polls_return_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchx_monarch.schedulers.foreground._MAX_WAIT", 0.0)


def foreground_of(apps: Plain) -> Foreground:
    found: Any = apps
    return Foreground(found, "plain")


def is_run(monkeypatch: pytest.MonkeyPatch, **options: bool) -> None:
    """Have this process be a ``torchx run`` with these options."""
    defaults = {"wait": False, "log": False, "stdin": False}
    running = command_module.TorchXCommand(argparse.Namespace(**{**defaults, **options}))
    monkeypatch.setattr(command_module, "running", running)


def submit(foreground: Foreground) -> None:
    with foreground.submission() as submitted:
        submitted("a-1")


@pytest.mark.usefixtures("plain_signals")
@pytest.mark.parametrize("kills", [False, True])
def test_a_second_ctrl_c_is_heeded_as_soon_as_its_effect_is_told(kills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third and fourth one, which a held key sends, arrive while the app is killed."""
    is_run(monkeypatch, wait=True)
    monkeypatch.setattr("sys.stderr", terminal := ImpatientTerminal())
    apps = Plain(kills)
    foreground = foreground_of(apps)
    submit(foreground)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
            foreground.on_close()
    assert ended.type is SystemExit and str(ended.value) == "130"
    assert apps.graces == ([0.0] if kills else [None])
    assert ("killing plain://torchx/a-1" in terminal.getvalue()) is kills


def test_another_program_than_torchx_run_is_not_that_command() -> None:
    foreground = foreground_of(Plain())
    submit(foreground)
    assert not foreground.has_submitted("a-1")


@pytest.mark.usefixtures("plain_signals")
def test_signals_to_a_command_that_does_not_wait_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    is_run(monkeypatch, wait=False)
    foreground = foreground_of(Plain())
    submit(foreground)
    assert {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)} == {signal.SIG_DFL}
    foreground.on_close()
    assert {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)} == {signal.SIG_DFL}


@pytest.mark.usefixtures("plain_signals")
def test_a_signal_during_the_submission_cancels_what_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    is_run(monkeypatch, wait=True)
    backend = Plain()
    foreground = foreground_of(backend)
    with pytest.raises(SystemExit, match="143"):
        try:
            with foreground.submission() as submitted:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGHUP)  # a closed terminal sends both
                submitted("a-1")
        except KeyboardInterrupt:
            foreground.on_close()
    assert backend.cancelled == 1 and "without --wait and --log" in backend.reasons[0]


@pytest.mark.usefixtures("plain_signals")
@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_disposition_of_the_users_stays(handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    is_run(monkeypatch, wait=True)
    signal.signal(signal.SIGHUP, handler)
    foreground = foreground_of(Plain())
    submit(foreground)
    assert signal.getsignal(signal.SIGHUP) is handler
    foreground.on_close()
    assert signal.getsignal(signal.SIGHUP) is handler


@pytest.mark.parametrize(
    ("words", "waits"),
    [
        ("run -s monarch_local --wait utils.echo", True),
        ("--log_level INFO run --wait utils.echo", True),
        ("--log_level=INFO run -cfg a=1 --workspace  --log utils.echo", True),
        ("run --tee_logs utils.echo", False),  # TorchX does not wait for this option alone
        ("run --workspace=--wait utils.echo", False),
        ("run utils.echo --log", False),
        ("--log_level INFO run utils.echo", False),
    ],
)
def test_the_options_tell_before_the_command_waits(
    words: str, waits: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = Plain()
    foreground = foreground_of(backend)

    def run(self: cmd_run.CmdRun, args: Any) -> None:
        submit(foreground)
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            foreground.on_close()

    monkeypatch.setattr(cmd_run.CmdRun, "run", run)
    with pytest.raises(SystemExit, match="130"):
        main(words.split(" "))
    assert backend.cancelled == waits
    assert ("keeps running" in capsys.readouterr().err) is not waits
    assert command_module.running is None


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_closed_terminal_takes_all_that_is_written_and_other_files_stay(is_terminal: bool, tmp_path: Path) -> None:
    code = """if True:
        import errno, os, sys
        from torchx_monarch.system.termination import closed_terminal_is_null
        os.read(0, 1)
        for _ in range(2):
            with closed_terminal_is_null():
                print("out", flush=True)
                print("err", file=sys.stderr, flush=True)
        for number in errno.EPIPE, errno.EIO:
            try:
                with closed_terminal_is_null():
                    raise OSError(number, "nobody reads, or a disk fails")
            except OSError as error:
                assert error.errno == number
            else:
                sys.exit(1)
        sys.exit(7)
    """
    master, slave = os.openpty()
    with open(tmp_path / "err", "wb") as file:
        err = slave if is_terminal else file
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=slave, stderr=err)
    os.close(slave)
    os.close(master)
    process.communicate(b"x", timeout=60)
    assert process.returncode == 7
    assert is_terminal or (tmp_path / "err").read_text() in ("err\n", "err\nerr\n")
