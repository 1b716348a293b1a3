# SPDX-License-Identifier: BSD-3-Clause
"""Send workspaces to machines: each machine receives the contents that it does not have from earlier apps."""

from __future__ import annotations

import base64
import contextlib
import functools
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping

from torchx.specs import CfgVal, Role, Workspace
from torchx.workspace import WorkspaceMixin

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.ssh.connection import MachineConnection, at_once
from torchx_monarch.code_sync.manifest import Tree, is_home_or_root
from torchx_monarch.code_sync.upload import PIECE, pack

_log = logging.getLogger("torchx_monarch")


class SentWorkspace(WorkspaceMixin[None]):  # type: ignore[misc]
    """Leaves a role as it is: ``submit`` sends its workspace."""

    def caching_build_workspace_and_update_role(
        self, role: Role, cfg: Mapping[str, CfgVal], build_cache: dict[object, object]
    ) -> None:
        """Build nothing."""


def projects(role: Role) -> dict[str, str]:
    """Return the folders of a role's workspace: where each is, and its path in the workspace; empty without one.

    The home folder and ``/`` are left out.
    """
    found = {}
    for source, target in (role.workspace.projects if role.workspace else {}).items():
        path = source.removeprefix("file://")
        if "://" in path or not os.path.exists(path):
            raise UserError(f"the workspace {source} of role {role.name} is no folder of this machine")
        path = os.path.abspath(path)
        if is_home_or_root(path):
            _log.warning("the workspace %s is not sent to the machines: it holds more than code", path)
        else:
            found[path] = target
    return found


def send(projects: Mapping[str, str], connections: Mapping[str, MachineConnection]) -> str:
    """Send a workspace (``projects``) to machines, by their names; return its hash, empty without one."""
    if not projects:
        return ""
    from torchx_monarch.code_sync.scan import ScanError, scan_and_send

    def send_to(name: str, tree: Tree) -> None:
        ask = functools.partial(connections[name].ask, may_reconnect=False)
        missing = ask("expect_code", digests=list(tree.contents))
        with tempfile.TemporaryFile() as file:
            pack(root, tree, missing, file)
            while piece := file.read(PIECE):
                ask("take_code", piece=base64.b64encode(piece).decode())

    with _merged(projects) as root:
        try:
            return scan_and_send(
                root, lambda tree: at_once(lambda name: send_to(name, tree), connections, needs_all=True)
            )
        except (ScanError, OSError) as error:
            raise UserError(f"{error} (or take no workspace along: --workspace '')") from None


@contextlib.contextmanager
def _merged(projects: Mapping[str, str]) -> Iterator[str]:
    """Yield one folder with all folders of a workspace."""
    if list(projects.values()) == [""]:
        yield next(iter(projects))
        return
    with tempfile.TemporaryDirectory(prefix="torchx-monarch-") as folder:
        for target in projects.values():
            os.makedirs(os.path.join(folder, target), exist_ok=True)
        Workspace(dict(projects)).merge_into(folder)
        yield folder
