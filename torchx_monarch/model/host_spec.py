# SPDX-License-Identifier: BSD-3-Clause
"""The options of a host process: each field of ``HostSpec`` is a flag of ``python -m torchx_monarch.host``.

Submission turns a ``HostSpec`` into words of a command line (``to_argv``), and the host process turns these words back
into a ``HostSpec`` (``from_argv``).
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

AUTO = "auto"
"""Stands among the modules to preload for torch and what the first statements of the program import."""

_MAX_SECONDS = 1e9
"""Seconds of an option at most, 31 years: clocks and timers can count them."""

_MAX_GRACE = 2e6
"""Seconds of grace at most, 23 days: a process that waits for its end and for output uses epoll, which counts
milliseconds in 32 bits, as does a socket's timeout while Docker stops a container."""

_MAX_PEER_TIMEOUT = 5.0


def parse_ports(text: str) -> tuple[int, int]:
    """Read ``26600`` or ``26600-26699``."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < low <= high < 65536:
        raise ValueError(f"{text!r} is no port and no range of ports such as 26600-26699, within 1 to 65535")
    return low, high


def parse_size(text: str) -> int:
    """Read a number of bytes, perhaps with a unit, each 1024 times the one before: ``500K``, ``1.5G``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text)
    if found is None:
        raise ValueError(f"{text!r} is no size such as 500M or 2G")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))


def parse_log_limit(text: str) -> int:
    """Read a size of at least 1M."""
    if (size := parse_size(text)) < 1 << 20:
        raise ValueError("it is less than 1M: use a size such as 500M or 2G")
    return size


