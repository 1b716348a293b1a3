# SPDX-License-Identifier: BSD-3-Clause
"""Parse what a person types after the name of a component, before TorchX does.

TorchX's parser looks for options in the whole line, so ``-m package.train --name run`` gives ``--name`` to the
component. This one ends the options at the program, as torchrun and Python do, accepts torchrun's spellings, and says
what to type instead of an option that does not exist. TorchX's then gets words that it understands as this one did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_origin

from torchx.util.types import decode_optional, to_dict

from torchx_monarch.command.torchrun_options import OPTIONS, Option
from torchx_monarch.model.spelling import did_you_mean

_PROTECTION = "\0"
"""Prefix of a word that TorchX's parser must not take for an option. Arguments from a shell cannot hold a NUL."""

_PROGRAMS = frozenset(("m", "script"))
"""The options whose value is the program, after which all words are the program's."""

_OF_RUN = frozenset(
    (
        *("-s", "--scheduler", "-cfg", "--scheduler_args", "--dryrun", "--wait", "--log", "--tee_logs", "--json"),
        *("--workspace", "--parent_run_id"),
    )
)
"""Options of ``torchx run`` itself."""

_TORCHRUN_NAMES = {"nproc_per_node": "nproc", "module": "m", "t": "tee"}
"""torchrun's options that components name differently; ``-`` within a name counts as ``_``."""

_BY_J = ("nproc_per_node", "nnodes")
"""torchrun's options of which ``-j NNODESxNPROC`` takes the place in a component that has no others for it."""


class ComponentArgumentError(ValueError):
    """The arguments of a component are wrong; the message names the argument and says what to type."""


@dataclass(frozen=True)
class ComponentArguments:
    """The parsed arguments of a component.

    Attributes:
        options: the values of the options that are given, by the names of the component's parameters.
        program: the remaining words as typed: the program's arguments, after the script if no option names the program.
    """

    options: Mapping[str, str]
    program: tuple[str, ...]

    @property
    def script(self) -> str:
        """The path of the script; empty for a module, or without a program."""
        if "m" in self.options:
            return ""
        return self.options.get("script") or next(iter(self.program), "")

    @property
    def words(self) -> list[str]:
        """The arguments in a form that TorchX parses with the same meaning."""
        options = (f"--{name}={value}" for name, value in self.options.items())
        return [*options, *(_PROTECTION + word for word in self.program)]


def unprotected(words: Sequence[str]) -> tuple[str, ...]:
    """Return a program's words as they were typed: the inverse of what ``ComponentArguments.words`` does to them."""
    return tuple(word.removeprefix(_PROTECTION) for word in words)


def component_arguments(
    component: str, words: Sequence[str], options: Mapping[str, object], program: bool
) -> ComponentArguments | None:
    """Parse the arguments of a component; return None if they ask for its help text.

    Args:
        options: the component's options by the names of its parameters, with the types of their values.
        program: whether the component takes a program with arguments.
    """
    given: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if word == "--help":
            return None
        if word == "--" or not word.startswith("-") or word == "-":
            break
        name, flag, value = _option(component, word, options)
        if value is None:
            value = _value_of(component, flag, rest)
        if name in given:
            pairs = " Give all pairs at once, as in --env A=1,B=2." if name == "env" else ""
            raise ComponentArgumentError(f"{component}: {flag} is given twice.{pairs}")
        _check_value(component, flag, value, options[name])
        given[name] = value
        if name in _PROGRAMS:
            word = next(rest, "--")
            break
    else:
        word = "--"
    typed = [*([] if word == "--" else [word]), *rest]
    if typed and not program:
        hint = " Options are spelled with their names, such as -j 2x4." if options.get("j") else ""
        raise ComponentArgumentError(f"{component} runs no program, and {typed[0]!r} is none of its options.{hint}")
    return ComponentArguments(given, tuple(typed))


def _option(component: str, word: str, options: Mapping[str, object]) -> tuple[str, str, str | None]:
    """Return the parameter that a word sets, the option as typed, and the value if it is part of the word."""
    flag, equals, text = word.partition("=")
    value = text if equals else None
    if flag in _OF_RUN:
        raise ComponentArgumentError(f"{flag} is an option of `torchx run`: type it before {component}.")
    if not flag.startswith("--") and len(flag) > 2:  # -j2x4
        flag, value = flag[:2], word[2:]
    typed = flag.lstrip("-").replace("-", "_")
    typed = typed if typed in options else _TORCHRUN_NAMES.get(typed, typed)
    found = [typed] if typed in options else []
    if not found and flag.startswith("--"):
        found = [name for name in options if name.startswith(typed)]
    if len(found) == 1:
        return found[0], flag, value
    if found:
        names = " or ".join(f"--{name}" for name in found)
        raise ComponentArgumentError(f"{component}: {flag} may mean {names}: give the whole name.")
    raise ComponentArgumentError(_unknown(component, flag, options))


def _unknown(component: str, flag: str, options: Mapping[str, object]) -> str:
    spelled = flag[:2] + flag[2:].replace("_", "-")
    option = next((torchrun_option for torchrun_option in OPTIONS if spelled in torchrun_option.flags), None)
    if option is not None and "nproc" in options:
        return f"{component}: {_instead(option, flag)}"
    if option is not None and option.dest in _BY_J and "j" in options:
        return f"{component} has no option {flag}. Give nodes and processes as -j NNODESxNPROC, such as -j 2x4."
    hint = did_you_mean(flag, [f"--{name}" if len(name) > 1 else f"-{name}" for name in options])
    after = " Options of the program come after it." if options.keys() & _PROGRAMS else ""
    return f"{component} has no option {flag}.{hint}{after} `torchx run {component} --help` lists the options."


def _instead(option: Option, flag: str) -> str:
    """Say what to type instead of an option of torchrun that the component of torchrun commands does not have."""
    if option.why:
        return f"leave {flag} out: {option.why}."
    if not option.env:
        return f"{flag} is an option of torchrun's own command only: utils.sh torchrun {flag} VALUE train.py"
    value = "1" if option.type is bool else "VALUE"
    return f"torchrun's {flag} is given as its variable here: --env {option.variable}={value}"


def _value_of(component: str, flag: str, rest: Iterator[str]) -> str:
    value = next(rest, None)
    if value is None or (value.startswith("-") and not re.fullmatch(r"-\d.*|-", value)):
        beside = "" if value is None else f", and {value} is no value; if it is one, type {flag}={value}"
        raise ComponentArgumentError(f"{component}: {flag} needs a value{beside}.")
    return value


def _are_pairs(text: str) -> bool:
    try:
        to_dict(text)
    except ValueError:
        return False
    return not text.endswith("=")  # to_dict drops what ends a value so, such as a key in base64


_CHECKS: Mapping[object, tuple[Callable[[str], bool], str, str]] = {
    dict: (
        _are_pairs,
        "NAME=VALUE pairs, with quotes around a value that is empty or contains =",
        """'A=1,B="x=y",C=""'""",
    ),
    int: (lambda text: bool(re.fullmatch(r"\s*[+-]?\d+\s*", text)), "a whole number", "1"),
    bool: (lambda text: text.lower() in ("true", "false"), "True or False", "True"),
}


def _check_value(component: str, flag: str, value: str, kind: object) -> None:
    kind = decode_optional(kind)
    accepts, wanted, example = _CHECKS.get(get_origin(kind) or kind, (lambda text: True, "", ""))
    if not accepts(value):
        raise ComponentArgumentError(f"{component}: {flag} {value}: give {wanted}, as in {flag} {example}.")
