# SPDX-License-Identifier: BSD-3-Clause
"""Parse torchrun's options. Each field of ``TorchrunOptions`` declares an option and how this package treats it.

The argument parser is built from the fields, so an option cannot be parsed without a decision about it. A test compares
them with ``torch.distributed.run.get_args_parser()`` and fails when torch adds, drops or changes an option.
"""

from __future__ import annotations

import argparse
import functools
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, TypeVar

from torchx_monarch.model.spelling import did_you_mean
from torchx_monarch.model.world import CommandError

T = TypeVar("T")

_MESH = "the hosts of the job find each other by themselves"

UNEXPANDED = "\0"
"""Stands in the words of a command for text that TorchX or a shell will expand. No argument of a program has a NUL."""


class HelpRequested(Exception):
    """The command asks torchrun for its help text or for shell completions, and starts no ranks."""


@dataclass(frozen=True)
class Streams:
    """The streams of each rank that an option (``--redirects``, ``--tee``) selects.

    A stream set is torch's ``Std``: 0 none, 1 stdout, 2 stderr, 3 both.

    Attributes:
        every: stream set of all local ranks that ``ranks`` does not name.
        ranks: pairs of local rank and stream set.
    """

    every: int = 0
    ranks: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Streams:
        """Parse ``"3"`` (all ranks) or ``"0:1,1:2"`` (only the named ranks), as torch's ``Std.from_str`` does."""
        if re.match(r"^[0123]$", text):
            return cls(every=int(text))
        if re.match(r"^(\d:[0123],)*(\d:[0123])$", text):
            pairs = (entry.split(":") for entry in text.split(","))
            return cls(ranks=tuple({int(rank): int(streams) for rank, streams in pairs}.items()))
        raise ValueError(
            "use 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or a list of LOCAL_RANK:STREAMS "
            "with local ranks 0 to 9, such as 0:3,1:2"
        )

    def stdout(self, local_rank: int) -> bool:
        return bool(self._streams(local_rank) & 1)

    def stderr(self, local_rank: int) -> bool:
        return bool(self._streams(local_rank) & 2)

    def _streams(self, local_rank: int) -> int:
        return dict(self.ranks).get(local_rank, self.every)


_HONOURED_KEYS = ("join_timeout", "last_call_timeout")
"""The keys of ``--rdzv-conf`` that have an effect; ``close_timeout``, ``timeout`` and others have none."""


@dataclass(frozen=True)
class RendezvousConf:
    """The value of ``--rdzv-conf``.

    Attributes:
        join_timeout: seconds in which the minimum number of hosts must join; None for the host's default.
        last_call_timeout: seconds to wait for further hosts after that.
        keys: all keys that were given.
    """

    join_timeout: int | None = None
    last_call_timeout: int = 30
    keys: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> RendezvousConf:
        """Parse ``KEY=VALUE,...`` as torch's ``_parse_rendezvous_config`` does, and seconds as its c10d rendezvous."""
        values: dict[str, str] = {}
        for pair in text.split(",") if text.strip() else ():
            key, _, value = (part.strip() for part in pair.partition("="))
            if not key or not value:
                lacks = f"{key} has no value; " if key else ""
                raise ValueError(f"{lacks}use KEY=VALUE,..., such as join_timeout=600,last_call_timeout=30")
            values[key] = value
        seconds: dict[str, Any] = {
            key: _value(int, f"{key}={text} is not a whole number of seconds above 0", lambda number: number > 0)(text)
            for key, text in values.items()
            if key in _HONOURED_KEYS
        }
        return cls(keys=tuple(values), **seconds)


def _static_endpoint(text: str) -> tuple[str, int]:
    """Parse HOST:PORT as torch's ``parse_rendezvous_endpoint`` does for its static rendezvous, which needs the port."""
    host, separator, port = text.strip().rpartition(":")
    if len(host) > 1 and host[0] == "[" and host[-1] == "]":
        host = host[1:-1]
    if not separator or not re.fullmatch(r"[\w.:-]+", host) or not port.isdigit() or int(port) > 65535:
        raise ValueError("use HOST:PORT with a port from 0 to 65535, such as node0:29500")
    return host, int(port)