def parse_duration(text: str) -> float:
    """Read a number of seconds, or of the unit behind it: ``90m``, ``2h``, ``1d``, ``2w``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text)
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
    seconds = float(found[1]) * units[found[2]] if found else math.inf
    if seconds > _MAX_SECONDS:
        raise ValueError("it is no time such as 90m, 2h or 1d")
    return seconds


def parse_exit_codes(text: str) -> tuple[int, ...]:
    """Parse numbers and names of signals, separated by ``+`` or commas. Signal N becomes 128 + N, as in a shell.

    The codes are in ascending order, from 1 to 255 and without EX_CONFIG, with which a program asks for no restart.
    """
    return tuple(sorted({_exit_code(word.strip()) for word in re.split("[+,]", text)})) if text.strip() else ()


def _exit_code(word: str) -> int:
    if word in signal.Signals.__members__:
        return 128 + signal.Signals[word]
    if not re.fullmatch("[0-9]+", word) or not 1 <= int(word) <= 255:
        raise ValueError(
            f"{word!r} is no exit code of a failure: use numbers from 1 to 255 and names of signals such as SIGKILL, "
            "separated by + or commas"
        )
    if int(word) == os.EX_CONFIG:
        raise ValueError(f"{word} is the exit code with which a program asks not to be started again (EX_CONFIG)")
    return int(word)


def show_seconds(value: float) -> str:
    """Return seconds as a user would type them: ``30``, not ``30.0``."""
    return str(value).removesuffix(".0")


def _modules(text: str) -> tuple[str, ...]:
    """Parse names of modules, separated by ``+`` or commas; ``none`` stands for no module."""
    return tuple(name for name in re.split("[+,]", text) if name not in ("", "none"))


@dataclasses.dataclass(frozen=True)
class _Flag:
    """How a field appears on the command line.

    Attributes:
        parse: turns the text of the flag into the value of the field; raises ``ValueError`` that says what is allowed.
        range: the lowest and the highest value of a number; None for fields of other kinds.
        words: the allowed values, if they are words.
        always: whether the flag is given even where the field has its default value.
    """

    parse: Callable[[str], Any] = str
    show: Callable[[Any], str] = str
    range: tuple[float, float] | None = None
    words: Sequence[str] = ()
    always: bool = False

    def allowed_instead(self, value: Any) -> str:
        """Return which values are allowed if this one is not; else empty."""
        if self.words and value not in self.words:
            return " or ".join(self.words)
        lowest, highest = self.range or (-math.inf, math.inf)
        if self.range is None or (value is not None and lowest <= value <= highest):
            return ""
        if highest == math.inf:
            return f"a number, {lowest} or more"
        return f"a number of seconds, {math.ceil(lowest)} to {highest:.0f}"


def _flag(default: Any, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"flag": _Flag(**more)})


def _seconds(default: float, lowest: float, always: bool = False, highest: float = _MAX_SECONDS) -> Any:
    return _flag(default, parse=float, show=show_seconds, range=(lowest, highest), always=always)


def _count(default: int) -> Any:
    return _flag(default, parse=int, range=(0, math.inf))


def _word(*words: str) -> Any:
    return _flag(words[0], words=words)


def _joined(default: tuple[Any, ...], parse: Callable[[str], tuple[Any, ...]] = _modules, always: bool = False) -> Any:
    return _flag(default, parse=parse, show=lambda values: ",".join(map(str, values)), always=always)


@dataclasses.dataclass(frozen=True)
class HostSpec:
    """The command line of the host process of one replica. The flag of a field is its name, with dashes.

    ``MonarchOpts`` and ``NetworkOpts`` say what fields mean that are run options, too. In addresses, @NAME as HOST is
    the value of that environment variable.

    Attributes:
        replicas: how many replicas the role has, with the spare ones.
        workload: what it runs: the ranks of a torchrun or Python command, or any other command as its one process.
        starts: when a command starts: at once, or when the hosts of all replicas are there, because all start again
            when one has failed.
        min_replicas: how many replicas a command needs, replica 0 among them; 0 for all.
        replacements: how many lost hosts the backend replaces while the job goes on; of commands, how often each.
        rendezvous: where replica 0 listens: unix:PATH, tls:HOST:PORT or insecure-tcp:HOST:PORT. Empty:
            MONARCH_RENDEZVOUS, else a socket of this machine.
        peers: NAME=RENDEZVOUS of each role, separated by commas, for a script that uses the hosts of all of them.
        peer_roles: of the first role: how many others end and restart with it when one of them has failed.
        application: of those others: where replica 0 of the first role listens.
        sidecar: of those others: whether the success of the first role is the end of the app, and so ends this one.
        lighthouse: HOST:PORT of torchft's lighthouse, which ranks find in TORCHFT_LIGHTHOUSE.
        interpreter: what torchrun and python without a folder mean in the command: this process's interpreter (own), or
            what PATH finds, which something before the command may have changed (path).
        advertise: name or address by which other hosts connect to this one; empty: as they see it.
        command: the command of the role: the words after ``--``.
    """

    app: str = _flag("", always=True)
    role: str = _flag("", always=True)
    replica: int = _flag(0, parse=int, always=True)
    replicas: int = _flag(1, parse=int, always=True)
    grace: float = _seconds(30.0, 0, always=True, highest=_MAX_GRACE)
    host_timeout: float = _seconds(300.0, 0.001, always=True)
    preload: tuple[str, ...] = _joined((AUTO,), always=True)
    ranks: str = _word("fork", "fresh")
    preflight: str = _word("off", "on", "warn")
    lease: float = _seconds(30.0, 1)
    hang_after: float = _seconds(300.0, 0)
    on_hang: str = _word("observe", "restart", "fail")
    on_slow: str = _flag("")
    slow_hosts: str = _word("observe", "replace")
    debug_wait: float = _seconds(300.0, 0)
    on_end: str = _flag("")
    retry_on: tuple[int, ...] = _joined((), parse_exit_codes)
    same_step_limit: int = _count(3)
    stop_after: float = _flag(0.0, parse=parse_duration, show=show_seconds)
    log_limit: int = _flag(0, parse=parse_log_limit)
    spares: int = _count(0)
    exclude_after: int = _count(3)
    workload: str = _word("ranks", "command")
    starts: str = _word("alone", "together")
    min_replicas: int = _count(0)
    replacements: int = _count(0)
    rendezvous: str = _flag("")
    peers: str = _flag("")
    peer_roles: int = _count(0)
    application: str = _flag("")
    sidecar: str = _word("off", "on")
    lighthouse: str = _flag("")
    interpreter: str = _word("own", "path")
    ports: tuple[int, int] | None = _flag(None, parse=parse_ports, show=lambda ports: "-".join(map(str, ports)))
    bind: str = _flag("")
    advertise: str = _flag("")
    rejoin_timeout: float = _seconds(60.0, 0)
    command: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """The number of replicas without the spare ones."""
        return self.replicas - self.spares

    @property
    def peer_timeout(self) -> float:
        """The seconds without an answer from a machine after which a connection is given up, and another one opened."""
        return min(_MAX_PEER_TIMEOUT, self.lease / 6)

    @property
    def forks_ranks(self) -> bool:
        return self.ranks == "fork"

    @property
    def shares_imports(self) -> bool:
        """Whether the zygote executes the leading statements of the program."""
        return AUTO in self.preload and self.forks_ranks

    @property
    def preload_modules(self) -> tuple[str, ...]:
        """The modules that the user wants to be preloaded, each once."""
        return tuple(dict.fromkeys("torch" if name == AUTO else name for name in self.preload))

    def to_argv(self, escape: Callable[[str], str], placeholders: Mapping[str, str]) -> list[str]:
        """Return the flags that differ from their defaults, and those that are always given; ``--`` is not among them.

        Args:
            escape: applied to each value, so that the backend does not replace what looks like a macro of TorchX in it.
            placeholders: by field, the text that stands for a value which only the backend knows. Not escaped.
        """
        words: list[str] = []
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            if name in placeholders:
                words += [_option(name), placeholders[name]]
            elif flag.always or value != getattr(HostSpec, name):
                words += [_option(name), escape(flag.show(value))]
        return words

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> HostSpec:
        """Parse the words that follow ``python -m torchx_monarch.host``: flags with values, ``--``, and the command."""
        words, given = list(argv), dict[str, Any]()
        while words[:1] != ["--"]:
            option, text = (*words, "", "")[:2]
            name = option.removeprefix("--").replace("-", "_")
            try:
                given[name] = FLAGS[name].parse(text)
            except KeyError:
                sys.exit(f"torchx_monarch.host has no option {option}: install the submitter's torchx-monarch there")
            except ValueError as error:  # such as a macro that a wrapped scheduler does not replace
                sys.exit(f"torchx_monarch.host {option} {text}: {error}")
            del words[:2]
        return cls(**given, command=tuple(words[1:]))


FLAGS: dict[str, _Flag] = {
    field.name: field.metadata["flag"] for field in dataclasses.fields(HostSpec) if "flag" in field.metadata
}
"""How the fields that are flags appear on the command line, and in run options of the same names."""


def wrong_values(options: object) -> Iterator[tuple[str, str]]:
    """Yield each field of a ``HostSpec``, or of other options with such fields, that is wrong, and what is allowed."""
    for name, flag in FLAGS.items():
        if allowed := flag.allowed_instead(getattr(options, name)) if hasattr(options, name) else "":
            yield name, allowed


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
