# SPDX-License-Identifier: BSD-3-Clause
"""Rewrite the app that a user submits into the app that a backend runs, and derive what the backend must know of it.

Rewriting puts the host process before the rank command (``rank_command``): ``torchrun train.py`` becomes ``python -m
torchx_monarch.host [options] -- torchrun train.py``. The words of the command and the rest of the role do not change.
Commands and metadata of roles that are invalid raise ``CommandError`` and ``RoleMetadataError``, which name the role.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from torchx.specs import AppDef, RetryPolicy, Role, macros

from torchx_monarch.command.command import HOST_MODULE, CommandError
from torchx_monarch.command.rank_command import RankCommand, find_rank_command
from torchx_monarch.command.shell import escape
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.model.role_spec import (
    LIGHTHOUSE_PORT,
    LOOPBACK,
    MAX_REPLICAS,
    METADATA_KEY,
    MIN_GROUPS,
    SIDECAR,
    SPARES,
    RoleMetadataError,
    RoleSpec,
    WorkloadKind,
    is_sidecar,
    read_number,
)


@dataclass(frozen=True)
class WrapOptions:
    """The options of the host processes.

    Attributes:
        python: name or path of the Python interpreter on the hosts.
        spec: the options that the hosts of all roles share; those of one role are filled in for each role.
        rendezvous: address of replica 0 of each role with hosts, by role name; empty if all share one machine.
        one_host_role: whether only the first role may have hosts (``Capabilities.one_host_role``).
        supervised: whether a supervisor runs the command for the end of the job, and not replica 0.
    """

    python: str = "python"
    spec: HostSpec = HostSpec()
    rendezvous: Mapping[str, str] = field(default_factory=dict)
    one_host_role: bool = False
    supervised: bool = False


@dataclass(frozen=True)
class Rewritten:
    """A copy of an app with the host processes before the rank commands, and the specs of its roles in their order."""

    app: AppDef
    roles: tuple[RoleSpec, ...]


@dataclass(frozen=True)
class _Coordination:
    """What the roles of an app need of each other.

    Attributes:
        server: the role with whose replica 0 those of the other roles connect (``controller.roles``); empty for none.
        address: where it listens.
        peer_roles: how many these are.
        meshes: the meshes of a controller's script with their addresses, as ``--peers`` has them.
    """

    server: str = ""
    address: str = ""
    peer_roles: int = 0
    meshes: str = ""

    @classmethod
    def from_app(cls, app: AppDef, commands: Sequence[RankCommand | None], options: WrapOptions) -> _Coordination:
        """Derive it from the roles of an app and their rank commands."""
        hosts = [(role, found) for role, found in zip(app.roles, commands, strict=True) if found]
        # Roles of other commands have no mesh that a script could use.
        waiting = [role.name for role, found in hosts if found.command.kind == "hosts"]
        meshes = ",".join(f"{name}={options.rendezvous[name]}" for name in waiting if name in options.rendezvous)
        # Roles that wait for clients never end together.
        if waiting or len(hosts) < 2 or not _end_together([role for role, _ in hosts]):
            return cls(meshes=meshes)
        first = hosts[0][0]
        local = f"unix:@MONARCH_RUN_DIR/{app.roles.index(first)}.sock"  # in a folder that only the hosts know
        return cls(first.name, options.rendezvous.get(first.name, local), len(hosts) - 1, meshes)


def _end_together(roles: Sequence[Role]) -> bool:
    """Return whether the failure of one role ends all of them: they start again together, or none of them does."""
    if any(read_number(role, MIN_GROUPS) for role in roles):
        return False
    is_restarted = {role.max_retries > 0 for role in roles}
    return is_restarted == {False} or (
        is_restarted == {True} and all(role.retry_policy is RetryPolicy.APPLICATION for role in roles)
    )


def rewrite(app: AppDef, options: WrapOptions) -> Rewritten:
    """Put the host process before the rank command of every role that has one; ``app`` itself is not changed.

    The roles also get the variables that programs of all backends have.
    """
    rewritten = resolved(app)
    commands = [find_rank_command(role) for role in rewritten.roles]
    if options.one_host_role:
        for role, found in zip(app.roles[1:], commands[1:], strict=True):
            _check_other_role(role, found, app)
        commands[1:] = [None for _ in commands[1:]]
    coordination = _Coordination.from_app(app, commands, options)
    lighthouse = _publish_lighthouse(rewritten, options)
    pairs = zip(rewritten.roles, commands, strict=True)
    specs = [
        _wrap(role, found, options, coordination, lighthouse, is_first=index == 0)
        for index, (role, found) in enumerate(pairs)
    ]
    if specs:
        specs[0] = replace(specs[0], on_end=options.spec.on_end)
    return Rewritten(rewritten, tuple(specs))


def resolved(app: AppDef) -> AppDef:
    """Return a copy of an app, in whose roles the fields have the values that ``Role.overrides`` gives them."""
    roles = []
    for role in app.roles:
        values = {declared.name: getattr(role, declared.name) for declared in fields(role)}
        role = copy.copy(role)
        role.overrides = {}
        vars(role).update({name: value for name, value in values.items() if name != "overrides"})
        roles.append(role)
    return copy.deepcopy(replace(app, roles=roles))


def _check_other_role(role: Role, found: RankCommand | None, app: AppDef) -> None:
    """Check a role that is not the first, where only that one has hosts: a sidecar runs without them."""
    if found is None:
        return
    needs_none = found.command.kind == "python" or (found.command.kind == "torchrun" and role.num_replicas == 1)
    if is_sidecar(role) and needs_none:
        return
    raise CommandError(
        f"role {role.name!r} needs hosts, and this scheduler has them in the first role alone ({app.roles[0].name!r}), "
        "because replicas learn no other role's address. Other monarch_* schedulers, such as monarch_slurm and "
        f"monarch_kubernetes, have them in all roles. Here, submit {role.name!r} as an app of its own or, if it is one "
        f"process that the others can do without, as a sidecar: metadata={{{METADATA_KEY!r}: {{{SIDECAR!r}: True}}}}"
    )


def _publish_lighthouse(app: AppDef, options: WrapOptions) -> str:
    """Have torchft's lighthouse listen for other machines, if hosts run on several; return its address for them.

    The component has it listen on the loopback interface, and gives groups that address (``monarch.ft``).
    """
    for role in app.roles:
        if (port := read_number(role, LIGHTHOUSE_PORT)) and options.rendezvous:
            if role.name not in options.rendezvous:
                raise CommandError(f"on this scheduler no role learns the address of the role {role.name!r}")
            host = options.rendezvous[role.name].partition(":")[2].rpartition(":")[0]
            role.args = [f"0.0.0.0:{port}" if word == f"{LOOPBACK}:{port}" else word for word in role.args]
            return f"{host}:{port}"
    return ""


def _wrap(
    role: Role,
    found: RankCommand | None,
    options: WrapOptions,
    coordination: _Coordination,
    lighthouse: str,
    *,
    is_first: bool,
) -> RoleSpec:
    """Put the host process before the rank command of a role, in place; return what the backend must know of it."""
    # Python writes to a pipe in blocks; who follows a log expects lines.
    role.env.setdefault("PYTHONUNBUFFERED", "1")
    spares = _count_spares(role, found, options.spec.spares)
    if (replicas := role.num_replicas + spares) > MAX_REPLICAS:
        allowed = f"at most {MAX_REPLICAS} are possible"
        raise CommandError(f"role {role.name!r} has {replicas} replicas, spare hosts included; {allowed}")
    if found is None:
        return RoleSpec.from_role(role)
    rendezvous = options.rendezvous.get(role.name, "")
    if spares:
        role.num_replicas, role.min_replicas = replicas, found.command.fewest(role.num_replicas)
    # A lost replica is replaced while the others are alive.
    is_replaced = role.retry_policy is RetryPolicy.REPLICA and role.num_replicas > 1
    host = replace(
        options.spec,
        role=role.name,
        replicas=role.num_replicas,
        spares=spares,
        replacements=max(0, role.max_retries) if is_replaced else 0,
        peer_roles=coordination.peer_roles if role.name == coordination.server else 0,
        interpreter="path" if found.sets_path else "own",
        on_end="" if options.supervised or not is_first else options.spec.on_end,
    )
    # TorchX or the backend fills in what these hold: an app's id, or the name of a host in it.
    placeholders = {
        "app": macros.app_id,
        "replica": macros.replica_id,
        "rendezvous": rendezvous,
        "peers": coordination.meshes if found.command.kind == "actors" else "",
        "application": coordination.address if role.name != coordination.server else "",
        "lighthouse": lighthouse if read_number(role, MIN_GROUPS) else "",
    }
    words = host.to_argv(escape, {name: text for name, text in placeholders.items() if text})
    insert_words(role, found, [options.python, "-m", HOST_MODULE, *words, "--"])
    return RoleSpec.from_role(
        role,
        workload=WorkloadKind.SESSION if found.command.kind == "hosts" else WorkloadKind.RANKS,
        rendezvous=rendezvous,
        ends_together=coordination.peer_roles > 0,
        spares=spares,
    )


def _count_spares(role: Role, found: RankCommand | None, spares: int) -> int:
    given = read_number(role, SPARES)
    has_spares = found is not None and found.command.kind != "actors"
    if given and not has_spares:
        raise RoleMetadataError(f"role {role.name!r} has spare hosts, and it runs no ranks that could move to them")
    if given is None:
        return spares if has_spares and not is_sidecar(role) else 0
    return given


def insert_words(role: Role, found: RankCommand, words: Sequence[str]) -> None:
    """Insert the interpreter, and words escaped for TorchX, before the rank command of a role, in place."""
    if found.is_renamed:  # Python finds its environment by its name
        words = ["env", *words]
    python, *options = words
    if found.string is not None:
        # The value of a macro may be a shell variable (Slurm: $SLURM_JOB_ID), which expands within double quotes.
        macro = (macros.app_id, macros.replica_id)
        quoted = [f'"{word}"' if word in macro else shlex.quote(word) for word in (escape(python), *options)]
        text = role.args[found.string]
        role.args[found.string] = f"{text[: found.start]}{' '.join(quoted)} {text[found.start :]}"
    elif found.start == 0:
        role.entrypoint, role.args = python, [*options, escape(role.entrypoint), *role.args]
    else:
        role.args[found.start - 1 : found.start - 1] = [escape(python), *options]