def _comma_separated_list(text: str) -> tuple[str, ...]:
    """Split at commas; as in torchrun, a doubled comma is a comma within an item."""
    placeholder = "<COMMA_PLACEHOLDER>"
    return tuple(item.replace(placeholder, ",") for item in text.replace(",,", placeholder).split(","))


def node_range(text: str) -> tuple[int, int]:
    """Parse a value of ``--nnodes``, N or MIN:MAX; return its minimum and maximum."""
    low, colon, high = text.partition(":")
    return _bounds((low, high if colon else low))


def _value(
    convert: Callable[[Any], T], allowed: str, is_allowed: Callable[[T], bool] = lambda _: True
) -> Callable[[Any], T]:
    """Return a function that converts a value, and raises a ValueError that says what is allowed."""

    def parse(value: Any) -> T:
        try:
            if is_allowed(converted := convert(value)):
                return converted
        except ValueError:
            pass
        raise ValueError(allowed)

    return parse


_bounds = _value(
    lambda words: (int(words[0]), int(words[1])),
    "use a number of nodes above 0, or MIN:MAX with 0 < MIN <= MAX",
    lambda bounds: 0 < bounds[0] <= bounds[1],
)
_WHOLE_NUMBER = _value(int, "use a whole number")
_RESTARTS = _value(int, "use a whole number, 0 or more", lambda number: number >= 0)
_PORT = _value(int, "use a port from 0 to 65535; 0 means any free one", lambda port: 0 <= port <= 65535)
_INTERVAL = _value(float, "use a number of seconds above 0", lambda seconds: seconds > 0)
_LOCAL_RANKS = _value(
    lambda text: frozenset(int(rank) for rank in text.split(",")) if text else None,
    "use a comma-separated list of local ranks, such as 0,1,2",
)


# Those of torch (_register_default_handlers). Third-party backends work only within torchelastic's agent.
_RENDEZVOUS_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_RENDEZVOUS_BACKEND = _value(
    str, f"use one of {', '.join(_RENDEZVOUS_BACKENDS)}, or leave it out: {_MESH}", _RENDEZVOUS_BACKENDS.__contains__
)
_HANDLED_SIGNALS = signal.Signals.__members__.keys() - {"SIGKILL", "SIGSTOP"}
_SIGNAL_NAMES = _value(
    str,
    "use names of signals that can be handled, separated by commas, such as SIGTERM,SIGUSR1",
    lambda text: _HANDLED_SIGNALS.issuperset(map(str.strip, text.split(","))),
)
_PARSERS: Mapping[Callable[[str], Any], Callable[[str], Any]] = {
    int: _WHOLE_NUMBER,
    float: _value(float, "use a number"),
    bool: _value(lambda text: bool(int(text)), "use 1 (on) or 0 (off)"),
}


@dataclass(frozen=True)
class Option:
    """One option of torchrun.

    Attributes:
        dest: the attribute name of the value, here and in argparse's namespace.
        refused: why another value than the default is refused, and the alternative; empty for all others.
        type: type to which torchrun converts the value; bool for a switch, which takes no value.
        parse: converts and checks the value instead of ``type``; raises ValueError with the allowed values. None to use
            ``type``.
        choices: allowed values; empty for any.
        env: whether ``PET_<DEST>`` supplies the value if the option is not given.
        since: first release of torch whose torchrun has the option; empty if all supported releases have it.
    """

    dest: str
    refused: str = ""
    default: Any = None
    type: Callable[[str], Any] = str
    parse: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    short: str = ""
    env: bool = True
    since: str = ""

    @property
    def name(self) -> str:
        """The long spelling, which messages use."""
        return f"--{self.dest.replace('_', '-')}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Its spellings, in torchrun's order: torchrun takes ``_`` for each ``-`` within a name as well."""
        return tuple(dict.fromkeys(filter(None, (self.short, self.name, f"--{self.dest}"))))

    @property
    def variable(self) -> str:
        """The environment variable that supplies the value if ``env`` is True."""
        return f"PET_{self.dest.upper()}"

    def convert(self, text: str, source: str) -> Any:
        """Convert the text of a value; ``source`` names the option, or its variable, in errors."""
        try:
            value = (self.parse or _PARSERS.get(self.type, self.type))(text)
        except ValueError as error:
            raise CommandError(f"torchrun: {source}={text}: {error}.") from None
        if self.choices and value not in self.choices:
            raise CommandError(f"torchrun: {source}={text}: use one of {', '.join(self.choices)}.")
        return value


