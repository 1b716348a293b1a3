# SPDX-License-Identifier: BSD-3-Clause
"""Parse what a person types after the name of a component, before TorchX does.

TorchX's parser looks for options in the whole line, so ``-m package.train --name run`` gives ``--name`` to the
component. This one ends the options at the program, as torchrun and Python do, takes torchrun's options, and says what
to type instead of an option that does not exist. TorchX's then gets words that it understands as this one did.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_origin

from torchx.util.types import decode_optional, to_dict

from torchx_monarch.command.torchrun_options import OPTIONS
from torchx_monarch.model.spelling import did_you_mean

_PROTECTION = "\0"
"""Prefix of a word that TorchX's parser must not take for an option. Arguments from a shell cannot hold a NUL."""

_PROGRAM = "script_args"
"""The parameter of a component that takes a program with its arguments."""

_PROGRAMS = frozenset(("m", "script"))
"""The options whose value is the program, after which all words are the program's."""

_RUN_OPTIONS = (
    "-s",
    "--scheduler",
    "-cfg",
    "--scheduler_args",
    "--dryrun",
    "--wait",
    "--log",
    "--tee_logs",
    "--json",
    "--workspace",
    "--parent_run_id",
)
"""Options of ``torchx run`` itself."""

_TORCHRUN_NAMES = {"nproc_per_node": "nproc", "module": "m", "t": "tee"}
"""torchrun's options that components name differently; ``-`` within a name counts as ``_``."""

_TORCHRUN = "torchrun"
"""The parameter of a component that takes torchrun's further options, as they are typed."""

_REPLACED = {"j": ("nproc", "nnodes"), "m": ("script",), "script": ("m",)}
"""Options whose defaults, which a .torchxconfig can set, do not count beside a typed option."""


class ComponentArgumentError(ValueError):
    """The arguments of a component are wrong; the message names the argument and says what to type."""


@dataclass(frozen=True)
class ComponentArguments:
    """The parsed arguments of a component.

    Attributes:
        options: the values of the options that are given, by the names of the component's parameters.
        program: the remaining words as typed: the program's arguments, after the script if no option names the program.
        replaced: the options whose defaults do not count.
    """

    options: Mapping[str, str]
    program: tuple[str, ...]
    replaced: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        """The path of the script; empty for a module, or without a program."""
        if "m" in self.options:
            return ""
        return self.options.get("script") or next(iter(self.program), "")

    @property
    def words(self) -> list[str]:
        """The arguments in a form that TorchX parses with the same meaning."""
        options = {**dict.fromkeys(self.replaced, ""), **self.options}
        words = [f"--{name}={value}" for name, value in options.items()]
        return words + [_PROTECTION + word for word in self.program]


def unprotected(words: Sequence[str]) -> tuple[str, ...]:
    """Return a program's words as they were typed: the inverse of what ``ComponentArguments.words`` does to them."""
    return tuple(word.removeprefix(_PROTECTION) for word in words)


def no_run_option(word: str) -> str:
    """Return what is wrong with an option before the component that is none of ``torchx run``."""
    flag = word.partition("=")[0]
    after = "Options of a component come after its name: torchx run -s monarch_local monarch.spmd --nproc 2 train.py"
    return f"{flag} is no option of `torchx run`.{did_you_mean(flag, _RUN_OPTIONS)} {after}"


def options_among(words: Sequence[str], options: Collection[str]) -> list[str]:
    """Return those of a program's words that are spelled like options of its component, or of ``torchx run``."""
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    return [flag for flag in flags if flag in _RUN_OPTIONS or _parameter(flag, options)]


def component_arguments(
    component: str, function: Callable[..., object], words: Sequence[str]
) -> ComponentArguments | None:
    """Parse the arguments of a component; return None if they ask for its help text.

    Args:
        function: the component, each of whose parameters is an option; ``*script_args`` takes a program with arguments.
    """
    parameters = inspect.signature(function).parameters
    options = {name: parameter.annotation for name, parameter in parameters.items() if name != _PROGRAM}
    given: dict[str, str] = {}
    of_torchrun: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--help":
            return None
        if word == "--" or not word.startswith("-") or word == "-":
            break
        flag, value = _split(component, word)
        if not (name := _parameter(flag, options)):
            of_torchrun.append(_torchrun_word(component, flag, value, options, rest))
            continue
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
    if of_torchrun:
        given[_TORCHRUN] = f"{given.get(_TORCHRUN, '')} {shlex.join(of_torchrun)}".strip()
    typed = [*([] if word == "--" else [word]), *rest]
    if typed and _PROGRAM not in parameters:
        hint = " Options are spelled with their names, such as -j 2x4." if "j" in options else ""
        raise ComponentArgumentError(f"{component} runs no program, and {typed[0]!r} is none of its options.{hint}")
    replaced = [other for name in given for other in _REPLACED.get(name, ()) if other in options]
    if both := [f"--{other}" for other in replaced if other in given]:
        raise ComponentArgumentError(f"{component}: -j says what {both[0]} says: give one of them.")
    return ComponentArguments(given, tuple(typed), tuple(replaced))


def _split(component: str, word: str) -> tuple[str, str | None]:
    """Split a word into the option and the value; None if the value is not part of the word."""
    flag, equals, text = word.partition("=")
    if flag in _RUN_OPTIONS:
        raise ComponentArgumentError(f"{flag} is an option of `torchx run`: type it before {component}.")
    if not flag.startswith("--") and len(flag) > 2:  # -j2x4
        return flag[:2], word[2:]
    return flag, text if equals else None


def _parameter(flag: str, options: Collection[str]) -> str:
    """Return the parameter of the component that has the name of an option, or torchrun's name; empty for none."""
    name = flag.lstrip("-").replace("-", "_")
    name = name if name in options else _TORCHRUN_NAMES.get(name, name)
    return name if name in options and (flag.startswith("--") or len(flag) == 2) else ""


def _torchrun_word(component: str, flag: str, value: str | None, options: Collection[str], rest: Iterator[str]) -> str:
    """Return an option of torchrun's that the component has none for, with its value, as one word."""
    option = next((found for found in OPTIONS if flag in found.flags), None)
    if option is not None and _TORCHRUN in options:
        if value is None and option.type is not bool:
            value = _value_of(component, flag, rest)
        return option.name if value is None else f"{option.name}={value}"
    if option is not None and option.dest in ("nproc_per_node", "nnodes") and "j" in options:
        advice = "Give nodes and processes as -j NNODESxNPROC, such as -j 2x4."
        raise ComponentArgumentError(f"{component} has no option {flag}. {advice}")
    names = [f"--{name}" if len(name) > 1 else f"-{name}" for name in options]
    hint = did_you_mean(flag, names + [option.name for option in OPTIONS if _TORCHRUN in options])
    after = "" if _PROGRAMS.isdisjoint(options) else " Options of the program come after it."
    raise ComponentArgumentError(
        f"{component} has no option {flag}.{hint}{after} `torchx run {component} --help` lists the options."
    )


def _value_of(component: str, flag: str, rest: Iterator[str]) -> str:
    value = next(rest, None)
    if value is None or (value.startswith("-") and not re.fullmatch(r"-\d.*|-", value)):
        beside = f" {value} is an option; if it is the value, type {flag}={value}" if value else ""
        raise ComponentArgumentError(f"{component}: {flag} needs a value.{beside}")
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
