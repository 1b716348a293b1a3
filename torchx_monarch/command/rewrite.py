# SPDX-License-Identifier: BSD-3-Clause
"""Rewrite the app that a user submits into the app that a backend runs, and derive what the backend must know of it.

Rewriting puts the host process before the rank command (``rank_command``): ``torchrun train.py`` becomes ``python -m
torchx_monarch.host [options] -- torchrun train.py``. The words of the command and the rest of the role do not change.
Commands and metadata of roles that are invalid raise ``CommandError``, which names the role.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from torchx.specs import AppDef, RetryPolicy, Role, macros

from torchx_monarch.command.command import HOST_MODULE, CommandError
from torchx_monarch.command.rank_command import RankCommand, find_rank_command, launchers
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
    WRAP,
    RoleSpec,
    WorkloadKind,
    is_sidecar,
    read_bool,
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
        in_images: whether roles run in container images, which may lack this package.
        supervised: whether a supervisor runs the command for the end of the job, and not replica 0.
    """

    python: str = "python"
    spec: HostSpec = HostSpec()
    rendezvous: Mapping[str, str] = field(default_factory=dict)
    one_host_role: bool = False
    in_images: bool = False
    supervised: bool = False


@dataclass(frozen=True)
class Rewritten:
    """A copy of an app with the host processes before the commands, and the specs of its roles in their order."""

    app: AppDef
    roles: tuple[RoleSpec, ...]


@dataclass(frozen=True)
class _Start:
    """How the replicas of a role start.

    Attributes:
        found: its rank command; None for any other command.
        unwrapped: why they have no host process; empty if they have one.
    """

    role: Role
    found: RankCommand | None
    unwrapped: str

    @property
    def kind(self) -> str:
        """The kind of the rank command; empty for any other command."""
        return self.found.command.kind if self.found is not None else ""


@dataclass(frozen=True)
class _Coordination:
    """What the roles of an app need of each other.

    Attributes:
        joint: the roles that end together. The replicas 0 of all but the first one connect to that of the first
            (``controller.roles``).
        sidecars: whether all others are sidecars of the first one, and the app has no further role to wait for.
        address: where the first one listens.
        meshes: the meshes of a controller's script with their addresses, as ``--peers`` has them.
    """

    joint: Sequence[str] = ()
    sidecars: bool = False
    address: str = ""
    meshes: str = ""

    @classmethod
    def from_starts(cls, starts: Sequence[_Start], options: WrapOptions) -> _Coordination:
        """Derive it from how the roles of an app start."""
        hosts = {start.role.name: start for start in starts if not start.unwrapped}
        waiting = [name for name, start in hosts.items() if start.kind == "hosts"]
        meshes = ",".join(f"{name}={options.rendezvous[name]}" for name in waiting if name in options.rendezvous)
        needed = [start.role.name for start in starts if not is_sidecar(start.role)]
        joint = sorted(_joint([start.role for start in hosts.values()]), key=lambda name: name not in needed)
        sidecars = needed == joint[:1]
        # Hosts that wait for clients are replaced one by one.
        are_replaced = bool(waiting) and any(start.role.max_retries > 0 for start in starts)
        if len(joint) < 2 or are_replaced or (waiting and not sidecars):
            return cls(meshes=meshes)
        # In a folder that only the hosts know.
        local = f"unix:@MONARCH_RUN_DIR/{starts.index(hosts[joint[0]])}.sock"
        return cls(joint, sidecars, options.rendezvous.get(joint[0], local), meshes)


def _joint(roles: Sequence[Role]) -> list[str]:
    """Return the roles of which the failure of one ends all: no role restarts, or these restart together."""
    if any(read_number(role, MIN_GROUPS) for role in roles):
        return []
    is_restarted = any(role.max_retries > 0 for role in roles)
    return [role.name for role in roles if not is_restarted or _restarts_app(role)]


def _restarts_app(role: Role) -> bool:
    return role.retry_policy is RetryPolicy.APPLICATION and role.max_retries > 0