def _option(**more: Any) -> Any:
    return field(metadata=more)


@dataclass(frozen=True)
class TorchrunOptions:
    """torchrun's options as values, one field per option.

    Attributes:
        nnodes: the minimum and the maximum.
        nproc_per_node: as typed: a number, or ``auto``, ``gpu``, ``cpu``, ``xpu``. The host resolves it.
        local_ranks_filter: local ranks whose output is shown; None for all.
        shutdown_timeout: seconds; None for the value of the environment variable, or the default.
        unexpanded: names of the options whose value the shell will expand. They have their default values here, and the
            host checks them. Empty for a command that is not part of a shell string.
    """

    nnodes: tuple[int, int] = _option(default="1:1", parse=node_range)
    nproc_per_node: str = _option(default="1")
    rdzv_backend: str = _option(default="static", parse=_RENDEZVOUS_BACKEND)
    rdzv_endpoint: str = _option(default="")
    rdzv_id: str = _option(default="none")
    rdzv_conf: RendezvousConf = _option(default="", parse=RendezvousConf.parse)
    standalone: bool = _option(default=False, type=bool)
    max_restarts: int = _option(default=0, type=int, parse=_RESTARTS)
    monitor_interval: float = _option(default=0.1, type=float, parse=_INTERVAL)
    # Not needed: torchrun, too, starts a script as a process of its own, and uses this for --run-path alone.
    start_method: str = _option(default="spawn", choices=("spawn", "fork", "forkserver"))
    event_log_handler: str = _option(
        refused="the handlers get the events of torchelastic's agent, and no such agent takes part. Leave it out; "
        "the job's log has a line for each of its own events, and `events.jsonl` in the app's folder an entry",
        default="null",
    )
    role: str = _option(default="default")
    module: bool = _option(short="-m", default=False, type=bool)
    no_python: bool = _option(default=False, type=bool)
    run_path: bool = _option(default=False, type=bool)  # a script always runs in the interpreter of its rank
    log_dir: str | None = _option()
    redirects: Streams = _option(short="-r", default="0", parse=Streams.parse)
    tee: Streams = _option(short="-t", default="0", parse=Streams.parse)
    log_line_prefix_template: str = _option(default="", since="2.14")
    local_ranks_filter: frozenset[int] | None = _option(default="", parse=_LOCAL_RANKS)
    duplicate_stdout_filters: tuple[str, ...] = _option(default=(), type=_comma_separated_list)
    duplicate_stderr_filters: tuple[str, ...] = _option(default=(), type=_comma_separated_list)
    node_rank: int = _option(default=0, type=int)  # hosts are ranked by their replica ids
    master_addr: str = _option(default="127.0.0.1")
    master_port: int | None = _option(type=int, parse=_PORT)
    local_addr: str | None = _option()
    logs_specs: str | None = _option(
        refused="the plug-in gives torchelastic's agent files for the ranks to write, and here the host process reads "
        "what they print. Leave it out, and use --log-dir, --redirects, --tee and --duplicate-stdout-filters",
        env=False,
    )
    numa_binding: str | None = _option(choices=("node", "socket", "exclusive", "core-complex"), env=False)
    signals_to_handle: str = _option(default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", parse=_SIGNAL_NAMES)
    shutdown_timeout: int | None = _option(type=int)
    virtual_local_rank: bool = _option(default=False, type=bool)
    unexpanded: frozenset[str] = frozenset()

    @property
    def min_nodes(self) -> int:
        return self.nnodes[0]

    @property
    def max_nodes(self) -> int:
        return self.nnodes[1]

    @property
    def static_endpoint(self) -> tuple[str, int] | None:
        """MASTER_ADDR and MASTER_PORT of torchrun's static rendezvous; port 0 if the user gives none.

        None for others, whose port torchrun chooses (``run``, ``get_rdzv_endpoint`` in ``torch.distributed.run``).
        """
        if self.standalone or self.rdzv_backend != "static":
            return None
        if self.rdzv_endpoint:
            return _static_endpoint(self.rdzv_endpoint)
        if self.master_port is None and self.max_nodes == 1:
            return None
        return self.master_addr, self.master_port or 0


OPTIONS = tuple(
    Option(declared.name, **declared.metadata) for declared in fields(TorchrunOptions) if declared.name != "unexpanded"
)


def unused_options(options: TorchrunOptions, in_run: bool) -> list[str]:
    """Return a line for the log for each option that has no effect in this command, or in a run of an allocation."""
    keys = [key for key in options.rdzv_conf.keys if in_run or key not in _HONOURED_KEYS]
    lines = []
    if keys:
        why = "the hosts of an allocation have found each other before" if in_run else _MESH
        lines.append(f"--rdzv-conf {', '.join(keys)} has no effect: {why}")
    if in_run and options.signals_to_handle != DEFAULTS.signals_to_handle:
        why = "signals to a host end its allocation, whatever the run; its ranks find the names in their environment"
        lines.append(f"--signals-to-handle {options.signals_to_handle} has no effect on the hosts: {why}")
    return lines


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"torchrun: {message}. See `torchrun --help`.")


