# SPDX-License-Identifier: BSD-3-Clause
"""Run an app on the hosts of a live allocation instead of hosts of its own (run option ``on``).

The app becomes one process of this machine, `torchx monarch exec --queue`, which submits the app's command as a run,
follows it, and adds the run's events to its own. So the app has a handle, logs, status, an exit code, retries and a
place in lists as any other. Who asks what its ranks do asks the hosts of the allocation (``Hosts.of_ranks``).
"""

from __future__ import annotations

import os
from dataclasses import fields, replace

from torchx.specs import AppDef, Role, parse_app_handle
from torchx.specs.api import MalformedAppHandleException

from torchx_monarch.backends.core.errors import BackendError, UserError
from torchx_monarch.backends.core.options import MonarchOpts, is_default_image
from torchx_monarch.backends.core.snapshot import AppSnapshot
from torchx_monarch.backends.core.state_files import path_name
from torchx_monarch.command.rank_command import find_rank_command
from torchx_monarch.command.rewrite import Rewritten, insert_words, resolved
from torchx_monarch.command.shell import escape
from torchx_monarch.model.host_spec import FLAGS
from torchx_monarch.model.role_spec import SPARES, RoleSpec, WorkloadKind, is_sidecar, read_number
from torchx_monarch.schedulers import recorded_apps
from torchx_monarch.schedulers.job_status import log_folder
from torchx_monarch.schedulers.monarch import opened
from torchx_monarch.schedulers.run_options import with_stored

_TO_GET_ONE = "To get one: torchx run -s monarch_local monarch.hosts -j 1x4"


def run_on_allocation(app: AppDef, options: MonarchOpts, python: str) -> Rewritten:
    """Return an app of one process that runs the command of an app on the hosts of a live allocation.

    Args:
        options: ``on`` names the allocation: its handle, id or name, the beginning of one, or ``last`` for the newest.
        python: the interpreter of this package, for the process.

    Raises:
        UserError: there is no such allocation, or the app or an option asks for what its hosts are not.
    """
    _check_options(options)
    rewritten = resolved(app)
    others = [role.name for role in rewritten.roles[1:]]
    if others or not rewritten.roles or is_sidecar(rewritten.roles[0]):
        reason = f"also has {', '.join(others)}" if others else "has none, or a sidecar"
        raise UserError(f"Run option `on` is for an app of one role, and app {app.name!r} {reason}")
    role = rewritten.roles[0]
    found = find_rank_command(role)
    is_ranks = found is not None and found.command.kind in ("torchrun", "python")
    if found is None or not is_ranks or found.place.runners or not found.place.is_alone:
        command = " ".join([role.entrypoint, *role.args])
        raise UserError(
            f"role {role.name!r}: a live allocation runs torchrun and Python commands, with nothing beside them, and "
            f"not {command!r:.200}. Leave out the run option `on`"
        )
    handle, allocation = _allocation(options["on"])
    _check_fits(role, handle, allocation)
    variables = [option for name in role.env for option in ("--env", name)]
    words = [python, "-m", "torchx_monarch.cli.main", "exec", escape(handle), "--queue", "--as-job", *variables, "--"]
    insert_words(role, found, words)
    role.num_replicas, role.min_replicas = 1, None
    role.resource = replace(role.resource, gpu=0)  # the process needs none of this machine
    logs = log_folder(allocation)[0]
    spec = RoleSpec.from_role(
        role,
        unwrapped=f"its ranks run on the hosts of {handle}",
        allocation=handle,
        allocation_logs=os.path.join(logs, path_name(allocation.roles[0].spec.name)) if logs else "",
        on_end=options.on_end,
    )
    return Rewritten(rewritten, (spec,))