def rewrite(app: AppDef, options: WrapOptions) -> Rewritten:
    """Put the host process before the command of every role that is to have one; ``app`` itself is not changed.

    The roles also get the variables that programs of all backends have.
    """
    rewritten = resolved(app)
    starts = []
    for index, role in enumerate(rewritten.roles):
        found = find_rank_command(role)
        for name, same in launchers(role) if role.num_replicas > 1 else ():
            raise CommandError(
                f"role {role.name!r}: `{name}` would start the ranks on each of {role.num_replicas} hosts, as if that "
                f"were the only one. Type `monarch.spmd {same}`, or give it --machine_rank (--node_rank) and its like"
            )
        starts.append(_Start(role, found, _why_unwrapped(role, found, rewritten, options, is_first=index == 0)))
    if not options.one_host_role:
        _check_retries(starts)
    coordination = _Coordination.from_starts(starts, options)
    lighthouse = _publish_lighthouse(rewritten, options)
    specs = [_wrap(start, options, coordination, lighthouse, is_first=index == 0) for index, start in enumerate(starts)]
    if specs:
        specs[0] = replace(specs[0], on_end=options.spec.on_end)
    return Rewritten(rewritten, tuple(specs))


def _why_unwrapped(role: Role, found: RankCommand | None, app: AppDef, options: WrapOptions, *, is_first: bool) -> str:
    """Return why the replicas of a role run their command without a host process; empty if they have one."""
    wrap = read_bool(role, WRAP)
    if wrap is False:
        return f"its metadata has {WRAP!r}: False"
    if options.one_host_role and not is_first:
        _check_other_role(role, found, app, wrap)
        return "this scheduler has hosts in the first role alone"
    if wrap or found is not None:
        return ""
    if is_sidecar(role):
        return "it is a sidecar that runs no ranks"
    return (
        f"its image may lack torchx-monarch; one that has it says so by {_setting(WRAP)}" if options.in_images else ""
    )


def _setting(name: str) -> str:
    return f"metadata={{{METADATA_KEY!r}: {{{name!r}: True}}}}"


def _check_retries(starts: Sequence[_Start]) -> None:
    """Check the retry policies of roles whose replicas, without a host process, can only restart one by one."""
    needed = [start for start in starts if not is_sidecar(start.role)]
    for role, unwrapped in ((start.role, start.unwrapped) for start in needed):
        if not unwrapped or role.max_retries <= 0 or role.retry_policy is RetryPolicy.REPLICA:
            continue
        others = [start.role.name for start in needed if _restarts_app(start.role) and start.role is not role]
        works = RetryPolicy.REPLICA if role.num_replicas > 1 else RetryPolicy.ROLE
        if role.num_replicas > 1 or (_restarts_app(role) and others):
            raise CommandError(
                f"role {role.name!r} cannot restart by RetryPolicy.{role.retry_policy.name}: each of its replicas "
                f"restarts alone, because it has no host process ({unwrapped}). Use RetryPolicy.{works.name}"
            )


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


