# SPDX-License-Identifier: BSD-3-Clause
"""Rewrite the app that a user submits into the app that a backend runs, and derive what the backend must know of it.

Rewriting puts the host process before the rank program: ``torchrun train.py`` becomes ``python -m torchx_monarch.host
[options] -- torchrun train.py``. The rank program may be the role's command, part of the string of a ``bash -c``, or
among the arguments of a set-up script. The words of the command and the rest of the role do not change.
"""

from __future__ import annotations

import copy
import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torchx.specs import AppDef, RetryPolicy, Role, macros

from torchx_monarch.command.allocation_spec import IDLE_TIMEOUT, AllocationSpec
from torchx_monarch.command.command import HOST_MODULE, HOSTS_MODULE, Command, CommandError, check, parse
from torchx_monarch.command.shell import SimpleCommand, command_string, simple_commands
from torchx_monarch.command.template import escape, substitute
from torchx_monarch.command.torchrun_options import UNEXPANDED
from torchx_monarch.model import role_metadata
from torchx_monarch.model.host_spec import HostSpec, show_seconds
from torchx_monarch.model.role_metadata import SparesError, read_spares
from torchx_monarch.model.role_spec import MOST_REPLICAS, RoleSpec, WorkloadKind

_NPROC = "PET_NPROC_PER_NODE"
"""The variable from which torchrun takes the number of ranks if it is not typed."""

_WORKLOADS = {
    "torchrun": WorkloadKind.RANKS,
    "python": WorkloadKind.RANKS,
    "hosts": WorkloadKind.SESSION,
    "actors": WorkloadKind.RANKS,
}
"""What the hosts of a command run, by ``Command.kind``."""


@dataclass(frozen=True)
class WrapOptions:
    """The options of the host processes.

    Attributes:
        python: name or path of the Python interpreter on the hosts.
        spec: the options that the hosts of all roles share; those of one role are filled in for each role.
        rendezvous: address of replica 0 of each role, by role name; empty if all roles run on one machine. The host of
            an address is ``@`` if it is unknown before replica 0 runs.
        application: address of the first role's replica 0, on backends that end each role separately; empty for other
            backends.
        always_together: whether, on those backends, the failure of one role ends all roles whatever their retry policy,
            and the end of the first role ends all. The first role then waits for the other roles that are not sidecars.
    """

    python: str = "python"
    spec: HostSpec = HostSpec()
    rendezvous: Mapping[str, str] = field(default_factory=dict)
    application: str = ""
    always_together: bool = False


@dataclass(frozen=True)
class Rewritten:
    """The result of rewriting an app.

    Attributes:
        app: a copy of the app, with the host process before the rank command of every role that has one.
        roles: what the backend must know of each role, in the order of the app.
    """

    app: AppDef
    roles: tuple[RoleSpec, ...]


@dataclass(frozen=True)
class _RankCommand:
    """The rank command of a role, and where it begins.

    Attributes:
        command: the command.
        string: index of the argument that is a shell string with the command in it; None for other roles.
        starts: offsets of the command in that string, more than one if the shell executes one of several; otherwise the
            index of its first word in the role's words, which begin with the entrypoint.
    """

    command: Command
    string: int | None
    starts: tuple[int, ...]

    @property
    def kind(self) -> str:
        """``Command.kind``."""
        return self.command.kind

    @property
    def awaits_clients(self) -> bool:
        """Whether its hosts wait for clients."""
        return self.kind == "hosts"


def rewrite(app: AppDef, options: WrapOptions) -> Rewritten:
    """Put the host process before the rank command of every role that has one; ``app`` itself is not changed.

    The roles also get the variables that programs of all backends have.

    Raises:
        CommandError: the command of a role is invalid or not supported, or it has too many replicas; the message names
            the role.
        SidecarError: the sidecar mark of a role is invalid.
        SparesError: a role is to have spare hosts, and cannot have any.
    """
    rewritten = copy.deepcopy(app)
    commands = [_find_rank_command(role) for role in app.roles]
    # Replicas 0 of different roles connect to each other if there are several roles, and they have network addresses.
    meet = len(app.roles) > 1 and bool(options.rendezvous or options.application)
    hosts = [(role, found) for role, found in zip(app.roles, commands, strict=True) if found and meet]
    has_main = bool(hosts) and hosts[0][0] is app.roles[0]
    registry = _role_registry(hosts, options) if has_main else {}
    peer_roles = _end_together(hosts, options.always_together) if has_main and options.application else 0
    awaited = []
    if peer_roles and options.always_together:  # the first role waits for the success of all others but sidecars
        awaited = [role.name for role, _ in hosts[1:] if not role_metadata.is_sidecar(role)]
    # The meshes of a script; roles of other commands have none that it could use.
    meshes = [role.name for role, found in zip(app.roles, commands, strict=True) if found and found.awaits_clients]
    peers = ",".join(f"{name}={options.rendezvous[name]}" for name in meshes if name in options.rendezvous)
    specs = []
    for role, found in zip(rewritten.roles, commands, strict=True):
        # Python writes to a pipe in blocks; who follows a log expects lines.
        role.env.setdefault("PYTHONUNBUFFERED", "1")
        spares = _count_spares(role, found, options.spec.spares)
        if (replicas := role.num_replicas + spares) > MOST_REPLICAS:
            most = f"at most {MOST_REPLICAS} are possible"
            raise CommandError(f"role {role.name!r} has {replicas} replicas, spare hosts included; {most}")
        if found is None:
            specs.append(RoleSpec.of(role))
            continue
        rendezvous = options.rendezvous.get(role.name, "")
        spec = RoleSpec.of(role, _WORKLOADS[found.kind], rendezvous, ends_together=peer_roles > 0)
        if spares:
            fewest = found.command.fewest(role.num_replicas)
            role.num_replicas, role.min_replicas = role.num_replicas + spares, fewest
            spec = replace(spec, replicas=role.num_replicas, min_replicas=fewest, spares=spares)
        specs.append(replace(spec, stamped=options.spec.timestamps))
        own = replace(options, spec=replace(options.spec, spares=spares))
        words = _host_arguments(role, own, peers if found.kind == "actors" else "", registry, peer_roles, awaited)
        _insert(role, found, [options.python, *words])
    return Rewritten(rewritten, tuple(specs))


