# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rewrite the app that a user submits into the app that a backend runs, and back.

Rewriting puts the host process before the rank program: ``torchrun train.py`` becomes ``python -m torchx_monarch.host
[options] -- torchrun train.py``. The rank program may be the role's command, part of the string of a ``bash -c``, or
among the arguments of a set-up script. The words of the command and the rest of the role do not change.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchx.specs import AppDef, RetryPolicy, Role, macros

from torchx_monarch.command.actors import is_actors
from torchx_monarch.command.allocation_spec import IDLE_TIMEOUT, AllocationSpec
from torchx_monarch.command.command import ACTORS_MODULE, HOST_MODULE, HOSTS_MODULE, Command, CommandError, check, parse
from torchx_monarch.command.shell import SimpleCommand, command_string, simple_commands
from torchx_monarch.command.template import escape, substitute, unescape
from torchx_monarch.model import sidecars
from torchx_monarch.model.host_spec import HostSpec, show_seconds


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


def rewrite(app: AppDef, options: WrapOptions) -> AppDef:
    """Return a copy of ``app`` in which the host process starts the rank program of every role that has one.

    Raises:
        CommandError: the command of a role is invalid or not supported; the message names the role.
    """
    rewritten = copy.deepcopy(app)
    # Replicas 0 of different roles connect to each other if there are several roles, and they have network addresses.
    meet = len(app.roles) > 1 and bool(options.rendezvous or options.application)
    ranks = [role for role in app.roles if _runs_ranks(role)] if meet else []
    has_main = bool(ranks) and ranks[0] is app.roles[0]
    registry = _role_registry(ranks, options) if has_main else {}
    peer_roles = _end_together(ranks, options.always_together) if has_main and options.application else 0
    awaited = _awaited(ranks[1:]) if peer_roles and options.always_together else []
    for role in rewritten.roles:
        wrap_role(role, options.python, _host_arguments(role, options, registry, peer_roles, awaited))
    return rewritten


def _end_together(ranks: Sequence[Role], always: bool) -> int:
    """Return the number of further rank roles that end together with the first role; 0 if each role ends by itself.

    Roles end together if the backend always requires it, or if all of them restart together: each has the policy
    APPLICATION and retries. Roles that wait for runs or actors never end together.
    """
    waiting = any(module in word for role in ranks for word in role.args for module in (HOSTS_MODULE, ACTORS_MODULE))
    every = all(role.retry_policy is RetryPolicy.APPLICATION and role.max_retries > 0 for role in ranks)
    return len(ranks) - 1 if (always or every) and not waiting else 0


def _awaited(others: Sequence[Role]) -> list[str]:
    """Return the names of the roles whose success the first role waits for: all but sidecars."""
    return [role.name for role in others if not sidecars.is_sidecar(role)]


def _role_registry(ranks: Sequence[Role], options: WrapOptions) -> Mapping[str, str]:
    """Return the address of the role registry (``controller.roles``) for each role that uses it.

    Replica 0 of the first rank role keeps the registry. It is needed only for roles whose replica 0 has no address
    before it runs (``@``), and that have several replicas or run actors.
    """
    main, *others = ranks
    roles = [
        role
        for role in others
        if ":@:" in options.rendezvous.get(role.name, "")
        and (role.num_replicas > 1 or is_actors([role.entrypoint, *role.args]))
    ]
    return {role.name: options.rendezvous[main.name] for role in (main, *roles)} if roles else {}


def _runs_ranks(role: Role) -> bool:
    return wrap_role(copy.deepcopy(role), "python", ["-m", HOST_MODULE, "--"])


def hold(app: AppDef, idle_timeout: float = IDLE_TIMEOUT, python: str = "python") -> AppDef:
    """Return a copy of ``app`` whose hosts wait for runs. A role's rank program becomes its default run command.

    Roles without a rank program do not change. The app ends with its first role; the other roles become sidecars.

    Args:
        app: the app, which is not changed.
        idle_timeout: seconds without a run after which the hosts end; 0 for never.
        python: the Python interpreter named in the command; the scheduler chooses that of the host processes.

    Raises:
        CommandError: the command of a role is invalid or not supported, or no role has a rank program; the message
            names the role.
    """
    held = copy.deepcopy(app)
    words = ["-m", HOSTS_MODULE, "--idle-timeout", show_seconds(idle_timeout), "--"]
    found = [wrap_role(role, python, words, but="hosts") for role in held.roles]
    if not any(found):
        roles = ", ".join(repr(role.name) for role in held.roles) or "none"
        raise CommandError(f"no role of app {app.name!r} runs a torchrun or Python command; its roles: {roles}")
    for role in held.roles[1:]:
        sidecars.mark(role)
    return held


