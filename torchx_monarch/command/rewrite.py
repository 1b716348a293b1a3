# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""From the app a user submits to the app a backend runs, and back.

Rewriting is wrapping: ``torchrun train.py`` becomes ``python -m torchx_monarch.host [options] -- torchrun train.py``,
where the command stands: as the role's own command, inside the string of a ``bash -c``, or among the arguments of a
set-up script. The words of the command and everything else of the role stay as they are.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchx.specs import AppDef, RetryPolicy, Role, macros

from torchx_monarch.command.actors import is_actors
from torchx_monarch.command.allocation_spec import IDLE_TIMEOUT, AllocationSpec
from torchx_monarch.command.command import ACTORS_MODULE, HOST_MODULE, HOSTS_MODULE, Command, CommandError, check, parse
from torchx_monarch.command.shell import SimpleCommand, command_string, simple_commands
from torchx_monarch.command.template import escape, substitute, unescape
from torchx_monarch.model import sidecars


@dataclass(frozen=True)
class WrapOptions:
    """How the host process of each replica is started.

    Attributes:
        python: the interpreter, as the replica finds it.
        grace: seconds from SIGTERM to SIGKILL when ranks are stopped.
        host_timeout: seconds to wait for all hosts to arrive.
        preload: the modules, separated by commas, that rank interpreters import while they wait; empty for none.
        retry_on: the exit codes, as a shell has them, after which ranks are started again; empty for any.
        rendezvous: where replica 0 of each role listens, by the role's name; roles of one machine have none. Where its
            host is ``@`` alone, nobody knows that before it runs.
        network: further words of the host's command line, each option with its value.
        application: where all roles find replica 0 of the first one, on backends that let each role end by itself;
            empty for others.
        always_together: whether there the failure of one role is to end all, whatever the policy, and the end of the
            first one ends all: it waits for the others that are no sidecars.
        lease: seconds for which a host or its agent may be silent until it counts as lost; None for the hosts' default.
    """

    python: str = "python"
    grace: float = 30.0
    host_timeout: float = 300.0
    preload: str = "torch"
    retry_on: tuple[int, ...] = ()
    rendezvous: Mapping[str, str] = field(default_factory=dict)
    network: Sequence[str] = ()
    application: str = ""
    always_together: bool = False
    lease: float | None = None


def rewrite(app: AppDef, options: WrapOptions) -> AppDef:
    """A copy of ``app`` in which every role that has a rank program runs it through the host process.

    Raises:
        CommandError: the command of a role cannot be run; the message names the role.
    """
    rewritten = copy.deepcopy(app)
    # What roles are to each other: those on one machine have nobody to ask for, and one role has nobody.
    meet = len(app.roles) > 1 and bool(options.rendezvous or options.application)
    ranks = [role for role in app.roles if _runs_ranks(role)] if meet else []
    has_main = bool(ranks) and ranks[0] is app.roles[0]
    directory = _directory(ranks, options) if has_main else {}
    beside = _end_together(ranks, options.always_together) if has_main and options.application else 0
    awaited = _awaited(ranks[1:]) if beside and options.always_together else []
    for role in rewritten.roles:
        wrap_role(role, options.python, _host_arguments(role, options, directory, beside, awaited))
    return rewritten


def _end_together(ranks: Sequence[Role], always: bool) -> int:
    """How many roles of ranks beside the first are to end when one has failed; 0 where each ends by itself.

    They are to end where they are to begin again together; with one that has no retries left to begin with, none would.
    """
    waiting = any(module in word for role in ranks for word in role.args for module in (HOSTS_MODULE, ACTORS_MODULE))
    every = all(role.retry_policy is RetryPolicy.APPLICATION and role.max_retries > 0 for role in ranks)
    return len(ranks) - 1 if (always or every) and not waiting else 0


def _awaited(others: Sequence[Role]) -> list[str]:
    """The names of the roles beside the first that an app waits for."""
    return [role.name for role in others if not sidecars.is_sidecar(role)]


