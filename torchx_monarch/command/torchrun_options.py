# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The options of torchrun: one table that says what each one is and what becomes of it here.

The argument parser is built from the table, so an option cannot be parsed without a decision about it. A test compares
the table with ``torch.distributed.run.get_args_parser()`` and fails when torch adds, drops or changes an option.
"""

from __future__ import annotations

import argparse
import difflib
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from torchx_monarch.command.rendezvous_conf import RendezvousConf, parse_static_endpoint

UNEXPANDED = "\0"
"""Stands, in a word of a shell string, for text that the shell has yet to expand. No real argument can hold a NUL."""


class CommandError(ValueError):
    """A command that cannot be run as it stands. The message is complete: what, with which value, what is allowed."""


class HelpRequested(Exception):
    """The command asks torchrun for its help text or a shell's completions: there is nothing to launch."""


class Use(Enum):
    """What becomes of an option here."""

    HONOURED = "honoured"
    IMPLIED = "accepted, the value is not needed"
    REFUSED = "refused unless it is the default"


@dataclass(frozen=True)
class Streams:
    """Which of a rank's streams an option (``--redirects``, ``--tee``) selects.

    A stream set is torch's ``Std``: 0 none, 1 stdout, 2 stderr, 3 both.

    Attributes:
        every: the set for every local rank that ``ranks`` does not name.
        ranks: pairs of local rank and set.
    """

    every: int = 0
    ranks: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Streams:
        """Read ``"3"`` (all ranks) or ``"0:1,1:2"`` (the ranks named, no others), as torch's ``Std.from_str`` does.

        Raises:
            ValueError: ``text`` has neither form.
        """
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
        """Whether stdout of ``local_rank`` is selected."""
        return bool(self._of(local_rank) & 1)

    def stderr(self, local_rank: int) -> bool:
        """Whether stderr of ``local_rank`` is selected."""
        return bool(self._of(local_rank) & 2)

    def _of(self, local_rank: int) -> int:
        return dict(self.ranks).get(local_rank, self.every)


def _comma_separated_list(text: str) -> tuple[str, ...]:
    """Split at commas; a doubled comma is a comma within an item (torchrun's own rule)."""
    placeholder = "<COMMA_PLACEHOLDER>"
    return tuple(item.replace(placeholder, ",") for item in text.replace(",,", placeholder).split(","))