def _check_other_role(role: Role, found: RankCommand | None, app: AppDef, wrap: bool | None) -> None:
    """Check a role that is not the first, where only that one has hosts: a sidecar runs without them."""
    if found is None and not wrap:
        return
    kind = found.command.kind if found is not None else "python"
    needs_none = kind == "python" or (kind == "torchrun" and role.num_replicas == 1)
    if is_sidecar(role) and needs_none and not wrap:
        return
    here = ""
    if not is_sidecar(role) and not read_number(role, MIN_GROUPS):  # a mesh or a group is of no use alone
        here = (
            f". Here, submit {role.name!r} as an app of its own or, if it is one process that the others can do "
            f"without, as a sidecar: {_setting(SIDECAR)}"
        )
    raise CommandError(
        f"role {role.name!r} needs hosts, and this scheduler has them in the first role alone ({app.roles[0].name!r}), "
        "because replicas learn no other role's address. Other monarch_* schedulers, such as monarch_slurm and "
        f"monarch_kubernetes, have them in all roles{here}"
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
    start: _Start, options: WrapOptions, coordination: _Coordination, lighthouse: str, *, is_first: bool
) -> RoleSpec:
    """Put the host process before the command of a role, in place; return what the backend must know of it."""
    role, found = start.role, start.found
    # Python writes to a pipe in blocks; who follows a log expects lines.
    role.env.setdefault("PYTHONUNBUFFERED", "1")
    spares = _count_spares(start, options.spec.spares)
    if (replicas := role.num_replicas + spares) > MAX_REPLICAS:
        most = f"at most {MAX_REPLICAS} are possible"
        raise CommandError(f"role {role.name!r} has {replicas} replicas, spare hosts included; {most}")
    if start.unwrapped:
        return RoleSpec.from_role(role, unwrapped=start.unwrapped)
    workload = WorkloadKind.ALLOCATION if start.kind == "hosts" else WorkloadKind.RANKS
    if found is None:
        workload = WorkloadKind.COMMAND
    elif spares:
        role.num_replicas, role.min_replicas = replicas, found.command.min_nodes(role.num_replicas)
    elif options.spec.slow_hosts == "replace" and found.command.min_nodes(replicas) == replicas:
        raise CommandError(
            f"role {role.name!r} has no spare host that could replace a slow one: use spares=1, or -j 4+1x8, with "
            "slow_hosts=replace"
        )
    rendezvous, is_joint = options.rendezvous.get(role.name, ""), role.name in coordination.joint
    spec = RoleSpec.from_role(role, workload=workload, rendezvous=rendezvous, ends_together=is_joint, spares=spares)
    is_server, is_command = is_joint and role.name == coordination.joint[0], found is None
    retries, has_peers = max(0, role.max_retries), spec.replicas > 1 or is_joint
    together = is_command and retries > 0 and has_peers and not spec.restarts_alone
    host = replace(
        options.spec,
        role=role.name,
        replicas=spec.replicas,
        spares=spares,
        replacements=retries if spec.restarts_alone else 0,
        workload="command" if is_command else "ranks",
        starts="together" if together else "alone",
        min_replicas=spec.min_replicas or 0 if is_command and spec.is_elastic else 0,
        peer_roles=len(coordination.joint) - 1 if is_server and not coordination.sidecars else 0,
        sidecar="on" if is_joint and not is_server and coordination.sidecars else "off",
        interpreter="path" if found is not None and found.place.sets_path else "own",
        on_end="" if options.supervised or not is_first else options.spec.on_end,
    )
    # TorchX or the backend fills in what these hold: an app's id, or the name of a host in it.
    placeholders = {
        "app": macros.app_id,
        "replica": macros.replica_id,
        "rendezvous": rendezvous,
        "peers": coordination.meshes if start.kind == "actors" else "",
        "application": coordination.address if is_joint and not is_server else "",
        "lighthouse": lighthouse if read_number(role, MIN_GROUPS) else "",
    }
    words = host.to_argv(escape, {name: text for name, text in placeholders.items() if text})
    words = [options.python, "-m", HOST_MODULE, *words, "--"]
    if found is None:
        role.entrypoint, role.args = words[0], [*words[1:], escape(role.entrypoint), *role.args]
    else:
        insert_words(role, found, words)
    return spec


def _count_spares(start: _Start, spares: int) -> int:
    role = start.role
    given = read_number(role, SPARES)
    has_spares = start.found is not None and not start.unwrapped and start.kind != "actors"
    if given and not has_spares:
        raise CommandError(f"role {role.name!r} has spare hosts, and it runs no ranks that could move to them")
    if given is None:
        return spares if has_spares and not is_sidecar(role) else 0
    return given


def insert_words(role: Role, found: RankCommand, words: Sequence[str]) -> None:
    """Insert the interpreter, and words escaped for TorchX, before the rank command of a role, in place."""
    place = found.place
    if place.position.is_renamed:  # Python finds its environment by its name
        words = ["env", *words]
    python, *options = words
    if place.string is not None:
        # The value of a macro may be a shell variable (Slurm: $SLURM_JOB_ID), which expands within double quotes.
        macro = (macros.app_id, macros.replica_id)
        quoted = [f'"{word}"' if word in macro else shlex.quote(word) for word in (escape(python), *options)]
        text = role.args[place.string]
        role.args[place.string] = f"{text[: place.start]}{' '.join(quoted)} {text[place.start :]}"
    elif place.start == 0:
        role.entrypoint, role.args = python, [*options, escape(role.entrypoint), *role.args]
    else:
        role.args[place.start - 1 : place.start - 1] = [escape(python), *options]