def _check_options(options: MonarchOpts) -> None:
    """Check that no option of hosts was given, but in a ``.torchxconfig``, which has it for other jobs."""
    stored = with_stored({}, recorded_apps.LOCAL)
    for option in fields(MonarchOpts):
        name, value = option.name, getattr(options, option.name)
        if name in FLAGS.keys() - {"grace", "on_end"} and value not in (option.default, stored.get(name)):
            wrong = f"Run option `{name}` is {value}: with `on` it is that of the allocation"
            raise UserError(f"{wrong}. Leave it out, or give it to monarch.hosts: torchx run -cfg {name}={value} …")


def _allocation(word: str) -> tuple[str, AppSnapshot]:
    """Return the handle and the state of the live allocation that a word names."""
    if word == recorded_apps.LAST:
        unusable = set[str]()  # such as that of a cluster that does not answer
        for app in recorded_apps.recorded_apps():
            if app.scheduler in unusable:
                continue
            try:
                newest = _read(app.handle)
            except (BackendError, UserError):
                unusable.add(app.scheduler)
                continue
            if newest is not None and _is_allocation(newest):
                return app.handle, newest
        raise UserError(f"Run option `on` is last, and no live allocation is running. {_TO_GET_ONE}")
    handles = [word] if "://" in word else [app.handle for app in recorded_apps.named(word)]
    if len(handles) != 1:
        known = f"may be one of {', '.join(handles[:8])}" if handles else "names no app; `torchx monarch ls` lists all"
        raise UserError(f"Run option `on` is {word!r}, which {known}")
    found = _read(handles[0])
    if found is None:
        raise UserError(f"Run option `on` is {word!r}: {handles[0]} does not run. {_TO_GET_ONE}")
    if not _is_allocation(found):
        raise UserError(f"Run option `on` is {word!r}: {handles[0]} is no live allocation. {_TO_GET_ONE}")
    return handles[0], found


def _read(handle: str) -> AppSnapshot | None:
    """Return the state of an app; None if it does not exist, or has ended."""
    try:
        name, _, app_id = parse_app_handle(handle)
    except MalformedAppHandleException:
        raise UserError(f"Run option `on` is {handle!r}; a handle is SCHEDULER://SESSION/APP") from None
    with opened(name) as scheduler:
        found = scheduler.apps.read(app_id, brief=True)
    return None if found is None or found[1].state.is_terminal else found[0]


def _is_allocation(app: AppSnapshot) -> bool:
    return bool(app.roles) and app.roles[0].spec.workload is WorkloadKind.ALLOCATION


def _check_fits(role: Role, handle: str, allocation: AppSnapshot) -> None:
    """Check that a role asks for nothing that the hosts of an allocation are not."""
    spec = allocation.roles[0].spec
    wanted, present = role.num_replicas, spec.replicas - spec.spares
    if wanted != present:
        raise _unfit(role, handle, f"has {wanted} hosts", f"there are {present}")
    if spares := read_number(role, SPARES):
        raise _unfit(role, handle, f"has {spares} spare hosts", f"the allocation has {spec.spares} of its own")
    if allocation.app is None:
        return
    hosts = allocation.app.roles[0]
    for name in ("gpu", "cpu", "memMB"):
        asked, given = getattr(role.resource, name), getattr(hosts.resource, name)
        if asked > max(0, given):
            raise _unfit(role, handle, f"asks for {name} {asked}", f"a host has {given}")
    if role.mounts != hosts.mounts:
        raise _unfit(role, handle, f"has the mounts {role.mounts}", f"the hosts have {hosts.mounts or 'none'}")
    is_local = handle.startswith(f"{recorded_apps.LOCAL}://")
    if not is_local and role.image and not is_default_image(role.image) and role.image != hosts.image:
        raise _unfit(role, handle, f"has the image {role.image}", f"the hosts run {hosts.image or 'without one'}")


def _unfit(role: Role, handle: str, wanted: str, present: str) -> UserError:
    advice = "Change it, take another allocation, or leave out the run option `on`"
    return UserError(f"role {role.name!r} {wanted}, and on {handle} {present}. {advice}")