def node_range(text: str) -> tuple[int, int]:
    reason = "use a number of nodes above 0, or MIN:MAX with 0 < MIN <= MAX"
    try:
        bounds = [int(part) for part in text.split(":")]
    except ValueError:
        raise ValueError(reason) from None
    low, high = bounds[0], bounds[-1]
    if len(bounds) > 2 or not 0 < low <= high:
        raise ValueError(reason)
    return low, high


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("use a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("use a number") from None


def _switch(text: str) -> bool:
    try:
        return bool(int(text))
    except ValueError:
        raise ValueError("use 1 (on) or 0 (off)") from None


def _port(text: str) -> int:
    if not 0 <= _whole_number(text) <= 65535:
        raise ValueError("use a port from 0 to 65535; 0 means any free one")
    return int(text)


def _interval(text: str) -> float:
    if not _number(text) > 0:
        raise ValueError("use a number of seconds above 0")
    return float(text)


def _rendezvous_backend(text: str) -> str:
    # Torch's own (``_register_default_handlers``). One that a package adds is a part of torchelastic's agent.
    if text not in (known := ("static", "c10d", "etcd", "etcd-v2")):
        raise ValueError(f"use one of {', '.join(known)}, or leave it out: {_MESH}")
    return text


def _restarts(text: str) -> int:
    if _whole_number(text) < 0:
        raise ValueError("use 0 or more")
    return int(text)


def _local_ranks(text: str) -> frozenset[int] | None:
    try:
        return frozenset(int(rank) for rank in text.split(",")) if text else None
    except ValueError:
        raise ValueError("use a comma-separated list of local ranks, such as 0,1,2") from None


def _signal_names(text: str) -> str:
    for name in text.split(","):
        number = getattr(signal, name.strip(), None)
        if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError("use names of signals that can be handled, separated by commas, such as SIGTERM,SIGUSR1")
    return text


_PARSERS: Mapping[Callable[[str], Any], Callable[[str], Any]] = {int: _whole_number, float: _number, bool: _switch}


@dataclass(frozen=True)
class Option:
    """One option of torchrun.

    Attributes:
        flags: its spellings, in torchrun's order.
        use: what becomes of it here.
        why: the reason, for everything that is not simply honoured; for a refused one also what to do instead.
        default: as torchrun declares it.
        type: the type torchrun converts the value to; bool for a switch, which takes no value.
        parse: what the value means beyond ``type``; raises ValueError with what is allowed.
        choices: the values allowed; empty for any.
        env: whether ``PET_<DEST>`` supplies the value when the option is not given.
        since: the first release of torch whose torchrun has it; empty where all supported ones do.
    """

    flags: tuple[str, ...]
    use: Use
    why: str = ""
    default: Any = None
    type: Callable[[str], Any] = str
    parse: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    env: bool = True
    since: str = ""

    @property
    def name(self) -> str:
        """The first long spelling: the one used in messages, and the one argparse takes ``dest`` from."""
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def dest(self) -> str:
        """argparse's name of the value."""
        return self.name[2:].replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable that can supply the value."""
        return f"PET_{self.dest.upper()}"

    def convert(self, text: str, source: str) -> Any:
        """The value that ``text``, given by ``source``, stands for.

        Raises:
            CommandError: naming source and text, and what is allowed.
        """
        try:
            value = (self.parse or _PARSERS.get(self.type, self.type))(text)
        except ValueError as error:
            raise CommandError(f"torchrun: {source}={text}: {error}.") from None
        if self.choices and value not in self.choices:
            raise CommandError(f"torchrun: {source}={text}: use one of {', '.join(self.choices)}.")
        return value


_MESH = "the hosts of the job find each other by themselves"

OPTIONS: tuple[Option, ...] = (
    Option(("--nnodes",), Use.HONOURED, default="1:1", parse=node_range),
    Option(("--nproc-per-node", "--nproc_per_node"), Use.HONOURED, default="1"),
    Option(("--rdzv-backend", "--rdzv_backend"), Use.IMPLIED, _MESH, default="static", parse=_rendezvous_backend),
    Option(
        ("--rdzv-endpoint", "--rdzv_endpoint"),
        Use.HONOURED,
        f"of the static rendezvous it is where the ranks meet, as with --master-port; otherwise {_MESH}",
        default="",
    ),
    Option(("--rdzv-id", "--rdzv_id"), Use.HONOURED, default="none"),
    Option(("--rdzv-conf", "--rdzv_conf"), Use.HONOURED, default="", parse=RendezvousConf.parse),
    Option(("--standalone",), Use.HONOURED, default=False, type=bool),
    Option(
        ("--max-restarts", "--max_restarts"),
        Use.HONOURED,
        default=0,
        type=int,
        parse=_restarts,
    ),
    Option(
        ("--monitor-interval", "--monitor_interval"),
        Use.HONOURED,
        "exit codes arrive at once, which is within any interval",
        default=0.1,
        type=float,
        parse=_interval,
    ),
    Option(
        ("--start-method", "--start_method"),
        Use.IMPLIED,
        "torchrun, too, starts a script or a program as a process of its own and uses this for --run-path only",
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
    ),
    Option(
        ("--event-log-handler", "--event_log_handler"),
        Use.REFUSED,
        "the handlers get the events of torchelastic's agent, and no such agent takes part. Leave it out; "
        "the job's log has a line for each of its own events, and `events.jsonl` in the app's folder an entry",
        default="null",
    ),
    Option(("--role",), Use.HONOURED, default="default"),
    Option(("-m", "--module"), Use.HONOURED, default=False, type=bool),
    Option(("--no-python", "--no_python"), Use.HONOURED, default=False, type=bool),
    Option(
        ("--run-path", "--run_path"),
        Use.IMPLIED,
        "a script always runs in the interpreter that was started for its rank",
        default=False,
        type=bool,
    ),
    Option(("--log-dir", "--log_dir"), Use.HONOURED),
    Option(("-r", "--redirects"), Use.HONOURED, default="0", parse=Streams.parse),
    Option(("-t", "--tee"), Use.HONOURED, default="0", parse=Streams.parse),
    Option(
        ("--log-line-prefix-template", "--log_line_prefix_template"),
        Use.HONOURED,
        default="",
        since="2.14",
    ),
    Option(("--local-ranks-filter", "--local_ranks_filter"), Use.HONOURED, default="", parse=_local_ranks),
    Option(
        ("--duplicate-stdout-filters", "--duplicate_stdout_filters"),
        Use.HONOURED,
        default=(),
        type=_comma_separated_list,
    ),
    Option(
        ("--duplicate-stderr-filters", "--duplicate_stderr_filters"),
        Use.HONOURED,
        default=(),
        type=_comma_separated_list,
    ),
    Option(("--node-rank", "--node_rank"), Use.IMPLIED, "hosts are ranked by their replica id", default=0, type=int),
    Option(
        ("--master-addr", "--master_addr"),
        Use.HONOURED,
        "of hosts on several machines it is the address of replica 0, which the mesh knows",
        default="127.0.0.1",
    ),
    Option(("--master-port", "--master_port"), Use.HONOURED, type=int, parse=_port),
    Option(
        ("--local-addr", "--local_addr"),
        Use.HONOURED,
        "the address by which other hosts dial this one; on one machine there is none",
    ),
    Option(
        ("--logs-specs", "--logs_specs"),
        Use.REFUSED,
        "the plug-in gives torchelastic's agent files for the ranks to write, and here the host process reads what "
        "they print. Leave it out, and use --log-dir, --redirects, --tee and --duplicate-stdout-filters",
        env=False,
    ),
    Option(
        ("--numa-binding", "--numa_binding"),
        Use.HONOURED,
        choices=("node", "socket", "exclusive", "core-complex"),
        env=False,
    ),
    Option(
        ("--signals-to-handle", "--signals_to_handle"),
        Use.HONOURED,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        parse=_signal_names,
    ),
    Option(("--shutdown-timeout", "--shutdown_timeout"), Use.HONOURED, type=int),
    Option(("--virtual-local-rank", "--virtual_local_rank"), Use.HONOURED, default=False, type=bool),
)


@dataclass(frozen=True)
class TorchrunOptions:
    """torchrun's options as values, one field per option.

    Attributes:
        min_nodes, max_nodes: the two ends of ``--nnodes``.
        nproc_per_node: as typed: a number or ``auto``, ``gpu``, ``cpu``, ``xpu``. The host resolves it.
        local_ranks_filter: None shows every rank.
        shutdown_timeout: seconds; None leaves it to the environment or the default.
        unexpanded: names of the options whose value a shell has yet to expand: they hold their defaults here and are
            checked on the host. Always empty for a command that is not part of a shell string.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: str
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_id: str
    rdzv_conf: RendezvousConf
    standalone: bool
    max_restarts: int
    monitor_interval: float
    start_method: str
    event_log_handler: str
    role: str
    module: bool
    no_python: bool
    run_path: bool
    log_dir: str | None
    redirects: Streams
    tee: Streams
    log_line_prefix_template: str
    local_ranks_filter: frozenset[int] | None
    duplicate_stdout_filters: tuple[str, ...]
    duplicate_stderr_filters: tuple[str, ...]
    node_rank: int
    master_addr: str
    master_port: int | None
    local_addr: str | None
    logs_specs: str | None
    numa_binding: str | None
    signals_to_handle: str
    shutdown_timeout: int | None
    virtual_local_rank: bool
    unexpanded: frozenset[str] = frozenset()

    @property
    def static_endpoint(self) -> tuple[str, int] | None:
        """MASTER_ADDR and MASTER_PORT of torchrun's static rendezvous; port 0 where the user leaves it open.

        None for any other rendezvous, whose ports torchrun chooses (``run`` and ``get_rdzv_endpoint`` in
        ``torch.distributed.run``).

        Raises:
            ValueError: ``--rdzv-endpoint`` is not HOST:PORT.
        """
        if self.standalone or self.rdzv_backend != "static":
            return None
        if self.rdzv_endpoint:
            return parse_static_endpoint(self.rdzv_endpoint)
        if self.master_port is None and self.max_nodes == 1:
            return None
        return self.master_addr, self.master_port or 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"torchrun: {message}. See `torchrun --help`.")