def _count_spares(role: Role, found: _RankCommand | None, spares: int) -> int:
    """Return the number of spare hosts of a role.

    Args:
        found: its rank command; None if it has none.

    Raises:
        SparesError: the role's metadata is invalid, or gives spare hosts to a role without ranks or runs.
    """
    given = read_spares(role)
    has_spares = found is not None and found.kind != "actors"
    if given and not has_spares:
        raise SparesError(f"role {role.name!r} has spare hosts, and it runs no ranks that could move to them")
    if given is None:
        return spares if has_spares and not role_metadata.is_sidecar(role) else 0
    return given


def _end_together(hosts: Sequence[tuple[Role, _RankCommand]], always: bool) -> int:
    """Return the number of further roles that end together with the first role; 0 if each role ends by itself.

    Roles end together if the backend always requires it, or if all of them restart together: each has the policy
    APPLICATION and retries. Roles that wait for clients never end together.
    """
    waiting = any(_WORKLOADS[found.kind] is not WorkloadKind.RANKS for _, found in hosts)
    every = all(role.retry_policy is RetryPolicy.APPLICATION and role.max_retries > 0 for role, _ in hosts)
    return len(hosts) - 1 if (always or every) and not waiting else 0


def _role_registry(hosts: Sequence[tuple[Role, _RankCommand]], options: WrapOptions) -> Mapping[str, str]:
    """Return the address of the role registry (``controller.roles``) for each role that uses it.

    Replica 0 of the first role keeps the registry. It is needed only for roles whose replica 0 has no address before it
    runs (``@``), and that have several replicas or are meshes of a script.
    """
    (main, first), *others = hosts
    has_script = first.kind == "actors"
    roles = [
        role
        for role, found in others
        if ":@:" in options.rendezvous.get(role.name, "")
        and (role.num_replicas > 1 or (has_script and found.awaits_clients))
    ]
    return {role.name: options.rendezvous[main.name] for role in (main, *roles)} if roles else {}


def hold(app: AppDef, idle_timeout: float = IDLE_TIMEOUT) -> AppDef:
    """Return a copy of ``app`` whose hosts wait for runs. A role's rank program becomes its default run command.

    Roles without a rank program do not change. The app ends with its first role; the other roles become sidecars.

    Args:
        idle_timeout: seconds without a run after which the hosts end; 0 for never.

    Raises:
        CommandError: the command of a role is invalid or not supported, or no role has a rank program; the message
            names the role.
    """
    held = copy.deepcopy(app)
    words = ["python", "-m", HOSTS_MODULE, "--idle-timeout", show_seconds(idle_timeout), "--"]
    commands = [(role, _find_rank_command(role)) for role in held.roles]
    if not any(found for _, found in commands):
        roles = ", ".join(repr(role.name) for role in held.roles) or "none"
        raise CommandError(f"no role of app {app.name!r} runs a torchrun or Python command; its roles: {roles}")
    for role, found in commands:
        if found is not None and found.kind != "hosts":
            _insert(role, found, words)
    for role in held.roles[1:]:
        role_metadata.mark_sidecar(role)
    return held


def rank_command(role: Role) -> Command | None:
    """Return the rank command of a role as submitted; None if it has none, or an invalid one."""
    try:
        found = _find_rank_command(role)
    except CommandError:
        return None
    return found.command if found is not None else None


def _find_rank_command(role: Role) -> _RankCommand | None:
    """Find the rank command of a role; None if the role has none.

    Raises:
        CommandError: the command of the role is invalid or not supported.
    """
    string = command_string(role.entrypoint, role.args)
    if string is not None:
        return _find_in_string(role, string)
    plain = [role.entrypoint, *(substitute(arg)[0] for arg in role.args)]
    for position in range(len(plain)):
        command = _command(plain[position:], role)
        if command is not None:
            # The words before it are a set-up script that executes its arguments. A torchrun among them is the rank
            # command; a plain python may be an argument with another meaning.
            return _RankCommand(command, None, (position,)) if position == 0 or command.kind != "python" else None
    return None