def restore(role: Role) -> Role:
    """Return a copy of ``role`` as it was before :func:`rewrite`; an equal copy if it was not rewritten."""
    restored = copy.deepcopy(role)
    string = command_string(role.entrypoint, role.args)
    if string is not None:
        restored.args[string] = _restore_string(role.args[string])
        return restored
    argv = [escape(role.entrypoint), *role.args]
    for start in range(len(argv)):
        end = _host_words(argv[start:])
        if end is not None:
            argv[start : start + end] = []
            restored.entrypoint, restored.args = unescape(argv[0]), argv[1:]
            break
    return restored


def wrap_role(role: Role, python: str, words: Sequence[str], but: str = "") -> bool:
    """Insert a command prefix before the rank program of a role, in place.

    Args:
        role: the role.
        python: first word of the prefix, not escaped.
        words: further words of the prefix, escaped for TorchX.
        but: kind of command that is not wrapped; empty to wrap all.

    Returns:
        Whether the role has a rank program.

    Raises:
        CommandError: the command of the role is invalid or not supported.
    """
    string = command_string(role.entrypoint, role.args)
    if string is not None:
        return _wrap_string(role, string, [escape(python), *words], but)
    plain = [role.entrypoint, *(substitute(arg)[0] for arg in role.args)]
    if (command := _command(plain, role)) is not None:
        if command.kind != but:
            role.entrypoint, role.args = python, [*words, escape(role.entrypoint), *role.args]
        return True
    for position in range(len(role.args)):
        command_found = _command(plain[position + 1 :], role)
        if command_found is not None:
            # A set-up script that executes its arguments. A torchrun among them is the rank program; a plain python may
            # be an argument with another meaning.
            if command_found.kind not in ("python", but):
                role.args[position:position] = [escape(python), *words]
            return command_found.kind != "python"
    return False


def _wrap_string(role: Role, string: int, words: Sequence[str], but: str) -> bool:
    text = role.args[string]
    found = _rank_commands(text, role)
    if len(found) > 1:
        raise CommandError(
            f"role {role.name!r}: the string of `{role.entrypoint} -c` holds {len(found)} torchrun commands, and a "
            "role can hold one. Make a role of each, or leave it to one torchrun to start the other."
        )
    for simple, kind in found:
        if simple.looped:
            raise CommandError(
                f"role {role.name!r}: the torchrun in the string of `{role.entrypoint} -c` is in a loop, and a "
                "role runs one. Put the loop into the script, or submit one job for each turn."
            )
        if kind == but:
            continue
        start = simple.words[0].start
        # The value of a macro may be a shell variable (Slurm: $SLURM_JOB_ID), which expands within double quotes.
        quoted = [f'"{word}"' if word in (macros.app_id, macros.replica_id) else shlex.quote(word) for word in words]
        role.args[string] = f"{text[:start]}{' '.join(quoted)} {text[start:]}"
    return bool(found)


def _rank_commands(text: str, role: Role) -> list[tuple[SimpleCommand, str]]:
    """Find the rank programs in a shell string, each with the kind of its command."""
    found: list[tuple[SimpleCommand, str]] = []
    for simple in simple_commands(text):
        command = _command([word.value for word in simple.words], role)
        if command is not None and (command.kind != "python" or simple.alone):
            found.append((simple, command.kind))
    return found


def _restore_string(text: str) -> str:
    for simple in simple_commands(text):
        end = _host_words([word.value for word in simple.words])
        if end is not None:
            return text[: simple.words[0].start] + text[simple.words[end].start :]
    return text


def _command(words: Sequence[str], role: Role) -> Command | None:
    """Parse ``words`` and check the command against the role; return None if it starts no ranks.

    Raises:
        CommandError: the command is invalid or not supported; the message names the role.
    """
    env = {name: substitute(value)[0] for name, value in role.env.items()}
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
    role: Role, options: WrapOptions, registry: Mapping[str, str], peer_roles: int, awaited: Sequence[str]
) -> list[str]:
    """Return the arguments of the host process, which follow the interpreter and precede the command."""
    rendezvous = options.rendezvous.get(role.name, "")
    is_for_actors = bool(options.rendezvous) and is_actors([role.entrypoint, *role.args])
    # TorchX or the backend fills in what these hold: an app's id, or the name of a host in it.
    placeholders = {
        "app": macros.app_id,
        "replica": macros.replica_id,
        "rendezvous": rendezvous,
        "peers": _peers(options) if is_for_actors else "",
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


def _peers(options: WrapOptions) -> str:
    return ",".join(f"{name}={rendezvous}" for name, rendezvous in options.rendezvous.items())


def _are_replaced(role: Role) -> bool:
    """Whether the backend restarts a lost replica while the others are alive."""
    return role.retry_policy is RetryPolicy.REPLICA and role.max_retries > 0 and role.num_replicas > 1


def _host_words(argv: Sequence[str]) -> int | None:
    """Return the number of words that :func:`rewrite` put before the command; None if ``argv`` is not wrapped."""
    if tuple(argv[1:3]) != ("-m", HOST_MODULE):
        return None
    end = 3
    while end < len(argv) and argv[end] != "--":
        end += 2
    return end + 1 if end + 1 < len(argv) else None