class _Prints(argparse.Action):
    def __call__(self, *_: object) -> NoReturn:
        raise HelpRequested


def _build_parser() -> _Parser:
    # Values stay text here: what a shell has yet to expand has no type.
    parser = _Parser(prog="torchrun", add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action=_Prints, nargs=0)
    parser.add_argument("--print-completion", "--print_completion", action=_Prints)  # since torch 2.14
    for option in OPTIONS:
        parser.add_argument(*option.flags, action="store_true" if option.type is bool else "store")
    parser.add_argument("training_script")
    return parser


def parse_options(arguments: Sequence[str], env: Mapping[str, str]) -> tuple[TorchrunOptions, str, tuple[str, ...]]:
    """Read torchrun's command line, by its own rules (abbreviations, ``PET_*`` defaults, the rest after the script).

    Returns:
        The options, the training script (or module, or program) and its arguments.

    Raises:
        CommandError: an option that torchrun does not have, a value that it does not take, or no script.
        HelpRequested: ``--help`` or ``--print-completion`` is among the options.
    """
    given, unknown, end = _up_to_script(arguments)
    if unknown:
        raise CommandError(_unknown_option(unknown[0].partition("=")[0]))
    # argparse takes away one `--`: that before the script, or else the one right after it.
    if "--" not in arguments[:end] and list(arguments[end : end + 1]) == ["--"]:
        end += 1
    return _values(vars(given), env), given.training_script, tuple(arguments[end:])


