# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on TorchX's own schedulers, wrapped, and what is said where one of them cannot do it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchx.schedulers.api import Stream
from torchx.specs import AppDef, AppState, runopts

from tests.contract.contract import Contract
from tests.contract.place import Place
from tests.contract.wrapped import LocalCwdPlace, Minimal, MinimalPlace
from torchx_monarch.backends.core import stored_apps
from torchx_monarch.backends.core.errors import BackendError, SubmitError, UserError
from torchx_monarch.backends.wrapped.backend import WrappedBackend
from torchx_monarch.schedulers import wrap


class TestLocalCwd(Contract):
    kind = LocalCwdPlace


class TestMinimal(Contract):
    kind = MinimalPlace


@pytest.fixture
def local(leaves_nothing: None, tmp_path: Path) -> Iterator[LocalCwdPlace]:
    place = LocalCwdPlace(tmp_path)
    yield place
    place.close()


@pytest.fixture
def minimal(leaves_nothing: None, tmp_path: Path) -> Iterator[MinimalPlace]:
    place = MinimalPlace(tmp_path)
    yield place
    place.close()


def record(place: Place, handle: str) -> Path:
    """Return the path of an app's record."""
    assert isinstance(place.backend, WrappedBackend)
    return Path(place.backend.records.path(handle.rpartition("/")[2]))


def test_roles_meet_are_cancelled_and_deleted(local: LocalCwdPlace) -> None:
    program = local.program(
        """
        import os, signal, sys, time
        def stop(number, frame):
            os.write(1, b"saved\\n")
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        print("up on stdout", flush=True)
        print("up on stderr", file=sys.stderr, flush=True)
        time.sleep(1000)
        """
    )
    critic = local.role("sh", "-c", "echo up; exec sleep 1000", name="critic")
    handle = local.run(local.torchrun(program, nproc=1), critic, prepend_cwd=True)  # an option of local_cwd
    local.until(lambda: local.log(handle).count("up on stdout") == 2, "the ranks", handle)
    local.until(lambda: "up\n" in local.lines(handle, role="critic"), "the critic", handle)
    out = "".join(local.lines(handle, streams=Stream.STDOUT))
    assert "up on stdout" in out and "up on stderr" not in out
    local.runner.cancel(handle)
    assert local.wait(handle).state is AppState.CANCELLED
    assert set(local.states(handle).values()) == {AppState.CANCELLED} and "saved" in local.log(handle)
    certificate = Path(stored_apps.credentials(local.name).path(handle.rpartition("/")[2]))
    assert record(local, handle).stat().st_mode & 0o777 == 0o600 and certificate.exists()
    local.runner.delete(handle)
    assert not record(local, handle).exists() and not certificate.exists()


def test_a_dry_run_shows_the_other_schedulers_request(local: LocalCwdPlace) -> None:
    app = AppDef("app", [local.torchrun("train.py")])
    shown = str(local.runner.dryrun(app, local.name, local.cfg))
    assert "'role_params': {" in shown
    assert "tls:@TORCHX_RANK0_HOST:" in shown and "MONARCH_CREDENTIALS" not in shown


def test_what_the_other_scheduler_no_longer_has_is_unknown(minimal: MinimalPlace) -> None:
    handle, other = minimal.run(minimal.role("true")), minimal.run(minimal.role("true"))
    minimal.runner.cancel(other)
    assert minimal.status(other).state is AppState.CANCELLED
    minimal.inner.apps.clear()
    assert minimal.status(handle).state is AppState.UNKNOWN and minimal.status(other).state is AppState.CANCELLED
    with pytest.raises(BackendError, match=r"wrapped_minimal: Minimal has no app app-0: nothing was ended"):
        minimal.runner.cancel(handle)
    minimal.runner.delete(handle)
    assert minimal.runner.status(handle) is None


def test_an_app_without_a_record_is_described_as_the_other_scheduler_does(minimal: MinimalPlace) -> None:
    handle = minimal.run(minimal.role("true"))
    record(minimal, handle).unlink()
    assert (minimal.status(handle).state, minimal.listed()) == (AppState.PENDING, [])


def test_logs_that_cannot_be_read_are_torchx_s_error(minimal: MinimalPlace) -> None:
    handle = minimal.run(minimal.role("true"))
    with pytest.raises(NotImplementedError, match="Minimal does not support application log iteration"):
        minimal.lines(handle)


def test_hosts_of_a_second_role_are_refused(minimal: MinimalPlace) -> None:
    with pytest.raises(UserError, match="role 'trainer' needs hosts, and this scheduler has them in the first role"):
        minimal.run(minimal.role("true", name="first"), minimal.torchrun("train.py"))


def test_the_other_schedulers_errors_are_one_line(minimal: MinimalPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> str:
        raise OSError("no\nspace")

    monkeypatch.setattr(minimal.inner, "schedule", fail)
    with pytest.raises(SubmitError, match=r"^wrapped_minimal: Minimal cannot submit the app: no.*space$") as caught:
        minimal.run(minimal.role("true"))
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UserError, match="Minimal cannot run the app: No resource for role: trainer"):
        minimal.run(minimal.role("true", resource=Place.resource))


def test_options_of_one_name_are_refused() -> None:
    class Clashing(Minimal):
        def _run_opts(self) -> runopts:
            options = runopts()
            options.add("grace", type_=int, default=1, help="something else")
            return options

    with pytest.raises(UserError, match=r"Clashing cannot be wrapped as acme: .* of the same name, `grace`; rename"):
        wrap("acme", "torchx", Clashing("torchx"))


def test_variables_of_a_job_around_the_submitter_stay_behind(
    minimal: MinimalPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONARCH_RUN_DIR", os.fspath(minimal.folder))
    minimal.run(minimal.torchrun("train.py", env={"MONARCH_EVENTS": "mine"}))
    ((app, _),) = minimal.inner.apps.values()
    env = app.roles[0].env
    assert (env["MONARCH_RUN_DIR"], env["MONARCH_EVENTS"]) == ("", "mine")
    assert len(env["MONARCH_CREDENTIALS"]) > 500 and env["MONARCH_RESULT_KEY"]