def _directory(ranks: Sequence[Role], options: WrapOptions) -> Mapping[str, str]:
    """Map each role to the role registry (``controller.role_registry``) that it uses, where the backend has no names.

    It is replica 0 of the first role of ranks that knows.
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
    """A copy of ``app`` whose hosts wait for runs; what its roles run now is what a run runs that names nothing else.

    Roles without a rank program stay as they are. The app ends with its first role, and the others are sidecars.

    Args:
        app: as a component makes it.
        idle_timeout: seconds without a run after which the hosts end; 0 for never.
        python: the interpreter in the command; the hosts' own is the scheduler's choice.

    Raises:
        CommandError: the command of a role cannot be run, or no role has one; the message names the role.
    """
    held = copy.deepcopy(app)
    words = ["-m", HOSTS_MODULE, "--idle-timeout", _seconds(idle_timeout), "--"]
    found = [wrap_role(role, python, words, but="hosts") for role in held.roles]
    if not any(found):
        roles = ", ".join(repr(role.name) for role in held.roles) or "none"
        raise CommandError(f"no role of app {app.name!r} runs a torchrun or Python command; its roles: {roles}")
    for role in held.roles[1:]:
        sidecars.mark(role)
    return held


def restore(role: Role) -> Role:
    """A copy of ``role`` as it was before :func:`rewrite`; a role that was not rewritten comes back as it is."""
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
    """Put ``python`` and further words before the rank program of a role, in place; whether it has one.

    Args:
        role: the role.
        python: the first word.
        words: those that follow, escaped for TorchX.
        but: kind of command that is left as it is.
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
            # A script that sets things up and then runs torchrun; what it does with a plain python is its own affair.
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
                f"role {role.name!r}: the torchrun in the string of `{role.entrypoint} -c` stands in a loop, and a "
                "role runs one. Put the loop into the script, or submit one job for each turn."
            )
        if kind == but:
            continue
        start = simple.words[0].start
        # The values of macros may be variables of the shell (Slurm: $SLURM_JOB_ID): double quotes let them expand.
        quoted = [f'"{word}"' if word in (macros.app_id, macros.replica_id) else shlex.quote(word) for word in words]
        role.args[string] = f"{text[:start]}{' '.join(quoted)} {text[start:]}"
    return bool(found)


def _rank_commands(text: str, role: Role) -> list[tuple[SimpleCommand, str]]:
    """The rank programs in a shell's string, each with the kind of its command."""
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
    """The rank program that ``words`` are, checked against the role."""
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
    role: Role, options: WrapOptions, directory: Mapping[str, str], beside: int, awaited: Sequence[str]
) -> list[str]:
    """The arguments of the host process, which follow the interpreter and precede the command."""
    return [
        *("-m", HOST_MODULE),
        *("--app", macros.app_id),
        *("--role", escape(role.name)),
        *("--replica", macros.replica_id),
        *("--replicas", str(role.num_replicas)),
        *("--grace", _seconds(options.grace)),
        *("--host-timeout", _seconds(options.host_timeout)),
        *("--preload", escape(options.preload)),
        *(("--lease", _seconds(options.lease)) if options.lease is not None else ()),
        *(("--retry-on", ",".join(map(str, options.retry_on))) if options.retry_on else ()),
        *(("--replacements", str(role.max_retries)) if _are_replaced(role) else ()),
        *(("--rendezvous", options.rendezvous[role.name]) if role.name in options.rendezvous else ()),
        *(("--peers", _peers(options)) if options.rendezvous and is_actors([role.entrypoint, *role.args]) else ()),
        *(("--directory", directory[role.name]) if role.name in directory else ()),
        *(("--application", options.application, "--beside", str(beside)) if beside else ()),
        *(word for name in awaited for word in ("--await-role", escape(name))),
        *(escape(word) for word in options.network),
        "--",
    ]


def _peers(options: WrapOptions) -> str:
    return ",".join(f"{name}={rendezvous}" for name, rendezvous in options.rendezvous.items())


def _are_replaced(role: Role) -> bool:
    """Whether the backend starts a lost replica again while the others live."""
    return role.retry_policy is RetryPolicy.REPLICA and role.max_retries > 0 and role.num_replicas > 1


def _seconds(value: float) -> str:
    return str(value).removesuffix(".0")


def _host_words(argv: Sequence[str]) -> int | None:
    """How many words at the start of ``argv`` start the host process; None when they do not."""
    if tuple(argv[1:3]) != ("-m", HOST_MODULE):
        return None
    end = 3
    while end < len(argv) and argv[end] != "--":
        end += 2
    return end + 1 if end + 1 < len(argv) else None
