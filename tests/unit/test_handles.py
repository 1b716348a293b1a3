# SPDX-License-Identifier: BSD-3-Clause
"""Which app a word names, and times before now."""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from torchx.specs import AppDef, Role

from tests.waits import WITHIN
from torchx_monarch.backends.core import state_files, stored_apps
from torchx_monarch.backends.core.apps import Apps
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.local.backend import LocalOpts
from torchx_monarch.cli import exec as exec_command
from torchx_monarch.cli import exit_codes, ls, main
from torchx_monarch.cli.arguments import resolve, since, unknown
from torchx_monarch.cli.doctor import run_groups
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.schedulers.recorded_apps import recorded_apps
from torchx_monarch.schedulers.run_on_allocation import run_on_allocation

DIGITS = "monarch_local://torchx/digits-c2jz0w1r"
DIGITS_2 = "monarch_local://torchx/digits-x7"
SLURM = "monarch_slurm://torchx/4711"
POD = "monarch_kubernetes://torchx/default:bert-b9z"


@pytest.fixture
def apps() -> None:
    """Apps of three schedulers, in the order of their submission."""
    now = time.time()
    for age, app_id in ((50, "digits-c2jz0w1r"), (40, "digits-x7")):
        file = Path(state_files.app_paths(app_id).app)
        file.parent.mkdir(parents=True, mode=0o700)
        file.touch()
        Path(state_files.app_paths(app_id).status).touch()
        os.utime(file, (now - age, now - age))
    stored_apps.credentials("monarch_slurm").store("4711", stored_apps.StoredCredentials("secret", {}, "pretrain"))
    os.utime(stored_apps.credentials("monarch_slurm").path("4711"), (now - 20, now - 20))
    stored_apps.credentials("monarch_slurm").store("eval-a\x1b[31m", stored_apps.StoredCredentials("secret", {}))
    os.utime(stored_apps.credentials("monarch_slurm").path("eval-a\x1b[31m"), (now - 30, now - 30))
    stored_apps.credentials("monarch_kubernetes").store(
        "default:bert-b9z", stored_apps.StoredCredentials("secret", {}, "")
    )
    os.utime(stored_apps.credentials("monarch_kubernetes").path("default:bert-b9z"), (now - 60, now - 60))


@pytest.mark.parametrize(
    ("word", "handle"),
    [
        (DIGITS, DIGITS),
        ("monarch_slurm://torchx/of-another-machine", "monarch_slurm://torchx/of-another-machine"),
        ("digits-c2jz0w1r", DIGITS),
        ("digits-x", DIGITS_2),
        ("4711", SLURM),
        ("47", SLURM),
        ("pretrain", SLURM),
        ("digits", DIGITS_2),
        ("pre", SLURM),
        ("bert", POD),
        ("default:bert-b9z", POD),
        ("bert-b9z", POD),
        ("last", SLURM),
    ],
)
def test_a_word_names_an_app(apps: None, word: str, handle: str) -> None:
    assert resolve(word) == handle


def test_the_last_of_no_apps() -> None:
    with pytest.raises(CommandError, match="no app was submitted") as caught:
        resolve("last")
    assert caught.value.exit_code == exit_codes.UNKNOWN_APP


@pytest.mark.parametrize("word", ["digit", "d", "digits-"])
def test_an_ambiguous_word_lists_the_candidates_the_newest_first(apps: None, word: str) -> None:
    with pytest.raises(CommandError) as caught:
        resolve(word)
    assert caught.value.exit_code == exit_codes.USAGE
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines[1:]][:2] == [DIGITS_2, DIGITS]


@pytest.mark.parametrize("word", ["digitz-x7", "perl", ""])
def test_an_unknown_word_says_what_is_near(apps: None, word: str) -> None:
    with pytest.raises(CommandError, match="there is no app") as caught:
        resolve(word)
    assert caught.value.exit_code == exit_codes.UNKNOWN_APP
    assert (DIGITS_2 in str(caught.value)) is ("digit" in word)


def test_an_app_that_its_scheduler_has_forgotten_is_not_similar_to_itself(apps: None) -> None:
    assert str(unknown(DIGITS_2)).count(DIGITS_2) == 1


def test_names_of_apps_are_escaped(apps: None) -> None:
    with pytest.raises(CommandError) as caught:
        resolve("eval-b")
    assert "\x1b" not in str(caught.value) and "eval-a\\x1b[31m" in str(caught.value)


def test_a_message_stays_short() -> None:
    make_local_apps(100)
    with pytest.raises(CommandError) as caught:
        resolve("many-")
    assert len(str(caught.value).splitlines()) <= 12 and "one of 100 apps" in str(caught.value)


def make_local_apps(count: int) -> None:
    """Make the folders of apps, whose submission is a second apart."""
    for number in range(count):
        paths = state_files.app_paths(f"many-{number}")
        Path(paths.root).mkdir(parents=True, mode=0o700)
        for file in (paths.app, paths.status):
            Path(file).touch()
            os.utime(file, (number, number))


