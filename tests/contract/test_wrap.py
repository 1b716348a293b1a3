# SPDX-License-Identifier: BSD-3-Clause
"""The contract of all backends on TorchX's own schedulers, wrapped, and what is said where one of them cannot do it."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torchx.runner import Runner
from torchx.schedulers import DEFAULT_SCHEDULER_MODULES
from torchx.schedulers.api import DescribeAppResponse, Stream
from torchx.schedulers.local_scheduler import PopenRequest
from torchx.specs import AppDef, AppDryRunInfo, AppState, Resource, Role, runopts

from tests.contract.contract import Contract
from tests.contract.place import Place
from tests.contract.wrapped import LocalCwdPlace, Minimal, MinimalPlace
from torchx_monarch.backends.core import stored_apps
from torchx_monarch.backends.core.errors import BackendError, SubmitError, UserError
from torchx_monarch.backends.wrapped import backend as wrapped_backend
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
    assert set(local.states(handle).values()) == {AppState.CANCELLED}
    # TorchX's thread that copies both streams into one file may end before it has copied the last line.
    assert "saved" in "".join(local.lines(handle, streams=Stream.STDOUT))
    certificate = Path(stored_apps.credentials(local.name).path(handle.rpartition("/")[2]))
    assert record(local, handle).stat().st_mode & 0o777 == 0o600 and certificate.exists()
    local.runner.delete(handle)
    assert not record(local, handle).exists() and not certificate.exists()


def test_a_dry_run_has_the_other_schedulers_request_and_changes_of_it_count(
    local: LocalCwdPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = local.program("""import os; print("CHANGED is", os.environ["CHANGED"], flush=True)""")
    info = local.runner.dryrun(AppDef("app", [local.torchrun(program, nproc=1)]), local.name, local.cfg)
    shown = str(info)
    assert "'role_params': {" in shown and "tls:@TORCHX_RANK0_HOST:" in shown
    assert "'MONARCH_CREDENTIALS': 'MONARCH_CREDENTIALS-is-made-when-the-job-is-submitted'" in shown
    assert isinstance(info.request, PopenRequest)
    for replica in info.request.role_params["trainer"]:
        replica.env["CHANGED"] = "by hand"
    assert "by hand" in str(info)
    monkeypatch.setattr(local.inner, "submit_dryrun", None)  # nothing is rendered again
    handle = local.runner.schedule(info)
    assert local.wait(handle).state is AppState.SUCCEEDED
    assert "CHANGED is by hand" in local.log(handle)
    assert "is-made-when" in str(info)  # the secrets are in a copy


@pytest.mark.parametrize("name", list(DEFAULT_SCHEDULER_MODULES))
def test_each_scheduler_of_torchx_can_be_wrapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the place where it submits; for Volcano, that of Kubernetes takes the place of an option of ours."""
    for variable in ("DOCKER_HOST", "KUBECONFIG"):
        monkeypatch.setenv(variable, "unix:///nonexistent")
    inner = importlib.import_module(DEFAULT_SCHEDULER_MODULES[name]).create_scheduler("torchx")
    submitted: list[Any] = []

    def schedule(info: AppDryRunInfo[Any, Any]) -> str:
        submitted.append(info.request)
        return "app-0"

    monkeypatch.setattr(inner, "schedule", schedule)
    role = Role("train", "image", entrypoint="torchrun", args=["train.py"], resource=Resource(1, 0, 1))
    cfg: dict[str, Any] = {"queue": "q", "validate_spec": False} if name == "kubernetes" else {}
    with Runner("torchx", {"acme": lambda session_name, **more: wrap("acme", session_name, inner)}) as runner:
        info = runner.dryrun(AppDef("app", [role]), "acme", cfg=cfg)
        assert runner.schedule(info) == "acme://torchx/app-0"
    (request,) = submitted
    assert type(request) is type(info.request)
    assert "is-made-when" in repr(info.request) and "is-made-when" not in repr(request)