def _find_in_string(role: Role, string: int) -> _RankCommand | None:
    """Find the rank command of a role in the argument of this index, which is a shell string."""
    found: list[tuple[SimpleCommand, Command]] = []
    for simple in simple_commands(role.args[string]):
        # The commands before it may set the variable: `source env.sh; torchrun train.py`.
        is_alone = simple.alone and _NPROC not in role.args[string]
        command = _command([word.value for word in simple.words], role, {} if is_alone else {_NPROC: UNEXPANDED})
        if command is not None and (command.kind != "python" or simple.alone):
            found.append((simple, command))
    if not found:
        return None
    pairs = list(itertools.combinations(found, 2))
    if not all(first.excludes(other) for (first, _), (other, _) in pairs):
        raise CommandError(
            f"role {role.name!r}: the string of `{role.entrypoint} -c` holds {len(found)} torchrun commands, and a "
            "role can execute one. Make a role of each, or leave it to one torchrun to start the other."
        )
    replicas = role.num_replicas
    if any(
        (first.kind, first.fewest(replicas)) != (other.kind, other.fewest(replicas)) for (_, first), (_, other) in pairs
    ):
        raise CommandError(
            f"role {role.name!r}: the torchrun commands in the string of `{role.entrypoint} -c` need different numbers "
            "of hosts. Give them the same --nnodes."
        )
    for simple, _ in found:
        if simple.looped:
            raise CommandError(
                f"role {role.name!r}: the torchrun in the string of `{role.entrypoint} -c` is in a loop, and a "
                "role runs one. Put the loop into the script, or submit one job for each turn."
            )
    command = found[0][1]
    if len({found_command.ranks_per_host for _, found_command in found}) > 1:
        unexpanded = command.options.unexpanded | {"nproc_per_node"}
        command = replace(command, options=replace(command.options, unexpanded=unexpanded))
    return _RankCommand(command, string, tuple(simple.words[0].start for simple, _ in found))


def _insert(role: Role, found: _RankCommand, words: Sequence[str]) -> None:
    """Insert a command prefix before the rank command of a role, in place.

    Args:
        words: the prefix: the interpreter, not escaped, then words that are escaped for TorchX.
    """
    python, *options = words
    if found.string is not None:
        # The value of a macro may be a shell variable (Slurm: $SLURM_JOB_ID), which expands within double quotes.
        macro = (macros.app_id, macros.replica_id)
        quoted = [f'"{word}"' if word in macro else shlex.quote(word) for word in (escape(python), *options)]
        text = role.args[found.string]
        for start in reversed(found.starts):
            text = f"{text[:start]}{' '.join(quoted)} {text[start:]}"
        role.args[found.string] = text
    elif found.starts[0] == 0:
        role.entrypoint, role.args = python, [*options, escape(role.entrypoint), *role.args]
    else:
        role.args[found.starts[0] - 1 : found.starts[0] - 1] = [escape(python), *options]


def _command(words: Sequence[str], role: Role, more: Mapping[str, str] = MappingProxyType({})) -> Command | None:
    """Parse ``words`` and check the command against the role; return None if it starts no ranks.

    Raises:
        CommandError: the command is invalid or not supported; the message names the role.
    """
    env = {**{name: substitute(value)[0] for name, value in role.env.items()}, **more}
    try:
        command = parse(words, env)
    except CommandError as error:
        raise CommandError(f"role {role.name!r}: {error}") from None
    if command is not None:
        check(command, replicas=role.num_replicas, role=role.name)
        if command.kind == "hosts":
            AllocationSpec.of(command, env, role.num_replicas, role.name)
    return command


def _host_arguments(
    role: Role, options: WrapOptions, peers: str, registry: Mapping[str, str], peer_roles: int, awaited: Sequence[str]
) -> list[str]:
    """Return the arguments of the host process, which follow the interpreter and precede the command."""
    # TorchX or the backend fills in what these hold: an app's id, or the name of a host in it.
    placeholders = {
        "app": macros.app_id,
        "replica": macros.replica_id,
        "rendezvous": options.rendezvous.get(role.name, ""),
        "peers": peers,
        "role_registry": registry.get(role.name, ""),
        "application": options.application if peer_roles else "",
    }
    spec = replace(
        options.spec,
        role=role.name,
        replicas=role.num_replicas,
        replacements=role.max_retries if _are_replaced(role) else 0,
        peer_roles=peer_roles,
        await_role=tuple(awaited),
    )
    words = spec.to_argv(escape, {name: text for name, text in placeholders.items() if text})
    return ["-m", HOST_MODULE, *words, "--"]


def _are_replaced(role: Role) -> bool:
    """Whether the backend restarts a lost replica while the others are alive."""
    return role.retry_policy is RetryPolicy.REPLICA and role.max_retries > 0 and role.num_replicas > 1
