# SPDX-License-Identifier: BSD-3-Clause
"""Images with workspaces get the names of a repository, and are pushed there before the app is submitted."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torchx.specs import AppDef, CfgVal, Role
from torchx.workspace import WorkspaceMixin
from torchx.workspace.dir_workspace import DirWorkspaceMixin
from torchx.workspace.docker_workspace import DockerWorkspaceMixin

from torchx_monarch.backends.core.errors import SubmitError, UserError
from torchx_monarch.backends.core.options import MonarchOpts
from torchx_monarch.schedulers import image_push

OPTIONS = MonarchOpts.from_cfg({"image_repo": "registry/a"})
LOCAL = "sha256:abc"


def app() -> AppDef:
    return AppDef("app", [Role("built", LOCAL), Role("other", "python:3.11")])


class Builder(WorkspaceMixin[list[str]]):  # type: ignore[misc]
    """Pushes by noting it, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__()
        self.pushed: list[str] = []
        self._failure = failure

    def dryrun_push_images(self, app: AppDef, cfg: Mapping[str, CfgVal]) -> list[str]:
        return [role.image for role in app.roles]

    def push_images(self, images_to_push: list[str]) -> None:
        if self._failure is not None:
            raise self._failure
        self.pushed += images_to_push


def test_local_images_get_the_name_of_the_repository() -> None:
    named = app()
    assert image_push.name_images(DockerWorkspaceMixin(), named, OPTIONS) == {LOCAL: ("registry/a", "abc")}
    assert [role.image for role in named.roles] == ["registry/a:abc", "python:3.11"]
    assert image_push.name_images(DockerWorkspaceMixin(), named, OPTIONS) is None


def test_a_builder_without_a_push_step_pushes_nothing() -> None:
    for workspace in (None, DirWorkspaceMixin()):
        named = app()
        assert image_push.name_images(workspace, named, MonarchOpts()) is None
        assert named == app()
        image_push.push(workspace, None)


def test_an_image_without_a_repository_is_refused() -> None:
    with pytest.raises(UserError, match=r"the image sha256:abc .* run option image_repo"):
        image_push.name_images(DockerWorkspaceMixin(), app(), MonarchOpts())


def test_images_are_pushed() -> None:
    builder = Builder()
    image_push.push(builder, image_push.name_images(builder, app(), OPTIONS))
    assert builder.pushed == [LOCAL, "python:3.11"]


@pytest.mark.parametrize("failure", [RuntimeError("denied"), OSError("no daemon")])
def test_a_refused_push_is_an_error_of_the_submission(failure: Exception) -> None:
    with pytest.raises(SubmitError, match="the image with the workspace cannot be pushed: "):
        image_push.push(Builder(failure), [LOCAL])