class _Environment(NamedTuple):
    host: object
    values: tuple[str, ...]


@pytest.mark.parametrize(
    ("request_of", "found"),
    [
        (lambda env: {"containers": [{"env": [{"name": name, "value": env[name]} for name in env]}]}, True),
        (lambda env: SimpleNamespace(pods=[SimpleNamespace(env=[*env.items()])]), True),
        (lambda env: _Environment(None, tuple(f"export {name}={shlex.quote(env[name])}" for name in env)), True),
        (lambda env: json.dumps(env).encode(), False),
    ],
)
def test_hosts_get_their_secrets_in_requests_of_any_shape(
    minimal: MinimalPlace,
    monkeypatch: pytest.MonkeyPatch,
    request_of: Callable[[dict[str, str]], object],
    found: bool,
) -> None:
    def rendered(app: AppDef, cfg: Any) -> AppDryRunInfo[Any, Any]:
        made: Any = request_of(app.roles[0].env)
        if isinstance(made, dict):
            made["itself"] = made
        return AppDryRunInfo(made, repr)

    submitted: list[Any] = []

    def schedule(info: AppDryRunInfo[Any, Any]) -> str:
        submitted.append(info.request)
        return "app-0"

    monkeypatch.setattr(minimal.inner, "_submit_dryrun", rendered)
    monkeypatch.setattr(minimal.inner, "schedule", schedule)
    if found:
        minimal.run(minimal.torchrun("train.py"))
        assert "is-made-when" not in str(submitted) and str(submitted).count("MONARCH_") == 2
    else:
        with pytest.raises(SubmitError, match="hosts cannot meet: the request of Minimal, of the type bytes, does not"):
            minimal.run(minimal.torchrun("train.py"))


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


def test_an_app_that_the_other_scheduler_cannot_describe_has_the_state_of_its_list(
    minimal: MinimalPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TorchX's ``slurm`` cannot describe a job that waits, or has just ended."""

    def describe(self: Minimal, app_id: str) -> DescribeAppResponse | None:
        raise KeyError("job_resources")

    monkeypatch.setattr(Minimal, "describe", describe)
    monkeypatch.setattr(wrapped_backend, "_LIST_INTERVAL", 0.0)
    place = MinimalPlace(minimal.folder)
    handle = place.run(place.role("true"))
    assert place.status(handle).state is AppState.PENDING
    app, _ = place.inner.apps["app-0"]
    place.inner.apps["app-0"] = app, AppState.RUNNING
    assert place.status(handle).state is AppState.RUNNING
    place.runner.cancel(handle)
    assert place.wait(handle).state is AppState.CANCELLED
    place.inner.apps.clear()  # not listed yet
    assert place.status(place.run(place.role("true"))).state is AppState.PENDING
    with pytest.raises(BackendError, match=r"wrapped_minimal: Minimal cannot describe app-7: 'job_resources'"):
        place.status(handle.replace("app-0", "app-7"))


def test_signed_results_are_kept_from_readers_and_no_other_line(local: LocalCwdPlace) -> None:
    forged = f"[monarch] result {'0' * 64} {{}}"
    program = local.program(f"print({forged!r}, flush=True); raise SystemExit(3)")
    handle = local.run(local.torchrun(program, nproc=1))
    status = local.wait(handle)
    assert status.state is AppState.FAILED and "exited with code 3" in status.structured_error_msg
    lines = local.log(handle).splitlines()
    assert [line for line in lines if re.match(r"(\[default\d\]:)?\[monarch\] result", line)] == [
        f"[default0]:{forged}",
        f"[default1]:{forged}",
    ]
    backend = local.backend
    assert isinstance(backend, WrappedBackend)
    inner = "".join(backend.inner.log_iter(handle.rpartition("/")[2], "trainer", streams=Stream.COMBINED))
    assert inner.count("\n[monarch] result ") == 1


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