def test_a_list_reads_the_jobs_that_it_shows_and_no_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_local_apps(60)
    read: list[str] = []
    monkeypatch.setattr(Apps, "read", lambda _, app_id, **__: read.append(app_id))
    parser = argparse.ArgumentParser()
    main.add_arguments("ls", parser)
    as_json: tuple[tuple[list[str], int], ...] = (["--json"], 60), (["--json", "-n", "3"], 3)
    for options, shown in (([], 50), (["-s", "monarch_local", "-n", "2"], 2), (["-n", "0"], 60), *as_json):
        read.clear()
        ls.run(parser.parse_args(options))
        assert read == [f"many-{number}" for number in reversed(range(60 - shown, 60))]
    assert "10 older jobs are not shown; --limit 0 lists all" in capsys.readouterr().err


def test_a_list_shows_what_was_read_when_its_time_is_up() -> None:
    ended = threading.Event()

    def jobs() -> Iterator[int]:
        yield 1
        ended.wait(WITHIN)

    found = run_groups({"slow": jobs}, 0.2)
    ended.set()
    assert found["slow"][0] == [1] and "no answer in 0.2 s" in found["slow"][1]


@pytest.mark.parametrize("words", [["nodes"], ["prune", "--larger", "0"]], ids=["nodes", "prune"])
def test_a_scheduler_that_cannot_be_used_is_left_out(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    stored_apps.credentials("corp").store("7", stored_apps.StoredCredentials("secret", {}))
    name, *options = words
    main.add_arguments(name, parser := argparse.ArgumentParser())
    main.load(name).run(parser.parse_args(options))
    assert "corp is left out: there is no scheduler corp" in capsys.readouterr().err
    with pytest.raises(UserError, match="there is no scheduler monarch_slrum. Did you mean monarch_slurm"):
        main.load(name).run(parser.parse_args([*options, "-s", "monarch_slrum"]))


def test_the_last_allocation_is_found_without_schedulers_that_cannot_be_used() -> None:
    for app_id in ("7", "8"):
        stored_apps.credentials("corp").store(app_id, stored_apps.StoredCredentials("secret", {}))
    app = AppDef("train", [Role("train", image="", entrypoint="torchrun", args=["train.py"])])
    with pytest.raises(UserError, match="Run option `on` is last, and no live allocation is running"):
        run_on_allocation(app, LocalOpts(on="last"), "python")


@pytest.mark.parametrize(
    ("lease", "said"), [(60, "no live allocation is running"), (61, "Run option `lease` is 61: with `on` it is")]
)
def test_options_of_hosts_in_a_file_are_for_other_jobs(
    lease: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHXCONFIG", str(tmp_path / "config"))
    (tmp_path / "config").write_text("[monarch_local]\nlease = 60\n")
    app = AppDef("train", [Role("train", image="", entrypoint="torchrun", args=["train.py"])])
    with pytest.raises(UserError, match=said):
        run_on_allocation(app, LocalOpts(on="last", lease=lease, grace=1), "python")


def test_the_newest_apps_are_first(apps: None) -> None:
    assert [app.name for app in recorded_apps()][:2] == ["pretrain", "eval"]


@pytest.mark.parametrize(
    ("text", "ago"), [("0", 0), ("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400)]
)
def test_a_duration_before_now(text: str, ago: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchx_monarch.cli.arguments.time.time", lambda: 1e9)
    assert since(text).timestamp() == 1e9 - ago


@pytest.mark.parametrize("now", ["2025-03-09T03:30-04:00", "2025-11-02T01:30-05:00"])  # half an hour after each change
def test_a_duration_in_which_the_clocks_have_changed(now: str) -> None:
    seconds = datetime.fromisoformat(now).timestamp()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TZ", "America/New_York")
            time.tzset()
            patch.setattr("torchx_monarch.cli.arguments.time.time", lambda: seconds)
            assert since("2h").timestamp() == seconds - 7200
            assert since("40m").timestamp() == seconds - 2400
    finally:
        time.tzset()


def test_a_time() -> None:
    assert since("2026-11-22T14:30Z") == datetime(2026, 11, 22, 14, 30, tzinfo=timezone.utc)
    assert since("2026-11-22") == datetime(2026, 11, 22)


@pytest.mark.parametrize("text", ["", "tomorrow", "10y", "1e400h", "99999999999d", "m", "0001-01-01"])
def test_no_time_at_all(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="neither a duration"):
        since(text)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("H", []),
        ("H train.py --nproc 2", ["train.py", "--nproc", "2"]),
        ("H -m pkg --lr 1", ["-m", "pkg", "--lr", "1"]),
        ("H --nproc 4 -m pkg --nproc 2", ["-m", "pkg", "--nproc", "2"]),
        ("H --nproc 4 train.py --nproc 2", ["train.py", "--nproc", "2"]),
        ("H --nproc 4 -- torchrun -m pkg", ["torchrun", "-m", "pkg"]),
        ("H --nproc 4 train.py -mpkg", ["train.py", "-mpkg"]),
        ("H -- torchrun train.py", ["torchrun", "train.py"]),
        ("--nproc 4 H -m pkg", ["-m", "pkg"]),
    ],
)
def test_the_options_of_exec_end_at_the_program(typed: str, words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    main.add_arguments("exec", parser)
    args = parser.parse_args(typed.split())
    assert exec_command._words(args) == words
    assert args.nproc == ("4" if "--nproc 4" in typed else "")