class _Prints(argparse.Action):
    def __call__(self, *_: object) -> NoReturn:
        raise HelpRequested


@functools.cache
def _parser() -> _Parser:
    # Values stay text: UNEXPANDED, which stands for a shell's expansion, cannot be converted to a type.
    parser = _Parser(prog="torchrun", add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action=_Prints, nargs=0)
    parser.add_argument("--print-completion", action=_Prints)  # since torch 2.14
    for option in OPTIONS:
        flags = [option.short, option.name] if option.short else [option.name]
        parser.add_argument(*flags, action="store_true" if option.type is bool else "store")
    parser.add_argument("training_script")
    return parser


def parse_options(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[TorchrunOptions, str, tuple[str, ...]]:
    """Parse torchrun's command line with its own rules: abbreviations, ``PET_*`` defaults, all words after the script.

    Return the options, the training script (or module, or program) and its arguments.
    """
    words = _with_hyphens(arguments)
    # argparse must not see the arguments of the script: before Python 3.12 it rejects an ambiguous abbreviation even
    # among them (``torchrun train.py --rdzv 4``).
    for end in range(len(arguments) + 1):
        try:
            given, unknown = _parser().parse_known_args(words[:end])
            break
        except CommandError:  # the words end before the script, or between an option and its value
            if end == len(arguments):
                raise
    if unknown:
        flag = arguments[words.index(unknown[0])].partition("=")[0]
        hint = did_you_mean(flag, [option.name for option in OPTIONS])
        raise CommandError(f"torchrun has no option {flag}.{hint} See `torchrun --help`.")
    # argparse removes one `--`: before the script or, if there is no `--` before it, right after it.
    if "--" not in arguments[:end] and list(arguments[end : end + 1]) == ["--"]:
        end += 1
    return _values(vars(given), env), given.training_script, tuple(arguments[end:])


def _with_hyphens(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``-`` for each ``_`` in names of options.

    By a parser that knows both spellings of each option, ``--nproc`` is called ambiguous.
    """
    words = list(arguments)
    for position in range(words.index("--") if "--" in words else len(words)):
        name, equals, value = words[position].partition("=")
        if name.startswith("--"):
            words[position] = name.replace("_", "-") + equals + value
    return words


def _values(texts: Mapping[str, Any], env: Mapping[str, str]) -> TorchrunOptions:
    values: dict[str, Any] = {}
    unexpanded: set[str] = set()
    for option in OPTIONS:
        text, source = texts.get(option.dest), option.name
        if text is None and option.env:
            text, source = env.get(option.variable), option.variable
        if isinstance(text, str) and UNEXPANDED in text:
            unexpanded.add(option.dest)
            text = None
        # Like argparse, convert a default that is a string in the same way as a value.
        value = option.default if text is None else text
        values[option.dest] = option.convert(value, source) if isinstance(value, str) else value
    return TorchrunOptions(unexpanded=frozenset(unexpanded), **values)


DEFAULTS = _values({}, {})
"""The options of torchrun without arguments and environment variables."""