def _up_to_script(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str], int]:
    """Parse no more than it takes to meet the script.

    argparse never sees the script's own arguments: before Python 3.12 it refuses an ambiguous abbreviation even among
    them (``torchrun train.py --nproc 4``).

    Returns:
        What is given, the options that torchrun does not have, and where the script's arguments start.
    """
    parser = _build_parser()
    for end in range(len(arguments)):
        try:
            return *parser.parse_known_args(arguments[:end]), end
        except CommandError:
            continue  # no script yet, or an option still without its value
    return *parser.parse_known_args(arguments), len(arguments)


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
        # As argparse does: a default that is a string is converted like a value.
        value = option.default if text is None else text
        values[option.dest] = option.convert(value, source) if isinstance(value, str) else value
    min_nodes, max_nodes = values.pop("nnodes")
    return TorchrunOptions(min_nodes=min_nodes, max_nodes=max_nodes, unexpanded=frozenset(unexpanded), **values)


def _unknown_option(flag: str) -> str:
    # Compared with as much of each name as was typed: --nprocs is meant to be --nproc-per-node, not --nnodes.
    typed = flag.strip("-").replace("_", "-")
    names = {option.name[2:][: len(typed)]: option.name for option in OPTIONS}
    near = difflib.get_close_matches(typed, names, n=1, cutoff=0.7)
    hint = f" Did you mean {names[near[0]]}?" if near else ""
    return f"torchrun has no option {flag}.{hint} See `torchrun --help`."


DEFAULTS = _values({}, {})
"""What every option is when neither the command line nor the environment says anything."""
