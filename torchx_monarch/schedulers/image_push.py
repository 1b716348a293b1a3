# SPDX-License-Identifier: BSD-3-Clause
"""Push the images that were built from workspaces, for backends whose machines pull images from a repository.

As in TorchX, a backend's workspace builder has a push step if it overrides ``dryrun_push_images``.
"""

from __future__ import annotations

from typing import Any

from torchx.specs import AppDef
from torchx.workspace import WorkspaceMixin

from torchx_monarch.backends.core.errors import SubmitError, UserError
from torchx_monarch.backends.core.options import MonarchOpts

_LOCAL = "sha256:"
"""The beginning of the name of an image that is on this machine alone (``DockerWorkspaceMixin``)."""


def makes_images(workspace: WorkspaceMixin[Any]) -> bool:
    """Return whether a workspace builder makes images, rather than folders."""
    return type(workspace).dryrun_push_images is not WorkspaceMixin.dryrun_push_images


def name_images(workspace: WorkspaceMixin[Any] | None, app: AppDef, options: MonarchOpts) -> Any:
    """Write the names under which images will be pushed into an app.

    Args:
        workspace: the backend's builder of workspaces; None without one.

    Returns:
        What ``push`` needs; None if there is nothing to push.
    """
    if workspace is None or not makes_images(workspace):
        return None
    local = next((role.image for role in app.roles if role.image.startswith(_LOCAL)), None)
    if local is not None and not options.get("image_repo"):
        raise UserError(
            f"the image {local} is on this machine alone, where a workspace was built into it: name a repository to "
            "push it to in the run option image_repo, or submit without a workspace (--workspace '')"
        )
    return workspace.dryrun_push_images(app, options) or None


def push(workspace: WorkspaceMixin[Any] | None, images: Any) -> None:
    """Push images, of which ``name_images`` has returned what this needs."""
    if workspace is None or images is None:
        return
    from docker.errors import DockerException

    try:
        workspace.push_images(images)
    except (DockerException, OSError, RuntimeError) as error:  # TorchX raises RuntimeError for a refused push
        raise SubmitError(f"the image with the workspace cannot be pushed: {error}") from error
