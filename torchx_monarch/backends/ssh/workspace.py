# SPDX-License-Identifier: BSD-3-Clause
"""Send workspaces to machines: each machine receives the contents that it does not have from earlier apps."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence

from torchx.specs import CfgVal, Role, Workspace
from torchx.workspace import WorkspaceMixin

from torchx_monarch.backends.core import state_files
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.ssh.native import MachineConnection, SshError, concurrently
from torchx_monarch.code_sync.manifest import ChangedError, Tree, is_home_or_root, pack

_log = logging.getLogger("torchx_monarch")

_SCHEME = "file://"

_TRIES = 5
"""Number of attempts to send a workspace that changes between scan and transfer."""


class SentWorkspace(WorkspaceMixin[None]):  # type: ignore[misc]
    """Leaves a role as it is: ``submit`` sends its workspace."""

    def caching_build_workspace_and_update_role(
        self, role: Role, cfg: Mapping[str, CfgVal], build_cache: dict[object, object]
    ) -> None:
        """Build nothing."""


def projects(role: Role) -> dict[str, str]:
    """Return the folders of a role's workspace: where each is, and its path in the workspace; empty without one.

    The home folder and ``/`` are left out.

    Raises:
        UserError: one is not on this machine.
    """
    found = {}
    for source, target in (role.workspace.projects if role.workspace else {}).items():
        path = source.removeprefix(_SCHEME)
        if "://" in path or not os.path.exists(path):
            raise UserError(f"the workspace {source} of role {role.name} is no folder of this machine")
        path = os.path.abspath(path)
        if is_home_or_root(path):
            _log.warning("the workspace %s is not sent to the machines: it holds more than code", path)
        else:
            found[path] = target
    return found


def send(
    workspaces: Sequence[Mapping[str, str]],
    machines: Sequence[Sequence[str]],
    connections: Mapping[str, MachineConnection],
) -> list[str]:
    """Send the workspace of each role to the machines of its replicas.

    Args:
        workspaces: for each role what ``projects`` returns.

    Returns:
        For each role the hash of its workspace; empty without one.

    Raises:
        UserError: a workspace cannot be read, exceeds the limits or keeps changing.
        SshError: a machine cannot store it.
    """
    hashes = [""] * len(workspaces)
    for projects in {tuple(workspace.items()): workspace for workspace in workspaces if workspace}.values():
        roles = [index for index, workspace in enumerate(workspaces) if workspace == projects]
        names = dict.fromkeys(name for index in roles for name in machines[index])
        sent = _send(projects, [connections[name] for name in names])
        for index in roles:
            hashes[index] = sent
    return hashes


def _send(projects: Mapping[str, str], connections: Sequence[MachineConnection]) -> str:
    from torchx_monarch.code_sync.scan import ScanError

    with _merged(projects) as root:
        for _ in range(_TRIES):
            try:
                tree = _scan(root)
                results = concurrently(functools.partial(_send_tree, root, tree), connections)
            except ScanError as error:
                raise UserError(f"{error} (or take no workspace along: --workspace '')") from None
            except ChangedError as error:
                changing = error
                continue
            lost = next((result for result in results if isinstance(result, SshError)), None)
            if lost is not None:
                raise lost
            return tree.hash
    raise UserError(f"{changing} changes all the time: name it in .torchxignore, or take no workspace along")


@contextlib.contextmanager
def _merged(projects: Mapping[str, str]) -> Iterator[str]:
    """Yield one folder with all folders of a workspace."""
    if list(projects.values()) == [""]:
        yield next(iter(projects))
        return
    import tempfile

    with tempfile.TemporaryDirectory(prefix="torchx-monarch-") as folder:
        for target in projects.values():
            os.makedirs(os.path.join(folder, target), exist_ok=True)
        Workspace(dict(projects)).merge_into(folder)
        yield folder


def _scan(root: str) -> Tree:
    from torchx_monarch.code_sync.scan import StatCache, scan

    name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
    cache_path = os.path.join(state_files.state_dir(), "sync", f"{name}.json")
    memory = StatCache.load(cache_path, root)
    before = memory.files, memory.rules, memory.left_out
    tree = scan(root, memory)
    if (memory.files, memory.rules, memory.left_out) != before:
        memory.save(cache_path, root)
    return tree


def _send_tree(root: str, tree: Tree, connection: MachineConnection) -> None:
    missing = connection.ask("expect_code", tree=_text(tree.encode()))
    paths = {entry.content: path for path, entry in tree.entries.items() if entry.is_file}
    files = ((digest, tree.contents[digest], os.path.join(root, paths[digest])) for digest in missing)
    for piece in pack(files):
        connection.ask("take_code", piece=_text(piece))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
